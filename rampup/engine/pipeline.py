"""Pipelined training over the mesh axis `stage`: lock-step 1F1B, in one executable for
any number of microbatches.

Each of p stages has consecutive layers, or v chunks of consecutive layers. In one tick,
every stage runs at most one forward and then at most one backward. At the end of the
tick, activations move to the next stage and gradients to the previous one.
`PipelinedLoss.sums` runs this in one `shard_map`, and the ticks are a loop whose length
follows from the number m of microbatches in a pass, which may be traced. If a plan
fixes m, a step may need several passes; each fills and drains the pipeline.

Shape suffixes: K microbatches in the buffer, R rows of one microbatch.
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.accumulate import take
from rampup.engine.contract import Counts, SummableLoss, check_results
from rampup.engine.mesh import STAGE, BatchAxes, mesh_in_context, replicated
from rampup.engine.replicas import Replicas
from rampup.engine.sums import Recipe, Sums, as_summed, is_floating, zeros_to_sum
from rampup.errors import ConfigError, PipelineShapeError, a_type
from rampup.plan.numbers import nearest_multiples
from rampup.plan.pipeline import pass_ticks

LAYERS = "layers"
Params = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinedLoss(SummableLoss):
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
    skip_idle: bool | None = None
    batch_axes: BatchAxes | None = None
    reduction_dtype: Any = None
    accumulator_dtype: Any = None

    def check(self, mesh: Mesh, engine: str) -> None:  # noqa: ARG002 - `sums` checks the mesh
        """Refuse the engine `multi_steps`.

        Args:
            mesh: the devices, which are checked when the sums are traced.
            engine: `fused` or `multi_steps`.

        Raises:
            ConfigError: the engine is `multi_steps`.
        """
        if engine == "multi_steps":
            raise ConfigError(
                "gradient_accumulation=multi_steps does not support a pipeline",
                fix="use fused",
                key="gradient_accumulation",
                nearest=("fused",),
            )

    def sums(
        self,
        params: Params,
        rows: Any,
        counts: Counts,
        recipe: Recipe,
        mesh: Mesh,
        grad_shardings: Any = None,
    ) -> Sums:
        """Return the sums over the microbatches of all passes, without
        `grad_shardings` those of the loss alone; see `SummableLoss`.

        Args:
            params: the parameters.
            rows: the batch and a random key per row, arrays (K, R, ...).
            counts: microbatches of a pass, and passes; int32.
            recipe: how to sum.
            mesh: the devices.
            grad_shardings: the shardings of the gradients.

        Raises:
            ConfigError: what a pipeline has no support for.
            PipelineShapeError: sizes or shapes that do not fit.
        """
        if recipe.mutable is not None or recipe.noise is not None:
            raise ConfigError(
                "a PipelinedLoss supports neither `mutable` of a state nor"
                " measure_gradient_noise",
                fix="train without pipeline stages",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )
        check_sizes(self, params, mesh)
        # Each stage takes its layers and all other parameters.
        layers = NamedSharding(mesh, PartitionSpec(STAGE))
        shards = jax.tree.map(lambda _: replicated(mesh), params)
        shards[LAYERS] = jax.tree.map(lambda _: layers, params[LAYERS])
        replicas = Replicas(
            mesh=mesh,
            axes=BatchAxes.of(mesh, self.batch_axes),
            shardings=grad_shardings,
            shards=shards,
            has_stages=True,
            reduction_dtype=self.reduction_dtype,
        )
        # As in the program below, a `jax.shard_map` of the loss finds the mesh.
        with mesh_in_context(mesh):
            check_parts(self, params, rows, replicas)

        def sum_stage(
            params: Any, batch_KR: Any, keys_KR: Any, counts: Any, _: Recipe
        ) -> Sums:
            m, passes = counts
            stage = Stage(self, params, (batch_KR, keys_KR), replicas)
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
            return sums

        counts = tuple(jnp.asarray(count, jnp.int32) for count in counts)
        return replicas.run(sum_stage)(params, *rows, counts, recipe)


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
        self, loss: PipelinedLoss, params: Params, rows: Any, replicas: Replicas
    ) -> None:
        self.loss, self.has_grads = loss, replicas.shardings is not None
        self.shared, self.rows_KR = without_layers(params), rows
        self.p, self.v = replicas.mesh.shape[STAGE], loss.num_repeats
        self.s = jax.lax.axis_index(STAGE)
        # (v, layers of a chunk, ...): chunk r of this stage is chunk r * p + s of the
        # model.
        self.chunks = jax.tree.map(
            lambda x: x.reshape(self.v, -1, *x.shape[1:]), params[LAYERS]
        )
        self.chunk_size = jax.tree.leaves(self.chunks)[0].shape[1]
        # Ticks from the first forward of a pass to its first backward, and slots for
        # the inputs of forwards.
        self.lag = self.v * self.p - 1
        self.ring_size = 2 * self.v * self.p - 1
        skips = not replicas.automatic if loss.skip_idle is None else loss.skip_idle
        self.skips_idle = skips
        self.x_shapes = jax.eval_shape(self._first, self.shared, 0)

    def zeros(self) -> Sums:
        """Return the sums over no microbatch."""
        loss, weight, aux = zeros_to_sum(
            jax.eval_shape(self._last, self.shared, self.x_shapes, 0)
        )
        grads = None
        if self.has_grads:
            params = self.chunks, self.shared
            grads = zeros_to_sum(params, self.loss.accumulator_dtype)
        return Sums(grads, loss, weight, aux)

    def run_pass(self, start: Any, m: Any, sums: Sums) -> Sums:
        """Run microbatches start to start + m - 1 of the buffer through the pipeline
        and add them to the sums.
        """
        forward_ticks = pass_ticks(self.p, m, self.v)

        # Placeholders are ones: their results are dropped, but a NaN in them would stop
        # a run with jax_debug_nans.
        x = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), self.x_shapes)
        ring = None
        if self.has_grads:
            ring = jax.tree.map(
                lambda x: jnp.broadcast_to(x, (self.ring_size, *x.shape)), x
            )

        def unit_of(unit: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return whether a unit has a microbatch, its index in the buffer and its
            turn: valid indices in any case.
            """
            group, rest = divmod(unit, self.v * self.p)
            k, turn = group * self.p + rest % self.p, rest // self.p
            is_real = (unit >= 0) & (k < m)
            return is_real, start + jnp.where(is_real, k, 0), turn

        def forward(t: jax.Array, arrived: Any, ring: Any, sums: Sums) -> Any:
            """Run the forward of unit t - s; return the activation to send, the ring
            with what the backward will need, and the sums, which change only without a
            backward to come.
            """
            with jax.named_scope("forward_tick"):
                is_real, k, r = unit_of(t - self.s)
                is_first, is_last = (self.s == 0) & (r == 0), self._is_last(r)
                x = self._if(
                    is_real & is_first, lambda: self._first(self.shared, k), arrived
                )
                # The backward computes the chunk again. For the last chunk it does so in
                # this very tick, so its forward is left to it, and y is the chunk's
                # input.
                runs = is_real & ~is_last if self.has_grads else is_real
                y = self._if(runs, lambda: self.loss.stage(*self._inputs(x, k, r)), x)
                if self.has_grads:
                    slot = (t - self.s) % self.ring_size
                    # Without a microbatch, the slot is one that nobody reads any more.
                    ring = jax.tree.map(lambda ring, x: ring.at[slot].set(x), ring, x)
                else:
                    sums = self._if(
                        is_real & is_last,
                        lambda: _add_loss(sums, self._last(self.shared, y, k)),
                        sums,
                    )
                return y, ring, sums

        def backward(
            t: jax.Array, ring: Any, arrived: Any, sums: Sums
        ) -> tuple[Sums, Any]:
            """Run the backward of unit t - (v*p - 1) - (p - 1 - s); return the sums and
            the gradient to send.
            """
            with jax.named_scope("backward_tick"):
                unit = t - self.lag - (self.p - 1 - self.s)
                is_real, k, turn = unit_of(unit)
                r = self.v - 1 - turn
                x = take(ring, (unit + (r - turn) * self.p) % self.ring_size)
                return self._if(
                    is_real,
                    lambda: self._backward_chunk(sums, x, arrived, k, r),
                    (sums, arrived),
                )

        def tick(t: jax.Array, carry: Any) -> Any:
            """Run tick t; the carry is the sums, the ring buffer, and the activation
            and the gradient that arrived.
            """
            sums, ring, x, gradient = carry
            if not self.has_grads:
                y, ring, sums = forward(t, x, ring, sums)
                return sums, ring, self._send(y, 1), gradient
            y, ring = self._if_any_stage(
                t < forward_ticks,
                lambda: forward(t, x, ring, sums)[:2],
                otherwise=(x, ring),
            )
            sums, gradient = self._if_any_stage(
                t >= self.lag,
                lambda: backward(t, ring, gradient, sums),
                otherwise=(sums, gradient),
            )
            # The only communication of a tick: two permutes around the ring of stages,
            # by all of them.
            return sums, ring, self._send(y, 1), self._send(gradient, -1)

        num_ticks = forward_ticks + (self.lag if self.has_grads else 0)
        return jax.lax.fori_loop(0, num_ticks, tick, (sums, ring, x, x))[0]

    def _inputs(self, x: Any, k: Any, r: Any) -> tuple[Any, ...]:
        """Return the arguments of `PipelinedLoss.stage` for microbatch k in chunk r."""
        return (
            take(self.chunks, r),
            x,
            *self._microbatch(k),
            (r * self.p + self.s) * self.chunk_size,
        )

    def _backward_chunk(
        self, sums: Sums, x: Any, arrived: Any, k: jax.Array, r: jax.Array
    ) -> tuple[Sums, Any]:
        """Add the gradients of one unit to the sums; return the gradient of its
        input.
        """
        chunk, x, *others = self._inputs(x, k, r)
        y, run = jax.vjp(lambda chunk, x: self.loss.stage(chunk, x, *others), chunk, x)
        sums, gradient = self._if(
            self._is_last(r), lambda: self._loss_gradient(sums, y, k), (sums, arrived)
        )
        chunk_gradient, gradient = run(gradient)
        chunks, shared = sums.grads
        chunks = jax.tree.map(
            lambda total, g: total.at[r].add(g.astype(total.dtype)),
            chunks,
            chunk_gradient,
        )

        def first_gradient() -> Any:
            """Add the gradient of the first part."""
            run = jax.vjp(lambda shared: self._first(shared, k), self.shared)[1]
            return _add_gradient(shared, *run(gradient))

        shared = self._if((self.s == 0) & (r == 0), first_gradient, shared)
        return sums._replace(grads=(chunks, shared)), gradient

    def _is_last(self, r: Any) -> jax.Array:
        """Return whether chunk r of this stage has the last layers of the model."""
        return (self.s == self.p - 1) & (r == self.v - 1)

    def _loss_gradient(self, sums: Sums, y: Any, k: jax.Array) -> tuple[Sums, Any]:
        """Add the loss of a microbatch and the gradients of the last part to the sums;
        return the gradient of y.
        """

        def last(shared: Any, y: Any) -> tuple[Any, Any]:
            results = self._last(shared, y, k)
            return results[0], results

        (_, results), (shared, gradient) = jax.value_and_grad(
            last, argnums=(0, 1), has_aux=True
        )(self.shared, y)
        grads = sums.grads[0], _add_gradient(sums.grads[1], shared)
        return _add_loss(sums._replace(grads=grads), results), gradient

    def _first(self, shared: Any, k: Any) -> Any:
        return self.loss.first(shared, *self._microbatch(k))

    def _last(self, shared: Any, y: Any, k: Any) -> tuple[Any, Any, Any]:
        return self.loss.last(shared, y, *self._microbatch(k))

    def _microbatch(self, k: Any) -> tuple[Any, Any]:
        return take(self.rows_KR, k)

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


