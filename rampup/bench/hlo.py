"""Counts of collectives in compiled programs, read from their text."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4}
_CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)")
_WHILE = re.compile(r" while\(.*body=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_ALL_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
_PERMUTE = re.compile(r" collective-permute(?:-start)?\(")
# Matrix products may be calls of a library.
_MATMUL = re.compile(r" dot\(| custom-call\(.*custom_call_target=\"[^\"]*(?:matmul|gemm)")


class Reductions(NamedTuple):
    """All-reduces of one run of a program."""

    number: int = 0  # how many are executed; one in a loop counts once per iteration
    num_bytes: int = 0  # how many bytes they reduce on each device
    in_loops: int = 0  # how many are in the bodies of loops

    def times(self, runs: int) -> Reductions:
        """Return the all-reduces of several runs."""
        return Reductions(self.number * runs, self.num_bytes * runs, self.in_loops)


def all_reduces(hlo: str, *, unknown_trips: int) -> Reductions:
    """Return the all-reduces of a compiled program, whose loops run `unknown_trips` times if their bound is an argument.

    Example:
        >>> all_reduces('''
        ... %body (x: f32[]) -> f32[] {
        ...   %a = f32[8,2]{1,0} all-reduce(%x), to_apply=%add
        ... }
        ... ENTRY %main (x: f32[]) -> f32[] {
        ...   %b = f32[] while(%x), condition=%c, body=%body
        ...   %d = (f32[4]{0}, bf16[2]{0}) all-reduce(%b, %b), to_apply=%add
        ... }
        ... ''', unknown_trips=3)
        Reductions(number=4, num_bytes=212, in_loops=1)
    """
    entry, lines_of = _computations(hlo)

    @functools.cache
    def within(name: str) -> tuple[int, int, int, int]:
        """Count what one computation executes: all-reduces and their bytes; and those in its text and in its loops."""
        executed = num_bytes = written = in_loops = 0
        for line in lines_of.get(name, ()):
            if match := _ALL_REDUCE.search(line):
                executed, num_bytes, written = executed + 1, num_bytes + _num_bytes(match.group(1)), written + 1
            loop, known = _WHILE.search(line), _TRIPS.search(line)
            trips = 1 if not loop else int(known.group(1)) if known else unknown_trips
            for other in [loop.group(1)] if loop else _called(line):
                found = within(other)
                executed, num_bytes = executed + trips * found[0], num_bytes + trips * found[1]
                written, in_loops = written + found[2], in_loops + (found[2] if loop else found[3])
        return executed, num_bytes, written, in_loops

    executed, num_bytes, _, in_loops = within(entry)
    return Reductions(executed, num_bytes, in_loops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops of a program that pass activations on, added up: one for both directions, or a forward and a backward one."""

    iterations: int | None  # iterations in one step; None if the compiler does not know
    permutes: int  # collective permutes in their bodies
    matmuls: int  # matrix products in their bodies; one in a branch counts whether it is taken or not


def pipeline_loops(hlo: str) -> Loops:
    """Find the loops of a compiled program whose bodies permute, and count.

    Example:
        >>> pipeline_loops('''
        ... %body (x: f32[]) -> f32[] {
        ...   %a = f32[] collective-permute(%x), source_target_pairs={{0,1}}
        ... }
        ... ENTRY %main (x: f32[]) -> f32[] {
        ...   %b = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"11"}}
        ... }
        ... ''')
        Loops(iterations=11, permutes=1, matmuls=0)
    """
    _, lines_of = _computations(hlo)

    @functools.cache
    def within(name: str) -> tuple[int, int]:
        """Count permutes and matmuls in a computation and in those that it calls, except in loops inside it."""
        permutes = matmuls = 0
        for line in lines_of.get(name, ()):
            permutes += bool(_PERMUTE.search(line))
            matmuls += bool(_MATMUL.search(line))
            if not _WHILE.search(line):
                for other in _called(line):
                    permutes, matmuls = permutes + within(other)[0], matmuls + within(other)[1]
        return permutes, matmuls

    loops = [(line, *within(loop.group(1))) for lines in lines_of.values() for line in lines if (loop := _WHILE.search(line))]
    loops = [loop for loop in loops if loop[1]]
    trips = [_TRIPS.search(line) for line, _, _ in loops]
    known = [int(found.group(1)) for found in trips if found]
    return Loops(
        iterations=sum(known) if len(known) == len(loops) else None,
        permutes=sum(permutes for _, permutes, _ in loops),
        matmuls=sum(matmuls for _, _, matmuls in loops),
    )


def _computations(hlo: str) -> tuple[str, dict[str, list[str]]]:
    """Return the name of the entry computation, and the lines of every computation."""
    found = re.findall(r"^(ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    entry = next((name for is_entry, name, _ in found if is_entry), "")
    return entry, {name: body.splitlines() for _, name, body in found}


def _called(line: str) -> list[str]:
    """Return the computations that an instruction calls."""
    return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(line)).replace("%", ""))


def _num_bytes(shapes: str) -> int:
    bits = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        width = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
        bits += width * math.prod(int(size) for size in sizes.split(",") if size)
    return bits // 8
