"""Tests of rampup.contrib.lab.measurements: the speed of a run, by batch size."""

import math

import pytest

from rampup.contrib.lab import measurements
from rampup.errors import ConfigError


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
                (8, True),
                (8, -1),
                (8, 0),
                (8, math.nan),
                (8, math.inf),
                (8, 100),
            ],
            {8: 100},
        ),
    ],
)
def test_the_throughput_is_the_median_of_each_batch_size(tmp_path, rows, expected):
    """A line has a batch, its tokens per second and, if it compiled, the time for
    that.
    """
    names = ("global_batch_size", "tokens_per_second", "compile_seconds")
    lines = [
        {"step": step, **dict(zip(names, row, strict=False))}
        for step, row in enumerate(rows)
    ]
    assert dict(measurements._throughput(tmp_path, lines)) == expected


@pytest.mark.parametrize("lines", [[], [{"step": 0, "global_batch_size": 8}]])
def test_a_run_without_a_throughput_is_refused(tmp_path, lines):
    """The error names the file."""
    with pytest.raises(ConfigError, match=r"metrics\.jsonl") as caught:
        measurements._throughput(tmp_path, lines)
    assert caught.value.key == "measured"
