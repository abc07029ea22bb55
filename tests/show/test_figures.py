"""Tests of rampup.show.figures: the pictures, read back from the figures."""

import math
import sys
from dataclasses import replace

import pytest
from helpers.figures import texts

from rampup import Config, build_plan
from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.pipeline import SCHEDULES, Timetable
from rampup.show.figures import (
    draw_batch,
    draw_rate,
    draw_runs,
    draw_timetable,
    svg_text,
)
from rampup.show.series import RunMetrics

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'rampup[plot]'"
)
RAMP = Config(enable_rampup_batch_size=True)
PIPELINE = Config(
    enable_rampup_batch_size=True, ici_pipeline_parallelism=4, per_device_batch_size=8
)
GIB = 2**30


def run(name="a", steps=30):
    """Return the metrics of a made-up run, one of whose losses is not finite."""
    line = {"global_batch_size": 8, "phase": 0, "tokens_per_second": 100.0}
    lines = [
        line | {"step": n, "consumed_samples": 8 * (n + 1), "loss": 5 - n / 10}
        for n in range(steps)
    ]
    lines[3]["loss"] = None
    return RunMetrics.from_lines(name, lines, [{"step": steps - 1, "eval_loss": 2.5}])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_draw_timetable_draws_every_operation(schedule, tmp_path):
    """The picture has a bar and its text for every operation, in the format of the
    file's suffix, in fonts for print.
    """
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=3, num_microbatches=4, num_repeats=v)
    for suffix in ("svg", "png", "pdf"):
        draw_timetable(table, tmp_path / f"table.{suffix}")
    text = (tmp_path / "table.svg").read_text()
    assert text.count('id="patch_') > len(table.operations)
    assert ">backward</text>" in text
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    fonts = (tmp_path / "table.pdf").read_bytes()
    assert b"/FontFile2" in fonts  # TrueType
    assert b"/Type3" not in fonts


def test_draw_timetable_refuses_what_it_cannot_draw(tmp_path, monkeypatch):
    """Too many operations, an unknown format, and no matplotlib: each error says what
    to do.
    """
    table = Timetable.build("1f1b", num_stages=2, num_microbatches=3)
    for name in ("table.doc", "nowhere/table.png"):
        with pytest.raises(ConfigError, match="cannot write"):
            draw_timetable(table, tmp_path / name)
    with pytest.raises(ConfigError, match="too many to draw"):
        draw_timetable(
            Timetable.build("1f1b", num_stages=8, num_microbatches=1000),
            tmp_path / "table.png",
        )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"rampup\[plot\]"):
        draw_timetable(table, tmp_path / "table.png")


@pytest.mark.parametrize(
    ("config", "devices"), [(RAMP, 4), (PIPELINE, 8), (Config(), 1)]
)
def test_draw_batch_has_units_and_no_overlaps(config, devices):
    """Staircases over samples and steps at the plan's own boundaries, and a bar per
    phase.
    """
    plan = build_plan(config, devices)
    figure = draw_batch(plan)
    found, overlapping = texts(figure)
    assert not overlapping
    assert any(text.startswith("samples consumed") for text in found)
    assert any(text.startswith("optimizer steps") for text in found)
    assert {"samples per step", "passes per step", "phase"} <= set(found)
    assert ("pipeline bubble, idle share" in found) == (config is PIPELINE)
    stairs = [axes.patches for axes in figure.axes]
    edges = next(
        patch.get_data().edges for patch in stairs[0] if hasattr(patch, "get_data")
    )
    assert [int(edge) for edge in edges[:-1]] == [
        phase.start_sample for phase in plan.ramp.phases
    ]


