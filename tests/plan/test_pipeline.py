"""Tests of rampup.plan.pipeline."""

import itertools
from fractions import Fraction

import pytest

from rampup import Config, build_plan
from rampup.errors import PipelineShapeError
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan, describe
from rampup.plan.pipeline import (
    Timetable,
    pass_bubble,
    pass_ticks,
    pipeline_candidates,
    pipeline_repeats,
    predicted_time,
    stage_layer_order,
)

PIPELINE = {"ici_pipeline_parallelism": 4, "base_num_decoder_layers": 8, "per_device_batch_size": 16}
PIPELINE |= {"rampup_microbatch": "per_phase", "num_layers_per_pipeline_stage": 2}


@pytest.mark.parametrize(
    ("layers", "stages", "per_stage", "repeats", "expected"),
    [(8, 4, 1, -1, 2), (8, 4, 2, -1, 1), (8, 1, 1, -1, 1), (12, 2, 2, 3, 3)],
)
def test_pipeline_repeats(layers, stages, per_stage, repeats, expected):
    """Repeats are derived from the layers."""
    result = pipeline_repeats(num_layers=layers, num_stages=stages, num_layers_per_stage=per_stage, num_repeats=repeats)
    assert result == expected


@pytest.mark.parametrize(
    ("layers", "stages", "per_stage", "repeats", "nearest"),
    [
        (8, 3, 1, -1, (6, 9)),
        (8, 4, 3, -1, (12,)),
        (8, 4, 1, 3, (12,)),
        (8, 1, 1, 2, (-1, 1)),
        (8, 4, 1, 0, (-1, 1)),
        (0, 4, 1, -1, (1,)),
    ],
)
def test_pipeline_repeats_rejects_other_layers(layers, stages, per_stage, repeats, nearest):
    """Layers = stages * repeats * layers per stage, or an error with the nearest number of layers."""
    with pytest.raises(PipelineShapeError) as caught:
        pipeline_repeats(num_layers=layers, num_stages=stages, num_layers_per_stage=per_stage, num_repeats=repeats)
    assert caught.value.nearest == nearest


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_stage_layer_order_assigns_chunks_in_turn(repeats):
    """Chunk c of the layers is on stage c mod p, and every layer appears once."""
    order = stage_layer_order(24, num_stages=4, num_repeats=repeats)
    assert sorted(order) == list(range(24))
    size = 24 // (4 * repeats)
    for place, layer in enumerate(order):
        assert layer // size % 4 == place // (24 // 4)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 8, 2), (4, 3, 2), (2, 6, 3)])
def test_predicted_time_agrees_with_the_timetable(p, m, v):
    """If forward and backward of a chunk cost b/v + h together, the makespan is the predicted time."""
    b, h = 3, Fraction(1, 2)
    cost = (Fraction(b) + v * h) / 2
    table = Timetable.build(
        "interleaved", num_stages=p, num_microbatches=m, num_repeats=v, forward_cost=cost, backward_cost=cost
    )
    assert predicted_time(m, b, num_stages=p, num_repeats=v, overhead=h) == table.makespan


def test_bubble_is_that_of_the_program():
    """In 360 shapes, the plan's ticks and bubble are those of the order in which the program runs its units."""
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
        data_parallel_size=1, num_stages=4, num_repeats=3, num_pipeline_microbatches=5, strict_multiple=False
    )
    plan = RampPlan(ramp=BatchRamp.constant(5), splitter=splitter, num_devices=4, axes=MeshAxes(pipeline=4), total_steps=1)
    assert plan.phase_rows()[0]["bubble_fraction"] == 9 / 24


def test_number_of_microbatches_is_chosen_by_the_ticks_of_the_program():
    """Five microbatches in four stages with two repeats are best by the 13 ticks of balanced groups, but they take 16."""
    choices = pipeline_candidates(5, num_stages=4, overhead=Fraction(2), repeats=(2,))
    assert [(c.num_pipeline_microbatches, c.predicted_time) for c in choices] == [
        (1, 8 * Fraction(9, 2)),
        (5, 16 * Fraction(5, 2)),
    ]


def test_pipeline_candidates_are_complete_and_sorted():
    """Every divisor that is a multiple of p appears, in the order of predicted time."""
    choices = pipeline_candidates(48, num_stages=4, overhead=Fraction(1, 3), repeats=(1, 2), multiple=4)
    shapes = {(c.num_pipeline_microbatches, c.num_repeats) for c in choices}
    assert shapes == {(m, v) for m in (4, 8, 12, 16, 24, 48) for v in (1, 2)}
    assert all(c.num_pipeline_microbatches * c.microbatch_size == 48 for c in choices)
    times = [c.predicted_time for c in choices]
    assert times == sorted(times)


def test_per_phase_splits_each_phase_best():
    """`per_phase` chooses the best m for every phase."""
    splitter = BatchSplitter(data_parallel_size=1, num_stages=4, rampup_microbatch="per_phase", tick_overhead=Fraction(1))
    for split in splitter.split([16, 64, 256]):
        best = min(
            (m for m in range(4, split.global_batch_size + 1, 4) if split.global_batch_size % m == 0),
            key=lambda m: predicted_time(m, split.global_batch_size // m, num_stages=4, num_repeats=1, overhead=Fraction(1)),
        )
        assert split.num_pipeline_microbatches == best


def test_fixed_split_uses_one_microbatch_size():
    """`fixed` with a measured overhead uses the best size for the last phase among those that divide every phase."""
    splitter = BatchSplitter(data_parallel_size=1, num_stages=4, tick_overhead=Fraction(2))
    splits = splitter.split([24, 48, 96])
    assert {split.microbatch_size for split in splits} == {splitter.candidates([24, 48, 96])[0].microbatch_size}
    assert all(split.num_pipeline_microbatches % 4 == 0 for split in splits)
    unmeasured = BatchSplitter(data_parallel_size=1, num_stages=4).split([24, 48, 96])
    assert {split.microbatch_size for split in unmeasured} == {6}


def test_plan_has_candidates_and_advice():
    """A plan lists the candidates, and advises if a fixed ramp is predicted to be slower than the best of them."""
    plan = build_plan(Config(**(PIPELINE | {"rampup_microbatch": "fixed", "max_target_length": 4096})), 4)
    assert len(plan.pipeline_candidates) > 1
    assert plan.splits[-1].num_pipeline_microbatches == 4
    assert any("pipeline_tick_overhead" in note for note in describe.advice(plan))
    assert "pipeline_choices" in plan.to_dict()
    assert "pipeline_choices" not in build_plan(Config(), 4).to_dict()


@pytest.mark.parametrize(("overhead", "repeats"), [(0, 2), (100, 1)])
def test_build_plan_chooses_the_best_repeats(overhead, repeats):
    """More repeats make the bubble smaller but add ticks, so the overhead decides."""
    keys = PIPELINE | {"num_layers_per_pipeline_stage": -1, "pipeline_tick_overhead": overhead}
    assert build_plan(Config(**keys), 4).splitter.num_repeats == repeats
