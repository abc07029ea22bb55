"""Tests of benchmarks/pages.py."""

import pytest
from pages import row, run_process

from rampup.cli.common import on_offer


def test_row_compares_medians():
    """The medians over the processes, by number of microbatches."""
    huge, small = ([{"seconds": {"8": s}, "faults": {"8": f}} for s, f in pairs] for pairs in ([(1, 10)], [(4, 90), (2, 70)]))
    found = row(8, huge, small)
    assert (found["ratio"], found["faults"], found["small_faults"]) == (pytest.approx(1 / 3), 10, 80)


@pytest.mark.bench
@pytest.mark.skipif(not on_offer(), reason="the kernel offers no huge pages")
def test_huge_pages_have_fewer_faults():
    """A step of the 1 M model has a fraction of the page faults. With little free memory, the kernel grants only some pages."""
    huge, small = (run_process(huge=huge, quick=False)["faults"] for huge in (True, False))
    assert huge["1"] < small["1"] / 5
