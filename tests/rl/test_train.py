"""Tests of rampup.rl.train: runs of `rampup train` of a rollout's configuration, at their smallest."""

from dataclasses import replace

import jax
import pytest
from helpers.runs import assert_same_run, metrics_of

from rampup.cli.report import gather_report
from rampup.errors import DataError, RampupError, ResumeMismatchError
from rampup.rl import train as rl
from rampup.rl.config import RolloutConfig, is_rollout_file, load_rollout_config
from rampup.run.events import StepDone
from rampup.run.run_folder import read_lines
from rampup.show.report import report_html
from rampup.show.series import RunMetrics

TINY = {
    "batch_size": 4,
    "num_generations": 2,
    "num_iterations": 2,
    "num_batches": 3,
    "mini_batch_size": 2,
    "train_micro_batch_size": 1,
    "num_test_batches": 2,
    "max_operand": 9,
    "warm_start_steps": 3,
    "warm_start_batch_size": 8,
    "base_emb_dim": 8,
    "base_num_decoder_layers": 1,
    "base_mlp_dim": 8,
    "base_num_query_heads": 2,
    "checkpoint_period": 4,
    "max_num_checkpoints_to_keep": None,
    "async_checkpointing": False,
    "eval_interval": 4,
    "jax_cache_dir": None,
    "ici_data_parallelism": 1,
    "ici_fsdp_parallelism": 1,
}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Run on the first of the simulated devices."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(jax, "devices", lambda *args: devices)


def config_of(folder, name="run", **settings):
    """Return the configuration of a tiny run."""
    return RolloutConfig(**TINY | {"base_output_directory": str(folder), "run_name": name} | settings)


class StoppedError(Exception):
    """Ends a run from inside."""


def train_until(config, step):
    """Train until a step's metrics are written, then fail as if the process had died."""

    def stop(event):
        if isinstance(event, StepDone) and event.step == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        rl.train(config, stop)


