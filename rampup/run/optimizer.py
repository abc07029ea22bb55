"""The learning rate as a function of the plan, and the optimizers of `rampup train`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rampup.errors import ConfigError, RampDefinitionError
from rampup.plan.plan import RampPlan

MAX_STEPS = 2**31 - 1


# `jax.jit` needs a weak reference to a function.
@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class LearningRate:
    """A learning-rate schedule on the clock of a plan, as an `optax.Schedule`: warm-up, then cosine, WSD or constant.

    Attributes:
        plan: the plan whose clock (`RampPlan.clock`) and batch scaling apply.
        peak: learning rate after the warm-up, for the batch of the last phase.
        kind: shape of the schedule after the warm-up; `wsd` is warm-up, stable, decay.
        warmup_fraction: fraction of the schedule in which the rate rises linearly from 0.
        final_fraction: rate at the end of the schedule divided by `peak`.
        decay_fraction: fraction of the schedule in which `wsd` decays.
        decay_style: shape of the decay of `wsd`.

    After the end of the schedule the rate is 0, except for `constant` (as in MaxText's `create_learning_rate_schedule`).

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(ramp=BatchRamp.constant(8), splitter=BatchSplitter(data_parallel_size=1), num_devices=1,
        ...     total_steps=100)
        >>> rate = LearningRate(plan=plan, peak=1.0, warmup_fraction=0.1)
        >>> [round(rate.at(step), 4) for step in (0, 5, 10, 55)]
        [0.0, 0.5, 1.0, 0.55]
    """

    plan: RampPlan
    peak: float
    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_fraction: float = 0.0
    final_fraction: float = 0.1
    decay_fraction: float = 0.1
    decay_style: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.plan.total_steps > MAX_STEPS:
            raise RampDefinitionError(
                f"steps={self.plan.total_steps:,} does not fit into the int32 step counter of a device",
                key="steps",
                nearest=(MAX_STEPS,),
            )

    def __call__(self, count: Any) -> Any:
        """Return the learning rate of optimizer step `count`, a traced int32."""
        # Sample counts do not fit into int32, so progress is given per phase: its value at the first step, and per step.
        segments = [segment for segment in self.plan.clock if segment.start_step <= MAX_STEPS]
        start_steps = jnp.asarray(np.array([segment.start_step for segment in segments], np.int32))
        index = jnp.searchsorted(start_steps, count, side="right") - 1

        def column(name: str) -> Any:
            return jnp.asarray(np.array([getattr(segment, name) for segment in segments], np.float32))[index]

        progress = column("progress") + (count - start_steps[index]) * column("progress_per_step")
        return self._rate(count, progress, jnp) * column("scale")

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, computed on the host."""
        phase = self.plan.ramp.phase_at(step)
        segment = self.plan.clock[phase.index]
        progress = segment.progress + (step - segment.start_step) * segment.progress_per_step
        return float(self._rate(step, progress, np)) * segment.scale

    def _rate(self, step: Any, progress: Any, xp: Any) -> Any:
        """Return the rate before batch scaling, in numpy or jax.numpy. Progress goes from 0 to 1 over the schedule."""
        peak, final, warmup = self.peak, self.peak * self.final_fraction, self.warmup_fraction
        decay = max(self.decay_fraction if self.kind == "wsd" else 1 - warmup, 1e-9)
        done = xp.clip((progress - (1 - decay)) / decay, 0.0, 1.0)
        if self.kind == "cosine" or self.decay_style == "cosine":
            done = 0.5 * (1 - xp.cos(math.pi * done))
        after = peak + (final - peak) * (0.0 if self.kind == "constant" else done)
        rate = xp.where(progress < warmup, peak * progress / max(warmup, 1e-9), after)
        return rate if self.kind == "constant" else xp.where(step < min(self.plan.schedule_steps, MAX_STEPS), rate, 0.0)


def make_optimizer(
    learning_rate: float | Callable[[Any], Any],
    *,
    kind: Literal["adamw", "sgd"] = "adamw",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Return an optimizer: clipping by global norm, then AdamW or SGD.

    Args:
        learning_rate: a number, or a schedule over optimizer steps such as `LearningRate`.
        kind: `adamw` (Loshchilov & Hutter 2019, arXiv 1711.05101) or `sgd`.
        b1, b2, eps, weight_decay: AdamW's constants.
        clip_norm: maximum global norm of the gradient; 0 = no clipping.
        mu_dtype, nu_dtype: types in which AdamW stores its first and second moment between steps; None = those of the
            parameters. If one is given, both are updated in at least float32.

    Example:
        >>> tx = make_optimizer(0.1, kind="sgd", clip_norm=0)
    """
    optimizers = {
        "adamw": lambda: _store_moments(
            optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay), mu_dtype, nu_dtype
        ),
        "sgd": lambda: optax.sgd(learning_rate),
    }
    if kind not in optimizers:
        raise ConfigError(
            f"opt_type={kind!r} must be one of {', '.join(optimizers)}", key="opt_type", nearest=tuple(optimizers)
        )
    clipping = [optax.clip_by_global_norm(clip_norm)] if clip_norm else []
    return optax.chain(*clipping, optimizers[kind]())


def _store_moments(tx: optax.GradientTransformation, mu_dtype: Any, nu_dtype: Any) -> optax.GradientTransformation:
    """Return AdamW with its moments stored in other types than those of the parameters."""
    if mu_dtype is None and nu_dtype is None:
        return tx

    def convert(state: Any, mu: Callable[[Any], Any], nu: Callable[[Any], Any]) -> Any:
        is_adam = lambda part: isinstance(part, optax.ScaleByAdamState)  # noqa: E731
        adam = lambda part: part._replace(mu=jax.tree.map(mu, part.mu), nu=jax.tree.map(nu, part.nu))  # noqa: E731
        return jax.tree.map(lambda part: adam(part) if is_adam(part) else part, state, is_leaf=is_adam)

    def wide(x: Any) -> Any:
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def cast_to(dtype: Any) -> Callable[[Any], Any]:
        return lambda x: x if dtype is None else x.astype(dtype)

    def init(params: Any) -> Any:
        return convert(tx.init(params), cast_to(mu_dtype), cast_to(nu_dtype))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(jax.tree.map(wide, grads), convert(state, wide, wide), params)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)
