"""Tests of rampup.lm.train: the whole run, small."""

import json
import signal
import sys

import jax
import numpy as np
import pytest
from helpers import toy

from rampup import Config, build_plan, load_config
from rampup.errors import ConfigError, DataError, MissingDependencyError, ResumeMismatchError
from rampup.lm.data import rows_of_step
from rampup.lm.train import TrainSetup, train
from rampup.run.events import StepDone
from rampup.run.mesh import make_mesh

TINY = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 1,
    "per_device_batch_size_increment": 1,
    "per_device_batch_size": 3,
    "global_rampup_samples": 80,
    "steps": 12,
    "checkpoint_period": 100,
    "eval_interval": 6,
    "eval_steps": 2,
    "max_target_length": 16,
    "base_emb_dim": 32,
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 64,
    "learning_rate": 0.01,
}


def config(folder, **changes):
    """Return a tiny configuration that runs in the folder."""
    return Config(base_output_directory=str(folder), run_name="run", **(TINY | changes))


def metrics(folder):
    """Return what does not depend on time of every step's metrics."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    times = ("step_seconds", "tokens_per_second", "tflops_per_device", "compile_seconds")
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]


def stop_after(step):
    """Return a progress callback that sends this process SIGTERM when a step's metrics are out."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == step:
            signal.raise_signal(signal.SIGTERM)

    return on_event


def test_a_run_learns_through_its_ramp(tmp_path):
    """The loss falls over three phases, from one executable, and evaluation is on held-out rows."""
    summary = train(config(tmp_path, steps=40))
    assert summary.final_loss < summary.first_loss - 0.5
    assert (summary.steps, summary.num_compilations) == (40, 1)
    found = metrics(tmp_path)
    assert [line["phase"] for line in found] == sorted(line["phase"] for line in found)
    assert {line["global_batch_size"] for line in found} == {8, 16, 24}
    evals = [json.loads(line) for line in (tmp_path / "run" / "eval.jsonl").read_text().splitlines()]
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"]
    assert {line["eval_tokens"] for line in evals} == {2 * 24 * 16}


@pytest.mark.parametrize(
    ("engine", "mesh"),
    [
        ("fused", {}),
        (
            "fused",
            {
                "ici_fsdp_parallelism": 2,
                "ici_tensor_parallelism": 2,
                "per_device_batch_size_start": 2,
                "per_device_batch_size_increment": 2,
                "per_device_batch_size": 6,
            },
        ),
        (
            "multi_steps",
            {
                "ici_fsdp_parallelism": 2,
                "ici_tensor_parallelism": 2,
                "per_device_batch_size_start": 2,
                "per_device_batch_size_increment": 2,
                "per_device_batch_size": 6,
            },
        ),
    ],
)
def test_stopped_and_resumed_across_a_phase_change(tmp_path, engine, mesh):
    """Both engines, with fsdp- and tensor-sharded state, go on bit for bit after a stop before and after a phase change."""
    keys = {"gradient_accumulation": engine, "checkpoint_period": 3, "dropout_rate": 0.1, "eval_interval": -1, **mesh}
    whole = train(config(tmp_path / "whole", **keys))
    for stop in (2, 7):
        interrupted = train(config(tmp_path / "cut", **keys), stop_after(stop))
        assert interrupted.interrupted
    final = train(config(tmp_path / "cut", **keys))
    assert final.resumed_from > 7
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert len({line["phase"] for line in metrics(tmp_path / "whole")}) == 3
    assert (final.final_loss, final.num_compilations) == (whole.final_loss, 1)


def test_meshes_agree(tmp_path):
    """Eight replicas and a data, fsdp and tensor mesh give the same losses on the same global batches."""
    train(config(tmp_path / "a", eval_interval=-1))
    keys = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "global_rampup_samples": 80, "eval_interval": -1}
    train(config(tmp_path / "b", **keys))
    a, b = (metrics(tmp_path / name) for name in "ab")
    np.testing.assert_allclose([line["loss"] for line in a], [line["loss"] for line in b], rtol=1e-5)


