"""The mathematics of a training step: what a compiled program computes from a state and
rows.

Shape suffixes: K microbatches of the input, R rows of one microbatch
(data_parallel_size * microbatch_size).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.engine.contract import Counts, SummableLoss
from rampup.engine.explicit import with_explicit_axes
from rampup.engine.gradient_noise import NoiseMeter
from rampup.engine.keys import per_row_keys, random_key
from rampup.engine.mesh import BatchAxes, constrain
from rampup.engine.optimizer import SegmentNumbers
from rampup.engine.state import (
    carried,
    join_frozen,
    read_by_loss,
    replace_carried,
    replace_fields,
    split_frozen,
)
from rampup.engine.sums import Recipe, Sums, cast_like, check_trained, safe_reciprocal
from rampup.engine.zero import is_scattered, scattered_shardings
from rampup.errors import ConfigError, a_type

Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Update:
    """What the programs of a training step compute. The shardings of the state are an
    argument: a trace does not know them.
    """

    loss: SummableLoss
    tx: Any  # for `multi_steps`, the `optax.MultiSteps` around the optimizer
    mesh: Mesh
    axes: BatchAxes  # those of the rows
    key: jax.Array  # of the run: a constant of the programs
    skip_nonfinite: bool
    measures_noise: bool
    has_explicit: bool  # the loss function sees Explicit axes

    def fused(
        self,
        state_shardings: Any,
        state: Any,
        frozen: Any,
        chunks: tuple[Any, ...],
        counts: Counts,
        segment: Any = None,
    ) -> tuple[Any, Metrics]:
        """Run one optimizer step on chunks that are (K, R, ...) when joined; `segment`
        is for a `FollowingOptimizer`.
        """
        state = join_frozen(state, frozen)
        batch_KR = jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)
        # The shardings of the gradients are those of the parameters, or those of each
        # replica's own part if the replicas split the optimizer's state (ZeRO-1).
        grad_shardings = state_shardings.params
        is_split = is_scattered(state_shardings.opt_state, self.axes)
        is_split &= self.axes.num_replicas(self.mesh) > 1
        if is_split:
            placed = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                state.params,
                grad_shardings,
            )
            grad_shardings = scattered_shardings(placed, self.mesh, self.axes)
        meter = None
        if self.measures_noise:
            meter = NoiseMeter.of(grad_shardings, self.mesh, self.axes)
        with jax.named_scope("accumulate"):
            sums, grads = self._sums_and_grads(
                state, state_shardings, batch_KR, 0, counts, grad_shardings, meter
            )
            metrics = {"loss": sums.mean_loss, "weight": sums.weight, "aux": sums.aux}
            metrics |= self._measured(meter, sums, grads)
        if is_split:
            state = replace_fields(
                state, params=jax.tree.map(constrain, state.params, grad_shardings)
            )
        with jax.named_scope("update"):
            new = self.run_optimizer(state, grads, metrics["loss"], segment)
        # The step number moves on in any case, and what the loss function carries also
        # without a weight.
        changes = {"step": new.step}
        mutable = sums.mutable
        scale = getattr(state, "dynamic_scale", None)
        if self.skip_nonfinite or scale is not None:
            # Decided on the device: compute the update anyway and select the old
            # values, which reads the whole state once more.
            is_finite = _is_finite(sums, grads, state)
            metrics["skipped"] = ~is_finite
            new = select_step(is_finite & (sums.weight != 0), new, state)
            mutable = select_step(is_finite, mutable, carried(state))
            if scale is not None:
                # Flax adapts it only when it differentiates: here a function whose
                # gradient is finite if that of the step is.
                adapt = scale.value_and_grad(
                    lambda x: x * jnp.where(is_finite, 1.0, jnp.nan)
                )
                changes["dynamic_scale"] = adapt(jnp.float32(0))[0]
        new = replace_carried(new, mutable, **changes)
        if is_split:
            with jax.named_scope("gather"):
                # First as parts, or the compiler would gather what is selected from.
                parts = jax.tree.map(constrain, new.params, grad_shardings)
                params = jax.tree.map(constrain, parts, state_shardings.params)
                new = replace_fields(new, params=params)
        return split_frozen(new)[0], metrics

    def multi_steps(
        self,
        state_shardings: Any,
        state: Any,
        frozen: Any,
        so_far: Metrics | None,
        chunk: Any,
        first_row: jax.Array,
    ) -> tuple[Any, Metrics]:
        """Run one microbatch, arrays (1, R, ...), with `optax.MultiSteps`; `so_far` are
        metrics of the step's earlier ones, zeros for the first one, and None where only
        their shapes are asked for.
        """
        state = join_frozen(state, frozen)
        counts = (np.int32(1),) * 2
        with jax.named_scope("accumulate"):
            sums, grads = self._sums_and_grads(
                state, state_shardings, chunk, first_row, counts, state_shardings.params
            )
        own = {"loss": sums.loss, "weight": sums.weight, "aux": sums.aux}
        before = so_far or jax.tree.map(jnp.zeros_like, own | {"skipped": False})
        # The loss is the weighted mean over the microbatches so far. MultiSteps
        # averages the gradients with equal weights.
        weight = before["weight"] + sums.weight
        loss = before["loss"] * before["weight"] + sums.loss
        metrics = {
            "loss": loss * safe_reciprocal(weight),
            "weight": weight,
            "aux": jax.tree.map(jnp.add, before["aux"], sums.aux),
        }
        mutable = sums.mutable
        if self.skip_nonfinite:
            # MultiSteps must see every microbatch, or its counter would leave the plan:
            # zero the gradient, and drop the update.
            is_finite = _is_finite(sums, grads, state)
            grads = jax.tree.map(
                lambda x: jnp.where(is_finite, x, jnp.zeros_like(x)), grads
            )
            mutable = select_step(is_finite, mutable, carried(state))
            metrics["skipped"] = before["skipped"] | ~is_finite
        with jax.named_scope("update"):
            new = self.run_optimizer(state, grads, metrics["loss"])
        opt_state = new.opt_state
        # Before the last microbatch updates are zero, but a state may do more than
        # apply them. The counters always advance.
        keep = self.tx.has_updated(opt_state)
        if self.skip_nonfinite:
            keep &= ~metrics["skipped"] & (weight != 0)
        inner = select_step(
            keep, opt_state.inner_opt_state, state.opt_state.inner_opt_state
        )
        opt_state = opt_state._replace(inner_opt_state=inner)
        new, old = (replace_fields(x, opt_state=opt_state) for x in (new, state))
        new = select_step(keep, new, old)
        new = replace_carried(new, mutable, step=opt_state.gradient_step)
        return split_frozen(new)[0], metrics

    def _sums_and_grads(
        self,
        state: Any,
        state_shardings: Any,
        batch_KR: Any,
        first_row: Any,
        counts: Counts,
        grad_shardings: Any,
        meter: NoiseMeter | None = None,
    ) -> tuple[Sums, Any]:
        """Return the sums over microbatches, with None as `grads`, and the gradient of
        their mean loss, at least in float32; or refuse what the loss does not support
        in the state.
        """
        check_trained(state.params)
        scale = getattr(state, "dynamic_scale", None)
        if scale is not None:
            _check_support(self.loss, "`dynamic_scale`")
            scale = scale.scale
        recipe = Recipe(mutable=carried(state), noise=meter, scale=scale)
        loss = self.bound_loss(state, state_shardings)
        numbers = _row_numbers(batch_KR, first_row)
        rows = batch_KR, per_row_keys(self.key, state.step, numbers)
        sums = loss.sums(state.params, rows, counts, recipe, self.mesh, grad_shardings)
        return sums._replace(grads=None), sums.mean_grads()

    def _measured(self, meter: NoiseMeter | None, sums: Sums, grads: Any) -> Metrics:
        """Return the norm of the gradient, and its noise if that is measured."""
        if meter is None:
            return {"grad_norm": optax.tree.norm(grads)}
        if sums.noise is None:
            raise ConfigError(
                f"measure_gradient_noise=true: {type(self.loss).__name__} does not use"
                " `recipe.noise`; see rampup.engine.contract.SummableLoss",
                key="measure_gradient_noise",
                nearest=(False,),
            )
        with jax.named_scope("gradient_noise"):
            return meter.metrics(sums.noise, grads, sums.weight)

    def bound_loss(self, state: Any, state_shardings: Any = None) -> SummableLoss:
        """Return the loss with the frozen arrays of a state, if it has any, as an
        argument, and with the axes that it needs.
        """
        loss = self.loss
        if self.has_explicit and state_shardings is not None:
            shardings = read_by_loss(state_shardings)
            loss = with_explicit_axes(loss, self.mesh, *shardings)
        return _bind_frozen(loss, state)

    def run_optimizer(
        self,
        state: Any,
        grads: Any,
        loss: jax.Array,
        segment: SegmentNumbers | None = None,
    ) -> Any:
        """Return the state after the optimizer, run by the state's own
        `apply_gradients` if it has one.
        """
        tx = self.tx
        # `optax.contrib.sam` takes further arguments, but not the loss.
        known = inspect.signature(tx.update).parameters.values()
        if any(p.name == "value" or p.kind is p.VAR_KEYWORD for p in known):
            # Flax's `apply_gradients` passes no further arguments to an optimizer, so
            # the loss is bound to it.
            options = {"value": loss}
            if segment is not None:
                options["segment"] = segment
            update = functools.partial(tx.update, **options)
            tx = optax.GradientTransformation(tx.init, update)
        grads = cast_like(grads, state.params)
        if not hasattr(state, "apply_gradients"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return replace_fields(
                state, params=params, opt_state=opt_state, step=state.step + 1
            )
        if hasattr(state, "tx"):
            own = replace_fields(state, tx=tx).apply_gradients(grads=grads)
            return replace_fields(own, tx=state.tx)
        return state.apply_gradients(grads=grads)


def eval_sums(
    loss: SummableLoss,
    mesh: Mesh,
    state: Any,
    chunks: tuple[Any, ...],
    num_microbatches: jax.Array,
    first_row: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of losses and weights over the first microbatches of a batch that
    starts at a row; a program of `EvalStep`.
    """
    batch_KR = jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)
    # A loss function takes keys. Evaluation is the same every time, whatever the step.
    numbers = _row_numbers(batch_KR, first_row)
    rows = batch_KR, per_row_keys(random_key(0), jnp.int32(0), numbers)
    recipe = Recipe(mutable=carried(state))
    own, counts = _bind_frozen(loss, state), (num_microbatches, 1)
    sums = own.sums(state.params, rows, counts, recipe, mesh)
    return sums.loss, sums.weight


