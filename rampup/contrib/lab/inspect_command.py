"""`rampup inspect`: what a compiled program sends, sums, updates and stores."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result, arg
from rampup.errors import ConfigError

INSPECT = {
    "program": arg(
        "FILE", "the text of a compiled program, as compiled.as_text() gives it"
    ),
    "--mesh": arg(
        "AXES",
        "the axes of its mesh, such as data=4,fsdp=2, to name those of collectives",
    ),
    "--loop-trips": arg(
        "N[,N]", "iterations of loops whose bound is an argument, from outside in"
    ),
}


def inspect(args: argparse.Namespace) -> Result:
    """Read a compiled program."""
    mesh = None
    if args.mesh is not None:
        pairs = [part.partition("=") for part in args.mesh.split(",")]
        if any(not name.strip() or not sign for name, sign, _ in pairs):
            raise ConfigError(
                f"--mesh={args.mesh} must name axes with their sizes, such as"
                " data=4,fsdp=2",
                key="mesh",
            )
        mesh = tuple((name.strip(), _number(size, "mesh")) for name, _, size in pairs)
    trips = (
        None
        if args.loop_trips is None
        else tuple(_number(n, "loop-trips") for n in args.loop_trips.split(","))
    )
    # With JAX, which wrong usage need not load.
    from rampup.contrib.lab.inspection import inspect as inspect_program

    found = inspect_program(args.program, mesh=mesh, loop_trips=trips)
    return Result(facts=found.to_dict(), show=lambda console: console.print(str(found)))


def _number(text: str, key: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--{key}: {text.strip()!r} must be a whole number of at least 1",
            key=key,
            nearest=(1,),
        )
    return int(text)
