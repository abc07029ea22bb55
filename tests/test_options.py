"""Tests of the options of a program of one's own: what the command line refuses as a
key, an argument refuses too, when it is given.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rampup
from rampup.engine import LearningRate
from rampup.plan import AdamConstants, AdamScaling, RateRule

PLAN = rampup.build_plan(rampup.Config(batch_size_schedule="0:8", steps=20), 1)
MESH = rampup.make_mesh(devices=jax.devices()[:1])
ROWS = np.linspace(0, 1, 32, dtype=np.float32)


def loss_fn(params, batch, keys):
    """Return the squares of a number per row."""
    return ((params - batch) ** 2).sum(), batch.size, {}


STEP = rampup.train_step(loss_fn, optax.sgd(0.1), PLAN, MESH)


def rate(**options):
    """Return a learning rate with some options."""
    return LearningRate(**{"plan": PLAN, "peak": 1.0} | options)


def loop(folder, **options):
    """Return a loop with some options."""
    given = {
        "plan": PLAN,
        "step": STEP,
        "batches": lambda start: STEP.batches(ROWS, start),
    }
    return rampup.Loop(folder=folder, **(given | options))


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (rampup.CheckpointOptions, {"checkpoint_period": 0}, "must be at least 1"),
        (rampup.CheckpointOptions, {"checkpoint_period": -1}, "must be at least 1"),
        (rampup.CheckpointOptions, {"checkpoint_period": 2.5}, "a whole number"),
        (rampup.CheckpointOptions, {"max_to_keep": 0}, "must be at least 1"),
        (rampup.EvalOptions, {"eval_interval": 0, "evaluate": dict}, "at least 1"),
        (rampup.MetricOptions, {"skip_nonfinite": -1}, "must be at least 0"),
        (rampup.MetricOptions, {"tokens_per_sample": 0}, "must be at least 1"),
        (rampup.TrainProgress, {"log_period": 0}, "must be at least 1"),
        (rampup.data.BatchOptions, {"chunk_size": 0}, "must be at least 1"),
        (rampup.data.BatchOptions, {"read_ahead": 2.5}, "must be a whole number"),
        (rate, {"kind": "cos"}, "must be one of cosine, wsd, constant"),
        (rate, {"kind": "Cosine"}, "must be one of cosine, wsd, constant"),
        (rate, {"peak": -1.0}, "must be a number of at least 0"),
        (rate, {"peak": float("nan")}, "must be a number of at least 0"),
        (rate, {"warmup_fraction": 100}, "must be a number from 0 to 1"),
        (rate, {"warmup_fraction": "0.1"}, "must be a number from 0 to 1"),
        (rate, {"final_fraction": 2}, "must be a number from 0 to 1"),
        (rate, {"decay_fraction": 10}, "must be a number from 0 to 1"),
        (AdamConstants, {"b2": 1.5}, "must be a number from 0 to 1"),
        (AdamConstants, {"eps": -1e-8}, "must be a number of at least 0"),
        (AdamConstants, {"weight_decay": -0.1}, "must be a number of at least 0"),
        (RateRule, {"schedule_steps": 0}, "must be at least 1"),
        (RateRule, {"reference_batch_size": -3}, "must be at least 1"),
        (AdamScaling, {"token_ratio": -1}, "must be a number of at least 0"),
        (AdamScaling, {"b2_floor": 5}, "must be a number from 0 to 1"),
        (RateRule, {"clock": "samplez"}, "must be one of steps, samples"),
        (RateRule, {"batch_scaling": "squareroot"}, "must be one of none, sqrt"),
    ],
)
def test_an_option_is_refused_when_it_is_given(make, options, said):
    """By its name; and it would otherwise end the checkpoints, or change the rate."""
    name = next(iter(options))
    with pytest.raises(rampup.RampupError, match=rf"{name}=.* {said}"):
        make(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"start": -1}, "the plan has the steps 0 to 20"),
    ],
)
def test_batches_refuse_what_no_plan_has(options, said):
    """Before the first of them."""
    with pytest.raises(rampup.RampupError, match=said):
        next(STEP.batches(ROWS, **options), None)


def test_a_loop_names_what_is_no_function_and_no_metric(tmp_path):
    """Batches that would be gone at a resume, and an evaluation that is a number or has
    an array.
    """
    with pytest.raises(
        rampup.RampupError, match="batches is a StepBatches and no func"
    ):
        loop(tmp_path, batches=STEP.batches(ROWS))
    for found, said in ((1.0, "a float"), ({"eval_loss": jnp.zeros(2)}, "a dict")):
        evaluation = rampup.EvalOptions(evaluate=lambda _, x=found: x, eval_interval=5)
        state = rampup.create_state(jnp.float32(0), optax.sgd(0.1), MESH)
        with pytest.raises(
            rampup.RampupError, match=f"evaluate returned {said} and no numbers by name"
        ):
            loop(tmp_path, evaluation=evaluation).run(state)


def test_a_loop_that_is_asked_for_fewer_steps_is_finished(tmp_path):
    """Nothing is left to do, and nothing is wrong."""
    checkpoints = rampup.CheckpointOptions(checkpoint_period=5)
    state = rampup.create_state(jnp.float32(0), optax.sgd(0.1), MESH)
    loop(tmp_path, checkpoints=checkpoints).run(state)
    plan = rampup.build_plan(rampup.Config(batch_size_schedule="0:8", steps=10), 1)
    step = rampup.train_step(loss_fn, optax.sgd(0.1), plan, MESH)
    shorter = rampup.Loop(
        plan=plan,
        step=step,
        batches=lambda start: step.batches(ROWS, start),
        folder=tmp_path,
        checkpoints=checkpoints,
    )
    state = rampup.create_state(jnp.float32(0), optax.sgd(0.1), MESH)
    assert shorter.run(state)[1].steps == 20


def test_a_mesh_of_some_devices_is_shown():
    """The way to fewer devices than JAX sees."""
    with pytest.raises(rampup.RampupError, match=r"devices=jax.devices\(\)\[:2\]"):
        rampup.make_mesh(rampup.MeshAxes(data=2))


def test_accumulate_takes_the_arrays_of_a_batch():
    """And names them, where it is given the batch itself."""
    batch = next(STEP.batches(ROWS))
    with pytest.raises(rampup.RampupError, match=r"give .*batch.chunks\[0\]"):
        rampup.accumulate(loss_fn, jnp.float32(0), batch, 1, mesh=MESH)


def test_a_loop_and_its_step_follow_one_plan(tmp_path):
    """The counts and checkpoints of another would be of a run that there was not."""
    other = rampup.build_plan(
        rampup.Config(batch_size_schedule="0:8 32:16", steps=20), 1
    )
    step = rampup.train_step(loss_fn, optax.sgd(0.1), other, MESH)
    with pytest.raises(rampup.RampupError, match="step follows another plan than"):
        loop(tmp_path, step=step)
    for number in (STEP.plan.total_steps - 1, STEP.plan.total_steps + 1):
        plan = replace(STEP.plan, total_steps=number)
        with pytest.raises(rampup.RampupError, match="step follows another plan than"):
            loop(tmp_path, plan=plan)
