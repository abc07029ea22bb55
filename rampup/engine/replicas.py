"""How the replicas of a mesh run a sum over microbatches, and how their sums become
one: decided here.

A replica is a group of devices that together have the parameters once. With fsdp, it
has several of a plan's replicas, the shards of the rows. It adds up its own rows and
reduces once, after the loop. Over fsdp and the other axes the compiler gathers and
reduces, once per microbatch. `Recipe.aggregate` reduces all other sums, and without
ZeRO-1 the gradients with them.

========  =======================================================  ========================================================
way       when                                                     the sum over microbatches runs
========  =======================================================  ========================================================
plain     one replica, whose rows are not sharded, and a loss      as it is, on all rows
          that takes whole parameters
manual    at most one other axis has several devices, or the loss  in a `jax.shard_map` over the replicas, on the rows of one
          takes shards
mapped    two or more other axes have several devices, which XLA   in a `jax.vmap` over the replicas; only the reduction is
          cannot partition well beside a manual one                manual. What cannot be mapped runs as `manual`, with whole
                                                                   operands (see `rampup.engine.whole`)
compiled  one replica with sharded rows, or none, as with          as it is, on all rows: the compiler partitions the axes of
          `whole_batch`; or the loss runs in none of these ways,   the replicas too, and reduces the gradients once per
          such as a `jax.shard_map` over the replicas' axes        microbatch. A warning says so if the loss needs it
========  =======================================================  ========================================================
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    BatchAxes,
    auto_view,
    axes_of,
    constrain,
    constrain_leaves,
    own_constraints,
)
from rampup.engine.sums import (
    Recipe,
    Sums,
    accumulator_type,
    as_summed,
    cast_for_exchange,
)
from rampup.engine.whole import contains, replay, traceable, with_whole_operands
from rampup.engine.zero import is_scattered, manual_specs, reduce_gradients
from rampup.errors import RampupError

# Mapped, the gradient of a convolution's kernel is a convolution with a group per
# replica, which XLA computes wrongly when it partitions it, and a `jax.shard_map` over
# some of the other axes has operands that do not fit it.
NOT_MAPPED = frozenset({"conv_general_dilated", "shard_map"})


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a mesh, for a loss."""

    mesh: Mesh
    axes: BatchAxes  # those of the rows
    shardings: Any = (
        None  # of the gradients; None = left to the compiler, or no gradients
    )
    # the shardings of the parameters if the loss takes the part of one device; None =
    # it takes them whole
    shards: Any = None
    reduction_dtype: Any = None

    @property
    def way(self) -> str:
        """How the replicas run, as far as mesh and axes decide; see the table above."""
        if self.shards is None and self.axes.num_replicas(self.mesh) == 1:
            return "plain" if self.axes.num_shards(self.mesh) == 1 else "compiled"
        others = [
            name
            for name, size in self.mesh.shape.items()
            if size > 1 and name not in self.axes.replica
        ]
        return "mapped" if self.shards is None and len(others) > 1 else "manual"

    def run(self, sum_replica: Callable[..., Sums]) -> Callable[..., Sums]:
        """Return the function of (params, batch_KR, keys_KR, number, recipe) that sums
        up the rows of all replicas.

        `sum_replica(reduce, psum, *arguments)` sums up those of one, or of one device
        if the loss takes shards, and ends with `reduce(sums, recipe)`. Before, `psum`
        adds up numbers over the replicas.
        """
        plain = functools.partial(
            own_constraints()(sum_replica), self.reduce, self.psum
        )
        manual = self._manually(plain)
        if self.way in ("plain", "compiled"):
            # Manual over axes of one device, such as that of the one replica, if the
            # loss names them in collectives.
            run = traceable(plain, manual)
            return (
                run if self.way == "plain" else traceable(run, self._with_names(plain))
            )
        run = (
            manual
            if self.way == "manual"
            else self._mapped(sum_replica, otherwise=manual)
        )
        return (
            run
            if self.shards is not None
            else traceable(run, self._compiled(sum_replica))
        )

    def _with_names(self, run: Callable[..., Sums]) -> Callable[..., Sums]:
        """Return `run` for a loss that names the axes of the rows in collectives: over
        one part, which has all rows.
        """
        names = [
            str(name)
            for name, size in self.mesh.shape.items()
            if name in self.axes.rows or size == 1
        ]

        def named(*args: Any) -> Sums:
            alone: Any = run
            for name in names:
                alone = jax.vmap(alone, None, axis_size=1, axis_name=name)
            if contains(jax.make_jaxpr(alone)(*args), frozenset({"shard_map"})):
                # Its axes would be the parts of the same names: the sums of its
                # gradients would lack the other devices'.
                raise ValueError(
                    "a loss with a shard_map cannot name the axes of its rows outside"
                    " of it"
                )
            return jax.tree.map(
                lambda x: x.reshape(x.shape[len(names) :]), alone(*args)
            )

        return named

    def _compiled(self, sum_replica: Callable[..., Sums]) -> Callable[..., Sums]:
        """Return `sum_replica` for a loss that no replica can run by itself: as it is,
        with a warning.
        """
        run = replace(self, axes=replace(self.axes, replica=())).run(sum_replica)
        axes = " and ".join(self.axes.replica)
        problem = (
            "the loss cannot run on each replica by itself, such as one with a"
            f" shard_map over {axes}"
        )
        cost = (
            f"the compiler partitions its rows over {axes} too, and reduces gradients"
            " once per microbatch, not per step"
        )

        def compiled(*args: Any) -> Sums:
            sums = run(*args)
            warnings.warn(f"{problem}; {cost}", RuntimeWarning, stacklevel=2)
            return sums

        return compiled

    @property
    def _names(self) -> tuple[str, ...]:
        """The mesh axes over which the sums of the loss function still have to be added
        up.
        """
        names = self.axes.replica if self.shards is None else self.axes.rows
        return tuple(name for name in names if self.mesh.shape[name] > 1)

    def psum(self, numbers: Any) -> Any:
        """Return the sums of numbers over all replicas, in the midst of a function that
        `run` runs.
        """
        return jax.lax.psum(numbers, self._names) if self._names else numbers

    def reduce(self, sums: Sums, recipe: Recipe) -> Sums:
        """Return the sums over all replicas. With several, call it in a function that
        is manual over their axes.
        """
        names = self._names
        if not names:
            return sums._replace(grads=jax.tree.map(as_summed, sums.grads))
        with jax.named_scope("reduce"):
            # Only here do gradients cross the data axis: after the loop, once per
            # optimizer step.
            grads = cast_for_exchange(sums.grads, self.reduction_dtype, self.mesh)
            if is_scattered(self.shardings, self.axes):
                grads = reduce_gradients(grads, self.shardings, self.mesh, self.axes)
                reduced = recipe.aggregate(sums._replace(grads=None), names)
            else:
                leaves, structure = jax.tree.flatten(grads)
                left = axes_left(self.shardings, names) or [names] * len(leaves)
                # One psum for each set of axes. The other sums travel with the
                # gradients that are summed over all of them.
                for over in dict.fromkeys((names, *filter(None, left))):
                    members = [index for index, own in enumerate(left) if own == over]
                    parts = [leaves[index] for index in members]
                    if over == names:
                        reduced = recipe.aggregate(sums._replace(grads=parts), names)
                        parts = reduced.grads
                    else:
                        parts = jax.lax.psum(parts, over)
                    for index, part in zip(members, parts, strict=True):
                        leaves[index] = part
                grads = jax.tree.unflatten(structure, leaves)
            # Not back into a narrow type of the accumulators: the sum over the replicas
            # has more digits.
            grads = jax.tree.map(
                lambda g, own: g.astype(accumulator_type(own.dtype)), grads, sums.grads
            )
            return reduced._replace(grads=constrain_leaves(grads, self.shardings))

    def _manually(
        self, run: Callable[..., Sums], in_specs: Any = None
    ) -> Callable[..., Sums]:
        """Return `run` in a `jax.shard_map` over the replicas, and with shards over all
        axes of the rows.
        """
        mesh = self.mesh
        axes = self.axes
        takes_shards = self.shards is not None
        manual = axes.manual(mesh) | (set(axes.rows) if takes_shards else set())
        whole = PartitionSpec()
        if in_specs is None:
            run = with_whole_operands(run, mesh, manual)
            rows = PartitionSpec(None, axes.rows if takes_shards else axes.replica)
            in_specs = (
                manual_specs(self.shards, mesh, manual) if takes_shards else whole,
                rows,
                rows,
                whole,
                whole,
            )
        is_split = takes_shards or is_scattered(self.shardings, axes)
        grad_specs = manual_specs(self.shardings, mesh, manual) if is_split else whole
        # With check_vma=True, the gradient with respect to the parameters, which do not
        # vary over the data axis, would be reduced where it is computed: inside the
        # loop.
        return jax.shard_map(
            run,
            mesh=auto_view(mesh),
            axis_names=manual,
            in_specs=in_specs,
            out_specs=Sums(grad_specs, whole, whole, whole, whole, whole),
            check_vma=False,
        )

    def _mapped(
        self, sum_replica: Callable[..., Sums], otherwise: Callable[..., Sums]
    ) -> Callable[..., Sums]:
        """Return `sum_replica` mapped over the replicas, with sums (*replicas, ...), or
        `otherwise` if it cannot be.
        """
        mesh, replica = self.mesh, self.axes.replica
        sums_of: Callable[..., Sums] = functools.partial(
            own_constraints(replica)(sum_replica), lambda sums, _: sums, self.psum
        )
        for name in reversed(replica):
            in_axes = (None, 1, 1, None, None)
            sums_of = jax.vmap(
                sums_of,
                in_axes,
                axis_size=mesh.shape[name],
                axis_name=name,
                spmd_axis_name=name,
            )

        def by_replica(x_KR: jax.Array) -> jax.Array:
            """Return rows (K, R, ...) as (K, *replicas, rows of a replica, ...)."""
            x = x_KR.reshape(
                x_KR.shape[0],
                *(mesh.shape[name] for name in replica),
                -1,
                *x_KR.shape[2:],
            )
            others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(replica))
            return constrain(
                x,
                NamedSharding(auto_view(mesh), PartitionSpec(None, *replica, *others)),
            )

        def reduce_own(sums: Sums, recipe: Recipe) -> Sums:
            return self.reduce(
                jax.tree.map(lambda x: x.reshape(x.shape[len(replica) :]), sums), recipe
            )

        def run(
            params: Any, batch_KR: Any, keys_KR: Any, number: Any, recipe: Recipe
        ) -> Sums:
            mapped = (
                params,
                *jax.tree.map(by_replica, (batch_KR, keys_KR)),
                number,
                recipe,
            )
            try:
                closed, shapes = jax.make_jaxpr(sums_of, return_shape=True)(*mapped)
            except RampupError:
                raise
            except (NotImplementedError, NameError, ValueError):
                return otherwise(params, batch_KR, keys_KR, number, recipe)
            if contains(closed, NOT_MAPPED):
                return otherwise(params, batch_KR, keys_KR, number, recipe)
            sums = replay(closed, shapes, mapped)
            return self._manually(
                reduce_own, in_specs=(PartitionSpec(*replica), PartitionSpec())
            )(sums, recipe)

        return run


def axes_left(shardings: Any, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return, for each gradient, the axes over which the loss has not summed it: those
    that its sharding does not name.
    """
    all_used = map(axes_of, jax.tree.leaves(shardings))
    return [tuple(name for name in names if name not in used) for used in all_used]
