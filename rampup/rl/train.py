"""`rampup train` of a rollout's configuration: a small language model learns arithmetic from a verifiable reward.

Data flow: `load_rollout_config` -> `build_rollout_schedule` -> warm start on right answers -> `RolloutStep` in a `Loop`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.config.build import mesh_axes
from rampup.config.files import run_yaml
from rampup.errors import ConfigError, raise_together
from rampup.lm.train import metric_writers
from rampup.lm.transformer import LanguageModel
from rampup.plan.numbers import AUTO, nearest_multiples
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.rl.config import RolloutConfig, build_rollout_schedule
from rampup.rl.experience import Arrays, loss_rows
from rampup.rl.generation import Sampling, pad_prompts
from rampup.rl.losses import supervised_loss
from rampup.rl.policy import critic_of, critic_params, in_replica
from rampup.rl.rollout import RolloutOptions, RolloutState, RolloutStep, ramp_plan, rollout_step
from rampup.rl.schedule import RolloutSchedule, UpdatePosition
from rampup.rl.tasks import END_TOKEN, VOCAB_SIZE, Arithmetic, decode, encode
from rampup.run.checkpoint import CheckpointOptions, find_checkpoint
from rampup.run.compile import enable_compilation_cache
from rampup.run.events import OnEvent, RunPlanned, ignore_event
from rampup.run.loop import EvalOptions, Loop
from rampup.run.mesh import make_mesh
from rampup.run.metrics import MetricOptions
from rampup.run.optimizer import LearningRate, make_optimizer, optimizer_from_config
from rampup.run.run_folder import CHECKPOINT_FOLDER, EVAL_FILE, METRICS_FILE, as_path, read_lines, run_folder, write_config
from rampup.run.run_lock import own_run
from rampup.run.state import create_state
from rampup.run.step import train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The result of a run; the first eight attributes are those of `rampup train --json`.

    Attributes:
        steps: rollouts that are trained on completely.
        samples: samples that they generated.
        accuracy_before, accuracy_after: share of right answers to held-out prompts before the first rollout and in the last
            evaluation; None without evaluation.
        reward_first, reward_last: mean reward of the first and of the newest rollout; None before the first one.
        num_compilations: programs built by this process for the rollouts, by role.
        checkpoint: folder of the newest checkpoint, or None.
        metrics: the metrics file.
        interrupted: whether a signal ended the run early.
        resumed_from: optimizer steps that earlier processes had done.
        seconds: duration of this process's part of the run, without the warm start.
    """

    steps: int
    samples: int
    accuracy_before: float | None
    accuracy_after: float | None
    reward_first: float | None
    reward_last: float | None
    num_compilations: dict[str, int]
    checkpoint: str | None
    metrics: str
    interrupted: bool
    resumed_from: int
    seconds: float


class _Update(NamedTuple):
    """What the loop gets for every optimizer step. The samples are in the state."""

    position: UpdatePosition


