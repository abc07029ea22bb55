"""Tests of rampup.contrib.lab.branches and `rampup critical`: real branches of a tiny run."""

import hashlib
import json

import jax
import numpy as np
import pytest
from helpers.tiny import TINY_MODEL
from helpers.toy import campaign
from rich.console import Console

import rampup
from rampup.cli import main
from rampup.contrib.lab.branches import (
    CriticalBatch,
    _Branches,
    _find_run,
    _train_branches,
    find_critical_batch_size,
)
from rampup.contrib.lab.critical import BranchResult
from rampup.contrib.lab.critical_command import _print_result
from rampup.data.files import open_sources
from rampup.errors import ConfigError, DataError, RampupError, ResumeMismatchError
from rampup.lm.train import sample_order
from rampup.loop.lock import own_run
from rampup.loop.run_folder import read_lines
from rampup.plan.noise_scale import NoiseEstimate

# Batches of 8 and 16 on the eight simulated devices, at a constant learning rate; the
# second checkpoint is in the last phase.
SETTINGS = TINY_MODEL | {
    "steps": 12,
    "checkpoint_period": 4,
    "batch_size_schedule": "0:8 16:16",
    "dropout_rate": 0.0,
}
SETTINGS |= {"lr_schedule_type": "constant", "warmup_steps_fraction": 0.0}


def train(folder, **settings):
    """Train a run and return its folder."""
    config = rampup.Config(
        **(SETTINGS | settings), base_output_directory=str(folder), run_name="demo"
    )
    rampup.train(config)
    return folder / "demo"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a trained run."""
    return train(tmp_path_factory.mktemp("runs"))


def digest(folder):
    """Return the names and the contents of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.slow
def test_critical_json(run, capsys):
    """The command prints the documented keys, changes nothing in the run's folder, and
    its schedule can be planned.
    """
    before = digest(run)
    arguments = [
        "critical",
        str(run),
        "--batches",
        "16,32,64",
        "--tokens",
        "4096",
        "--json",
    ]
    assert main(arguments) == 0
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert digest(run) == before
    names = [
        "step",
        "branches",
        "decisive",
        "critical_batch_size",
        "bound",
        "batch_size_schedule",
    ]
    assert list(found) == [*names, "tolerance", "gain", "tokens"]
    keys = [
        "global_batch_size",
        "loss",
        "standard_error",
        "token_overhead",
        "learning_rate",
    ]
    assert [list(branch) for branch in found["branches"]] == [keys] * 3
    assert (
        found["step"],
        [branch["global_batch_size"] for branch in found["branches"]],
    ) == (12, [16, 32, 64])
    assert found["branches"][0]["standard_error"] == 0
    rates = [branch["learning_rate"] for branch in found["branches"]]
    assert [rate / rates[0] for rate in rates] == pytest.approx([1, 2**0.5, 2])
    assert all(branch["standard_error"] > 0 for branch in found["branches"][1:])
    sizes = {branch["global_batch_size"] for branch in found["branches"]}
    assert found["critical_batch_size"] in sizes
    assert (
        found["bound"]
        == {16: "at_most", 32: "exact", 64: "at_least"}[found["critical_batch_size"]]
    )
    kept = json.loads(
        (run.with_name("demo.critical") / "step-12/result.json").read_text()
    )
    assert kept == found | {"consumed_samples": 16 + 10 * 16}
    # The run's own batches until the checkpoint, and the critical batch after it.
    settings = [
        f"batch_size_schedule={found['batch_size_schedule']}",
        "enable_rampup_batch_size=false",
    ]
    assert (
        main(["plan", str(run / "config.yml"), *settings, "--devices", "8", "--json"])
        == 0
    )
    phases = json.loads(capsys.readouterr().out)["phases"]
    assert [phase["global_batch_size"] for phase in phases][:2] == [8, 16]
    assert phases[-1]["global_batch_size"] == found["critical_batch_size"]


@pytest.mark.slow
def test_a_measurement_that_decides_nothing_is_not_kept(tmp_path):
    """At a rate that changes nothing, a window gains nothing, so it cannot decide."""
    folder = train(tmp_path, learning_rate=1e-12)
    found = find_critical_batch_size(folder, batches=(8, 16), tokens=1024)
    assert (found.decisive, found.critical_batch_size) == (False, None)
    assert not found.file.exists()


