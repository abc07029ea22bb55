"""Tests of rampup.run.data.fingerprint; what changed data do to a run is in tests/faults."""

import pytest

from rampup.errors import DataError
from rampup.run.data.fingerprint import fingerprints


def test_names_are_below_the_shared_folder(tmp_path):
    """Files keep their names when all of them move, and files of the same name in two folders are two."""
    paths = [tmp_path / "x" / "a.txt", tmp_path / "y" / "a.txt"]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(str(number))
    found = fingerprints([str(path) for path in paths])
    assert list(found) == ["x/a.txt", "y/a.txt"]
    assert len(set(found.values())) == 2
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in paths:
        path.parent.rename(moved / path.parent.name)
    assert fingerprints([str(moved / "x" / "a.txt"), str(moved / "y" / "a.txt")]) == found


def test_no_files_have_no_fingerprint():
    """Made-up rows come from no file."""
    assert fingerprints([]) == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """A file that is gone is a DataError."""
    with pytest.raises(DataError, match="gone cannot be read"):
        fingerprints([str(tmp_path / "gone")])
