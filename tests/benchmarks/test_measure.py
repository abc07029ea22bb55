"""Tests of benchmarks/measure.py."""

import io

import pytest
from measure import BenchResult, Seconds, print_result, take_turns
from rich.console import Console

RESULT = BenchResult(
    name="demo", title="a < b", rows=[{"system": "x|y", "ms": 1.23456, "n": 12345, "ok": True, "none": None}], notes=["n & m"]
)


def test_take_turns_rotates_and_drops_the_warm_up():
    """Each candidate runs once a round, the order rotates, and the warm-up is not counted."""
    order = []
    times = take_turns({name: lambda name=name: order.append(name) for name in "abc"}, rounds=2, warm_up=1)
    assert "".join(order) == "abcbcacab"
    assert [len(times[name].all) for name in "abc"] == [2, 2, 2]
    seconds = Seconds(all=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert (seconds.median, seconds.spread) == (3, pytest.approx(2 / 3))


def test_result_is_a_table_in_each_format():
    """Terminal, Markdown and JSON have the same cells."""
    assert RESULT.cells == [["x|y", "1.23", "12,345", "yes", "-"]]
    out = io.StringIO()
    print_result(RESULT, Console(file=out, force_terminal=True, width=120))
    assert "12,345" in out.getvalue()
    assert RESULT.to_markdown().count("| x|y | 1.23 | 12,345 | yes | - |") == 1
    assert RESULT.to_dict()["rows"] == list(RESULT.rows)
