"""The exchanges between the devices of a compiled program, each with how often a run
executes it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rampup.contrib.lab.hlo import Array, Instruction, Program, Visit, times

KINDS = {
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}
MeshShape = tuple[tuple[str, int], ...]  # name and devices of each axis of a mesh
# On a TPU, the pieces of a collective that is fused with computation have this.
_PIECE = "async_collective_fusion_config"
# How a TPU program exchanges arrays with other slices: it sends them to a library on
# the host.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


class Collective(NamedTuple):
    """An exchange between devices."""

    # all-reduce, reduce-scatter, all-gather, all-to-all or collective-permute, as the
    # program runs it
    kind: str
    # that a device exchanges in one execution: the result, or the operands of a
    # reduce-scatter
    num_bytes: int
    # how often a run of the program executes it; see `rampup.contrib.lab.hlo.times`
    runs: int
    open_loops: int
    loops: tuple[str, ...]  # names of the loops around it, from outside in
    # the mesh axes along which the devices differ, or None if they are not known
    axes: tuple[str, ...] | None
    group_size: int  # devices that exchange with each other; 0 if it is not known
    shapes: tuple[Array, ...]  # type and dimensions of the parts
    op_name: str  # the operation of the traced function
    between_slices: bool  # whether it goes over the data-center network

    @property
    def in_loop(self) -> bool:
        """Whether it is inside a loop."""
        return bool(self.loops)

    @property
    def has_numbers_only(self) -> bool:
        """Whether it exchanges single numbers, such as a loss."""
        return all(math.prod(dims) == 1 for _, dims in self.shapes)

    def count(self, loop_trips: Sequence[int]) -> int:
        """Return how often a run executes it, with the iterations of the open loops."""
        return times(self.runs, self.open_loops, loop_trips)


def collectives_of(
    program: Program, mesh: MeshShape | None = None
) -> tuple[Collective, ...]:
    """Return the collectives of a program, in its order; `mesh` names its axes."""
    found, pieces = list[Collective](), set[tuple[Any, ...]]()
    for visit in program.visits():
        made = visit.instruction
        # The second half of an asynchronous collective does not count.
        kind = made.opcode.removesuffix("-start")
        sent = _BETWEEN_SLICES.search(made.attributes) if kind == "send" else None
        if sent is not None:
            kind = sent[1].lower().replace("_", "-")
        elif kind not in KINDS:
            continue
        if _PIECE in made.attributes:
            # All pieces are one exchange.
            key = *visit.loops, made.number("channel_id"), made.number("chain_id")
            if key in pieces:
                continue
            pieces.add(key)
        found.append(_collective(program, visit, kind, mesh))
    return tuple(found)


def collective_rows(
    collectives: Iterable[Collective], loop_trips: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the collectives of a run for JSON, equal ones together; the largest total
    first.
    """
    alike = defaultdict[tuple[Any, ...], list[Collective]](list)
    for c in collectives:
        alike[c.kind, c.axes, c.group_size, c.in_loop, c.between_slices].append(c)
    rows = [
        {
            "kind": kind,
            "axes": None if axes is None else list(axes),
            "group_size": group_size,
            "count": sum(c.count(loop_trips) for c in group),
            "bytes": total_bytes(group, loop_trips),
            "in_loop": in_loop,
            "between_slices": between_slices,
        }
        for (kind, axes, group_size, in_loop, between_slices), group in alike.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def total_bytes(collectives: Iterable[Collective], loop_trips: Sequence[int]) -> int:
    """Return the bytes that a device exchanges in a run."""
    return sum(c.num_bytes * c.count(loop_trips) for c in collectives)


def _collective(
    program: Program, visit: Visit, kind: str, mesh: MeshShape | None
) -> Collective:
    made, computation = visit.instruction, visit.computation
    arrays = made.arrays
    if made.opcode == "send":
        arrays = arrays[:1]
    elif made.opcode.endswith("-start"):
        # Its result has the operands too; that of its second half has not.
        for other in computation.instructions.values():
            if other.opcode.endswith("-done") and made.name in other.operands:
                arrays = other.arrays
    if computation.name.startswith("all-reduce-scatter"):
        # how a TPU program writes one that it runs in its own way
        kind = "reduce-scatter"
    elif kind == "reduce-scatter":
        operands = computation.operands(made)
        arrays = tuple(array for operand in operands for array in operand.arrays)
    groups = _groups(made, program.num_partitions)
    return Collective(
        kind=kind,
        num_bytes=sum(array.num_bytes for array in arrays),
        runs=visit.runs,
        open_loops=visit.open_loops,
        loops=visit.loops,
        axes=_axes(groups, mesh),
        group_size=len(groups[0]) if groups else 0,
        shapes=arrays,
        op_name=made.op_name,
        between_slices=made.opcode == "send",
    )


def _axes(
    groups: Sequence[np.ndarray], mesh: MeshShape | None
) -> tuple[str, ...] | None:
    """Return the axes of the mesh along which the devices of a group differ."""
    sizes = tuple(size for _, size in mesh or ())
    devices = math.prod(sizes)
    if mesh is None or not groups or max(map(np.max, groups)) >= devices:
        return None
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, sizes))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for (name, _), found in zip(mesh, differs, strict=True) if found)


def _groups(instruction: Instruction, num_devices: int) -> list[np.ndarray]:
    """Return the groups of devices of a collective; none if the program does not say.

    XLA writes lists `{{0,1},{2,3}}`, also the pairs of a permutation, a reshaped range
    `[2,2]<=[2,2]T(1,0)`, axes of a mesh `mesh['a'=2,'b'=2] {'a'}`, and `{}` for all
    devices.
    """
    is_permute = instruction.opcode.startswith("collective-permute")
    name = "source_target_pairs=" if is_permute else "replica_groups="
    _, _, text = instruction.attributes.partition(name)
    # A colon would name a part of an axis.
    if match := re.match(r"mesh\[([^\]]*)\] \{([^:}]*)\}", text):
        axes = re.findall(r"('[^']*')=(\d+)", match[1])
        sizes = [int(size) for _, size in axes]
        moved = [k for k, (axis, _) in enumerate(axes) if axis in match[2]]
        order = [k for k in range(len(axes)) if k not in moved] + moved
        shape = [-1, math.prod(sizes[k] for k in moved)]
    elif match := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, sizes, order = map(_numbers, match.groups(""))
    elif text.startswith("{}") and not is_permute:
        return [np.arange(num_devices)]
    else:
        lists, end, _ = text.partition("}}")
        parts = re.findall(r"\{([\d, ]+)", lists) if end else []
        return [np.array(_numbers(part)) for part in parts]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return list(ids.transpose(order or None).reshape(shape))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
