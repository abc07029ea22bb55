"""Tests of rampup.show.console: plans, facts and timetables as text."""

import io
import re

import pytest
from rich.console import Console

from rampup import Config, build_plan
from rampup.plan.timetable import SCHEDULES, Timetable
from rampup.show.console import MAX_PHASES, is_for_a_log, print_plan, print_timetable

RAMP = {"enable_rampup_batch_size": True}


def printed(plan, **options):
    """Return what is printed of a plan at 80 columns."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **options)
    print_plan(plan, console)
    return console.file.getvalue()


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": None}])
def test_print_plan_fits_80_columns(options):
    """Nothing is truncated at 80 columns, in a terminal or piped, even with every column and large numbers."""
    keys = RAMP | {"ici_pipeline_parallelism": 2, "learning_rate_batch_scaling": "sqrt", "global_rampup_samples": 10**12}
    plan = build_plan(Config(**keys, steps=10**12), 65536)
    text = printed(plan, **options)
    assert max(map(len, text.splitlines())) <= 80
    flat = re.sub(r"[\s│]+", "", text)
    for row in plan.phase_rows():
        assert f"{row['start_sample']:,}" in flat
        assert f"{row['global_batch_size']:,}" in flat


def test_piped_output_is_plain_and_marks_unreached_phases():
    """Without a terminal there are no colours and no boxes; a phase beyond the last step is in brackets."""
    text = printed(build_plan(Config(**RAMP, steps=30), 4))
    assert not set(text) & set("\x1b─│┏┃━")
    assert re.search(r"^\s*\(3\)", text, re.MULTILINE)
    assert "note: steps=30 ends before phase 1" in text


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "0", "SLURM_PTY_PORT": "4000"}, False),  # srun --pty
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
    ],
)
def test_a_terminal_of_a_launcher_is_for_a_log(variables, expected, monkeypatch):
    """Srun --unbuffered and mpirun give each process a terminal, whose output goes into a log."""
    for name in ("SLURM_PROCID", "SLURM_PTY_PORT", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_for_a_log() == expected


def printed_timetable(table, **options):
    """Return what is printed at 80 columns."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **options)
    print_timetable(table, console)
    return console.file.getvalue()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": None}])
def test_print_timetable_fits_80_columns(schedule, options):
    """Nothing is truncated, blocks follow each other, and each operation starts once."""
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=4, num_microbatches=12, num_repeats=v)
    text = printed_timetable(table, **options)
    assert max(map(len, text.splitlines())) <= 80
    for operation in table.operations:
        name = f"{operation.kind}{operation.microbatch}" + ("ab"[operation.repeat] if v > 1 else "")
        assert sum(line.split().count(name) for line in text.splitlines()) == 4
    assert str(table.bubble_fraction) in text


@pytest.mark.parametrize("costs", [{"forward_cost": 0.001}, {"num_microbatches": 2000}])
def test_print_timetable_leaves_out_a_picture_that_is_too_wide(costs):
    """The totals are printed even if costs or numbers make the picture too wide."""
    table = Timetable.build(**({"schedule": "1f1b", "num_stages": 2, "num_microbatches": 4} | costs))
    text = printed_timetable(table)
    assert "too many to draw" in text
    assert str(table.bubble_fraction) in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize(("phases", "kept"), [(MAX_PHASES, MAX_PHASES), (MAX_PHASES + 1, MAX_PHASES), (500, MAX_PHASES)])
def test_print_plan_leaves_out_the_middle_of_many_phases(phases, kept):
    """Of many phases, the first and the last are printed and the others counted; `max_phases=None` prints all."""
    schedule = " ".join(f"{9000 * n}:{4 * n + 4}" for n in range(phases))
    plan = build_plan(Config(batch_size_schedule=schedule, steps=10**7), 1)
    console = Console(file=io.StringIO(), width=100, highlight=False)
    print_plan(plan, console)
    text = console.file.getvalue()
    rows = [line.split()[0] for line in text.splitlines() if re.match(r"\s*\d+ +[\d,]+ +[\d,]+ ", line)]
    assert len(rows) == kept
    assert (rows[0], rows[-1]) == ("0", str(phases - 1))
    left_out = phases - kept
    assert ("left out" in text) == (left_out > 0)
    assert left_out == 0 or f"{left_out} phase{'s' * (left_out > 1)} left out" in text
    print_plan(plan, console, max_phases=None)
    assert f"\n{phases // 2:>5}" in console.file.getvalue()
