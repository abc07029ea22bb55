"""Tests of rampup.run.run_folder."""

import json

import pytest

from rampup.errors import ConfigError, StorageError
from rampup.run.run_folder import StepLog, read_lines, run_folder


def test_step_log_removes_lines_from_the_restored_step_on(tmp_path):
    """Lines of the restored step and later, and a line that a crash left incomplete, are removed; the rest stay."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": step}) + "\n" for step in range(5)) + '{"step": 5, "lo')
    log = StepLog(path, keep_below=3)
    log.write({"step": 3, "loss": 30})
    log.sync()
    log.close()
    assert [(line["step"], line["loss"]) for line in read_lines(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert list(tmp_path.iterdir()) == [path]


def test_step_log_flushes_each_line(tmp_path):
    """A line can be read as soon as it is written."""
    log = StepLog(tmp_path / "metrics.jsonl", keep_below=0)
    log.write({"step": 0})
    assert [line["step"] for line in read_lines(log.path)] == [0]
    log.close()


def test_step_log_notices_that_its_file_is_gone(tmp_path):
    """Lines in a file that was deleted, or that an editor replaced, are lost; a run must not end as if it had them."""
    log = StepLog(tmp_path / "metrics.jsonl", keep_below=0)
    log.write({"step": 0})
    log.sync()
    (tmp_path / "other").write_text("")
    (tmp_path / "other").replace(log.path)
    with pytest.raises(StorageError, match="deleted or replaced"):
        log.sync()
    log.close()


def test_step_log_refuses_what_is_no_file(tmp_path):
    """The error names the path."""
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be read"):
        StepLog(tmp_path / "metrics.jsonl", keep_below=0)


def test_run_folder_of_a_name_is_found_again(tmp_path):
    """A named run's folder is found again; runs without a name never share one."""
    assert run_folder(str(tmp_path), "mine") == run_folder(str(tmp_path), "mine") == tmp_path / "mine"
    assert len({run_folder(str(tmp_path / "deep" / "er"), "") for _ in range(3)}) == 3


def test_run_folder_refuses_what_cannot_be_created(tmp_path):
    """A file in the way is an error that names the key."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not a folder") as caught:
        run_folder(str(tmp_path), "file")
    assert caught.value.key == "run_name"
    with pytest.raises(ConfigError, match="cannot make the folder") as caught:
        run_folder(str(tmp_path / "file"), "x")
    assert caught.value.key == "base_output_directory"
