"""Tests of rampup.plan.ramp."""

import itertools

import pytest
from helpers.dialect_files import cases
from helpers.oracle import linear_steps, piecewise_steps
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import RampDefinitionError
from rampup.plan.ramp import MAX_PHASES, BatchRamp, Phase, parse_schedule

WRONG_ORDER = "250:32 0:8 100:16"


def table(ramp):
    """Return a ramp in the format of the reference files."""
    return [
        [phase.start_step, phase.global_batch_size, phase.start_sample]
        for phase in ramp.phases
    ]


def check_steps(ramp, oracle):
    """Check every look-up at each step of a ramp: by step, and by the first and the
    last sample of the step.
    """
    consumed = 0
    for step, size in enumerate(
        itertools.islice(oracle, min(ramp.ramp_steps + 3, 4000))
    ):
        assert (ramp.global_batch_size_at(step), ramp.samples_before(step)) == (
            size,
            consumed,
        )
        assert (
            ramp.step_of_sample(consumed)
            == ramp.step_of_sample(consumed + size - 1)
            == step
        )
        assert ramp.phase_of_sample(consumed) is ramp.phase_at(step)
        consumed += size


@pytest.mark.parametrize("case", cases("ramp_megatron"), ids=lambda c: c["name"])
def test_ramps_agree_with_megatron(case):
    """Megatron's linear ramps and schedule strings give its phases. A schedule in the
    wrong order is rejected.
    """
    keys = case["config"]
    if "rampup_batch_size" in keys:
        start, increment, samples = keys["rampup_batch_size"]
        end = keys["global_batch_size"]
        ramp = BatchRamp.linear(
            start=start,
            increment=increment,
            end=end,
            samples=samples,
            carry_overshoot=True,
        )
    elif keys["step_batch_size_schedule"] == WRONG_ORDER:
        with pytest.raises(RampDefinitionError, match="first threshold must be 0"):
            BatchRamp.from_schedule(WRONG_ORDER)
        return
    else:
        text, length = keys["step_batch_size_schedule"], keys["seq_length"]
        assert [
            list(pair) for pair in parse_schedule(text, sequence_length=length)
        ] == case["thresholds_samples"]
        ramp = BatchRamp.from_schedule(text, sequence_length=length)
    assert table(ramp) == case["phases"]


linear_keys = st.tuples(
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 12),
    st.integers(1, 3000),
    st.booleans(),
)


@pytest.mark.core
@given(linear_keys)
def test_linear_agrees_with_step_by_step_counting(keys):
    """The closed form of a linear ramp agrees with counting step by step."""
    start, increment, number, samples, carry = keys
    end = start + increment * number
    ramp = BatchRamp.linear(
        start=start,
        increment=increment,
        end=end,
        samples=samples,
        carry_overshoot=carry,
    )
    check_steps(
        ramp, linear_steps(start, increment, end, samples, carry_overshoot=carry)
    )
    assert ramp.samples_per_increment * ramp.num_increments == samples


@pytest.mark.core
@given(st.dictionaries(st.integers(1, 1600), st.integers(1, 60), max_size=8))
def test_piecewise_agrees_with_step_by_step_counting(later):
    """The closed form of a schedule agrees with counting step by step, with decreases
    and skipped sizes.
    """
    pairs = [(0, 7), *sorted(later.items())]
    check_steps(BatchRamp.piecewise(pairs), piecewise_steps(pairs))


def test_look_ups_refuse_negative_numbers():
    """Steps and samples are counted from 0."""
    ramp = BatchRamp.from_schedule("0:8 100:16 250:32")
    for look_up in (
        ramp.phase_at,
        ramp.global_batch_size_at,
        ramp.samples_before,
        ramp.step_of_sample,
        ramp.phase_of_sample,
    ):
        with pytest.raises(RampDefinitionError, match="must not be negative"):
            look_up(-1)


BAD = {
    "": "is empty",
    "5:8": "first threshold must be 0",
    "0:8 100": "is not THRESHOLD:SIZE",
}
BAD |= {
    "0:8 1,000:16": "is not THRESHOLD:SIZE",
    "0:8 100:0": "must be at least 1",
    "0:8 100:12.9": "must be a whole number",
}
BAD |= {"0:8 200:16 100:32": "must increase", "0:8 100:16 100:32": "must increase"}
BAD |= {"0:8 1G:16": "is not a number", "0:8:16": "is not a number"}


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_from_schedule_rejects(text, message):
    """An invalid schedule is rejected, and the error has the key."""
    with pytest.raises(RampDefinitionError, match=message) as caught:
        BatchRamp.from_schedule(text)
    assert caught.value.key == "batch_size_schedule"


def test_from_schedule_rejects_what_is_no_text():
    """One size is a constant batch, which the error names."""
    with pytest.raises(
        RampDefinitionError, match=r"=16 must be a text.*BatchRamp\.constant"
    ):
        BatchRamp.from_schedule(16)


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [
        ({"start": 0}, "start", (1,)),
        ({"increment": 0}, "increment", (1,)),
        ({"samples": 0}, "samples", (1,)),
        ({"end": 16}, "end", ()),
        ({"increment": 7}, "end", (44, 51)),
        ({"increment": 100}, "end", (116,)),
    ],
)
def test_linear_rejects(change, key, nearest):
    """Sizes that do not grow to the end are rejected with the nearest ones that do."""
    keys = {"start": 16, "increment": 8, "end": 48, "samples": 500} | change
    with pytest.raises(RampDefinitionError) as caught:
        BatchRamp.linear(**keys)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)


def test_phases_are_contiguous_and_of_a_bounded_number():
    """Phases with a gap are rejected, and before it is built a table that could exhaust
    memory.
    """
    with pytest.raises(RampDefinitionError, match="too many"):
        BatchRamp.linear(start=1, increment=1, end=MAX_PHASES + 5, samples=10)
    phase = Phase(
        index=0, start_step=5, start_sample=0, num_steps=None, global_batch_size=8
    )
    with pytest.raises(RampDefinitionError, match="must start at step 0"):
        BatchRamp(phases=(phase,))
    with pytest.raises(RampDefinitionError, match="at least one phase"):
        BatchRamp(phases=())


def test_fingerprint_identifies_the_rows():
    """Two definitions of the same ramp have the same one: a threshold that does not
    change the size does not start a phase.
    """
    one, same = (
        BatchRamp.from_schedule("0:8 100:16"),
        BatchRamp.piecewise([(0, 8), (50, 8), (100, 16)]),
    )
    assert table(same) == [[0, 8, 0], [13, 16, 104]]
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != BatchRamp.from_schedule("0:8 105:16").fingerprint
