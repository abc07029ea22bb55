"""Tests of rampup.lm.load: the model comes out."""

import io
import json
import os
import shutil
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers.tiny import TINY, command_line

import rampup
from rampup.cli import main
from rampup.errors import ConfigError, ResumeMismatchError
from rampup.lm.load import LoadedRun
from rampup.lm.train import learning_rate, optimizer
from rampup.lm.transformer import LanguageModel
from rampup.loop.events import StepDone

# The program of test_train.py, from the compilation cache.
SHORT = TINY | {
    "steps": 6,
    "learning_rate_schedule_steps": 40,
    "checkpoint_period": 3,
    "eval_interval": 3,
    "eval_steps": 1,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("runs")
    rampup.train(
        rampup.Config(**SHORT, base_output_directory=str(folder), run_name="demo")
    )
    return folder / "demo"


def test_load_returns_config_model_params_and_state(run):
    """The newest checkpoint, or a named one; the repr has folder, step and how many
    parameters there are, and no arrays.
    """
    assert rampup.load(run / "checkpoints" / "3").step == 3
    loaded = rampup.load(run / "checkpoints")
    assert loaded.folder == rampup.load(str(run)).folder == run / "checkpoints" / "6"
    assert repr(loaded).startswith(
        f"LoadedRun(folder='{run}/checkpoints/6', step=6, params=<12 arrays, "
    )
    assert repr(loaded).endswith(
        " numbers>, state=TrainState, config=Config, model=LanguageModel)"
    )
    assert loaded.step == int(loaded.state.step) == 6
    assert loaded.config.base_emb_dim == 16
    assert loaded.params is loaded.state.params
    # The optimizer's state has the types of Optax: another update works.
    tx = optimizer(
        loaded.config,
        learning_rate(
            loaded.config, rampup.build_plan(loaded.config, jax.device_count())
        ),
    )
    updates, _ = jax.jit(tx.update)(
        jax.tree.map(jnp.ones_like, loaded.params),
        loaded.state.opt_state,
        loaded.params,
    )
    assert jax.tree.structure(updates) == jax.tree.structure(loaded.params)
    logits = jax.jit(loaded.model.logits)(
        loaded.params, jnp.asarray([list(b"def main")])
    )
    assert logits.shape == (1, 8, 256)
    assert np.isfinite(np.asarray(logits)).all()


def test_plain_orbax_restores_the_checkpoint(run):
    """Without rampup: a composite with `state` and `record`, and the same parameters as
    `rampup.load` returns.
    """
    with ocp.CheckpointManager((run / "checkpoints").absolute()) as manager:
        arguments = ocp.args.Composite(
            state=ocp.args.StandardRestore(), record=ocp.args.JsonRestore()
        )
        restored = manager.restore(manager.latest_step(), args=arguments)
    assert (int(restored.state["step"]), restored.record["step"]) == (6, 6)
    jax.tree.map(
        np.testing.assert_array_equal, restored.state["params"], rampup.load(run).params
    )


def test_load_refuses_what_is_missing_damaged_or_edited(run, tmp_path):
    """The message names the path, or the key with both values; a run falls back to its
    newest intact checkpoint.
    """
    for name in ("", "missing", "demo/checkpoints/7"):
        with pytest.raises(ConfigError, match="no checkpoint in"):
            rampup.load(run.parent / name)
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "checkpoints" / "6" / "record" / "metadata").write_text("{}")
    with pytest.raises(ResumeMismatchError, match="damaged"):
        rampup.load(copy / "checkpoints" / "6")
    assert rampup.load(copy).step == 3
    text = (copy / "config.yml").read_text()
    (copy / "config.yml").write_text(
        text.replace("base_emb_dim: 16", "base_emb_dim: 32")
    )
    with pytest.raises(
        ResumeMismatchError, match="base_emb_dim: 16 in the checkpoint, 32 there"
    ) as caught:
        rampup.load(copy)
    assert caught.value.key == "base_emb_dim"


