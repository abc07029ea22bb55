"""The account of a compiled program, for one device: its collectives, FLOPs and memory
traffic.

Every loop counts as often as it runs. XLA's own `cost_analysis` counts the body of a
loop once.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rampup.contrib.lab.hlo import (
    ASYNC_CALLS,
    Array,
    Instruction,
    Program,
    Visit,
    times,
)
from rampup.plan.topology import Topology

KINDS = {
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
}
KINDS |= {"collective-broadcast"}
MeshShape = tuple[tuple[str, int], ...]  # name and devices of each axis of a mesh
# Instructions that run nothing: other names of a value, or the second half of an
# asynchronous operation.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "while",
    "conditional",
    "call",
}
_FREE |= {
    "partition-id",
    "replica-id",
    "opt-barrier",
    "optimization-barrier",
    "add-dependency",
    "domain",
    *ASYNC_CALLS,
}
_WORK = {
    "fusion",
    "convolution",
    "dot",
    "custom-call",
    "while",
    "call",
    "conditional",
    "reduce",
    "sort",
    "scatter",
    "gather",
}
MATMUL_CALL = re.compile(
    r'custom_call_target="[^"]*(?:matmul|gemm|dot)', re.IGNORECASE
)  # a library's matrix product
# Products in bfloat16 that a TPU takes for one of float32, by its `jax.lax.Precision`:
# one by default.
_BFLOAT16_PASSES = {"high": 3, "highest": 6}
_WINDOW = {
    "stride": 1,
    "pad": 0,
    "lhs_dilate": 1,
    "rhs_dilate": 1,
}  # of a convolution: what it may state, with its default
_ASYNC_FUSION = "async_collective_fusion_config"
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
    # whether it is in a branch, which may not be taken. It is counted as if it were.
    in_branch: bool
    axes: (
        tuple[str, ...] | None
    )  # the mesh axes along which the devices differ, or None if they are not known
    group_size: int  # devices that exchange with each other; 0 if it is not known
    is_async: bool  # whether it starts and ends in separate places
    overlapped: bool  # whether the device computes in between
    shapes: tuple[
        tuple[str, tuple[int, ...]], ...
    ]  # type and dimensions of the parts, one for each array
    op_name: str  # the operation of the traced function
    between_slices: bool  # whether it goes over the data-center network
    group: tuple[
        int, ...
    ]  # the numbers of those devices that exchange with the first one

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

    def sent_bytes(self) -> float:
        """Return the bytes that a device sends in one execution of a ring algorithm
        (Thakur, Rabenseifner and Gropp, 2005).
        """
        share = (self.group_size - 1) / self.group_size if self.group_size else 0.0
        return self.num_bytes * {
            "all-reduce": 2 * share,
            "collective-permute": 1.0,
        }.get(self.kind, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The cost of one run of a program for each device."""

    collectives: tuple[Collective, ...]  # in the order of the program
    # For each number of open loops (see `rampup.contrib.lab.hlo.times`), the FLOPs of
    # matrix products by type of the operands and precision, such as `bf16` or `f32
    # highest`, and the bytes read from and written to memory, but not on-chip memory.
    flops: tuple[Mapping[str, int], ...]
    memory_bytes: tuple[int, ...]
    kernels: tuple[
        str, ...
    ] = ()  # custom calls whose cost is unknown, such as Pallas kernels without an estimate

    def total_flops(self, loop_trips: Sequence[int]) -> dict[str, int]:
        """Return the FLOPs of a run by type."""
        total = Counter[str]()
        for depth, by_type in enumerate(self.flops):
            total.update(
                {
                    dtype: times(number, depth, loop_trips)
                    for dtype, number in by_type.items()
                }
            )
        return dict(total)

    def total_memory_bytes(self, loop_trips: Sequence[int]) -> int:
        """Return the bytes read and written in a run."""
        return sum(
            times(number, depth, loop_trips)
            for depth, number in enumerate(self.memory_bytes)
        )

    def collective_rows(self, loop_trips: Sequence[int]) -> list[dict[str, Any]]:
        """Return the collectives of a run for JSON, equal ones together; the largest
        total first.
        """
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for c in self.collectives:
            flags = {
                name: getattr(c, name)
                for name in ("in_loop", "in_branch", "overlapped", "between_slices")
            }
            axes = None if c.axes is None else list(c.axes)
            empty = {"count": 0, "bytes": 0}
            # Collectives over the two sides of a torus differ in the group alone.
            key = (c.kind, c.axes, c.group, c.group_size, *flags.values())
            row = rows.setdefault(
                key,
                {
                    "kind": c.kind,
                    "axes": axes,
                    "group_size": c.group_size,
                    **empty,
                    **flags,
                },
            )
            row["count"] += c.count(loop_trips)
            row["bytes"] += c.count(loop_trips) * c.num_bytes
        return sorted(rows.values(), key=lambda row: -row["bytes"])

    def roofline(self, topology: Topology, loop_trips: Sequence[int]) -> Roofline:
        """Return an estimate of the time of a run on an absent chip, without exchanges
        between slices and `kernels`.
        """
        figures = topology.to_dict()
        computes, moves, exposed, overlapped = (
            [0.0] * len(self.flops) for _ in range(4)
        )
        for depth, by_type in enumerate(self.flops):
            work = sum(
                _BFLOAT16_PASSES.get(dtype.partition(" ")[2], 1) * number
                for dtype, number in by_type.items()
            )
            computes[depth] = times(work, depth, loop_trips) / figures["peak_flops"]
            moves[depth] = (
                times(self.memory_bytes[depth], depth, loop_trips)
                / figures["hbm_bandwidth"]
            )
        for c in (c for c in self.collectives if not c.between_slices):
            seconds = c.count(loop_trips) * c.sent_bytes() / figures["ici_bandwidth"]
            (overlapped if c.overlapped else exposed)[c.open_loops] += seconds
        return Roofline(
            seconds=sum(map(max, computes, moves, overlapped)) + sum(exposed),
            compute_seconds=sum(computes),
            memory_seconds=sum(moves),
            exposed_seconds=sum(exposed),
            overlapped_seconds=sum(overlapped),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Account:
        """Return the account from its `dataclasses.asdict`, as read from JSON."""

        def tuples(value: Any) -> Any:
            return tuple(map(tuples, value)) if isinstance(value, list) else value

        collectives = tuple(Collective(*tuples(each)) for each in data["collectives"])
        return cls(
            **{name: tuples(value) for name, value in data.items()}
            | {"collectives": collectives}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Estimated least times of a run at a chip's published peaks (Williams, Waterman
    and Patterson, "Roofline", CACM 2009).

    The microbatches of a loop and what follows the loop come one after the other.
    Within each part the longest of computing, memory and overlapped collectives counts,
    and the other collectives are added.
    """

    seconds: float  # of the step
    compute_seconds: float  # of the matrix products
    memory_seconds: float  # of device memory
    # of collectives during which the device computes nothing, over all links at once
    exposed_seconds: float
    overlapped_seconds: float  # of the other collectives


def account_of(program: Program, mesh: MeshShape | None = None) -> Account:
    """Return the account of a program; `mesh` names its axes if the program does
    not.
    """
    mesh = mesh or program.mesh
    collectives = list[Collective]()
    seen = set[tuple[Any, ...]]()
    kernels = dict[str, None]()
    visits = list(program.visits())
    depths = range(1 + max(visit.open_loops for visit in visits))
    flops = [Counter[str]() for _ in depths]
    moved = [0 for _ in depths]
    for visit in visits:
        instruction = visit.instruction
        operands = visit.computation.operands(visit.instruction)
        # The second half of an asynchronous collective does not count.
        kind = instruction.opcode.removesuffix("-start")
        between_slices = (
            _BETWEEN_SLICES.search(instruction.attributes) if kind == "send" else None
        )
        if between_slices:
            kind = between_slices.group(1).lower().replace("_", "-")
        if between_slices or kind in KINDS:
            # The pieces of a collective that is fused with computation are one
            # exchange.
            key = (
                *visit.loops,
                instruction.number("channel_id"),
                instruction.number("chain_id"),
            )
            is_piece = _ASYNC_FUSION in instruction.attributes and visit.fused
            if not (is_piece and key in seen):
                collectives.append(
                    _collective(program, visit, kind, mesh, is_piece=is_piece)
                )
            seen |= {key} if is_piece else set()
        number, dtype = _matmul_flops(instruction, operands, kernels)
        if number:
            flops[visit.open_loops][dtype] += visit.runs * number
        if not visit.fused:
            moved[visit.open_loops] += visit.runs * _memory_bytes(
                program, instruction, operands
            )
    by_type = tuple(map(dict, flops))
    return Account(
        collectives=tuple(collectives),
        flops=by_type,
        memory_bytes=tuple(moved),
        kernels=tuple(kernels),
    )


def _collective(
    program: Program, visit: Visit, kind: str, mesh: MeshShape | None, *, is_piece: bool
) -> Collective:
    instruction, computation = visit.instruction, visit.computation
    between_slices = instruction.opcode == "send"
    is_async = between_slices or instruction.opcode.endswith("-start")
    place, where, overlaps = instruction, computation, is_piece

    def following(start: Instruction, suffix: str) -> Instruction | None:
        return next(
            (
                i
                for i in where.instructions.values()
                if start.name in i.operands and i.opcode.endswith(suffix)
            ),
            None,
        )

    if not is_async and computation.name in program.async_starts:
        # It calls a computation with the collective alone. The operands may come later,
        # with an update.
        is_async, (where, place) = True, program.async_starts[computation.name]
        place = following(place, "-update") or place
    done = following(place, "-done") if is_async else None
    if done is not None and program.is_scheduled:
        names = list(where.instructions)
        between = names[names.index(place.name) + 1 : names.index(done.name)]
        overlaps |= any(where.instructions[name].opcode in _WORK for name in between)
    arrays = (
        instruction.arrays[:1]
        if between_slices
        else (done if done and place is instruction else instruction).arrays
    )
    if computation.name.startswith("all-reduce-scatter"):
        kind = (  # how a TPU program writes one that it runs in its own way
            "reduce-scatter"
        )
    elif kind == "reduce-scatter":
        arrays = tuple(
            a for made in computation.operands(instruction) for a in made.arrays
        )
    groups, named, own = _groups(instruction, program.num_partitions)
    return Collective(
        kind=kind,
        num_bytes=sum(array.num_bytes for array in arrays),
        runs=visit.runs,
        open_loops=visit.open_loops,
        loops=visit.loops,
        in_branch=visit.in_branch,
        axes=_axes(groups, named, own, mesh),
        group_size=len(groups[0]) if groups else 0,
        is_async=is_async or is_piece,
        overlapped=overlaps,
        shapes=tuple((array.dtype, array.dims) for array in arrays),
        op_name=instruction.op_name,
        between_slices=between_slices,
        group=(
            tuple(sorted(groups[0].tolist()))
            if groups and not instruction.opcode.startswith("collective-permute")
            else ()
        ),
    )


def _axes(
    groups: Sequence[np.ndarray],
    named: tuple[str, ...],
    own: MeshShape | None,
    mesh: MeshShape | None,
) -> tuple[str, ...] | None:
    """Return the axes along which the devices of a group differ: those that the program
    names, or else those of the mesh.
    """
    # Axes that the compiler has made up are called axis_0, axis_1, ...
    known = own if mesh is None else tuple(axis for axis in own or () if axis in mesh)
    if named and set(named) <= {
        name for name, _ in known or () if not name.startswith("axis_")
    }:
        return tuple(name for name in named if dict(own or ())[name] > 1)
    sizes = tuple(size for _, size in mesh or ())
    if (
        not groups
        or mesh is None
        or max(int(group.max()) for group in groups) >= math.prod(sizes)
    ):
        return None
    differs = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, sizes))
        differs |= (places != places[:, :1]).any(axis=1)
    return tuple(name for (name, _), found in zip(mesh, differs, strict=True) if found)


def _groups(
    instruction: Instruction, num_devices: int
) -> tuple[list[np.ndarray], tuple[str, ...], MeshShape | None]:
    """Return the groups of devices of a collective, and the axes by name with their
    mesh if the program states them.

    XLA writes lists `{{0,1},{2,3}}`, also the pairs of a permutation, a reshaped range
    `[2,2]<=[2,2]T(1,0)`, axes of a mesh `mesh['a'=2,'b'=2] {'a'}`, and `{}` for all
    devices.
    """

    def ids_of(shape_text: str, count: int) -> np.ndarray | None:
        # The numbers of `[4,2]T(1,0)`: a range in that shape, transposed.
        match = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", shape_text)
        shape = [int(n) for n in match.group(1).split(",")] if match else []
        if match is None or math.prod(shape) != count:
            return None
        ids = np.arange(count).reshape(shape)
        return (
            ids.transpose([int(n) for n in match.group(2).split(",")])
            if match.group(2)
            else ids
        ).reshape(-1)

    is_permute = instruction.opcode.startswith("collective-permute")
    _, stated, text = instruction.attributes.partition(
        "source_target_pairs=" if is_permute else "replica_groups="
    )
    if not stated:
        return [], (), None
    if match := re.match(
        r"mesh\[(.*?)\](?:,? ?device_ids=\(([^{]*?)\))? \{(.*?)\}", text
    ):
        own = tuple(
            (name, int(size))
            for name, size in re.findall(r"'([^']*)'=(\d+)", match.group(1))
        )
        named = tuple(re.findall(r"'([^']*)'", match.group(3)))
        sizes = [size for _, size in own]
        ids = (
            np.arange(math.prod(sizes))
            if match.group(2) is None
            else ids_of(match.group(2), math.prod(sizes))
        )
        if ":" in match.group(3) or ids is None:  # a part of an axis
            return [], named, None
        moved = [k for k, (name, _) in enumerate(own) if name in named]
        kept = [k for k in range(len(own)) if k not in moved]
        grouped = (
            ids.reshape(sizes)
            .transpose(kept + moved)
            .reshape(-1, math.prod(sizes[k] for k in moved))
        )
        return list(grouped), named, own
    if match := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        count, size = (int(n) for n in match.group(1).split(","))
        ids = ids_of(match.group(2), count * size)
        return ([] if ids is None else list(ids.reshape(count, size))), (), None
    if text.startswith("{}"):
        return [] if is_permute else [np.arange(num_devices)], (), None
    lists, end, _ = text.partition("}}")
    parts = re.findall(r"\{([\d, ]+)", lists) if end else []
    return [np.array([int(n) for n in part.split(",")]) for part in parts], (), None


def _matmul_flops(
    instruction: Instruction, operands: Sequence[Instruction], kernels: dict[str, None]
) -> tuple[int, str]:
    """Return the FLOPs of an instruction if it is a matrix product, with its type.
    Kernels of unknown cost are collected.
    """
    text = instruction.attributes
    is_call = instruction.opcode == "custom-call"
    if is_call and 'custom_call_target="tpu_custom_call"' in text:
        if estimate := re.search(r'"cost_estimate":\{[^}]*"flops":"?(\d+)', text):
            return int(estimate.group(1)), "bf16"
        kernels[instruction.op_name or instruction.name] = None
    sides = [made.arrays[0] for made in operands[:2] if made.arrays]
    if not sides or not instruction.arrays:
        return 0, ""
    if instruction.opcode == "dot" or (is_call and MATMUL_CALL.search(text)):
        dims = sides[0].dims
        match = re.search(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([^}\]]*)', text)
        contracted = (
            [int(n) for n in re.findall(r"\d+", match.group(1))]
            if match
            else [len(dims) - 1] * is_call
        )
        number = (
            2
            * math.prod(instruction.arrays[0].dims)
            * math.prod(dims[k] for k in contracted)
        )
    elif instruction.opcode == "convolution" and len(sides) == 2:
        number = _convolution_flops(instruction, *sides)
    else:
        return 0, ""
    # The widest type of the two operands, with the precision if it is not the default.
    dtype = max(sides, key=lambda a: Array(a.dtype, (8,)).num_bytes).dtype
    precision = re.search(r"operand_precision=\{(\w+),(\w+)\}", text)
    return number, dtype + next(
        (f" {p}" for p in ("highest", "high") if precision and p in precision.groups()),
        "",
    )


def _convolution_flops(instruction: Instruction, lhs: Array, rhs: Array) -> int:
    """Return the FLOPs of a convolution, as which TPU programs write matrix products:
    batches are spatial dimensions.

    Positions that meet padding or the gaps of a dilated input are not computed, as in
    XLA's `HloCostAnalysis`.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    of_lhs, of_rhs, of_out = labels.groups()
    out = instruction.arrays[0]
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    # Of every spatial dimension; a padding is written `low_high`.
    stated = dict(re.findall(r"(\w+)=([\d_x\-]+)", window.group(1) if window else ""))
    numbers = {
        name: [int(part.partition("_")[0]) for part in text.split("x")]
        for name, text in stated.items()
    }
    spatial, valid = sum(c.isdigit() for c in of_out), 1
    of_window = [
        numbers.get(name, [least] * spatial) for name, least in _WINDOW.items()
    ]
    for d, (stride, low, dilate_in, dilate_kernel) in enumerate(
        zip(*of_window, strict=True)
    ):
        kernel = rhs.dims[of_rhs.index(str(d))]
        size_in = lhs.dims[of_lhs.index(str(d))]
        size_out = out.dims[of_out.index(str(d))]
        places = (
            np.arange(size_out)[:, None] * stride
            - low
            + np.arange(kernel)[None, :] * dilate_kernel
        )
        valid *= int(
            (
                (places >= 0)
                & (places % dilate_in == 0)
                & (places // dilate_in < size_in)
            ).sum()
        )
    groups = instruction.number("batch_group_count") or 1
    batch = lhs.dims[of_lhs.index("b")]
    return (
        2
        * rhs.dims[of_rhs.index("i")]
        * out.dims[of_out.index("f")]
        * (batch // groups)
        * valid
    )


def _memory_bytes(
    program: Program, instruction: Instruction, operands: Sequence[Instruction]
) -> int:
    """Return the bytes that an instruction reads and writes: of a slice what it takes,
    of an update in place the update.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    written, *read = (
        sum(array.num_bytes for array in made.arrays if array.space == 0)
        for made in (instruction, *operands)
    )
    if opcode in (
        "copy-start",
        "slice-start",
    ):  # the result has both sides, and a slice is the smaller one
        sides = instruction.arrays[:2]
        return sum(array.space == 0 for array in sides) * min(
            array.num_bytes for array in sides
        )
    if opcode.endswith("-start"):  # the result repeats the operands
        return 2 * sum(read)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * written
    if opcode in ("dynamic-update-slice", "scatter"):
        # The rest of the array stays where it is.
        number = (
            1 if opcode == "dynamic-update-slice" else len(instruction.operands) - 1
        )
        return 2 * read[number]
    inner = (
        program.computations.get(instruction.called[0])
        if opcode == "fusion" and instruction.called
        else None
    )
    if inner is None or not inner.instructions:
        return written + sum(read)
    users = defaultdict[str, list[Instruction]](list)
    for made in inner.instructions.values():
        for name in made.operands:
            users[name].append(made)
    parameters = (
        (p.name, read[number])
        for number, p in inner.parameters.items()
        if number < len(read)
    )
    total = sum(
        min(whole, _read_bytes(name, users, whole)) for name, whole in parameters
    )
    roots = inner.operands(inner.root) if inner.root.opcode == "tuple" else [inner.root]
    for array, root in zip(instruction.arrays, roots, strict=False):
        if array.space == 0:
            total += (
                inner.operands(root)[1]
                if root.opcode == "dynamic-update-slice"
                else array
            ).num_bytes
    return total


def _read_bytes(
    name: str, users: defaultdict[str, list[Instruction]], whole: int
) -> int:
    """Return the bytes of a parameter that a fusion reads."""
    read = 0
    for user in users[name]:
        if (
            user.opcode in ("dynamic-slice", "slice", "gather")
            and user.operands[0] == name
        ):
            read += user.num_bytes
        elif user.opcode == "bitcast":
            read += _read_bytes(user.name, users, whole)
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == name):
            return whole
    return read
