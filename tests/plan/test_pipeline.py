"""Tests of rampup.plan.pipeline."""

import pytest

from rampup.errors import PipelineShapeError
from rampup.plan.pipeline import legal_repeats, pipeline_repeats, stage_order


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
    order = stage_order(24, num_stages=4, num_repeats=repeats)
    assert sorted(order) == list(range(24))
    size = 24 // (4 * repeats)
    for place, layer in enumerate(order):
        assert layer // size % 4 == place // (24 // 4)


def test_an_order_of_layers_that_do_not_divide_is_refused():
    """24 layers do not make two chunks for each of 8 stages."""
    with pytest.raises(PipelineShapeError, match="nearest: 16"):
        stage_order(24, num_stages=8, num_repeats=2)
