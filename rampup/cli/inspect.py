"""`rampup inspect`: what a compiled program does between devices and with memory."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rampup.cli.common import Result
from rampup.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup inspect`."""
    parser.add_argument("program", metavar="FILE", help="the text of a compiled program: compiled.as_text(), or XLA's dump")
    parser.add_argument(
        "--mesh", metavar="AXES", help="the axes of its mesh, such as data=4,fsdp=2, to name those of collectives"
    )
    parser.add_argument("--loop-trips", metavar="N[,N]", help="iterations of loops whose bound is an argument, from outside in")


def run(args: argparse.Namespace, console: object) -> Result:
    """Read a program."""
    mesh = None if args.mesh is None else _parse_mesh(args.mesh)
    trips = None if args.loop_trips is None else tuple(_number(n, "loop-trips") for n in args.loop_trips.split(","))
    from rampup.run.inspect import inspect

    facts = inspect(args.program, mesh=mesh, loop_trips=trips).to_dict()
    return Result(facts=facts, show=lambda console: _print(facts, console))


def _parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """Return names and sizes of the axes."""
    pairs = [part.partition("=") for part in text.split(",")]
    if any(not name.strip() or not sign for name, sign, _ in pairs):
        raise ConfigError(f"--mesh={text} must name axes with their sizes, such as data=4,fsdp=2", key="mesh")
    return tuple((name.strip(), _number(size, "mesh")) for name, _, size in pairs)


def _number(text: str, key: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"--{key}: {text.strip()!r} must be a whole number of at least 1", key=key, nearest=(1,))
    return int(text)


def _print(facts: Mapping[str, Any], console: Console) -> None:
    from rampup.show.format import format_bytes, format_si
    from rampup.show.tuning import collectives_table

    for finding in facts["findings"]:
        console.print(f"- {finding}")
    console.print("collectives of a run, for each device:" if facts["collectives"] else "no collectives")
    if facts["collectives"]:
        console.print(collectives_table(facts["collectives"], console))
    sums = ", ".join(f"{row['arrays']} of {dtype}" for dtype, row in facts["accumulators"].items()) or "none"
    console.print(f"accumulators of loops: {sums}")
    updates = facts["optimizer_updates"]
    console.print(f"updates of the training state in a run: {'unknown' if updates is None else updates}")
    donated = facts["donated"]
    console.print(f"donated: {donated['buffers']} buffers, {format_bytes(donated['bytes'])}")
    flops = ", ".join(f"{format_si(number)}FLOP in {dtype}" for dtype, number in facts["flops"].items()) or "none"
    console.print(f"matrix products: {flops}; memory traffic: {format_bytes(facts['memory_bytes'])}")
