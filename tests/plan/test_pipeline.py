"""Tests of rampup.plan.pipeline."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup import Config, build_plan
from rampup.errors import PipelineShapeError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan, pipeline
from rampup.plan.pipeline import (
    SCHEDULES,
    Timetable,
    fastest_microbatches,
    pass_bubble,
    pass_ticks,
    pipeline_repeats,
    predicted_time,
)

PIPELINE = {
    "ici_pipeline_parallelism": 4,
    "base_num_decoder_layers": 8,
    "per_device_batch_size": 16,
}
PIPELINE |= {"rampup_microbatch": "per_phase", "num_pipeline_repeats": 1}


REPEATS = {(8, 4, -1): 2, (8, 4, 1): 1, (8, 1, -1): 1, (12, 2, 3): 3, (24, 2, 3): 3}
NEAREST = {
    (8, 3, -1): (6, 9),
    (13, 4, 3): (12, 24),
    (8, 4, 3): (12,),
    (0, 4, -1): (1,),
}
NEAREST |= dict.fromkeys([(8, 1, 2), (8, 4, 0)], (-1, 1))


@pytest.mark.parametrize("shape", [*REPEATS, *NEAREST])
def test_pipeline_repeats_follow_from_the_layers(shape):
    """Stages * repeats divide the layers, or an error has the nearest number of layers
    or of repeats.
    """
    names = ("num_layers", "num_stages", "num_repeats")
    keys = dict(zip(names, shape, strict=True))
    if shape in REPEATS:
        assert pipeline_repeats(**keys) == REPEATS[shape]
        return
    with pytest.raises(PipelineShapeError) as caught:
        pipeline_repeats(**keys)
    assert caught.value.nearest == NEAREST[shape]


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_stage_layer_order_assigns_chunks_in_turn(repeats):
    """Chunk c of the layers is on stage c mod p, and every layer appears once."""
    order = pipeline.stage_layer_order(24, num_stages=4, num_repeats=repeats)
    assert sorted(order) == list(range(24))
    size = 24 // (4 * repeats)
    for place, layer in enumerate(order):
        assert layer // size % 4 == place // (24 // 4)


@pytest.mark.parametrize(
    ("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 8, 2), (4, 3, 2), (2, 6, 3)]
)
def test_predicted_time_agrees_with_the_timetable(p, m, v):
    """If forward and backward of a chunk cost b/v + h together, the makespan is the
    predicted time.
    """
    b, h = 3, Fraction(1, 2)
    cost = (Fraction(b) + v * h) / 2
    table = Timetable.build(
        "interleaved",
        num_stages=p,
        num_microbatches=m,
        num_repeats=v,
        forward_cost=cost,
        backward_cost=cost,
    )
    assert (
        predicted_time(m, b, num_stages=p, num_repeats=v, overhead=h) == table.makespan
    )


def test_bubble_is_that_of_the_program():
    """In 360 shapes, the plan's ticks and bubble are those of the order in which the
    program runs its units.
    """
    for p, m, v in itertools.product(range(1, 7), range(1, 21), (1, 2, 3)):
        runs = {
            (m_of // p * v * p + turn * p + m_of % p + stage, stage)
            for stage in range(p)
            for m_of in range(m)
            for turn in range(v)
        }
        ticks = 1 + max(tick for tick, _ in runs)
        assert len(runs) == p * m * v
        assert pass_ticks(p, m, v) == ticks
        assert pass_bubble(p, m, v) == 1 - Fraction(len(runs), p * ticks)
    splitter = BatchSplitter(
        data_parallel_size=1,
        num_stages=4,
        num_repeats=3,
        num_pipeline_microbatches=5,
        strict_multiple=False,
    )
    plan = RampPlan(
        ramp=BatchRamp.constant(5),
        splitter=splitter,
        num_devices=4,
        axes=MeshAxes(pipeline=4),
        total_steps=1,
    )
    assert plan.phase_rows()[0]["bubble_fraction"] == 9 / 24


def test_number_of_microbatches_is_chosen_by_the_ticks_of_the_program():
    """Five microbatches in four stages with two repeats are best by the 13 ticks of
    balanced groups, but they take 16.
    """
    shape = {"num_stages": 4, "overhead": Fraction(2), "num_repeats": 2}
    assert [predicted_time(m, 5 // m, **shape) for m in (1, 5)] == [36, 40]
    assert fastest_microbatches(5, **shape) == 1


@pytest.mark.parametrize("v", [1, 2])
@pytest.mark.parametrize("minimum", [1, 10, 49])
def test_the_fastest_of_all_legal_numbers_is_chosen(v, minimum):
    """Every divisor that is a multiple of p and not below the minimum is compared, and
    the smallest of equal ones is taken; without one there is no number.
    """
    for h in (Fraction(0), Fraction(1, 3), Fraction(7), Fraction(1000)):
        shape = {"num_stages": 4, "overhead": h, "num_repeats": v}
        times = {
            m: predicted_time(m, 48 // m, **shape)
            for m in (4, 8, 12, 16, 24, 48)
            if m >= minimum
        }
        found = fastest_microbatches(48, **shape, multiple=4, minimum=minimum)
        assert found == min(times, key=times.get, default=None)


def test_per_phase_splits_each_phase_best():
    """`per_phase` chooses the best m for every phase."""
    splitter = BatchSplitter(
        data_parallel_size=1,
        num_stages=4,
        rampup_microbatch="per_phase",
        tick_overhead=Fraction(1),
    )
    for split in splitter.split([16, 64, 256]):
        best = min(
            (
                m
                for m in range(4, split.global_batch_size + 1, 4)
                if split.global_batch_size % m == 0
            ),
            key=lambda m: predicted_time(
                m,
                split.global_batch_size // m,
                num_stages=4,
                num_repeats=1,
                overhead=Fraction(1),
            ),
        )
        assert split.num_pipeline_microbatches == best


def test_fixed_split_uses_one_microbatch_size():
    """`fixed` with a measured overhead uses the best size for the last phase among
    those that divide every phase.
    """
    splitter = BatchSplitter(
        data_parallel_size=1, num_stages=4, tick_overhead=Fraction(2)
    )
    splits = splitter.split([24, 48, 96])
    best = min(
        (m for m in range(16, 97, 16) if 96 % m == 0),
        key=lambda m: predicted_time(
            m, 96 // m, num_stages=4, num_repeats=1, overhead=Fraction(2)
        ),
    )
    assert {split.microbatch_size for split in splits} == {96 // best}
    assert all(split.num_pipeline_microbatches % 4 == 0 for split in splits)
    unmeasured = BatchSplitter(data_parallel_size=1, num_stages=4).split([24, 48, 96])
    assert {split.microbatch_size for split in unmeasured} == {6}


def test_plan_chooses_by_predicted_time_only_with_a_measured_overhead():
    """Otherwise it takes the fewest microbatches; its JSON no longer has the choices."""
    fixed = PIPELINE | {"rampup_microbatch": "fixed", "max_target_length": 4096}
    measured = build_plan(Config(**fixed, pipeline_tick_overhead=0.125), 4)
    # 35 ticks of 2 samples, each with an overhead of 1/8, and not 67 of 1 or 19 of 4.
    assert measured.splits[-1].num_pipeline_microbatches == 32
    plan = build_plan(Config(**fixed), 4)
    assert plan.splits[-1].num_pipeline_microbatches == 4
    for shown in (measured, plan):
        assert "pipeline_choices" not in shown.to_dict()


STAGES, MICROBATCHES = range(1, 9), range(1, 33)


def build(schedule, p, m, v=1, **options):
    """Return a timetable with equal costs of forward and backward unless they are
    given.
    """
    options = {"forward_cost": 1, "backward_cost": 1} | options
    return Timetable.build(
        schedule, num_stages=p, num_microbatches=m, num_repeats=v, **options
    )


@pytest.mark.parametrize(
    ("schedule", "p", "m", "v", "slots", "bubble", "peak"),
    [
        ("gpipe", 4, 8, 1, 22, Fraction(3, 11), 8),
        ("1f1b", 4, 8, 1, 22, Fraction(3, 11), 4),
        ("1f1b", 8, 32, 1, 78, Fraction(7, 39), 8),
        ("1f1b", 4, 3, 1, 12, Fraction(1, 2), 3),
        ("interleaved", 4, 8, 2, 38, Fraction(3, 19), Fraction(11, 2)),
        ("interleaved", 8, 16, 4, 142, Fraction(7, 71), Fraction(39, 4)),
        ("interleaved", 4, 3, 2, 20, Fraction(2, 5), 3),
        ("circular", 4, 2, 2, 18, Fraction(5, 9), 2),
    ],
)
def test_build_agrees_with_published_numbers(schedule, p, m, v, slots, bubble, peak):
    """The slots, the bubble and the peak of the first stage are those of other
    implementations' tables.
    """
    table = build(schedule, p, m, v)
    assert (
        table.makespan * v,
        table.bubble_fraction,
        table.peak_live_microbatches[0],
    ) == (slots, bubble, peak)


@pytest.mark.parametrize(
    ("p", "v"),
    [*((p, 1) for p in STAGES), *itertools.product((2, 3, 4, 5, 8), (2, 3, 4))],
)
def test_closed_forms_agree_with_counts(p, v):
    """For every m up to 32: with repeats the bubble is 1/v as large, and only m < p
    stalls.
    """
    for m in MICROBATCHES:
        for schedule in ("gpipe", "1f1b") if v == 1 else ("interleaved", "circular"):
            table = build(schedule, p, m, v, backward_cost=2)
            assert table.makespan == Fraction(3 * (max(m, p) * (v - 1) + m + p - 1), v)
            assert table.bubble_fraction == pipeline.bubble_fraction(p, m, v)
            assert table.peak_live_microbatches == peaks(schedule, p, m, v)


def peaks(schedule, p, m, v=1):
    """Return the closed form of `peak_live_microbatches`. Interleaved means balanced
    groups.
    """

    def peak(stage):
        after = p - 1 - stage
        if schedule in ("gpipe", "circular"):
            return m
        if schedule == "1f1b":
            return min(m, after + 1)
        return Fraction(
            min(v * m, 2 * after + (v - 1) * pipeline.group_sizes(m, p)[0] + 1), v
        )

    return tuple(map(peak, range(p)))


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "circular"]),
    p=st.integers(0, 6),
    m=st.integers(-1, 12),
    v=st.integers(0, 3),
    forward=st.fractions(-1, 8, max_denominator=16),
    backward=st.fractions(-1, 8, max_denominator=16),
)
def test_every_timetable_is_valid_or_refused(schedule, p, m, v, forward, backward):
    """For any costs: each operation once, one at a time per stage, inputs before their
    use, and all costs counted.
    """
    v = v if schedule in ("interleaved", "circular") else min(v, 1)
    if min(p, m, v, forward, backward) <= 0:
        with pytest.raises(PipelineShapeError):
            build(schedule, p, m, v, forward_cost=forward, backward_cost=backward)
        return
    table = build(schedule, p, m, v, forward_cost=forward, backward_cost=backward)
    done = {(o.kind, o.stage, o.microbatch, o.repeat): o for o in table.operations}
    assert len(done) == len(table.operations) == p * m * v * 2
    for stage in range(p):
        own = table.of_stage(stage)
        assert all(a.end <= b.start for a, b in itertools.pairwise(own))
        assert sum(o.end - o.start for o in own) == m * (forward + backward)
    for (kind, s, k, r), o in done.items():
        place = r * p + s
        if kind == "F" and place:
            assert done["F", (place - 1) % p, k, (place - 1) // p].end <= o.start
        if kind == "B":
            needed = (
                ("F", s, k, r)
                if place == p * v - 1
                else (kind, (place + 1) % p, k, (place + 1) // p)
            )
            assert done[needed].end <= o.start
    assert int(table.num_ticks) * table.tick == table.makespan


@pytest.mark.parametrize(
    ("change", "key", "nearest"),
    [
        ({"schedule": "2f2b"}, "schedule", SCHEDULES),
        ({"schedule": "zb-h1"}, "schedule", SCHEDULES),
        ({"num_stages": 0}, "stages", (1,)),
        ({"num_microbatches": 0}, "microbatches", (1,)),
        ({"num_repeats": -1}, "repeats", (1,)),
        ({"num_repeats": 2}, "repeats", (1,)),
        ({"forward_cost": 0}, "forward-cost", (1,)),
        ({"backward_cost": -1}, "backward-cost", (1,)),
        ({"num_microbatches": 10**9}, "microbatches", (250_000,)),
    ],
)
def test_build_rejects_undefined_schedules(change, key, nearest):
    """Each error has the key to change, and the nearest numbers for which the schedule
    is defined.
    """
    shape = {"schedule": "1f1b", "num_stages": 4, "num_microbatches": 8} | change
    with pytest.raises(PipelineShapeError) as caught:
        Timetable.build(**shape)
    assert (caught.value.key, caught.value.nearest) == (key, nearest)
