"""Tests of rampup.rl.train: runs of `rampup train` of a rollout's configuration, at their smallest."""

from dataclasses import replace

import jax
import pytest
from helpers.runs import assert_same_run, metrics_of
from helpers.tiny import RL_TINY as TINY

from rampup.cli import make_parser
from rampup.cli.report import gather_report
from rampup.errors import DataError, RampupError, ResumeMismatchError
from rampup.loop.events import StepDone
from rampup.loop.run_folder import read_lines
from rampup.rl import train as rl
from rampup.rl.config import RolloutConfig, is_rollout_file, load_rollout_config
from rampup.show.report import report_html
from rampup.show.series import RunMetrics


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """Run on the first of the simulated devices."""
    devices = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(jax, "devices", lambda *args: devices)
        yield


def config_of(folder, name="run", **settings):
    """Return the configuration of a tiny run."""
    return RolloutConfig(**TINY | {"base_output_directory": str(folder), "run_name": name} | settings)


# The lengths that the task needs, so that the planned bytes are the exact ones.
WHOLE = {"max_prompt_length": 4, "max_response_length": 3, "checkpoint_period": 1}


@pytest.fixture(scope="module")
def whole(one_device, tmp_path_factory):
    """An uninterrupted run: its folder and its summary."""
    folder = tmp_path_factory.mktemp("runs")
    return folder / "whole", rl.train(config_of(folder, "whole", **WHOLE))


class StoppedError(Exception):
    """Ends a run from inside."""


def train_until(config, step):
    """Train until a step's metrics are written, then fail as if the process had died."""

    def stop(event):
        if isinstance(event, StepDone) and event.step == step:
            raise StoppedError

    with pytest.raises(StoppedError):
        rl.train(config, stop)


def assert_resumes(folder, whole, summary, stops, **settings):
    """Assert that a run which died at some steps is the uninterrupted one, and has the updates of each rollout in order."""
    steps, critic = summary.optimizer_steps, settings.get("enable_critic", False)
    for stop in stops:
        train_until(config_of(folder, "cut", **settings), stop)
    resumed = rl.train(config_of(folder, "cut", **settings))
    assert 0 < resumed.resumed_from < steps == 3 * (6 if critic else 4)
    assert_same_run(folder / "cut", whole, steps)
    assert (summary.steps, summary.samples, summary.interrupted) == (3, 24, False)
    assert summary.num_compilations == {"generate": 1, "logprobs": 1 + critic, "update": 1 + critic}
    lines, updates = (
        metrics_of(whole),
        [*([("critic", 0), ("critic", 1)] if critic else []), *(("policy", n) for n in range(4))],
    )
    found = [(line["rollout"], line["model"], line["policy_lag"]) for line in lines]
    assert found == [(rollout, *update) for rollout in range(3) for update in updates]


def test_a_resumed_run_is_the_uninterrupted_one(whole, tmp_path):
    """Ended after several updates and in the middle of a rollout."""
    assert_resumes(tmp_path, *whole, (3, 6), **WHOLE)


@pytest.mark.slow
def test_a_resumed_run_with_a_critic_is_the_uninterrupted_one(tmp_path):
    """Also between the updates of critic and policy."""
    settings = {"enable_critic": True, "critic_num_iterations": 1, "checkpoint_period": 2}
    summary = rl.train(config_of(tmp_path, "whole", **settings))
    assert_resumes(tmp_path, tmp_path / "whole", summary, (2, 10), **settings)


