"""Tests of rampup.plan.numbers."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rampup.config.build import build_plan
from rampup.config.schema import Config
from rampup.data.batches import eval_batches
from rampup.engine.mesh import make_mesh
from rampup.errors import BatchDivisibilityError, ConfigError, RampDefinitionError
from rampup.loop.checkpoint import CheckpointOptions
from rampup.loop.loop import EvalOptions
from rampup.plan import numbers
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import (
    divisors,
    exact_fraction,
    nearest_in,
    nearest_multiples,
    parse_count,
    to_yaml_number,
)
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.plan.steps import steps_of

COUNTS = {
    "250B": 250 * 10**9,
    "2.01K": 2010,
    "117.25b": 117_250 * 10**6,
    "1_000": 1000,
    "0": 0,
    "0.5K": 500,
    " 7 ": 7,
    12: 12,
}


@pytest.mark.parametrize(("text", "value"), COUNTS.items())
def test_parse_count_is_exact(text, value):
    """Numbers with suffixes and decimals are parsed exactly."""
    assert parse_count(text, what="threshold") == value


@pytest.mark.parametrize(
    "text",
    [
        *[
            "-1",
            "B",
            "1G",
            "inf",
            "nan",
            "1e30",
            "1e999999999",
            "1e-999999999",
            "two",
            "1,000",
            "0x10",
            "1BB",
        ],
        "",
        "1 000",
        None,
    ],
)
def test_parse_count_rejects(text):
    """Text that is not a whole count up to 10**18 is rejected."""
    with pytest.raises(RampDefinitionError):
        parse_count(text, what="threshold")


@given(st.decimals(min_value=0, max_value=10**6, places=4))
def test_exact_fraction_of_decimals(number):
    """A decimal, as text or as a float, is exactly that fraction, and a fraction may
    have a slash.
    """
    assert exact_fraction(" 2 / 4 ", what="size") == Fraction(1, 2)
    assert exact_fraction(str(number), what="size") == Fraction(number)
    assert exact_fraction(float(number), what="size") == Fraction(number)


@pytest.mark.parametrize(
    "value",
    [
        True,
        "x",
        "1/0",
        "1/2/3",
        None,
        [],
        "",
        float("inf"),
        float("nan"),
        "sNaN",
        "1e400",
        1e19,
        "1e-400",
    ],
)
def test_exact_fraction_rejects(value):
    """Values that are not finite numbers of a sensible magnitude are rejected."""
    with pytest.raises(RampDefinitionError):
        exact_fraction(value, what="size")


@given(st.fractions(min_value=0, max_value=1000, max_denominator=50))
def test_to_yaml_number_reads_back(value):
    """`exact_fraction` reads the same number back."""
    assert exact_fraction(to_yaml_number(value), what="size") == value
    assert abs(numbers.plain_number(value) - value) < 1e-9


@given(st.integers(-20, 60), st.integers(1, 12))
def test_an_error_has_the_nearest_multiples(value, divisor):
    """An error about a value that does not divide has the positive multiples around
    it.
    """
    error = BatchDivisibilityError("", value=value, divisor=divisor)
    around = [n for n in (error.nearest_below, error.nearest_above) if n]
    assert around == list(error.nearest) == nearest_multiples(value, divisor)


@example(Fraction(16), Fraction(8), Fraction(0))
@example(Fraction(3), Fraction(8), Fraction(0))
@given(
    st.fractions(-9, 9, max_denominator=6),
    st.fractions("1/6", 3, max_denominator=6),
    st.fractions(0, 3, max_denominator=6),
)
def test_nearest_multiples_with_offset(value, step, offset):
    """Fractions are the positive numbers offset + n * step around a value, found by
    listing them all.
    """
    listed = [offset + n * step for n in range(-100, 101)]
    above = min(n for n in listed if n >= value and n > 0)
    below = [n for n in listed if 0 < n < above]
    assert nearest_multiples(value, step, offset) == [
        *([max(below)] if below else []),
        above,
    ]


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_divisors_and_nearest_in(number, value):
    """`divisors` returns all of them in ascending order, and `nearest_in` the closest
    on each side.
    """
    found = divisors(number)
    assert found == [n for n in range(1, number + 1) if number % n == 0]
    below, above = [n for n in found if n < value], [n for n in found if n > value]
    assert nearest_in(value, found) == ([max(below)] if below else []) + (
        [min(above)] if above else []
    )


SPLITTER = BatchSplitter(data_parallel_size=1)
RAMP = BatchRamp.from_schedule("0:8 80:16")
PLAN = {"ramp": RAMP, "splitter": SPLITTER, "num_devices": 1, "total_steps": 9}
COUNTED = {
    "build_plan": ("num_devices", lambda n: build_plan(Config(), n)),
    "RampPlan": ("num_devices", lambda n: RampPlan(**PLAN | {"num_devices": n})),
    "its steps": ("total_steps", lambda n: RampPlan(**PLAN | {"total_steps": n})),
    "position": ("step", RampPlan(**PLAN).position),
    "splitter": ("data_parallel_size", lambda n: BatchSplitter(data_parallel_size=n)),
    "microbatch": ("microbatch_size", lambda n: replace(SPLITTER, microbatch_size=n)),
    "axes": ("fsdp", lambda n: MeshAxes(fsdp=n)),
    "resolve": ("num_devices", lambda n: MeshAxes.resolve(n, ici={"data": -1})),
    "constant": ("global_batch_size", BatchRamp.constant),
    "linear": (
        "end",
        lambda n: BatchRamp.linear(start=1, increment=1, end=n, samples=9),
    ),
    "piecewise": ("threshold", lambda n: BatchRamp.piecewise([(0, 1), (n, 2)])),
    "spliced_at": ("step", lambda n: RAMP.spliced_at(n, RAMP)),
    "resumed_at": ("step", RAMP.resumed_at),
    "stop": ("stop", lambda n: steps_of(RampPlan(**PLAN), 0, n)),
    "evaluation": ("batch_size", lambda n: next(eval_batches([1, 2], n, make_mesh()))),
    "checkpoints": (
        "checkpoint_period",
        lambda n: CheckpointOptions(checkpoint_period=n),
    ),
    "eval_interval": (
        "eval_interval",
        lambda n: EvalOptions(evaluate=dict, eval_interval=n),
    ),
}


@pytest.mark.parametrize(("name", "call"), COUNTED.values(), ids=COUNTED)
def test_a_number_that_is_not_whole_is_refused_by_its_name(name, call):
    """Text, floats and True are no numbers of devices, steps or samples; integers of
    NumPy are.
    """
    for number in ("8", 8.0, True, [8]):
        with pytest.raises(ConfigError, match=f"^{name}=.* must be a whole number$"):
            call(number)
    call(np.int64(8))
