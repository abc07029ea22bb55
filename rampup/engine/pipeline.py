"""Pipelined training over the mesh axis `stage`: lock-step 1F1B, in one executable for
any number of microbatches.

Each of p stages has consecutive layers, or v chunks of consecutive layers. In one tick,
every stage runs at most one forward and then at most one backward. At the end of the
tick, activations move to the next stage and gradients to the previous one.
`pipeline_sums` runs this in one `shard_map`, and the ticks are a loop whose length
follows from the number m of microbatches in a pass, which may be traced. If a plan
fixes m, a step may need several passes; each fills and drains the pipeline.

Shape suffixes: K microbatches in the buffer, R rows of one microbatch, n parts of a sum
of squares, D replicas.
Letters: p stages, stage s, v repeats, repeat r, m microbatches of a pass, microbatch k,
    tick t, unit u.
"""

# The schedule of m = 4 microbatches in p = 3 stages; Fk and Bk are the forward and the backward of microbatch k:
#
#     tick     0   1   2      3      4      5      6   7
#     stage 0  F0  F1  F2     F3     B0     B1     B2  B3
#     stage 1      F0  F1     F2 B0  F3 B1  B2     B3
#     stage 2          F0 B0  F1 B1  F2 B2  F3 B3
#
# Forward. Microbatch k enters stage 0 at tick k and moves on by one stage per tick, so it is on stage s at tick k + s:
#     at tick t, stage s runs the forward of microbatch t - s.
# Backward. The last stage starts the backward of k in the tick of its forward, k + p - 1. The gradient moves back by one stage
# per tick and is on stage s at tick k + (p - 1) + (p - 1 - s):
#     at tick t, stage s runs the backward of microbatch t - 2(p - 1) + s.
# Length. The last backward is that of m - 1 on stage 0 at tick m - 1 + 2(p - 1): there are m + 2(p - 1) ticks. m + p - 1 of
# them have a forward on some stage and m + p - 1 have a backward. The exchange at its end makes a tick as long as its longest
# stage, so a pass takes (m + p - 1)(tF + tB), if tF and tB are the times of a stage's forward and backward.
#
# Memory. A backward needs the input of its forward, 2(p - 1 - s) ticks earlier on stage s. Stage 0 waits longest: when it runs
# the backward of k, it has already run the forwards up to k + 2(p - 1), and the inputs of k to k + 2(p - 1) are alive. So a
# ring buffer of 2p - 1 slots, with microbatch k in slot k mod (2p - 1), never overwrites an input that is needed, for any m.
#
# With v repeats (interleaved schedule), the layers are split into v * p chunks, and chunk r * p + s is the r-th one of stage s.
# A microbatch passes through all stages v times: p ticks after it entered stage 0 it arrives there again. In between, stage 0
# runs p - 1 others. So microbatches go in groups of p, and stage 0 runs all repeats of a group before the next one. A unit is
# one microbatch in one repeat. Units are numbered in the order in which stage 0 runs them:
#
#     unit u = group * (v * p) + turn * p + (microbatch within the group)
#
# where `turn` counts repeats in the order in which they run: r = turn in the forward and r = v - 1 - turn in the backward. With
# p = 2, v = 2, m = 4, and a, b for the two repeats:
#
#     tick     0    1    2    3        4        5        6        7        8        9    10   11
#     stage 0  F0a  F1a  F0b  F1b      F2a B0b  F3a B1b  F2b B0a  F3b B1a  B2b      B3b  B2a  B3a
#     stage 1       F0a  F1a  F0b B0b  F1b B1b  F2a B0a  F3a B1a  F2b B2b  F3b B3b  B2a  B3a
#
# Forward: at tick t, stage s runs unit t - s. Unit u leaves stage p - 1 at tick u + p - 1 and arrives at stage 0 at tick u + p,
# which is when stage 0 runs unit u + p: the same microbatch in its next turn. The permutation of the stages is a ring for this.
# Backward: the first one, unit 0 in the order of the backwards, is microbatch 0 in repeat v - 1. Its forward is unit
# (v - 1) * p and runs on stage p - 1 at tick (v - 1) * p + (p - 1) = v * p - 1. The backward follows in that tick. Hence
#     at tick t, stage s runs the backward of unit t - (v * p - 1) - (p - 1 - s).
# The input of backward unit u in repeat r was stored by forward unit u + (r - turn) * p. Between the two are
# 2(v - r) * p - 2 - 2s ticks, at most 2 * v * p - 2 (r = 0, s = 0). By the argument above, 2 * v * p - 1 slots suffice.
# Length. A tick runs a chunk, 1/v of a stage. If p divides m, v * m + p - 1 ticks have a forward and as many a backward, so a
# pass takes (m + (p - 1) / v)(tF + tB): the idle time is 1/v of that without repeats. If p does not divide m, the last group is
# not full, and its units without a microbatch are idle: `rampup.plan.pipeline.pass_ticks` counts them.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.accumulate import take
from rampup.engine.contract import Counts, check_aux, signature_problem
from rampup.engine.gradient_noise import NoiseSums, divide_by_weights
from rampup.engine.mesh import STAGE, BatchAxes, auto_view
from rampup.engine.replicas import Replicas
from rampup.engine.sums import (
    Recipe,
    Sums,
    accumulator_type,
    as_summed,
    safe_reciprocal,
)
from rampup.errors import ConfigError, PipelineShapeError, a_type
from rampup.plan.numbers import nearest_multiples
from rampup.plan.pipeline import pass_ticks

