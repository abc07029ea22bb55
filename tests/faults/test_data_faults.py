"""Data goes bad: an error that names file and row, or the documented behaviour; never a
hang.
"""

import os
import threading

import jax
import numpy as np
import pytest
from faults import toy_run
from helpers.runs import metrics_of
from helpers.tiny import TINY_MODEL
from helpers.toy import open_rows

from rampup import Config, build_plan
from rampup.data import files
from rampup.data.batches import SampleOrder, step_batches
from rampup.data.files import fingerprints
from rampup.data.sources import ItemRows, files_of
from rampup.errors import DataError, ResumeMismatchError
from rampup.lm import train as lm


@pytest.fixture
def tokens(tmp_path):
    """Return a folder of three files of tokens, .bin and .npy."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        (np.arange(4000) % 250 + number).astype("<u2").tofile(folder / f"{number}.bin")
    np.save(folder / "2.npy", (np.arange(4000) % 250).astype(np.uint16))
    return folder


class Rows(ItemRows):
    """Rows of which one cannot be read."""

    def __init__(self, bad=None, error=None):
        super().__init__(toy_run.rows())
        self.bad, self.error = bad, error

    def read(self, rows):
        """Return the rows, or fail as storage does."""
        if self.bad in rows.tolist():
            raise self.error
        return super().read(rows)

    def describe(self, row):
        """Name the row."""
        return f"shard {row // 100} row {row}"


def test_a_row_that_fails_is_named_and_nothing_before_it_is_lost(tmp_path):
    """The source's own exception in a reading thread becomes an error with file and
    row; all steps before are checkpointed.
    """
    plan = toy_run.parts()[1]
    bad = plan.rows(7)[3]
    with pytest.raises(
        DataError,
        match=rf"shard {bad // 100} row {bad} cannot be read: Input/output error",
    ):
        toy_run.run(tmp_path, source=Rows(bad, OSError(5, "Input/output error")))
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(7))
    summary, state = toy_run.run(tmp_path, source=Rows())
    assert summary.resumed_from == 7
    toy_run.assert_equal(state, toy_run.run(tmp_path / "whole", source=Rows())[1])


@pytest.mark.parametrize("given", [None, 0, 1, 15, 17])
def test_a_source_that_gives_another_number_of_rows_is_refused(given):
    """Too few or too many rows are never taken for the batch, and rows that fail only
    together are an error too.
    """

    def read(rows):
        if given is None and len(rows) > 1:
            raise MemoryError("too many")
        return np.zeros((len(rows) if given is None else given, 3))

    (mesh, plan, _), source = toy_run.parts(), Rows()
    source.read = read
    words = (
        r"\.\.\. cannot be read: MemoryError"
        if given is None
        else "the source was asked for 16 rows, from shard 0 row 0 on"
    )
    with pytest.raises(DataError, match=words):
        next(step_batches(source, plan, mesh))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_reading_thread_reaches_the_caller(error):
    """Even what is no Exception does not leave the caller waiting."""
    mesh, plan, _ = toy_run.parts()
    done = []

    def work():
        try:
            list(step_batches(Rows(40, error), plan, mesh))
        except BaseException as caught:  # noqa: BLE001 - that is the point
            done.append(caught)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(done[0], error)


def test_the_end_of_the_data_in_mid_step():
    """With num_epoch the data must suffice for whole steps, one row less is refused
    before any work, with what is enough.
    """
    mesh, plan, _ = toy_run.parts()
    needed = plan.consumed_samples
    assert (
        len(list(step_batches(range(needed), plan, mesh, num_epochs=1)))
        == toy_run.STEPS
    )
    for number, epochs in ((needed - 1, 2), (100, 4)):
        words = (
            f"consumes {needed} samples, but num_epoch=1 of {number} rows have {number};"
            f" set num_epoch={epochs} or -1"
        )
        with pytest.raises(DataError, match=words) as caught:
            next(step_batches(range(number), plan, mesh, num_epochs=1))
        assert (caught.value.key, caught.value.nearest) == ("num_epoch", (epochs, -1))
        assert (
            len(list(step_batches(range(number), plan, mesh, num_epochs=epochs)))
            == toy_run.STEPS
        )
    with pytest.raises(DataError, match="no rows"):
        next(step_batches([], plan, mesh))
    with pytest.raises(DataError, match="data_shuffle_seed=null"):
        SampleOrder(2**32, seed=0)


def overwrite(path, start, new):
    """Change some bytes of a file."""
    content = bytearray(path.read_bytes())
    content[start : start + len(new)] = new
    path.write_bytes(content)


# What is done to the files: its name -> a function of the folder, and the message.
BEFORE = r"1\.bin: 8000 bytes, SHA-256 (\w+) in the checkpoint, "
ON_RESUME = {
    "missing": (lambda at: (at / "1.bin").unlink(), BEFORE + "no such file here"),
    "cut": (
        lambda at: os.truncate(at / "1.bin", 4000),
        BEFORE + r"4000 bytes, SHA-256 \w+ here",
    ),
    "changed": (
        lambda at: overwrite(at / "1.bin", 4000, b"\xff"),
        BEFORE + r"8000 bytes, SHA-256 (?!\1)\w+ here",
    ),
    "more": (
        lambda at: np.arange(100, dtype="<u2").tofile(at / "3.bin"),
        r"3\.bin: no such file in the checkpoint, 200 bytes",
    ),
    # The pattern does not count a folder.
    "folder": (
        lambda at: ((at / "1.bin").unlink(), (at / "1.bin").mkdir()),
        BEFORE + "no such file here",
    ),
}


def test_a_run_knows_what_its_data_are(tokens):
    """The language model has the fingerprint of every file of training data."""
    paths = {"dataset_type": "tokens", "grain_train_files": str(tokens / "*")}
    config = Config(steps=6, per_device_batch_size=2, **TINY_MODEL | paths)
    known = fingerprints([str(path) for path in sorted(tokens.iterdir())])
    assert (
        lm.Run.from_config(config, build_plan(config, jax.device_count())).data == known
    )


@pytest.mark.parametrize(("harm", "words"), ON_RESUME.values(), ids=ON_RESUME)
def test_every_change_of_the_data_is_named(tmp_path, tokens, harm, words):
    """Files that are missing, cut, changed, new or hidden: the checkpoint before is
    refused with their names.
    """

    def content():
        rows, _ = open_rows("tokens", str(tokens / "*"), length=16)
        return {"data": fingerprints(files_of(rows))}

    toy_run.run(tmp_path / "run", identity=content())
    harm(tokens)
    with pytest.raises(ResumeMismatchError, match=words):
        toy_run.run(tmp_path / "run", identity=content())


def test_a_file_cut_short_while_it_is_read_is_no_crash(tokens):
    """Where a memory map would end the process, the row and the file are named."""
    rows, _ = open_rows("tokens", str(tokens / "*"), length=16)
    os.truncate(tokens / "0.bin", 4000)
    assert rows.read(np.arange(100))["tokens"].shape == (100, 17)
    with pytest.raises(
        DataError,
        match=(
            r"0\.bin from token 3,200 \(row 200\): .*0\.bin ends at byte 4,000: it was"
            r" truncated"
        ),
    ):
        rows.read(np.array([100, 200]))


def test_large_files_are_known_by_their_blocks(tmp_path, monkeypatch):
    """Of a file that is too large to be read whole, size, first, last and evenly spread
    blocks count.
    """
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    path = tmp_path / "large"
    content = np.random.default_rng(0).bytes(100_000)
    path.write_bytes(content)
    first = fingerprints([str(path)])
    for change in (0, 99_999, (100_000 - 10) // 7 * 5 + 5):
        overwrite(path, change, bytes([content[change] ^ 1]))
        assert fingerprints([str(path)]) != first
        path.write_bytes(content)
        assert fingerprints([str(path)]) == first
    path.write_bytes(content[:-1])
    assert fingerprints([str(path)]) != first
    # Every byte of a file that is not larger than all blocks counts.
    for size in (1, 35, 80):
        path.write_bytes(content[:size])
        known = fingerprints([str(path)])
        for change in range(size):
            overwrite(path, change, bytes([content[change] ^ 1]))
            assert fingerprints([str(path)]) != known
            path.write_bytes(content[:size])
