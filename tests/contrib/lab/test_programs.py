"""Tests of rampup.contrib.lab.programs."""

from unittest import mock

import jax
import pytest
from helpers.tiny import TUNED

from rampup import Config, build_plan
from rampup.contrib.lab import programs
from rampup.contrib.lab.programs import median_seconds
from rampup.engine.mesh import make_mesh
from rampup.lm.train import TrainSetup


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        {"ici_pipeline_parallelism": 2},
        {"shard_optimizer_over_data": True},
    ],
)
@pytest.mark.parametrize(
    "opt_type", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)]
)
def test_state_shapes_match_the_initial_state(axes, opt_type):
    """Shapes, types and shardings equal those of the arrays that training starts
    from.
    """
    changes = {
        "opt_type": opt_type,
        "batch_size_schedule": "0:16",
        "base_num_decoder_layers": 2,
    }
    settings = Config(**TUNED | axes | changes)
    plan = build_plan(settings, 8)
    setup = TrainSetup.from_config(settings, plan, make_mesh(plan.axes))
    state, shapes = setup.initial_state(), setup.state_shapes()

    def same(real, shape):
        placed = real.sharding.is_equivalent_to(shape.sharding, real.ndim)
        return (real.shape, real.dtype) == (shape.shape, shape.dtype) and placed

    assert jax.tree.all(jax.tree.map(same, state, shapes))


def test_a_step_is_timed_several_times(monkeypatch):
    """The first runs are not counted, and a small budget gives one more."""
    step = mock.Mock()
    assert median_seconds(step) >= 0
    assert step.call_count == 11
    monkeypatch.setattr(programs, "TIMING_SECONDS", 0)
    median_seconds(step)
    assert step.call_count == 14
