"""Tests of rampup.bench.data: both read the same rows."""

import numpy as np
import pytest

from rampup.bench.data import BATCH, RowItems, fixed_plan, read_grain, read_rampup, run, three_phase_plan
from rampup.run.data.sources import TokenRows, as_source


@pytest.fixture(scope="module")
def result():
    """Return the quick benchmark."""
    return run(quick=True)


def test_both_read_as_many_rows(result):
    """Every row of the table is about the same number of rows, read by both, with and without shuffling."""
    assert {row["rows"] for row in result.rows} == {6 * BATCH}
    assert {(row["source"], row["ours"], row["shuffled"], row["threads"]) for row in result.rows} == {
        (source, ours, shuffled, threads)
        for source in ("rows in memory", "tokens cut into rows")
        for ours in (f"fixed batch of {BATCH}", "ramp")
        for shuffled in (False, True)
        for threads in (1, 2)
    }
    assert all(row["ratio"] == pytest.approx(row["rows_per_s"] / row["grain_rows_per_s"]) for row in result.rows)


def test_the_ramp_reads_as_many_rows_as_the_fixed_batch():
    """The ramp's plan consumes the samples of the fixed one, in three sizes."""
    fixed, ramp = fixed_plan(6), three_phase_plan(6)
    assert fixed.consumed_samples == ramp.consumed_samples == 6 * BATCH
    assert ramp.ramp.sizes == (BATCH // 4, BATCH // 2, BATCH)


def test_the_two_views_of_a_token_array_are_the_same_rows():
    """What Grain gets one by one is what our source reads at once."""
    tokens = np.arange(41, dtype=np.uint8)
    items, rows = RowItems(tokens, 8), TokenRows([tokens], ["t"], sequence_length=8, vocab_size=256)
    assert len(items) == len(rows) == 5
    for number in range(5):
        batch = rows.read(np.array([number]))
        assert batch["tokens"][0].tolist() == items[number]["tokens"].tolist()
        assert batch["length"][0] == items[number]["length"]


@pytest.mark.parametrize("seed", [None, 3])
def test_readers_count_rows(seed):
    """Both readers say how many rows came, more than the source has."""
    items = [{"tokens": np.zeros(3, np.uint8)}] * 100
    assert read_rampup(as_source(items), fixed_plan(3), seed, 2) == 3 * BATCH
    assert read_grain(items, 3, seed, 2) == 3 * BATCH
