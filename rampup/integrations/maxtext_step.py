"""The batches of a ramp in MaxText, all of the final shape, and their gradients: two designs with one result.

Both designs take the place of MaxText's `gradient_accumulation_loss_and_grad`. They read the number of microbatches from the
batch, as a traced number, so one executable serves every batch size: it ends with the last microbatch that has a target.

Shape suffixes: K microbatches, R rows of one.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rampup.engine.accumulate import accumulate, take
from rampup.plan.per_device import RampupBatchManager

# What MaxText returns as means over the microbatches of the buffer. All are 0 for a microbatch that does not run.
LOSSES = ("moe_lb_loss", "indexer_loss", "mtp_loss")
MEANS = (*LOSSES, "moe_max_load_ratio_mean")


def loop_gradients(maxtexts: Callable[..., Any], loss_fn: Any, config: Any, *args: Any) -> tuple[Any, Any, Any]:
    """Return loss, aux and gradients by MaxText's own function, whose scan ends after the last microbatch with a target."""
    number = jnp.int32(0)

    def scan(body: Any, init: Any, batch_KR: Any, length: int) -> tuple[Any, Any]:
        """Return what `jax.lax.scan` does if microbatches without a target change nothing and have results of 0."""
        nonlocal number
        number = num_microbatches(batch_KR)
        carry, results = jax.eval_shape(lambda: body(dict(init), take(batch_KR, 0)))
        # The Python numbers among the sums take the types that they have after the first microbatch.
        sums = jax.tree.map(lambda x, s: x if isinstance(x, jax.Array) else jnp.asarray(x, s.dtype), dict(init), dict(carry))
        zeros = jax.tree.map(lambda s: jnp.zeros((length, *s.shape), s.dtype), results)

        def run(i: jax.Array, state: Any) -> Any:
            sums, found = state
            sums, new = body(dict(sums), take(batch_KR, i))
            return sums, jax.tree.map(lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0), found, new)

        return jax.lax.fori_loop(0, number, run, (sums, zeros))  # type: ignore[no-any-return]

    # MaxText's own code, in which `jax.lax.scan` is the function above. Its module stays as it is.
    lax = types.SimpleNamespace(**{**vars(jax.lax), "scan": scan})
    own = types.SimpleNamespace(**{**vars(jax), "lax": lax})
    loss, aux, grads = types.FunctionType(maxtexts.__code__, {**maxtexts.__globals__, "jax": own})(loss_fn, config, *args)
    ratio = config.gradient_accumulation_steps / jnp.maximum(number, 1)
    loss += (ratio - 1) * sum(aux[name] for name in LOSSES)
    return loss, {name: value * ratio if name in MEANS else value for name, value in aux.items()}, grads


