"""Tests of rampup.plan.pipeline."""

from fractions import Fraction

import pytest

from rampup import Config, build_plan
from rampup.errors import PipelineShapeError
from rampup.plan.pipeline import (
    legal_repeats,
    pipeline_candidates,
    pipeline_repeats,
    predicted_time,
    stage_layer_order,
)
from rampup.plan.split import BatchSplitter
from rampup.plan.timetable import Timetable

PIPELINE = {
    "ici_pipeline_parallelism": 4,
    "base_num_decoder_layers": 8,
    "per_device_batch_size": 16,
    "rampup_microbatch": "per_phase",
    "num_layers_per_pipeline_stage": 2,
}


@pytest.mark.parametrize(
    ("layers", "stages", "per_stage", "repeats", "expected"),
    [(8, 4, 1, -1, 2), (8, 4, 2, -1, 1), (8, 1, 1, -1, 1), (12, 2, 2, 3, 3)],
)
def test_pipeline_repeats(layers, stages, per_stage, repeats, expected):
    """Repeats are what the layers give."""
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
def test_layers_must_fit_the_stages(layers, stages, per_stage, repeats, nearest):
    """Layers = stages * repeats * layers per stage, or an error with the nearest number."""
    with pytest.raises(PipelineShapeError) as caught:
        pipeline_repeats(num_layers=layers, num_stages=stages, num_layers_per_stage=per_stage, num_repeats=repeats)
    assert caught.value.nearest == nearest


def test_legal_repeats_are_all_that_fit():
    """Every listed number of repeats is accepted with the layers per stage that it leaves, and no other is."""
    for layers in range(4, 49, 4):
        legal = legal_repeats(num_layers=layers, num_stages=4)
        assert legal == [v for v in range(1, layers + 1) if layers % (4 * v) == 0]
        for v in legal:
            each = layers // (4 * v)
            assert pipeline_repeats(num_layers=layers, num_stages=4, num_layers_per_stage=each, num_repeats=v) == v


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_stages_hold_layers_in_turn(repeats):
    """Chunk c of the layers lies on stage c mod p, and every layer lies somewhere once."""
    order = stage_layer_order(24, num_stages=4, num_repeats=repeats)
    assert sorted(order) == list(range(24))
    size = 24 // (4 * repeats)
    for place, layer in enumerate(order):
        assert layer // size % 4 == place // (24 // 4)


def test_an_order_of_layers_that_do_not_divide_is_refused():
    """24 layers do not make two chunks for each of 8 stages."""
    with pytest.raises(PipelineShapeError, match="nearest: 16"):
        stage_layer_order(24, num_stages=8, num_repeats=2)


@pytest.mark.parametrize(("p", "m", "v"), [(1, 3, 1), (4, 8, 1), (4, 8, 2), (4, 3, 2), (2, 5, 3)])
def test_the_predicted_time_is_the_timetables(p, m, v):
    """With forward and backward of a chunk costing b/v + h together, the makespan is the predicted time."""
    b, h = 3, Fraction(1, 2)
    cost = (Fraction(b) + v * h) / 2
    table = Timetable.build(
        "interleaved", num_stages=p, num_microbatches=m, num_repeats=v, forward_cost=cost, backward_cost=cost
    )
    assert predicted_time(m, b, num_stages=p, num_repeats=v, overhead=h) == table.makespan


def test_choices_are_all_legal_ones_the_fastest_first():
    """Every divisor that is a multiple of p is there, in the order of the predicted times."""
    choices = pipeline_candidates(48, num_stages=4, overhead=Fraction(1, 3), repeats=(1, 2), multiple=4)
    assert {(c.num_microbatches, c.num_repeats) for c in choices} == {(m, v) for m in (4, 8, 12, 16, 24, 48) for v in (1, 2)}
    assert all(c.num_microbatches * c.microbatch_size == 48 for c in choices)
    times = [c.predicted_time for c in choices]
    assert times == sorted(times)


def test_overhead_decides():
    """Without overhead the smallest microbatch wins, with a huge one the largest."""
    for overhead, m in ((0, 48), (1000, 4)):
        best = pipeline_candidates(48, num_stages=4, overhead=Fraction(overhead), multiple=4)[0]
        assert best.num_microbatches == m


def test_each_phase_has_the_best_of_its_own():
    """`per_phase` chooses m for every phase alone."""
    splitter = BatchSplitter(data_parallel_size=1, num_stages=4, rampup_microbatch="per_phase", tick_overhead=Fraction(1))
    for split in splitter.split([16, 64, 256]):
        best = min(
            (m for m in range(4, split.global_batch_size + 1, 4) if split.global_batch_size % m == 0),
            key=lambda m: predicted_time(m, split.global_batch_size // m, num_stages=4, num_repeats=1, overhead=Fraction(1)),
        )
        assert split.num_pipeline_microbatches == best


def test_one_microbatch_serves_a_fixed_ramp():
    """`fixed` with a measured overhead takes the best of the last phase among those that cut every phase."""
    splitter = BatchSplitter(data_parallel_size=1, num_stages=4, tick_overhead=Fraction(2))
    splits = splitter.split([24, 48, 96])
    assert {split.microbatch_size for split in splits} == {splitter.candidates([24, 48, 96])[0].microbatch_size}
    assert all(split.num_pipeline_microbatches % 4 == 0 for split in splits)
    unmeasured = BatchSplitter(data_parallel_size=1, num_stages=4).split([24, 48, 96])
    assert {split.microbatch_size for split in unmeasured} == {6}


def test_the_plan_shows_its_table_and_says_what_would_be_faster():
    """A plan lists the choices, and advises where a fixed ramp's rule is predicted to be slower than the best."""
    plan = build_plan(Config(**(PIPELINE | {"rampup_microbatch": "fixed", "max_target_length": 4096})), 4)
    assert len(plan.pipeline_candidates) > 1
    assert plan.splits[-1].num_pipeline_microbatches == 4
    assert any("pipeline_tick_overhead" in note for note in plan.advice)
    assert "pipeline_choices" in plan.to_dict()
    assert "pipeline_choices" not in build_plan(Config(), 4).to_dict()


@pytest.mark.parametrize(("overhead", "repeats"), [(0, 2), (100, 1)])
def test_repeats_are_chosen_where_both_keys_are_automatic(overhead, repeats):
    """More repeats shrink the bubble and cost ticks: the overhead decides."""
    keys = PIPELINE | {"num_layers_per_pipeline_stage": -1, "pipeline_tick_overhead": overhead}
    assert build_plan(Config(**keys), 4).splitter.num_repeats == repeats
