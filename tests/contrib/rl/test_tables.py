"""Tests of rampup.contrib.rl.tables: rollouts as text."""

import re

import pytest
from helpers.screen import TERMINALS, printed

from rampup.contrib.rl.config import RolloutConfig, build_rollout_schedule
from rampup.contrib.rl.tables import print_rollout


@pytest.mark.parametrize("terminal", TERMINALS)
def test_print_rollout_fits_80_columns(terminal):
    """Nothing is truncated at 80 columns, in a terminal or piped, even with large
    numbers.
    """
    keys = {
        "batch_size": 2**17,
        "mini_batch_size": 2**16,
        "num_iterations": 4,
        "microbatch_size": 16,
    }
    plan = build_rollout_schedule(RolloutConfig(**keys), 4096)
    text = printed(print_rollout, plan, terminal=terminal)
    assert "…" not in text
    flat = " ".join(re.sub(r"[│─]", " ", text).split())
    assert "-> mini batches 2 65,536 524,288 805,306,368 4 epochs" in flat
    assert "-> microbatches 8 8,192 65,536 100,663,296 16 per replica" in flat
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
    assert "rows of weight 0 per epoch" in text
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
    keys = {"batch_size_schedule": "0:8 20:16 500:32", "mini_batch_size": 8}
    schedule = build_rollout_schedule(RolloutConfig(**keys), 1)
    text = printed(print_rollout, schedule)
    rows = [
        line.split() for line in text.splitlines() if re.fullmatch(r"[\d ,]+", line)
    ]
    assert rows == [
        ["0", "20", "8", "8", "64", "64", "1"],
        ["20", "80", "16", "8", "128", "64", "2"],
    ]
    assert "100 steps of a batch that grows; 180 optimizer steps of the policy" in text
    assert schedule.total_steps == 20 + 2 * 80
    assert [row["start_optimizer_step"] for row in schedule.stage_rows()] == [0, 20]
