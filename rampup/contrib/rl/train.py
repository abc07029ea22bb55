"""`rampup train` of a rollout's configuration: a small language model learns arithmetic
from a verifiable reward.

Data flow: `load_rollout_config` -> `build_rollout_schedule` -> warm start on right
answers -> `RolloutStep` in a `Loop`. `load` returns the trained model of any run, also
on text.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from rampup.config.draft import mesh_axes
from rampup.contrib.rl.config import (
    RolloutConfig,
    build_rollout_schedule,
    load_rollout_config,
    rollout_notes,
)
from rampup.contrib.rl.experience import Tally, loss_rows
from rampup.contrib.rl.generation import Sampling, pad_prompts
from rampup.contrib.rl.noise import PromptNoiseAverages
from rampup.contrib.rl.policy import in_replica, supervised_loss
from rampup.contrib.rl.rollout import RolloutOptions, RolloutState, RolloutStep
from rampup.contrib.rl.schedule import UpdatePosition
from rampup.contrib.rl.tasks import END_TOKEN, VOCAB_SIZE, Arithmetic, decode, encode
from rampup.engine.mesh import make_mesh, process_rows
from rampup.engine.optimizer import LearningRate, make_optimizer, optimizer_from_config
from rampup.engine.processes import is_primary, wait_for_all
from rampup.engine.state import create_state
from rampup.engine.step import train_step
from rampup.errors import ConfigError, raise_together
from rampup.lm.load import ROLLOUT_RECORD, LoadedRun, check_identity, named_checkpoint
from rampup.lm.load import load as load_trained
from rampup.lm.start import keep_config, run_in_folder
from rampup.lm.train import loop_of, metric_writers
from rampup.lm.transformer import LanguageModel, matrices
from rampup.loop.checkpoint import (
    CheckpointOptions,
    SavedCheckpoint,
    read_record,
    restore_tree,
)
from rampup.loop.components import Component, LoopStep
from rampup.loop.distributed import check_consistent, join
from rampup.loop.events import OnEvent, RunPlanned, ignore_event
from rampup.loop.loop import EvalOptions, Loop
from rampup.loop.metrics import MetricOptions
from rampup.loop.run_folder import (
    CONFIG_FILE,
    EVAL_FILE,
    METRICS_FILE,
    first_and_last_line,
)
from rampup.loop.same_run import SameRun
from rampup.plan.noise_scale import HALF_LIFE_BATCHES, HALF_LIFE_SHARE
from rampup.plan.numbers import AUTO, nearest_multiples
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The result of a run."""

    steps: int  # rollouts that are trained on completely
    samples: int  # samples that they generated
    # Share of right answers to held-out prompts before the first rollout and in the
    # last evaluation; None without evaluation.
    accuracy_before: float | None
    accuracy_after: float | None
    # Mean reward of the first and of the newest rollout; None before the first one.
    reward_first: float | None
    reward_last: float | None
    num_compilations: dict[
        str, int
    ]  # programs built by this process for the rollouts, by role
    checkpoint: str | None  # folder of the newest checkpoint
    metrics: str  # the metrics file
    interrupted: bool  # whether a signal ended the run early
    resumed_from: int  # optimizer steps that earlier processes had done
    seconds: float  # duration of this process's part of the run, with its start
    optimizer_steps: int  # optimizer steps done, which the lines of the run count


class _Update(NamedTuple):
    """What the loop gets for every optimizer step. The samples are in the state."""

    position: UpdatePosition


def train(config: RolloutConfig, on_event: OnEvent = ignore_event) -> RolloutSummary:
    """Train as configured, in the run's folder, from its newest checkpoint if there is
    one.

    Several processes that are started alike train together, as the environment says;
    see `rampup.loop.distributed.join`.
    """
    join(distributed=config.distributed)
    return run_in_folder(
        config,
        functools.partial(RolloutRun, config),
        lambda run, folder: run.train_in(folder, on_event),
    )


