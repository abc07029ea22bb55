"""A reader of compiled programs: the text of XLA's optimized HLO, of a CPU, GPU or TPU,
as instructions that can be walked.

Each instruction is visited together with how often a run executes it: the trip counts
of the loops around it, multiplied. The compiler states one (`known_trip_count`), or it
follows from the loop's condition, as TPU programs need. A loop whose bound is an
argument of the program, such as rampup's own loop over microbatches, has none: its
iterations are the caller's to say.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rampup.errors import DataError

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAMES = re.compile(r"%([\w.\-]+)")
# Operations that pass a value on unchanged, for finding where it comes from.
_PASS_ON = {
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "bitcast-convert",
    "convert",
    "reshape",
    "transpose",
}
_PASS_ON |= {"opt-barrier", "optimization-barrier"}


class Array(NamedTuple):
    """An array of a program, as one device has it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes without the padding of a layout."""
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.sub(r"\D.*", "", self.dtype[1:].lstrip("f")) or 0)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of the result; several if it is a tuple
    operands: tuple[str, ...]
    inner: str  # the text between the parentheses
    attributes: str  # the text after them
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The operation of the traced function that this one comes from, or ''."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1).replace("\\'", "'") if match else ""

    def number(self, name: str) -> int:
        """Return the number of an attribute, such as the `index` of a
        `get-tuple-element`; 0 if it has none.
        """
        match = re.search(rf'\b{name}="?(\d+)', self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def called(self) -> list[str]:
        """The computations that it calls, other than a loop's."""
        lists = re.findall(
            r"\b(?:calls|to_apply|\w+_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)",
            self.attributes,
        )
        return re.findall(r"[\w.\-]+", " ".join(lists))


