"""The device mesh with the axes data, fsdp, tensor and stage, and the shardings of batches and parameters on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rampup.errors import ConfigError
from rampup.plan.mesh_axes import MeshAxes

DATA, FSDP, TENSOR, STAGE = "data", "fsdp", "tensor", "stage"
AXIS_NAMES = (DATA, FSDP, TENSOR, STAGE)
BATCH_AXES = (DATA, FSDP)


def make_mesh(axes: MeshAxes | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh (data, fsdp, tensor, stage) over all devices.

    Args:
        axes: number of devices along each axis; None puts all devices on the data axis.
        devices: the devices; None = all devices of JAX.

    Raises:
        ConfigError: the product of the axes is not the number of devices, or they use context or expert parallelism.

    Example:
        >>> make_mesh().axis_names
        ('data', 'fsdp', 'tensor', 'stage')
    """
    devices = jax.devices() if devices is None else devices
    axes = MeshAxes(data=len(devices)) if axes is None else axes
    for name in ("context", "expert"):
        if getattr(axes, name) > 1:
            raise ConfigError(
                f"{name} parallelism of {getattr(axes, name)} can be planned but not trained; set ici_{name}_parallelism=1 and "
                f"dcn_{name}_parallelism=1",
                key=f"ici_{name}_parallelism",
                nearest=(1,),
            )
    if axes.num_devices != len(devices):
        raise ConfigError(
            f"the plan is for num_devices={axes.num_devices}, but JAX sees {len(devices)} here",
            key="num_devices",
            nearest=(-1,),
        )
    # Auto: the compiler partitions along fsdp and tensor. The training step makes data and stage manual where it needs that.
    shape = (axes.data, axes.fsdp, axes.tensor, axes.pipeline)
    return jax.make_mesh(shape, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a value that is replicated on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, *, leading: int = 0) -> NamedSharding:
    """Return the sharding of rows over the data and fsdp axes, after `leading` dimensions that are not sharded."""
    return NamedSharding(mesh, PartitionSpec(*[None] * leading, BATCH_AXES))


def shardings_like(tree: Any, mesh: Mesh) -> Any:
    """Return the shardings of a tree's leaves on `mesh`. Leaves that are not on this mesh are replicated.

    Example:
        >>> import jax.numpy as jnp
        >>> shardings_like({"w": jnp.zeros(3)}, make_mesh())["w"].is_fully_replicated
        True
    """

    def sharding_of(leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        return sharding if isinstance(sharding, NamedSharding) and sharding.mesh == mesh else replicated(mesh)

    return jax.tree.map(sharding_of, tree)


def constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Constrain the sharding of an array, also inside a function that is manual over some axes."""
    # Inside such a function, new versions of JAX accept only a PartitionSpec, and 0.7.2 only a NamedSharding.
    try:
        return jax.lax.with_sharding_constraint(x, sharding.spec)
    except RuntimeError:
        return jax.lax.with_sharding_constraint(x, sharding)


def process_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Return the rows of a batch that this process must have: those of its own devices, in ascending order.

    This follows from the sharding and not from the number of processes: processes that differ only in tensor or stage need the
    same rows.

    Args:
        mesh: the mesh.
        num_rows: rows of one microbatch over all replicas.
    """
    # Devices that differ only in tensor or stage have the same slice, which counts once. A missing start or stop is the end.
    indices = batch_sharding(mesh).addressable_devices_indices_map((num_rows,)).values()
    slices = {(index[0].start or 0, num_rows if index[0].stop is None else index[0].stop) for index in indices if index}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(slices)])
