"""Tests of rampup.show.measured."""

import json

import pytest

from rampup.errors import ConfigError
from rampup.show.measured import measured_throughput


def write(folder, *records):
    """Write a run's metrics; what is no dictionary is written as it stands."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def line(step, size, rate, **more):
    """Return one line of metrics."""
    return {"step": step, "global_batch_size": size, "tokens_per_second": rate, **more}


def test_the_median_of_each_batch_size(tmp_path):
    """The first step and steps that compiled are left out where there are others."""
    run = write(
        tmp_path,
        line(0, 8, 1),
        line(1, 8, 100),
        line(2, 8, 300),
        line(3, 8, 200),
        line(4, 16, 2, compile_seconds=3.0),
        line(5, 16, 500.5),
        line(6, 32, 7, compile_seconds=3.0),
    )
    assert measured_throughput(run) == {8: 200, 16: 500.5, 32: 7}


def test_lines_that_say_nothing_are_passed_over(tmp_path):
    """A torn line, other values than numbers, and throughputs that cannot be."""
    run = write(
        tmp_path,
        line(0, 8, 100),
        "[1]",
        "{}",
        line(1, 8, None),
        line(2, True, 5),
        line(3, 8, -1),
        line(4, 8, 0),
        line(5, 8.5, 3),
        '{"global_batch_size": 8, "tokens_per_second": NaN}',
        '{"global_batch_size": 8, "tokens_per_second": Infinity}',
        '{"step": 9, "global_ba',
    )
    assert measured_throughput(run) == {8: 100}


@pytest.mark.parametrize("content", [None, "", "{}", "nonsense", "[" * 100_000])
def test_nothing_measured(tmp_path, content):
    """No folder, no file, and a file without a throughput are errors that name it."""
    if content is not None:
        write(tmp_path, content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl") as caught:
        measured_throughput(tmp_path)
    assert caught.value.key == "measured"
    with pytest.raises(ConfigError, match="cannot read"):
        measured_throughput(tmp_path / "nowhere")
