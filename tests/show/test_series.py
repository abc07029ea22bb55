"""Tests of rampup.show.series: the numbers behind the pictures."""

import itertools
import json
import math

import pytest

from rampup import Config, build_plan
from rampup.errors import ConfigError, DataError
from rampup.show.series import (
    RunMetrics,
    last_drawn_step,
    mean_of_neighbours,
    measured_throughput,
    phase_spans,
    rate_points,
    subsample,
)

LINE = {"step": 0, "consumed_samples": 8, "global_batch_size": 8, "phase": 0, "loss": 1.5, "tokens_per_second": 10.0}


@pytest.mark.parametrize("steps", [1, 30, 63, 64, 70, 500])
def test_phase_spans_join_without_gaps(steps):
    """Each phase is drawn from where the one before it ends, in steps as in samples, wherever the run ends."""
    plan = build_plan(Config(enable_rampup_batch_size=True, steps=steps), 4)
    spans = phase_spans(plan)
    for one, other in itertools.pairwise(spans):
        assert (one.end_step, one.end_sample) == (other.start_step, other.start_sample)
    for span in spans:
        assert span.end_sample - span.start_sample == (span.end_step - span.start_step) * span.global_batch_size
        assert span.end_step > span.start_step
    assert spans[-1].end_step == last_drawn_step(plan)


def test_rate_points_are_steps_of_the_run():
    """Every point is a step of the run with the samples before it; ends and phase changes are among them."""
    plan = build_plan(Config(enable_rampup_batch_size=True), 4)
    points = rate_points(plan, lambda step: step**2)
    assert all(point.rate == point.step**2 for point in points)
    assert all(point.sample == plan.ramp.samples_before(point.step) for point in points)
    assert {0, 33, 34, 51, 63, 499} <= {point.step for point in points}
    assert [point.step for point in points] == sorted({point.step for point in points})


@pytest.mark.parametrize(
    "change",
    [
        {"consumed_samples": None},
        {"consumed_samples": "8"},
        {"consumed_samples": -1},
        {"global_batch_size": 1.5},
        {"phase": True},
    ],
)
def test_run_metrics_refuse_missing_counts(change):
    """A line without the integers that pictures need is refused with run, step and key."""
    with pytest.raises(DataError, match="mine, step 0 of its metrics") as caught:
        RunMetrics.from_lines("mine", [LINE | change])
    assert caught.value.key == next(iter(change))


def test_run_metrics_refuse_an_empty_file():
    """An empty file is refused."""
    with pytest.raises(DataError, match="no steps"):
        RunMetrics.from_lines("mine", [])


@pytest.mark.parametrize("value", [None, "x", math.nan, math.inf, True, [1]])
def test_run_metrics_losses_that_are_not_finite_are_gaps(value):
    """A loss that is not finite is not drawn, and a mean ignores it."""
    run = RunMetrics.from_lines("a", [LINE | {"loss": value}, LINE | {"step": 1, "consumed_samples": 16}])
    assert math.isnan(run.losses[0])
    assert mean_of_neighbours(run.samples, run.losses, most=1) == ([16], [1.5], 2)
    assert run.by_phase()[0]["last loss"] == 1.5


def test_run_metrics_throughput_by_phase_is_a_median():
    """One step that compiled does not spoil a phase."""
    lines = [
        LINE | {"step": n, "consumed_samples": 8 * (n + 1), "tokens_per_second": 1.0 if n == 0 else 50.0} for n in range(5)
    ]
    assert RunMetrics.from_lines("a", lines).by_phase()[0]["tokens/s (median)"] == 50.0


def test_run_metrics_place_evaluations_by_step():
    """An evaluation is drawn at the samples of its step; one whose step is missing is left out."""
    evals = [{"step": 0, "eval_loss": 2.0}, {"step": 9, "eval_loss": 3.0}]
    run = RunMetrics.from_lines("a", [LINE], evals)
    assert (run.eval_samples, run.eval_losses) == ((8,), (2.0,))


@pytest.mark.parametrize("number", [1, 2, 3, 100, 1201])
def test_subsample_keeps_the_ends(number):
    """However many are left, the first and the last are."""
    kept = subsample(range(number), 100)
    assert (kept[0], kept[-1]) == (0, number - 1)
    assert len(kept) == min(number, 100)


def write(folder, *records):
    """Write a run's metrics; text is written literally."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def line(step, size, rate, **more):
    """Return one line of metrics."""
    return {"step": step, "global_batch_size": size, "tokens_per_second": rate, **more}


def test_measured_throughput_is_the_median_of_each_batch_size(tmp_path):
    """The first step and steps that compiled are ignored if there are others."""
    run = write(
        tmp_path,
        line(0, 8, 1),
        line(1, 8, 100),
        line(2, 8, 300),
        line(3, 8, 200),
        line(4, 16, 2, compile_seconds=3.0),
        line(5, 16, 500.5),
        line(6, 32, 7, compile_seconds=3.0),
    )
    assert measured_throughput(run) == {8: 200, 16: 500.5, 32: 7}


def test_measured_throughput_skips_unusable_lines(tmp_path):
    """A torn line, values that are not numbers, and impossible throughputs."""
    run = write(
        tmp_path,
        line(0, 8, 100),
        "[1]",
        "{}",
        line(1, 8, None),
        line(2, True, 5),
        line(3, 8, -1),
        line(4, 8, 0),
        line(5, 8.5, 3),
        '{"global_batch_size": 8, "tokens_per_second": NaN}',
        '{"global_batch_size": 8, "tokens_per_second": Infinity}',
        '{"step": 9, "global_ba',
    )
    assert measured_throughput(run) == {8: 100}


@pytest.mark.parametrize("content", [None, "", "{}", "nonsense", "[" * 100_000])
def test_measured_throughput_refuses_a_run_without_any(tmp_path, content):
    """No folder, no file, and a file without a throughput are errors that name it."""
    if content is not None:
        write(tmp_path, content)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl") as caught:
        measured_throughput(tmp_path)
    assert caught.value.key == "measured"
    with pytest.raises(ConfigError, match="cannot read"):
        measured_throughput(tmp_path / "nowhere")
