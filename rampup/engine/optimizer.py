"""The learning rate as a function of the plan, and the optimizers of `rampup train`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rampup.engine.arguments import gone
from rampup.engine.state import MAX_STEPS, check_step_number
from rampup.errors import ConfigError, MissingDependencyError, choice_error
from rampup.plan.hyperparameters import (
    AdamConstants,
    AdamScaling,
    adam_constants,
    warmup_fraction,
)
from rampup.plan.learning_rate import ClockSegment, decay_progress
from rampup.plan.numbers import check_range
from rampup.plan.plan import RampPlan

OptimizerKind = Literal["adamw", "sgd", "muon"]
RateKind = Literal["cosine", "wsd", "constant"]
# Muon's updates have this root mean square, about that of AdamW's, so that one learning
# rate and one weight decay serve both (Liu et al. 2025, arXiv 2502.16982, equation 4).
MUON_RMS = 0.2
_ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
_ADAM_TYPES = dict.fromkeys([*_ADAM, "c1", "c2", "weight_decay"])

# The plan of the step that is being traced, which its learning rate must have.
PLAN = ContextVar[RampPlan]("PLAN")

# What a program knows of a `ClockSegment`: of a planned ramp, a constant table in which
# every step looks up its own; of one that is decided during the run, an argument
# (`FollowingOptimizer`). Sample counts do not fit into int32, but progress does.
SegmentNumbers = Mapping[str, Any]
_SEGMENT_TYPES = {
    "start_step": np.int32,
    "global_batch_size": np.int32,
    **dict.fromkeys(("progress", "progress_per_step", "scale"), np.float32),
}


def segment_numbers(tx: Any, segment: ClockSegment | None) -> SegmentNumbers | None:
    """Return what the program of a `FollowingOptimizer` needs to know of one segment;
    None for other optimizers, which know the plan.
    """
    if segment is None or not isinstance(tx, FollowingOptimizer):
        return None
    return {name: kind(getattr(segment, name)) for name, kind in _SEGMENT_TYPES.items()}


def look_up(
    phases: Sequence[Any],
    value: Any,
    rows: Sequence[Any],
    types: Mapping[str, Any],
    key: str = "start_step",
) -> dict[str, jax.Array]:
    """Return numbers of the row, one per phase, that is in force at a traced value of
    `key`: that of the last phase that starts at or before it. `types` has the type of
    each number; None = that of NumPy.
    """
    starts = [getattr(x, key) for x in phases if x.start_step <= MAX_STEPS]
    ordered = np.array(starts, np.int32)
    index = jnp.searchsorted(ordered, value, side="right") - 1
    rows = rows[: len(starts)]
    return {
        name: jnp.asarray(np.array([getattr(x, name) for x in rows], t))[index]
        for name, t in types.items()
    }


def with_plan(plan: RampPlan, function: Any, *args: Any, **options: Any) -> Any:
    """Return what a function returns, in which schedules of other plans are refused."""
    context = copy_context()
    context.run(PLAN.set, plan)
    return context.run(function, *args, **options)


def _check_plan(plan: RampPlan) -> None:
    """Refuse a schedule of another plan than that of `with_plan`: a shorter one would
    end in a rate of 0.
    """
    if PLAN.get(plan).clock != plan.clock:
        raise ConfigError(
            "the learning rate of the optimizer follows another plan than the step",
            fix="make LearningRate and optimizer anew for each plan",
            key="tx",
        )


# `jax.jit` needs a weak reference to a function.
@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class LearningRate:
    """A learning-rate schedule on the clock of a plan, as an `optax.Schedule`: warm-up,
    then cosine, WSD or constant.

    Attributes:
        plan: the plan, whose `clock`, batch scaling and Seesaw it follows. A training
            step refuses a rate that follows another plan than its own.
        peak: learning rate after the warm-up, for the batch `plan.reference_size`: that
            of the last phase, unless the plan's rule has a `reference_batch_size`.
        kind: shape of the schedule after the warm-up; `wsd` is warm-up, stable, decay.
        warmup_fraction: fraction of the schedule in which the rate rises linearly from
            0.
        final_fraction: rate at the end of the schedule divided by `peak`.
        decay_fraction: fraction of the schedule in which `wsd` decays, linearly.

    After the end of the schedule the rate is 0, except for `constant` (as in MaxText's
    `create_learning_rate_schedule`).

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.constant(8),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=100,
        ... )
        >>> rate = LearningRate(plan=plan, peak=1.0, warmup_fraction=0.1)
        >>> [round(rate.at(step), 4) for step in (0, 5, 10, 55)]
        [0.0, 0.5, 1.0, 0.55]
    """

    plan: RampPlan
    peak: float
    kind: RateKind = "cosine"
    warmup_fraction: float = 0.0
    final_fraction: float = 0.1
    decay_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_step_number(self.plan.total_steps)
        if self.kind not in get_args(RateKind):
            raise choice_error("kind", self.kind, get_args(RateKind))
        check_range(0, peak=self.peak)
        check_range(
            0,
            1,
            warmup_fraction=self.warmup_fraction,
            final_fraction=self.final_fraction,
            decay_fraction=self.decay_fraction,
        )

    @classmethod
    @gone(peak="it is learning_rate", decay_fraction="it is wsd_decay_steps_fraction")
    def from_config(cls, config: Any, plan: RampPlan) -> Self:
        """Return the schedule that the keys of base.yml and rl.yml describe; rl.yml has
        no key for `decay_fraction`.
        """
        warmup = config.warmup_steps_fraction
        if config.warmup_steps is not None:
            warmup = warmup_fraction(plan, config.warmup_steps)
        return cls(
            plan=plan,
            peak=config.learning_rate,
            kind=config.lr_schedule_type,
            warmup_fraction=warmup,
            final_fraction=config.learning_rate_final_fraction,
            decay_fraction=getattr(config, "wsd_decay_steps_fraction", 0.1),
        )

    def __call__(self, count: Any, segment: SegmentNumbers | None = None) -> Any:
        """Return the learning rate of optimizer step `count`, a traced int32, in a
        segment, which None looks up in the plan.

        Raises:
            ConfigError: the step that is traced follows another plan.
        """
        if segment is None:
            _check_plan(self.plan)
            types: dict[str, Any] = dict(_SEGMENT_TYPES)
            if self.plan.seesaw is not None:
                types["level"] = np.float32
            segment = look_up(self.plan.clock, count, self.plan.clock, types)
        progress = (
            segment["progress"]
            + (count - segment["start_step"]) * segment["progress_per_step"]
        )
        level = segment.get("level")
        return self._rate(count, progress, level, jnp) * segment["scale"]

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, computed on the host."""
        segment = self.plan.segment_at(step)
        rate = self._rate(step, segment.progress_at(step), segment.level)
        return float(rate) * segment.scale

    def _rate(self, step: Any, progress: Any, level: Any, xp: Any = None) -> Any:
        """Return the rate before batch scaling, of a number or, with `xp=jax.numpy`, of
        an array.
        """
        peak, warmup = self.peak, self.warmup_fraction
        if self.plan.seesaw is None:
            done = decay_progress(
                progress,
                kind=self.kind,
                warmup_fraction=warmup,
                decay_fraction=self.decay_fraction,
                xp=xp,
            )
            after = peak + (peak * self.final_fraction - peak) * done
        else:
            after = peak * level

        where = (xp or np).where
        rate = where(progress < warmup, peak * progress / max(warmup, 1e-9), after)
        # A run with a budget of samples has no step after the end of its schedule.
        if self.kind == "constant" or self.plan.budget_samples is not None:
            return rate
        return where(step < min(self.plan.schedule_steps, MAX_STEPS), rate, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSchedule:
    """AdamW's constants as a function of the optimizer step: those of every segment of
    a plan's clock.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.plan.hyperparameters import AdamScaling
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:4 40:8"),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=20,
        ... )
        >>> adam = AdamSchedule.from_scaling(
        ...     plan, AdamConstants(b2=0.81), AdamScaling(b2="half_life")
        ... )
        >>> adam.at(3).b2, adam.at(15).b2
        (0.9, 0.81)
        >>> tx = make_optimizer(1e-3, adam=adam)
    """

    plan: RampPlan
    constants: Sequence[AdamConstants]

    @classmethod
    def from_scaling(
        cls, plan: RampPlan, base: AdamConstants, scaling: AdamScaling
    ) -> Self:
        """Return the schedule of a plan, from the constants for its `reference_size`
        and the rules for other batches.

        If the ramp is decided during the run, the steps of `at` are those of a plan
        with a step of every size.
        """
        plan = plan.of_all_sizes
        return cls(plan=plan, constants=adam_constants(plan, base, scaling))

    def at(self, step: int) -> AdamConstants:
        """Return the constants of an optimizer step, on the host."""
        return self.constants[self.plan.segment_index(step)]

    def __call__(
        self, count: Any, segment: SegmentNumbers | None = None
    ) -> dict[str, Any]:
        """Return the constants of optimizer step `count`, a traced int32, and 1 - b1
        and 1 - b2 as `c1` and `c2`.

        Raises:
            ConfigError: the step that is traced follows another plan.
        """
        if segment is None:
            _check_plan(self.plan)
            key, value = "start_step", count
        else:
            key = "global_batch_size"
            value = segment[key]
        return look_up(self.plan.clock, value, self.constants, _ADAM_TYPES, key)


class FollowingOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer for batches that are decided during the run: its `update` takes the
    numbers of a `segment`.
    """

    __slots__ = ()


class MomentMasses(NamedTuple):
    """The divisors that make moments unbiased: 1 minus the product of all decay rates,
    1 - b**count if b is constant.
    """

    b1: jax.Array
    b2: jax.Array


def scheduled_adamw(
    learning_rate: optax.ScalarOrSchedule,
    adam: Callable[[Any], dict[str, Any]],
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Return AdamW with constants that change from phase to phase, in one program, and
    the divisors `MomentMasses`.
    """
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate

    def init(params: Any) -> Any:
        # The states of `optax.adamw`: moments, weight decay (empty) and the count of
        # the schedule.
        moments, _, clock = optax.adamw(rate, mu_dtype=mu_dtype).init(params)
        return moments, MomentMasses(jnp.zeros(()), jnp.zeros(())), clock

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moments, masses, clock = state
        # The count of the schedule and not that of Adam, which stands still in skipped
        # steps.
        now, step_size = adam(clock.count), -1 * rate(clock.count)

        # A constant has the type of the array. c = 1 - b is rounded once: in float32,
        # the difference of 1 and a rounded b of 0.999 has lost four digits.
        def average(moment: str, x: Any, old: Any) -> Any:
            b, c = now[f"b{moment}"], now[f"c{moment}"]
            return c.astype(x.dtype) * x + b.astype(old.dtype) * old

        def step(m: Any, v: Any, param: Any) -> Any:
            m, v = m / mass.b1.astype(m.dtype), v / mass.b2.astype(v.dtype)
            change = m / (jnp.sqrt(v) + now["eps"].astype(v.dtype))
            change += now["weight_decay"].astype(param.dtype) * param
            return jnp.asarray(step_size, change.dtype) * change

        squares = jax.tree.map(lambda g: (g * g.conj()).real, grads)
        mu = jax.tree.map(functools.partial(average, "1"), grads, moments.mu)
        nu = jax.tree.map(functools.partial(average, "2"), squares, moments.nu)
        one = jnp.ones(())
        mass = MomentMasses(average("1", one, masses.b1), average("2", one, masses.b2))
        updates = jax.tree.map(step, mu, nu, params)
        count = optax.safe_increment(moments.count)
        # Only what is kept between steps is rounded.
        mu = optax.tree.cast(mu, mu_dtype)
        new = optax.ScaleByAdamState(count=count, mu=mu, nu=nu)
        count = optax.safe_increment(clock.count)
        return updates, (new, mass, optax.ScaleByScheduleState(count=count))

    return optax.GradientTransformation(init, update)


@gone(
    **dict.fromkeys(_ADAM, "give adam={...}"),
    nu_dtype="the second moment has the type of the parameters",
)
def make_optimizer(
    learning_rate: float | Callable[[Any], Any],
    *,
    kind: OptimizerKind = "adamw",
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    mu_dtype: Any = None,
    adam: Mapping[str, float] | Callable[[Any], dict[str, Any]] | None = None,
    matrices: Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Return an optimizer: clipping by global norm, then AdamW, SGD or Muon.

    Args:
        learning_rate: a number, or a schedule such as `LearningRate`.
        kind: `adamw` (Loshchilov & Hutter 2019, arXiv 1711.05101), `sgd`, or `muon`
            (Jordan et al. 2024; `optax.contrib.muon`), with AdamW for what is no
            matrix.
        weight_decay: of AdamW and Muon, per step, times the learning rate.
        clip_norm: maximum global norm of the gradient; 0 = no clipping.
        mu_dtype: type in which the first moment is stored between steps, as in
            `optax.adamw`; None = that of the parameters, which the second has.
        adam: AdamW's constants `b1`, `b2` and `eps` where they are not 0.9, 0.95 and
            1e-8, of which Muon has the same eps, and a momentum of 0.95. Or all of
            them by phase, with the weight decay, such as an `AdamSchedule`.
        matrices: for `muon`, returns the `optax.contrib.MuonDimensionNumbers` of each
            parameter, or None for AdamW; None = all arrays of two dimensions are
            matrices.

    Returns:
        The optimizer.

    Raises:
        ConfigError: an unknown `kind`, or what Muon does not support.
        MissingDependencyError: Optax is too old for Muon.
        TypeError: an argument or a constant that does not exist.

    Example:
        >>> tx = make_optimizer(0.1, kind="sgd", clip_norm=0)
        >>> tx = make_optimizer(1e-3, adam={"b2": 0.99})
    """
    by_phase = adam if callable(adam) else None
    constants = {**_ADAM, **(adam if isinstance(adam, Mapping) else {})}
    if unknown := constants.keys() - _ADAM.keys():
        raise TypeError(f"adam has {min(unknown)!r}; it takes {', '.join(_ADAM)}")
    if kind not in get_args(OptimizerKind):
        raise choice_error("opt_type", kind, get_args(OptimizerKind))
    if kind == "muon":
        if by_phase is not None:
            raise ConfigError(
                "batch_scaling changes how AdamW works, which opt_type=muon runs for a"
                " part of the model",
                key="batch_scaling",
            )
        if "consistent_rms" not in inspect.signature(optax.contrib.muon).parameters:
            raise MissingDependencyError(
                f"opt_type=muon needs Optax 0.2.7 or newer, not {optax.__version__}",
                fix="pip install -U optax",
                key="opt_type",
            )
        tx = optax.contrib.muon(
            learning_rate,
            adam_b1=constants["b1"],
            adam_b2=constants["b2"],
            adam_weight_decay=weight_decay,
            eps=constants["eps"],
            weight_decay=weight_decay,
            muon_weight_dimension_numbers=matrices,
            mu_dtype=mu_dtype,
            consistent_rms=MUON_RMS,
        )
    elif kind == "sgd":
        tx = optax.sgd(learning_rate)
    else:
        tx = optax.adamw(
            learning_rate, weight_decay=weight_decay, mu_dtype=mu_dtype, **constants
        )
        if by_phase is not None:
            tx = scheduled_adamw(learning_rate, by_phase, mu_dtype)
    # Before the optimizer, so that one huge gradient does not stay in the moments.
    clipping = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    return optax.chain(*clipping, tx)


def optimizer_from_config(
    config: Any, rate: LearningRate, *, adam: AdamSchedule | None = None, **others: Any
) -> optax.GradientTransformation:
    """Return the optimizer that the keys of base.yml and rl.yml describe; `others` are
    arguments without such a key.
    """
    constants: Any = adam or {name: getattr(config, f"adam_{name}") for name in _ADAM}
    make = functools.partial(
        make_optimizer,
        kind=config.opt_type,
        clip_norm=config.gradient_clipping_threshold,
        weight_decay=config.adam_weight_decay,
        **others,
    )
    if not rate.plan.follows:
        return make(learning_rate=rate, adam=constants)

    def of_step(segment: SegmentNumbers | None) -> optax.GradientTransformation:
        own = functools.partial(adam, segment=segment) if adam else constants
        own_rate = functools.partial(rate, segment=segment)
        return make(learning_rate=own_rate, adam=own)

    # The update is that of the optimizer for the numbers of the step.
    def update(
        grads: Any, state: Any, params: Any = None, *, segment: Any, **_: Any
    ) -> tuple[Any, Any]:
        return of_step(segment).update(grads, state, params)

    return FollowingOptimizer(of_step(None).init, update)
