"""Tests of rampup.bench.pages."""

import pytest

from rampup.bench.contenders import QUICK
from rampup.bench.pages import MICROBATCHES, row, run_process
from rampup.cli.huge_pages import on_offer


def test_row_compares_medians():
    """The medians over the processes, by number of microbatches."""
    huge, small = ([{"seconds": {"8": s}, "faults": {"8": f}} for s, f in pairs] for pairs in ([(1, 10)], [(4, 90), (2, 70)]))
    found = row(8, huge, small)
    assert (found["ratio"], found["faults"], found["small_faults"]) == (pytest.approx(1 / 3), 10, 80)


@pytest.mark.bench
def test_pages_bench_has_a_row_for_each_number_of_microbatches(quick):
    """Both page sizes were timed."""
    result = quick("pages")
    assert [one["microbatches"] for one in result.rows] == list(MICROBATCHES)
    assert all(one["ms"] > 0 and one["small_ms"] > 0 for one in result.rows)
    assert result.notes[0].startswith(QUICK.name)


@pytest.mark.bench
@pytest.mark.skipif(not on_offer(), reason="the kernel offers no huge pages")
def test_huge_pages_have_fewer_faults():
    """A step of the 1 M model has hundreds of page faults instead of thousands."""
    huge, small = (run_process(huge=huge, quick=False)["faults"] for huge in (True, False))
    assert huge["1"] < small["1"] / 20
