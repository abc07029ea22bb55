"""Tests of rampup.loop.run_folder."""

import json
import math

import pytest

from rampup.errors import ConfigError, StorageError
from rampup.loop import run_folder as folders


@pytest.mark.parametrize("tail", [1, 7, 64, 2**20])
def test_lines_are_read_from_the_end(tmp_path, monkeypatch, tail):
    """Blocks of any length give the lines of the file backwards, and what a resume
    keeps does not depend on them.
    """
    monkeypatch.setattr(folders, "TAIL_BYTES", tail)
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "text": "x" * (step % 5)} for step in range(40)]
    # A crash may have cut off the last line, or only its end.
    path.write_text(
        "\n".join(
            [*map(json.dumps, lines), *(['{"step": 40, "te'] if tail < 64 else [])]
        )
    )
    assert list(folders.read_lines_backwards(path)) == lines[::-1]
    for kept in (40, 25, 24, 1, 0):
        folders.StepLog(path, keep_below=kept).close()
        assert path.read_text() == "".join(
            json.dumps(line) + "\n" for line in lines[:kept]
        )
    assert folders.first_and_last_line(path) == ({}, {})


def test_a_resume_reads_the_end_of_a_long_file(tmp_path):
    """Of a file of a terabyte without a line in front of the last megabyte, only the
    end is read.
    """
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(
            b"".join(
                b'\n{"step": %d, "skipped": true, "text": "%s"}' % (step, b"x" * 1000)
                for step in range(3000)
            )
        )
    assert next(folders.read_lines_backwards(path))["step"] == 2999
    folders.StepLog(path, keep_below=2000).close()
    assert next(folders.read_lines_backwards(path))["step"] == 1999
    *_, last = (
        line
        for line, _ in zip(folders.read_lines_backwards(path), range(10), strict=False)
    )
    assert last["step"] == 1990


def test_step_log_moves_damaged_lines_aside_and_says_so(tmp_path):
    """A line that is not JSON with a step is kept in another file and reported; a last
    line without its end is a crash's.
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
    assert event.problem.startswith(
        f"{path} is damaged: lines 3, 5 are not JSON with a step; moved to"
        f" {tmp_path}/damaged_"
    )
    path.write_bytes(lines[0] + b"\n")
    folders.StepLog(path, keep_below=6, on_event=events.append).close()
    assert (tmp_path / "damaged_metrics.jsonl").read_bytes() == lines[2] + lines[
        4
    ] + b"\n"
    assert "line 2 is not JSON" in events[1].problem


def test_gaps_in_the_lines_are_named(tmp_path):
    """Each range of steps without a line, also at both ends of a file and if there is
    none; and steps that stand there twice.
    """
    path = tmp_path / "metrics.jsonl"
    assert folders.describe_gaps(path, 0) == ""
    assert (
        folders.describe_gaps(path, 20)
        == f"{path} has no line of steps 0 to 19, which came before this start"
    )
    path.write_text(
        "".join(f'{{"step": {step}}}\n' for step in range(15) if step not in (0, 7, 8))
    )
    assert folders.describe_gaps(path, 20).startswith(
        f"{path} has no line of step 0, steps 7 to 8, steps 15 to 19, which"
    )
    path.write_text("".join(f'{{"step": {step // 2}}}\n' for step in range(40)))
    assert folders.describe_gaps(path, 20).endswith(
        "has more than one line of steps 0 to 19"
    )


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
    with pytest.raises(StorageError, match=r"folder/metrics\.jsonl cannot be read"):
        folders.StepLog(tmp_path / "folder" / "metrics.jsonl", keep_below=0)


def test_run_folder_of_a_name_is_found_again(tmp_path):
    """A named run's folder is found again; runs without a name never share one; a file
    in the way is an error with its key.
    """
    assert (
        folders.run_folder(str(tmp_path), "mine")
        == folders.run_folder(str(tmp_path), "mine")
        == tmp_path / "mine"
    )
    assert (
        len({folders.run_folder(str(tmp_path / "deep" / "er"), "") for _ in range(3)})
        == 3
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not a folder") as caught:
        folders.run_folder(str(tmp_path), "file")
    assert caught.value.key == "run_name"
    with pytest.raises(ConfigError, match="cannot make the folder") as caught:
        folders.run_folder(str(tmp_path / "file"), "x")
    assert caught.value.key == "base_output_directory"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="no free folder name in "):
        folders.run_folder(str(tmp_path / "link"), "")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # The first step and steps that compiled are ignored if there are others.
        ([(8, 1), (8, 100), (8, 300), (8, 200)], {8: 200}),
        ([(8, 1), (16, 2, 3.0), (16, 500.5), (32, 7, 3.0)], {8: 1, 16: 500.5, 32: 7}),
        # Values that are not numbers, and impossible ones.
        (
            [
                (8, 9),
                (8, None),
                (True, 5),
                (8, -1),
                (8, 0),
                (8.5, 3),
                (8, math.nan),
                (8, math.inf),
                (8, 100),
            ],
            {8: 100},
        ),
    ],
)
def test_measured_throughput_is_the_median_of_each_batch_size(tmp_path, rows, expected):
    """A row has a batch, its tokens per second and, if it compiled, the time for that;
    a torn line is no step.
    """
    names = ("global_batch_size", "tokens_per_second", "compile_seconds")
    lines = [
        json.dumps({"step": step, **dict(zip(names, row, strict=False))})
        for step, row in enumerate(rows)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join([*lines, "[1]", "{}", '{"step": 9, "global_ba'])
    )
    assert folders.measured_throughput(tmp_path) == expected


@pytest.mark.parametrize("content", [None, "", "{}", "nonsense", "[" * 100_000])
def test_measured_throughput_refuses_a_run_without_any(tmp_path, content):
    """No folder, no file, and a file without a throughput are errors that name it."""
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl") as caught:
        folders.measured_throughput(tmp_path)
    assert caught.value.key == "measured"
