"""The device mesh with the axes data, fsdp, tensor and stage, or one of the user's own,
and the shardings on it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rampup.errors import ConfigError, a_type
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.plan import RampPlan

DATA = "data"
FSDP = "fsdp"
TENSOR = "tensor"
STAGE = "stage"
AXIS_NAMES = (DATA, FSDP, TENSOR, STAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAxes:
    """Which axes of a mesh take the rows of a batch. Needed only for a mesh with other
    names than data and fsdp.

    Attributes:
        replica: axes along which the parameters are replicated, and over which a
            training step reduces gradients once.
        rows: all axes that the rows are sharded over, starting with `replica`. Along
            the others, such as fsdp, the parameters may be sharded too.

    Example:
        >>> BatchAxes(replica=("batch",), rows=("batch",)).num_replicas(
        ...     jax.make_mesh((1, 1), ("batch", "model"))
        ... )
        1
    """

    replica: tuple[str, ...] = (DATA,)
    rows: tuple[str, ...] = (DATA, FSDP)

    @classmethod
    def of(cls, mesh: Mesh, axes: BatchAxes | None = None) -> BatchAxes:
        """Return `axes`, or for None data and fsdp as far as the mesh has them; refuse
        axes that it does not have.

        Args:
            mesh: the devices.
            axes: the axes, or None.

        Raises:
            ConfigError: the mesh has neither data nor fsdp, or not these axes, or they
                are not two tuples of which the second starts with the first.
        """
        names = tuple(str(name) for name in mesh.axis_names)
        example = f"rampup.BatchAxes(replica={names[:1]}, rows={names[:1]})"
        if axes is None:
            rows = tuple(name for name in (DATA, FSDP) if name in names)
            if rows:
                return cls(replica=tuple(n for n in rows if n == DATA), rows=rows)
            raise ConfigError(
                f"the mesh has the axes {', '.join(names)} and neither data nor fsdp",
                fix="say which of them take the rows of a batch, such as"
                f" batch_axes={example}; a training step and an EvalStep have them"
                " from the loss, rampup.AccumulatedLoss(loss_fn, batch_axes=...)",
                key="batch_axes",
            )
        parts = getattr(axes, "replica", None), getattr(axes, "rows", None)
        replica, rows = (part if isinstance(part, tuple) else ("",) for part in parts)
        if rows[: len(replica)] != replica or not {*rows} <= {*names}:
            raise ConfigError(
                f"batch_axes={axes!r} must be a BatchAxes of two tuples of the axes of"
                f" the mesh, {', '.join(names)}, and `rows` start with `replica`",
                fix=f"give one such as {example}",
                key="batch_axes",
            )
        return axes

    def num_replicas(self, mesh: Mesh) -> int:
        """Return the number of copies of the parameters.

        Args:
            mesh: the devices.
        """
        return math.prod(mesh.shape[name] for name in self.replica)

    def num_shards(self, mesh: Mesh) -> int:
        """Return the number of shards of the rows, the `data_parallel_size` of a
        plan.

        Args:
            mesh: the devices.
        """
        return math.prod(mesh.shape[name] for name in self.rows)

    def manual(self, mesh: Mesh) -> set[str]:
        """Return the axes that are manual in what a replica runs by itself: those of
        the replicas, and all of size 1.

        The compiler has nothing to partition along an axis of size 1. But callbacks and
        Pallas kernels run only if every axis is manual.

        Args:
            mesh: the devices.
        """
        return {*map(str, mesh.axis_names)} - {*wide_axes(mesh)} | {*self.replica}


def make_mesh(
    axes: MeshAxes | None = None, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Return the mesh (data, fsdp, tensor, stage) over all devices.

    On a TPU, neighbors on an axis are neighbors in the torus as far as possible.
    Several slices lie along the axes that `axes.slices` names, and if it names none
    along the data axis, so that only the gradient reduction of a step crosses them.

    Args:
        axes: number of devices along each axis; None puts all devices on the data axis.
        devices: the devices; None = all devices of JAX.

    Raises:
        ConfigError: the axes do not fit the devices or their slices, or use context or
            expert parallelism.

    Example:
        >>> make_mesh().axis_names
        ('data', 'fsdp', 'tensor', 'stage')
    """
    devices = jax.devices() if devices is None else devices
    axes = MeshAxes(data=len(devices)) if axes is None else axes
    if not isinstance(axes, MeshAxes):
        raise ConfigError(
            f"make_mesh takes MeshAxes, and not {a_type(axes)}",
            fix="give make_mesh(MeshAxes(data=...), devices=[...]), from rampup.plan",
            key="axes",
        )
    for name, size in (("context", axes.context), ("expert", axes.expert)):
        if size > 1:
            raise ConfigError(
                f"{name} parallelism of {size} can be planned but not trained",
                fix=f"set ici_{name}_parallelism=1 and dcn_{name}_parallelism=1",
                key=f"ici_{name}_parallelism",
                nearest=(1,),
            )
    if axes.num_devices != len(devices):
        some = f"give devices=jax.devices()[:{axes.num_devices}] to use some of them"
        raise ConfigError(
            f"the axes of the mesh need num_devices={axes.num_devices}, but JAX sees"
            f" {len(devices)} here",
            fix=some if axes.num_devices < len(devices) else "",
            key="num_devices",
            nearest=(-1,),
        )
    # Auto: the compiler partitions along fsdp and tensor. The training step makes data
    # and stage manual where it needs that.
    return Mesh(
        _arrange(axes, devices),
        AXIS_NAMES,
        axis_types=(AxisType.Auto,) * len(AXIS_NAMES),
    )


