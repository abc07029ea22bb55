"""Tests of benchmarks/data.py."""

import numpy as np
import pytest
from data import BATCH, fixed_plan, read_grain, read_rampup, three_phase_plan

from rampup.data.sources import as_source


def test_three_phase_plan_reads_as_many_rows_as_the_fixed_plan():
    """The ramp's plan consumes the samples of the fixed one, in three sizes."""
    fixed, ramp = fixed_plan(6), three_phase_plan(6)
    assert fixed.consumed_samples == ramp.consumed_samples == 6 * BATCH
    assert ramp.ramp.sizes == (BATCH // 4, BATCH // 2, BATCH)


@pytest.mark.parametrize("seed", [None, 3])
def test_readers_return_the_number_of_rows(seed):
    """Both readers read past the end of the source."""
    items = [{"tokens": np.zeros(3, np.uint8)}] * 100
    assert read_rampup(as_source(items), fixed_plan(3), seed, 2) == 3 * BATCH
    assert read_grain(items, 3, seed, 2) == 3 * BATCH


@pytest.mark.bench
def test_buffer_bench_moves_only_the_rows_of_the_phase(quick):
    """In chunks, a step moves those that its rows fill. A small batch is moved in a buffer for the largest one."""
    rows = quick("buffer").rows
    assert len(rows) == 8
    per_microbatch = rows[0]["rows_bytes"]
    for number, row in enumerate(rows, start=1):
        assert row["rows_bytes"] == number * per_microbatch
        assert row["rows_bytes"] <= row["chunks_bytes"] < row["rows_bytes"] + per_microbatch
        assert row["ours_bytes"] == row["padded_bytes"] == 8 * per_microbatch
    assert len({row["program_bytes"] for row in rows}) == 1
    assert all(row["ours_ms"] > 0 and row["padded_ms"] > 0 and row["rows_ms"] > 0 for row in rows)
