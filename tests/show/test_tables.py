"""Tests of rampup.show.tables."""

import io
import re

import pytest
from rich.console import Console

from rampup import Config, build_plan
from rampup.show.tables import print_facts, print_plan

RAMP = {"enable_rampup_batch_size": True}


def printed(plan, **options):
    """Return what is printed of a plan at 80 columns."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **options)
    print_plan(plan, console)
    return console.file.getvalue()


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": None}])
def test_every_phase_and_size_is_shown_at_80_columns(options):
    """Nothing is cut off at 80 columns, in a terminal or piped, even with every column and large numbers."""
    keys = RAMP | {"ici_pipeline_parallelism": 2, "learning_rate_batch_scaling": "sqrt", "global_rampup_samples": 10**12}
    plan = build_plan(Config(**keys, steps=10**12), 65536)
    text = printed(plan, **options)
    assert max(map(len, text.splitlines())) <= 80
    flat = re.sub(r"[\s│]+", "", text)
    for row in plan.phase_rows():
        assert f"{row['start_sample']:,}" in flat
        assert f"{row['global_batch_size']:,}" in flat


def test_piped_output_is_plain():
    """Without a terminal there are no colours and no boxes."""
    text = printed(build_plan(Config(**RAMP), 4))
    assert "\x1b" not in text
    assert not set(text) & set("─│┏┃━")


def test_phases_that_are_not_reached_are_marked():
    """A phase beyond the last step stands in brackets."""
    text = printed(build_plan(Config(**RAMP, steps=30), 4))
    assert re.search(r"^\s*\(3\)", text, re.MULTILINE)
    assert "note: steps=30 ends before phase 1" in text


def test_facts():
    """Names and values stand side by side."""
    console = Console(file=io.StringIO(), width=80)
    print_facts({"steps": 1234567, "loss": 1.25, "checkpoint": None, "rate": 11060.4}, console)
    text = console.file.getvalue()
    assert "1,234,567" in text
    assert "11,060" in text
