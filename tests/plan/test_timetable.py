"""Tests of rampup.plan.pipeline."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import PipelineShapeError
from rampup.plan.pipeline import Timetable, bubble_fraction, group_sizes

STAGES, MICROBATCHES, REPEATS = range(1, 9), range(1, 33), range(1, 5)


def build(schedule, p, m, v=1, **options):
    """Return a timetable with equal costs of forward and backward unless they are given."""
    options = {"forward_cost": 1, "backward_cost": 1} | options
    return Timetable.build(schedule, num_stages=p, num_microbatches=m, num_repeats=v, **options)


@pytest.mark.parametrize(
    ("p", "m", "slots", "span", "bubble", "peaks", "zero_bubble_span"),
    [
        (2, 4, 10, 15, Fraction(1, 5), (2, 1), 13),
        (4, 8, 22, 33, Fraction(3, 11), (4, 3, 2, 1), 27),
        (8, 32, 78, 117, Fraction(7, 39), (8, 7, 6, 5, 4, 3, 2, 1), 103),
        (4, 3, 12, 18, Fraction(1, 2), (3, 3, 2, 1), None),
        (4, 6, 18, 27, Fraction(1, 3), (4, 3, 2, 1), None),
    ],
)
def test_build_agrees_with_published_numbers_without_repeats(p, m, slots, span, bubble, peaks, zero_bubble_span):
    """GPipe, 1F1B and ZB-H1 have the spans, bubbles and peaks of other implementations' tables."""
    for schedule, live in (("gpipe", (m,) * p), ("1f1b", peaks)):
        table = build(schedule, p, m)
        assert (table.makespan, table.bubble_fraction, table.peak_live_microbatches) == (slots, bubble, live)
        assert build(schedule, p, m, backward_cost=2).makespan == span
    if zero_bubble_span:
        table = build("zb-h1", p, m, backward_cost=2)
        assert (table.makespan, table.peak_live_microbatches) == (zero_bubble_span, (p,) * p)
        assert table.bubble_fraction == Fraction(p - 1, zero_bubble_span)


@pytest.mark.parametrize(
    ("p", "m", "v", "ticks", "bubble", "peak"),
    [
        (2, 4, 2, 9, Fraction(1, 9), Fraction(5, 2)),
        (4, 8, 2, 19, Fraction(3, 19), Fraction(11, 2)),
        (4, 8, 4, 35, Fraction(3, 35), Fraction(19, 4)),
        (8, 16, 4, 71, Fraction(7, 71), Fraction(39, 4)),
        (4, 6, 2, 15, Fraction(1, 5), 6),
        (4, 3, 2, 10, Fraction(2, 5), 3),
        (4, 2, 2, 9, Fraction(5, 9), 2),
    ],
)
def test_build_agrees_with_published_numbers_with_repeats(p, m, v, ticks, bubble, peak):
    """Interleaved and circular have the ticks, bubbles and peaks of other implementations' tables."""
    for schedule, live in (("interleaved", peak), ("circular", m)):
        table = build(schedule, p, m, v)
        assert (table.makespan * v, table.bubble_fraction) == (2 * ticks, bubble)
        assert table.peak_live_microbatches[0] == live


@pytest.mark.parametrize("p", STAGES)
def test_closed_forms_agree_with_counts_without_repeats(p):
    """Makespan, bubble and peak of every stage, for every p and every m up to 32."""
    for m in MICROBATCHES:
        for schedule in ("gpipe", "1f1b"):
            table = build(schedule, p, m, backward_cost=2)
            assert table.makespan == 3 * (m + p - 1)
            assert table.bubble_fraction == bubble_fraction(p, m)
            assert table.peak_live_microbatches == peaks(schedule, p, m)
        if m >= p:
            table = build("zb-h1", p, m, backward_cost=2)
            assert table.makespan == 3 * m + p - 1
            assert table.peak_live_microbatches == peaks("zb-h1", p, m)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_closed_forms_agree_with_counts_with_repeats(p, v):
    """With repeats the bubble is 1/v as large, and only m < p stalls, for every m up to 32."""
    for m in MICROBATCHES:
        for schedule in ("interleaved", "circular"):
            table = build(schedule, p, m, v, backward_cost=2)
            assert table.makespan == Fraction(3 * (max(m, p) * (v - 1) + m + p - 1), v)
            assert table.bubble_fraction == bubble_fraction(p, m, v)
            assert table.peak_live_microbatches == peaks(schedule, p, m, v)


