"""The gallery in docs/examples: programs, each beside its form with a ramp."""

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from helpers.snippets import ROOT, generator, one_device

EXAMPLES = ROOT / "docs" / "examples"


@pytest.mark.parametrize("name", generator.PAIRS)
def test_a_ramp_takes_at_most_12_lines(name):
    """At most 12 lines are new or changed, and the page states how many, and how many
    are gone.
    """
    new, gone = generator.changed_lines(name)
    assert new <= 12
    page = (EXAMPLES / "index.md").read_text()
    assert re.search(rf"`{name}` \|.*\| {new} new or changed, {gone} gone \|", page), (
        new,
        gone,
    )


def run_both(name):
    """Run both forms of a program on one device, and return their variables."""
    with one_device():
        return [
            runpy.run_path(str(EXAMPLES / f"{name}{end}.py")) for end in ("", "_ramp")
        ]


@pytest.mark.notebooks
@pytest.mark.parametrize(
    "name", ["flax/mnist", "flax/resnet", "flax/minigpt", "flax/vit", "flax/lora"]
)
def test_examples_learn_and_a_ramp_is_one_executable(name):
    """Both forms learn; the one with a ramp compiles its step once."""
    before, after = run_both(name)
    for found in (before, after):
        assert found["losses"][-1] < 0.6 * found["losses"][0]
    assert after["plan"].ramp.sizes == (8, 32)
    if "step" in after:
        assert (after["step"].num_compilations, int(after["state"].step)) == (1, 60)
    else:
        assert after["train_step"].jitted_fn._cache_size() == 1
        assert int(after["optimizer"].opt_state.gradient_step[...]) == 60


@pytest.mark.notebooks
@pytest.mark.parametrize(
    ("name", "programs"),
    [("nanodo", 1), ("equinox_mlp", 1), ("batch_norm", 2), ("contrastive", 2)],
)
def test_ports_have_the_same_losses(name, programs):
    """A program gives rampup the batches that it has, and its losses stay, as do the
    running statistics of a normalization.
    """
    before, after = run_both(f"ports/{name}")
    np.testing.assert_allclose(after["losses"], before["losses"], rtol=1e-5)
    assert [split.global_batch_size for split in after["plan"].splits] == [8, 32]
    assert after["step"].num_compilations == programs
    if name == "batch_norm":
        np.testing.assert_allclose(
            after["model"].norm.var[...], before["model"].norm.var[...], rtol=1e-5
        )


@pytest.mark.notebooks
def test_grpo_earns_its_reward_and_a_ramp_is_one_executable_per_role():
    """Both forms learn to repeat the prompt; the one with a ramp has 8 and then 32
    prompts per step.
    """
    before, after = run_both("flax/grpo")
    for found in (before, after):
        assert found["rewards"][0] < 0.3
        assert found["rewards"][-1] > 0.9
    assert [plan.rollout_batch.count for _, plan in after["schedule"].stages] == [8, 32]
    assert after["step"].compilations == {"generate": 1, "logprobs": 1, "update": 1}


def run_process(name, folder, **variables):
    """Run a program in a process with one device, and return what it prints."""
    environ = (
        os.environ
        | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        | variables
    )
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(folder)]
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("maxtext") is None,
    reason="MaxText is not installed: see docs/guides/in_maxtext.md",
)
def test_maxtext_compiles_four_programs_and_with_rampup_one(tmp_path):
    """Both forms train on the same numbers of tokens, in four programs and in one."""
    tokens = []
    for name, programs in (("maxtext_train", 4), ("maxtext_train_ramp", 1)):
        printed = run_process(f"systems/{name}", tmp_path / name, JAX_LOG_COMPILES="1")
        assert printed.count("Finished XLA compilation of jit(train_step)") == programs
        lines = [
            json.loads(line)
            for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        ]
        assert lines[-1]["learning/loss"] < 0.9 * lines[0]["learning/loss"]
        tokens.append([line["learning/total_weights"] for line in lines])
    assert (
        tokens[0]
        == tokens[1]
        == [32 * size for size in [2] * 12 + [4] * 6 + [6] * 4 + [8] * 4]
    )


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'ray[train]'",
)
@pytest.mark.parametrize("name", ["ray_train", "ray_train_ramp"])
def test_ray_trains_on_two_workers(name, tmp_path):
    """Both forms learn on two workers."""
    printed = run_process(
        f"systems/{name}", tmp_path, RAY_AUTH_MODE="disabled", RAY_DEDUP_LOGS="0"
    )
    first, *_, last = re.findall(r"'loss': ([\d.]+)", printed)
    assert float(last) < 0.6 * float(first)
    assert "Started training worker group of size 2" in printed
    assert "'compilations': 1}" in printed or name == "ray_train"
