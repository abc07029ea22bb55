"""Data goes bad: an error that names file and row, or the documented behaviour; never a hang."""

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
from rampup.data.batches import step_batches
from rampup.data.files import fingerprints
from rampup.data.sources import files_of
from rampup.errors import DataError, ResumeMismatchError
from rampup.lm import train as lm

SETTINGS = TINY_MODEL | {"steps": 6, "per_device_batch_size": 2, "checkpoint_period": 2, "dataset_type": "tokens"}


@pytest.fixture
def tokens(tmp_path):
    """Return a folder of three files of tokens, .bin and .npy."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        (np.arange(4000) % 250 + number).astype("<u2").tofile(folder / f"{number}.bin")
    np.save(folder / "2.npy", (np.arange(4000) % 250).astype(np.uint16))
    return folder


def config(tmp_path, **changes):
    """Return a configuration that reads the folder of tokens."""
    paths = {"grain_train_files": str(tmp_path / "data" / "*"), "base_output_directory": str(tmp_path / "runs")}
    return Config(run_name="run", jax_cache_dir=None, **(SETTINGS | paths | changes))


class Rows:
    """A source whose rows go wrong in one way or another."""

    def __init__(self, bad=None, action=None, read=None):
        self.rows, self.bad, self.action, self.own_read = toy_run.rows(), bad, action, read

    def __len__(self):
        return len(self.rows)

    def read(self, rows):
        """Return the rows, unless the bad one is among them."""
        if self.own_read:
            return self.own_read(rows)
        if self.action and self.bad in rows.tolist():
            self.action()
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(self.rows[row] for row in rows))

    def describe(self, row):
        """Name the row."""
        return f"shard {row // 100} row {row}"


def raising(error):
    """Return a function that fails as storage does."""

    def fail():
        raise error

    return fail


def test_a_row_that_fails_is_named_and_nothing_before_it_is_lost(tmp_path):
    """The source's own exception in a reading thread becomes an error with file and row; all steps before are checkpointed."""
    plan = toy_run.parts()[1]
    bad = plan.rows(7)[3]
    with pytest.raises(DataError, match=rf"shard {bad // 100} row {bad} cannot be read: OSError\(5"):
        toy_run.run(tmp_path, source=Rows(bad, raising(OSError(5, "Input/output error"))))
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(7))
    summary, state = toy_run.run(tmp_path, source=Rows())
    assert summary.resumed_from == 7
    _, whole = toy_run.run(tmp_path / "whole", source=Rows())
    toy_run.assert_equal(state, whole)


@pytest.mark.parametrize("given", [None, 0, 1, 15, 17])
def test_a_source_that_gives_another_number_of_rows_is_refused(given):
    """Too few or too many rows are never taken for the batch, and rows that fail only together are an error too."""

    def read(rows):
        if given is None and len(rows) > 1:
            raise MemoryError("too many")
        return np.zeros((given or len(rows) * (given is None), 3))

    mesh, plan, _ = toy_run.parts()
    words = "cannot be read together: MemoryError" if given is None else "16 rows were requested, from shard 0 row 0 on"
    with pytest.raises(DataError, match=words):
        next(step_batches(Rows(read=read), plan, mesh))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_reading_thread_reaches_the_caller(error):
    """Even what is no Exception does not leave the caller waiting."""
    mesh, plan, _ = toy_run.parts()
    done = []

    def work():
        try:
            list(step_batches(Rows(40, raising(error)), plan, mesh))
        except BaseException as caught:  # noqa: BLE001 - that is the point
            done.append(caught)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(done[0], error)


def test_the_end_of_the_data_in_mid_step():
    """With num_epoch the data must suffice for whole steps, one row less is refused before any work, with what is enough."""
    mesh, plan, _ = toy_run.parts()
    needed = plan.consumed_samples
    assert len(list(step_batches(range(needed), plan, mesh, num_epochs=1))) == toy_run.STEPS
    with pytest.raises(DataError, match=f"consumes {needed} samples, but num_epoch=1 of {needed - 1} rows") as caught:
        next(step_batches(range(needed - 1), plan, mesh, num_epochs=1))
    assert caught.value.key == "num_epoch"
    assert len(list(step_batches(range(needed - 1), plan, mesh, num_epochs=caught.value.nearest[0]))) == toy_run.STEPS


