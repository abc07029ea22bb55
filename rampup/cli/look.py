"""`rampup timetable`, `rows`, `inspect` and `explain`: a pipeline, the rows of a step,
a compiled program, a key.
"""

from __future__ import annotations

import argparse

from rich.console import Console

import rampup
from rampup.cli.common import CONFIG, DEVICES, Result, arg, read_plan
from rampup.config import files
from rampup.contrib.rl.config import ROLLOUT_FILE
from rampup.errors import ConfigError
from rampup.plan.numbers import exact_fraction
from rampup.plan.pipeline import Timetable
from rampup.show.console import make_table, print_explanation, print_timetable
from rampup.show.format import format_bytes, format_value

TIMETABLE = {
    "--stages": arg("P", "pipeline stages", type=int, required=True),
    "--microbatches": arg("M", "microbatches of one pass", type=int, required=True),
    "--repeats": arg("V", "layer chunks per stage (default 1)", type=int, default=1),
    "--schedule": arg(
        "NAME",
        "gpipe, 1f1b (default), interleaved (default with repeats), circular or zb-h1",
    ),
    "--forward-cost": arg("T", "of a whole stage (default 1)", default="1"),
    "--backward-cost": arg("T", "of a whole stage (default 2)", default="2"),
    "-o --output": arg("FILE", "draw it into a .png, .svg or .pdf file"),
}
ROWS = (
    CONFIG
    | DEVICES
    | {
        "--step": arg(
            "N", "the optimizer step, counted from 0", type=int, required=True
        )
    }
)
INSPECT = {
    "program": arg(
        "FILE", "the text of a compiled program: compiled.as_text(), or XLA's dump"
    ),
    "--mesh": arg(
        "AXES",
        "the axes of its mesh, such as data=4,fsdp=2, to name those of collectives",
    ),
    "--loop-trips": arg(
        "N[,N]", "iterations of loops whose bound is an argument, from outside in"
    ),
}
EXPLAIN = {"key": arg("KEY", "a key of base.yml or rl.yml, or the word topology")}


def timetable(args: argparse.Namespace) -> Result:
    """Build a timetable, and draw it if an output is given."""
    table = Timetable.build(
        args.schedule or ("interleaved" if args.repeats > 1 else "1f1b"),
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        num_repeats=args.repeats,
        forward_cost=exact_fraction(
            args.forward_cost, what="forward-cost", key="forward-cost"
        ),
        backward_cost=exact_fraction(
            args.backward_cost, what="backward-cost", key="backward-cost"
        ),
    )
    if args.output:
        from rampup.show.figures import draw_timetable

        draw_timetable(table, args.output)
    return Result(
        facts=table.to_dict(), show=lambda console: print_timetable(table, console)
    )


def rows(args: argparse.Namespace) -> Result:
    """List the rows that an optimizer step reads."""
    from rampup.lm.train import rows_of_step

    found = rows_of_step(*read_plan(args, args.config, args.overrides), args.step)
    lines = "\n".join(f"sample {row['sample']:,}: {row['source']}" for row in found)
    facts = {"step": args.step, "global_batch_size": len(found), "rows": found}
    return Result(facts=facts, show=lambda console: console.print(lines))


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
    found = rampup.contrib.lab.inspect(args.program, mesh=mesh, loop_trips=trips)
    return Result(facts=found.to_dict(), show=lambda console: console.print(str(found)))


def _number(text: str, key: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--{key}: {text.strip()!r} must be a whole number of at least 1",
            key=key,
            nearest=(1,),
        )
    return int(text)


def explain(args: argparse.Namespace) -> Result:
    """Explain a key, or list the topologies."""
    if args.key != "topology":
        explanation = files.explain(args.key, (files.BASE_FILE, ROLLOUT_FILE))
        return Result(
            facts=explanation,
            show=lambda console: print_explanation(explanation, console),
        )
    from rampup.engine.compile import topology_facts
    from rampup.plan.topology import known_topologies

    slices = [topology_facts(topology) for topology in known_topologies()]

    def show(console: Console) -> None:
        titles = [
            "topology",
            "product",
            "devices",
            "HBM",
            "bfloat16\nTFLOP/s",
            "HBM\nGB/s",
            "links\nGB/s",
        ]
        scales = {"peak_flops": 1e12, "hbm_bandwidth": 1e9, "ici_bandwidth": 1e9}
        table = make_table(console, titles, left=2)
        for row in slices:
            rates = [f"{row[name] / scale:,.4g}" for name, scale in scales.items()]
            sizes = (format_value(row["num_devices"]), format_bytes(row["hbm_bytes"]))
            table.add_row(row["name"], row["product_name"], *sizes, *rates)
        console.print(table)
        hbm = "HBM is what the compiler (libtpu 0.0.50) lets a program use"
        console.print(f"{hbm}; the other figures are published, for one device:")
        for source in dict.fromkeys(row["source"] for row in slices):
            console.print(f"  {source}")
        console.print(
            "several slices: 2*v5e:4x4; larger v4, v5p and tpu7x slices have sides that"
            " are multiples of 4"
        )

    return Result(facts={"topologies": slices}, show=show)