class KilledError(BaseException):
    """Ends a run where an exception of the reward function would be its fault."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "kills"),
    [({"zero_spread_groups": "refill"}, (2, 4, 3)), ({"zero_spread_groups": "drop", "partial_step": "carry"}, (2, 2))],
)
def test_a_run_of_varying_steps_resumes_also_while_it_samples(sizes, kills, tmp_path, monkeypatch):
    """Ended in the middle of a rollout, and in the middle of its generation: sizes, samples and state are the same."""
    # Responses of a new model are any bytes.
    reward = lambda task, prompts, responses: [float(sum(map(ord, text)) % 4 == 0) for text in responses]  # noqa: E731
    settings = {"checkpoint_period": 1, "num_generations": 4, "num_batches": 4, "eval_interval": -1} | sizes
    monkeypatch.setattr(rl.Arithmetic, "reward", reward)
    whole = rl.train(config_of(tmp_path, "whole", **settings))
    for kill_at in kills:
        calls = []

        def stop(task, prompts, responses, calls=calls, kill_at=kill_at):
            calls.append(prompts)
            if len(calls) == kill_at:
                raise KilledError
            return reward(task, prompts, responses)

        with monkeypatch.context() as patch:
            patch.setattr(rl.Arithmetic, "reward", stop)
            with pytest.raises(KilledError):
                rl.train(config_of(tmp_path, "cut", **settings))
    train_until(config_of(tmp_path, "cut", **settings), 9)
    resumed = rl.train(config_of(tmp_path, "cut", **settings))
    assert (resumed.steps, resumed.samples) == (whole.steps, whole.samples)
    assert_same_run(tmp_path / "cut", tmp_path / "whole", whole.optimizer_steps, files=("metrics.jsonl",))
    lines = metrics_of(tmp_path / "whole")
    assert len({line["num_samples"] for line in lines}) > 1 or sizes["zero_spread_groups"] == "refill"
    assert lines[-1]["consumed_samples"] == whole.samples == 4 * lines[-1]["consumed_prompts"]
    assert sum(line["dropped_groups"] for line in lines) > 0
    assert whole.num_compilations == {"generate": 1, "logprobs": 1, "update": 1}


def test_metrics_show_what_the_plan_knows(whole):
    """Padding, groups without spread, lag, bytes of experience, and tokens per second of generation and training apart."""
    folder, summary = whole
    lines = list(read_lines(folder / "metrics.jsonl"))
    assert len(lines) == 12
    for line in lines:
        assert 0 <= line["padding_share"] < 1
        assert 0 <= line["zero_spread_share"] <= 1
        assert line["experience_bytes"] == line["planned_experience_bytes"]
        assert line["generation_tokens_per_second"] > 0
        assert line["scoring_seconds"] > 0
        assert ("training_tokens_per_second" in line) == ("update_seconds" in line) == (line["policy_lag"] == 3)
    parts = {"generation": "generation_seconds", "scoring": "scoring_seconds", "update": "update_seconds"}
    for name, key in parts.items():
        assert summary.seconds_by_part[name] == pytest.approx(sum(line[key] for line in lines[3::4]), abs=2e-3)
    assert summary.reward_first == lines[0]["reward"]
    assert summary.reward_last == lines[-1]["reward"]
    evals = list(read_lines(folder / "eval.jsonl"))
    assert [line["step"] for line in evals] == [-1, 3, 7, 11]
    assert [line["consumed_samples"] for line in evals] == [0, 8, 16, 24]
    assert all(0 <= line["greedy_accuracy"] <= 1 for line in evals)
    accuracy = [line["accuracy"] for line in evals]
    assert (summary.accuracy_before, summary.accuracy_after) == (accuracy[0], accuracy[-1])
    run = RunMetrics.from_folder(folder, name="whole")
    assert (run.quantity, run.losses[0], run.eval_losses) == ("reward", lines[0]["reward"], tuple(accuracy[1:]))
    report = gather_report(make_parser("report").parse_args([str(folder), "-o", "x.html"]))
    assert report.run == run
    page = report_html(report)
    assert all(title in page for title in ("last reward", *run.curves))
    assert {"Spread of rewards", "KL divergence", "Tokens of a response", "Prompts of an update"} <= run.curves.keys()


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
def test_a_bad_reward_loses_nothing(found, text, whole, tmp_path, monkeypatch):
    """The run ends with an error that names the rollout and the sample; a checkpoint has all steps before it."""
    right, calls = rl.Arithmetic.reward, []

    def reward(task, prompts, responses):
        calls.append(prompts)
        if len(calls) < 2:
            return right(task, prompts, responses)
        if isinstance(found, Exception):
            raise found
        return [found if number == 3 else 0.0 for number in range(len(prompts))]

    config = config_of(tmp_path, **WHOLE | {"eval_interval": -1, "checkpoint_period": 100})
    with monkeypatch.context() as patch:
        patch.setattr(rl.Arithmetic, "reward", reward)
        with pytest.raises(DataError, match=f"the reward function, in rollout 1, {text}"):
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
        ({"enable_reference_policy": False}, "rl.grpo_beta"),
        ({"grpo_epsilon": 1.0}, "rl.grpo_epsilon"),
        ({"partial_step": "carry", "num_generations_schedule": "0:1 1:2", "enable_critic": True}, "partial_step"),
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


@pytest.mark.slow
def test_with_a_budget_of_tokens_the_rows_of_a_call_belong_to_the_run(tmp_path):
    """How many prompts one call takes decides which ones are read, so another number is refused at a resume."""
    settings = {"token_batch_size": 4096, "mini_batch_size": -1, "eval_interval": -1}
    rl.train(config_of(tmp_path, num_batches=1, rollout_micro_batch_size=2, **settings))
    with pytest.raises(ResumeMismatchError, match="rollout_micro_batch_size"):
        rl.train(config_of(tmp_path, num_batches=2, rollout_micro_batch_size=4, **settings))


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