class RolloutRun:
    """A run, built once from its configuration. All that can be checked is checked, and
    nothing is written before it trains.
    """

    def __init__(
        self, config: RolloutConfig, saved: SavedCheckpoint | None = None
    ) -> None:
        check_consistent(config.to_dict())
        metric_writers(config)  # whose packages must be installed
        self.config = config
        self.saved = saved
        num_devices = jax.device_count()
        self.schedule = schedule = build_rollout_schedule(
            config, num_devices
        )  # its optimizer steps
        self.mesh = mesh = make_mesh(mesh_axes(config, num_devices))
        # The prompts and their reward.
        self.task = task = Arithmetic(
            max_operand=config.max_operand,
            num_held_out=config.test_batch_start_index + config.eval_prompts,
            num_prompts=config.num_prompts,
            seed=config.data_shuffle_seed or 0,
        )
        _check(config, task, mesh)
        self.model = model = LanguageModel.from_config(
            config, vocab_size=VOCAB_SIZE
        )  # of the policy
        model.shardings(mesh)  # refuses axes that do not divide the model
        options = RolloutOptions(
            # Rows are no longer than the task needs.
            max_prompt_length=min(config.max_prompt_length, task.max_prompt_length),
            max_response_length=min(
                config.max_response_length, task.max_response_length
            ),
            end_token=END_TOKEN,
            sampling=Sampling(
                temperature=config.decode_sampling_temperature,
                top_k=config.decode_sampling_top_k,
                top_p=config.decode_sampling_nucleus_p,
            ),
            epsilon=config.grpo_epsilon,
            beta=config.grpo_beta,
            zero_spread_groups=config.zero_spread_groups,
            max_num_gen_batches=config.max_num_gen_batches,
            measure_gradient_noise=config.measure_gradient_noise,
            loss_agg_mode=config.loss_agg_mode,
            seed=config.init_weights_seed,
            shuffle_seed=config.data_shuffle_seed,
            decode=decode,
        )
        self.rate = LearningRate.from_config(config, schedule.ramp_plan())
        self.step = _Step(
            model,
            optimizer_from_config(config, self.rate, matrices=matrices),
            schedule,
            mesh,
            reward=task.reward,
            options=options,
            skip_nonfinite=config.skip_nonfinite > 0,
        )
        self.step.task = task

    def initial_state(self) -> RolloutState:
        """Return the state before the first rollout, with the warm start unless a
        checkpoint takes its place.
        """
        init = jax.jit(self.model.init, out_shardings=self.model.shardings(self.mesh))
        wait_for_all(self.mesh)
        params = init(jax.random.key(self.config.init_weights_seed))
        if self.saved is None and self.config.warm_start_steps:
            params = self._warm_start(params)
        return self.step.create_state(params)

    def train_in(self, folder: Path, on_event: OnEvent) -> RolloutSummary:
        """Train in a folder that this process owns, to the end, to SIGTERM or to an
        invalid reward.
        """
        began = time.perf_counter()
        on_event = on_event if is_primary() else ignore_event
        on_event(
            RunPlanned(
                plan=self.schedule,
                folder=folder,
                devices=jax.devices(),
                num_parameters=self.model.num_parameters,
                notes=rollout_notes(self.config, self.schedule.stages[-1][1]),
            )
        )
        loop = self._loop(folder, on_event)
        state, start = loop.restore(self.initial_state(), self.saved)
        # A checkpoint restores every array to the devices; those of the host belong
        # there.
        host = jax.device_get({"experience": state.experience, "tally": state.tally})
        state = state.replace(**host)
        if start < self.schedule.total_steps:
            keep_config(self.config, folder, start, on_event)
        _, summary = loop.train(state, start)
        first, last = first_and_last_line(folder / METRICS_FILE)
        first_eval, last_eval = first_and_last_line(folder / EVAL_FILE)
        is_done = summary.steps >= self.schedule.total_steps
        return RolloutSummary(
            steps=(
                self.schedule.num_rollouts
                if is_done
                else self.schedule.at(summary.steps).rollout
            ),
            samples=last.get("consumed_samples", 0),
            accuracy_before=first_eval.get("accuracy"),
            accuracy_after=last_eval.get("accuracy"),
            reward_first=first.get("reward"),
            reward_last=last.get("reward"),
            num_compilations=self.step.compilations,
            checkpoint=summary.checkpoint,
            metrics=summary.metrics,
            interrupted=summary.interrupted,
            resumed_from=summary.resumed_from,
            seconds=round(time.perf_counter() - began, 3),
            optimizer_steps=summary.steps,
        )

    def evaluate(self, state: RolloutState) -> dict[str, float]:
        """Return the share of right answers to the held-out prompts, sampled as in
        training, and of the greedy answers.
        """
        first = self.config.test_batch_start_index
        prompts = [
            encode(prompt)
            for prompt in self.task.held_out(first, first + self.config.eval_prompts)
        ]
        samples = self.config.eval_num_generations
        rewards = self.step.evaluate(
            state.params,
            prompts,
            samples_per_prompt=samples,
            seed=self.config.init_weights_seed,
        )
        greedy = self.step.evaluate(
            state.params, prompts, sampling=Sampling(temperature=0.0)
        )
        return {
            "consumed_samples": Tally.from_words(state.tally).samples,
            "accuracy": float(rewards.mean()),
            "greedy_accuracy": float(greedy.mean()),
            "eval_samples": rewards.size,
        }

    def _loop(self, folder: Path, on_event: OnEvent) -> Loop:
        """Return the training loop."""
        config = self.config
        schedule = self.schedule
        # None: the keys of the identity say what the run computes.
        components: list[Component] = [SameRun(None)]
        if config.measure_gradient_noise:
            # As `rampup.plan.noise_scale.default_half_life`: a share of the run, but
            # this many of its largest steps.
            half_life = max(
                schedule.consumed_samples * HALF_LIFE_SHARE,
                schedule.max_samples * HALF_LIFE_BATCHES,
            )
            components.append(PromptNoiseAverages(half_life, config.num_generations))
        evaluates = config.eval_interval != AUTO and config.eval_prompts > 0
        run = Loop(
            plan=schedule,
            step=self.step,
            batches=lambda start: (
                _Update(schedule.at(step))
                for step in range(start, schedule.total_steps)
            ),
            folder=folder,
            metrics=MetricOptions(
                learning_rate=self.rate.at,
                tokens_per_sample=self.step.options.experience.max_length,
                on_event=on_event,
            ),
            checkpoints=CheckpointOptions(
                # The sizes of its rollouts are in the fingerprint of the schedule.
                identity=config.identity() | {"reference": config.grpo_beta > 0},
            ),
            components=tuple(components),
            evaluation=(
                EvalOptions(
                    evaluate=self.evaluate,
                    eval_interval=config.eval_interval,
                    at_start=True,
                )
                if evaluates
                else None
            ),
        )
        return loop_of(config, run)

    def _warm_start(self, params: Any) -> Any:
        """Return parameters after supervised steps on answers, a share of them
        right.
        """
        config = self.config
        batch = config.warm_start_batch_size
        replicas = self.schedule.stages[0][1].policy.data_parallel_size
        plan = RampPlan(
            ramp=BatchRamp.constant(batch),
            splitter=BatchSplitter(data_parallel_size=replicas),
            num_devices=replicas,
            total_steps=config.warm_start_steps,
        )
        rate = LearningRate(
            plan=plan, peak=config.warm_start_learning_rate, warmup_fraction=0.1
        )
        tx = make_optimizer(rate, weight_decay=0.0)
        loss_fn = supervised_loss(in_replica(self.model, self.mesh))
        step = train_step(loss_fn, tx, plan, self.mesh, check_loss=False)
        state = create_state(params, tx, self.mesh)
        for number in range(plan.total_steps):
            rows = loss_rows(self._answers(number))
            own = {name: x[process_rows(self.mesh, batch)] for name, x in rows.items()}
            state, _ = step(state, step.batch(own))
        return state.params

    def _answers(self, number: int) -> dict[str, Any]:
        """Return the prompts of a step of the warm start with answers, as samples."""
        config = self.config
        # Another order than that of the rollouts.
        task = replace(self.task, seed=self.task.seed + 2**31)
        first = number * config.warm_start_batch_size
        prompts = task.prompts(first, first + config.warm_start_batch_size)
        given = task.demonstrations(
            prompts, accuracy=config.warm_start_accuracy, seed=(task.seed, number)
        )
        asked = list(map(encode, prompts))
        answers = [[*encode(answer), END_TOKEN] for answer in given]
        tokens, _ = pad_prompts(
            [p + a for p, a in zip(asked, answers, strict=True)],
            self.step.options.max_prompt_length + task.max_response_length,
        )
        return {
            "tokens": tokens,
            "prompt_length": list(map(len, asked)),
            "response_length": list(map(len, answers)),
        }


