"""Runs of rollouts killed anywhere: parameters, samples and metrics end up as if nothing had happened."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from helpers import processes
from helpers.runs import assert_same_run
from helpers.tiny import RL_TINY

SETTINGS = RL_TINY | {
    "num_generations": 4,
    "enable_critic": True,
    "checkpoint_period": 3,
    "max_num_checkpoints_to_keep": 2,
    "async_checkpointing": True,
    "eval_interval": 16,
}
DEADLINE = 600


def started(settings):
    """Start a run in a process of its own; return the process."""
    folder = Path(settings["base_output_directory"]) / settings["run_name"]
    return processes.start(run, settings, log=folder / "log.txt")


def run(settings):
    """Train slowly enough to be killed anywhere; return 0 when finished, 130 when stopped by a signal."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from rampup.loop.events import StepDone
    from rampup.rl.config import RolloutConfig
    from rampup.rl.tasks import Arithmetic
    from rampup.rl.train import train

    # One response of a new model in eight is right, so that most groups have no spread and some have.
    Arithmetic.reward = lambda task, prompts, responses: [float(sum(map(ord, text)) % 8 == 0) for text in responses]

    def pause(event):
        if isinstance(event, StepDone):
            time.sleep(0.02)

    return 130 if train(RolloutConfig(**SETTINGS | settings), pause).interrupted else 0


def num_steps(folder):
    """Return how many steps have their metrics written."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def finish(settings, code=0):
    """Run to the end."""
    process = started(settings)
    process.join(DEADLINE)
    folder = Path(settings["base_output_directory"]) / settings["run_name"]
    assert process.exitcode == code, (folder / "log.txt").read_text()[-3000:]


def kill_often(base, kills, rollouts, seed=0, **others):
    """Kill runs at random moments until there were `kills`; assert that every finished one is the uninterrupted one."""
    # Two passes over two mini batches or one, of the critic and of the policy.
    steps = rollouts * (4 if others.get("mini_batch_size") == -1 else 8)
    rng, done, number = random.Random(seed), 0, 0
    common = {"base_output_directory": str(base), "num_batches": rollouts, **others}
    finish(common | {"run_name": "whole"})
    while done < kills:
        settings = common | {"run_name": f"cut{number}"}
        folder = base / settings["run_name"]
        before, process = num_steps(folder), started(settings)
        deadline = time.monotonic() + DEADLINE
        # Wait for a random update of this process, and then for a random part of the next one.
        target = before + rng.randrange(1, 9)
        while process.is_alive() and num_steps(folder) < min(target, steps - 1):
            assert time.monotonic() < deadline, "a run hangs"
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        sent = rng.choice([signal.SIGKILL] * 4 + [signal.SIGTERM, signal.SIGINT]) if process.is_alive() else None
        if sent is not None:
            os.kill(process.pid, sent)
            done += 1
        process.join(DEADLINE)
        # A signal before or after training ends the process as it would any other: Ctrl-C by an exception.
        legal = {0, 130} if sent is None else {0, 130, -sent, 1 if sent == signal.SIGINT else 0}
        assert process.exitcode in legal, (folder / "log.txt").read_text()[-3000:]
        if process.exitcode == 0 or done == kills:
            finish(settings)
            assert_same_run(folder, base / "whole", steps)
            number += 1


TOKENS = {"token_batch_size": 64, "mini_batch_size": -1, "max_prompt_length": 4, "max_response_length": 3}
SIZES = [{"zero_spread_groups": "refill"}, {"zero_spread_groups": "drop"}, TOKENS | {"partial_step": "carry"}]


@pytest.mark.faults
@pytest.mark.parametrize("sizes", [{}, *SIZES, {"zero_spread_groups": "drop", "partial_step": "carry"}], ids=str)
def test_thirty_kills(sizes, tmp_path):
    """At random moments, also while it refills, between the updates of critic and policy and in checkpoint writes."""
    kill_often(tmp_path, kills=30, rollouts=12, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_killed_run_of_rollouts_is_the_uninterrupted_one(sizes, tmp_path):
    """Two kills in a short run."""
    kill_often(tmp_path, kills=2, rollouts=2, **sizes)
