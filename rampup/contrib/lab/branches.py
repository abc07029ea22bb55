"""Train branches of a run from one of its checkpoints, to find its critical batch size:
`rampup critical`.

The branches are the phases of one plan, one after the other, and each phase reads the
same samples: step, data and compilation are those of any ramp. The run's folder is only
read; a decisive result is kept in a folder next to it. `rampup.contrib.lab.critical` judges the
branches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from rampup.config.load import load_config
from rampup.config.resume import plan_to_resume
from rampup.config.schema import Config
from rampup.contrib.lab.critical import (
    CRITICAL_RESULT,
    CRITICAL_SUFFIX,
    Bound,
    BranchResult,
    BranchWindow,
    Evaluation,
    Verdict,
    critical_bound,
    implied_noise_scale,
    judge,
    samples_for_gain,
    smoothed_loss,
)
from rampup.contrib.lab.design_model import format_schedule
from rampup.contrib.lab.measurements import losses_of
from rampup.data.batches import BatchLoader, SampleOrder
from rampup.data.files import fingerprints, open_sources
from rampup.data.sources import files_of
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.mesh import make_mesh
from rampup.engine.optimizer import LearningRate
from rampup.errors import ConfigError, ResumeMismatchError
from rampup.lm.load import named_checkpoint
from rampup.lm.train import (
    RAMP_RECORD,
    TrainSetup,
    learning_rate,
    optimizer,
    ramp_before,
    sample_order,
    unconstrained,
)
from rampup.loop.checkpoint import checkpoint_steps, read_record, read_state
from rampup.loop.run_folder import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    absolute_path,
    read_lines,
    write_whole,
)
from rampup.plan.describe import format_count
from rampup.plan.learning_rate import RateRule, learning_rate_scale
from rampup.plan.nearest import batch_error
from rampup.plan.noise_scale import NoiseEstimate, measured_noise
from rampup.plan.numbers import nearest_in
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp

REPORTS_PER_BRANCH = 4  # lines of progress
# Quarters of the run's batch that the branches have by default, as far as these are
# legal.
QUARTERS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalBatch:
    """The critical batch size of a run at a checkpoint.

    Attributes:
        branches: the branches, smallest batch first.
        decisive: whether the window could tell a batch that needs 20% more tokens from
            one that needs none: the gain is above three of its standard errors, and the
            tolerance at least two standard errors of every branch that has not clearly
            lost. If not, the next three are None.
        critical_batch_size: the largest batch, in samples, whose loss is within the
            tolerance.
        bound: `at_least` if no larger batch was tried, `at_most` if no smaller one was
            tried, else `exact`.
        batch_size_schedule: the run's schedule until the checkpoint, and this batch
            from there on, in the run's unit.
        gain: nats by which the window lowered the loss of the smallest branch; None if
            that is not finite.
        learning_rates: of each branch.
        tolerance: nats by which a branch may be worse than a smaller one: a sixth of the
            gain, which a batch loses that needs 20% more tokens.
        tokens: tokens that every branch trained on.
        noise_scale_samples: the gradient noise scale that the run last measured before
            the checkpoint, or None.
        num_compilations: executables built for the training step.
        file: where a decisive result is kept, beside the run's folder.
    """

    step: int
    branches: tuple[BranchResult, ...]
    decisive: bool
    critical_batch_size: int | None
    bound: Bound | None
    batch_size_schedule: str | None
    gain: float | None
    learning_rates: tuple[float, ...]
    tolerance: float
    tokens: int
    noise_scale_samples: NoiseEstimate | None
    num_compilations: int
    file: Path

    def to_dict(self) -> dict[str, Any]:
        """Return the result as `rampup critical --json` prints it."""
        names = ("global_batch_size", "loss", "standard_error", "token_overhead")
        branches = [
            {name: getattr(branch, name) for name in names} | {"learning_rate": rate}
            for branch, rate in zip(self.branches, self.learning_rates, strict=True)
        ]
        facts = {"step": self.step, "branches": branches}
        for name in (
            "decisive",
            "critical_batch_size",
            "bound",
            "batch_size_schedule",
            "tolerance",
            "gain",
            "tokens",
        ):
            facts[name] = getattr(self, name)
        return facts

    @property
    def implied_noise_scale(self) -> float | None:
        """The gradient noise scale in samples that follows from the critical batch, or
        None if nothing was decided.
        """
        if self.critical_batch_size is None or self.gain is None:
            return None
        return implied_noise_scale(
            self.critical_batch_size, tolerance=self.tolerance, gain=self.gain
        )


def find_critical_batch_size(
    run: str | Path,
    *,
    step: int | None = None,
    batches: Sequence[int] | None = None,
    tokens: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> CriticalBatch:
    """Find the critical batch size of a run of `rampup train` by training branches from
    one of its checkpoints.

    Each branch has the run's learning rate at the checkpoint, held constant, times the
    square root of its batch by that of the run with AdamW, or times this ratio itself
    with SGD. The run may be training: its folder is only read. A decisive result is
    written to RUN.critical next to it.

    Args:
        run: the folder of the run.
        step: optimizer steps done in the checkpoint; None = the newest intact one.
        batches: global batch sizes of the branches; None = those of 1/4, 1/2, 1, 2, 4
            and 8 times the run's batch at the checkpoint that are legal.
        tokens: tokens that each branch trains on, rounded up to whole steps of all
            branches; None = so many that the loss curve of the run promises a gain of
            0.02 nats, and at least 20 optimizer steps of the largest branch.
        report: called with each line of progress.

    Returns:
        The critical batch size with what it rests on.

    Raises:
        RampupError: the run cannot be branched like this.

    Example:
        >>> find_critical_batch_size("runs/nothing")
        Traceback (most recent call last):
        rampup.errors.ConfigError: .../runs/nothing has no checkpoint to branch from; ...
    """
    folder = absolute_path(run, follow=False)
    config, record = _find_run(folder, step)
    step = record["step"]
    lines = [line for line in read_lines(folder / METRICS_FILE) if line["step"] < step]
    branches = _Branches(config, record, batches, tokens, losses_of(lines))
    enable_compilation_cache(config.jax_cache_dir)
    window, length = branches.window, config.max_target_length
    report(
        f"step {step}: branches of {', '.join(map(str, window.sizes))} samples,"
        f" {window.samples * length:,} tokens each, evaluated"
        f" {format_count(window.num_evaluations, 'time')}"
    )
    verdict = judge(window, *_train_branches(branches, folder, report))
    work = folder.with_name(f"{folder.name}{CRITICAL_SUFFIX}") / f"step-{step}"
    found = CriticalBatch(
        step=step,
        branches=verdict.branches,
        decisive=verdict.decisive,
        **_answer(config, branches, verdict),
        gain=verdict.gain,
        learning_rates=branches.learning_rates,
        tolerance=verdict.tolerance,
        tokens=window.samples * length,
        noise_scale_samples=next(
            (noise for _, noise in measured_noise(reversed(lines))), None
        ),
        num_compilations=branches.setup.step.num_compilations,
        file=work / CRITICAL_RESULT,
    )
    if found.decisive:
        # For `rampup design`, which reads the results of all checkpoints of a run.
        place = {"consumed_samples": branches.run_plan.position(step).consumed_samples}
        work.mkdir(parents=True, exist_ok=True)
        write_whole(found.file, json.dumps({**found.to_dict(), **place}).encode())
    return found


def _answer(config: Config, branches: _Branches, verdict: Verdict) -> dict[str, Any]:
    """Return the critical batch with the schedule that goes on with it; None for each
    if nothing was decided.
    """
    if not verdict.decisive:
        return dict.fromkeys(("critical_batch_size", "bound", "batch_size_schedule"))
    sizes, step = branches.window.sizes, branches.step
    size = sizes[verdict.critical]
    ramp = branches.run_plan.ramp.spliced_at(step, BatchRamp.constant(size))
    in_tokens = config.batch_size_schedule_unit == "tokens"
    return {
        "critical_batch_size": size,
        "bound": critical_bound(sizes, size),
        "batch_size_schedule": format_schedule(
            [(phase.start_sample, phase.global_batch_size) for phase in ramp.phases],
            tokens_per_sample=config.max_target_length if in_tokens else 1,
        ),
    }


def _find_run(folder: Path, step: int | None) -> tuple[Config, Mapping[str, Any]]:
    """Return a run's configuration and the record of one of its checkpoints, or refuse
    what cannot be branched.
    """
    steps = checkpoint_steps(folder / CHECKPOINT_FOLDER)
    if not steps:
        raise ConfigError(
            f"{folder} has no checkpoint to branch from",
            fix="name the folder of a run of `rampup train` with"
            " enable_checkpointing=true that has done checkpoint_period steps",
            key="run",
        )
    if step is not None and step not in steps:
        raise ConfigError(
            f"step={step}: {folder} has checkpoints of the steps"
            f" {', '.join(map(str, steps))}",
            fix="max_num_checkpoints_to_keep says how many a run keeps",
            key="step",
            nearest=nearest_in(step, steps),
        )
    named = folder if step is None else folder / CHECKPOINT_FOLDER / str(step)
    record = read_record(named_checkpoint(named)[1])
    if RAMP_RECORD not in record or not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} was trained by a loop of its own: only runs of `rampup train`"
            " can be branched",
            key="run",
        )
    return load_config(folder / CONFIG_FILE), record


class _Branches:
    """The plan, setup and loaders of all branches, one after the other; `run_plan` and
    `run_shapes` are those of the run.
    """

    def __init__(
        self,
        config: Config,
        record: Mapping[str, Any],
        batches: Sequence[int] | None,
        tokens: int | None,
        curve: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.step = step = record["step"]
        ramp = ramp_before(record)
        assert ramp is not None  # `_find_run` has refused a checkpoint without
        self.run_plan = run_plan = plan_to_resume(config, jax.device_count(), ramp)
        self.window = window = _window(config, run_plan, step, batches, tokens, curve)
        plan = _plan_of_branches(config, run_plan, step, window)
        rate = _constant_rate(config, run_plan, step, plan)
        self.learning_rates = tuple(
            rate.at(phase.start_step) for phase in plan.ramp.phases
        )
        mesh = make_mesh(plan.axes)
        # The branches have a plan of their own, and measure nothing else.
        fused = replace(
            config,
            gradient_accumulation="fused",
            measure_gradient_noise=False,
            batch_size_schedule=f"0:{window.sizes[0]}",
            enable_rampup_batch_size=False,
        )
        self.setup = replace(
            TrainSetup.from_config(fused, plan, mesh),
            tx=optimizer(fused, rate, run_plan),
        )
        self.run_shapes = TrainSetup.from_config(config, run_plan, mesh).state_shapes()
        rows = _rows_of_the_run(config, record)
        first = run_plan.position(step).consumed_samples
        last = first + window.samples + window.interval
        order = sample_order(config, len(rows), last)
        group = window.sizes[0]
        self.eval_step, eval_plan = self.setup.evaluation(
            group, (window.samples + window.interval) // group
        )
        self.loader = BatchLoader(
            source=rows,
            plan=plan,
            mesh=mesh,
            order=_SampleWindow(order, first, window.samples),
        )
        self.eval_loader = replace(
            self.loader, plan=eval_plan, order=_SampleWindow(order, first, None)
        )

    def first_step(self, number: int) -> int:
        """Return the first step of a branch, in the plan of all of them."""
        return self.setup.plan.ramp.phases[number].start_step

    def start(self, state: Any, first_step: int) -> Any:
        """Return the state on the devices from which a branch starts, in its first step
        of the plan of all branches.
        """
        first = np.int32(first_step)
        # The counters of schedules count the steps of all branches, so that a branch
        # has its own learning rate. Those of the optimizer, such as Adam's for its bias
        # correction, continue.
        opt_state = jax.tree.map(
            lambda leaf: (
                leaf._replace(count=first)
                if isinstance(leaf, optax.ScaleByScheduleState)
                else leaf
            ),
            state.opt_state,
            is_leaf=lambda leaf: isinstance(leaf, optax.ScaleByScheduleState),
        )
        shardings = jax.tree.map(
            lambda shape: shape.sharding, self.setup.state_shapes()
        )
        # A copy: steps donate their state, and the next branch starts from the same
        # one.
        return jax.device_put(
            replace(state, step=first, opt_state=opt_state), shardings, may_alias=False
        )

    def evaluate(self, state: Any, evaluation: int) -> Evaluation:
        """Return the loss on the rows that all branches train on next, which no branch
        has seen yet.
        """
        per_evaluation = self.window.interval // self.window.sizes[0]
        batches = self.eval_loader.batches(
            evaluation * per_evaluation, (evaluation + 1) * per_evaluation
        )
        sums = jax.device_get([self.eval_step(state, batch) for batch in batches])
        losses = tuple(
            float(loss) / float(weight) if weight else 0.0 for loss, weight in sums
        )
        return Evaluation(losses, tuple(float(weight) for _, weight in sums))


def _window(
    config: Config,
    run_plan: RampPlan,
    step: int,
    batches: Sequence[int] | None,
    tokens: int | None,
    curve: Sequence[tuple[int, float]],
) -> BranchWindow:
    """Return the batches of the branches and their window, or refuse batches that
    cannot be split.
    """
    splitter = unconstrained(run_plan.splitter)
    position = run_plan.position(step)
    if batches is None:
        own = position.split.global_batch_size
        whole = [own * k // 4 for k in QUARTERS if own * k % 4 == 0]
        batches = [size for size in whole if splitter.allows(size)]
    window = BranchWindow.of(
        batches,
        None if tokens is None else -(-tokens // config.max_target_length),
        promising=samples_for_gain(curve, position.consumed_samples),
    )
    for size in window.sizes:
        if not splitter.allows(size):
            raise batch_error(splitter, size, "the batch of a branch", key="batches")
    return window


def _plan_of_branches(
    config: Config, run_plan: RampPlan, step: int, window: BranchWindow
) -> RampPlan:
    """Return the branches, one after the other, as the phases of a ramp: one executable
    serves them all, like those of any ramp.
    """
    splitter = unconstrained(run_plan.splitter)
    # Microbatches are as large as those of the run if they divide all batches.
    legal = splitter.legal_microbatches(window.sizes)
    own = run_plan.position(step).split.microbatch_size
    fitting = max((size for size in legal if size <= own), default=legal[0])
    return RampPlan(
        ramp=BatchRamp.piecewise(
            (number * window.samples, size) for number, size in enumerate(window.sizes)
        ),
        splitter=replace(splitter, microbatch_size=fitting),
        num_devices=run_plan.num_devices,
        axes=run_plan.axes,
        total_steps=sum(window.samples // size for size in window.sizes),
        # SGD: Goyal et al. 2017, arXiv 1706.02677. Adam: Malladi et al. 2022, arXiv
        # 2205.10287.
        rate=RateRule(
            batch_scaling="linear" if config.opt_type == "sgd" else "sqrt",
            reference_batch_size=run_plan.reference_size,
        ),
    )


def _constant_rate(
    config: Config, run_plan: RampPlan, step: int, plan: RampPlan
) -> LearningRate:
    """Return the run's next learning rate, or its last if its schedule has ended, held
    constant; the plan of the branches scales it.
    """
    schedule = learning_rate(config, run_plan)
    if not (peak := schedule.at(step) or schedule.at(step - 1)) > 0:
        raise ConfigError(
            f"the learning rate of the run is 0 at step {step}, so its branches would"
            " learn nothing",
            fix="choose another --step",
            key="step",
        )
    batch = run_plan.position(step).split.global_batch_size
    scale = learning_rate_scale(batch, plan.reference_size, plan.rate.batch_scaling)
    return LearningRate(plan=plan, peak=peak / scale, kind="constant")


def _rows_of_the_run(config: Config, record: Mapping[str, Any]) -> Any:
    """Return the training data, or refuse others than those of the run."""
    rows, _ = open_sources(config)
    found = {"num_rows": len(rows), "data": fingerprints(files_of(rows))}
    for name, value in found.items():
        if name in record and record[name] != value:
            raise ResumeMismatchError(
                f"the training data are not those of the run: {name} differs from the"
                " checkpoint's",
                fix="restore the files of"
                f" grain_train_files={config.grain_train_files}, or train again",
                key="grain_train_files",
            )
    return rows


class _SampleWindow(SampleOrder):
    """The samples from a first one on, over and over in a window of them if it is
    given.
    """

    def __init__(self, order: SampleOrder, first: int, length: int | None) -> None:
        self._order, self._first, self._window = order, first, length

    def rows(self, samples: Iterable[int]) -> np.ndarray:
        return self._order.rows(
            [
                self._first + (s if self._window is None else s % self._window)
                for s in samples
            ]
        )

    def check(self, num_samples: int) -> None:
        """Do nothing: the window was checked."""


def _train_branches(
    branches: _Branches, folder: Path, report: Callable[[str], None]
) -> tuple[list[list[Evaluation]], Evaluation]:
    """Train the branches, smallest batch first; return their evaluations, and that of
    the checkpoint.
    """
    start = _start_state(branches, folder)
    # On the rows of the last evaluations of the branches.
    state = branches.start(start, branches.first_step(0))
    before = branches.evaluate(state, branches.window.num_evaluations)
    curves = [
        _train_branch(branches, number, start, report)
        for number in range(len(branches.window.sizes))
    ]
    return curves, before


def _train_branch(
    branches: _Branches, number: int, start: Any, report: Callable[[str], None]
) -> list[Evaluation]:
    """Train a branch from the state of the checkpoint, and return its evaluations."""
    window, first = branches.window, branches.first_step(number)
    size, total = window.sizes[number], window.num_evaluations
    per_evaluation = window.interval // size
    state = branches.start(start, first)
    curve: list[Evaluation] = []
    for batch in branches.loader.batches(first, first + per_evaluation * total):
        state, _ = branches.setup.step(state, batch)
        done = batch.position.step + 1 - first
        if done % per_evaluation == 0:
            curve.append(branches.evaluate(state, done // per_evaluation))
            if len(curve) % -(-total // REPORTS_PER_BRANCH) == 0:
                report(
                    f"batch {size:,}: {len(curve)}/{total} of the window, smoothed"
                    f" loss {smoothed_loss(curve):.4f}"
                )
    return curve


def _start_state(branches: _Branches, folder: Path) -> Any:
    """Return the state of the run's checkpoint in host memory, as the optimizer of the
    branches has it.
    """
    start = read_state(folder / CHECKPOINT_FOLDER, branches.step, branches.run_shapes)
    start = jax.device_get(branches.setup.reorder_layers(start)[1](start))
    if isinstance(start.opt_state, optax.MultiStepsState):
        start = replace(start, opt_state=start.opt_state.inner_opt_state)
    return start
