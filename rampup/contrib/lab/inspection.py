"""What any compiled step sends, sums and keeps, read from the compiler's own program,
whatever way of sharding it has.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from rampup.contrib.lab.collectives import (
    Collective,
    MeshShape,
    collective_rows,
    collectives_of,
)
from rampup.contrib.lab.hlo import (
    REDUCERS,
    Array,
    Instruction,
    Program,
    Value,
    Visit,
)
from rampup.engine.memory import ProgramMemory, program_memory
from rampup.engine.mesh import axis_names
from rampup.engine.step import TrainStep
from rampup.errors import ConfigError, DataError, a_type

_FLOATS = ("f", "bf", "c")
_SMALL_BYTES = 64 * 1024  # buffers below this size are not worth a remark
_LISTED = 4
_EMPTY = 'custom_call_target="AllocateBuffer"'
# Operations whose result may be one of these operands plus a term, whole or in part.
_ADDS_TO = {
    "add": (0, 1),
    "select": (1, 2),
    "dynamic-slice": (0,),
    "slice": (0,),
    "dynamic-update-slice": (0, 1),
}


class Accumulator(NamedTuple):
    """An array that a loop adds to in every iteration, starting at zero."""

    loop: str
    dtype: str
    dims: tuple[int, ...]


class Buffer(NamedTuple):
    """An argument that stays in memory beside a result of its shape, although that
    could take its place.
    """

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The facts about a program. All numbers are of one device and one run of the
    program.

    Attributes:
        num_devices: devices of the program.
        loop_trips: iterations of the loops whose bound is an argument, as given.
        collectives: the exchanges between devices, in the order of the program.
        gradient_reductions: the collectives that reduce gradients over the replicas.
        repeated_reductions: those of them that run in every iteration of a loop that
            accumulates.
        repeated_bytes: bytes that they reduce in one iteration of that loop.
        accumulators: arrays that loops add to.
        uses_multi_steps: whether the state is that of `optax.MultiSteps`, so that a run
            is one microbatch.
        num_donated: arguments whose memory results take over.
        donated_bytes: their bytes.
        not_donated: arguments whose memory a result could take over, the largest first.
        flops: floating-point operations by the compiler, which counts the body of a
            loop once; None for a program's text.
        memory: memory of a device, or None for a program's text.
        findings: remarks, in sentences.

    Example:
        >>> import jax.numpy as jnp
        >>> found = inspect(lambda w, x: w + x, jnp.zeros(8), jnp.ones(8))
        >>> print(found)
        no collectives
        accumulators of loops: none
        donated: 0 buffers, 0 bytes
        one iteration of every loop: 8 FLOP
    """

    num_devices: int
    loop_trips: tuple[int, ...]
    collectives: tuple[Collective, ...]
    gradient_reductions: tuple[Collective, ...]
    repeated_reductions: tuple[Collective, ...]
    repeated_bytes: int
    accumulators: tuple[Accumulator, ...]
    uses_multi_steps: bool
    num_donated: int
    donated_bytes: int
    not_donated: tuple[Buffer, ...]
    flops: float | None = None
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
            "gradient_bytes_in_loops": _num_bytes(repeated, trips),
            "reduces_once": self.reduces_once,
            "accumulators": self._accumulators_by_type(),
            "uses_multi_steps": self.uses_multi_steps,
            "donated": {"buffers": self.num_donated, "bytes": self.donated_bytes},
            "not_donated": [buffer._asdict() for buffer in self.not_donated],
            "flops": self.flops,
            "memory": memory,
            "findings": list(self.findings),
        }

    def _accumulators_by_type(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for each in self.accumulators:
            row = found.setdefault(each.dtype, {"arrays": 0, "bytes": 0})
            row["arrays"] += 1
            row["bytes"] += Array(each.dtype, each.dims).num_bytes
        return found

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
                f"  {row['count']:,} times  {row['bytes']:,} bytes  {where}"
            )
        sums = self._accumulators_by_type().items()
        arrays = ", ".join(f"{row['arrays']} of {dtype}" for dtype, row in sums)
        lines += [
            f"accumulators of loops: {arrays or 'none'}",
            f"donated: {self.num_donated} buffers, {self.donated_bytes:,} bytes",
        ]
        if self.flops is not None:
            lines.append(f"one iteration of every loop: {self.flops:,.4g} FLOP")
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
        loop_trips: iterations of the loops whose bound is an argument of the program,
            from outside in, such as the number of microbatches of rampup's step; None =
            1, and for a `TrainStep` those of the batch.

    Returns:
        The facts of one device and one run of the program, with `findings` in sentences.

    Raises:
        ConfigError: there is no program in `step`, or `mesh` or `loop_trips` do not fit
            it.
        DataError: the text is not a compiled program.

    Example:
        >>> import jax.numpy as jnp
        >>> found = inspect(
        ...     jax.jit(lambda w, x: w - 0.1 * jnp.sum(x), donate_argnums=0),
        ...     jnp.zeros(8),
        ...     jnp.ones(4),
        ... )
        >>> found.num_donated, found.collectives, found.reduces_once
        (1, (), True)
    """
    if isinstance(step, TrainStep):
        if len(args) != 2 or not hasattr(args[1], "chunks"):
            raise ConfigError(
                "a TrainStep takes a state and a batch: rampup.contrib.lab.inspect(step,"
                " state, batch)"
            )
        loop_trips = loop_trips or step.loop_trips(args[1].position.split)
    compiled = None if isinstance(step, (str, Path)) else _compile(step, args)
    program = Program(_read(step) if compiled is None else compiled.as_text())
    if not program.is_scheduled:
        raise DataError(
            "this program is not compiled yet and has no collectives; give"
            " `compiled.as_text()`"
        )
    trips = _checked_trips(loop_trips)
    mesh_shape = _mesh_of(program, mesh or _mesh_seen(args))
    collectives = collectives_of(program, mesh_shape)
    visits = list(program.visits())
    accumulators = tuple(_accumulators(program, visits))
    results = _results(program)
    reductions = _gradient_reductions(program, collectives, args, accumulators, results)
    accumulating = {a.loop for a in accumulators if math.prod(a.dims) > 1}
    repeated = tuple(c for c in reductions if accumulating & set(c.loops))
    donated = _donated(program)
    parameters = program.computations[program.entry].parameters
    found = Inspection(
        num_devices=program.num_partitions,
        loop_trips=trips,
        collectives=collectives,
        gradient_reductions=reductions,
        repeated_reductions=repeated,
        repeated_bytes=_bytes_per_iteration(program, visits, repeated, accumulating),
        accumulators=accumulators,
        uses_multi_steps=_uses_multi_steps(args, parameters),
        num_donated=len(donated),
        donated_bytes=sum(p.num_bytes for p in donated.values()),
        not_donated=tuple(_not_donated(program, results)),
    )
    if compiled is not None:
        cost = compiled.cost_analysis() or {}
        memory = program_memory(compiled)
        found = replace(found, flops=cost.get("flops"), memory=memory)
    open_loops = max(visit.open_loops for visit in visits)
    return replace(found, findings=tuple(_findings(found, open_loops)))


def _checked_trips(loop_trips: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return iterations of loops as whole numbers of at least 1."""
    if loop_trips is None:
        return (1,)
    trips = (loop_trips,) if isinstance(loop_trips, int) else tuple(loop_trips)
    if not trips or any(not isinstance(n, int) or n < 1 for n in trips):
        raise ConfigError(
            f"loop_trips={loop_trips!r} must be whole numbers of at least 1",
            key="loop_trips",
            nearest=(1,),
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
            f"mesh={axes} has {number} devices, but the program has"
            f" {program.num_partitions}",
            key="mesh",
        )
    return shape