def _add_loss(sums: Sums, results: tuple[Any, Any, Any]) -> Sums:
    """Add the results of a microbatch."""
    loss, weight, aux = jax.tree.map(as_summed, results)
    return sums._replace(
        loss=sums.loss + loss,
        weight=sums.weight + weight,
        aux=jax.tree.map(jnp.add, sums.aux, aux),
    )


def _add_gradient(total: Any, gradient: Any) -> Any:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, gradient)


def without_layers(params: Params) -> dict[str, Any]:
    """Return the parameters of the first and the last part."""
    return {name: value for name, value in params.items() if name != LAYERS}


def check_sizes(loss: PipelinedLoss, params: Params, mesh: Mesh) -> None:
    """Refuse parameters that cannot be spread over the stages."""
    if STAGE not in mesh.axis_names:
        raise PipelineShapeError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} and no axis {STAGE!r};"
            " make it with make_mesh"
        )
    # Not another mapping: gradients are a dict, and must have the same structure.
    layers = params.get(LAYERS) if type(params) is dict else None
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(layers)}
    if len(sizes) != 1 or () in sizes:
        raise PipelineShapeError(
            f"the parameters of a PipelinedLoss are a dict with arrays under {LAYERS!r}"
            f" whose first axis is the layers; here is {a_type(params)} with layers of"
            f" the sizes {sorted(sizes)}"
        )
    num_layers = sizes.pop()[0]
    p, v = mesh.shape[STAGE], loss.num_repeats
    if v < 1 or num_layers % (p * v):
        nearest = nearest_multiples(num_layers, p * max(v, 1))
        key = "base_num_decoder_layers"
        raise PipelineShapeError(
            f"{key}={num_layers} must be a multiple of num_stages *"
            f" num_pipeline_repeats, at least 1 each: {p} * {v} = {p * v}; nearest:"
            f" {', '.join(map(str, nearest))}",
            key=key,
            nearest=nearest,
        )