def test_draw_rate_draws_both_clocks():
    """Two panels, each with a line per clock. The plan's own clock is named."""
    plan = build_plan(RAMP, 4)
    figure = draw_rate(
        plan,
        {"samples": lambda step: step / 400, "steps": lambda step: 0.5},
    )
    found, overlapping = texts(figure)
    assert not overlapping
    assert {"samples consumed", "optimizer steps", "learning rate"} <= set(found)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["schedule runs on samples (this plan)", "schedule runs on steps"]
    over_samples, over_steps = (axes.lines[0].get_data() for axes in figure.axes)
    last = plan.total_steps - 1
    assert (over_samples[0][-1], over_samples[1][-1]) == (
        plan.ramp.samples_before(last),
        last / 400,
    )
    assert over_steps[0][-1] == last


def test_draw_runs_compares_runs_over_samples():
    """Each panel has a line per run, distinct without colour, with a gap if a loss is
    not finite.
    """
    figure = draw_runs([run("a"), run("b", steps=60)])
    found, overlapping = texts(figure)
    assert not overlapping
    assert {"loss", "samples per step", "tokens_per_second", "samples consumed"} <= set(
        found
    )
    loss, _, speed = figure.axes
    lines = [line for line in loss.lines if line.get_linestyle() != "None"]
    assert len({line.get_linestyle() for line in lines}) == len(lines) == 2
    assert len(speed.lines) == 2
    assert math.isnan(lines[0].get_ydata()[3])
    assert [max(line.get_xdata()) for line in lines] == [240, 480]
    for runs in ([], [run()] * 13):
        with pytest.raises(ConfigError, match="cannot be told apart"):
            draw_runs(runs)
    # Of a run with more steps than points, means of neighbours are drawn, and the axis
    # says of how many steps.
    loss, _, speed = (long := draw_runs([run(steps=3000)])).axes
    assert "samples consumed (means of 3 steps)" in texts(long)[0]
    xs, ys = loss.lines[0].get_data()
    assert (len(xs), xs[1], ys[1]) == (
        1000,
        48,
        pytest.approx((4.6 + 4.5) / 2),
    )  # the loss of step 3 is not finite
    # A single step that is far too fast leaves the others readable.
    fast = run()
    fast = replace(fast, tokens_per_second=(*fast.tokens_per_second[:-1], 1e6))
    speed = draw_runs([fast]).axes[2]
    assert (speed.get_ylim()[1], speed.get_title(loc="right")) == (
        400,
        "above: up to 1M",
    )


def test_a_batch_below_its_noise_scale_keeps_its_steps():
    """The noise scale is far above the batch, whose growth is seen all the same."""
    one = run()
    sizes = tuple(8 if step < 15 else 16 for step in one.steps)
    noise = {"noise_scales": (5e3,), "noise_lows": (900.0,), "noise_highs": (9e4,)}
    noise = {name: values * 30 for name, values in noise.items()}
    panel = draw_runs([replace(one, sizes=sizes, **noise)]).axes[1]
    heights = panel.transAxes.inverted().transform(
        panel.transData.transform([(0, size) for size in (8, 16, 5e3)])
    )[:, 1]
    assert heights[0] > 0
    assert heights[1] - heights[0] > 0.05
    assert heights[2] < 1
    assert "10K" in texts(panel.figure)[0]


def test_draw_runs_draws_the_other_curves_of_a_single_run():
    """A panel for each curve of one run; none where runs are compared."""
    one = replace(run(), curves={"Entropy": run().losses})
    assert "entropy" in texts(figure := draw_runs([one]))[0]
    assert len(figure.axes) == 4
    assert len(draw_runs([one, run("b")]).axes) == 3


def test_svg_text_is_the_same_for_the_same_figure():
    """Text stays text, and a notebook's backend and figures are not touched."""
    from matplotlib import pyplot

    backend = pyplot.get_backend()
    table = Timetable.build("1f1b", num_stages=2, num_microbatches=3)
    one, other = (svg_text(draw_timetable(table)) for _ in range(2))
    assert one == other
    assert ">backward</text>" in one
    assert (pyplot.get_backend(), pyplot.get_fignums()) == (backend, [])
