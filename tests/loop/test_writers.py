"""Tests of the writers in rampup.loop.metrics."""

import errno
import sys
from unittest import mock

import pytest
from helpers.toy import tensorboard_events

from rampup.errors import MissingDependencyError, StorageError
from rampup.loop.metrics import TensorBoardWriter, WandbWriter, required


def test_tensorboard_gets_every_number_and_forgets_what_a_resumed_run_does_again(
    tmp_path,
):
    """Event files hold the scalars by step; those from the step that a resumed run
    starts with replace the old ones.
    """
    first = TensorBoardWriter(tmp_path)
    for step in range(4):
        first.write_scalars(step, {"loss": 4.0 - step, "phase": 0.0})
    first.flush()
    first.close()
    second = TensorBoardWriter(tmp_path, start=2)
    second.write_scalars(2, {"loss": 2.5})
    second.close()
    losses = [
        (step, value)
        for step, tag, value in tensorboard_events(tmp_path)
        if tag == "loss"
    ]
    assert losses == [(0, 4.0), (1, 3.0), (2, 2.5)]


def test_a_full_disk_is_told(tmp_path):
    """What could not be written is an error of the flush; what was written stays."""
    from tensorboardX.record_writer import RecordWriter

    writer = TensorBoardWriter(tmp_path)
    writer.write_scalars(0, {"loss": 1.0})
    writer.flush()
    with mock.patch.object(
        RecordWriter,
        "write",
        side_effect=OSError(errno.ENOSPC, "No space left on device"),
    ):
        writer.write_scalars(1, {"loss": 2.0})
        with pytest.raises(StorageError, match="No space left on device"):
            writer.flush()
    writer.close()
    assert [(step, value) for step, _, value in tensorboard_events(tmp_path)] == [
        (0, 1.0)
    ]


def test_a_folder_that_cannot_be_written_is_told_at_the_start(tmp_path):
    """It is one sentence with the folder, before a step is trained."""
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match="file/tensorboard cannot be written: Not a directory"
    ):
        TensorBoardWriter(tmp_path / "file" / "tensorboard")
    from tensorboardX.record_writer import RecordWriter

    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(RecordWriter, "__init__", side_effect=full),
        pytest.raises(StorageError, match="cannot be written: No space left"),
    ):
        TensorBoardWriter(tmp_path)


def test_wandb_goes_on_as_the_same_run(tmp_path, monkeypatch):
    """The run is known by its folder's name, steps are ours, and its end is told. The
    package needs an account.
    """
    fake = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    writer = WandbWriter(tmp_path / "ramp", project="p", config={"steps": 3})
    writer.write_scalars(7, {"loss": 1.5})
    writer.flush()
    writer.close()
    options = {
        "project": "p",
        "id": "ramp",
        "name": "ramp",
        "resume": "allow",
        "config": {"steps": 3},
    }
    assert fake.init.call_args.kwargs.items() >= options.items()
    call = mock.call
    steps = [
        call.define_metric("step", hidden=True),
        call.define_metric("*", step_metric="step"),
    ]
    assert fake.init.return_value.mock_calls == [
        *steps,
        call.log({"loss": 1.5, "step": 7}),
        call.finish(),
    ]


@pytest.mark.parametrize(
    ("package", "key"),
    [("tensorboardX", "enable_tensorboard"), ("wandb", "wandb_project")],
)
def test_a_missing_package_is_named_with_its_key(monkeypatch, package, key):
    """The error says which key asks for the package and how to install it."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingDependencyError,
        match=f"{package}, for {key} .* is not installed: pip install 'rampup\\[",
    ) as caught:
        required(package)
    assert caught.value.key == key
