"""Tests of rampup.bench.data."""

import numpy as np
import pytest

from rampup.bench.data import BATCH, RowItems, fixed_plan, read_grain, read_rampup, three_phase_plan
from rampup.run.data.sources import TokenRows, as_source


@pytest.mark.bench
def test_data_bench_covers_all_cases(quick):
    """Each source is read in both ways, with and without shuffling, by one and two threads."""
    result = quick("data")
    assert {row["rows"] for row in result.rows} == {6 * BATCH}
    assert {(row["source"], row["ours"], row["shuffled"], row["threads"]) for row in result.rows} == {
        (source, ours, shuffled, threads)
        for source in ("rows in memory", "tokens cut into rows")
        for ours in (f"fixed batch of {BATCH}", "ramp")
        for shuffled in (False, True)
        for threads in (1, 2)
    }
    assert all(row["ratio"] == pytest.approx(row["rows_per_s"] / row["grain_rows_per_s"]) for row in result.rows)


def test_three_phase_plan_reads_as_many_rows_as_the_fixed_plan():
    """The ramp's plan consumes the samples of the fixed one, in three sizes."""
    fixed, ramp = fixed_plan(6), three_phase_plan(6)
    assert fixed.consumed_samples == ramp.consumed_samples == 6 * BATCH
    assert ramp.ramp.sizes == (BATCH // 4, BATCH // 2, BATCH)


def test_row_items_are_the_rows_of_token_rows():
    """Grain gets the same rows, one by one."""
    tokens = np.arange(41, dtype=np.uint8)
    items, rows = RowItems(tokens, 8), TokenRows([tokens], ["t"], sequence_length=8, vocab_size=256)
    assert len(items) == len(rows) == 5
    for number in range(5):
        batch = rows.read(np.array([number]))
        assert batch["tokens"][0].tolist() == items[number]["tokens"].tolist()
        assert batch["length"][0] == items[number]["length"]


@pytest.mark.parametrize("seed", [None, 3])
def test_readers_return_the_number_of_rows(seed):
    """Both readers read past the end of the source."""
    items = [{"tokens": np.zeros(3, np.uint8)}] * 100
    assert read_rampup(as_source(items), fixed_plan(3), seed, 2) == 3 * BATCH
    assert read_grain(items, 3, seed, 2) == 3 * BATCH


@pytest.mark.bench
def test_buffer_bench_moves_only_the_rows_of_the_phase(quick):
    """A step moves the chunks that its rows fill, not the buffer of the largest batch."""
    rows = quick("buffer").rows
    assert len(rows) == 8
    per_microbatch = rows[0]["rows_bytes"]
    for number, row in enumerate(rows, start=1):
        assert row["rows_bytes"] == number * per_microbatch
        assert row["rows_bytes"] <= row["ours_bytes"] < row["rows_bytes"] + per_microbatch
        assert row["padded_bytes"] == 8 * per_microbatch
    assert len({row["program_bytes"] for row in rows}) == 1
    assert all(row["ours_ms"] > 0 and row["padded_ms"] > 0 and row["rows_ms"] > 0 for row in rows)
