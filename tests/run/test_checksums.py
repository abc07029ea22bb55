"""Tests of rampup.run.checksums; what damage does to a run is in tests/faults."""

from rampup.run.checksums import CHECKSUMS_FILE, damage, write_checksums


def test_what_is_added_later_is_no_damage(tmp_path):
    """Files that are completed after the checksums do not count, and the same names deeper down do."""
    (tmp_path / "state").mkdir()
    for name in ("a", "state/b", "_CHECKPOINT_METADATA", "state/commit_success.txt"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path)
    (tmp_path / "commit_success.txt").write_text("x")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("other")
    assert damage(tmp_path) is None
    (tmp_path / "state" / "commit_success.txt").write_text("other")
    assert damage(tmp_path) == "state/commit_success.txt has 5 bytes, not 24"


def test_each_kind_of_damage_has_its_words(tmp_path):
    """Missing, shorter, changed, unreadable, and no checksums at all."""
    (tmp_path / "a").write_text("one")
    write_checksums(tmp_path)
    (tmp_path / "a").write_text("two")
    assert damage(tmp_path) == "a is not what was written: its SHA-256 differs"
    (tmp_path / "a").unlink()
    assert damage(tmp_path) == "a is missing"
    (tmp_path / "a").mkdir()
    assert damage(tmp_path).startswith("a cannot be read: ")
    (tmp_path / CHECKSUMS_FILE).unlink()
    assert damage(tmp_path) == f"{CHECKSUMS_FILE} is missing"