def train(config: RolloutConfig, on_event: OnEvent = ignore_event) -> RolloutSummary:
    """Train as configured, in the run's folder, from its newest checkpoint if there is one.

    Args:
        config: the configuration.
        on_event: called with every event of the run; see `rampup.run.events`.

    Raises:
        RampupError: before any work, if the configuration cannot be run here.
    """
    enable_compilation_cache(config.jax_cache_dir)
    run = RolloutRun.from_config(config)
    folder = as_path(config.base_output_directory) / config.run_name
    owned = own_run(folder, only_existing=True) if config.run_name else contextlib.nullcontext()
    with owned:
        return run.train(on_event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """A run, built once from its configuration.

    Attributes:
        config: the configuration.
        schedule: its optimizer steps.
        mesh: the devices.
        model: the policy's model.
        task: the prompts and their reward.
        options: how samples are generated and learned from.
        rates: the learning rate of each model.
        step: generation and updates.
    """

    config: RolloutConfig
    schedule: RolloutSchedule
    mesh: Mesh
    model: LanguageModel
    task: Arithmetic
    options: RolloutOptions
    rates: dict[str, LearningRate]
    step: RolloutStep

    @classmethod
    def from_config(cls, config: RolloutConfig) -> RolloutRun:
        """Build everything, and check everything that can be checked. Nothing is written.

        Raises:
            RampupError: the configuration cannot be run here.
        """
        schedule = build_rollout_schedule(config, jax.device_count())
        mesh = make_mesh(mesh_axes(config, jax.device_count()))
        task = _task(config)
        _check(config, task, mesh)
        model = LanguageModel.from_config(config, vocab_size=VOCAB_SIZE)
        model.shardings(mesh)  # refuses axes that do not divide the model
        options = _options(config, task)
        names = [updates.model for updates in schedule.stages[0][1].order]
        peaks = {"policy": config.learning_rate, "critic": config.critic_learning_rate}
        rates = {name: LearningRate.from_config(config, ramp_plan(schedule, name), peak=peaks[name]) for name in names}
        txs = {name: optimizer_from_config(config, rate) for name, rate in rates.items()}
        step = rollout_step(
            model,
            txs["policy"],
            schedule,
            mesh,
            reward=task.reward,
            options=options,
            critic=(critic_of(model, mesh), txs["critic"]) if "critic" in txs else None,
            skip_nonfinite=config.skip_nonfinite > 0,
        )
        return cls(config=config, schedule=schedule, mesh=mesh, model=model, task=task, options=options, rates=rates, step=step)

    def initial_state(self, *, warm: bool = True) -> RolloutState:
        """Return the state before the first rollout, with the warm start unless a checkpoint takes its place."""
        init = jax.jit(self.model.init, out_shardings=self.model.shardings(self.mesh))
        params = init(jax.random.key(self.config.init_weights_seed))
        if warm and self.config.warm_start_steps:
            params = self._warm_start(params)
        critic = critic_params(self.model, params, self.mesh) if self.config.enable_critic else None
        return self.step.create_state(params, critic_params=critic)

    def train(self, on_event: OnEvent = ignore_event) -> RolloutSummary:
        """Train in the run's folder, to the end or to Ctrl-C or SIGTERM.

        Raises:
            RampupError: see `rampup.run.loop.Loop`. An invalid reward ends the run with a checkpoint of the steps before it.
        """
        config = self.config
        folder = run_folder(config.base_output_directory, config.run_name)
        with own_run(folder):
            saved = find_checkpoint(folder / CHECKPOINT_FOLDER)
            on_event(
                RunPlanned(plan=self.schedule, folder=folder, devices=jax.devices(), num_parameters=self.model.num_parameters)
            )
            loop = self._loop(folder, on_event)
            state, start = loop.restore(self.initial_state(warm=saved is None), saved)
            state = self._placed(state)
            write_config(folder, run_yaml(config, num_devices=jax.device_count(), run_name=folder.name))
            _, summary = loop.train(state, start)
        evals = [line["accuracy"] for line in read_lines(folder / EVAL_FILE)]
        # If generation overlaps with updates, only the last line of a rollout is about all of its samples.
        rewards = list({line["rollout"]: line["reward"] for line in read_lines(folder / METRICS_FILE)}.values())
        steps = self.schedule.rollouts_before(summary.steps)
        return RolloutSummary(
            steps=steps,
            samples=sum(self.schedule.plan_of(rollout).samples_per_step for rollout in range(steps)),
            accuracy_before=evals[0] if evals else None,
            accuracy_after=evals[-1] if evals else None,
            reward_first=rewards[0] if rewards else None,
            reward_last=rewards[-1] if rewards else None,
            num_compilations=self.step.compilations,
            checkpoint=summary.checkpoint,
            metrics=summary.metrics,
            interrupted=summary.interrupted,
            resumed_from=summary.resumed_from,
            seconds=summary.seconds,
        )

    def batches(self, start: int) -> Iterator[_Update]:
        """Yield the positions of the optimizer steps from one on."""
        for step in range(start, self.schedule.total_steps):
            yield _Update(self.schedule.at(step))

    def prompts(self, rollout: int) -> list[list[int]]:
        """Return the prompts of a rollout."""
        first = self.schedule.prompts_before(rollout)
        return [encode(prompt) for prompt in self.task.prompts(first, first + self.schedule.plan_of(rollout).prompts_per_step)]

    def evaluate(self, state: RolloutState) -> dict[str, float]:
        """Return the share of right answers to the held-out prompts."""
        plan, first = self.schedule.stages[0][1], self.config.test_batch_start_index
        prompts = [encode(prompt) for prompt in self.task.held_out(first, first + self.config.eval_prompts)]
        samples = plan.eval_samples_per_prompt
        rewards = self.step.evaluate(state.params, prompts, samples_per_prompt=samples, seed=self.config.init_weights_seed)
        return {"accuracy": float(rewards.mean()), "eval_samples": rewards.size}

    def _loop(self, folder: Path, on_event: OnEvent) -> Loop:
        config, options = self.config, self.options
        evaluation = EvalOptions(evaluate=self.evaluate, eval_interval=config.eval_interval, at_start=True)
        return Loop(
            plan=self.schedule,
            step=_LoopStep(self),
            batches=self.batches,
            folder=folder,
            metrics=MetricOptions(
                learning_rate=self._rate_at,
                tokens_per_sample=options.max_prompt_length + options.max_response_length,
                writers=functools.partial(metric_writers(config), folder),  # type: ignore[arg-type]
                skip_nonfinite=config.skip_nonfinite,
                describe_rows=self._describe_rows,
            ),
            checkpoints=CheckpointOptions(
                checkpoint_period=config.checkpoint_period if config.enable_checkpointing else None,
                max_to_keep=config.max_num_checkpoints_to_keep,
                async_checkpointing=config.async_checkpointing,
                on_checkpoint_error=config.on_checkpoint_error,  # type: ignore[arg-type]
                # The sizes of its rollouts are in the fingerprint of the schedule.
                identity=config.identity() | {"reference": config.grpo_beta > 0, "overlap": self.step.overlaps},
            ),
            evaluation=None if config.eval_interval == AUTO or config.eval_prompts == 0 else evaluation,
            on_event=on_event,
        )

    def _placed(self, state: RolloutState) -> RolloutState:
        """Return a restored state with its host arrays on the host."""
        generated = None if state.generated is None else np.array(state.generated, np.int32)
        host = jax.device_get(state.experience)
        return state.replace(step=np.array(state.step, np.int32), experience=host, generated=generated)

    def _rate_at(self, step: int) -> float:
        position = self.schedule.at(step)
        return self.rates[position.model].at(position.model_step)

    def _describe_rows(self, step: int) -> list[str]:
        position = self.schedule.at(step)
        return [f"rollout {position.rollout}, update {position.update} of the {position.model}"]

    def _warm_start(self, params: Any) -> Any:
        """Return parameters after supervised steps on answers of which a share is right."""
        config, replicas = self.config, self.schedule.stages[0][1].policy.data_parallel_size
        plan = RampPlan(
            ramp=BatchRamp.constant(config.warm_start_batch_size),
            splitter=BatchSplitter(data_parallel_size=replicas),
            num_devices=replicas,
            total_steps=config.warm_start_steps,
        )
        tx = make_optimizer(
            LearningRate(plan=plan, peak=config.warm_start_learning_rate, warmup_fraction=0.1), weight_decay=0.0
        )
        step, state = train_step(supervised_loss(in_replica(self.model, self.mesh)), tx, plan, self.mesh), None
        state = create_state(params, tx, self.mesh)
        # Another order than that of the rollouts.
        task = replace(self.task, seed=self.task.seed + 2**31)
        for number in range(plan.total_steps):
            first = number * config.warm_start_batch_size
            prompts = task.prompts(first, first + config.warm_start_batch_size)
            answers = task.demonstrations(prompts, accuracy=config.warm_start_accuracy, seed=(task.seed, number))
            state, _ = step(state, step.batch(self._answered(prompts, answers)))
        return state.params

    def _answered(self, prompts: list[str], given: list[str]) -> Arrays:
        """Return prompts with answers as rows of a loss."""
        answers = [[*encode(answer), END_TOKEN] for answer in given]
        asked = [encode(prompt) for prompt in prompts]
        length = self.options.max_prompt_length + self.task.max_response_length
        tokens, _ = pad_prompts([p + a for p, a in zip(asked, answers, strict=True)], length)
        return loss_rows(
            {
                "tokens": tokens,
                "prompt_length": np.array(list(map(len, asked))),
                "response_length": np.array(list(map(len, answers))),
            }
        )


class _LoopStep:
    """The rollout step as the training loop calls it."""

    shape_changes: Mapping[int, int] = {}  # a rollout has one shape

    def __init__(self, run: RolloutRun) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.step, name)

    def __call__(self, state: Any, batch: _Update) -> tuple[Any, Any]:
        return self._run.step.update(state, batch.position, self._run.prompts)

    def replay_shape_changes(self, changes: Any) -> None:
        pass


