"""Tests of rampup.contrib.rl.train: runs of `rampup train` of a rollout's configuration, at
their smallest.
"""

import json
import os
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import processes, snippets
from helpers.figures import texts
from helpers.runs import assert_same_run, metrics_of, state_of
from helpers.tiny import RL_TINY as TINY
from helpers.toy import campaign

import rampup
from rampup.cli import main, make_parser
from rampup.cli.draw import gather_report
from rampup.contrib.rl import train as rl
from rampup.contrib.rl.config import RolloutConfig, load_rollout_config
from rampup.errors import (
    ConfigError,
    DataError,
    RampupError,
    ResumeMismatchError,
    ResumeWarning,
)
from rampup.loop.events import StepDone
from rampup.loop.run_folder import read_lines
from rampup.show.figures import draw_runs
from rampup.show.report import report_html
from rampup.show.series import RunMetrics


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """Run on the first of the simulated devices."""
    with snippets.one_device():
        yield


def config_of(folder, name="run", **settings):
    """Return the configuration of a tiny run."""
    return RolloutConfig(
        **TINY | {"base_output_directory": str(folder), "run_name": name} | settings
    )


# The lengths that the task needs, so that the planned bytes are the exact ones.
WHOLE = {"max_prompt_length": 4, "max_response_length": 3, "checkpoint_period": 1}


@pytest.fixture(scope="module")
def whole(one_device, tmp_path_factory):
    """An uninterrupted run: its folder and its summary."""
    folder = tmp_path_factory.mktemp("runs")
    return folder / "whole", rl.train(config_of(folder, "whole", **WHOLE))


def train_until(config, step):
    """Train until a step's metrics are written, then fail as if the process had
    died.
    """

    def stop(event):
        if isinstance(event, StepDone) and event.step == step:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        rl.train(config, stop)


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path):
    """Ended after several updates and in the middle of a rollout; the updates of each
    rollout are in order.
    """
    folder, summary = whole
    for stop in (3, 6):
        train_until(config_of(tmp_path, "cut", **WHOLE), stop)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)  # the keys say what the run is
        resumed = rl.train(config_of(tmp_path, "cut", **WHOLE))
    assert 0 < resumed.resumed_from < summary.optimizer_steps == 12
    assert_same_run(tmp_path / "cut", folder, 12)
    assert (summary.steps, summary.samples, summary.interrupted) == (3, 24, False)
    assert summary.num_compilations == {"generate": 1, "logprobs": 1, "update": 1}
    found = [(line["rollout"], line["policy_lag"]) for line in metrics_of(folder)]
    assert found == [(rollout, update) for rollout in range(3) for update in range(4)]