def _results(program: Program) -> list[tuple[str, Array]]:
    """Return name and array of every result."""
    root = program.computations[program.entry].root
    names = [root.name] * len(root.arrays)
    if root.opcode == "tuple":
        names = list(root.operands)
    return list(zip(names, root.arrays, strict=False))


def _donated(program: Program) -> dict[int, Instruction]:
    """Return the arguments whose memory results take over, by number."""
    parameters = program.computations[program.entry].parameters
    numbers = (n for n in program.aliases.values() if n in parameters)
    return {number: parameters[number] for number in numbers}


def _gradient_reductions(
    program: Program,
    collectives: Sequence[Collective],
    args: Sequence[Any],
    accumulators: Sequence[Accumulator],
    results: Sequence[tuple[str, Array]],
) -> tuple[Collective, ...]:
    """Return the collectives that reduce gradients over the replicas.

    Gradients are reduced over the axes that shard a batch and no parameter. The
    training state is the first argument. ZeRO-1 shards the rest of the state over the
    replicas too.
    """
    of_params, of_batch = set[str](), set[str]()
    for place, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg if place else getattr(arg, "params", arg)):
            for part in getattr(getattr(leaf, "sharding", None), "spec", ()):
                (of_batch if place else of_params).update(axis_names(part))
    # Gradients have the shape of an accumulator or of a part of the state: an argument
    # that is donated, or as large as a result.
    donated, arrays = _donated(program), {array for _, array in results}
    parameters = program.computations[program.entry].parameters
    shapes = [a.dims for a in accumulators] + [
        p.arrays[0].dims
        for number, p in parameters.items()
        if p.arrays and (number in donated or arrays.intersection(p.arrays))
    ]
    return tuple(
        c for c in collectives if _reduces_gradients(c, of_batch - of_params, shapes)
    )


