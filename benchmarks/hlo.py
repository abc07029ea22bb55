"""Counts of collectives in compiled programs, from the reader of
`rampup.contrib.lab.hlo`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from rampup.contrib.lab.collectives import collectives_of
from rampup.contrib.lab.hlo import Program

# a library's matrix product
MATMUL_CALL = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|dot)', re.IGNORECASE)


class Reductions(NamedTuple):
    """All-reduces of one run of a program."""

    number: int = 0  # how many are executed; one in a loop counts once per iteration
    num_bytes: int = 0  # how many bytes they reduce on each device
    in_loops: int = 0  # how many are in the bodies of loops

    def times(self, runs: int) -> Reductions:
        """Return the all-reduces of several runs."""
        return Reductions(self.number * runs, self.num_bytes * runs, self.in_loops)


def all_reduces(hlo: str, *, unknown_trips: int) -> Reductions:
    """Return the all-reduces of a compiled program, whose loops run `unknown_trips`
    times if their bound is an argument.

    Example:
        >>> all_reduces(
        ...     '''
        ... %body (x: f32[]) -> f32[] {
        ...   %a = f32[8,2]{1,0} all-reduce(%x), to_apply=%add
        ... }
        ... ENTRY %main (x: f32[]) -> f32[] {
        ...   %b = f32[] while(%x), condition=%c, body=%body
        ...   %d = (f32[4]{0}, bf16[2]{0}) all-reduce(%b, %b), to_apply=%add
        ... }
        ... ''',
        ...     unknown_trips=3,
        ... )
        Reductions(number=4, num_bytes=212, in_loops=1)
    """
    found = [c for c in collectives_of(Program(hlo)) if c.kind == "all-reduce"]
    counts = [c.count((unknown_trips,)) for c in found]
    num_bytes = sum(count * c.num_bytes for count, c in zip(counts, found, strict=True))
    return Reductions(sum(counts), num_bytes, sum(c.in_loop for c in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops of a program that pass activations on, added up: one for both
    directions, or a forward and a backward one.
    """

    iterations: int | None  # iterations in one step; None if the compiler does not know
    permutes: int  # collective permutes in their bodies
    # matrix products in their bodies; one in a branch counts whether it is taken or not
    matmuls: int


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
    program = Program(hlo)
    trips: dict[tuple[str, ...], int | None] = {}
    permutes: dict[tuple[str, ...], int] = {}
    matmuls: dict[tuple[str, ...], int] = {}
    for visit in program.visits():
        instruction, loops = visit.instruction, visit.loops
        if instruction.opcode == "while":
            trips[(*loops, instruction.name)] = instruction.trips
        permutes[loops] = permutes.get(loops, 0) + (
            instruction.opcode in ("collective-permute", "collective-permute-start")
        )
        is_call = (
            instruction.opcode == "custom-call"
            and MATMUL_CALL.search(instruction.attributes) is not None
        )
        matmuls[loops] = matmuls.get(loops, 0) + (
            is_call or instruction.opcode in ("dot", "convolution")
        )
    found = [loops for loops, number in permutes.items() if number and loops]
    known = [trips[loops] for loops in found]
    return Loops(
        iterations=None if None in known else sum(n for n in known if n is not None),
        permutes=sum(permutes[loops] for loops in found),
        matmuls=sum(matmuls[loops] for loops in found),
    )