def train_together(process, number, port, settings):
    """Train as one of several processes with two devices together; return 0 if all is
    well.
    """
    if number > 1:
        os.environ |= {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(number),
        }
        os.environ["JAX_PROCESS_ID"] = str(process)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 // number)
    # Only process 0 is asked, and the other one would give other answers.
    rl.Arithmetic.reward = lambda task, prompts, responses: [
        float(sum(map(ord, text)) % 4 == process) for text in responses
    ]
    summary = rl.train(RolloutConfig(**settings))
    assert summary.num_compilations["update"] == summary.num_compilations["logprobs"]
    return int(summary.interrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {
            "measure_gradient_noise": True,
            "loss_agg_mode": "group-mean-token-mean",
            "microbatch_size": 2,
            "train_micro_batch_size": -1,
        },
        {
            "zero_spread_groups": "refill",
            "ici_data_parallelism": 1,
            "ici_fsdp_parallelism": 2,
        },
        campaign(
            {"token_budget": 16, "train_micro_batch_size": -1, "num_iterations": 1}
        ),
    ],
    ids=str,
)
def test_two_processes_train_what_one_would(sizes, tmp_path):
    """Also from a checkpoint: whole numbers are equal, losses and parameters to
    1e-5.
    """
    settings, port = (
        TINY | {"num_generations": 4, "ici_data_parallelism": 2},
        processes.free_port(),
    )
    settings |= {"max_prompt_length": 4, "max_response_length": 3}
    settings |= {
        "rollout_micro_batch_size": 2,
        "base_output_directory": str(tmp_path),
    } | sizes
    for name, number, batches in (("one", 1, 4), ("two", 2, 2), ("two", 2, 4)):
        jobs = [
            (n, number, port, settings | {"run_name": name, "num_batches": batches})
            for n in range(number)
        ]
        processes.run_all(train_together, jobs, tmp_path / f"logs_{name}{batches}")
    one, two = (metrics_of(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) > 4
    # The networks of the collectives add in different orders.
    close = {"rel": 1e-4, "abs": 1e-5}
    for a, b in zip(one, two, strict=True):
        assert {
            key: pytest.approx(x, **close) if isinstance(x, float) else x
            for key, x in a.items()
        } == b
    first, second = (
        state_of(tmp_path / name, one[-1]["step"] + 1) for name in ("one", "two")
    )
    assert first.keys() == second.keys()
    assert all(
        leaf == pytest.approx(second[name], **close) for name, leaf in first.items()
    )


@pytest.mark.slow
def test_metrics_show_what_the_plan_knows(whole):
    """Padding, groups without spread, lag, and bytes of experience."""
    folder, summary = whole
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert len(lines) == 12
    for line in lines:
        assert 0 <= line["padding_share"] < 1
        assert 0 <= line["zero_spread_share"] <= 1
        assert line["experience_bytes"] == line["planned_experience_bytes"]
    assert (summary.reward_first, summary.reward_last) == (
        lines[0]["reward"],
        lines[-1]["reward"],
    )
    evals = list(read_lines(folder / "eval.jsonl"))
    assert [line["step"] for line in evals] == [-1, 3, 7, 11]
    assert [line["consumed_samples"] for line in evals] == [0, 8, 16, 24]
    assert all(0 <= line["greedy_accuracy"] <= 1 for line in evals)
    accuracy = [line["accuracy"] for line in evals]
    assert (summary.accuracy_before, summary.accuracy_after) == (
        accuracy[0],
        accuracy[-1],
    )
    run = RunMetrics.from_folder(folder, name="whole")
    assert (run.quantity, run.losses[0], run.eval_losses) == (
        "reward",
        lines[0]["reward"],
        tuple(accuracy[1:]),
    )
    report = gather_report(
        make_parser("report").parse_args([str(folder), "-o", "x.html"])
    )
    assert replace(report.run, curves={}) == run
    page = report_html(report)
    assert "last reward" in page
    drawn = texts(draw_runs([report.run]))[0]
    assert {title.lower() for title in report.run.curves} <= set(drawn)
    assert {
        "Spread of rewards",
        "KL divergence",
        "Tokens of a response",
        "Prompts of an update",
    } <= report.run.curves.keys()


@pytest.mark.slow
def test_one_program_per_role(tmp_path):
    """Growing batches run through the same programs; nothing is evaluated or saved."""
    growth = {"batch_size_schedule": "0:2 1:4", "mini_batch_size": -1}
    summary = rl.train(
        config_of(tmp_path, eval_interval=-1, enable_checkpointing=False, **growth)
    )
    assert summary.num_compilations == {"generate": 1, "logprobs": 1, "update": 1}
    assert (summary.accuracy_before, summary.checkpoint) == (None, None)
    assert (
        len({line["global_batch_size"] for line in metrics_of(tmp_path / "run")}) == 2
    )


@pytest.mark.slow
def test_a_bad_reward_loses_nothing(whole, tmp_path, monkeypatch):
    """The run ends with an error that names the rollout and the sample; a checkpoint
    has all steps before it.
    """
    right, calls = rl.Arithmetic.reward, []

    def reward(task, prompts, responses):
        calls.append(prompts)
        return (
            right(task, prompts, responses)
            if len(calls) < 2
            else [0.0, 0.0, 0.0, float("nan"), *[0.0] * len(prompts[4:])]
        )

    config = config_of(
        tmp_path, **WHOLE | {"eval_interval": -1, "checkpoint_period": 100}
    )
    with monkeypatch.context() as patch:
        patch.setattr(rl.Arithmetic, "reward", reward)
        with pytest.raises(
            DataError,
            match="the reward function, in rollout 1, returned nan for sample 3",
        ):
            rl.train(config)
    assert rl.train(config).resumed_from == 4
    assert_same_run(tmp_path / "run", whole[0], 12, files=("metrics.jsonl",))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"decode_sampling_temperature": 0.0}, "decode_sampling_temperature"),
        ({"decode_sampling_top_k": 1}, "decode_sampling_top_k"),
        ({"num_generations": 1}, "rl.num_generations"),
        ({"max_prompt_length": 3}, "max_prompt_length"),
        ({"grpo_epsilon": 1.0}, "rl.grpo_epsilon"),
        ({"num_prompts": 1000}, "num_prompts"),
        ({"max_operand": 2}, "num_test_batches"),
        ({"ici_data_parallelism": -1, "ici_tensor_parallelism": 3}, "num_devices"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(settings, key, tmp_path):
    """Greedy sampling, groups of one, prompts that do not fit and the like: an error,
    and no folder.
    """
    with pytest.raises(RampupError) as caught:
        rl.train(config_of(tmp_path, **settings))
    assert (
        key
        in (
            caught.value.key,
            *(problem.key for problem in caught.value.problems or ()),
        )
        or key == "num_devices"
    )
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Other sizes of the rollouts or another model: an error that names what changed,
    and the run stays as it is.
    """
    rl.train(config_of(tmp_path, num_batches=1, eval_interval=-1))
    for change in (
        {"mini_batch_size": 4},
        {"max_operand": 8},
        {"init_weights_seed": 1},
    ):
        with pytest.raises(ResumeMismatchError, match=next(iter(change))):
            rl.train(config_of(tmp_path, eval_interval=-1, **change))
    # The folder has the configuration with which `rampup train RUN_DIR` resumes it.
    kept = load_rollout_config(tmp_path / "run" / "config.yml")
    assert (kept.max_operand, metrics_of(tmp_path / "run")[0]["rollout"]) == (9, 0)
    assert rl.train(replace(kept, num_batches=3)).steps == 3


@pytest.fixture(scope="module")
def loaded(whole):
    """The policy of the run, for longer responses than those it was trained with."""
    return replace(rl.load(whole[0]), context=64)


@pytest.mark.slow
def test_load_returns_the_policy(whole, loaded, capsys):
    """Configuration, model and parameters belong together: the model has the logits
    that generation and its command see.
    """
    assert (loaded.step, loaded.config.max_operand, loaded.model.width) == (12, 9, 8)
    assert loaded.params is loaded.state["params"]
    logits = jax.jit(loaded.model.logits)(loaded.params, np.array([list(b"3+4=")]))
    best = int(logits[0, -1].argmax())
    assert loaded.generate("3+4=", 1, temperature=0) == (
        "" if best == 10 else bytes([best]).decode(errors="replace")
    )
    assert (
        main(
            [
                "generate",
                str(whole[0]),
                "--prompt",
                "3+4=",
                "--tokens",
                "3",
                "--temperature",
                "0",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["text"]) == (
        12,
        loaded.generate("3+4=", 3, temperature=0),
    )


@pytest.mark.slow
def test_a_response_ends_with_its_end_token(loaded):
    """Without one it has all bytes that were asked for. What cannot be generated is
    refused, each by its own rule.
    """
    unended = replace(loaded, end_token=None).generate("3+4=", 40, seed=3)
    end = next(letter for letter in unended if letter.isascii())
    assert (
        replace(loaded, end_token=ord(end)).generate("3+4=", 40, seed=3)
        == unended.partition(end)[0]
    )
    assert loaded.generate("3+4=", 40, seed=3) == unended.partition("\n")[0]
    with pytest.raises(ConfigError, match="from 1 to"):
        loaded.generate("3+4=", 0)
    config = rampup.Config(dataset_type="tokens", grain_train_files="x")
    with pytest.raises(
        ConfigError, match="a tokenizer that rampup does not know made its tokens"
    ):
        replace(loaded, config=config).generate("3+4=", 5)