def _arrange(axes: MeshAxes, devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices as an array (data, fsdp, tensor, stage)."""
    names = ("data", "fsdp", "tensor", "pipeline")
    between = [axes.slices[AXES.index(name)] for name in names]
    # The devices of each TPU slice, or all of them in one.
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(
            getattr(device, "slice_index", 0) if device.platform == "tpu" else 0, []
        ).append(device)
    groups: list[Any] = [by_slice[index] for index in sorted(by_slice)]
    if len(groups) > 1 and axes.num_slices == 1 and axes.data % len(groups) == 0:
        between[0] = len(groups)
    num_slices = math.prod(between)
    if len(groups) == 1:
        # CPUs and GPUs do not say which slice they are in: as many devices in a row.
        groups = np.array_split(np.asarray(devices, object), num_slices)
    if (found := len(groups)) != num_slices:
        raise ConfigError(
            f"the devices form num_slices={found}, but the mesh has {num_slices}",
            fix=f"set num_slices={found}, and dcn_data_parallelism={found} if the"
            " gradient reduction should cross them",
            key="num_slices",
            nearest=(found,),
        )
    sizes = [getattr(axes, name) for name in names]
    within = [size // slices for size, slices in zip(sizes, between, strict=True)]
    # Without a split, JAX refuses most meshes whose axes are not products of whole
    # sides of the torus.
    split = devices[0].platform == "tpu"
    arranged = [
        mesh_utils.create_device_mesh(
            within, list(group), allow_split_physical_axes=split
        )
        for group in groups
    ]
    blocks = np.stack(arranged).reshape(*between, *within)
    order = np.arange(2 * len(names)).reshape(2, -1).T.ravel()
    return blocks.transpose(order).reshape(sizes)


def wide_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh along which there are several devices."""
    return tuple(str(name) for name, size in mesh.shape.items() if size > 1)


@functools.cache
def auto_view(mesh: Mesh) -> Mesh:
    """Return the mesh with all its axes automatic: what a training step runs on, also
    if the user's mesh has Explicit axes.
    """
    return Mesh(
        mesh.devices,
        mesh.axis_names,
        axis_types=(AxisType.Auto,) * len(mesh.axis_names),
    )


def auto_context(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which programs on the automatic view of a mesh can be traced,
    also in the user's `jax.set_mesh`.
    """
    needs_one = is_explicit(mesh) or is_explicit(jax.sharding.get_abstract_mesh())
    return jax.set_mesh(auto_view(mesh)) if needs_one else contextlib.nullcontext()


def is_explicit(mesh: Any) -> bool:
    """Return whether a mesh, or an abstract one, has Explicit axes."""
    return AxisType.Explicit in mesh.axis_types


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def batch_sharding(
    mesh: Mesh, *, leading: int = 0, axes: BatchAxes | None = None
) -> NamedSharding:
    """Return the sharding of rows over the batch axes, after `leading` dimensions that
    are not sharded.
    """
    return NamedSharding(
        mesh, PartitionSpec(*[None] * leading, BatchAxes.of(mesh, axes).rows)
    )


def shardings_like(tree: Any, mesh: Mesh) -> Any:
    """Return the shardings of leaves on `mesh`, replicated for one device; what its
    axes cannot express is refused.
    """
    mesh = auto_view(mesh)

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return sharding
        if sharding is None or sharding.is_fully_replicated:
            return replicated(mesh)
        if (
            isinstance(sharding, NamedSharding)
            and PartitionSpec.UNCONSTRAINED not in sharding.spec
            and axes_of(sharding) <= {*mesh.axis_names}
        ):
            found = sharding.update(mesh=mesh)
            if found.is_equivalent_to(sharding, leaf.ndim):
                return found
        raise ConfigError(
            f"{jax.tree_util.keystr(path)} is sharded as {sharding}, which the axes"
            f" {dict(mesh.shape)} of this mesh cannot express",
            fix="place it on this mesh with jax.device_put",
        )

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def check_plan_fits(plan: RampPlan, mesh: Mesh, axes: BatchAxes | None = None) -> None:
    """Refuse a plan for other numbers of row shards or stages than the mesh has, and a
    mesh without axes for the rows.
    """
    axes = BatchAxes.of(mesh, axes)
    sizes = {
        "data_parallel_size": (
            plan.splitter.data_parallel_size,
            axes.num_shards(mesh),
            " * ".join(axes.rows),
        ),
        "num_stages": (plan.splitter.num_stages, mesh.shape.get(STAGE, 1), STAGE),
    }
    for key, (planned, has, names) in sizes.items():
        if planned != has:
            raise ConfigError(
                f"the plan has {key}={planned}, but the mesh has {names} = {has}",
                fix=f"make the plan with {key}={has}, as build_plan(config, num_devices)"
                " does for the mesh's devices, or give batch_axes=rampup.BatchAxes(...)"
                " if other axes take the rows",
                key=key,
                nearest=(has,),
            )


def constrain(x: jax.Array, sharding: Any) -> jax.Array:
    """Constrain the sharding of an array, also inside a function that is manual over
    some axes, which are left out.
    """
    kept = without_manual_axes(sharding)
    if kept is None:
        return x
    # There, new versions of JAX accept only a PartitionSpec, and 0.7.2 only a
    # NamedSharding.
    try:
        return _with_sharding_constraint(x, getattr(kept, "spec", kept))
    except RuntimeError:
        return _with_sharding_constraint(x, kept)


def constrain_leaves(tree: Any, shardings: Any) -> Any:
    """Constrain gradients or their sums to the shardings of the parameters, so that fsdp
    saves their memory too.
    """
    if shardings is None:
        return tree
    return jax.tree.map(
        lambda x, sharding: (
            x if sharding.is_fully_replicated else constrain(x, sharding)
        ),
        tree,
        shardings,
    )


def manual_size(name: str) -> int:
    """Return the number of devices along an axis that is manual in the function that is
    traced here, else 1.
    """
    context = jax.sharding.get_abstract_mesh()
    return context.shape[name] if name in context.manual_axes else 1


def without_manual_axes(sharding: Any) -> Any:
    """Return a NamedSharding or PartitionSpec without the axes that are manual or
    mapped here; None if nothing is left.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = frozenset((*context.manual_axes, *(_patch.mapped or ())))
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        sharding = sharding.update(mesh=auto_view(sharding.mesh))
    if not manual or not isinstance(sharding, (NamedSharding, PartitionSpec)):
        return sharding
    if context.manual_axes and all(
        name in manual or size == 1 for name, size in context.shape.items()
    ):
        return None
    if isinstance(sharding, PartitionSpec):
        return spec_without(sharding, manual)
    return NamedSharding(sharding.mesh, spec_without(sharding.spec, manual))


def axis_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes in one entry of a PartitionSpec: a name, a tuple of names,
    or None.
    """
    if isinstance(entry, str):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def axes_of(shardings: Any) -> set[str]:
    """Return the mesh axes that shardings name. That of an array on one device, outside
    of a mesh, names none.
    """
    return {
        name
        for leaf in jax.tree.leaves(shardings)
        for entry in getattr(leaf, "spec", ())
        for name in axis_names(entry)
    }


def spec_without(spec: PartitionSpec, names: frozenset[str]) -> PartitionSpec:
    """Return a PartitionSpec without some axes."""

    def keep(entry: Any) -> Any:
        if not isinstance(entry, (str, tuple)):
            return entry
        kept = tuple(name for name in axis_names(entry) if name not in names)
        return kept[0] if len(kept) == 1 else kept or None

    return PartitionSpec(*map(keep, spec))


class _Patch(threading.local):
    """What `own_constraints` says in this thread: the axes that are mapped; None =
    nothing.
    """

    mapped: tuple[str, ...] | None = None


_with_sharding_constraint = jax.lax.with_sharding_constraint
_patch, _patch_lock = _Patch(), threading.Lock()
_num_patched = 0


@contextlib.contextmanager
def own_constraints(mapped: tuple[str, ...] = ()) -> Iterator[None]:
    """While a loss is traced, let `jax.lax.with_sharding_constraint` leave out the
    manual axes, and those that are `mapped`.

    Models constrain activations over the data axis, which JAX refuses where it is
    manual, and there is no hook. So JAX's function is replaced until the last context
    ends; in other threads, it does what it did.
    """
    global _num_patched
    with _patch_lock:
        _num_patched += 1
        jax.lax.with_sharding_constraint = _constrain_without_manual_axes
    before, _patch.mapped = _patch.mapped, mapped
    try:
        yield
    finally:
        _patch.mapped = before
        with _patch_lock:
            _num_patched -= 1
            if not _num_patched:
                jax.lax.with_sharding_constraint = _with_sharding_constraint


@functools.wraps(_with_sharding_constraint)
def _constrain_without_manual_axes(x: Any, shardings: Any) -> Any:
    if _patch.mapped is None or is_explicit(jax.sharding.get_abstract_mesh()):
        return _with_sharding_constraint(x, shardings)
    # As in JAX, one sharding may stand for a whole subtree. None and PartitionSpec are
    # leaves.
    return jax.tree.map(
        lambda sharding, part: jax.tree.map(lambda y: constrain(y, sharding), part),
        shardings,
        x,
        is_leaf=lambda leaf: leaf is None or isinstance(leaf, PartitionSpec),
    )


@contextlib.contextmanager
def mesh_in_context(mesh: Mesh) -> Iterator[None]:
    """While a loss is traced, let it find the mesh in its context, as in a
    `jax.shard_map`.
    """
    with jax.sharding.use_abstract_mesh(auto_view(mesh).abstract_mesh):
        yield


@functools.cache
def rows_of_processes(
    mesh: Mesh, num_rows: int, axes: BatchAxes | None = None
) -> dict[int, np.ndarray]:
    """Return the rows of a microbatch of `num_rows` that each process must have, in
    ascending order: those of its devices.
    """
    # A set: devices, and processes, that differ only in tensor or stage need the same
    # rows.
    found: dict[int, set[tuple[int, int, int]]] = {}
    for device, index in (
        batch_sharding(mesh, axes=axes).devices_indices_map((num_rows,)).items()
    ):
        part = index[0].indices(num_rows)
        found.setdefault(device.process_index, set()).add(part)
    rows = {
        process: np.concatenate([np.arange(*part) for part in sorted(parts)])
        for process, parts in found.items()
    }
    # Cached: to ask a sharding takes longer than to read a small batch.
    for own in rows.values():
        own.setflags(write=False)
    return rows


def process_rows(
    mesh: Mesh, num_rows: int, axes: BatchAxes | None = None
) -> np.ndarray:
    """Return the rows of a microbatch that this process must have."""
    return rows_of_processes(mesh, num_rows, axes)[jax.process_index()]