LAYERS = "layers"
_BY_STAGE = PartitionSpec(STAGE)
Params = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedLoss:
    """A loss in three parts, so that its layers can be spread over pipeline stages. It
    takes the place of a loss function.

    The parameters are a dict: `layers`, stacked along the first axis, and the
    parameters of the first and the last part, which every stage has. With repeats,
    `permute_layers` brings them into the order of
    `rampup.plan.pipeline.stage_layer_order`.

    Attributes:
        first: `first(params, batch, keys) -> x`, before the layers; `params` without
            `layers`; `batch` has the rows of one microbatch on one replica, and `keys`
            one random key per row. x is a pytree of floating-point arrays.
        stage: `stage(layers, x, batch, keys, first_layer) -> x`, some consecutive
            layers; x keeps its shapes and types. `first_layer` is the index in the
            model of the first of `layers`.
        last: `last(params, x, batch, keys) -> (loss_sum, weight_sum, aux)`, after the
            layers: sums over the rows.
        num_repeats: chunks of layers per stage, v.
        remat_policy: None: keep only the input of a chunk's forward, and compute the
            chunk again in its backward. A policy of `jax.checkpoint`, such as
            `jax.checkpoint_policies.dots_with_no_batch_dims_saveable`: keep what it
            says as well, for up to 2*v*p - 1 chunks per stage.
        skip_idle: True: a stage without a microbatch skips its tick (`lax.cond`), and
            only the first and the last stage run the first and the last part. This can
            deadlock if the compiler puts a collective over another axis, such as fsdp
            or tensor, inside the branch. False: every stage computes everything in
            every tick. None: True without such axes.
        batch_axes, reduction_dtype, accumulator_dtype: see `rampup.AccumulatedLoss`.

    Example:
        >>> loss = PipelinedLoss(
        ...     first=lambda params, batch, keys: batch["x"] * params["scale"],
        ...     stage=lambda layers, x, batch, keys, first_layer: jax.lax.scan(
        ...         lambda x, w: (jnp.tanh(x * w), None), x, layers
        ...     )[0],
        ...     last=lambda params, x, batch, keys: (jnp.sum(x**2), x.size, {}),
        ... )
        >>> loss.num_repeats
        1
    """

    first: Callable[..., Any]
    stage: Callable[..., Any]
    last: Callable[..., tuple[Any, Any, Any]]
    num_repeats: int = 1
    remat_policy: Callable[..., Any] | None = None
    skip_idle: bool | None = None
    batch_axes: BatchAxes | None = None
    reduction_dtype: Any = None
    accumulator_dtype: Any = None

    def check(self, mesh: Mesh, engine: str) -> None:  # noqa: ARG002 - `pipeline_sums` checks the mesh
        """Refuse the engine `multi_steps`.

        Args:
            mesh: the devices, which are checked when the sums are traced.
            engine: `fused` or `multi_steps`.

        Raises:
            ConfigError: the engine is `multi_steps`.
        """
        if engine == "multi_steps":
            problem = (
                "gradient_accumulation=multi_steps does not support a pipeline; use"
                " fused"
            )
            raise ConfigError(problem, key="gradient_accumulation", nearest=("fused",))

    def sums_and_grads(
        self,
        params: Params,
        batch_KR: Any,
        keys_KR: Any,
        counts: Counts,
        recipe: Recipe,
        *,
        mesh: Mesh,
        param_shardings: Any,
    ) -> tuple[Sums, Any]:
        """Return the sums and the gradient of the mean loss; see `SummableLoss`.

        Args:
            params: the parameters.
            batch_KR, keys_KR: rows and a random key for each, arrays (K, R, ...) for K
                microbatches of R rows.
            counts: microbatches of a pass, and passes; int32.
            recipe: what else to sum up, and how.
            mesh: the devices.
            param_shardings: the shardings of the gradients.
        """
        sums = pipeline_sums(
            self, params, (batch_KR, keys_KR), counts, recipe, mesh, param_shardings
        )
        return recipe.finalize(sums._replace(grads=None), sums.mean_grads())

    def eval_sums(
        self,
        params: Params,
        batch_KR: Any,
        keys_KR: jax.Array,
        num_microbatches: jax.Array,
        *,
        mesh: Mesh,
        mutable: Any = None,
    ) -> Sums:
        """Return the sums without gradients; see `SummableLoss`.

        Args:
            params: the parameters.
            batch_KR, keys_KR: rows and a random key for each, arrays (K, R, ...).
            num_microbatches: how many of the K count, int32.
            mesh: the devices.
            mutable: what the loss reads, and does not carry.
        """
        return pipeline_sums(
            self,
            params,
            (batch_KR, keys_KR),
            (num_microbatches, 1),
            Recipe(mutable=mutable),
            mesh,
        )