@pytest.mark.parametrize(
    ("critic", "shuffle"),
    [
        pytest.param(False, True, id="grpo"),
        pytest.param(True, True, id="ppo", marks=pytest.mark.slow),
        pytest.param(False, False, id="overlap", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(critic, shuffle, tmp_path):
    """Ended after several updates, in the middle of a rollout or of its generation, and between critic and policy."""
    settings = {
        "enable_critic": critic,
        "critic_num_iterations": 1,
        "shuffle_mini_batches": shuffle,
        "checkpoint_period": 2 if critic else 1,
    }
    whole = rl.train(config_of(tmp_path, "whole", **settings))
    steps = 3 * (6 if critic else 4)
    assert (whole.steps, whole.samples, whole.interrupted) == (3, 24, False)
    assert whole.num_compilations == {"generate": 1, "logprobs": 2 if critic else 1, "update": 2 if critic else 1}
    for stop in (2, 10) if critic else (3, 6) if shuffle else (1, 5):
        train_until(config_of(tmp_path, "cut", **settings), stop)
    resumed = rl.train(config_of(tmp_path, "cut", **settings))
    assert 0 < resumed.resumed_from < steps
    assert_same_run(tmp_path / "cut", tmp_path / "whole", steps)
    lines = metrics_of(tmp_path / "whole")
    order = ["critic"] * 2 + ["policy"] * 4 if critic else ["policy"] * 4
    assert [line["model"] for line in lines] == order * 3
    assert [line["policy_lag"] for line in lines] == [*([0, 1] if critic else []), 0, 1, 2, 3] * 3
    assert [line["rollout"] for line in lines] == [rollout for rollout in range(3) for _ in order]


def test_metrics_show_what_the_plan_knows(tmp_path):
    """Padding, groups without spread, lag, bytes of experience, and tokens per second of generation and training apart."""
    summary = rl.train(config_of(tmp_path, max_prompt_length=4, max_response_length=3, eval_interval=100))
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert len(lines) == 12
    for line in lines:
        assert 0 <= line["padding_share"] < 1
        assert 0 <= line["zero_spread_share"] <= 1
        # The plan counts arrays of these lengths, so that its figure is the exact number of bytes.
        assert line["experience_bytes"] == line["planned_experience_bytes"]
        assert line["generation_tokens_per_second"] > 0
        assert ("training_tokens_per_second" in line) == (line["policy_lag"] == 3)
    assert summary.reward_first == lines[0]["reward"]
    assert summary.reward_last == lines[-1]["reward"]
    evals = list(read_lines(tmp_path / "run" / "eval.jsonl"))
    assert [line["step"] for line in evals] == [-1, 11]
    assert (summary.accuracy_before, summary.accuracy_after) == (evals[0]["accuracy"], evals[1]["accuracy"])
    run = RunMetrics.from_folder(tmp_path / "run", name="run")
    assert (run.quantity, run.losses[0], run.eval_losses) == ("reward", lines[0]["reward"], (evals[1]["accuracy"],))
    report = gather_report([str(tmp_path / "run")], environ={}, count_devices=lambda config: config.num_devices)
    assert report.run == run
    assert "last reward" in report_html(report)


GROWTH = {"batch_size_schedule": "0:2 1:4", "num_generations_schedule": "0:2 2:4", "num_generations": 4}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(GROWTH, id="growth"),
        pytest.param(
            {"microbatch_size": -1, "train_micro_batch_size": -1, "token_budget": 1536},
            id="token_budget",
            marks=pytest.mark.slow,
        ),
        pytest.param({"num_iterations": 3, "enable_critic": True}, id="epochs", marks=pytest.mark.slow),
    ],
)
def test_one_program_per_role(settings, tmp_path):
    """Growing batches, dynamic token budgets and more epochs run through the same programs."""
    summary = rl.train(config_of(tmp_path, eval_interval=-1, enable_checkpointing=False, **settings))
    models = 2 if "enable_critic" in settings else 1
    assert summary.num_compilations == {"generate": 1, "logprobs": models, "update": models}
    assert (summary.accuracy_before, summary.checkpoint) == (None, None)
    sizes = [line["global_batch_size"] for line in metrics_of(tmp_path / "run")]
    assert len(set(sizes)) == (2 if settings is GROWTH else 1)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (float("nan"), "returned nan for sample 3"),
        pytest.param(None, "returned None for sample 3", marks=pytest.mark.slow),
        pytest.param(ValueError("no"), "raised ValueError: no", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bad_reward_loses_nothing(found, text, tmp_path, monkeypatch):
    """The run ends with an error that names the rollout and the sample; a checkpoint has all steps before it."""
    right, calls = rl.Arithmetic.reward, []

    def reward(task, prompts, responses):
        calls.append(prompts)
        if len(calls) < 2:
            return right(task, prompts, responses)
        if isinstance(found, Exception):
            raise found
        return [found if number == 3 else 0.0 for number in range(len(prompts))]

    config = config_of(tmp_path, eval_interval=-1, checkpoint_period=100)
    with monkeypatch.context() as patch:
        patch.setattr(rl.Arithmetic, "reward", reward)
        with pytest.raises(DataError, match=f"the reward function, in rollout 1, {text}"):
            rl.train(config)
    assert rl.train(config).resumed_from == 4
    rl.train(config_of(tmp_path, "whole", eval_interval=-1, checkpoint_period=100))
    assert_same_run(tmp_path / "run", tmp_path / "whole", 12)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"decode_sampling_temperature": 0.0}, "decode_sampling_temperature"),
        ({"decode_sampling_top_k": 1}, "decode_sampling_top_k"),
        ({"num_generations": 1}, "rl.num_generations"),
        ({"max_prompt_length": 3}, "max_prompt_length"),
        ({"enable_reference_policy": False}, "rl.grpo_beta"),
        ({"grpo_epsilon": 1.0}, "rl.grpo_epsilon"),
        ({"num_prompts": 1000}, "num_prompts"),
        ({"max_operand": 2}, "num_test_batches"),
        ({"ici_data_parallelism": -1, "ici_tensor_parallelism": 3}, "num_devices"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_any_work(settings, key, tmp_path):
    """Greedy sampling, groups of one, prompts that do not fit and the like: an error, and no folder."""
    with pytest.raises(RampupError) as caught:
        rl.train(config_of(tmp_path, **settings))
    assert key in (caught.value.key, *(problem.key for problem in caught.value.problems or ())) or key == "num_devices"
    assert not (tmp_path / "run").exists()


def test_a_name_of_other_systems_makes_no_rollout(tmp_path):
    """`batch_size` is a key of rollouts, but also what people call the batch of a language model."""
    (tmp_path / "my.yml").write_text("batch_size: 8\n")
    assert not is_rollout_file(tmp_path / "my.yml")
    (tmp_path / "my.yml").write_text("batch_size: 8\nmini_batch_size: 4\n")
    assert is_rollout_file(tmp_path / "my.yml")


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Other sizes of the rollouts or another model: an error that names what changed, and the run stays as it is."""
    rl.train(config_of(tmp_path, num_batches=1, eval_interval=-1))
    for change in ({"mini_batch_size": 4}, {"max_operand": 8}, {"init_weights_seed": 1}):
        with pytest.raises(ResumeMismatchError):
            rl.train(config_of(tmp_path, eval_interval=-1, **change))
    # The folder has the configuration with which `rampup train RUN_DIR` resumes it.
    assert is_rollout_file(tmp_path / "run" / "config.yml")
    kept = load_rollout_config(tmp_path / "run" / "config.yml")
    assert (kept.max_operand, metrics_of(tmp_path / "run")[0]["rollout"]) == (9, 0)
    assert rl.train(replace(kept, num_batches=3)).steps == 3
