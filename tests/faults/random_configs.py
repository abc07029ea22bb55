"""Random configurations, likely and unlikely, and the properties of their plans and
errors.
"""

import itertools
import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from helpers import oracle
from hypothesis import strategies as st

from rampup import build_plan, load_config
from rampup.config.schema import KEYS
from rampup.errors import BatchDivisibilityError, RampupError
from rampup.plan import describe

BASE = Path(__file__).parents[2] / "configs" / "base.yml"
CHECKED_STEPS = 200
SIZES = st.one_of(
    st.integers(1, 64),
    st.sampled_from(["1/2", "1/3", 0.5, 0.25, 1.5, "3/4", 0.1, 12.0]),
)
POWERS = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 8])
LIKELY = {
    **dict.fromkeys(
        (
            "enable_rampup_batch_size",
            "rampup_carry_overshoot",
            "pipeline_strict_multiple",
        ),
        st.booleans(),
    ),
    **dict.fromkeys(
        (
            "per_device_batch_size",
            "per_device_batch_size_start",
            "per_device_batch_size_increment",
        ),
        SIZES,
    ),
    "eval_per_device_batch_size": st.one_of(st.just(0), SIZES),
    "global_rampup_samples": st.integers(1, 20_000),
    "gradient_accumulation_steps": st.integers(1, 4),
    "rampup_microbatch": st.sampled_from(["fixed", "per_phase", "auto", "whole"]),
    "microbatch_size": st.sampled_from([-1, -1, 1, 2, 3, 4, 8]),
    "num_devices": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 64, 4096]),
    "ici_data_parallelism": st.sampled_from([-1, -1, 1, 2, 4]),
    **dict.fromkeys(
        ("ici_fsdp_parallelism", "ici_tensor_parallelism", "ici_pipeline_parallelism"),
        POWERS,
    ),
    "dcn_data_parallelism": st.sampled_from([-1, 1, 2]),
    "num_slices": st.sampled_from([-1, 1, 2]),
    "num_pipeline_microbatches": st.sampled_from([-1, -1, 1, 2, 4, 8, 6]),
    "num_pipeline_repeats": st.sampled_from([-1, -1, 1, 2]),
    "pipeline_tick_overhead": st.one_of(st.none(), st.floats(0, 10)),
    "base_num_decoder_layers": st.sampled_from([1, 2, 4, 8, 6, 12]),
    "expansion_factor_real_data": st.sampled_from([-1, -1, 2, 4, 0.5]),
    "steps": st.one_of(st.integers(1, 3000), st.just(-1)),
    "learning_rate_schedule_steps": st.one_of(st.just(-1), st.integers(1, 5000)),
    "learning_rate_clock": st.sampled_from(["samples", "steps"]),
    "batch_scaling": st.sampled_from(["none", "sqrt", "linear"]),
    "eval_interval": st.sampled_from([-1, 100]),
    "max_target_length": st.integers(1, 4096),
}
UNLIKELY = st.one_of(
    st.integers(-3, 3),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(
        [
            "",
            " ",
            "nan",
            "inf",
            "-inf",
            "1/0",
            "1e400",
            "1e-400",
            "0x10",
            "٣",
            "true",
            "-0",
            "0.0",
            "1_000",
            "auto",
        ]
    ),
)


@st.composite
def schedules(draw):
    """Return thresholds and sizes, mostly in order, as text with suffixes; sometimes
    any text of these characters.
    """
    if draw(st.integers(0, 9)) == 0:
        return draw(st.text(alphabet="0123456789:,. KMBTkmbt_-+eE/", max_size=30))
    steps = draw(
        st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 600)), max_size=6)
    )
    threshold, entries = 0, [(0, draw(st.integers(1, 600)))]
    for growth, size in steps:
        threshold += growth
        entries.append((threshold, size))
    if draw(st.integers(0, 9)) == 0:
        entries = draw(st.permutations(entries))
    return draw(st.sampled_from([" ", ", ", "  "])).join(
        f"{_count(draw, at)}:{_count(draw, size)}" for at, size in entries
    )


def _count(draw, number):
    forms = [
        str(number),
        f"{Decimal(number) / 1000}K",
        f"{number}.0",
        f"{number:_}",
        f"{Decimal(number) / 10**6}m",
    ]
    return draw(st.sampled_from(forms if draw(st.booleans()) else [str(number)]))


@st.composite
def sound_ramps(draw):
    """Return a linear ramp whose increments lead from its start to its end, with sizes
    that many meshes can split.
    """
    start, increment = (
        draw(st.sampled_from([1, 2, 4, 8, 16, 12, 0.5])),
        draw(st.sampled_from([1, 2, 4, 8, 3, 0.5])),
    )
    names = (
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "per_device_batch_size",
    )
    sizes = dict(
        zip(
            names,
            (start, increment, start + increment * draw(st.integers(1, 40))),
            strict=True,
        )
    )
    return sizes | {
        "enable_rampup_batch_size": True,
        "microbatch_size": -1,
        "num_slices": -1,
    }