def accumulated_gradients(
    loss_fn: Any, config: Any, model: Any, params: Any, params_shardings: Any, data: Any, dropout_rng: Any
) -> tuple[Any, Any, Any]:
    """Return loss, aux and gradients by `rampup.accumulate`: summed in float32, and reduced over the data axis once."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    K = config.gradient_accumulation_steps
    # As MaxText does: row i of microbatch j is row i * K + j of the batch.
    batch_KR = jax.tree.map(lambda x: x.reshape(-1, K, *x.shape[1:]).swapaxes(0, 1), data)

    def sums(params: Any, batch_R: Any, keys_R: Any, rest: Any) -> tuple[Any, ...]:
        local = nnx.merge(graphdef, params, rest, copy=True)
        loss, aux = loss_fn(local, config, dict(batch_R), None, None, is_train=True)
        _, _, rest = nnx.split(local, nnx.Param, ...)
        # What the model has sown is of a microbatch; nothing that this design allows reads it.
        aux = {**aux, "intermediate_outputs": {}, "has_moe_overflow": jnp.int32(aux["has_moe_overflow"])}
        return loss, aux["total_weights"], aux, rest

    number, mesh = num_microbatches(batch_KR), model.mesh
    found = accumulate(sums, params, batch_KR, number, mesh=mesh, param_shardings=params_shardings, mutable=rest)
    nnx.update(model, found.mutable)
    aux = {**found.aux, "has_moe_overflow": found.aux["has_moe_overflow"] > 0}
    return aux["xent_sum"] / jnp.maximum(found.weight, 1), aux, found.mean_grads(params)


def num_microbatches(batch_KR: Any) -> jax.Array:
    """Return the number of microbatches up to the last one with a target."""
    has_target = jnp.any(batch_KR["targets_segmentation"] != 0, axis=(1, 2))
    return jnp.max(jnp.where(has_target, jnp.arange(1, has_target.size + 1, dtype=jnp.int32), 0))


class RampLoader:
    """Cuts the rows of MaxText's loader into the batches of a ramp, in a buffer of the final shape, and loses none.

    A checkpoint of MaxText has the state of its Grain iterator, after whole loaded batches. While rows of one are left,
    the state that is saved is the one before it; after a resume, its used rows are skipped.
    """

    def __init__(self, own: Any, config: Any, manager: RampupBatchManager) -> None:
        self.own, self.config, self.manager = own, config, manager
        self.input_data_shardings = own.input_data_shardings
        self.size, self.loaded = manager.global_batch_size_end, config.global_batch_size_to_load
        self.held: Any = None  # a loaded batch of which rows are left
        self.skip = manager.total_used_samples % self.size  # its rows that are used
        self.before: Any = None  # the iterator's state before it
        # Reordered batches come from an iterator around the one that is saved.
        iterator = getattr(own.data_iterator, "data_iterator", own.data_iterator)
        source = getattr(iterator, "local_iterator", None)
        self.state_now: Callable[[], Any] | None = getattr(source, "get_state", None)
        if self.state_now is not None:
            source.get_state = lambda: self.state_now() if self.held is None else self.before
        self.fill = jax.jit(self._fill, out_shardings=own.input_data_shardings)

    def load_next_batch(self, rampup_manager: Any = None) -> Any:  # noqa: ARG002 - MaxText gives its manager
        """Return the next batch, and count it."""
        wanted, first = self.manager.global_batch_size_current, self.held
        first = self._load() if first is None else first
        second = self._load() if self.skip + wanted > self.size else first
        if wanted == self.size and self.skip == 0:
            batch = jax.device_put(first, self.input_data_shardings)
        else:
            # Only the first `size` of the rows that MaxText loads are to be trained on.
            rows = self.skip + np.arange(wanted)
            rows += (rows >= self.size) * (self.loaded - self.size)
            # MaxText takes row i * K + j of a batch as row i of microbatch j.
            K = self.config.gradient_accumulation_steps
            j, i = np.divmod(np.arange(wanted), self.size // K)
            index = np.full(self.loaded, -1, np.int32)
            index[i * K + j] = rows
            batch = self.fill(first, second, index)
        self.skip = (self.skip + wanted) % self.size
        self.held = second if self.skip else None
        self.manager.update()
        return batch

    def _load(self) -> Any:
        if self.state_now is not None:
            self.before = copy.deepcopy(self.state_now())
        return self.own.load_next_batch_pre_sharding()

    def _fill(self, first: Any, second: Any, index: jax.Array) -> Any:
        # With explicit axes, a gather has to say where its result is.
        where = {"out_sharding": self.input_data_shardings} if value_of(self.config, "shard_mode") == "explicit" else {}

        def take(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.concatenate([a, b]).at[jnp.maximum(index, 0)].get(**where)  # type: ignore[no-any-return]

        batch = jax.tree.map(take, first, second)
        return {**batch, "targets_segmentation": jnp.where((index >= 0)[:, None], batch["targets_segmentation"], 0)}


def value_of(config: Any, key: str) -> Any:
    """Return a value of MaxText's configuration, and that of an enumeration as text."""
    value = getattr(config, key)
    return getattr(value, "value", value)
