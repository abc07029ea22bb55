"""Tests of rampup.lm.train: complete runs of a tiny model.

The schedule has the same length everywhere, since it is part of the program: runs of
other `steps` share one compilation.
"""

import inspect
import itertools
import json
import sys

import jax
import numpy as np
import optax
import pytest
from helpers import toy
from helpers.runs import metrics_of, stop_after
from helpers.tiny import TINY, TINY_MODEL

from rampup import Config, build_plan, load, load_config
from rampup.cli import main
from rampup.engine.mesh import make_mesh
from rampup.errors import (
    ConfigError,
    DataError,
    MissingDependencyError,
    ResumeMismatchError,
)
from rampup.lm.start import keep_config
from rampup.lm.train import (
    Run,
    TrainSetup,
    phase_hyperparameters,
    rows_of_step,
    train,
)
from rampup.loop.events import LearningRateChanged

# Batches that divide over the eight replicas of one mesh and over the replicas of two,
# four or eight stages.
DOUBLE = {
    "per_device_batch_size_start": 2,
    "per_device_batch_size_increment": 2,
    "per_device_batch_size": 6,
}
SHARDED = DOUBLE | {
    "dropout_rate": 0.1,
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 2,
}


has_muon = "consistent_rms" in inspect.signature(optax.contrib.muon).parameters
needs_muon = pytest.mark.skipif(
    not has_muon, reason="this Optax has no Muon with updates of AdamW's size"
)


def config(
    folder,
    keys=TINY | {"checkpoint_period": 100, "learning_rate_schedule_steps": 40},
    **changes,
):
    """Return a tiny configuration that runs in the folder."""
    return Config(base_output_directory=str(folder), run_name="run", **(keys | changes))


def metrics(folder, name="metrics.jsonl"):
    """Return every line of the run's metrics or eval.jsonl, without the times."""
    return metrics_of(folder / "run", name)


def losses(folder):
    """Return the loss of every step."""
    return [line["loss"] for line in metrics(folder)]


def test_another_learning_rate_at_a_resume_names_its_keys(tmp_path):
    """Those that differ from the run's own config.yml, with both values; the length only
    if it is that of the schedule; nothing at a new start.
    """
    found = []
    before, now = config(tmp_path), config(tmp_path, learning_rate=0.02, steps=13)
    follows = config(tmp_path, steps=14, learning_rate_schedule_steps=-1)
    for start, each in ((5, before), (5, before), (5, now), (8, follows), (0, now)):
        keep_config(each, tmp_path, start, found.append)
    assert found == [
        LearningRateChanged(step=4, keys=("learning_rate: 0.01 -> 0.02",)),
        LearningRateChanged(
            step=7,
            keys=(
                "steps: 13 -> 14",
                "learning_rate: 0.02 -> 0.01",
                "learning_rate_schedule_steps: 40 -> -1",
            ),
        ),
    ]


def test_another_ramp_at_a_resume_is_named_as_the_rate_follows_it(tmp_path):
    """A schedule of some steps is as long as their samples."""
    found = []
    before = config(tmp_path, batch_size_schedule="0:16 64:32")
    after = config(tmp_path, batch_size_schedule="0:16 64:64")
    for each in (before, after):
        keep_config(each, tmp_path, 5, found.append)
    (said,) = found
    assert said.keys == ('batch_size_schedule: "0:16 64:32" -> "0:16 64:64"',)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    """A run of 40 steps through the ramp: its folder and its summary."""
    folder = tmp_path_factory.mktemp("long")
    return folder, train(
        config(folder, steps=40, enable_tensorboard=True, eval_interval=6, eval_steps=2)
    )


def test_train_learns_through_its_ramp(long_run):
    """The loss falls over three phases, from one executable, and TensorBoard has the
    numbers of both files.
    """
    folder, summary = long_run
    assert summary.final_loss < summary.first_loss - 0.4
    assert (summary.steps, summary.num_compilations) == (40, 1)
    found = metrics(folder)
    assert [line["phase"] for line in found] == sorted(line["phase"] for line in found)
    assert {line["global_batch_size"] for line in found} == {8, 16, 24}
    evals = metrics(folder, "eval.jsonl")
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert {line["eval_tokens"] for line in evals} == {2 * 24 * 16}
    shown = toy.tensorboard_events(folder / "run" / "tensorboard")
    for line in found:
        values = {tag: value for step, tag, value in shown if step == line["step"]}
        for name in (
            "loss",
            "global_batch_size",
            "phase",
            "consumed_samples",
            "learning_rate",
            "microbatch_size",
        ):
            assert values[name] == pytest.approx(line[name], rel=1e-6)
        assert values["tflops_per_device"] >= 0
        assert ("eval_loss" in values) == (
            line["step"] in {each["step"] for each in evals}
        )
    assert [line["step"] for line in evals] == [5, 11, 17, 23, 29, 35, 39]