@st.composite
def configs(draw):
    """Return the settings of a configuration; one in three has an absurd value."""
    names = draw(st.lists(st.sampled_from(sorted(LIKELY)), unique=True, max_size=14))
    settings = {name: draw(LIKELY[name]) for name in [*names, "num_devices"]}
    if draw(st.booleans()):
        settings |= draw(sound_ramps())
    if draw(st.integers(0, 2)) == 0:
        settings["batch_size_schedule"] = draw(schedules())
        settings["batch_size_schedule_unit"] = draw(
            st.sampled_from(["samples", "samples", "tokens"])
        )
        settings["enable_rampup_batch_size"] = draw(st.integers(0, 9)) == 0
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        settings[draw(st.sampled_from(sorted(KEYS)))] = draw(UNLIKELY)
    return settings


def as_yaml(settings):
    """Return settings as a file based on base.yml, each with its name as a comment."""
    lines = (
        f"{name}: {json.dumps(value)}  # {name}\n" for name, value in settings.items()
    )
    return f"base_config: {BASE}\n" + "".join(lines).replace("NaN", ".nan").replace(
        "Infinity", ".inf"
    )


def load(settings):
    """Return the configuration and the plan of settings in a file based on base.yml."""
    config = load_config(BASE.with_name("gpt3_175b.yml"), text=as_yaml(settings))
    return config, build_plan(
        config, config.num_devices if config.num_devices != -1 else 4
    )


def check(settings):
    """Assert that settings give a valid plan, or an error with keys and legal offers;
    return which of the two.
    """
    try:
        config, plan = load(settings)
    except RampupError as error:
        problems = error.problems or (error,)
        for problem in problems:
            assert problem.key in KEYS, (problem, problem.key)
        offers_sizes = error.key != "batch_size_schedule" or isinstance(
            error, BatchDivisibilityError
        )
        for value in error.nearest if len(problems) == 1 and offers_sizes else ():
            check_offer(settings, error, value)
        return "refused"
    check_plan(config, plan)
    return "planned"


def check_offer(settings, error, value):
    """Assert that the offered value is legal: by itself, and if the refused one was
    too, together with the other keys.
    """
    if not KEYS[error.key].allows(settings.get(error.key, value)):
        assert KEYS[error.key].allows(value), (str(error), value)
        return
    if error.key == "batch_size_schedule":  # errors about schedules offer only sizes
        entries = [
            entry.split(":")
            for entry in settings["batch_size_schedule"].replace(",", " ").split()
        ]
        value = " ".join(
            f"{at}:{value if number(size) == error.value else size}"
            for at, size in entries
        )
    try:
        load(settings | {error.key: value})
    except RampupError as other:
        for problem in other.problems or (other,):
            assert problem.key != error.key, (str(error), value, str(problem))


def check_plan(config, plan):
    """Assert the properties of every plan, whose first steps agree with the slow
    reference.
    """
    d = plan.splitter.data_parallel_size
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        parts = (
            split.accumulation_steps,
            split.num_pipeline_microbatches,
            split.microbatch_size,
        )
        assert (
            phase.global_batch_size == d * math.prod(parts) == split.global_batch_size
        )
        assert min(parts) >= 1
        assert split.global_batch_size % config.gradient_accumulation_steps == 0
    if (split := plan.eval_split) is not None:
        assert (
            split.global_batch_size
            == d
            * split.accumulation_steps
            * split.num_pipeline_microbatches
            * split.microbatch_size
        )
    json.dumps(plan.to_dict(), allow_nan=False)
    assert all(map(str, (*describe.summary(plan), *describe.advice(plan))))
    last = plan.position(plan.total_steps - 1)
    assert last.consumed_samples + last.split.global_batch_size == plan.consumed_samples
    consumed = 0
    for step, size in enumerate(
        itertools.islice(sizes_of(config, plan), CHECKED_STEPS)
    ):
        assert plan.ramp.global_batch_size_at(step) == size
        assert plan.ramp.samples_before(step) == consumed
        assert (
            plan.ramp.step_of_sample(consumed)
            == step
            == plan.ramp.step_of_sample(consumed + size - 1)
        )
        position = plan.position(step)
        assert (
            position.step,
            position.consumed_samples,
            position.split.global_batch_size,
        ) == (step, consumed, size)
        assert plan.rows(step) == range(consumed, consumed + size)
        consumed += size


def sizes_of(config, plan):
    """Return the batch of every step, counted step by step from the configuration."""
    factor = plan.num_devices * config.gradient_accumulation_steps
    if (
        config.batch_size_schedule == "auto"
    ):  # planned as the batch before the first decision
        return itertools.repeat(plan.reserved_sizes[0])
    if config.batch_size_schedule is not None:
        length = (
            config.max_target_length
            if config.batch_size_schedule_unit == "tokens"
            else 1
        )
        pairs = [
            entry.split(":")
            for entry in config.batch_size_schedule.replace(",", " ").split()
        ]
        return oracle.piecewise_steps(
            [(number(at) // length, number(size)) for at, size in pairs]
        )
    end = config.per_device_batch_size * factor
    assert end.denominator == 1
    if not config.enable_rampup_batch_size:
        return itertools.repeat(int(end))
    start, increment = (
        config.per_device_batch_size_start * factor,
        config.per_device_batch_size_increment * factor,
    )
    assert start.denominator == increment.denominator == 1
    samples = config.global_rampup_samples
    return oracle.linear_steps(
        int(start),
        int(increment),
        int(end),
        samples,
        carry_overshoot=config.rampup_carry_overshoot,
    )


def number(text):
    """Return the value of a count with a suffix."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    value = Fraction(Decimal(digits.replace("_", ""))) * factor
    assert value.denominator == 1
    return int(value)
