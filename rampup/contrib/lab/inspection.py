"""How often any compiled step reduces its gradients, and what else it exchanges, read
from the compiler's own program, whatever way of sharding it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from rampup.contrib.lab.collectives import (
    Collective,
    MeshShape,
    collective_rows,
    collectives_of,
    total_bytes,
)
from rampup.contrib.lab.hlo import Program
from rampup.contrib.lab.memory import ProgramMemory, program_memory
from rampup.engine.mesh import axis_names
from rampup.engine.step import TrainStep
from rampup.errors import ConfigError, DataError, a_type
from rampup.plan.describe import format_count

_FLOATS = ("f", "bf", "c")
_LISTED = 4
Dims = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts about a program. All numbers are of one device and one run of the
    program.

    Attributes:
        num_devices: devices of the program.
        loop_trips: iterations of the loops whose trip count is not known, as given.
        collectives: the exchanges between devices, in the order of the program.
        gradient_reductions: the collectives that reduce gradients over the replicas.
        repeated_reductions: those of them that a loop runs, other than a loop over
            layers, which reduces one layer of a stacked parameter at a time.
        uses_multi_steps: whether the state is that of `optax.MultiSteps`, so that a run
            is one microbatch.
        memory: memory of a device, or None for a program's text.
        findings: remarks, in sentences.

    Example:
        >>> import jax.numpy as jnp
        >>> found = inspect(lambda w, x: w + x, jnp.zeros(8), jnp.ones(8))
        >>> print(found)
        no collectives
    """

    num_devices: int
    loop_trips: tuple[int, ...]
    collectives: tuple[Collective, ...]
    gradient_reductions: tuple[Collective, ...]
    repeated_reductions: tuple[Collective, ...]
    uses_multi_steps: bool
    memory: ProgramMemory | None = None
    findings: tuple[str, ...] = ()

    @property
    def reduces_once(self) -> bool:
        """Whether no gradient is reduced more than once in an optimizer step."""
        return not self.repeated_reductions and not (
            self.uses_multi_steps and self.gradient_reductions
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the facts for JSON."""
        trips, repeated = self.loop_trips, self.repeated_reductions
        memory = None
        if self.memory is not None:
            memory = {**asdict(self.memory), "total": self.memory.total}
        return {
            "num_devices": self.num_devices,
            "loop_trips": list(trips),
            "collectives": collective_rows(self.collectives, trips),
            "gradient_reductions": sum(
                c.count(trips) for c in self.gradient_reductions
            ),
            "gradient_reductions_in_loops": sum(c.count(trips) for c in repeated),
            "gradient_bytes_in_loops": total_bytes(repeated, trips),
            "reduces_once": self.reduces_once,
            "uses_multi_steps": self.uses_multi_steps,
            "memory": memory,
            "findings": list(self.findings),
        }

    def __str__(self) -> str:
        lines = [f"- {finding}" for finding in self.findings]
        rows = collective_rows(self.collectives, self.loop_trips)
        lines.append(
            "collectives of a run, for each device:" if rows else "no collectives"
        )
        for row in rows:
            axes = "unknown axes"
            if row["axes"] is not None:
                axes = f"over {' and '.join(row['axes']) or 'no axis'}"
            if row["between_slices"]:
                axes = "between slices"
            where = "in a loop" if row["in_loop"] else "outside loops"
            lines.append(
                f"  {row['kind']}  {axes}  {row['group_size'] or 'unknown'} devices"
                f"  {format_count(row['count'], 'time')}  {row['bytes']:,} bytes"
                f"  {where}"
            )
        return "\n".join(lines)


def inspect(
    step: Any,
    *args: Any,
    mesh: Mesh | MeshShape | None = None,
    loop_trips: int | Sequence[int] | None = None,
) -> Inspection:
    """Compile a step, without running it, and return what it does.

    Args:
        step: a function, jitted or not; a `TrainStep`; a lowered or compiled program;
            or the text of one, or the path of a file with it, as `compiled.as_text()`
            gives it.
        args: its arguments, or their shapes and shardings. For a `TrainStep` the state
            and a batch.
        mesh: the mesh, or names and sizes of its axes; None = that of the arguments, if
            it can be seen.
        loop_trips: iterations of the loops whose trip count the compiler does not
            state, from outside in: those whose bound is an argument of the program,
            such as the number of microbatches of rampup's step, and on a TPU all. None
            = 1, and for a `TrainStep` those of the batch.

    Returns:
        The facts of one device and one run of the program, with `findings` in sentences.

    Raises:
        ConfigError: there is no program in `step`, or `mesh` or `loop_trips` do not fit
            it.
        DataError: the text is not a compiled program.

    Example:
        >>> import jax.numpy as jnp
        >>> found = inspect(
        ...     jax.jit(lambda w, x: w - 0.1 * jnp.sum(x)), jnp.zeros(8), jnp.ones(4)
        ... )
        >>> found.num_devices, found.collectives, found.reduces_once
        (1, (), True)
    """
    if isinstance(step, TrainStep):
        if len(args) != 2 or not hasattr(args[1], "chunks"):
            raise ConfigError(
                "a TrainStep takes a state and a batch: rampup.contrib.lab.inspect(step,"
                " state, batch)"
            )
        loop_trips = loop_trips or step.plan.loop_trips(args[1].position.split)
    compiled = None if isinstance(step, (str, Path)) else _compile(step, args)
    program = Program(_read(step) if compiled is None else compiled.as_text())
    if not program.is_scheduled:
        raise DataError(
            "this program is not compiled yet and has no collectives; give"
            " `compiled.as_text()`"
        )
    collectives = collectives_of(program, _mesh_of(program, mesh or _mesh_seen(args)))
    axes, shapes = _replica_axes(args), _shapes_of_parameters(program)
    reductions = [c for c in collectives if _reduces_gradients(c, axes, shapes)]
    found = Inspection(
        num_devices=program.num_partitions,
        loop_trips=_checked_trips(loop_trips),
        collectives=collectives,
        gradient_reductions=tuple(reductions),
        repeated_reductions=tuple(c for c in reductions if _is_repeated(c, shapes)),
        uses_multi_steps=any(
            (each.op_name or each.name).endswith(".mini_step")
            for each in program.parameters
        ),
        memory=None if compiled is None else program_memory(compiled),
    )
    open_loops = max(visit.open_loops for visit in program.visits())
    # Those that the compiler does not state are given, or are not known.
    unknown = open_loops - (0 if loop_trips is None else len(found.loop_trips))
    return replace(found, findings=tuple(_findings(found, unknown)))


def _checked_trips(loop_trips: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return iterations of loops, which are at least 1."""
    if loop_trips is None:
        return (1,)
    trips = (loop_trips,) if isinstance(loop_trips, int) else tuple(loop_trips)
    if min(trips, default=0) < 1:
        raise ConfigError(
            f"loop_trips={loop_trips} must be numbers of at least 1", key="loop_trips"
        )
    return trips


def _mesh_seen(args: Sequence[Any]) -> Mesh | None:
    """Return the mesh of the first argument that is on one."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _mesh_of(program: Program, mesh: Mesh | MeshShape | None) -> MeshShape | None:
    """Return names and sizes of the axes of a mesh, which has the devices of the
    program.
    """
    shape = mesh
    if isinstance(mesh, Mesh):
        shape = tuple((str(name), size) for name, size in mesh.shape.items())
    number = math.prod(size for _, size in shape) if shape else 1
    if shape and 1 < program.num_partitions != number:
        axes = ",".join(f"{name}={size}" for name, size in shape)
        raise ConfigError(
            f"mesh={axes} has {format_count(number, 'device')}, but the program has"
            f" {program.num_partitions}",
            key="mesh",
        )
    return shape


def _compile(step: Any, args: Sequence[Any]) -> Any:
    """Return the compiled program of a step."""
    if isinstance(step, TrainStep):
        state, batch = args
        lowered = step.lower(state, batch.row, batch.position.split)
    elif hasattr(step, "compile") or hasattr(step, "as_text"):
        lowered = step
    elif callable(step):
        lowered = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args)
    else:
        raise ConfigError(
            f"{a_type(step)} is not a step; give a function, a compiled program or a"
            " program's text"
        )
    return lowered.compile() if hasattr(lowered, "compile") else lowered


def _read(source: str | Path) -> str:
    if isinstance(source, str) and "\n" in source:
        return source
    path = Path(source)
    if not path.is_file():
        raise DataError(f"there is no file {str(source)[:200]}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source} is not text; write it with `compiled.as_text()`"
        ) from error


def _replica_axes(args: Sequence[Any]) -> set[str]:
    """Return the axes over which gradients are reduced: those that shard a batch and no
    parameter.

    The training state is the first argument. ZeRO-1 shards the rest of the state over
    the replicas too.
    """
    of_params, of_batch = set[str](), set[str]()
    for place, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg if place else getattr(arg, "params", arg)):
            for part in getattr(getattr(leaf, "sharding", None), "spec", ()):
                (of_batch if place else of_params).update(axis_names(part))
    return of_batch - of_params


def _shapes_of_parameters(program: Program) -> set[Dims]:
    """Return the dimensions of the arguments that a gradient may be of."""
    return {
        _signature(array.dims)
        for each in program.parameters
        for array in each.arrays
        if array.dtype.startswith(_FLOATS)
    }


def _signature(dims: Dims) -> Dims:
    """Return the sorted sizes of the dimensions larger than 1, which a change of layout
    or a squeeze does not alter.
    """
    return tuple(sorted(n for n in dims if n > 1))


def _layers(shapes: Iterable[Dims]) -> set[Dims]:
    """Return the dimensions of one layer of a stacked parameter, as a loop over layers
    has it.
    """
    return {dims[:k] + dims[k + 1 :] for dims in shapes for k in range(len(dims))}


def _reduces_gradients(
    c: Collective, replica_axes: set[str], shapes: set[Dims]
) -> bool:
    """Return whether a collective reduces gradients over replicas: by its axes, if
    known, or by the shapes of its arrays.
    """
    if c.kind not in ("all-reduce", "reduce-scatter") or c.has_numbers_only:
        return False
    if not any(dtype.startswith(_FLOATS) for dtype, _ in c.shapes):
        return False
    if c.axes is not None and replica_axes:
        return bool(replica_axes & set(c.axes))
    known = shapes | _layers(shapes)
    return any(_signature(dims) in known for _, dims in c.shapes if math.prod(dims) > 1)


def _is_repeated(c: Collective, shapes: set[Dims]) -> bool:
    """Return whether a loop repeats a reduction of gradients. Of one layer of stacked
    parameters at a time, the innermost loop is that over layers.
    """
    of_layers = _layers(shapes) - shapes
    is_layer = all(_signature(dims) in of_layers for _, dims in c.shapes)
    return len(c.loops) > is_layer


def _findings(found: Inspection, unknown_loops: int) -> Iterator[str]:
    """Yield what to know about a program, in sentences."""
    trips, repeated = found.loop_trips, found.repeated_reductions
    once = [c for c in found.gradient_reductions if c not in repeated]
    num_bytes = total_bytes(once, trips)
    if found.uses_multi_steps:
        yield (
            "the state is that of optax.MultiSteps: each call is one microbatch, with"
            " the optimizer and all reductions"
        )
    if repeated:
        arrays = ", ".join(map(_origin, repeated[:_LISTED]))
        yield (
            f"gradients are reduced{_over(repeated)} inside of a loop,"
            f" {total_bytes(repeated, trips):,} bytes in a run: {arrays}"
        )
    if once:
        yield f"gradients ({num_bytes:,} bytes in a run) are reduced{_over(once)} once"
    if repeated and num_bytes > total_bytes(repeated, trips) / 100:
        yield (
            "some gradients are reduced once and some inside of a loop: these may have"
            " lost their reduction tag or local accumulation"
        )
    if unknown_loops > 0:
        yield (
            "the iterations of a loop are not known: counts are those of one iteration;"
            " give loop_trips"
        )


def _origin(c: Collective) -> str:
    """Return the arrays of a collective and where they come from."""
    shapes = ", ".join(
        f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in c.shapes[:_LISTED]
    )
    return f"{shapes} ({c.op_name})" if c.op_name else shapes


def _over(collectives: Sequence[Collective]) -> str:
    axes = sorted({name for c in collectives for name in c.axes or ()})
    return f" over {' and '.join(axes)}" if axes else ""