@pytest.mark.slow
@pytest.mark.parametrize("growth", ["per_phase", "auto"])
def test_train_gives_the_same_losses_in_other_shapes(tmp_path, long_run, growth):
    """However the ramp is split, losses agree to 1e-5, and only the first step of a
    shape may wait for its compilation.
    """
    train(config(tmp_path, steps=40, rampup_microbatch=growth))
    np.testing.assert_allclose(losses(tmp_path), losses(long_run[0]), rtol=1e-5)
    lines = [
        json.loads(line)
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    first_steps = {}
    for line in lines:
        first_steps.setdefault(line["microbatch_size"], line["step"])
    waited = {line["step"] for line in lines if "compile_seconds" in line}
    assert {0} <= waited <= set(first_steps.values())
    assert set(first_steps) <= {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{}, SHARDED, SHARDED | {"gradient_accumulation": "multi_steps"}]
)
def test_train_resumes_bit_for_bit(tmp_path, keys):
    """A stop before and after a phase change changes no bit, with replicas and with
    fsdp- and tensor-sharded state.
    """
    keys = keys | {"checkpoint_period": 3}
    expected = train(config(tmp_path / "whole", **keys))
    for stop in (2, 7):
        assert train(config(tmp_path / "stopped", **keys), stop_after(stop)).interrupted
    final = train(config(tmp_path / "stopped", **keys))
    assert final.resumed_from > 7
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    assert len({line["phase"] for line in metrics(tmp_path / "whole")}) == 3
    assert (final.final_loss, final.num_compilations) == (expected.final_loss, 1)


DEEP = DOUBLE | {
    "base_num_decoder_layers": 4,
    "logits_via_embedding": True,
    "dropout_rate": 0.1,
}
DEEP |= {"global_rampup_samples": 320, "eval_interval": 12, "eval_steps": 2}
STAGES = {"ici_pipeline_parallelism": 4}


@pytest.fixture(scope="module")
def deep_run(tmp_path_factory):
    """The folder of a run of 24 steps and three phases without pipeline stages."""
    folder = tmp_path_factory.mktemp("deep")
    train(config(folder, steps=24, **DEEP))
    assert {line["phase"] for line in metrics(folder)} == {0, 1, 2}
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes",
    [
        STAGES,
        {
            "ici_pipeline_parallelism": 2,
            "ici_tensor_parallelism": 2,
        },
    ],
    ids=str,
)
def test_train_agrees_through_pipeline_stages(tmp_path, deep_run, axes):
    """Through stages, repeats and dropout, losses and evaluations are those of the
    model on replicas alone, to 1e-5.
    """
    summary = train(config(tmp_path, steps=24, **(DEEP | axes)))
    found, expected = metrics(tmp_path), metrics(deep_run)
    assert [line["global_batch_size"] for line in found] == [
        line["global_batch_size"] for line in expected
    ]
    np.testing.assert_allclose(
        [line["loss"] for line in found], [line["loss"] for line in expected], rtol=1e-5
    )
    for one, other in zip(
        metrics(tmp_path, "eval.jsonl"), metrics(deep_run, "eval.jsonl"), strict=True
    ):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=1e-5)
    assert summary.num_compilations == 1


@pytest.mark.slow
def test_train_resumes_at_another_depth(tmp_path, deep_run):
    """Four stages, then two with fsdp, then none: the order of the layers in
    checkpoints does not depend on the stages.
    """
    depths = [
        STAGES | {"steps": 6},
        {
            "ici_pipeline_parallelism": 2,
            "ici_fsdp_parallelism": 2,
            "steps": 14,
            "eval_interval": -1,
        },
        {"steps": 24},
    ]
    for resumed_from, depth in zip((0, 6, 14), depths, strict=True):
        assert train(config(tmp_path, **(DEEP | depth))).resumed_from == resumed_from
    np.testing.assert_allclose(losses(tmp_path), losses(deep_run), rtol=1e-5)


