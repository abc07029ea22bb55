"""A reader of compiled programs: the text of XLA's optimized HLO, of a CPU, GPU or TPU,
as instructions that can be walked.

Each instruction is visited together with how often a run executes it: the trip counts
of the loops around it, multiplied, as far as the compiler states them
(`known_trip_count`). It states none for a loop whose bound is an argument of the
program, such as rampup's own loop over microbatches, and on a TPU for no loop: these are
*open*, and their iterations are the caller's to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rampup.errors import DataError

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "token": 0}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAMES = re.compile(r"%([\w.\-]+)")


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
    attributes: str  # the text after the operands

    @property
    def op_name(self) -> str:
        """The operation of the traced function that this one comes from, or ''."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match.group(1).replace("\\'", "'") if match else ""

    def number(self, name: str) -> int:
        """Return the number of an attribute, such as `channel_id`; 0 if it has
        none.
        """
        match = re.search(rf'\b{name}="?(\d+)', self.attributes)
        return int(match.group(1)) if match else 0

    @property
    def trips(self) -> int | None:
        """The iterations of a loop, if the compiler states them."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(known.group(1)) if known else None

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

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return what makes the operands of an instruction; one without arrays where
        the text does not say.
        """
        return [self.instructions.get(name, _UNKNOWN) for name in instruction.operands]


_UNKNOWN = Instruction(
    name="",
    opcode="unknown",
    arrays=(),
    operands=(),
    attributes="",
)


class Visit(NamedTuple):
    """An instruction, and how often one run of the program executes it."""

    instruction: Instruction
    computation: Computation
    runs: int  # product of the trip counts of the loops around it that are known
    # loops around it whose trip count is not known, which `runs` leaves out
    open_loops: int
    loops: tuple[str, ...]  # names of all loops around it, from outside in


class Program:
    """A compiled program."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, Computation] = {}
        self.entry = ""  # name of the computation that a run starts with
        header = text[: text.find("\n")]
        # in the order in which they run
        self.is_scheduled = "is_scheduled=true" in header
        sizes = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
        self.num_partitions = math.prod(map(int, sizes))
        self._read(text)

    @property
    def parameters(self) -> list[Instruction]:
        """The arguments of a run."""
        made = self.computations[self.entry].instructions.values()
        return [each for each in made if each.opcode == "parameter"]

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
            inside = visit
            if instruction.opcode == "while":
                inside = _inside_loop(visit)
            for name in _parts(instruction):
                if name in self.computations:
                    yield from self.visits(self.computations[name], inside)


def _inside_loop(loop: Visit) -> Visit:
    """Return how often a run executes what is in the body of a loop."""
    inside = loop._replace(loops=(*loop.loops, loop.instruction.name))
    trips = loop.instruction.trips
    if trips is None:
        return inside._replace(open_loops=loop.open_loops + 1)
    return inside._replace(runs=loop.runs * trips)


def _parts(instruction: Instruction) -> list[str]:
    """Return the names of the computations that an instruction runs: of a loop its
    body, whose condition is only numbers.
    """
    if instruction.opcode == "while":
        return re.findall(r"\bbody=%?([\w.\-]+)", instruction.attributes)
    return [] if instruction.opcode in _REDUCERS else instruction.called


# Operations whose computation works on single numbers.
_REDUCERS = {"reduce", "reduce-window", "scatter", "sort", "map", "select-and-scatter"}
_REDUCERS |= {"all-reduce", "all-reduce-start", "reduce-scatter"}


def times(runs: int, open_loops: int, loop_trips: Sequence[int]) -> int:
    """Return how often something is executed in all: `runs` in one iteration of the
    `open_loops`, whose trip count is not known.

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
    return Instruction(
        name=match[1],
        opcode=opcode[1],
        arrays=tuple(
            Array(dtype, tuple(map(int, re.findall(r"\d+", sizes))))
            for dtype, sizes in _ARRAY.findall(line[start:end])
        ),
        operands=tuple(_NAMES.findall(line[opcode.end() : close])),
        attributes=line[close + 1 :],
    )


def _closing(line: str, start: int) -> int:
    """Return the place of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