class Computation(NamedTuple):
    """A named list of instructions, in the order of their schedule."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The result."""
        made = list(self.instructions.values())
        return next((each for each in made if each.is_root), made[-1])

    @property
    def parameters(self) -> dict[int, Instruction]:
        """The arguments by number."""
        return {
            int(i.inner): i
            for i in self.instructions.values()
            if i.opcode == "parameter"
        }

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return what makes the operands of an instruction; one without arrays where
        the text does not say.
        """
        return [self.instructions.get(name, _UNKNOWN) for name in instruction.operands]


class Value(NamedTuple):
    """The result of an instruction, or one element of it if it is a tuple."""

    where: Computation
    made: Instruction
    element: int | None = None
    # The fusions, calls and branches that led into `where`, from outside in, each with
    # the names of its arguments.
    sites: tuple[tuple[Computation, tuple[str, ...]], ...] = ()

    def operand(self, number: int, element: int | None = None) -> Value:
        """Return an operand of the instruction."""
        made = self.where.operands(self.made)[number : number + 1] or [_UNKNOWN]
        return Value(self.where, made[0], element, self.sites)


_UNKNOWN = Instruction(
    name="",
    opcode="unknown",
    arrays=(),
    operands=(),
    inner="",
    attributes="",
    is_root=False,
)


class Visit(NamedTuple):
    """An instruction, and how often one run of the program executes it."""

    instruction: Instruction
    computation: Computation
    runs: int  # product of the trip counts of the loops around it that are known
    open_loops: (
        int  # loops around it whose bound is an argument, which `runs` leaves out
    )
    loops: tuple[str, ...]  # names of all loops around it, from outside in


class Program:
    """A compiled program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""  # name of the computation that a run starts with
        header = text[: text.find("\n")]
        # in the order in which they run
        self.is_scheduled = "is_scheduled=true" in header
        # Position in the results -> number of the argument whose memory it takes over:
        # the donated arguments.
        start = header.find("input_output_alias={")
        stated = header[start : header.find(" }", start)] if start >= 0 else ""
        found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", stated)
        self.aliases = {
            int(out.split(",")[0] or 0): int(number) for out, number in found
        }
        self.num_partitions = math.prod(
            int(n)
            for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        )
        self._read(text)
        # Where a computation is a loop's body or condition, and where else it is called.
        self._loops: dict[str, tuple[Computation, Instruction]] = {}
        self._sites: dict[str, tuple[Computation, tuple[str, ...]]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions.values():
                place = computation, instruction
                if instruction.opcode == "while":
                    self._loops.update(dict.fromkeys(loop_parts(instruction), place))
                elif instruction.opcode in _CALLS:
                    for inner in self.results(Value(*place)):
                        self._sites[inner.where.name] = inner.sites[-1]

    def _read(self, text: str) -> None:
        """Read the computations, or refuse a text that is none or is cut short."""
        current: dict[str, Instruction] | None = None
        for line in text.splitlines():
            if current is None:
                if match := _HEADER.match(line):
                    current = {}
                    self.computations[match[2]] = Computation(match[2], current)
                    self.entry = match[2] if match[1] else self.entry
            elif line.rstrip() == "}" or line.startswith('}, execution_thread="'):
                current = None
            elif (instruction := _parse_line(line)) is not None:
                current[instruction.name] = instruction
        if not self.entry:
            raise DataError(
                "this is not the text of a compiled program: no line starts with ENTRY;"
                " see `compiled.as_text()`"
            )
        if current is not None or not self.computations[self.entry].instructions:
            raise DataError(
                "the text of the program is cut short: a computation has no end; write"
                " it again"
            )

    def body(self, loop: Instruction) -> Computation | None:
        """Return the body of a loop, or None if it is not in the text."""
        found = self.computations.get(loop_parts(loop)[0])
        return found if found is not None and found.instructions else None

    def initial(self, value: Value) -> Value | None:
        """Return the first value of an element of a loop's state, or None if the value
        is not one.
        """
        where, made, element, _ = value
        is_state = (
            made.opcode == "parameter"
            and element is not None
            and where.name in self._loops
        )
        return Value(*self._loops[where.name]).operand(0, element) if is_state else None

    def results(self, value: Value) -> Iterator[Value]:
        """Yield the result of a fusion or call, or that of every branch of a
        conditional.
        """
        where, made, element, sites = value
        for number, name in enumerate(made.called):
            arguments = (
                made.operands[number + 1 : number + 2]
                if made.opcode == "conditional"
                else made.operands
            )
            inner = self.computations.get(name)
            if inner is not None and inner.instructions:
                yield Value(inner, inner.root, element, (*sites, (where, arguments)))

    def origin(self, value: Value) -> Value:
        """Follow a value through copies, tuples, fusions and calls to the operation,
        loop, conditional or argument behind.
        """
        source: Value | None = value
        while source is not None:
            value, source = source, None
            where, made, element, sites = value
            if made.opcode in _PASS_ON:
                source = value.operand(0, element)
            elif made.opcode == "get-tuple-element" and element is None:
                source = value.operand(0, made.number("index"))
            elif made.opcode == "tuple" and element is not None:
                source = value.operand(element)
            elif made.opcode in ("fusion", "call"):
                source = next(self.results(value), None)
            elif made.opcode == "parameter" and (sites or where.name in self._sites):
                outside, arguments = sites[-1] if sites else self._sites[where.name]
                for name in arguments[int(made.inner) :][:1]:
                    source = Value(
                        outside,
                        outside.instructions.get(name, _UNKNOWN),
                        element,
                        sites[:-1],
                    )
        return value

    def visits(
        self, computation: Computation | None = None, around: Visit | None = None
    ) -> Iterator[Visit]:
        """Yield every instruction that a run may execute, each place that calls a
        computation separately.
        """
        computation = computation or self.computations[self.entry]
        around = around or Visit(_UNKNOWN, computation, 1, 0, ())
        for instruction in computation.instructions.values():
            visit = around._replace(instruction=instruction, computation=computation)
            yield visit
            if instruction.opcode == "while":
                trips = self.trips(instruction.name, computation.name)
                inside = visit._replace(loops=(*visit.loops, instruction.name))
                if trips is None:
                    inside = inside._replace(open_loops=visit.open_loops + 1)
                else:
                    inside = inside._replace(runs=visit.runs * trips)
                if (body := self.body(instruction)) is not None:
                    yield from self.visits(body, inside)
            elif instruction.opcode not in REDUCERS:
                for name in instruction.called:
                    if name in self.computations:
                        yield from self.visits(self.computations[name], visit)

    @functools.cache  # noqa: B019 - programs are few
    def trips(self, loop: str, computation: str) -> int | None:
        """Return the iterations of a loop, or None if its bound is an argument of the
        program.
        """
        instruction = self.computations[computation].instructions[loop]
        if known := re.search(
            r'known_trip_count":\{"n":"(\d+)"', instruction.attributes
        ):
            return int(known.group(1))
        body = self.body(instruction)
        condition = self.computations.get(loop_parts(instruction)[1])
        if body is None or condition is None or not condition.instructions:
            return None
        # The condition is `counter < bound`. The counter has a start and a step.
        test = self.origin(Value(condition, condition.root))
        direction = re.search(r"direction=(\w+)", test.made.attributes)
        if (
            test.made.opcode != "compare"
            or direction is None
            or direction.group(1) not in ("LT", "LE", "GT", "GE")
        ):
            return None
        is_greater = direction.group(1) in ("GT", "GE")
        counter = self.origin(test.operand(is_greater))
        initial = self.initial(counter)
        bound = self._constant(test.operand(not is_greater))
        first = None if initial is None else self._constant(initial)
        next_ = self.origin(Value(body, body.root, counter.element))
        steps = (
            [self._constant(next_.operand(n)) for n in (0, 1)]
            if next_.made.opcode == "add"
            else []
        )
        step = next((n for n in steps if n is not None), 0)
        if first is None or bound is None or step < 1:
            return None
        return max(-((first - bound - (direction.group(1) in ("LE", "GE"))) // step), 0)

    def _constant(self, value: Value) -> int | None:
        """Return the integer that a value is, also if loops around pass it in
        unchanged; None if it is not constant.
        """
        value = self.origin(value)
        if value.made.opcode == "constant":
            return (
                int(value.made.inner)
                if re.fullmatch(r"-?\d+", value.made.inner)
                else None
            )
        initial = self.initial(value)
        if (
            initial is None
            or (body := self.body(self._loops[value.where.name][1])) is None
        ):
            return None
        kept = self.origin(Value(body, body.root, value.element))
        is_kept = (
            kept.where is body
            and kept.made.opcode == "parameter"
            and kept.element == value.element
        )
        return self._constant(initial) if is_kept else None


_CALLS = {"fusion", "call", "conditional"}
# Operations whose computation works on single numbers.
REDUCERS = {"reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"}
REDUCERS |= {"all-reduce", "all-reduce-start", "reduce-scatter"}


def loop_parts(loop: Instruction) -> tuple[str, str]:
    """Return the names of a loop's body and condition."""
    body = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)
    condition = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
    return body.group(1) if body else "", condition.group(1) if condition else ""


def times(runs: int, open_loops: int, loop_trips: Sequence[int]) -> int:
    """Return how often something is executed in all: `runs` in one iteration of the
    `open_loops`, whose bound is an argument.

    `loop_trips` are the iterations of these loops, from outside in; deeper ones count
    once.

    >>> (
    ...     times(2, 1, (8,)),
    ...     times(1, 2, (3, 11)),
    ...     times(5, 0, (8,)),
    ...     times(2, 2, (8,)),
    ... )
    (16, 33, 5, 16)
    """
    return runs * math.prod(loop_trips[:open_loops])


def _parse_line(line: str) -> Instruction | None:
    """Return the instruction of a line `[ROOT] %name = type opcode(operands),
    attributes`.
    """
    match = _LINE.match(line)
    if match is None:
        return None
    start = match.end()
    # A tuple type has parentheses, and so have the layouts in it.
    end = _closing(line, start) + 1 if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    inner = line[opcode.end() : close]
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        arrays=tuple(
            Array(
                dtype, tuple(int(n.removeprefix("<=")) for n in sizes.split(",") if n)
            )
            for dtype, sizes in _ARRAY.findall(line[start:end])
        ),
        operands=tuple(_NAMES.findall(inner)),
        inner=inner,
        attributes=line[close + 1 :],
        is_root=match[1] is not None,
    )


def _closing(line: str, start: int) -> int:
    """Return the place of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
