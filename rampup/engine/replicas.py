"""How the replicas of a mesh run a sum over microbatches, and how their sums become
one: decided here, before the loss is traced.

A replica is a group of devices that together have the parameters once. With fsdp, it
has several of a plan's row shards. It adds up its own rows and reduces once, after the
loop. Over fsdp and the other axes the compiler gathers and reduces, once per
microbatch. `Replicas.reduce` reduces the gradients, and `Recipe.aggregate` all other
sums.

========  ==============================================  =====================================================
way       when                                            the sum over microbatches runs
========  ==============================================  =====================================================
manual    at most one other axis has several devices, or  in a `jax.shard_map` over the replicas, on the rows
          the loss takes shards or a pipeline stage       of one
mapped    two or more other axes have several devices,    in a `jax.vmap` over the replicas; only the reduction
          which XLA cannot partition well beside a        is manual
          manual one
plain     one replica, whose rows are not sharded         as it is, on all rows
compiled  one replica with sharded rows; whole batches;   as it is, on all rows: the compiler partitions the
          `reduce_once=False`; Explicit axes              axes of the replicas too, and reduces gradients once
                                                          per microbatch
========  ==============================================  =====================================================

Manual and mapped, a loss may name the axes of the replicas in collectives, and those of
one device. With `reduce_once=True` one replica runs as several do. A loss is traced
before it runs, and `Replicas.check` refuses by name what its way cannot run: no other
way is tried. (A loss whose aux has as many entries as there are rows is traced again, to
find its sums.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import (
    DATA,
    FSDP,
    STAGE,
    BatchAxes,
    auto_view,
    axes_of,
    constrain,
    constrain_leaves,
    mesh_in_context,
    own_constraints,
    replicated,
    wide_axes,
)
from rampup.engine.operations import (
    axes_of_shard_map,
    needing_whole_operands,
    operations,
)
from rampup.engine.sums import (
    Recipe,
    Sums,
    accumulator_type,
    as_summed,
    cast_for_exchange,
)
from rampup.engine.zero import is_scattered, manual_specs, reduce_gradients
from rampup.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The replicas of a mesh, for a loss."""

    mesh: Mesh
    axes: BatchAxes  # those of the rows
    # of the gradients; None = left to the compiler, or no gradients
    shardings: Any = None
    # the shardings of the parameters if the loss takes the part of one device or stage;
    # None = it takes them whole
    shards: Any = None
    has_stages: bool = False  # `shards` are those of pipeline stages
    reduction_dtype: Any = None
    reduce_once: bool | None = None  # False: the compiler partitions all axes

    @property
    def way(self) -> str:
        """How the replicas run; see the table above. Whole batches, and a loss that
        sees Explicit axes, come with `axes` that have no replicas.
        """
        if self.shards is not None:
            return "manual"
        # A region without an axis to be manual over would be so over all of them, and
        # every device would run all rows.
        has_own_region = self.axes.num_replicas(self.mesh) > 1 or (
            self.reduce_once and self._manual
        )
        if self.reduce_once is False or not has_own_region:
            return "plain" if self.axes.num_shards(self.mesh) == 1 else "compiled"
        others = [x for x in wide_axes(self.mesh) if x not in self.axes.replica]
        return "mapped" if len(others) > 1 else "manual"

    def run(self, sum_replica: Callable[..., Sums]) -> Callable[..., Sums]:
        """Return the function of (params, batch_KR, keys_KR, number, recipe) that sums
        up the rows of all replicas.

        `sum_replica` is that function for one, or for one device or stage if the loss
        takes its part. `number` is what it counts with: microbatches, or the two
        `Counts` of a pipeline.
        """
        if self.way == "mapped":
            return self._mapped(sum_replica)

        @own_constraints()
        def run(*args: Any) -> Sums:
            return self.reduce(sum_replica(*args), args[-1])

        if self.way != "manual":
            return mesh_in_context(self.mesh)(run)
        rows = tuple(name for name in self._own_axes if name != STAGE)
        whole, by_rows = PartitionSpec(), PartitionSpec(None, rows)
        params: Any = whole
        if self.shards is not None:
            params = manual_specs(self.shards, self.mesh, self._manual)
        return self._manually(run, (params, by_rows, by_rows, whole, whole))

    def check(self, loss: Any) -> None:
        """Refuse what the way of running, or XLA, cannot run, among the operations of
        the jaxpr of a loss.
        """
        for eqn in operations(loss):
            name = eqn.primitive.name
            if name == "conv_general_dilated":
                self._check_convolution(eqn)
            elif name == "shard_map" and not self.has_stages:
                self._check_shard_map(eqn)
        # XLA aborts beside a manual axis and two automatic ones of several devices.
        # (Seen on JAX 0.7.2 and 0.12, on CPUs.)
        if self.way != "manual" or len(self.automatic) < 2:
            return
        for eqn in needing_whole_operands(loss):
            # Of a pipeline, the forward is checked. Elsewhere the gradient is too, and
            # that of a look-up in a whole operand is a scatter.
            whole = (
                " look up in an operand that is whole,"
                " jax.lax.with_sharding_constraint(x, NamedSharding(mesh,"
                " PartitionSpec()))[index],"
            )
            raise ConfigError(
                f"the loss has a {eqn.primitive.name}, at which XLA aborts beside"
                f" {' and '.join(sorted(self.automatic))} here",
                fix=f"use one of these axes only,{whole if self.has_stages else ''} or"
                " multiply with jax.nn.one_hot(index, ...)",
                key="loss_fn",
            )

    def _check_shard_map(self, eqn: Any) -> None:
        """Refuse a `shard_map` that does not fit into the region of a replica."""
        over = axes_of_shard_map(eqn)
        if self.way == "mapped":
            why = "mapped over the replicas, its operands do not fit its axes"
        elif over & set(self._names):
            why = "each replica runs by itself, and those axes are its place"
        elif self.way == "manual" and self._manual & set(
            eqn.params.get("manual_axes", ())
        ):
            # Newer versions of JAX refuse it when the loss is traced.
            why = "axes of one device are manual already; leave them out"
        else:
            return
        raise ConfigError(
            f"the loss has a shard_map over {' and '.join(sorted(over))}, which cannot"
            f" run beside one reduction of gradients per step: {why}",
            fix="give reduce_once=False: the compiler partitions the whole loss, and"
            " reduces gradients once per microbatch",
            key="reduce_once",
            nearest=(False,),
        )

    def _check_convolution(self, eqn: Any) -> None:
        """Refuse a convolution that XLA partitions wrongly."""
        # Seen on JAX 0.7.2 and 0.12, on CPUs: one with groups beside an axis such as
        # tensor, and others beside a second axis. Mapped, the gradient of its kernel
        # has a group per replica.
        groups = (eqn.params[f"{x}_group_count"] for x in ("feature", "batch"))
        rows = set(self.axes.rows)
        if not rows and self.shardings is None:
            # The rows that an evaluation leaves over are on every device of the axes
            # that else take rows: there is nothing to partition along those.
            rows = {DATA, FSDP}
        others = self.automatic - rows
        if self.way != "mapped" and not (
            others and (len(self.automatic) > 1 or max(groups) > 1)
        ):
            return
        raise ConfigError(
            "the loss has a conv_general_dilated, which XLA partitions wrongly"
            f" beside {' and '.join(sorted(self.automatic))}",
            fix="train on a mesh of data and fsdp alone, or write it as products of"
            " matrices",
        )

    @property
    def automatic(self) -> set[str]:
        """The axes of several devices over which the compiler partitions a loss."""
        names = {*wide_axes(self.mesh)}
        return names - self._manual if self.way == "manual" else names

    @property
    def _own_axes(self) -> tuple[str, ...]:
        """The axes along which each call of the loss has rows or layers of its own."""
        if self.has_stages:
            return (*self.axes.replica, STAGE)
        return self.axes.replica if self.shards is None else self.axes.rows

    @property
    def _manual(self) -> set[str]:
        """The manual axes of the way `manual`."""
        return self.axes.manual(self.mesh) | {*self._own_axes}

    @property
    def _names(self) -> tuple[str, ...]:
        """The mesh axes over which the sums of the loss function still have to be added
        up.
        """
        if self.way in ("plain", "compiled"):
            return ()
        return tuple(x for x in self._own_axes if x in wide_axes(self.mesh))

    def reduce(self, sums: Sums, recipe: Recipe) -> Sums:
        """Return the sums over all replicas. With several, call it in a function that
        is manual over their axes.
        """
        names = self._names
        if not names:
            # Plain and compiled: the compiler has reduced already, in every iteration.
            return sums._replace(grads=jax.tree.map(as_summed, sums.grads))
        with jax.named_scope("reduce"):
            # Manual and mapped: only here do gradients cross the data axis, after the
            # loop; with stages once for the layers and once for what all stages have.
            # The compiler combines what is summed over the same axes.
            grads = cast_for_exchange(sums.grads, self.reduction_dtype, self.mesh)
            reduced = recipe.aggregate(sums._replace(grads=None), names)
            if grads is None:
                return reduced
            scatters = is_scattered(self.shardings, self.axes)
            done = {*self.axes.replica} if scatters else set[str]()

            def sum_up(grad: jax.Array, own: NamedSharding) -> jax.Array:
                """Sum a gradient over the axes over which the loss has not: those that
                its sharding does not name. Replicas that get parts sum when they do.
                """
                left = [name for name in names if name not in done | axes_of(own)]
                return jax.lax.psum(grad, tuple(left)) if left else grad

            own = self.shards if self.has_stages else self.shardings
            if own is None:
                own = jax.tree.map(lambda _: replicated(self.mesh), grads)
            grads = jax.tree.map(sum_up, grads, own)
            if scatters:
                grads = reduce_gradients(grads, self.shardings, self.axes)
            # Not back into a narrow type of the accumulators: the sum over the replicas
            # has more digits.
            grads = jax.tree.map(
                lambda g, own: g.astype(accumulator_type(own.dtype)), grads, sums.grads
            )
            return reduced._replace(grads=constrain_leaves(grads, self.shardings))

    def _manually(self, run: Callable[..., Sums], in_specs: Any) -> Callable[..., Sums]:
        """Return `run` in a `jax.shard_map` over the replicas, and over the axes whose
        parts the loss takes.
        """
        whole: Any = PartitionSpec()
        own = None
        if is_scattered(self.shardings, self.axes):
            own = self.shardings
        elif self.shardings is not None:
            own = self.shards
        grads = whole if own is None else manual_specs(own, self.mesh, self._manual)
        # With check_vma=True, the gradient with respect to the parameters, which do not
        # vary over the data axis, would be reduced where it is computed: inside the
        # loop.
        return jax.shard_map(
            run,
            mesh=auto_view(self.mesh),
            axis_names=self._manual,
            in_specs=in_specs,
            out_specs=Sums(grads, whole, whole, whole, whole, whole),
            check_vma=False,
        )

    def _mapped(self, sum_replica: Callable[..., Sums]) -> Callable[..., Sums]:
        """Return `sum_replica` mapped over the replicas, with sums (*replicas, ...)."""
        mesh = self.mesh
        single = self.axes.manual(mesh) - {*self.axes.replica}
        replica = (*self.axes.replica, *sorted(single))
        sizes = [mesh.shape[name] for name in replica]
        sums_of: Callable[..., Sums] = mesh_in_context(mesh)(
            own_constraints(replica)(sum_replica)
        )
        for name in reversed(replica):
            sums_of = jax.vmap(
                sums_of,
                in_axes=(None, 1, 1, None, None),
                axis_size=mesh.shape[name],
                axis_name=name,
                spmd_axis_name=name,
            )

        def by_replica(x_KR: jax.Array) -> jax.Array:
            """Return rows (K, R, ...) as (K, *replicas, rows of a replica, ...)."""
            K, R, *shape = x_KR.shape
            x = x_KR.reshape(K, *sizes, R // math.prod(sizes), *shape)
            others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1 - len(replica))
            spec = PartitionSpec(None, *replica, *others)
            return constrain(x, NamedSharding(auto_view(mesh), spec))

        def reduce_own(sums: Sums, recipe: Recipe) -> Sums:
            own = jax.tree.map(lambda x: x.reshape(x.shape[len(replica) :]), sums)
            return self.reduce(own, recipe)

        reduced = self._manually(reduce_own, (PartitionSpec(*replica), PartitionSpec()))

        def run(
            params: Any, batch_KR: Any, keys_KR: Any, number: Any, recipe: Recipe
        ) -> Sums:
            rows = jax.tree.map(by_replica, (batch_KR, keys_KR))
            try:
                sums = sums_of(params, *rows, number, recipe)
            except NotImplementedError as error:
                raise ConfigError(
                    f"the loss has an operation that cannot be mapped over the"
                    f" replicas: {error}",
                    fix="give reduce_once=False",
                    key="reduce_once",
                    nearest=(False,),
                ) from error
            return reduced(sums, recipe)

        return run
