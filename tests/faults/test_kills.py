"""Killed anywhere, parameters, optimizer state, metrics and rows end up as if nothing
had happened; long runs do not grow.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from faults import victim
from helpers import processes, runs, toy
from helpers.runs import metrics_of
from helpers.tiny import AUTO, RL_TINY

DEADLINE = 300


def rows_of(folder):
    """Return the digest of the rows of every step; whatever was done twice must have
    used the same rows.
    """
    digests = {}
    for line in (folder / victim.ROWS_FILE).read_text().splitlines():
        with contextlib.suppress(ValueError):  # a kill may have cut off the line
            entry = json.loads(line)
            assert digests.setdefault(entry["step"], entry["rows"]) == entry["rows"]
    return digests


def assert_same_run(folder, whole, steps):
    """Assert that two finished runs are the same, bit for bit."""
    names = runs.assert_same_run(folder, whole, steps, files=["metrics.jsonl"])
    # SGD has no state.
    assert (
        {"params", "step"}
        <= {name.split("'")[1] for name in names}
        <= {"params", "opt_state", "step"}
    )
    assert [line["step"] for line in metrics_of(folder)] == list(range(steps))
    assert rows_of(folder) == rows_of(whole)


class Campaign:
    """Runs a training in a folder and kills it again and again. A run is seen training
    when it writes its file `seen_in`.
    """

    seen_in = victim.ROWS_FILE

    def __init__(self, base, *, steps, pause, seed):
        self.base, self.steps, self.pause = base, steps, pause
        self.random = random.Random(seed)
        self.done = (
            Counter()
        )  # in which way -> the kills of a process that had been seen training

    def settings(self, name):
        """Return the settings of a run, through eight phases."""
        changes = {"steps": self.steps, "global_rampup_samples": self.steps * 9 // 2}
        return {"base_output_directory": str(self.base), "run_name": name, **changes}

    def start(self, name):
        """Start a run, or go on with it."""
        folder = self.base / name
        return processes.start(
            victim.run,
            self.settings(name),
            folder,
            self.pause,
            2,
            log=folder / victim.LOG_FILE,
        )

    def check(self, name):
        """Assert that a finished run is the one that was never killed, bit for bit."""
        assert_same_run(self.base / name, self.base / "whole", self.steps)

    def strike_until(self, kills, kinds, number=0):
        """Kill runs in one of several ways until there were so many kills, and check
        each that ends; return their number.
        """
        while self.done.total() < kills:
            if not self.strike(f"cut{number}", self.random.choice(kinds)):
                self.check(f"cut{number}")
                number += 1
        self.finish(f"cut{number}")
        self.check(f"cut{number}")
        assert not unfinished(self.base / f"cut{number}")
        return number + 1

    def finish(self, name):
        """Run to the end."""
        process = self.start(name)
        process.join(DEADLINE)
        assert process.exitcode == 0, (self.base / name / victim.LOG_FILE).read_text()[
            -3000:
        ]

    def wait_for(self, condition, process, folder):
        """Wait until something is seen; False if the process ended before."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            if not process.is_alive():
                assert process.exitcode == 0, (folder / victim.LOG_FILE).read_text()[
                    -3000:
                ]
                return False
            assert time.monotonic() < deadline, "a run hangs"
            time.sleep(0.001)
        return True

    def strike(self, name, kind):
        """Start a run, kill it once it is seen training, and count in which way; False
        if it ended before.
        """
        folder = self.base / name
        seen, left = (
            folder / self.seen_in,
            unfinished(folder),
        )  # what earlier deaths left
        before = seen.stat().st_size if seen.exists() else 0
        process = self.start(name)
        alive = self.wait_for(
            lambda: seen.exists() and seen.stat().st_size > before, process, folder
        )
        if alive and kind == "SIGKILL in a checkpoint write":
            alive = self.wait_for(lambda: unfinished(folder) - left, process, folder)
            time.sleep(self.random.random() * 0.02)
        elif alive:
            time.sleep(self.random.random() * 4 * self.pause)
        if not alive or not process.is_alive():
            process.join(DEADLINE)
            return False
        os.kill(process.pid, getattr(signal, kind.split(" ")[0].strip(",")))
        if kind == "SIGTERM, then SIGKILL":
            time.sleep(self.random.random() * 0.2)
            process.kill()
        process.join(DEADLINE)
        assert process.exitcode is not None, "a run did not end"
        if kind in ("SIGTERM", "SIGINT"):
            assert process.exitcode in (130, 0), (folder / victim.LOG_FILE).read_text()[
                -3000:
            ]
        elif kind != "SIGTERM, then SIGKILL":
            kind = (
                "SIGKILL in a checkpoint write"
                if unfinished(folder) - left
                else "SIGKILL"
            )
        self.done[kind] += 1
        return True