def test_all_branches_read_the_same_samples(run):
    """They are those that follow the checkpoint."""
    config, record = _find_run(run, 8)
    branches = _Branches(config, record, (8, 16, 48), 4000)
    assert branches.window.sizes == (8, 16, 48)
    samples = branches.window.samples
    rows, _ = open_sources(config)
    consumed = branches.run_plan.ramp.samples_before(8)
    expected = sample_order(config, len(rows), consumed + samples).rows(
        range(consumed, consumed + samples)
    )
    plan = branches.setup.plan
    assert plan.total_steps == plan.ramp.ramp_steps + samples // 48
    for phase in plan.ramp.phases:
        steps = range(
            phase.start_step, phase.start_step + samples // phase.global_batch_size
        )
        read = [branches.loader.order.rows(plan.rows(step)) for step in steps]
        assert np.concatenate(read).tolist() == expected.tolist()
    # Nothing that a branch is evaluated on has it trained on before.
    per_evaluation = branches.window.interval // branches.window.sizes[0]
    first = branches.eval_loader.order.rows(
        branches.eval_loader.plan.rows(per_evaluation)
    )
    assert first.tolist() == expected[branches.window.interval :][: len(first)].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fused", "multi_steps"])
def test_the_first_branch_is_the_run_itself(run, tmp_path, engine):
    """A branch with the batch of the run has the losses of the run that continues, evaluated on the
    same rows.
    """
    folder = run if engine == "fused" else train(tmp_path, gradient_accumulation=engine)
    config, record = _find_run(folder, 4)
    # 8 more steps of the run, in 4 intervals of 2.
    branches = _Branches(config, record, (16, 32), 8 * 16 * 16)
    assert branches.learning_rates == pytest.approx((0.01, 0.01 * 2**0.5))
    assert branches.window.num_evaluations == 4
    (curve, _), _ = _train_branches(branches, folder, print)
    params = jax.device_get(rampup.load(folder / "checkpoints" / "12").params)
    rows, _ = open_sources(config)
    first = branches.run_plan.ramp.samples_before(12)
    order = sample_order(config, len(rows), first + 64)
    for place, loss in enumerate(curve[-1].losses):
        batch = rows.read(
            order.rows(range(first + 16 * place, first + 16 * (place + 1)))
        )
        total, weight, _ = branches.setup.model.loss(
            params, jax.tree.map(np.asarray, batch), None
        )
        assert loss == pytest.approx(float(total) / float(weight), rel=1e-5)
        assert curve[-1].weights[place] == float(weight)


