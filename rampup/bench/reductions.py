"""How often, and over how many bytes, a compiled program reduces over devices: read from its text."""

from __future__ import annotations

import functools
import math
import operator
import re
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4}


class Reductions(NamedTuple):
    """All-reduces of one run of a program.

    Attributes:
        number: how many are carried out; one in a loop counts as often as the loop runs.
        num_bytes: how many bytes they reduce, on each device.
        in_loops: how many stand in the bodies of loops.
    """

    number: int
    num_bytes: int
    in_loops: int

    def times(self, runs: int) -> Reductions:
        """Return those of so many runs."""
        return Reductions(self.number * runs, self.num_bytes * runs, self.in_loops)


def all_reduces(hlo: str, *, unknown_trips: int) -> Reductions:
    """Return the all-reduces of a program.

    Args:
        hlo: the compiled program as text.
        unknown_trips: how often a loop runs whose bound is an argument.

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
    found = re.findall(r"^(ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    texts = {name: body for _, name, body in found}

    @functools.cache
    def within(name: str) -> _Found:
        total = _Found()
        for line in texts.get(name, "").splitlines():
            if match := re.search(r"= (.*?) all-reduce(?:-start)?\(", line):
                total = total.plus(_Found(carried_out=1, num_bytes=_bytes_of(match.group(1)), written=1))
            if loop := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                known = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                total = total.plus(within(loop.group(1)).looped(int(known.group(1)) if known else unknown_trips))
            else:
                total = functools.reduce(_Found.plus, map(within, _called(line)), total)
        return total

    whole = functools.reduce(_Found.plus, (within(name) for is_entry, name, _ in found if is_entry), _Found())
    return Reductions(whole.carried_out, whole.num_bytes, whole.in_loops)


class _Found(NamedTuple):
    """All-reduces of one computation: carried out and written down."""

    carried_out: int = 0
    num_bytes: int = 0
    written: int = 0
    in_loops: int = 0

    def plus(self, other: _Found) -> _Found:
        return _Found(*map(operator.add, self, other))

    def looped(self, trips: int) -> _Found:
        return _Found(self.carried_out * trips, self.num_bytes * trips, self.written, self.written)


def _called(line: str) -> list[str]:
    names = re.findall(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%?[\w.\-]+(?:, )?)+)", line)
    return re.findall(r"[\w.\-]+", " ".join(name.replace("%", "") for name in names))


def _bytes_of(shapes: str) -> int:
    bits = 0
    for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        width = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 0)
        bits += width * math.prod(int(size) for size in sizes.split(",") if size)
    return bits // 8
