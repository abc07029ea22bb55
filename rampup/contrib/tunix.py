"""A ramp in Tunix's `PeftTrainer`, in one executable, with rows looked up by step.

Tunix counts microbatches: one step of the trainer is one microbatch, and
`rampup.multi_steps` makes the optimizer step once a global batch is complete. So
`max_steps`, `eval_every_n_steps` and the interval of checkpoints count microbatches
too.

A gradient is the mean of its microbatches' means, because the trainer divides each loss
by its own tokens: a microbatch with few tokens counts as much as a full one. rampup's
own step weights by tokens. For rows of unequal length the results differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from rampup.data.batches import microbatches
from rampup.engine.mesh import check_plan_fits, replicated
from rampup.errors import ConfigError, MissingDependencyError, ResumeMismatchError
from rampup.plan.plan import RampPlan

try:
    from tunix.sft import hooks
except ImportError as error:
    raise MissingDependencyError(
        f"rampup.contrib.tunix needs Tunix: pip install google-tunix ({error})"
    ) from None


def num_microbatches(plan: RampPlan, steps: int | None = None) -> int:
    """Return the microbatches of the first optimizer steps of a plan, by default of
    all: `max_steps` of Tunix's trainer.
    """
    steps = plan.total_steps if steps is None else steps
    number = 0
    for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
        within = max(steps - phase.start_step, 0)
        number += split.num_microbatches * (
            within if phase.num_steps is None else min(within, phase.num_steps)
        )
    return number


def locate(plan: RampPlan, microbatch: int) -> tuple[int, int]:
    """Return the optimizer step that a microbatch belongs to, and its number within the
    step; both count from 0.
    """
    for phase, split in zip(
        reversed(plan.ramp.phases), reversed(plan.splits), strict=True
    ):
        before = num_microbatches(plan, phase.start_step)
        if microbatch >= before:
            steps, within = divmod(microbatch - before, split.num_microbatches)
            return phase.start_step + steps, within
    raise ValueError(f"microbatch={microbatch} must not be negative")


class DataHooks(hooks.DataHooks):
    """Gives Tunix's trainer the rows of the microbatch that it has reached; see
    `rampup.microbatches` for most arguments.

    Each evaluation begins with the first of the `eval_batches`. The trainer evaluates
    if its `train` also gets an `eval_ds` that is not empty: give it the same batches.
    """

    def __init__(
        self,
        rows: Any,
        plan: RampPlan,
        mesh: Mesh,
        *,
        seed: int | None = None,
        num_epochs: int | None = None,
        eval_batches: Iterable[Any] = (),
    ) -> None:
        self.rows, self.plan, self.mesh = rows, plan, mesh
        self.order = {"seed": seed, "num_epochs": num_epochs}
        self.eval_batches = eval_batches
        self._train: Iterator[Any]
        # the microbatch that `_train` yields next; None before the first
        self._next: int | None = None
        self._eval: Iterator[Any] | None = None

    def load_next_train_batch(self, train_ctx: Any) -> Any:
        """Return the microbatch of the trainer's iteration, or None after the last one
        of the plan.
        """
        if self._next != train_ctx.iter_steps:
            self._next = train_ctx.iter_steps
            step, within = locate(self.plan, train_ctx.iter_steps)
            self._train = iter(())
            if step < self.plan.total_steps:
                batches = microbatches(
                    self.rows, self.plan, self.mesh, start=step, **self.order
                )
                self._train = itertools.islice(batches, within, None)
        self._next += 1
        return next(self._train, None)

    def load_next_eval_batch(self, train_ctx: Any) -> Any:  # noqa: ARG002
        """Return the next batch of an evaluation, or None after the last one."""
        if self._eval is None:
            self._eval = iter(self.eval_batches)
        batch = next(self._eval, None)
        if batch is None:
            self._eval = None
        return batch


def prepare(
    trainer: Any, rows: Any, plan: RampPlan, mesh: Mesh, **options: Any
) -> DataHooks:
    """Give a `PeftTrainer` the rows of a plan in hooks, which are returned, and
    replicate its arrays on the mesh.

    Call it after the trainer is made, which restores a checkpoint if there is one, and
    before `trainer.train(())`, which must run inside `with mesh:`: Tunix reads its
    mesh from there, and not from `jax.set_mesh`. A trainer that would train otherwise
    than the plan is refused.
    """
    check_plan_fits(plan, mesh)
    total = num_microbatches(plan)
    config = trainer.config
    tx = trainer.optimizer.tx
    if config.gradient_accumulation_steps is not None:
        raise ConfigError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} would"
            " accumulate twice; leave it None: rampup.multi_steps accumulates",
            key="gradient_accumulation_steps",
        )
    if config.max_steps not in (None, total):
        raise ConfigError(
            f"max_steps={config.max_steps} must count microbatches: {total} for the"
            f" total_steps={plan.total_steps} of the plan, num_microbatches(plan)",
            key="max_steps",
            nearest=(total,),
        )
    every = getattr(tx, "_every_k_schedule", None)
    # The first step of every phase, and the one before it.
    around = [
        step
        for phase in plan.ramp.phases
        for step in (phase.start_step - 1, phase.start_step)
        if step >= 0
    ]
    wanted = [plan.position(step).split.num_microbatches for step in around]
    if (
        not isinstance(tx, optax.MultiSteps)
        or [int(every(jnp.int32(step))) for step in around] != wanted
    ):
        raise ConfigError(
            "the trainer's optimizer must be rampup.multi_steps(tx, plan) of the same"
            " plan, which ends a step when the global batch is complete",
            key="optimizer",
        )
    if trainer.iter_steps:
        state = trainer.optimizer.opt_state
        found = (int(state.gradient_step[...]), int(state.mini_step[...]))
        if found != (position := locate(plan, trainer.iter_steps)):
            raise ResumeMismatchError(
                f"after microbatch {trainer.iter_steps}, the checkpoint is at step"
                f" {found[0]}, microbatch {found[1]}, but this plan is at step"
                f" {position[0]}, microbatch {position[1]}; resume with the plan that"
                " the run began with"
            )

    devices, whole = set(mesh.devices.flat), replicated(mesh)

    def place(x: Any) -> Any:
        return (
            jax.device_put(x, whole)
            if isinstance(x, jax.Array) and x.sharding.device_set != devices
            else x
        )

    for part in (trainer.model, trainer.optimizer):
        nnx.update(part, jax.tree.map(place, nnx.state(part)))
    made = DataHooks(rows, plan, mesh, **options)
    trainer.with_data_hooks(made)
    return made