def test_bad_requests_are_refused_before_any_work(run, tmp_path, capsys):
    """Each error names the rule and the remedy."""
    cases = [
        ({"step": 5}, ConfigError, "checkpoints of the steps 4, 8, 12"),
        ({"tokens": 100}, ConfigError, "at least 4"),
        ({"tokens": 0}, ConfigError, "at least 4"),
        ({"batches": (16,)}, RampupError, "2 to 32 different batches"),
        ({"batches": (4, 16)}, RampupError, "data_parallel_size"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            find_critical_batch_size(run, **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no checkpoint to branch from"):
        find_critical_batch_size(tmp_path / "empty")
    for wrong, said in {
        "--batches=16,x": "batches",
        "--tokens=1.5": "whole number",
        "--step=0": "checkpoints of the steps",
        "--batches=": "batches",
        "--multiples=1,2": "--batches",
        "--tolerance=0.01": "20% more tokens",
        "--work=x": "next to the run",
    }.items():
        assert main(["critical", str(run), wrong]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_smaller_batches_are_tried_if_they_are_legal(run):
    """By default a run with a batch of 16 on 8 devices has a branch of 8 too, below
    which no batch is legal.
    """
    branches = _Branches(*_find_run(run, 12), None, 65_536)
    assert branches.window.sizes == (8, 16, 32, 64, 128)


def result(folder, **changes):
    """Return a measurement of two branches of 8 and 16 samples."""
    own = {"loss": 1.0, "standard_error": 0.0, "difference": None}
    costs = {8: None, 16: (0.2, 0.1, 0.3)}
    branches = tuple(
        BranchResult(global_batch_size=size, token_overhead=cost, **own)
        for size, cost in costs.items()
    )
    some = {
        "step": 9,
        "branches": branches,
        "critical_batch_size": 16,
        "batch_size_schedule": "0:8",
        "tolerance": 0.01,
    }
    some |= {
        "decisive": True,
        "bound": "exact",
        "gain": 0.1,
    }
    some |= {
        "learning_rates": (0.1, 0.2),
        "tokens": 1000,
        "noise_scale_samples": None,
        "num_compilations": 1,
        "file": folder / "result.json",
    }
    return CriticalBatch(**some | changes)


@pytest.mark.parametrize(
    ("bound", "size", "words"),
    [
        ("exact", 8, ["step 9: 8 samples"]),
        (
            "at_least",
            16,
            [
                "step 9: at least 16 samples",
                "20% (10% to 30%)",
                "no larger batch was tried: give larger --batches",
            ],
        ),
        (
            "at_most",
            8,
            [
                "step 9: at most 8 samples",
                "no smaller batch was tried: give smaller --batches",
            ],
        ),
    ],
)
def test_critical_says_what_is_only_a_bound(bound, size, words, tmp_path, capsys):
    """A batch that wins at the edge of what was tried is a bound, with what to try
    next.
    """
    found = result(tmp_path, bound=bound, critical_batch_size=size)
    _print_result(found, "runs/demo", Console(width=400))
    printed = " ".join(capsys.readouterr().out.split())
    assert [each for each in words if each not in printed] == []
    assert ("was tried" in printed) == (bound != "exact")
    command = (
        "rampup train runs/demo on_plan_change=continue_by_samples"
        " enable_rampup_batch_size=false batch_size_schedule="
    )
    assert command in printed


@pytest.mark.parametrize("gain", [0.01, None])
def test_critical_that_decided_nothing_names_no_batch(gain, tmp_path, capsys):
    """It says what the window gained and which window could decide, and gives no batch
    to go on with.
    """
    nothing = {
        "decisive": False,
        "critical_batch_size": None,
        "bound": None,
        "batch_size_schedule": None,
    }
    found = result(tmp_path, **nothing, gain=gain)
    _print_result(found, "runs/demo", Console(width=400))
    printed = capsys.readouterr().out
    assert "undecided at step 9" in printed
    assert "--tokens 8,000" in printed
    assert "critical" not in printed
    assert "rampup train" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("kind", [campaign("replicas"), "pipeline"])
def test_branches_read_their_run_only(run, tmp_path, kind):
    """Branches of an older checkpoint, of a run that trains meanwhile, in one program,
    also through stages with ZeRO-1.
    """
    keys = {
        "base_num_decoder_layers": 2,
        "ici_pipeline_parallelism": 2,
        "shard_optimizer_over_data": True,
        "dropout_rate": 0.1,
    }
    folder = run if kind == "replicas" else train(tmp_path, **keys)
    before = digest(folder)
    with own_run(folder):
        found = find_critical_batch_size(
            folder,
            step=8,
            batches=(8, 16, 48),
            tokens=4000,
        )
    assert digest(folder) == before
    assert found.num_compilations == 1
    assert [branch.global_batch_size for branch in found.branches] == [8, 16, 48]
    assert all(np.isfinite(branch.loss) for branch in found.branches)


@pytest.mark.slow
def test_window_beyond_the_data_is_refused(tmp_path):
    """With one pass over few rows, the error names them."""
    (tmp_path / "text.txt").write_text("abcdefgh" * 1000)
    folder = train(tmp_path, grain_train_files=str(tmp_path / "text.txt"), num_epoch=1)
    with pytest.raises(DataError, match=r"num_epoch=1 of .* rows"):
        find_critical_batch_size(folder, tokens=100_000)
    (tmp_path / "text.txt").write_text("abcdefgi" * 1000)
    with pytest.raises(ResumeMismatchError, match="not those of the run"):
        find_critical_batch_size(folder, tokens=10_000)


@pytest.mark.slow
def test_sgd_scales_the_learning_rate_linearly(tmp_path):
    """Adam's square root is tested above; after the schedule's end, the last learning
    rate counts.
    """
    folder = train(
        tmp_path, opt_type="sgd", lr_schedule_type="cosine", batch_size_schedule="0:8"
    )
    config, record = _find_run(folder, 12)
    rates = _Branches(config, record, (8, 16, 32), None).learning_rates
    assert rates == pytest.approx([rates[0], 2 * rates[0], 4 * rates[0]])
    assert rates[0] == pytest.approx(
        list(read_lines(folder / "metrics.jsonl"))[-1]["learning_rate"]
    )


def test_a_noise_scale_follows_from_the_critical_batch(tmp_path, capsys):
    """At the same additional tokens: 16 * (0.1 - 0.01) / 0.01. It is printed beside the
    measured one; none follows from a measurement that decided nothing.
    """
    noise = NoiseEstimate(value=36.0, low=30.0, high=40.0)
    found = result(tmp_path, noise_scale_samples=noise)
    assert found.implied_noise_scale == pytest.approx(144)
    _print_result(found, "runs/demo", Console(width=400))
    printed = " ".join(capsys.readouterr().out.split())
    assert "measured by the run: 36 (30 to 40) samples" in printed
    assert "a noise scale of 144 samples" in printed
    assert result(tmp_path, critical_batch_size=None).implied_noise_scale is None
