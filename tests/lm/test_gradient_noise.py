"""Tests of `measure_gradient_noise` and `batch_size_schedule: auto` in runs of the
language model.
"""

import itertools
import math

import pytest
from helpers import tiny
from helpers.runs import assert_same_run, metrics_of
from helpers.tiny import TINY

from rampup import Config, build_plan
from rampup.contrib.lab.branches import _Branches, _find_run
from rampup.errors import ConfigError
from rampup.lm.train import train
from rampup.loop.checkpoint import find_checkpoint
from rampup.loop.components import GRADIENT_NOISE
from rampup.loop.events import LearningRateChanged, StepDone, ignore_event
from rampup.loop.loop import RAMP_ROWS
from rampup.plan.noise_scale import NoiseScale

pytestmark = [pytest.mark.usefixtures("optimized"), pytest.mark.slow]

AUTO = tiny.AUTO | {"checkpoint_period": 7}
# A run whose batch, rate and constants of AdamW follow its noise, to the end of a
# budget of 600 samples.
BUDGET = AUTO | {
    "train_tokens": 600 * 16,
    "auto_max_waste": 0.5,
    "opt_type": "adamw",
    "batch_scaling": "complete",
}
BUDGET |= {"warmup_steps_fraction": 0.1, "shard_optimizer_over_data": True}