PIPELINED = {
    "base_num_decoder_layers": 4,
    "logits_via_embedding": True,
    "dropout_rate": 0.1,
    "per_device_batch_size_start": 2,
    "per_device_batch_size_increment": 2,
    "per_device_batch_size": 6,
    "global_rampup_samples": 320,
}


@pytest.mark.parametrize(
    "axes",
    [{"ici_pipeline_parallelism": 4}, {"ici_pipeline_parallelism": 2, "ici_tensor_parallelism": 2, "pipeline_keep": "dots"}],
)
def test_pipelines_agree_with_the_model(tmp_path, axes):
    """Through stages, repeats and dropout, over 50 steps and three phases, losses and evaluations are the model's to 1e-5."""
    keys = PIPELINED | {"steps": 50, "eval_interval": 25}
    train(config(tmp_path / "a", **keys))
    summary = train(config(tmp_path / "b", **keys, **axes))
    a, b = (metrics(tmp_path / name) for name in "ab")
    assert [line["global_batch_size"] for line in a] == [line["global_batch_size"] for line in b]
    assert {line["phase"] for line in b} == {0, 1, 2}
    np.testing.assert_allclose([line["loss"] for line in b], [line["loss"] for line in a], rtol=1e-5)
    evals = [(tmp_path / name / "run" / "eval.jsonl").read_text().splitlines() for name in "ab"]
    for one, other in zip(*evals, strict=True):
        assert json.loads(one)["eval_loss"] == pytest.approx(json.loads(other)["eval_loss"], rel=1e-5)
    assert summary.num_compilations == 1


def test_a_run_goes_on_at_another_depth(tmp_path):
    """Four stages, then two with fsdp, then none: checkpoints hold the layers in an order that does not depend on it."""
    keys = PIPELINED | {"eval_interval": -1}
    whole = train(config(tmp_path / "whole", **keys))
    depths = [
        {"ici_pipeline_parallelism": 4, "steps": 4},
        {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2, "steps": 8},
        {"steps": 12},
    ]
    for number, depth in enumerate(depths):
        last = train(config(tmp_path / "cut", **(keys | {"learning_rate_schedule_steps": 12} | depth)))
        assert last.resumed_from == 4 * number
    assert last.final_loss == pytest.approx(whole.final_loss, rel=1e-5)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("whole", "cut")]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("growth", ["per_phase", "auto"])
def test_other_shapes_give_the_same_losses(tmp_path, growth):
    """However the ramp is cut, losses agree to 1e-5, and no step but the first pays for a compilation."""
    keys = {"steps": 40, "eval_interval": -1}
    train(config(tmp_path / "fixed", **keys))
    train(config(tmp_path / growth, rampup_microbatch=growth, **keys))
    a, b = metrics(tmp_path / "fixed"), metrics(tmp_path / growth)
    np.testing.assert_allclose([line["loss"] for line in b], [line["loss"] for line in a], rtol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / growth / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "compile_seconds" in line] == [0]
    assert {line["microbatch_size"] for line in lines} <= {1, 2, 3}


def test_rows_of_a_step(tmp_path):
    """`rows` names exactly the samples of a step, with the file they come from."""
    settings = config(tmp_path)
    plan = build_plan(settings, jax.device_count())
    rows = rows_of_step(settings, plan, 9)
    assert [row["sample"] for row in rows] == list(plan.rows(9))
    assert all(".py from byte" in row["source"] for row in rows)
    with pytest.raises(ConfigError, match="step=12 must be from 0 to 11"):
        rows_of_step(settings, plan, 12)