def overwrite(path, start, new):
    """Change some bytes of a file."""
    content = bytearray(path.read_bytes())
    content[start : start + len(new)] = new
    path.write_bytes(content)


# What is done to the files: its name -> a function of the folder, and the message.
AT_START = {
    "empty": (lambda at: (at / "1.bin").write_bytes(b""), r"1\.bin cannot be read as tokens: 0 bytes"),
    "truncated": (lambda at: os.truncate(at / "1.bin", 4001), r"1\.bin cannot be read as tokens: 4,001 bytes"),
    "header": (lambda at: overwrite(at / "2.npy", 0, b"random"), r"2\.npy cannot be read as tokens"),
    "npy": (lambda at: os.truncate(at / "2.npy", 4000), r"2\.npy cannot be read as tokens"),
    "link": (lambda at: ((at / "1.bin").unlink(), (at / "1.bin").symlink_to("nowhere")), r"1\.bin, which is a broken link"),
    # From a pipe, reading would never end.
    "pipe": (lambda at: ((at / "1.bin").unlink(), os.mkfifo(at / "1.bin")), r"1\.bin, which is not a regular file"),
}
BEFORE = r"1\.bin: 8000 bytes, SHA-256 (\w+) in the checkpoint, "
ON_RESUME = {
    "missing": (lambda at: (at / "1.bin").unlink(), BEFORE + "no such file here"),
    "cut": (lambda at: os.truncate(at / "1.bin", 4000), BEFORE + r"4000 bytes, SHA-256 \w+ here"),
    "changed": (lambda at: overwrite(at / "1.bin", 4000, b"\xff"), BEFORE + r"8000 bytes, SHA-256 (?!\1)\w+ here"),
    "more": (lambda at: np.arange(100, dtype="<u2").tofile(at / "3.bin"), r"3\.bin: no such file in the checkpoint, 200 bytes"),
    # The pattern does not count a folder.
    "folder": (lambda at: ((at / "1.bin").unlink(), (at / "1.bin").mkdir()), BEFORE + "no such file here"),
}


@pytest.mark.parametrize(("harm", "words"), AT_START.values(), ids=AT_START)
def test_files_that_cannot_be_read_are_refused_by_name(tokens, harm, words):
    """Each broken file is named when the run starts, with what is wrong with it."""
    harm(tokens)
    with pytest.raises(DataError, match=words):
        open_rows("tokens", str(tokens / "*"), length=16)


def test_a_run_knows_what_its_data_are(tmp_path, tokens):
    """The language model has the fingerprint of every file of training data; the files may move."""
    settings = config(tmp_path)
    known = fingerprints([str(path) for path in sorted(tokens.iterdir())])
    assert lm.Run.from_config(settings, build_plan(settings, jax.device_count())).data == known
    assert list(known) == ["0.bin", "1.bin", "2.npy"]
    moved = tokens.rename(tmp_path / "moved")
    assert fingerprints([str(path) for path in sorted(moved.iterdir())]) == known


@pytest.mark.parametrize(("harm", "words"), ON_RESUME.values(), ids=ON_RESUME)
def test_every_change_of_the_data_is_named(tmp_path, tokens, harm, words):
    """Files that are missing, cut, changed, new or hidden: the checkpoint before is refused with their names."""

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
    with pytest.raises(DataError, match=r"0\.bin from token 3,200 \(row 200\): .*0\.bin ends at byte 4,000: it was truncated"):
        rows.read(np.array([100, 200]))


def test_large_files_are_known_by_their_blocks(tmp_path, monkeypatch):
    """Of a file that is too large to be read whole, size, first, last and evenly spread blocks count."""
    monkeypatch.setattr(files, "FULL_HASH_BYTES", 1000)
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    path = tmp_path / "large"
    content = bytearray(np.random.default_rng(0).bytes(100_000))
    path.write_bytes(content)
    (first,) = fingerprints([str(path)]).values()
    for change in (0, 99_999, (100_000 - 10) // 63 * 5 + 5):
        changed = content.copy()
        changed[change] ^= 1
        path.write_bytes(changed)
        assert list(fingerprints([str(path)]).values()) != [first]
    path.write_bytes(content[:-1])
    assert list(fingerprints([str(path)]).values()) != [first]
    path.write_bytes(content)
    assert list(fingerprints([str(path)]).values()) == [first]
