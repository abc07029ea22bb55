"""Tests of rampup.show.console: plans, facts and timetables as text."""

import io
import re

import pytest
from rich.console import Console

from rampup import Config, build_plan
from rampup.contrib.rl.config import RolloutConfig, build_rollout_schedule
from rampup.contrib.rl.starting_sizes import suggest
from rampup.plan.pipeline import SCHEDULES, Timetable
from rampup.show.console import (
    MAX_PHASES,
    is_for_a_log,
    print_plan,
    print_rollout,
    print_suggestion,
    print_timetable,
)

RAMP = {"enable_rampup_batch_size": True}
TERMINALS = [{}, {"force_terminal": True, "color_system": None}]


def printed(show, shown, *, terminal=TERMINALS[0], **options):
    """Return what is printed at 80 columns, none of whose lines may be longer."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **terminal)
    show(shown, console, **options)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    return console.file.getvalue()


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


@pytest.mark.parametrize("terminal", TERMINALS)
def test_print_rollout_fits_80_columns(terminal):
    """Nothing is truncated at 80 columns, in a terminal or piped, even with large
    numbers.
    """
    keys = {
        "batch_size": 2**17,
        "mini_batch_size": 2**16,
        "num_iterations": 4,
        "enable_critic": True,
        "microbatch_size": 16,
    }
    plan = build_rollout_schedule(RolloutConfig(**keys), 4096)
    text = printed(print_rollout, plan, terminal=terminal)
    assert "…" not in text
    flat = " ".join(re.sub(r"[│─]", " ", text).split())
    assert "-> mini batches 2 65,536 524,288 805,306,368 4 epochs" in flat
    assert "-> microbatches 8 8,192 65,536 100,663,296 16 per replica" in flat
    assert (
        flat.index(" critic ")
        < flat.index("-> mini batches")
        < flat.index(" policy -> ")
    )
    assert "131,072 prompts * 8 responses = 1,048,576 samples" in flat


def test_print_rollout_remarks_follow_from_the_plan():
    """One optimizer step per rollout is on-policy, more lag behind; padding and notes
    appear if they exist.
    """
    on_policy = printed(print_rollout, build_rollout_schedule(RolloutConfig(), 4))
    assert "on-policy" in on_policy
    assert "padding" not in on_policy
    keys = {
        "mini_batch_size": 12,
        "train_micro_batch_size": 4,
        "num_iterations": 2,
        "pad_microbatches": True,
    }
    text = " ".join(
        printed(print_rollout, build_rollout_schedule(RolloutConfig(**keys), 3)).split()
    )
    assert "weights 5 updates older" in text
    assert "rows of weight 0 per epoch (policy)" in text
    assert "25,088 bytes per sample at full length, 6.125 MiB per step" in text
    # With a token budget the passes are a bound, and tokens replace samples.
    budget = printed(
        print_rollout, build_rollout_schedule(RolloutConfig(token_budget=4000), 4)
    )
    assert re.search(r"-> microbatches +32 +16,000 +at most, packed", budget)


def test_print_rollout_lists_the_stages_of_a_growing_batch():
    """Every stage that the run reaches has its steps and sizes, and the optimizer steps
    are those of all stages.
    """
    keys = {
        "batch_size_schedule": "0:8 20:16 500:32",
        "num_generations_schedule": "0:4 50:8",
        "mini_batch_size": 8,
    }
    schedule = build_rollout_schedule(RolloutConfig(**keys), 1)
    text = printed(print_rollout, schedule)
    rows = [
        line.split() for line in text.splitlines() if re.fullmatch(r"[\d ,]+", line)
    ]
    assert rows == [
        ["0", "20", "8", "4", "32", "32", "1"],
        ["20", "30", "16", "4", "64", "32", "2"],
        ["50", "50", "16", "8", "128", "64", "2"],
    ]
    assert "100 steps of a batch that grows; 180 optimizer steps of the policy" in text
    assert schedule.optimizer_steps("policy") == schedule.total_steps == 20 + 2 * 80
    assert [row["start_optimizer_step"] for row in schedule.stage_rows()] == [0, 20, 80]


def test_print_suggestion_has_both_columns_and_memory():
    """Published and used sizes are side by side; memory and notes follow."""
    text = " ".join(
        printed(print_suggestion, suggest("6B", system="trlx", memory_gib=80)).split()
    )
    assert "num_rollouts 128 64" in text
    assert "training state: 100.6 GiB, at least 2 devices of 80 GiB" in text
    assert "a starting point only" in text
    without = printed(print_suggestion, suggest("6B", system="skyrl", memory_gib=80))
    assert "num_rollouts" not in without
