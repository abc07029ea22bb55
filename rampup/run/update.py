"""The mathematics of a training step: what a compiled program computes from a state and rows.

How a loss sums itself over the microbatches is its own business (`rampup.run.accumulate.SummableLoss`): one after the other, or
through the stages of a pipeline.

Shape suffixes: K microbatches of the input, R rows of one microbatch over all replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.errors import ConfigError
from rampup.run.accumulate import Counts, SummableLoss, Sums, accumulator, cast_like, per_row_keys, random_key, safe_reciprocal
from rampup.run.gradient_noise import NoiseMeter, second_moments
from rampup.run.mesh import BatchAxes, replicated
from rampup.run.offload import device_shardings, fetch_offloaded
from rampup.run.state import carried, replace_carried, replace_fields
from rampup.run.zero import constrain_all, gather_parameters, scattered_shardings

Metrics = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What the programs of a training step compute. A trace does not know how a state is sharded, so it is an argument.

    Attributes:
        loss, mesh, batch_axes, skip_nonfinite: see `rampup.run.step.train_step`.
        tx: the optimizer, or for `multi_steps` the `optax.MultiSteps` around it.
        key: the random key of the run. It is a constant of the programs.
        scatter_axes: the axes whose replicas split the optimizer's state (ZeRO-1), or None if each has all of it.
        measures_noise: also return S and G2, in the engine `fused`.
    """

    loss: SummableLoss
    tx: Any
    mesh: Mesh
    batch_axes: BatchAxes | None
    key: jax.Array
    skip_nonfinite: bool
    scatter_axes: BatchAxes | None
    measures_noise: bool

    def fused(self, shardings: Any, state: Any, chunks: tuple[Any, ...], counts: Counts) -> tuple[Any, Metrics]:
        """Run one optimizer step: sum over all microbatches, reduce once, run the optimizer once.

        Args:
            shardings: shardings of the state.
            state: the training state.
            chunks: arrays that are (K, R, ...) when joined.
            counts: microbatches of a pass, and passes. Their product is at most K.
        """
        state = fetch_offloaded(state, shardings)
        batch_KR = _join(chunks)
        keys_KR = per_row_keys(self.key, state.step, _row_numbers(batch_KR, 0))
        grad_shardings = self._grad_shardings(state.params, shardings.params)
        # Adam's second moments give the noise a second geometry. Those that are scattered over the replicas, or in host memory
        # between steps, do not: every microbatch would need them whole.
        is_at_hand = self.scatter_axes is None and device_shardings(shardings.opt_state) == shardings.opt_state
        moments = second_moments(state.opt_state, state.params) if self.measures_noise and is_at_hand else None
        with jax.named_scope("accumulate"):
            sums, grads, measured = self._sums_and_grads(state, batch_KR, keys_KR, counts, grad_shardings, moments)
        metrics = {"loss": sums.loss * safe_reciprocal(sums.weight), "weight": sums.weight, "aux": sums.aux, **measured}
        if self.scatter_axes is not None:
            # The forward pass needed whole parameters. Now each replica updates its own part of them.
            state = replace_fields(state, params=constrain_all(state.params, grad_shardings))
        with jax.named_scope("update"):
            new = self._run_optimizer(state, grads, metrics["loss"])
        # The step number moves on in any case, and what the loss function carries also without a weight.
        changes, mutable, scale = {"step": new.step}, sums.mutable, getattr(state, "dynamic_scale", None)
        if self.skip_nonfinite or scale is not None:
            # Decided on the device, without a round trip to the host: compute the update anyway and select the old values.
            # The selection reads the whole state once more, so a step of weight 0 alone is no reason to have it.
            is_finite = _is_finite(sums, grads, state)
            metrics["skipped"] = ~is_finite
            new = select_step(is_finite & (sums.weight != 0), new, state)
            mutable = select_step(is_finite, mutable, carried(state))
            if scale is not None:
                changes["dynamic_scale"] = _adapt_scale(scale, is_finite)
        new = replace_carried(new, mutable, **changes)
        if self.scatter_axes is not None:
            with jax.named_scope("gather"):
                params = gather_parameters(new.params, grad_shardings, self.mesh, self.scatter_axes)
                new = replace_fields(new, params=params)
        return new, metrics

    def multi_steps(self, shardings: Any, state: Any, so_far: Metrics, chunk: Any, first_row: jax.Array) -> tuple[Any, Metrics]:
        """Run one microbatch with `optax.MultiSteps`; the last of a step runs the optimizer.

        Args:
            shardings: shardings of the state.
            state: the training state.
            so_far: the metrics of the step's earlier microbatches; at first `zero_metrics`.
            chunk: the microbatch, arrays (1, R, ...).
            first_row: the index of its first row in the global batch, for the random keys.
        """
        state = fetch_offloaded(state, shardings)
        keys_KR = per_row_keys(self.key, state.step, _row_numbers(chunk, first_row))
        param_shardings = device_shardings(shardings.params)
        with jax.named_scope("accumulate"):
            # One pass of one microbatch.
            sums, grads, _ = self._sums_and_grads(state, chunk, keys_KR, (np.int32(1), np.int32(1)), param_shardings)
        # The loss of the metrics is the weighted mean over the microbatches so far. Only the gradients are averaged with equal
        # weights, by MultiSteps.
        weight = so_far["weight"] + sums.weight
        metrics = {
            "loss": (so_far["loss"] * so_far["weight"] + sums.loss) * safe_reciprocal(weight),
            "weight": weight,
            "aux": jax.tree.map(jnp.add, so_far["aux"], sums.aux),
        }
        mutable = sums.mutable
        if self.skip_nonfinite:
            # MultiSteps must see every microbatch, or its counter would leave the plan: zero this gradient, remember that, and
            # drop the update that the accumulated gradient leads to.
            is_finite = _is_finite(sums, grads, state)
            grads = zeros_if_not(is_finite, grads)
            mutable = select_step(is_finite, mutable, carried(state))
            metrics["skipped"] = so_far["skipped"] | ~is_finite
        with jax.named_scope("update"):
            new = self._run_optimizer(state, grads, metrics["loss"])
        opt_state = new.opt_state
        if self.skip_nonfinite or hasattr(state, "apply_gradients"):
            # Only the last microbatch changes the state: MultiSteps emits zero updates before, but a state may do more than
            # apply them. A step that is dropped takes the old inner state; the counters of MultiSteps always advance.
            keep = self.tx.has_updated(opt_state)
            if self.skip_nonfinite:
                keep &= ~metrics["skipped"] & (weight != 0)
            inner = select_step(keep, opt_state.inner_opt_state, state.opt_state.inner_opt_state)
            opt_state = opt_state._replace(inner_opt_state=inner)
            new = select_step(keep, replace_fields(new, opt_state=opt_state), replace_fields(state, opt_state=opt_state))
        return replace_carried(new, mutable, step=opt_state.gradient_step), metrics

    def zero_metrics(self, state: Any, chunk: Any) -> Metrics:
        """Return the metrics before the first microbatch of `multi_steps`: zeros, as all its calls have the same arguments."""
        keys_KR = jax.eval_shape(lambda: per_row_keys(self.key, jnp.int32(0), _row_numbers(chunk, 0)))
        eval_sums = functools.partial(_bind_frozen(self.loss, state).eval_sums, mesh=self.mesh, mutable=carried(state))
        # The types of sums do not depend on whether there is a gradient.
        sums = jax.eval_shape(eval_sums, state.params, chunk, keys_KR, np.int32(1))
        shapes = {"loss": sums.loss, "weight": sums.weight, "aux": sums.aux}
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.device_put(zeros | ({"skipped": np.False_} if self.skip_nonfinite else {}), replicated(self.mesh))

    def _grad_shardings(self, params: Any, shardings: Any) -> Any:
        """Return the shardings of the gradient: those of the parameters, or with ZeRO-1 those of each replica's own part."""
        shardings = device_shardings(shardings)
        if self.scatter_axes is None:
            return shardings
        shapes = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params, shardings)
        return scattered_shardings(shapes, self.mesh, self.scatter_axes)

    def _sums_and_grads(
        self, state: Any, batch_KR: Any, keys_KR: jax.Array, counts: Counts, grad_shardings: Any, moments: Any = None
    ) -> tuple[Sums, Any, Metrics]:
        """Return the sums, the gradient of the mean loss at least in float32, and the metrics that are taken from it.

        The gradient of integer parameters is zero.
        """
        params, loss, scale = state.params, _bind_frozen(self.loss, state), getattr(state, "dynamic_scale", None)
        if _has_integers(params):
            loss = _wrap(loss, "loss_fn", lambda fn: lambda p, *args: fn(_fill(p, params), *args), "integer parameters")
        if scale is not None:
            loss = _scale_loss(loss, scale.scale)
        grad_shardings = _floating(grad_shardings, params)
        options = {"mesh": self.mesh, "param_shardings": grad_shardings, "mutable": carried(state)}
        meter = None
        if self.measures_noise:
            moments = None if moments is None else _floating(moments, params)
            meter = options["noise"] = NoiseMeter.of(grad_shardings, self.mesh, self.batch_axes, moments)
        sums, grads = loss.sums_and_grads(_floating(params, params), batch_KR, keys_KR, counts, **options)
        if scale is not None:
            sums, grads = _unscale(sums, grads, scale.scale)
        if meter is None:
            measured = {"grad_norm": optax.tree.norm(grads)}
        else:
            with jax.named_scope("gradient_noise"):
                measured = meter.metrics(sums.noise, grads, sums.weight)
        if _has_integers(params):
            grads = _fill(grads, jax.tree.map(jnp.zeros_like, params))
        return sums, grads, measured

    def _run_optimizer(self, state: Any, grads: Any, loss: jax.Array) -> Any:
        """Return the state after the optimizer, run by the state's own `apply_gradients` if it has one."""
        tx = self.tx
        if isinstance(tx, (optax.GradientTransformationExtraArgs, optax.MultiSteps)):
            # Flax's `apply_gradients` passes no further arguments to an optimizer, so the loss is bound to it.
            tx = optax.GradientTransformation(tx.init, functools.partial(self._update_with_loss, loss))
        grads = cast_like(grads, state.params)
        if not hasattr(state, "apply_gradients"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = replace_fields(state, params=params, opt_state=opt_state, step=state.step + 1)
        elif hasattr(state, "tx"):
            new = replace_fields(replace_fields(state, tx=tx).apply_gradients(grads=grads), tx=state.tx)
        else:
            new = state.apply_gradients(grads=grads)
        if not _has_integers(state.params):
            return new
        # Decay and the like leave integers alone, and the state that an optimizer keeps for them keeps its type.
        params = jax.tree.map(lambda new, old: new if _is_floating(old) else old, new.params, state.params)
        return replace_fields(new, params=params, opt_state=cast_like(new.opt_state, state.opt_state))

    def _update_with_loss(self, loss: jax.Array, *args: Any) -> Any:
        """Run an optimizer that accepts extra arguments, with the loss if it accepts that."""
        try:
            return self.tx.update(*args, value=loss)
        except TypeError as error:
            # `optax.contrib.sam` accepts others only. No signature tells: `optax.chain` passes on whatever it gets.
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            return self.tx.update(*args)


def eval_sums(
    loss: SummableLoss, mesh: Mesh, shardings: Any, state: Any, chunks: tuple[Any, ...], num_microbatches: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of losses and weights over the first microbatches of a batch; a program of `EvalStep`."""
    state = fetch_offloaded(state, shardings)
    batch_KR = _join(chunks)
    # A loss function takes keys. Evaluation is the same every time, whatever the step.
    keys_KR = per_row_keys(random_key(0), jnp.int32(0), _row_numbers(batch_KR, 0))
    options = {"mesh": mesh, "mutable": carried(state)}
    sums = _bind_frozen(loss, state).eval_sums(state.params, batch_KR, keys_KR, num_microbatches, **options)
    return sums.loss, sums.weight


def all_finite(*trees: Any) -> jax.Array:
    """Return whether every floating-point number is finite, as a traced bool.

    Example:
        >>> bool(all_finite({"a": jnp.ones(2), "b": jnp.int32(3)})), bool(all_finite(jnp.array([1.0, jnp.nan])))
        (True, False)
    """
    leaves = [leaf for leaf in jax.tree.leaves(trees) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.array(True)


def zeros_if_not(condition: jax.Array, tree: Any) -> Any:
    """Return the tree if the condition holds, else zeros. A product with 0 would keep NaN and infinity."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def select_step(keep: jax.Array, new: Any, old: Any) -> Any:
    """Return a state after a step, or a part of it, if the step is kept (a traced bool), else the one before.

    The schedules of a skipped step move on, so that it does not shift the learning rate: the states of
    `optax.scale_by_schedule` and the counts of `optax.inject_hyperparams`. Other counts stay, such as Adam's of its updates.
    """

    def select(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return new
        if _is_injected(new):
            return new._replace(inner_state=select_step(keep, new.inner_state, old.inner_state))
        return jnp.where(keep, new, old)

    return jax.tree.map(select, new, old, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState) or _is_injected(x))


def _is_injected(state: Any) -> bool:
    """Return whether this is the state of `optax.inject_hyperparams`, of any of its types."""
    return hasattr(state, "hyperparams") and hasattr(state, "inner_state") and hasattr(state, "_replace")


def _is_finite(sums: Sums, grads: Any, state: Any) -> jax.Array:
    """Return whether the loss, the gradient and what the loss function has changed in `state` are finite."""
    # Only the changes: a running maximum may start at -infinity.
    changed = jax.tree.map(lambda x, before: jnp.where(x == before, jnp.zeros_like(x), x), sums.mutable, carried(state))
    return all_finite((grads, sums.loss, sums.weight, changed))


def _join(chunks: tuple[Any, ...]) -> Any:
    """Return chunks of microbatches as one: arrays (K, R, ...)."""
    return chunks[0] if len(chunks) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *chunks)


def _row_numbers(batch_KR: Any, first_row: Any) -> jax.Array:
    """Return the index in the global batch of every row (K, R)."""
    K, R = jax.tree.leaves(batch_KR)[0].shape[:2]
    return first_row + jnp.arange(K * R, dtype=jnp.int32).reshape(K, R)


def _is_floating(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _has_integers(params: Any) -> bool:
    return not all(map(_is_floating, jax.tree.leaves(params)))


def _floating(tree: Any, params: Any) -> Any:
    """Return a tree like the parameters with None in the place of integers: JAX differentiates floating-point arrays only."""
    return jax.tree.map(lambda p, x: x if _is_floating(p) else None, params, tree)


def _fill(tree: Any, values: Any) -> Any:
    """Return a tree with the leaves of another one where it has None."""
    return jax.tree.map(lambda x, value: value if x is None else x, tree, values, is_leaf=lambda x: x is None)


def _bind_frozen(loss: SummableLoss, state: Any) -> SummableLoss:
    """Return the loss with the frozen arrays of a state, if it has any, as an argument."""
    frozen = getattr(state, "frozen", None)
    return loss if frozen is None else _wrap(loss, "loss_fn", lambda fn: functools.partial(fn, frozen=frozen), "`frozen`")


def _scale_loss(loss: SummableLoss, scale: jax.Array) -> SummableLoss:
    """Return the loss times a scale, which keeps small gradients of float16 from vanishing."""

    def scaled(fn: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        value, *rest = fn(*args)
        # At least in float32, where the scale does not overflow.
        return accumulator(value) * scale, *rest

    # In a pipeline, its last stage computes the loss.
    part = "last" if hasattr(loss, "last") else "loss_fn"
    return _wrap(loss, part, lambda fn: functools.partial(scaled, fn), "`dynamic_scale`")


def _unscale(sums: Sums, grads: Any, scale: jax.Array) -> tuple[Sums, Any]:
    """Return the sums and gradients of a scaled loss as those of the loss."""
    noise = None if sums.noise is None else sums.noise._replace(squares=sums.noise.squares / scale**2)
    return sums._replace(loss=sums.loss / scale, noise=noise), jax.tree.map(lambda g: g / scale, grads)


def _adapt_scale(dynamic_scale: Any, is_finite: jax.Array) -> Any:
    """Return a Flax `DynamicScale` after a step whose gradients were finite or not."""
    # Flax adapts the scale in a method that differentiates a function. Give it one whose gradient is as finite as the step's.
    return dynamic_scale.value_and_grad(lambda x: x * jnp.where(is_finite, 1.0, jnp.nan))(jnp.float32(0))[0]


def _wrap(loss: Any, part: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], reason: str) -> SummableLoss:
    """Return a loss with one of its functions wrapped, as `reason`, something that the state has, requires."""
    if not dataclasses.is_dataclass(loss) or not hasattr(loss, part):
        fix = "keep such arrays in `params` as floating-point numbers that optax.transforms.freeze excludes from the optimizer"
        fix += ", or train without a pipeline"
        if reason == "`dynamic_scale`":
            fix = "scale the loss in its own functions, or train in bfloat16 or float32, which need no scale"
        raise ConfigError(f"the state has {reason}, which a {type(loss).__name__} does not support; {fix}", key="state")
    return dataclasses.replace(loss, **{part: wrapper(getattr(loss, part))})  # type: ignore[type-var,return-value]