def _task(config: RolloutConfig) -> Arithmetic:
    return Arithmetic(
        max_operand=config.max_operand,
        num_held_out=config.test_batch_start_index + config.eval_prompts,
        num_prompts=config.num_prompts,
        seed=config.data_shuffle_seed,
    )


def _options(config: RolloutConfig, task: Arithmetic) -> RolloutOptions:
    """Return the options of generation and loss. Rows are no longer than the task needs."""
    return RolloutOptions(
        max_prompt_length=min(config.max_prompt_length, task.max_prompt_length),
        max_response_length=min(config.max_response_length, task.max_response_length),
        end_token=END_TOKEN,
        sampling=Sampling(
            temperature=config.decode_sampling_temperature,
            top_k=config.decode_sampling_top_k,
            top_p=config.decode_sampling_nucleus_p,
        ),
        epsilon=config.grpo_epsilon,
        beta=config.grpo_beta,
        loss_agg_mode=config.loss_agg_mode,
        gamma=config.gamma,
        lam=config.gae_lambda,
        value_epsilon=config.value_epsilon,
        seed=config.init_weights_seed,
        shuffle_seed=config.data_shuffle_seed if config.shuffle_mini_batches else None,
        keep_prompts_together=config.keep_prompts_together,
        rungs=config.token_budget_shapes,
        decode=decode,
    )