def pipeline_sums(
    loss: PipelinedLoss,
    params: Params,
    rows: Any,
    counts: Any,
    recipe: Recipe,
    mesh: Mesh,
    param_shardings: Any = None,
) -> Sums:
    """Sum loss and gradients over microbatches through the pipeline, or without
    `param_shardings` the loss alone.
    """
    if recipe.mutable is not None:
        raise ConfigError(
            "the state has `mutable`, which a PipelinedLoss cannot use; put it into the"
            " parameters"
        )
    # As in the program below, a `jax.shard_map` of the loss finds the mesh.
    with jax.sharding.use_abstract_mesh(auto_view(mesh).abstract_mesh):
        check_shapes(
            loss,
            params,
            rows[0],
            rows[1],
            mesh,
            measures_noise=recipe.noise is not None,
        )

    axes = BatchAxes.of(mesh, loss.batch_axes)

    def sum_stage(
        reduce: Any,
        psum: Any,
        params: Any,
        batch_KR: Any,
        keys_KR: Any,
        counts: Any,
        recipe: Recipe,
    ) -> Sums:
        m, passes = counts
        own = (params[LAYERS], _without_layers(params), (batch_KR, keys_KR))
        stage = Stage(loss, *own, mesh, recipe, param_shardings)
        sums = jax.lax.fori_loop(
            0,
            passes,
            lambda index, sums: stage.run_pass(index * m, m, sums),
            stage.zeros(),
        )
        if sums.grads is not None:
            chunks, shared = sums.grads
            layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), chunks)
            sums = sums._replace(grads={LAYERS: layers, **shared})
        if sums.noise is not None:
            sums = sums._replace(noise=_by_replica(sums.noise, axes, mesh))
        return reduce(sums, recipe)

    replicas = stage_replicas(loss, params, mesh, param_shardings)
    run = replicas.run(sum_stage, _recipe_specs(recipe))
    m, passes = (jnp.asarray(count, jnp.int32) for count in counts)
    sums = run(params, *rows, (m, passes), recipe)
    if sums.noise is None:
        return sums
    # The squares of a microbatch are spread over the stages, and its weight is known on
    # the last one, so they are divided here, when all are there.
    squares_nDK = jnp.moveaxis(sums.noise.squares, 0, -2)
    noise = divide_by_weights(
        squares_nDK.reshape(*squares_nDK.shape[:-2], -1), sums.noise.blocks.ravel()
    )
    return sums._replace(noise=noise)


def stage_replicas(
    loss: PipelinedLoss, params: Params, mesh: Mesh, param_shardings: Any
) -> Replicas:
    """Return how the stages of all replicas run: each takes its layers and all other
    parameters.
    """
    stage, everywhere = (
        NamedSharding(auto_view(mesh), spec) for spec in (_BY_STAGE, PartitionSpec())
    )
    shards = {
        name: jax.tree.map(lambda _: stage if name == LAYERS else everywhere, part)  # noqa: B023
        for name, part in params.items()
    }
    return Replicas(
        mesh=mesh,
        axes=BatchAxes.of(mesh, loss.batch_axes),
        shardings=param_shardings,
        shards=shards,
        has_stages=True,
        reduction_dtype=loss.reduction_dtype,
    )


def _by_replica(noise: NoiseSums, axes: BatchAxes, mesh: Mesh) -> NoiseSums:
    """Return the squares and weights of this replica's microbatches in a row of their
    own (D, ..., K), which the sum over the replicas leaves apart.
    """
    D = axes.num_replicas(mesh)
    row = jax.lax.axis_index(axes.replica) if D > 1 else 0
    return NoiseSums(*(jnp.zeros((D, *x.shape), x.dtype).at[row].set(x) for x in noise))