@pytest.mark.parametrize(
    ("change", "error", "key"),
    [
        ({"ici_context_parallelism": 2}, ConfigError, "ici_context_parallelism"),
        ({"ici_expert_parallelism": 2}, ConfigError, "ici_expert_parallelism"),
        ({"expansion_factor_real_data": 0.5, "per_device_batch_size": 3}, ConfigError, "expansion_factor_real_data"),
        ({"ici_tensor_parallelism": 8}, ConfigError, "base_num_query_heads"),
        ({"grain_train_files": "/nowhere/*.txt"}, DataError, "grain_train_files"),
        ({"num_epoch": 1, "steps": 100_000}, DataError, "num_epoch"),
        ({"eval_steps": 10**6}, DataError, "eval_steps"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(tmp_path, change, error, key):
    """Each refusal names its key, and leaves no run folder behind."""
    with pytest.raises(error) as caught:
        train(config(tmp_path / "out", **change))
    assert caught.value.key == key
    assert not (tmp_path / "out").exists()


def test_another_models_checkpoint_is_refused(tmp_path):
    """A run folder of another model is refused with both sizes."""
    train(config(tmp_path, steps=2))
    with pytest.raises(ResumeMismatchError, match="base_mlp_dim: 64 in the checkpoint, 96 here"):
        train(config(tmp_path, base_mlp_dim=96))


def test_a_longer_run_goes_on(tmp_path):
    """With more steps a finished run goes on from where it was."""
    train(config(tmp_path, steps=4))
    summary = train(config(tmp_path, steps=8))
    assert (summary.resumed_from, summary.steps) == (4, 8)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(8))


def test_the_folder_keeps_the_configuration(tmp_path):
    """A started run leaves what it was started with, from which it can be planned again; a refused resume leaves it alone."""
    train(config(tmp_path, steps=2, eval_interval=-1))
    kept = load_config(tmp_path / "run" / "config.yml")
    assert kept == config(tmp_path, steps=2, eval_interval=-1, num_devices=8)
    with pytest.raises(ResumeMismatchError):
        train(config(tmp_path, steps=3, eval_interval=-1, base_mlp_dim=32))
    assert load_config(tmp_path / "run" / "config.yml") == kept


def test_tensorboard_shows_every_metric(tmp_path):
    """The event files have the numbers of metrics.jsonl and eval.jsonl under the same names, and FLOP/s among them."""
    train(config(tmp_path, enable_tensorboard=True))
    shown = toy.tensorboard_events(tmp_path / "run" / "tensorboard")
    for line in metrics(tmp_path):
        found = {tag: value for step, tag, value in shown if step == line["step"]}
        for name in ("loss", "global_batch_size", "phase", "consumed_samples", "learning_rate", "microbatch_size"):
            assert found[name] == pytest.approx(line[name], rel=1e-6)
        assert found["tflops_per_device"] >= 0
        assert ("eval_loss" in found) == (line["step"] in (5, 11))


def test_a_writer_that_is_not_installed_stops_the_run_before_any_work(tmp_path, monkeypatch):
    """Nothing is made in the run's folder."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'rampup\[wandb\]'"):
        train(config(tmp_path / "out", wandb_project="ramps"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("axes", "sizes"), [({}, {}), ({"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 2}, {"base_num_decoder_layers": 4})]
)
def test_sharded_optimizer_state_trains_the_same(tmp_path, axes, sizes):
    """`shard_optimizer_over_data` changes no loss, with and without a pipeline, and a run resumes with it bit for bit."""
    keys = {"eval_interval": -1, "checkpoint_period": 4, "global_rampup_samples": 80, **axes, **sizes}
    if axes:
        keys |= {"per_device_batch_size_start": 2, "per_device_batch_size_increment": 2, "per_device_batch_size": 6}
    train(config(tmp_path / "plain", **keys))
    keys["shard_optimizer_over_data"] = True
    train(config(tmp_path / "sharded", **keys))
    plain, sharded = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("plain", "sharded"))
    np.testing.assert_allclose(sharded, plain, rtol=1e-6)
    train(config(tmp_path / "cut", **keys), stop_after(5))
    train(config(tmp_path / "cut", **keys))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "sharded")


def test_state_shapes_of_a_sharded_optimizer_are_those_of_the_state():
    """The shapes that are planned with have the shardings of the real state."""
    keys = TINY | {"shard_optimizer_over_data": True}
    plan = build_plan(Config(**keys), jax.device_count())
    setup = TrainSetup.from_config(Config(**keys), plan, make_mesh(plan.axes))
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), setup.initial_state())
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.sharding), setup.state_shapes()) == expected
