"""A run of the language model whose batch follows a budget and Seesaw, and whose hyperparameters follow the batch."""

import json

import numpy as np
import pytest
from helpers.runs import stop_after
from helpers.tiny import TINY_MODEL

import rampup
from rampup import Config, build_plan
from rampup.errors import ResumeMismatchError
from rampup.lm.train import phase_hyperparameters, train

FOLLOWS = {
    "batch_size_schedule": "0:8 10%:16 30%:32",
    "train_samples": 400,
    "seesaw_factor": 2,
    "seesaw_max_batch_size": 96,
    "batch_scaling": "sde",
    "checkpoint_period": 100,
}


def config(folder, **changes):
    """Return a tiny configuration that runs in the folder."""
    return Config(base_output_directory=str(folder), run_name="run", **(TINY_MODEL | FOLLOWS | changes))


def metrics(folder):
    """Return step, batch, learning rate and loss of every line of metrics.jsonl."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [
        [line[name] for name in ("step", "consumed_samples", "global_batch_size", "learning_rate", "loss")] for line in lines
    ]


def test_a_run_follows_its_batch_and_resumes_bit_for_bit(tmp_path):
    """One executable for five batch sizes; stopped and resumed, the same losses; other rules and budgets are refused."""
    whole = train(config(tmp_path / "whole"))
    plan = build_plan(config(tmp_path), 8)
    assert plan.ramp.sizes == (8, 16, 32, 64, 96)
    assert (whole.steps, whole.num_compilations) == (plan.total_steps, 1)
    assert whole.consumed_samples - 96 < 400 <= whole.consumed_samples
    assert train(config(tmp_path / "stopped"), stop_after(5)).interrupted
    assert train(config(tmp_path / "stopped")).resumed_from > 5
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    found = {line[0]: line[3] for line in metrics(tmp_path / "whole")}
    rows = phase_hyperparameters(config(tmp_path), plan)
    for phase, row in zip(plan.ramp.phases, rows, strict=True):
        assert found[phase.start_step] == row["learning_rate"]
    for key, value in (("batch_scaling", "sqrt"), ("adam_b2_floor", 0.5), ("batch_scaling_reference", 16)):
        with pytest.raises(ResumeMismatchError, match=f"{key}: .* in the checkpoint"):
            train(config(tmp_path / "stopped", **{key: value}))
    with pytest.raises(ResumeMismatchError, match="train_samples: 400 -> 500"):
        train(config(tmp_path / "stopped", train_samples=500))
    loaded = rampup.load(tmp_path / "stopped" / "run")
    assert int(loaded.step) == plan.total_steps


@pytest.mark.slow
def test_rules_of_the_reference_batch_change_nothing(tmp_path):
    """With a constant batch, the scheduled constants are the given ones, and the losses those of `optax.adamw`."""
    constant = {"batch_size_schedule": "0:16", "seesaw_factor": None, "seesaw_max_batch_size": None, "train_samples": 160}
    train(config(tmp_path / "scheduled", **constant))
    train(config(tmp_path / "plain", **constant, batch_scaling="sqrt"))
    np.testing.assert_allclose(metrics(tmp_path / "scheduled"), metrics(tmp_path / "plain"), rtol=1e-6)