def peaks(schedule, p, m, v=1):
    """Return the closed form of `peak_live_microbatches`. Interleaved means balanced groups."""

    def peak(stage):
        after = p - 1 - stage
        if schedule in ("gpipe", "circular"):
            return m
        if schedule == "1f1b":
            return min(m, after + 1)
        if schedule == "zb-h1":
            return min(m, p)
        return Fraction(min(v * m, 2 * after + (v - 1) * group_sizes(m, p)[0] + 1), v)

    return tuple(map(peak, range(p)))


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "circular", "zb-h1"]),
    p=st.integers(0, 6),
    m=st.integers(-1, 12),
    v=st.integers(0, 3),
    forward=st.fractions(-1, 8, max_denominator=16),
    backward=st.fractions(-1, 8, max_denominator=16),
)
def test_every_timetable_is_valid_or_refused(schedule, p, m, v, forward, backward):
    """For any costs: each operation once, one at a time per stage, inputs before their use, and all costs counted."""
    v = v if schedule in ("interleaved", "circular") else min(v, 1)
    m = max(m, p) if schedule == "zb-h1" else m
    if min(p, m, v, forward, backward) <= 0:
        with pytest.raises(PipelineShapeError):
            build(schedule, p, m, v, forward_cost=forward, backward_cost=backward)
        return
    table = build(schedule, p, m, v, forward_cost=forward, backward_cost=backward)
    kinds = "FIW" if schedule == "zb-h1" else "FB"
    done = {(o.kind, o.stage, o.microbatch, o.repeat): o for o in table.operations}
    assert len(done) == len(table.operations) == p * m * v * len(kinds)
    for stage in range(p):
        own = table.of_stage(stage)
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
        assert sum(o.end - o.start for o in own) == m * (forward + backward)
    backwards = kinds[1]
    for (kind, s, k, r), o in done.items():
        place = r * p + s
        if kind == "F" and place:
            assert done["F", (place - 1) % p, k, (place - 1) // p].end <= o.start
        if kind == backwards:
            needed = ("F", s, k, r) if place == p * v - 1 else (kind, (place + 1) % p, k, (place + 1) // p)
            assert done[needed].end <= o.start
        if kind == "W":
            assert done["I", s, k, r].end <= o.start
    assert int(table.num_ticks) * table.tick == table.makespan


@pytest.mark.parametrize(("p", "m", "v", "sends"), [(1, 4, 1, (0,)), (3, 4, 1, (4, 8, 4)), (3, 4, 2, (12, 16, 12))])
def test_sends_per_stage(p, m, v, sends):
    """Each stage sends activations forward and gradients backward. The ends of the pipeline send nothing."""
    assert build("interleaved" if v > 1 else "1f1b", p, m, v).sends_per_stage == sends


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [
        ({"schedule": "2f2b"}, "schedule", ("gpipe", "1f1b", "interleaved", "circular", "zb-h1")),
        ({"num_stages": 0}, "stages", (1,)),
        ({"num_microbatches": 0}, "microbatches", (1,)),
        ({"num_repeats": -1}, "repeats", (1,)),
        ({"num_repeats": 2}, "repeats", (1,)),
        ({"schedule": "zb-h1", "num_microbatches": 3}, "microbatches", (4,)),
        ({"forward_cost": 0}, "forward-cost", (1,)),
        ({"backward_cost": -1}, "backward-cost", (1,)),
        ({"num_microbatches": 10**9}, "microbatches", (166_666,)),
    ],
)
def test_build_rejects_undefined_schedules(change, key, nearest):
    """Each error has the key to change, and the nearest numbers for which the schedule is defined."""
    shape = {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 8} | change
    with pytest.raises(PipelineShapeError) as caught:
        Timetable.build(**shape)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)
