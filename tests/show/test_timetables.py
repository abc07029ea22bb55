"""Tests of rampup.show.timetables."""

import io

import pytest
from rich.console import Console

from rampup.plan.timetable import SCHEDULES, Timetable
from rampup.show.timetables import print_timetable


def printed(table, **options):
    """Return what is printed at 80 columns."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **options)
    print_timetable(table, console)
    return console.file.getvalue()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": None}])
def test_every_operation_is_in_the_picture_at_80_columns(schedule, options):
    """Nothing is cut off, blocks follow each other, and each operation starts once."""
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=4, num_microbatches=12, num_repeats=v)
    text = printed(table, **options)
    assert max(map(len, text.splitlines())) <= 80
    for operation in table.operations:
        name = f"{operation.kind}{operation.microbatch}" + ("ab"[operation.repeat] if v > 1 else "")
        assert sum(line.split().count(name) for line in text.splitlines()) == 4
    assert str(table.bubble_fraction) in text


@pytest.mark.parametrize("costs", [{"forward_cost": 0.001}, {"num_microbatches": 2000}])
def test_a_picture_that_nobody_can_read_is_left_out(costs):
    """Where costs or numbers make it too wide, what is counted is printed all the same."""
    table = Timetable.build(**({"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4} | costs))
    text = printed(table)
    assert "too many to draw" in text
    assert str(table.bubble_fraction) in text
    assert len(text.splitlines()) < 12