def _recipe_specs(recipe: Recipe) -> Any:
    """Return how a stage takes a recipe: whole, but for the moments of its layers."""
    whole: Any = PartitionSpec()
    if recipe.noise is None or recipe.noise.moments is None:
        return whole
    moments = {
        name: _BY_STAGE if name == LAYERS else whole for name in recipe.noise.moments
    }
    noise = replace(recipe.noise, moments=moments)
    return replace(recipe, noise=noise, scale=whole)


def permute_layers(tree: Any, order: Sequence[int]) -> Any:
    """Return a tree with all stacked layers (every leaf under a key `layers`) in
    another order. Other leaves are unchanged.

    `order` has for every position the layer that goes there: `stage_layer_order`, or
    its inverse `np.argsort(order)`.
    """
    index = np.asarray(order)
    if (index == np.arange(len(index))).all():
        return tree

    def permute(path: tuple[Any, ...], leaf: Any) -> Any:
        is_stacked = any(getattr(part, "key", None) == LAYERS for part in path)
        return jnp.take(leaf, index, axis=0) if is_stacked and jnp.ndim(leaf) else leaf

    return jax.tree_util.tree_map_with_path(permute, tree)


class Stage:
    """What one stage computes with its `layers` and the other parameters; see the
    schedule at the top of the file.
    """

    def __init__(
        self,
        loss: PipelinedLoss,
        layers: Any,
        shared: Any,
        rows: Any,
        mesh: Mesh,
        recipe: Recipe,
        param_shardings: Any,
    ) -> None:
        self.loss, self.shared, self.recipe = loss, shared, recipe
        self.shardings = param_shardings
        self.with_grads = param_shardings is not None
        self.batch_KR, self.keys_KR = rows
        self.p, self.v = mesh.shape[STAGE], loss.num_repeats
        self.s = jax.lax.axis_index(STAGE)
        # (v, layers of a chunk, ...): chunk r of this stage is chunk r * p + s of the
        # model.
        self.chunks = jax.tree.map(self._as_chunks, layers)
        self.chunk_size = jax.tree.leaves(self.chunks)[0].shape[1]
        # Ticks from the first forward of a pass to its first backward, and slots for
        # the inputs of forwards.
        self.lag = self.v * self.p - 1
        self.ring_size = 2 * self.v * self.p - 1
        replica = BatchAxes.of(mesh, loss.batch_axes).replica
        other_axes = math.prod(
            mesh.shape[axis]
            for axis in mesh.axis_names
            if axis not in (STAGE, *replica)
        )
        self.skips_idle = other_axes == 1 if loss.skip_idle is None else loss.skip_idle

    def zeros(self) -> Sums:
        """Return the sums over no microbatch."""
        x = jax.eval_shape(self._first, 0)
        results = jax.eval_shape(self._last, x, 0)
        loss, weight, aux = jax.tree.map(
            lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)),
            results,
        )
        grads = None
        if self.with_grads:
            dtype = self.loss.accumulator_dtype
            grads = jax.tree.map(
                lambda x: jnp.zeros(x.shape, accumulator_type(x.dtype, dtype)),
                (self.chunks, self.shared),
            )
        meter, noise = self.recipe.noise, None
        if meter is not None:
            K = self.keys_KR.shape[0]
            geometries = 1 if meter.moments is None else 2
            dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(grads))
            noise = NoiseSums(
                jnp.zeros((geometries, *meter.shards, K), dtype),
                jnp.zeros((K,), weight.dtype),
            )
        return Sums(grads, loss, weight, aux, noise=noise)

    def run_pass(self, start: Any, m: Any, sums: Sums) -> Sums:
        """Run microbatches start to start + m - 1 of the buffer through the pipeline
        and add them to the sums.
        """
        forward_ticks = pass_ticks(self.p, m, self.v)

        # Placeholders are ones: their results are dropped, but a NaN in them would stop
        # a run with jax_debug_nans.
        def ones(shapes: Any) -> Any:
            return jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes)

        x = ones(jax.eval_shape(self._first, 0))
        ring = pullback = None
        if self.with_grads:
            kept: Any = ()
            if self.loss.remat_policy is not None:
                pullback, kept = jax.eval_shape(
                    self._pullback, x, jnp.int32(0), jnp.int32(0)
                )
            ring = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (self.ring_size, *x.shape)),
                (x, ones(kept)),
            )

        def unit_of(unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return whether a unit has a microbatch, its index in the buffer and its
            turn: valid indices in any case.
            """
            group = unit // (self.v * self.p)
            rest = unit % (self.v * self.p)
            k, turn = group * self.p + rest % self.p, rest // self.p
            is_real = (unit >= 0) & (k < m)
            return (
                is_real,
                start + jnp.where(is_real, k, 0),
                jnp.where(is_real, turn, 0),
            )

        def forward(t: jax.Array, arrived: Any, ring: Any) -> tuple[Any, Any]:
            """Run the forward of unit t - s; return the activation to send, and the
            ring with what the backward will need.
            """
            with jax.named_scope("forward_tick"):
                unit = t - self.s
                is_real, k, r = unit_of(unit)
                x = self._if(
                    is_real & (self.s == 0) & (r == 0), lambda: self._first(k), arrived
                )
                is_last = (self.s == self.p - 1) & (r == self.v - 1)
                # Without a remat policy, the backward computes the chunk again. For the
                # last chunk it does so in this very tick, so its forward is left to it,
                # and y is the chunk's input.
                runs = is_real & ~is_last if self.loss.remat_policy is None else is_real
                y, kept = self._if(
                    runs,
                    lambda: self._forward_chunk(x, k, r, pullback),
                    (x, take(ring[1], 0)),
                )
                slot = unit % self.ring_size
                return y, jax.tree.map(
                    lambda ring, x: ring.at[slot].set(
                        jnp.where(is_real, x, ring[slot])
                    ),
                    ring,
                    (x, kept),
                )

        def backward(
            t: jax.Array, y: Any, ring: Any, arrived: Any, sums: Sums
        ) -> tuple[Sums, Any]:
            """Run the backward of unit t - (v*p - 1) - (p - 1 - s); return the sums and
            the gradient to send.
            """
            with jax.named_scope("backward_tick"):
                unit = t - self.lag - (self.p - 1 - self.s)
                is_real, k, turn = unit_of(unit)
                r = self.v - 1 - turn
                stash = take(ring, (unit + (r - turn) * self.p) % self.ring_size)

                def compute() -> Any:
                    return self._backward_chunk(sums, stash, pullback, y, arrived, k, r)

                return self._if(is_real, compute, (sums, arrived))

        def tick(t: jax.Array, carry: Any) -> Any:
            """Run tick t; the carry is the sums, the ring buffer, and the activation
            and the gradient that arrived.
            """
            sums, ring, x, gradient = carry
            if not self.with_grads:
                with jax.named_scope("evaluation_tick"):
                    is_real, k, r = unit_of(t - self.s)
                    x = self._if(
                        is_real & (self.s == 0) & (r == 0), lambda: self._first(k), x
                    )
                    y = self._if(
                        is_real, lambda: self.loss.stage(*self._inputs(x, k, r)), x
                    )
                    is_last = is_real & (self.s == self.p - 1) & (r == self.v - 1)
                    sums = self._if(
                        is_last, lambda: _add_loss(sums, self._last(y, k), k), sums
                    )
                return sums, ring, self._send(y, 1), gradient
            y, ring = self._if_any_stage(
                t < forward_ticks, lambda: forward(t, x, ring), otherwise=(x, ring)
            )
            sums, gradient = self._if_any_stage(
                t >= self.lag,
                lambda: backward(t, y, ring, gradient, sums),
                otherwise=(sums, gradient),
            )
            # The only communication of a tick: two permutes around the ring of stages,
            # by all of them.
            return sums, ring, self._send(y, 1), self._send(gradient, -1)

        num_ticks = forward_ticks + (self.lag if self.with_grads else 0)
        return jax.lax.fori_loop(0, num_ticks, tick, (sums, ring, x, x))[0]

    def _forward_chunk(
        self, x: Any, k: Any, r: Any, pullback: Pullback | None
    ) -> tuple[Any, Any]:
        """Return a chunk's output, and the values that its backward needs in addition
        to its input.
        """
        inputs = self._inputs(x, k, r)
        if pullback is None:
            return self.loss.stage(*inputs), ()
        y, own = self._vjp_chunk(*inputs)
        return y, pullback.kept(own)

    def _pullback(self, x: Any, k: Any, r: Any) -> tuple[Pullback, tuple[Any, ...]]:
        """Return the structure of the pullback of a chunk, and what it keeps."""
        inputs = self._inputs(x, k, r)
        _, own = self._vjp_chunk(*inputs)
        pullback = Pullback(own, inputs)
        return pullback, pullback.kept(own)

    def _inputs(self, x: Any, k: Any, r: Any) -> tuple[Any, ...]:
        """Return the arguments of `PipelinedLoss.stage` for microbatch k in chunk r."""
        return (
            take(self.chunks, r),
            x,
            *self._microbatch(k),
            (r * self.p + self.s) * self.chunk_size,
        )

    def _vjp_chunk(self, chunk: Any, x: Any, *others: Any) -> tuple[Any, Any]:
        policy = self.loss.remat_policy
        stage = (
            jax.checkpoint(self.loss.stage, policy=policy)
            if policy
            else self.loss.stage
        )
        return jax.vjp(lambda chunk, x: stage(chunk, x, *others), chunk, x)

    def _backward_chunk(
        self,
        sums: Sums,
        stash: Any,
        pullback: Pullback | None,
        y: Any,
        arrived: Any,
        k: jax.Array,
        r: jax.Array,
    ) -> tuple[Sums, Any]:
        """Add the gradients of one unit to the sums; return the gradient of its
        input.
        """
        x, kept = stash
        inputs = self._inputs(x, k, r)
        if pullback is None:
            y, run = self._vjp_chunk(*inputs)
        else:
            run = pullback.restore(inputs, kept)
        is_last = (self.s == self.p - 1) & (r == self.v - 1)
        sums, gradient = self._if(
            is_last, lambda: self._loss_gradient(sums, y, k), (sums, arrived)
        )
        chunk_gradient, gradient = run(gradient)
        chunk_gradient = self._of_sum(chunk_gradient, k)
        chunks, shared = sums.grads
        chunks = jax.tree.map(
            lambda total, g: total.at[r].add(g.astype(total.dtype)),
            chunks,
            chunk_gradient,
        )
        sums = sums._replace(noise=self._add_squares(sums.noise, chunk_gradient, k, r))
        is_first = (self.s == 0) & (r == 0)
        shared, noise = self._if(
            is_first,
            lambda: self._first_gradient(shared, sums.noise, gradient, k),
            (shared, sums.noise),
        )
        return sums._replace(grads=(chunks, shared), noise=noise), gradient

    def _add_squares(
        self,
        sums: NoiseSums | None,
        gradient: Any,
        k: jax.Array,
        r: jax.Array | None = None,
    ) -> NoiseSums | None:
        """Add the squares of a part of the gradient of microbatch k: of chunk r of the
        layers, or of the shared parameters.
        """
        meter = self.recipe.noise
        if meter is None or sums is None:
            return sums
        part: Callable[[Any], Any] = (
            _without_layers if r is None else lambda tree: tree[LAYERS]
        )
        gradient, moments = (
            jax.tree.map(as_summed, gradient),
            None if meter.moments is None else part(meter.moments),
        )
        if moments is not None and r is not None:
            moments = take(jax.tree.map(self._as_chunks, moments), r)
        squares = meter.squares(gradient, moments, part(self.shardings), varying=k)
        return sums._replace(squares=sums.squares.at[..., k].add(squares))

    def _as_chunks(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.v, -1, *x.shape[1:])

    def _loss_gradient(self, sums: Sums, y: Any, k: jax.Array) -> tuple[Sums, Any]:
        """Add the loss of a microbatch and the gradients of the last part to the sums;
        return the gradient of y.
        """

        def last(shared: Any, y: Any) -> tuple[Any, Any]:
            loss, weight, aux = self.loss.last(shared, y, *self._microbatch(k))
            if self.recipe.scale is None:
                return loss, (loss, weight, aux)
            mean = as_summed(loss) * safe_reciprocal(self._weight(k))
            return mean * self.recipe.scale, (loss, weight, aux)

        (_, results), (shared, gradient) = jax.value_and_grad(
            last, argnums=(0, 1), has_aux=True
        )(self.shared, y)
        sums = _add_loss(sums, results, k)
        shared = self._of_sum(shared, k)
        grads = sums.grads[0], _add_gradient(sums.grads[1], shared)
        return (
            sums._replace(grads=grads, noise=self._add_squares(sums.noise, shared, k)),
            gradient,
        )

    def _first_gradient(
        self, total: Any, noise: NoiseSums | None, gradient: Any, k: jax.Array
    ) -> tuple[Any, NoiseSums | None]:
        """Add the gradients of the first part, and their squares."""
        _, pullback = jax.vjp(
            lambda shared: self.loss.first(shared, *self._microbatch(k)), self.shared
        )
        (shared,) = pullback(gradient)
        shared = self._of_sum(shared, k)
        return _add_gradient(total, shared), self._add_squares(noise, shared, k)

    def _weight(self, k: Any) -> jax.Array:
        """Return what a scaled loss is divided by: the weight of a microbatch, which
        every stage computes, with ones for what arrives at the last part.
        """
        x = jax.eval_shape(self._first, 0)
        ones = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), x)
        return as_summed(jax.lax.stop_gradient(self._last(ones, k)[1]))

    def _of_sum(self, gradient: Any, k: Any) -> Any:
        """Return the gradient of the sum over a microbatch: with a scale, the stages
        send that of the scaled mean.
        """
        if self.recipe.scale is None:
            return gradient
        weight = self._weight(k)
        return jax.tree.map(lambda g: as_summed(g) * weight, gradient)

    def _first(self, k: Any) -> Any:
        return self.loss.first(self.shared, *self._microbatch(k))

    def _last(self, y: Any, k: Any) -> tuple[Any, Any, Any]:
        return self.loss.last(self.shared, y, *self._microbatch(k))

    def _microbatch(self, k: Any) -> tuple[Any, Any]:
        return take((self.batch_KR, self.keys_KR), k)

    def _send(self, x: Any, step: int) -> Any:
        """Send a value `step` stages further around the ring; return the value that
        arrives.
        """
        return jax.lax.ppermute(
            x, STAGE, [(s, (s + step) % self.p) for s in range(self.p)]
        )

    def _if(
        self, condition: jax.Array, compute: Callable[[], Any], otherwise: Any
    ) -> Any:
        """Return what this stage computes if the condition holds here, else
        `otherwise`; see `PipelinedLoss.skip_idle`.
        """
        if self.skips_idle:
            return jax.lax.cond(condition, compute, lambda: otherwise)
        return jax.tree.map(
            lambda a, b: jnp.where(condition, a, b), compute(), otherwise
        )

    def _if_any_stage(
        self, condition: jax.Array, compute: Callable[[], Any], otherwise: Any
    ) -> Any:
        """Return what the stages compute if any has work: all take the same branch, so
        collectives inside are safe.
        """
        return (
            compute()
            if self.skips_idle
            else jax.lax.cond(condition, compute, lambda: otherwise)
        )


@jax.tree_util.register_static
class Pullback:
    """How the pullback of a chunk is made of the inputs of the chunk and of what its
    forward keeps, with a remat policy.

    The leaves of a pullback of `jax.vjp` are the values that it needs. Those that are
    inputs of the chunk, the same objects, are known in the backward, so the ring buffer
    keeps only the others. All traces of a chunk have this structure.
    """

    def __init__(self, pullback: Any, inputs: Any) -> None:
        leaves, self._structure = jax.tree.flatten(pullback)
        known = jax.tree.leaves(inputs)
        self._places = [
            next((n for n, other in enumerate(known) if other is leaf), None)
            for leaf in leaves
        ]

    def kept(self, pullback: Any) -> tuple[Any, ...]:
        """Return the leaves of a pullback that are no inputs."""
        leaves = jax.tree.leaves(pullback)
        return tuple(
            leaf
            for leaf, place in zip(leaves, self._places, strict=True)
            if place is None
        )

    def restore(
        self, inputs: Any, kept: tuple[Any, ...]
    ) -> Callable[[Any], tuple[Any, Any]]:
        """Return the pullback that `kept` are the leaves of."""
        known, rest = jax.tree.leaves(inputs), iter(kept)
        leaves = [
            next(rest) if place is None else known[place] for place in self._places
        ]
        pullback: Callable[[Any], tuple[Any, Any]] = jax.tree.unflatten(
            self._structure, leaves
        )
        return pullback


def _add_loss(sums: Sums, results: tuple[Any, Any, Any], k: Any) -> Sums:
    """Add the results of microbatch k."""
    loss, weight, aux = jax.tree.map(as_summed, results)
    if sums.noise is not None:
        sums = sums._replace(
            noise=sums.noise._replace(blocks=sums.noise.blocks.at[k].add(weight))
        )
    return sums._replace(
        loss=sums.loss + loss,
        weight=sums.weight + weight,
        aux=jax.tree.map(jnp.add, sums.aux, aux),
    )


def _add_gradient(total: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradient)


def _without_layers(params: Params) -> dict[str, Any]:
    return {name: value for name, value in params.items() if name != LAYERS}


def check_shapes(
    loss: PipelinedLoss,
    params: Params,
    batch_KR: Any,
    keys_KR: jax.Array,
    mesh: Mesh,
    *,
    measures_noise: bool = False,
) -> None:
    """Refuse sizes that do not divide, and a stage that changes its input's shape,
    before anything is compiled.
    """
    if STAGE not in mesh.axis_names:
        axes = ", ".join(mesh.axis_names)
        raise PipelineShapeError(
            f"the mesh has the axes {axes} and no axis {STAGE!r}; make it with"
            " make_mesh"
        )
    p, v = mesh.shape[STAGE], loss.num_repeats
    if v < 1:
        raise PipelineShapeError(
            f"num_pipeline_repeats={v} must be at least 1",
            key="num_pipeline_repeats",
            nearest=(1,),
        )
    # Not another mapping: gradients are a dict, and must have the same structure.
    sizes = (
        {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params.get(LAYERS))}
        if type(params) is dict
        else set()
    )
    if len(sizes) != 1 or () in sizes:
        names = (
            f" of {', '.join(map(str, params))}" if isinstance(params, Mapping) else ""
        )
        raise PipelineShapeError(
            f"the parameters of a PipelinedLoss are a dict with arrays under {LAYERS!r}"
            f" whose first axis is the layers; here is {a_type(params)}{names}"
            + (f", with layers of the sizes {sorted(sizes)}" if sizes else "")
        )
    num_layers = sizes.pop()[0]
    if num_layers % (p * v):
        nearest = nearest_multiples(num_layers, p * v)
        key = "base_num_decoder_layers"
        rule = (
            f"{key}={num_layers} must be a multiple of num_stages *"
            f" num_pipeline_repeats = {p} * {v} = {p * v}"
        )
        raise PipelineShapeError(
            f"{rule}; nearest: {', '.join(map(str, nearest))}", key=key, nearest=nearest
        )
    num_rows = keys_KR.shape[1]
    batch_axes = BatchAxes.of(mesh, loss.batch_axes)
    replicas = batch_axes.num_replicas(mesh)
    if num_rows % replicas:
        rule = (
            f"a microbatch of {num_rows} rows must be a multiple of the"
            f" {' * '.join(batch_axes.replica)} axis = {replicas}"
        )
        raise PipelineShapeError(
            rule, key="microbatch_size", nearest=nearest_multiples(num_rows, replicas)
        )
    arguments = {
        "first": "(params, batch, keys)",
        "stage": "(layers, x, batch, keys, first_layer)",
    }
    for part, names in {**arguments, "last": "(params, x, batch, keys)"}.items():
        if problem := signature_problem(getattr(loss, part), names.count(",") + 1):
            raise ConfigError(
                f"`{part}` of the PipelinedLoss must take {names}: {problem}",
                key="loss_fn",
            )
    batch_R, keys_R = rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch_KR, keys_KR)
    )
    chunk = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_layers // (p * v), *x.shape[1:]), x.dtype),
        params[LAYERS],
    )
    shared = _without_layers(params)
    x = jax.eval_shape(loss.first, shared, batch_R, keys_R)
    y = jax.eval_shape(loss.stage, chunk, x, batch_R, keys_R, 0)
    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tree)
        for tree in (x, y)
    )
    if before != after:
        problem = (
            "a pipeline stage must keep the shape and type of its input, but it turns"
            f" {before} into {after}"
        )
        fix = "move the change into the first or the last part"
        raise PipelineShapeError(f"{problem}; {fix}")
    if isinstance(jax.eval_shape(loss.last, shared, y, batch_R, keys_R)[1], tuple):
        problem = "a PipelinedLoss has one weight, but its `last` returns several parts"
        fix = "return one sum and one weight, or train without pipeline stages"
        raise ConfigError(f"{problem}; {fix}", key="loss_fn")
    discrete = [
        leaf.dtype.name
        for leaf in jax.tree.leaves(x)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    if discrete:
        problem = (
            "what a pipeline stage passes on must be floating-point, as its gradient"
            f" travels back, and not {discrete[0]}"
        )
        fix = "put such values into the batch, which every stage sees"
        raise PipelineShapeError(f"{problem}; {fix}")

    def aux_of(rows: Any) -> Any:
        return loss.last(shared, loss.first(shared, *rows), *rows)[2]

    check_aux(jax.eval_shape(aux_of, rows), aux_of, rows)
    if not measures_noise:
        return
    # The two parts of the gradient of a parameter that both parts use are on different
    # stages.
    leaves, used = jax.tree.leaves_with_path(shared), []
    for function, args in (
        (loss.first, (shared, *rows)),
        (loss.last, (shared, x, *rows)),
    ):
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
        used.append(
            partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][: len(leaves)]
        )
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves
    ]
    both = [
        path for path, first, last in zip(paths, *used, strict=True) if first and last
    ]
    if both:
        problem = f"the first and the last part of the pipeline share {', '.join(both)}"
        key = "measure_gradient_noise"
        why = (
            "the square of a gradient whose two parts are on different stages would"
            " need one of them to be sent in every tick"
        )
        fix = (
            "use separate parameters (`rampup train`: logits_via_embedding=false), or"
            " no pipeline"
        )
        raise PipelineShapeError(
            f"{key}=true: {problem}; {why}; {fix}", key=key, nearest=(False,)
        )
