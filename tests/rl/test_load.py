"""Tests of rampup.rl.train: the policy of a run comes out, and answers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from helpers.snippets import one_device
from helpers.tiny import RL_TINY

import rampup
from rampup.cli import main
from rampup.errors import ConfigError
from rampup.rl import train as rl
from rampup.rl.config import RolloutConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of reinforcement learning."""
    folder = tmp_path_factory.mktemp("runs")
    config = RolloutConfig(
        **RL_TINY | {"num_batches": 1, "eval_interval": 100}, base_output_directory=str(folder), run_name="rl"
    )
    with one_device():
        rl.train(config)
    return folder / "rl"


def test_load_returns_the_policy(run, capsys):
    """Configuration, model and parameters belong together: the model has the logits that generation and its command see."""
    loaded = rampup.load(run)
    assert (loaded.step, loaded.config.max_operand, loaded.model.width) == (4, 9, 8)
    assert loaded.params is loaded.state["params"]
    logits = jax.jit(loaded.model.logits)(loaded.params, np.array([list(b"3+4=")]))
    best = int(logits[0, -1].argmax())
    assert loaded.generate("3+4=", 1, temperature=0) == ("" if best == 10 else bytes([best]).decode(errors="replace"))
    assert main(["generate", str(run), "--prompt", "3+4=", "--tokens", "5", "--temperature", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["text"]) == (4, loaded.generate("3+4=", 5, temperature=0))


def test_a_response_ends_with_its_end_token(run):
    """The text is what comes before the end token; without one it has all bytes that were asked for."""
    loaded = rampup.load(run)
    whole = dataclasses.replace(loaded, end_token=None).generate("3+4=", 40, seed=3)
    end = next(letter for letter in whole if letter.isascii())
    assert dataclasses.replace(loaded, end_token=ord(end)).generate("3+4=", 40, seed=3) == whole.partition(end)[0]
    assert loaded.generate("3+4=", 40, seed=3) == whole.partition("\n")[0]


def test_generate_says_why_it_cannot(run):
    """An argument out of range, and a model without text, each by its own rule."""
    loaded = rampup.load(run)
    with pytest.raises(ConfigError, match="from 1 to"):
        loaded.generate("3+4=", 0)
    config = rampup.Config(dataset_type="tokens", grain_train_files="x")
    with pytest.raises(ConfigError, match="a tokenizer that rampup does not know made its tokens"):
        dataclasses.replace(loaded, config=config).generate("3+4=", 5)
