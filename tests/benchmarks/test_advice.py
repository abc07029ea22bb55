"""Tests of benchmarks/advice.py, the study behind "Does a ramp pay?"."""

import contextlib
import io
import json
from pathlib import Path

import advice
from advice_report import print_report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/does_a_ramp_pay.md"


def test_the_page_has_the_numbers_of_the_results():
    """At least 60 runs are committed in less than a megabyte, and every row of the
    page's tables is in the report from them.
    """
    results = json.loads(advice.RESULTS.read_text())
    assert len(results["runs"]) >= 60
    assert advice.RESULTS.stat().st_size < 1e6
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_report(results)
    rows = [
        line
        for line in PAGE.read_text().split("## The study with controls")[0].splitlines()
        if line.startswith("|") and "---" not in line
    ]
    assert len(rows) > 15
    for row in rows:
        assert row in printed.getvalue(), row
    for fact in (
        f"{len(results['runs'])} runs",
        f"{results['parameters']:,} parameters",
    ):
        assert fact in PAGE.read_text()