def _bytes_per_iteration(
    program: Program,
    visits: Sequence[Visit],
    repeated: Sequence[Collective],
    accumulating: set[str],
) -> int:
    """Return the bytes of collectives in one iteration of the loop that accumulates.
    Inside it, a loop over layers reduces the gradients of one layer at a time.
    """
    runs = {
        visit.instruction.name: visit.runs
        * (program.trips(visit.instruction.name, visit.computation.name) or 1)
        for visit in visits
        if visit.instruction.name in accumulating
    }
    return sum(
        c.num_bytes * c.runs // (runs[next(n for n in c.loops if n in runs)] or 1)
        for c in repeated
    )


def _uses_multi_steps(
    args: Sequence[Any], parameters: Mapping[int, Instruction]
) -> bool:
    """Return whether the state is that of `optax.MultiSteps`, by its type or, in a
    text, by the names of its parts.
    """
    states = jax.tree.leaves(
        args, is_leaf=lambda x: isinstance(x, optax.MultiStepsState)
    )
    return any(isinstance(x, optax.MultiStepsState) for x in states) or any(
        (p.op_name or p.name).endswith(".mini_step") for p in parameters.values()
    )


def _not_donated(
    program: Program, results: Sequence[tuple[str, Array]]
) -> Iterator[Buffer]:
    """Yield the arguments that a result of the same shape could replace in memory, the
    largest first.
    """
    free = Counter(
        (array.dtype, array.dims)
        for number, (_, array) in enumerate(results)
        if number not in program.aliases
    )
    donated = _donated(program)
    parameters = program.computations[program.entry].parameters
    for number, p in sorted(parameters.items(), key=lambda item: -item[1].num_bytes):
        key = (p.arrays[0].dtype, p.arrays[0].dims) if p.arrays else ("", ())
        if number not in donated and p.num_bytes >= _SMALL_BYTES and free[key] > 0:
            free[key] -= 1
            yield Buffer(name=p.op_name or p.name, num_bytes=p.num_bytes)


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


def _accumulators(program: Program, visits: Sequence[Visit]) -> Iterator[Accumulator]:
    """Yield the loop variables whose new value is the old one plus a term."""
    for visit in visits:
        loop = visit.instruction
        if loop.opcode != "while" or (body := program.body(loop)) is None:
            continue
        for index, array in enumerate(loop.arrays):
            is_sum = (
                array.dtype.startswith(_FLOATS)
                and _reaches(program, Value(body, body.root, index)) == 2
            )
            if is_sum and _is_zero(
                program, Value(visit.computation, loop).operand(0, index)
            ):
                yield Accumulator(loop=loop.name, dtype=array.dtype, dims=array.dims)


def _reaches(program: Program, start: Value) -> int:
    """Return 2 if the new value of a loop variable, in the body's result, is the old
    one plus a term, 1 if it is the old.
    """
    found, seen = 0, set[tuple[Any, ...]]()
    todo = [(start, False)]
    while todo:
        value, added = todo.pop()
        value = program.origin(value)
        where, made, element, _ = value
        key = (where.name, made.name, element, added)
        if key in seen:
            continue
        seen.add(key)
        if (
            made.opcode == "parameter"
            and where is start.where
            and element == start.element
        ):
            found = max(found, 1 + added)
        elif made.opcode == "while" and (body := program.body(made)) is not None:
            if kept := _reaches(program, Value(body, body.root, element)):
                todo.append((value.operand(0, element), added or kept == 2))
        elif made.opcode == "conditional":
            todo += [(result, added) for result in program.results(value)]
        elif made.opcode in _ADDS_TO or made.opcode in REDUCERS:
            operands = _ADDS_TO.get(made.opcode, (element or 0,))
            todo += [
                (value.operand(number), added or made.opcode == "add")
                for number in operands
            ]
    return found