def _check(config: RolloutConfig, task: Arithmetic, mesh: Mesh) -> None:
    """Refuse what can be planned but not trained."""
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    batch, lengths = config.warm_start_batch_size, (config.max_prompt_length, config.max_response_length)
    rules = (
        (
            config.grpo_beta == 0 or config.enable_reference_policy,
            "rl.grpo_beta",
            f"rl.grpo_beta={config.grpo_beta} needs a reference policy; set enable_reference_policy=true, or rl.grpo_beta=0",
            (0,),
        ),
        (
            lengths[0] >= task.max_prompt_length,
            "max_prompt_length",
            f"max_prompt_length={lengths[0]} must be at least {task.max_prompt_length}, the length of a prompt with "
            f"max_operand={config.max_operand}",
            (task.max_prompt_length,),
        ),
        (
            batch % replicas == 0,
            "warm_start_batch_size",
            f"warm_start_batch_size={batch} must be a multiple of the {replicas} devices that share a batch",
            nearest_multiples(batch, replicas),
        ),
        (
            config.grpo_epsilon < 1,
            "rl.grpo_epsilon",
            f"rl.grpo_epsilon={config.grpo_epsilon} must be below 1, so that a clipped ratio is positive",
            (0.2,),
        ),
    )
    raise_together([ConfigError(message, key=key, nearest=nearest) for holds, key, message, nearest in rules if not holds])