def test_train_keeps_the_configuration_and_continues(tmp_path, capfd):
    """A started run leaves its configuration, which a refused resume does not change; a
    longer run continues, and is quiet.
    """
    with pytest.raises(
        ConfigError,
        match=r"train takes a Config, not a str; read a file with rampup.load_config",
    ):
        train("configs/base.yml")
    train(config(tmp_path, steps=4))
    kept = load_config(tmp_path / "run" / "config.yml")
    assert kept == config(tmp_path, steps=4, num_devices=8)
    with pytest.raises(
        ResumeMismatchError,
        match=r"(?s)base_mlp_dim: 32 in the checkpoint, 96 here.* `rampup train RUN_DIR`",
    ):
        train(config(tmp_path, steps=8, base_mlp_dim=96))
    with pytest.raises(
        ResumeMismatchError,
        match="weight_dtype: 'float32' in the checkpoint, 'bfloat16' here",
    ):
        train(config(tmp_path, steps=8, weight_dtype="bfloat16"))
    with pytest.raises(ResumeMismatchError, match="not of this model and optimizer"):
        train(config(tmp_path, steps=8, gradient_clipping_threshold=0))
    assert load_config(tmp_path / "run" / "config.yml") == kept
    # A run may have been on other devices before.
    summary = train(config(tmp_path, steps=8, num_devices=4))
    assert (summary.resumed_from, summary.steps) == (4, 8)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(8))
    assert load_config(tmp_path / "run" / "config.yml").steps == 8
    assert capfd.readouterr() == ("", "")


