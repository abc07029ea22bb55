"""Tests of rampup.show.plots: what is drawn, read back from the picture."""

import sys

import pytest

from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.timetable import SCHEDULES, Timetable
from rampup.show.plots import draw_timetable


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timetables_are_drawn(schedule, tmp_path):
    """The picture has a bar and its text for every operation, and is written in the format of the file's ending."""
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=3, num_microbatches=4, num_repeats=v)
    draw_timetable(table, tmp_path / "table.svg")
    text = (tmp_path / "table.svg").read_text()
    assert text.count('id="patch_') > len(table.operations)
    draw_timetable(table, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    """Too many operations, an unknown format, and no matplotlib: each says what to do."""
    table = Timetable.build("1f1b", num_stages=2, num_microbatches=3)
    with pytest.raises(ConfigError, match="cannot write"):
        draw_timetable(table, tmp_path / "table.doc")
    with pytest.raises(ConfigError, match="too many to draw"):
        draw_timetable(Timetable.build("1f1b", num_stages=8, num_microbatches=1000), tmp_path / "table.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"rampup\[plot\]"):
        draw_timetable(table, tmp_path / "table.png")