class AutoCampaign(Campaign):
    """The same with a batch that follows the measured noise; at the first weights, on
    random tokens, it grows at once.
    """

    def settings(self, name):
        """Return the settings of a run whose batch grows by measurement."""
        own = {
            "per_device_batch_size": 8,
            "train_samples": 1900,
            "batch_scaling": "complete",
            "opt_type": "adamw",
        }
        return (
            AUTO
            | {
                "enable_rampup_batch_size": False,
                "base_output_directory": str(self.base),
                "run_name": name,
            }
            | own
        )


def unfinished(folder):
    """Return name and inode of the checkpoints that are being written, or were when the
    process died.
    """
    found = set()
    for path in (folder / "checkpoints").glob("*tmp*"):
        with contextlib.suppress(FileNotFoundError):
            found.add((path.name, path.stat().st_ino))
    return found


@pytest.mark.slow
def test_killed_in_a_checkpoint_write(tmp_path):
    """Killed while a checkpoint is being written, the run is the uninterrupted one, bit
    for bit.
    """
    campaign = Campaign(tmp_path, steps=20, pause=0.02, seed=1)
    campaign.finish("whole")
    assert len({line["phase"] for line in metrics_of(tmp_path / "whole")}) >= 4
    assert campaign.strike("cut", "SIGKILL in a checkpoint write")
    assert campaign.done.total() == 1
    campaign.finish("cut")
    campaign.check("cut")
    assert not unfinished(tmp_path / "cut")


@pytest.mark.faults
def test_a_hundred_kills(tmp_path, record_property):
    """A hundred kills over a ramp of eight phases, at random moments, in checkpoint
    writes, by three signals.
    """
    campaign = Campaign(tmp_path, steps=600, pause=0.03, seed=0)
    campaign.finish("whole")
    assert {line["phase"] for line in metrics_of(tmp_path / "whole")} == set(range(8))
    kinds = (
        ["SIGKILL"] * 9
        + ["SIGKILL in a checkpoint write"] * 5
        + ["SIGTERM"] * 3
        + ["SIGINT", "SIGTERM, then SIGKILL"]
    )
    print(campaign.strike_until(100, kinds), "runs", campaign.done)
    assert campaign.done["SIGKILL in a checkpoint write"] >= 10
    record_property("kills", json.dumps(campaign.done))


@pytest.mark.parametrize(
    "kills",
    [
        toy.slow(3),
        toy.campaign(100),
    ],
)
def test_killed_while_the_batch_follows_the_noise(tmp_path, kills):
    """Kills change no decision and no bit; short runs are killed before, at and after
    all of their decisions.
    """
    campaign = AutoCampaign(tmp_path, steps=0, pause=0.02, seed=2)
    campaign.finish("whole")
    sizes = [line["global_batch_size"] for line in metrics_of(tmp_path / "whole")]
    assert len(set(sizes)) >= 3
    campaign.steps = len(sizes)  # the budget decides
    campaign.strike_until(kills, ["SIGKILL", "SIGKILL", "SIGTERM"])


RL_SETTINGS = RL_TINY | {
    "num_generations": 4,
    "checkpoint_period": 3,
    "max_num_checkpoints_to_keep": 2,
    "async_checkpointing": True,
    "eval_interval": 16,
}


def run_rollouts(settings):
    """Train slowly enough to be killed anywhere; return 0 when finished, 130 when
    stopped by a signal.
    """
    victim.use_cpus(1)
    from rampup.contrib.rl.config import RolloutConfig
    from rampup.contrib.rl.tasks import Arithmetic
    from rampup.contrib.rl.train import train
    from rampup.loop.events import StepDone, ctrl_c_stops

    ctrl_c_stops.set(True)
    # One response of a new model in eight is right, so that most groups have no spread
    # and some have.
    Arithmetic.reward = lambda task, prompts, responses: [
        float(sum(map(ord, text)) % 8 == 0) for text in responses
    ]

    def pause(event):
        if isinstance(event, StepDone):
            time.sleep(0.02)

    return (
        130 if train(RolloutConfig(**RL_SETTINGS | settings), pause).interrupted else 0
    )


