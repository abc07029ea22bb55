"""Tests of rampup.loop.run_folder."""

import json

import pytest

from rampup.errors import StorageError
from rampup.loop import run_folder as folders


@pytest.mark.parametrize("tail", ["", '{"step": 40, "te', '{"step": 40}'])
def test_a_resume_keeps_the_lines_before_it(tmp_path, tail):
    """Lines of later steps, and a last one that a crash has cut off, or only its end,
    are removed.
    """
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "text": "x" * (step % 5)} for step in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    assert list(folders.read_lines(path)) == lines
    for kept in (41, 40, 25, 24, 1, 0):
        folders.StepLog(path, keep_below=kept).close()
        assert path.read_text() == "".join(
            json.dumps(line) + "\n" for line in lines[:kept]
        )
    assert folders.first_and_last_line(path) == ({}, {})


def test_step_log_removes_damaged_lines_and_says_so(tmp_path):
    """A line that is not JSON with a step is reported once; a last line without its end
    is a crash's.
    """
    path, events = tmp_path / "metrics.jsonl", []
    lines = [f'{{"step": {step}}}\n'.encode() for step in range(8)]
    lines[2], lines[4], lines[7] = (
        b'{"st\xff\x00p": 2}\n',
        b'{"loss": 4}\n',
        b'{"step": 7, "lo',
    )
    path.write_bytes(b"".join(lines))
    for _ in range(2):
        folders.StepLog(path, keep_below=6, on_event=events.append).close()
        assert path.read_bytes() == b"".join(lines[step] for step in (0, 1, 3, 5))
    (event,) = events
    assert event.problem == (
        f"{path} is damaged: line 3 is not JSON with a step; such lines were removed"
    )
    path.write_bytes(lines[0] + b"\n")
    folders.StepLog(path, keep_below=6, on_event=events.append).close()
    assert path.read_bytes() == lines[0]
    assert "line 2 is not JSON" in events[1].problem


def test_step_log_notices_that_its_file_is_gone(tmp_path):
    """Lines in a file that was deleted, or that an editor replaced, are lost; a run
    must not end as if it had them.
    """
    log = folders.StepLog(tmp_path / "metrics.jsonl", keep_below=0)
    log.write({"step": 0})
    assert [line["step"] for line in folders.read_lines(log.path)] == [
        0
    ]  # a line can be read as soon as it is written
    log.sync()
    (tmp_path / "other").write_text("")
    (tmp_path / "other").replace(log.path)
    with pytest.raises(StorageError, match="deleted or replaced"):
        log.sync()
    log.close()
    (tmp_path / "folder" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"folder/metrics\.jsonl is a folder"):
        folders.StepLog(tmp_path / "folder" / "metrics.jsonl", keep_below=0)