def test_plan_and_report_of_a_run_are_those_with_which_it_goes_on(tmp_path, capsys):
    """On another number of devices its global batches stay, and a ramp that it went on
    with by samples begins where it did.
    """
    folder, page = str(tmp_path / "run"), tmp_path / "report.html"

    def shown(*words):
        assert main(["plan", folder, *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    train(config(tmp_path, steps=4))
    sizes = [phase["global_batch_size"] for phase in shown()["phases"]]
    for number in (2, 4):
        phases = shown("--devices", str(number))["phases"]
        assert [phase["global_batch_size"] for phase in phases] == sizes
    done = metrics(tmp_path)[-1]
    assert main(["report", folder, "--devices", "4", "-o", str(page)]) == 0
    capsys.readouterr()
    assert f"{done['consumed_samples']:,}" in page.read_text()
    found = shown("--devices", "4", "--rows", str(done["step"]))
    assert found["global_batch_size"] == done["global_batch_size"]
    assert found["rows"][-1]["sample"] == done["consumed_samples"] - 1
    other = {"enable_rampup_batch_size": "false", "batch_size_schedule": "0:64"}
    words = [f"{name}={value}" for name, value in other.items()]
    phases = shown(*words, "on_plan_change=continue_by_samples")["phases"]
    first, second = phases[0], phases[1]
    assert (first["global_batch_size"], second["global_batch_size"]) == (8, 64)
    assert second["start_step"] == 4
    assert second["start_sample"] == done["consumed_samples"]


def test_run_and_rows_are_known_without_a_folder(tmp_path):
    """A run is built and checked without a trace in the output folder; `rows` names the
    samples of a step and their files.
    """
    settings = config(tmp_path / "out")
    plan = build_plan(settings, jax.device_count())
    run = Run.from_config(settings, plan)
    assert not (tmp_path / "out").exists()
    assert (run.setup.plan, run.loader.plan, run.saved) == (plan, plan, None)
    assert run.setup.model.num_parameters == sum(
        leaf.size for leaf in jax.tree.leaves(run.setup.state_shapes().params)
    )
    rows = rows_of_step(settings, plan, 9)
    assert [row["sample"] for row in rows] == list(plan.rows(9))
    assert all(".py from byte" in row["source"] for row in rows)
    with pytest.raises(ConfigError, match="step=12 must be from 0 to 11"):
        rows_of_step(settings, plan, 12)


@pytest.mark.parametrize(
    ("change", "error", "key"),
    [
        ({"ici_context_parallelism": 2}, ConfigError, "ici_context_parallelism"),
        ({"num_devices": 4}, ConfigError, "num_devices"),
        (
            {"expansion_factor_real_data": 0.5, "per_device_batch_size": 3},
            ConfigError,
            "expansion_factor_real_data",
        ),
        ({"ici_tensor_parallelism": 8}, ConfigError, "base_num_query_heads"),
        ({"grain_train_files": "/nowhere/*.txt"}, DataError, "grain_train_files"),
        ({"num_epoch": 1, "steps": 100_000}, DataError, "num_epoch"),
        ({"wandb_project": "ramps"}, MissingDependencyError, "wandb_project"),
        (
            {"eval_interval": 6, "eval_per_device_batch_size": 10**6},
            DataError,
            "eval_per_device_batch_size",
        ),
    ],
)
def test_train_refuses_before_any_work(tmp_path, change, error, key, monkeypatch):
    """Each refusal names its key, and leaves no run folder behind."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(error) as caught:
        train(config(tmp_path / "out", **change))
    assert caught.value.key == key
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("eval_steps", [8, 9, 10**6, -1])
def test_evaluation_takes_what_a_small_file_holds_out(tmp_path, eval_steps):
    """A number of batches is a maximum, whether it is the default or not. Fewer rows
    than one batch are refused.
    """
    text = tmp_path / "small.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    settings = config(
        tmp_path,
        grain_train_files=str(text),
        eval_interval=6,
        eval_steps=eval_steps,
        steps=1,
    )
    run = Run.from_config(settings, build_plan(settings, jax.device_count()))
    state = run.setup.initial_state()
    held_out = round(0.05 * (95 * 200 // 16))
    assert 1 <= held_out // 24 < 8
    assert run.evaluation.evaluate(state)["eval_tokens"] == held_out // 24 * 24 * 16
    few = config(
        tmp_path,
        grain_train_files=str(text),
        eval_interval=6,
        steps=1,
        max_target_length=1000,
    )
    with pytest.raises(
        DataError,
        match=("needs a batch of 24 rows; held out: 1; set a smaller eval_per"),
    ):
        Run.from_config(few, build_plan(few, jax.device_count()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "sizes"),
    [
        toy.campaign({}, {}),
        (
            {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2},
            {"base_num_decoder_layers": 4},
        ),
        pytest.param(
            {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
            {"opt_type": "muon"},
            marks=needs_muon,
        ),
    ],
)
def test_sharded_optimizer_state_trains_the_same(tmp_path, axes, sizes):
    """`shard_optimizer_over_data` changes no loss, with and without a pipeline, and a
    run resumes with it bit for bit.
    """
    keys = {"checkpoint_period": 4, **axes, **sizes, **(DOUBLE if axes else {})}
    train(config(tmp_path / "plain", **keys))
    keys["shard_optimizer_over_data"] = True
    train(config(tmp_path / "sharded", **keys))
    np.testing.assert_allclose(
        losses(tmp_path / "sharded"), losses(tmp_path / "plain"), rtol=1e-6
    )
    train(config(tmp_path / "cut", **keys), stop_after(5))
    train(config(tmp_path / "cut", **keys))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "sharded")


def test_replicas_exchange_the_type_that_is_configured(tmp_path):
    """With accumulators in bfloat16 too, `gradient_reduction_dtype: float32` is float32
    and not the accumulators' type.
    """
    for types in itertools.product(("float32", "bfloat16"), repeat=2):
        settings = config(
            tmp_path,
            gradient_reduction_dtype=types[0],
            gradient_accumulator_dtype=types[1],
        )
        setup = TrainSetup.from_config(settings, build_plan(settings, 8), make_mesh())
        assert (
            setup.loss.reduction_dtype,
            setup.loss.accumulator_dtype or "float32",
        ) == types


# A batch that follows a budget and Seesaw, and constants that follow the batch.
FOLLOWS = TINY_MODEL | {
    "batch_size_schedule": "0:8 10%:16 30%:32",
    "train_samples": 400,
    "seesaw_factor": 2,
}
FOLLOWS |= {
    "seesaw_max_batch_size": 96,
    "batch_scaling": "sde",
    "checkpoint_period": 100,
}


@pytest.mark.slow
def test_a_run_follows_its_batch_and_resumes_bit_for_bit(tmp_path):
    """One executable for five batch sizes; stopped and resumed, the same losses; other
    rules and budgets are refused.
    """
    whole = train(config(tmp_path / "whole", FOLLOWS))
    plan = build_plan(config(tmp_path, FOLLOWS), 8)
    assert plan.ramp.sizes == (8, 16, 32, 64, 96)
    assert (whole.steps, whole.num_compilations) == (plan.total_steps, 1)
    assert whole.consumed_samples - 96 < 400 <= whole.consumed_samples
    assert train(config(tmp_path / "stopped", FOLLOWS), stop_after(5)).interrupted
    assert train(config(tmp_path / "stopped", FOLLOWS)).resumed_from > 5
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    found = {
        line["step"]: line["learning_rate"] for line in metrics(tmp_path / "whole")
    }
    rows = phase_hyperparameters(config(tmp_path, FOLLOWS), plan)
    for phase, row in zip(plan.ramp.phases, rows, strict=True):
        assert found[phase.start_step] == row["learning_rate"]
    for key, value, words in (
        ("batch_scaling", "sqrt", "batch_scaling: .* in the checkpoint"),
        ("adam_b2_floor", 0.5, "adam_b2_floor: .* in the checkpoint"),
        ("batch_scaling_reference", 16, "set batch_scaling_reference=32 to keep the"),
    ):
        with pytest.raises(ResumeMismatchError, match=words):
            train(config(tmp_path / "stopped", FOLLOWS, **{key: value}))
    with pytest.raises(ResumeMismatchError, match="train_samples: 400 -> 500"):
        train(config(tmp_path / "stopped", FOLLOWS, train_samples=500))
    assert load(tmp_path / "stopped" / "run").step == plan.total_steps