def run(folder, keys=BUDGET, on_event=ignore_event, **changes):
    """Train in a folder; return the summary and the lines of metrics.jsonl without the
    times.
    """
    summary = train(
        Config(base_output_directory=str(folder), run_name="run", **(keys | changes)),
        on_event,
    )
    return summary, metrics_of(folder / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the result of a run that follows its noise, and its folder."""
    folder = tmp_path_factory.mktemp("auto")
    return *run(folder), folder


def test_auto_schedule_grows_the_batch(whole):
    """The batch grows in one program to the end of the budget; decisions are in the
    metrics and in the checkpoint.
    """
    summary, lines, folder = whole
    sizes = [line["global_batch_size"] for line in lines]
    assert (sizes[0], sizes[-1], summary.num_compilations) == (8, 32, 1)
    assert 600 <= summary.consumed_samples == lines[-1]["consumed_samples"] < 600 + 32
    for before, after in itertools.pairwise(lines):
        assert after["global_batch_size"] == before.get(
            "next_global_batch_size", before["global_batch_size"]
        )
    saved = find_checkpoint(folder / "run" / "checkpoints")
    assert (
        " ".join(f"{sample}:{size}" for _, sample, size in saved.record[RAMP_ROWS])
        == summary.batch_size_schedule
    )


def test_auto_schedule_scales_the_learning_rate(whole):
    """The rate of every step is the schedule at its samples, for the largest batch,
    times the root of the batch.
    """
    for line in whole[1]:
        size = line["global_batch_size"]
        done = (line["consumed_samples"] - size) / 600
        decay = 0.1 + 0.9 * (1 + math.cos(math.pi * (done - 0.1) / 0.9)) / 2
        assert line["learning_rate"] == pytest.approx(
            1e-4 * math.sqrt(size / 32) * min(done / 0.1, decay)
        )


def test_auto_schedule_is_replayed(tmp_path):
    """The printed schedule gives the same batches, rates and losses, with a rate that
    does not depend on the last batch.
    """
    constant = BUDGET | {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}
    summary, lines = run(tmp_path / "auto", constant)
    keys = {
        "batch_size_schedule": summary.batch_size_schedule,
        "measure_gradient_noise": False,
    }
    own = {
        name: value
        for name, value in constant.items()
        if not name.startswith(("per_device", "gradient_noise", "auto"))
    }
    _, replayed = run(tmp_path / "planned", own, **keys)
    for line, other in zip(lines, replayed, strict=True):
        for name in (
            "global_batch_size",
            "consumed_samples",
            "microbatch_size",
            "learning_rate",
        ):
            assert line[name] == other[name]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_auto_schedule_resumes_bit_for_bit(whole, tmp_path):
    """A run that dies at and after its decisions continues as one that never did, and a
    finished one does nothing.
    """
    summary, lines, folder = whole
    first, second = (
        line["step"]
        for line in lines
        if line.get("next_global_batch_size", 8) > line["global_batch_size"]
    )
    for step in (first, second + 2):

        def die(event, step=step):
            if isinstance(event, StepDone) and event.step == step:
                raise RuntimeError("stopped")

        with pytest.raises(RuntimeError, match="stopped"):
            run(tmp_path, on_event=die)
    final, _ = run(tmp_path)
    assert final.batch_size_schedule == summary.batch_size_schedule
    assert first < final.resumed_from < final.steps
    assert_same_run(
        tmp_path / "run", folder / "run", summary.steps, files=("metrics.jsonl",)
    )
    again, _ = run(tmp_path)
    assert (again.resumed_from, again.steps) == (summary.steps, summary.steps)
    # A larger budget continues, with another schedule.
    changes = []
    longer, _ = run(tmp_path, on_event=changes.append, train_tokens=700 * 16)
    assert 700 <= longer.consumed_samples < 700 + 32
    assert len([e for e in changes if isinstance(e, LearningRateChanged)]) == 1


def test_critical_branches_from_the_batch_that_has_grown(whole):
    """The branches of a run that follows its noise start with the batch and the samples
    that it had at the checkpoint.
    """
    summary, lines, folder = whole
    config, record = _find_run(folder / "run", None)
    size = int(summary.batch_size_schedule.split(":")[-1])
    branches = _Branches(config, record, (size, 2 * size), None)
    assert branches.window.sizes == (size, 2 * size)
    assert branches.run_plan.ramp.to_rows() == record[RAMP_ROWS]
    assert branches.run_plan.position(summary.steps).consumed_samples == sum(
        line["global_batch_size"] for line in lines
    )


def test_gradient_noise_is_in_metrics_and_checkpoints_and_resumes_bit_for_bit(tmp_path):
    """Every line has S, G2 and averages; a stopped and resumed run has the same lines,
    one without it the same losses.
    """
    # With one layer, the compiler joins other operations in a program that measures.
    keys = TINY | {
        "base_num_decoder_layers": 2,
        "checkpoint_period": 5,
        "learning_rate_schedule_steps": 12,
    }
    keys |= {"measure_gradient_noise": True, "gradient_noise_half_life_samples": 100}
    _, lines = run(tmp_path / "whole", keys)
    noise = NoiseScale(half_life_samples=100)
    for line in lines:
        weight = line["global_batch_size"] * 16.0
        trace, squared_norm = (
            line["gradient_noise_trace"],
            line["gradient_squared_norm"],
        )
        noise.update(
            samples=line["global_batch_size"],
            weight=weight,
            trace=trace,
            squared_norm=squared_norm,
        )
        assert {name: line[name] for name in noise.metrics()} == pytest.approx(
            noise.metrics()
        )
    assert lines[-1]["noise_scale_samples_low"] is not None
    run(tmp_path / "stopped", keys, steps=7)
    saved = find_checkpoint(tmp_path / "stopped" / "run" / "checkpoints")
    assert saved.record[GRADIENT_NOISE][""]["total"] > 0
    final, resumed = run(tmp_path / "stopped", keys)
    assert (final.resumed_from, resumed) == (7, lines)
    _, off = run(tmp_path / "off", keys, measure_gradient_noise=False)
    assert [line["loss"] for line in off] == [line["loss"] for line in lines]


def test_gradient_noise_chooses_a_microbatch_or_is_refused():
    """On one device an automatic microbatch leaves two blocks in every phase; a given
    one that does not is refused.
    """
    plan = build_plan(Config(measure_gradient_noise=True), 1)
    assert plan.ramp.sizes == (2, 4, 6, 8)
    assert [split.num_microbatches for split in plan.splits] == [2, 4, 6, 8]
    assert (
        build_plan(Config(measure_gradient_noise=True), 2).splits
        == build_plan(Config(), 2).splits
    )
    stages = {
        "ici_pipeline_parallelism": 2,
        "num_pipeline_repeats": 2,
    }
    for keys, devices, message in (
        ({"microbatch_size": 2}, 1, r"phase 0.*set microbatch_size=1"),
        ({"per_device_batch_size": 1}, 1, "one block"),
        (stages, 2, "without pipeline stages"),
        ({"gradient_accumulation": "multi_steps"}, 1, "gradient_accumulation=fused"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_plan(Config(measure_gradient_noise=True, **keys), devices)
