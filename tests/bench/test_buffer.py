"""Tests of rampup.bench.buffer: what is moved, not how fast."""

from rampup.bench.data import run_buffer


def test_an_early_phase_moves_its_own_rows():
    """A step moves the chunks that its rows fill, and never the buffer of the largest batch before the last phase."""
    rows = run_buffer(quick=True).rows
    assert len(rows) == 8
    per_microbatch = rows[0]["rows_bytes"]
    for number, row in enumerate(rows, start=1):
        assert row["rows_bytes"] == number * per_microbatch
        assert row["rows_bytes"] <= row["ours_bytes"] < row["rows_bytes"] + per_microbatch
        assert row["padded_bytes"] == 8 * per_microbatch
    assert len({row["program_bytes"] for row in rows}) == 1
    assert all(row["ours_ms"] > 0 and row["padded_ms"] > 0 and row["rows_ms"] > 0 for row in rows)
