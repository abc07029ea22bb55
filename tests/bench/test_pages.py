"""Tests of rampup.bench.pages: real processes with pages of both sizes."""

import pytest

from rampup.bench.contenders import QUICK
from rampup.bench.pages import MICROBATCHES, row, run, run_process
from rampup.cli.huge_pages import on_offer


def test_a_row_compares_medians():
    """Of what the processes printed, by number of microbatches."""
    large, small = ([{"seconds": {"8": s}, "faults": {"8": f}} for s, f in pairs] for pairs in ([(1, 10)], [(4, 90), (2, 70)]))
    found = row(8, large, small)
    assert (found["ratio"], found["faults"], found["small_faults"]) == (pytest.approx(1 / 3), 10, 80)


def test_quick():
    """A row for every number of microbatches, of the tiny model."""
    result = run(quick=True)
    assert [one["microbatches"] for one in result.rows] == list(MICROBATCHES)
    assert all(one["ms"] > 0 and one["small_ms"] > 0 for one in result.rows)
    assert result.notes[0].startswith(QUICK.name)


@pytest.mark.slow
@pytest.mark.skipif(not on_offer(), reason="the kernel gives no large pages on request")
def test_large_pages_have_fewer_faults():
    """A step of the 1 M model takes its temporary memory in hundreds of large pages and not in thousands of small ones."""
    large, small = (run_process(huge=large, quick=False)["faults"] for large in (True, False))
    assert large["1"] < small["1"] / 20