def _is_zero(program: Program, value: Value | None) -> bool:
    """Return whether an array is made of zeros, or is a variable of an outer loop that
    starts as zeros.
    """
    while value is not None:
        value = program.origin(value)
        if _EMPTY in value.made.attributes:
            return (
                True  # how a TPU program writes zeros that the first iteration selects
            )
        if value.made.opcode == "constant":
            return set(re.sub(r"[^\d.e]", "", value.made.inner)) <= set("0.") and bool(
                value.made.inner
            )
        value = (
            value.operand(0)
            if value.made.opcode in ("broadcast", "pad", "slice")
            else program.initial(value)
        )
    return False


def _reduces_gradients(
    c: Collective, replica_axes: set[str], gradients: Sequence[tuple[int, ...]]
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

    def signature(dims: tuple[int, ...]) -> tuple[int, ...]:
        # The sorted sizes of the dimensions larger than 1, which a change of layout or
        # a squeeze does not alter.
        return tuple(sorted(n for n in dims if n > 1))

    known = {signature(dims) for dims in gradients}
    # A loop over layers has one layer of an array at a time.
    known |= {sizes[:k] + sizes[k + 1 :] for sizes in known for k in range(len(sizes))}
    return any(signature(dims) in known for _, dims in c.shapes if math.prod(dims) > 1)


def _num_bytes(collectives: Iterable[Collective], trips: Sequence[int]) -> int:
    return sum(c.num_bytes * c.count(trips) for c in collectives)


def _findings(found: Inspection, open_loops: int) -> Iterator[str]:
    """Yield what to know about a program, in sentences."""
    yield from _reduction_findings(found)
    if narrow := {a.dtype for a in found.accumulators} & {"bf16", "f16"}:
        yield (
            f"gradients are summed in {' and '.join(sorted(narrow))}, which loses small"
            " ones after some hundred microbatches"
        )
    if found.not_donated:
        missing = sum(buffer.num_bytes for buffer in found.not_donated)
        names = ", ".join(buffer.name for buffer in found.not_donated[:_LISTED])
        yield (
            f"{missing:,} bytes of arguments are not donated although results could"
            f" take their place, the largest: {names}"
        )
    if open_loops > (0 if set(found.loop_trips) == {1} else len(found.loop_trips)):
        yield (
            "a loop's bound is an argument of the program: counts are those of one"
            " iteration; give loop_trips"
        )


def _reduction_findings(found: Inspection) -> Iterator[str]:
    """Yield where gradients are reduced, and how often."""
    once = [c for c in found.gradient_reductions if c not in found.repeated_reductions]
    total = _num_bytes(_first_sides(found.gradient_reductions), found.loop_trips)
    if found.uses_multi_steps:
        yield (
            "the state is that of optax.MultiSteps: each call is one microbatch and"
            f" runs the optimizer, and reduces {total:,} bytes of gradients in every"
            " microbatch"
        )
    elif found.repeated_reductions:
        number = sum(len(c.shapes) for c in found.repeated_reductions)
        yield (
            f"{number} gradients ({found.repeated_bytes:,} bytes) are reduced"
            f"{_over(found.repeated_reductions)} in every microbatch, inside the loop"
            " that adds them up"
        )
        other = _num_bytes(once, found.loop_trips)
        if other > found.repeated_bytes / 100:
            lost = found.repeated_reductions[:_LISTED]
            yield (
                f"other gradients ({other:,} bytes) are reduced once after the loop,"
                " so these may have lost their reduction tag or local accumulation:"
                f" {', '.join(map(_origin, lost))}"
            )
    elif found.gradient_reductions:
        if any(math.prod(a.dims) > 1 for a in found.accumulators):
            yield (
                f"gradients ({total:,} bytes) are reduced{_over(once)} once, after"
                " the loop that adds them up"
            )
        else:
            yield (
                f"gradients ({total:,} bytes in a run) are reduced{_over(once)};"
                " no loop accumulates"
            )


def _first_sides(collectives: Sequence[Collective]) -> list[Collective]:
    """Return the collectives without the reduce-scatters that continue another one over
    the same axes: that of another side of a torus.
    """

    def continues(c: Collective) -> bool:
        return c.kind == "reduce-scatter" and any(
            (o.kind, o.axes) == (c.kind, c.axes)
            and o.num_bytes == c.num_bytes * o.group_size
            and o.group != c.group
            for o in collectives
        )

    return [c for c in collectives if not continues(c)]


def _origin(c: Collective) -> str:
    """Return the arrays of a collective and where they come from."""
    shapes = ", ".join(
        f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims in c.shapes[:_LISTED]
    )
    return f"{shapes} ({c.op_name})" if c.op_name else shapes


def _over(collectives: Sequence[Collective]) -> str:
    axes = sorted({name for c in collectives for name in c.axes or ()})
    return f" over {' and '.join(axes)}" if axes else ""
