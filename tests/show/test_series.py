"""Tests of rampup.show.series: the numbers behind the pictures."""

import itertools
import math

import pytest

from rampup import Config, build_plan
from rampup.errors import DataError
from rampup.show.series import RunMetrics, drawn_phases, mean_of_neighbours, rate_points

LINE = {
    "step": 0,
    "consumed_samples": 8,
    "global_batch_size": 8,
    "phase": 0,
    "loss": 1.5,
    "tokens_per_second": 10.0,
}


@pytest.mark.parametrize("steps", [1, 30, 230, 231, 250, 500])
def test_drawn_phases_join_without_gaps(steps):
    """Each phase is drawn from where the one before it ends, in steps as in samples,
    wherever the run ends.
    """
    plan = build_plan(Config(enable_rampup_batch_size=True, steps=steps), 4)
    phases = drawn_phases(plan)
    for one, other in itertools.pairwise(phases):
        assert (one["end_step"], one["end_sample"]) == (
            other["start_step"],
            other["start_sample"],
        )
    for phase in phases:
        number = phase["end_step"] - phase["start_step"]
        assert (
            phase["end_sample"] - phase["start_sample"]
            == number * phase["global_batch_size"]
        )
        assert number > 0
    # The ramp ends at step 230, and a third beyond it is step 307.
    assert phases[-1]["end_step"] == (min(steps, 307) if steps > 230 else 307)


def test_rate_points_are_steps_of_the_run():
    """Every point is a step of the run with the samples before it; ends and phase
    changes are among them.
    """
    plan = build_plan(Config(enable_rampup_batch_size=True), 4)
    points = rate_points(plan, lambda step: step**2)
    assert all(
        (sample, rate) == (plan.ramp.samples_before(step), step**2)
        for step, sample, rate in points
    )
    steps = [step for step, *_ in points]
    assert {0, 124, 125, 188, 230, 999} <= set(steps)
    assert steps == sorted(set(steps))


def test_run_metrics_refuse_missing_counts():
    """A line without the integers that pictures need is refused with run, step and
    key.
    """
    for key, value in {
        "step": -1,
        "consumed_samples": None,
        "global_batch_size": 1.5,
        "phase": True,
    }.items():
        with pytest.raises(
            DataError, match=r"mine, step -?\d of its metrics"
        ) as caught:
            RunMetrics.from_lines("mine", [LINE | {key: value}])
        assert caught.value.key == key


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_run_metrics_refuse_a_damaged_line(tmp_path, name):
    """A picture does not leave a step out in silence; a last line that is being written
    is no damage.
    """
    line = (
        '{"step": 0, "consumed_samples": 8, "loss": 1.0, "eval_loss": 1.0,'
        ' "global_batch_size": 8, "phase": 0}\n'
    )
    for file in ("metrics.jsonl", "eval.jsonl"):
        (tmp_path / file).write_text(line + line[:20])
    assert RunMetrics.from_folder(tmp_path, name="a").steps == (0,)
    (tmp_path / name).write_text(line + line[:20] + "\n")
    with pytest.raises(
        DataError,
        match=rf"{name} is damaged: line 2 is not JSON with a step; resume the run",
    ):
        RunMetrics.from_folder(tmp_path, name="a")


@pytest.mark.parametrize("value", [None, "x", math.inf, True])
def test_run_metrics_losses_that_are_not_finite_are_gaps(value):
    """A loss that is not finite is not drawn, and a mean ignores it; an evaluation of
    no step is left out.
    """
    evals = [{"step": 0, "eval_loss": 2.0}, {"step": 9, "eval_loss": 3.0}]
    run = RunMetrics.from_lines(
        "a", [LINE | {"loss": value}, LINE | {"step": 1, "consumed_samples": 16}], evals
    )
    assert (run.eval_samples, run.eval_losses) == ((8,), (2.0,))
    assert math.isnan(run.losses[0])
    assert mean_of_neighbours(run.samples, run.losses, most=1) == ([16], [1.5], 2)
    assert run.by_phase()[0]["last loss"] == 1.5