def check_parts(
    loss: PipelinedLoss, params: Params, rows: Any, replicas: Replicas
) -> None:
    """Refuse a stage that changes its input's shape, results that do not add up, and
    what the replicas cannot run, before anything is compiled.
    """

    def shapes_of(part: Callable[..., Any], *args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(part, return_shape=True)(*args)
        replicas.check(traced)
        return shapes

    num_chunks = replicas.mesh.shape[STAGE] * loss.num_repeats
    rows_R = jax.eval_shape(lambda rows: take(rows, 0), rows)
    chunk = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(x) // num_chunks, *x.shape[1:]), x.dtype),
        params[LAYERS],
    )
    shared = without_layers(params)
    x = shapes_of(loss.first, shared, *rows_R)
    y = shapes_of(loss.stage, chunk, x, *rows_R, 0)
    before, after = (
        jax.tree.map(lambda leaf: f"{leaf.dtype.name}{list(leaf.shape)}", tree)
        for tree in (x, y)
    )
    if before != after:
        raise PipelineShapeError(
            "a pipeline stage must keep the shape and type of its input, but it turns"
            f" {before} into {after}; move the change into the first or the last part"
        )
    if not all(map(is_floating, jax.tree.leaves(x))):
        raise PipelineShapeError(
            "what a pipeline stage passes on must be floating-point, as its gradient"
            f" travels back, and not {before}; put other values into the batch, which"
            " every stage sees"
        )

    # A stage keeps the shapes, so the two others can be called as one loss function.
    def without_stages(*args: Any) -> Any:
        return loss.last(args[0], loss.first(*args), *args[1:])

    def checked(*args: Any) -> Any:
        return check_results(without_stages(*args), without_stages, args)[:3]

    shapes_of(checked, shared, *rows_R)
