"""A disk that is full while a run writes its checkpoints and metrics: a real file
system of half a megabyte.
"""

import contextlib
import json
import os
import subprocess
import time
from unittest import mock

import pytest
from faults import toy_run
from helpers.runs import metrics_of

from rampup.cli import main
from rampup.errors import NonFiniteError, StorageError
from rampup.lm import train as lm
from rampup.loop.checkpoint import damage
from rampup.loop.events import StepDone, StorageFailed
from rampup.loop.metrics import MetricOptions, Metrics
from rampup.loop.run_folder import StepLog, read_lines


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a file system of its own with 512 KiB, where this machine lets
    tests mount one.
    """
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    try:
        mounted = (
            subprocess.run(command, capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Write until nothing more fits."""
    with (
        contextlib.suppress(OSError),
        open(folder / "filler", "wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(512))


class Filler:
    """A list of events that fills the disk at one step, but for some bytes, and frees
    it at another.
    """

    def __init__(self, folder, full_at, free_at=None, left=0):
        self.folder, self.full_at, self.free_at, self.left, self.problems = (
            folder,
            full_at,
            free_at,
            left,
            [],
        )

    def append(self, event):
        """Take an event."""
        if isinstance(event, StorageFailed):
            self.problems.append(event.problem)
        if isinstance(event, StepDone) and event.step == self.full_at:
            # An asynchronous checkpoint may still be on its way; it is the one to which
            # the run goes back.
            deadline = time.monotonic() + 60
            while (
                damage(self.folder / "checkpoints" / str(self.full_at)) != ""
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            fill(self.folder)
            os.truncate(
                self.folder / "filler",
                (self.folder / "filler").stat().st_size - self.left,
            )
        if isinstance(event, StepDone) and event.step == self.free_at:
            (self.folder / "filler").unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The metrics of a run with room to write."""
    folder = tmp_path_factory.mktemp("whole")
    toy_run.run(folder)
    return metrics_of(folder)


def test_the_run_stops_and_can_go_on(small_disk, whole):
    """By default the run stops, says what it could not write, keeps its checkpoint, and
    goes on when there is room.
    """
    with pytest.raises(StorageError, match=r"No space left|RESOURCE_EXHAUSTED|ENOSPC"):
        toy_run.run(small_disk, events=Filler(small_disk, 4), async_checkpointing=False)
    assert damage(small_disk / "checkpoints" / "4") == ""
    (small_disk / "filler").unlink()
    summary, _ = toy_run.run(small_disk)
    assert (summary.resumed_from, summary.steps) == (4, 12)
    assert metrics_of(small_disk) == whole


def test_lines_of_evaluations_wait_for_room(small_disk):
    """A flush writes them too."""
    metrics = Metrics(small_disk, 0, options=MetricOptions(), components=())
    fill(small_disk)
    lines = [{"step": step, "eval_loss": 0.5} for step in range(400)]
    for line in lines:
        metrics.write_eval(line)
    with pytest.raises(StorageError, match="No space left"):
        metrics.flush()
    (small_disk / "filler").unlink()
    metrics.flush()
    metrics.close()
    assert list(read_lines(small_disk / "eval.jsonl")) == lines


def test_a_full_disk_loses_no_line(small_disk):
    """A line that finds no room, or room for a part of it, is written whole with the
    next one. A resume only cuts the file, which needs no room; removing damaged lines
    does, and its error names the file.
    """
    path = small_disk / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    fill(small_disk)
    log = StepLog(path, keep_below=900)
    for step in range(900, 1800):
        log.write({"step": step})
    with pytest.raises(
        StorageError, match=r"metrics\.jsonl cannot be written: No space left"
    ):
        log.sync()
    assert [line["step"] for line in read_lines(path)][:900] == list(range(900))
    (small_disk / "filler").unlink()
    log.write({"step": 1800})
    log.sync()
    assert [line["step"] for line in read_lines(path)] == list(range(1801))
    fill(small_disk)
    log.close()
    with open(path, "r+b") as file:
        file.write(b"x")
    with pytest.raises(
        StorageError, match=r"metrics\.jsonl cannot be written: No space left"
    ):
        StepLog(path, keep_below=800)
    assert [line["step"] for line in read_lines(path)][:899] == list(range(1, 900))


@pytest.mark.parametrize(
    "error", [StorageError("no room"), NonFiniteError("not finite", steps=[1, 2])]
)
def test_the_command_line_says_it_in_a_sentence(capsys, monkeypatch, error):
    """What ends a run that was configured well is exit code 1, a sentence and the error
    as JSON, without a traceback.
    """
    monkeypatch.setattr(lm, "train", mock.Mock(side_effect=error))
    assert main(["train", "base.yml", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == type(error).__name__
    assert "Traceback" not in err
    assert str(error) in err
