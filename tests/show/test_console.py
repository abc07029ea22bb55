"""Tests of rampup.show.console: plans, facts and timetables as text."""

import io
import re

import pytest
from helpers.screen import TERMINALS, printed
from rich.console import Console

from rampup import Config, build_plan
from rampup.plan.pipeline import SCHEDULES, Timetable
from rampup.show.console import (
    MAX_PHASES,
    PLAIN,
    is_for_a_log,
    print_plan,
    print_table,
    print_timetable,
)

RAMP = {"enable_rampup_batch_size": True}


@pytest.mark.parametrize("terminal", TERMINALS)
def test_print_plan_fits_80_columns(terminal):
    """Nothing is truncated at 80 columns, in a terminal or piped, even with every
    column and large numbers.
    """
    keys = RAMP | {
        "ici_pipeline_parallelism": 2,
        "learning_rate_batch_scaling": "sqrt",
        "global_rampup_samples": 10**12,
    }
    plan = build_plan(Config(**keys, steps=10**12), 65536)
    text = printed(print_plan, plan, terminal=terminal)
    flat = re.sub(r"[\s│]+", "", text)
    for row in plan.phase_rows():
        assert f"{row['start_sample']:,}" in flat
        assert f"{row['global_batch_size']:,}" in flat


def test_piped_output_is_plain_and_marks_unreached_phases():
    """Without a terminal there are no colours and no boxes; a phase beyond the last
    step is in brackets.
    """
    text = printed(print_plan, build_plan(Config(**RAMP, steps=30), 4))
    assert not set(text) & set("\x1b─│┏┃━")
    assert re.search(
        r"^\s*\(3\).*note: steps=30 ends before phase 1", text, re.MULTILINE | re.DOTALL
    )


@pytest.mark.parametrize("phases", [MAX_PHASES, MAX_PHASES + 1, 500])
def test_print_plan_leaves_out_the_middle_of_many_phases(phases):
    """Of many phases, the first and the last are printed and the others counted;
    `max_phases=None` prints all.
    """
    plan = build_plan(
        Config(
            batch_size_schedule=" ".join(f"{900 * n}:{n + 4}" for n in range(phases)),
            steps=10**6,
        ),
        1,
    )
    text = printed(print_plan, plan)
    rows = [
        line.split()[0]
        for line in text.splitlines()
        if re.match(r"\s*\d+ +[\d,]+ +[\d,]+ ", line)
    ]
    assert (len(rows), rows[0], rows[-1]) == (MAX_PHASES, "0", str(phases - 1))
    left_out = phases - MAX_PHASES
    assert (f"{left_out} phase{'s' * (left_out > 1)} left out" in text) == (
        left_out > 0
    )
    assert f"\n{phases // 2:>5}" in printed(print_plan, plan, max_phases=None)


def test_a_terminal_of_a_launcher_is_for_a_log(monkeypatch):
    """Srun --unbuffered and mpirun give each process a terminal, whose output goes into
    a log; srun --pty is for people.
    """
    names = ("SLURM_PROCID", "SLURM_PTY_PORT", "OMPI_COMM_WORLD_RANK")
    for given, expected in (
        ([], False),
        (names[:1], True),
        (names[:2], False),
        (names[2:], True),
    ):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name in given:
            monkeypatch.setenv(name, "0")
        assert is_for_a_log() == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("terminal", TERMINALS)
def test_print_timetable_fits_80_columns(schedule, terminal):
    """Nothing is truncated, blocks follow each other, and each operation starts
    once.
    """
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=4, num_microbatches=12, num_repeats=v)
    text = printed(print_timetable, table, terminal=terminal)
    for operation in table.operations:
        name = f"{operation.kind}{operation.microbatch}" + (
            "ab"[operation.repeat] if v > 1 else ""
        )
        assert sum(line.split().count(name) for line in text.splitlines()) == 4
    assert str(table.bubble_fraction) in text


@pytest.mark.parametrize("costs", [{"forward_cost": 0.001}, {"num_microbatches": 2000}])
def test_print_timetable_leaves_out_a_picture_that_is_too_wide(costs):
    """The totals are printed even if costs or numbers make the picture too wide."""
    table = Timetable.build(
        **({"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4} | costs)
    )
    text = printed(print_timetable, table)
    assert "too many to draw" in text
    assert str(table.bubble_fraction) in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize("width", [80, 40])
def test_print_table_cuts_no_number(width):
    """A table that is wider than the console becomes lines, with every cell whole."""
    rows = [
        ("constant 8", "7,813", "0.6821 (0.5168 to 2.067)", ""),
        ("0:8 500K:16", "4,151", "", "0.0025 (0.0003 to 0.015)"),
    ]
    console = Console(file=io.StringIO(), width=width, **PLAIN)
    print_table(console, ("schedule", "steps", "time", "loss\npenalty"), rows, left=1)
    text = console.file.getvalue()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(cell in line for line in lines) for row in rows for cell in row)
    assert ("  loss penalty" in text) == (width == 40)
