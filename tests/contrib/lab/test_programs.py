"""Tests of rampup.contrib.lab.programs."""

import itertools
from fractions import Fraction
from unittest import mock

import jax
import pytest
from helpers.tiny import TUNED
from hypothesis import given
from hypothesis import strategies as st

from rampup import Config, build_plan
from rampup.contrib.lab.programs import fit_line, fit_tick_overhead, take_turns
from rampup.engine.mesh import make_mesh
from rampup.lm.train import TrainSetup
from rampup.plan.pipeline import pass_ticks, predicted_time


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


def test_take_turns_runs_steps_equally_often():
    """All steps run equally often, the first rounds are not counted, and a small budget
    gives one round.
    """
    steps = {"a": mock.Mock(), "b": mock.Mock()}
    times = take_turns(steps)
    assert steps["a"].call_count == steps["b"].call_count > times["a"].rounds == 5
    assert take_turns(steps, seconds=0)["a"].rounds == 1


@pytest.mark.parametrize("repeats", [1, 2, 4])
@pytest.mark.parametrize("overhead", [0, 0.25, 3])
def test_fit_tick_overhead_inverts_predicted_time(repeats, overhead):
    """Times made by `predicted_time`, plus a constant for the optimizer, return the
    overhead.
    """
    times = {b: [] for b in (1, 2, 8)}
    for b, m in itertools.product(times, (4, 8, 16)):
        seconds = float(
            predicted_time(
                m, b, num_stages=4, num_repeats=repeats, overhead=Fraction(overhead)
            )
        )
        times[b].append((pass_ticks(4, m, repeats), 0.5 + 0.01 * seconds))
    assert fit_tick_overhead(times, num_repeats=repeats) == pytest.approx(
        overhead, abs=1e-6
    )


@pytest.mark.parametrize(
    ("times", "overhead"),
    [
        ({1: [(5, 1.0), (9, 2.0)]}, None),  # one size
        ({1: [(5, 1.0)], 2: [(5, 2.0)]}, None),  # one number of ticks
        (
            {1: [(5, 2.0), (9, 1.0)], 2: [(5, 2.0), (9, 3.0)]},
            None,
        ),  # times that decrease
        (
            {1: [(5, 2.0), (9, 3.0)], 2: [(5, 2.0), (9, 3.0)]},
            None,
        ),  # times that do not grow with the size
        ({2: [(1, 1.0), (2, 2.0)], 4: [(1, 3.0), (2, 6.0)]}, 0),  # a negative overhead
    ],
)
def test_fit_tick_overhead_returns_none_without_enough_data(times, overhead):
    """What the times do not determine is None."""
    assert fit_tick_overhead(times, num_repeats=1) == overhead


@given(st.integers(1, 200), st.floats(1e-4, 10), st.integers(1, 3))
def test_fit_line_of_one_place_goes_through_zero(x, y, number):
    """Points with the same x give the line through 0, whatever their mean rounds to;
    two places give the line through both.
    """
    assert fit_line([(x, y)] * number) == (0.0, pytest.approx(y / x, rel=1e-9))
    start, slope = fit_line([(x, y), (x + 4, 2 * y)])
    assert [start + slope * place for place in (x, x + 4)] == pytest.approx(
        [y, 2 * y], rel=1e-6
    )