@pytest.mark.slow
def test_generate_samples_text(run):
    """The same seed gives the same text; temperature 0 the most probable bytes,
    computed one by one. Options have ranges.
    """
    loaded = rampup.load(run)
    assert loaded.generate("def f(", 24, seed=1) == loaded.generate(
        "def f(", 24, seed=1
    )
    tokens, logits = list(b"def f("), jax.jit(loaded.model.logits)
    for _ in range(24):
        window = tokens[-16:]
        # What follows a token does not change its logits, so that one shape is enough.
        padded = jnp.asarray([window + [0] * (16 - len(window))])
        tokens.append(int(logits(loaded.params, padded)[0, len(window) - 1].argmax()))
    assert loaded.generate("def f(", 24, temperature=0) == bytes(tokens[6:]).decode(
        errors="replace"
    )
    assert loaded.generate("def f(", 24, top_k=1) == loaded.generate(
        "def f(", 24, temperature=0
    )
    for wrong in (
        {"num_tokens": 0},
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_k": 257},
        {"seed": -1},
    ):
        with pytest.raises(ConfigError, match="must be"):
            loaded.generate("a", **wrong)


def test_generate_command_takes_any_bytes_and_prints_on_any_output(
    run, monkeypatch, capsys
):
    """One JSON object with the text, or the prompt and its continuation; a prompt that
    is not UTF-8, on an output of ASCII.
    """
    command = [
        "generate",
        str(run),
        "--prompt",
        "def f",
        "--tokens",
        "5",
        "--temperature",
        "0",
    ]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prompt"], found["step"], found["seed"]) == ("def f", 6, 0)
    assert main(command) == 0
    assert capsys.readouterr().out == f"def f{found['text']}\n"
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert (
        main(
            [
                "generate",
                str(run),
                "--tokens",
                "6",
                "--prompt",
                os.fsdecode(b"\xff\xe9"),
            ]
        )
        == 0
    )
    output.flush()
    assert output.buffer.getvalue().startswith(rb"\udcff\udce9")


def test_an_unnamed_run_is_resumed_by_the_printed_command(
    tmp_path, capsys, monkeypatch
):
    """After Ctrl-C, the command that is printed resumes the run; its config.yml has the
    run's real name.
    """
    from rampup.show import progress

    show = progress.TrainProgress.__call__

    def stop(self, event):
        show(self, event)
        if (
            isinstance(event, StepDone)
            and event.step == 1
            and not list(tmp_path.glob("*/checkpoints/*"))
        ):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(progress.TrainProgress, "__call__", stop)
    assert (
        main(
            [
                "train",
                "base.yml",
                *command_line(SHORT | {"base_output_directory": tmp_path}),
            ]
        )
        == 130
    )
    command = next(
        line for line in capsys.readouterr().out.splitlines() if "resume with: " in line
    ).partition("with: ")[2]
    (folder,) = tmp_path.iterdir()
    assert rampup.load_config(folder / "config.yml").run_name == folder.name
    assert command == f"rampup train {folder}"
    assert main([*command.split()[1:], "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] == 6
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_train_run_folder_takes_settings(run, tmp_path, capsys):
    """A moved folder resumes where it is, with keys that may change; its name and place
    may not.
    """
    moved = shutil.copytree(run, tmp_path / "moved")
    assert main(["train", str(moved), "steps=7", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["checkpoint"]) == (
        7,
        str(moved / "checkpoints" / "7"),
    )
    assert found["seconds"] > 0
    assert main(["train", str(moved), "run_name=x"]) == 2
    assert "keeps its folder" in capsys.readouterr().err
    assert main(["train", str(tmp_path)]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
    assert main(["train", str(moved), "base_emb_dim=32"]) == 2


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"num_tokens": 0}, "tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top-k"),
        ({"top_k": 257}, "top-k"),
        ({"seed": -1}, "seed"),
    ],
)
def test_options_of_generate_out_of_range_are_refused(tmp_path, options, key):
    """By the names that the command has; nothing is sampled."""
    model = LanguageModel(
        num_layers=1, width=8, mlp_dim=8, num_heads=1, num_kv_heads=1, vocab_size=256
    )
    loaded = LoadedRun(
        folder=tmp_path, step=0, params=None, state=None, model=model, context=8
    )
    with pytest.raises(ConfigError, match=f"{key}=.* must be a number") as refused:
        loaded.generate("a", **options)
    assert refused.value.key == key
