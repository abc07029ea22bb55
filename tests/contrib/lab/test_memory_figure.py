"""Tests of rampup.contrib.lab.memory_figure."""

import pytest
from helpers.figures import texts

from rampup.contrib.lab.memory_figure import draw_memory
from rampup.errors import ConfigError
from rampup.plan.numbers import GIB

pytest.importorskip("matplotlib")


def test_draw_memory_names_the_largest_that_fits():
    """A bar per size, sorted; bars that do not fit are hatched, and the largest that
    fits is named.
    """
    figure = draw_memory(
        [(4, 20 * GIB), (1, 5 * GIB), (2, 10 * GIB)], limit_bytes=16 * GIB
    )
    found, overlapping = texts(figure)
    assert not overlapping
    assert {"samples per microbatch", "memory, GiB", "5", "10", "20"} <= set(found)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == [5, 10, 20]
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [False, False, True]
    assert axes.get_title(loc="left").endswith("the largest that fits: 2")
    small = draw_memory([(1, GIB // 256)], limit_bytes=GIB // 128).axes[0]
    assert small.get_ylabel() == "memory, MiB"
    assert small.get_title(loc="left").startswith("usable: 8 MiB")
    assert (
        draw_memory([(1, 5 * GIB)], limit_bytes=GIB)
        .axes[0]
        .get_title(loc="left")
        .endswith("none of these fits")
    )
    # Bars that would make the others flat, and unknown ones, are left out; the smallest
    # size stays.
    rows = [(1, GIB), (2, 2 * GIB), (4, 5 * GIB), (8, None)]
    for limit, drawn in [(GIB, 2), (2 * GIB, 3), (GIB // 8, 1), (None, 3)]:
        assert len(draw_memory(rows, limit_bytes=limit).axes[0].patches) == drawn
    for bad in ([], [(0, 5)], [(1, -5)], [(1, None)]):
        with pytest.raises(ConfigError, match="microbatch"):
            draw_memory(bad)
