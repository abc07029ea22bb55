"""Damaged checkpoints are noticed and named, and the one before is used."""

import os
import random
import shutil

import pytest
from faults import toy_run
from helpers.runs import metrics_of

from rampup.errors import ResumeMismatchError, StorageError
from rampup.loop import checkpoint
from rampup.loop.checkpoint import CHECKSUMS_FILE, damage
from rampup.loop.events import CheckpointDamaged
from rampup.loop.run_folder import DAMAGED_FOLDER


def files_of(checkpoint):
    """Return every file of a checkpoint."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole")
    toy_run.run(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the run."""
    return shutil.copytree(whole, tmp_path / "copy")


def flip(path, seed=0):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(content))
    content[place] ^= 1 << seed % 8
    path.write_bytes(content)


def cut(path):
    """Leave half of a file."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    "harm", [flip, cut, os.remove], ids=["flipped", "truncated", "deleted"]
)
def test_the_checkpoint_before_a_damaged_one_is_used(whole, folder, harm):
    """Whatever happens to its largest file, the newest checkpoint is named and kept
    aside, and the run ends the same.
    """
    harm(
        max(
            files_of(folder / "checkpoints" / "12"),
            key=lambda path: path.stat().st_size,
        )
    )
    (folder / "checkpoints" / "99").mkdir()
    events = []
    summary, _ = toy_run.run(folder, events=events)
    assert (summary.resumed_from, summary.steps) == (8, 12)
    assert events.pop(0).problem == (
        f"{CHECKSUMS_FILE} cannot be read: No such file or directory"
    )
    assert isinstance(events[0], CheckpointDamaged)
    assert (events[0].steps, events[0].used) == (12, 8)
    assert metrics_of(folder) == metrics_of(whole)
    assert events[0].moved_to == folder / DAMAGED_FOLDER / "12"
    assert (folder / DAMAGED_FOLDER / "12").is_dir()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "12",
        "4",
        "8",
    ]
    assert damage(folder / "checkpoints" / "12") == ""


def test_every_file_of_a_checkpoint_is_watched(whole, tmp_path):
    """One bit, half a file or a whole file gone: each file with a part of the state or
    the record is noticed by its name.
    """
    for number, path in enumerate(files_of(whole / "checkpoints" / "12")):
        for harm in (
            lambda path: flip(path, number),  # noqa: B023
            cut,
            os.remove,
        ):
            folder = tmp_path / "copy"
            shutil.copytree(whole / "checkpoints" / "12", folder)
            name = path.relative_to(whole / "checkpoints" / "12")
            harm(folder / name)
            problem = damage(folder)
            shutil.rmtree(folder)
            if name.as_posix() not in ("commit_success.txt", "_CHECKPOINT_METADATA"):
                assert problem is not None, name
                assert (
                    name.as_posix() == CHECKSUMS_FILE
                    or name.as_posix() in problem
                    or CHECKSUMS_FILE in problem
                )


@pytest.mark.parametrize("name", ["commit_success.txt", "_CHECKPOINT_METADATA"])
@pytest.mark.parametrize(
    "harm", [flip, cut, os.remove], ids=["flipped", "truncated", "deleted"]
)
def test_what_holds_no_state_does_no_harm(whole, folder, name, harm):
    """Damage to what is not part of the state changes nothing, and ends in no
    traceback.
    """
    if not (folder / "checkpoints" / "12" / name).exists():
        pytest.skip(f"this version of Orbax writes no {name}")
    harm(folder / "checkpoints" / "12" / name)
    summary, _ = toy_run.run(folder)
    assert summary.steps == 12
    assert metrics_of(folder) == metrics_of(whole)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", "null", '{"a": 1}', '{"a": [1]}', "[" * 100_000, b"\xff\xfe"],
)
def test_broken_checksums_are_damage(folder, content):
    """Whatever stands in the file of checksums, there is an answer and no other
    exception; and a file too many is noticed.
    """
    (folder / "checkpoints" / "12" / "state" / "more").write_text("x")
    assert "state/more was not written with it" in damage(folder / "checkpoints" / "12")
    path = folder / "checkpoints" / "12" / CHECKSUMS_FILE
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert damage(folder / "checkpoints" / "12")


def test_all_damaged_is_an_error_and_nothing_is_deleted(whole, folder):
    """With no checkpoint left that is whole, each is named with what is wrong, and
    everything stays where it is.
    """
    for step in (4, 8, 12):
        cut(
            max(
                files_of(folder / "checkpoints" / str(step)),
                key=lambda path: path.stat().st_size,
            )
        )
    before = sorted(path for path in folder.rglob("*"))
    with pytest.raises(
        ResumeMismatchError, match="every checkpoint is damaged, and none is deleted"
    ) as caught:
        toy_run.run(folder)
    assert (
        "train in another folder (run_name of a configuration, folder of a Loop)"
        in (str(caught.value))
    )
    assert all(f"checkpoints/{step}: " in str(caught.value) for step in (4, 8, 12))
    assert sorted(path for path in folder.rglob("*")) == before
    assert metrics_of(folder) == metrics_of(whole)


def test_a_refused_record_moves_nothing(folder):
    """A run that the checkpoint before does not belong to leaves the damaged one where
    it is.
    """
    cut(
        max(
            files_of(folder / "checkpoints" / "12"),
            key=lambda path: path.stat().st_size,
        )
    )
    with pytest.raises(
        ResumeMismatchError, match=r"who: 'toy' in the checkpoint.*\n.*folder of a Loop"
    ):
        toy_run.run(folder, identity={"who": "else"})
    assert (folder / "checkpoints" / "12").is_dir()
    assert not (folder / DAMAGED_FOLDER).exists()


@pytest.fixture
def full_disk(monkeypatch):
    """Steps whose checkpoints cannot be written: their checksums fail, as on a full
    disk.
    """
    steps, inner = set(), checkpoint.write_checksums

    def write(folder, **options):
        if int(folder.name.split(".")[0]) in steps:
            raise ValueError("RESOURCE_EXHAUSTED: Error writing ... " + "long " * 200)
        inner(folder, **options)

    monkeypatch.setattr(checkpoint, "write_checksums", write)
    return steps


def test_a_checkpoint_that_cannot_be_written_stops_the_run(tmp_path, full_disk):
    """The step, the reason and the newest good checkpoint are said, and the run goes on
    from there when there is room.
    """
    full_disk.add(8)
    at = tmp_path / "checkpoints"
    with pytest.raises(StorageError) as caught:
        toy_run.run(tmp_path)
    reason = f"No space left on device in {at}; the newest is {at / '4'}"
    assert (
        str(caught.value) == f"the checkpoint of step 8 could not be written: {reason}"
    )
    full_disk.clear()
    assert toy_run.run(tmp_path)[0].resumed_from == 4


def test_the_only_checkpoint_stays_if_the_next_one_fails(tmp_path, full_disk):
    """Also where one is kept, the one before is deleted only after it."""
    full_disk.add(8)
    with pytest.raises(StorageError, match="step 8 could not be written"):
        toy_run.run(tmp_path, max_to_keep=1, async_checkpointing=False)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    assert damage(tmp_path / "checkpoints" / "4") == ""