def select_step(keep: jax.Array, new: Any, old: Any) -> Any:
    """Return a state after a step, or a part of it, if it is kept, else the one before,
    with schedules that have moved on.
    """

    def select(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _is_injected(new):
            return new._replace(
                inner_state=select_step(keep, new.inner_state, old.inner_state)
            )
        return jnp.where(keep, new, old)

    return jax.tree.map(
        select,
        new,
        old,
        is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState) or _is_injected(x),
    )


def _is_injected(state: Any) -> bool:
    """Return whether this is the state of `optax.inject_hyperparams`, of any of its
    types.
    """
    return hasattr(state, "hyperparams") and hasattr(state, "inner_state")


def _is_finite(sums: Sums, grads: Any, state: Any) -> jax.Array:
    """Return whether the loss, the gradient and what the loss function has changed in
    `state` are finite.
    """
    # Only the changes: a running maximum may start at -infinity.
    changed = jax.tree.map(
        lambda x, before: jnp.where(x == before, jnp.zeros_like(x), x),
        sums.mutable,
        carried(state),
    )
    numbers = [
        x
        for x in jax.tree.leaves((grads, sums.loss, sums.weight, changed))
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in numbers]))


def _row_numbers(batch_KR: Any, first_row: Any) -> jax.Array:
    """Return the index in the global batch of every row (K, R)."""
    K, R = jax.tree.leaves(batch_KR)[0].shape[:2]
    return first_row + jnp.arange(K * R, dtype=jnp.int32).reshape(K, R)


def _bind_frozen(loss: Any, state: Any) -> SummableLoss:
    """Return the loss with the frozen arrays of a state, if it has any, as an
    argument.
    """
    frozen = getattr(state, "frozen", None)
    if frozen is None:
        return loss
    _check_support(loss, "`frozen`")
    return dataclasses.replace(
        loss, loss_fn=functools.partial(loss.loss_fn, frozen=frozen)
    )


def _check_support(loss: Any, feature: str) -> None:
    """Refuse a state with a feature that needs a loss function."""
    if not hasattr(loss, "loss_fn"):
        raise ConfigError(
            f"the state has {feature}, which {a_type(loss)} does not support",
            fix="train without pipeline stages and without a scale, and keep frozen"
            " arrays in `params`, where optax.transforms.freeze excludes them from the"
            " optimizer",
            key="state",
        )