class _Step(RolloutStep, LoopStep):
    """The rollout step as the training loop calls it, on the prompts of a task. It has
    one shape.
    """

    task: Arithmetic

    def __call__(self, state: Any, batch: _Update) -> tuple[Any, Any]:  # type: ignore[override]
        """Run the optimizer step of a position."""
        return self.update(
            state,
            batch.position,
            lambda start, stop: list(map(encode, self.task.prompts(start, stop))),
        )


def _check(config: RolloutConfig, task: Arithmetic, mesh: Mesh) -> None:
    """Refuse what can be planned but not trained."""
    batch, longest = config.warm_start_batch_size, task.max_prompt_length
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    problems = []
    if config.max_prompt_length < longest:
        problems.append(
            ConfigError(
                f"max_prompt_length={config.max_prompt_length} must be at least"
                f" {longest}, the length of a prompt with"
                f" max_operand={config.max_operand}",
                key="max_prompt_length",
                nearest=(longest,),
            )
        )
    if batch % replicas:
        problems.append(
            ConfigError(
                f"warm_start_batch_size={batch} must be a multiple of the {replicas}"
                " devices that share a batch",
                key="warm_start_batch_size",
                nearest=nearest_multiples(batch, replicas),
            )
        )
    if config.grpo_epsilon >= 1:
        problems.append(
            ConfigError(
                f"rl.grpo_epsilon={config.grpo_epsilon} must be below 1, so that a"
                " clipped ratio is positive",
                key="rl.grpo_epsilon",
                nearest=(0.2,),
            )
        )
    raise_together(problems)


def load(path: str | Path) -> LoadedRun:
    """Return the policy, its parameters and the training state of a run, on the first
    device.

    Args:
        path: the folder of a run, for its newest intact checkpoint; or a checkpoint,
            such as `runs/rl/checkpoints/100`. Other runs load as with `rampup.load`.

    Raises:
        ConfigError: there is no checkpoint.
        ResumeMismatchError: the checkpoint is damaged, or the configuration in the
            folder is of another model.
    """
    run, folder = named_checkpoint(path)
    record = read_record(folder)
    if not record.keys() >= ROLLOUT_RECORD or not (run / CONFIG_FILE).is_file():
        return load_trained(path)
    config = load_rollout_config(run / CONFIG_FILE)
    check_identity(config, record, run, folder)
    state = restore_tree(folder)
    return LoadedRun(
        folder=folder,
        step=int(folder.name),
        params=state["params"],
        state=state,
        config=config,
        model=LanguageModel.from_config(config, vocab_size=VOCAB_SIZE),
        context=config.max_prompt_length + config.max_response_length,
        end_token=END_TOKEN,
    )