class RolloutCampaign(Campaign):
    """The same for runs of rollouts, which are seen training by their metrics."""

    seen_in = "metrics.jsonl"

    def start(self, name):
        """Start a run, or go on with it."""
        return processes.start(
            run_rollouts,
            self.common | {"run_name": name},
            log=self.base / name / victim.LOG_FILE,
        )

    def check(self, name):
        """Assert that a finished run is the one that was never killed, bit for bit."""
        runs.assert_same_run(self.base / name, self.base / "whole", self.steps)


PACKED = {
    "token_budget": 32,
    "train_micro_batch_size": -1,
    "max_prompt_length": 4,
    "max_response_length": 3,
}


@pytest.mark.parametrize(
    ("kills", "rollouts", "sizes"),
    [
        toy.slow(2, 2, PACKED),
        toy.campaign(30, 12, {}),
        toy.campaign(30, 12, {"zero_spread_groups": "refill"}),
        toy.campaign(30, 12, PACKED),
    ],
    ids=str,
)
def test_a_killed_run_of_rollouts_is_the_uninterrupted_one(
    kills, rollouts, sizes, tmp_path
):
    """At random moments, also while it refills, between the updates of a rollout and in
    checkpoint writes.
    """
    # Two passes over two mini batches.
    steps = rollouts * 4
    # A pause that reaches over a random number of the next eight updates.
    campaign = RolloutCampaign(tmp_path, steps=steps, pause=0.05, seed=0)
    campaign.common = {
        "base_output_directory": str(tmp_path),
        "num_batches": rollouts,
        **sizes,
    }
    campaign.finish("whole")
    campaign.strike_until(kills, ["SIGKILL"] * 4 + ["SIGTERM", "SIGINT"])


def sizes_of(folder):
    """Return the size of each file of metrics, and number and size of all others."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    metrics = {
        path.name: size for path, size in sizes.items() if path.suffix == ".jsonl"
    }
    return {
        "metrics": metrics,
        "others": len(sizes) - len(metrics),
        "bytes": sum(sizes.values()) - sum(metrics.values()),
    }


def soak(folder, steps, every, found):
    """Train, and write memory and processor time every so many steps, and the files
    halfway and at the end.
    """
    victim.use_cpus(1)
    from rampup import Config
    from rampup.lm.train import train
    from rampup.loop.events import Evaluated, RunStopped, StepDone

    samples, files = [], []

    def look(event):
        if isinstance(event, StepDone) and (event.step + 1) % every == 0:
            resident = int(
                Path("/proc/self/statm").read_text().split()[1]
            ) * os.sysconf("SC_PAGE_SIZE")
            samples.append([event.step + 1, resident, time.process_time()])
        if isinstance(event, RunStopped) or (
            isinstance(event, Evaluated) and event.step + 1 == steps // 2
        ):
            files.append(sizes_of(folder / "run"))

    own = {
        "checkpoint_period": steps // 40,
        "eval_interval": steps // 20,
        "eval_steps": 2,
        "per_device_batch_size": 8,
    }
    where = {
        "base_output_directory": str(folder),
        "run_name": "run",
        "steps": steps,
        "global_rampup_samples": 2 * steps,
    }
    summary = train(Config(**(victim.SETTINGS | own | where)), look)
    found.write_text(
        json.dumps({"steps": summary.steps, "samples": samples, "files": files})
    )


@pytest.mark.faults
def test_long_runs_do_not_grow(tmp_path):
    """Over 20,000 steps, memory grows by less than 8 MiB, steps stay as fast as they
    were, and only metrics grow.
    """
    steps = 20_000
    processes.run_all(
        soak, [(tmp_path, steps, 250, tmp_path / "found")], tmp_path, 3600
    )
    found = json.loads((tmp_path / "found").read_text())
    assert found["steps"] == steps
    step, memory, processor = np.array(found["samples"], float).T
    later = step > steps / 4
    growth = np.polyfit(step[later], memory[later], 1)[0] * steps
    per_step = np.diff(processor) / np.diff(step)
    quarter = len(per_step) // 4
    slower = np.median(per_step[-quarter:]) / np.median(
        per_step[-2 * quarter : -quarter]
    )
    halfway, end = found["files"]
    print(
        f"{memory[later][0] / 2**20:.1f} to {memory[-1] / 2**20:.1f} MiB, {slower:.3f}"
        " times slower"
    )
    assert growth < 8 * 2**20, f"memory grows by {growth / 2**20:.1f} MiB"
    assert slower < 1.25, f"steps become {slower:.2f} times slower"
    assert set(end["metrics"]) == {"metrics.jsonl", "eval.jsonl"}
    assert end["others"] <= halfway["others"]
    assert end["bytes"] <= 1.1 * halfway["bytes"]
