"""Tests of `batch_size_schedule: auto` in runs of the language model."""

import itertools

import pytest
from helpers import tiny
from helpers.runs import metrics_of

from rampup import Config
from rampup.lm.branches import _Branches, _find_run
from rampup.lm.train import train
from rampup.loop.checkpoint import find_checkpoint
from rampup.loop.loop import RAMP_ROWS

pytestmark = pytest.mark.usefixtures("optimized")

AUTO = tiny.AUTO | {"steps": 40, "learning_rate_schedule_steps": 40, "checkpoint_period": 7}


def run(folder, **changes):
    """Train in a folder; return the summary and the lines of metrics.jsonl without the times."""
    keys = AUTO | changes
    summary = train(Config(base_output_directory=str(folder), run_name="run", **keys))
    return summary, metrics_of(folder / "run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the result of a run that follows its noise, and its folder."""
    folder = tmp_path_factory.mktemp("auto")
    return *run(folder), folder


def test_auto_schedule_grows_the_batch(whole):
    """The batch grows in one program; decisions are in the metrics and in the checkpoint."""
    summary, lines, folder = whole
    sizes = [line["global_batch_size"] for line in lines]
    assert sizes[0] == 8
    assert sizes[-1] > 8
    assert summary.num_compilations == 1
    for before, after in itertools.pairwise(lines):
        assert after["global_batch_size"] == before.get("next_global_batch_size", before["global_batch_size"])
    saved = find_checkpoint(folder / "run" / "checkpoints")
    assert " ".join(f"{sample}:{size}" for _, sample, size in saved.record[RAMP_ROWS]) == summary.batch_size_schedule


@pytest.mark.slow
def test_auto_schedule_is_replayed(whole, tmp_path):
    """The printed schedule gives the same batches and losses."""
    summary, lines, _ = whole
    keys = {"batch_size_schedule": summary.batch_size_schedule, "learning_rate_clock": "steps", "measure_gradient_noise": False}
    own = {name: value for name, value in AUTO.items() if not name.startswith(("per_device", "gradient_noise"))}
    train(Config(base_output_directory=str(tmp_path), run_name="run", **(own | keys)))
    replayed = metrics_of(tmp_path / "run")
    for line, other in zip(lines, replayed, strict=True):
        for name in ("global_batch_size", "consumed_samples", "microbatch_size"):
            assert line[name] == other[name]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_auto_schedule_resumes_bit_for_bit(whole, tmp_path):
    """A run that is stopped before, at and after its decisions continues as one that was never stopped."""
    summary, lines, _ = whole
    changes = [
        number + 1 for number, line in enumerate(lines) if line.get("next_global_batch_size", 8) != line["global_batch_size"]
    ]
    for steps in (changes[0] - 3, changes[0], changes[0] + 4):
        run(tmp_path, steps=steps)
    final, resumed = run(tmp_path)
    assert final.resumed_from == changes[0] + 4
    assert resumed == lines
    assert final.batch_size_schedule == summary.batch_size_schedule


@pytest.mark.slow
def test_auto_schedule_advises_without_changing_a_bit(whole, tmp_path):
    """`advise` writes sizes and a schedule, also over a resume, and trains exactly as a constant batch."""
    run(tmp_path / "advised", auto_schedule="advise", steps=23)
    summary, lines = run(tmp_path / "advised", auto_schedule="advise")
    own = {name: value for name, value in AUTO.items() if name not in ("batch_size_schedule", "per_device_batch_size_start")}
    train(Config(base_output_directory=str(tmp_path), run_name="run", **(own | {"per_device_batch_size": 1})))
    plain = metrics_of(tmp_path / "run")
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    advised = [line["advised_global_batch_size"] for line in lines if "advised_global_batch_size" in line]
    assert advised[-1] > 8
    assert {line["global_batch_size"] for line in lines} == {8}
    assert summary.batch_size_schedule.startswith("0:8 ")
    # Up to its first change it sees what the run that follows sees.
    assert summary.batch_size_schedule.split()[1] == whole[0].batch_size_schedule.split()[1]


def test_critical_branches_from_the_batch_that_has_grown(whole):
    """The branches of a run that follows its noise start with the batch and the samples that it had at the checkpoint."""
    summary, lines, folder = whole
    config, record = _find_run(folder / "run", None)
    branches = _Branches.build(config, record, (1, 2), None)
    size = int(summary.batch_size_schedule.split(":")[-1])
    assert branches.window.sizes == (size, 2 * size)
    assert branches.run_plan.ramp.to_rows() == record[RAMP_ROWS]
    assert branches.run_plan.position(40).consumed_samples == sum(line["global_batch_size"] for line in lines)
