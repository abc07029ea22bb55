"""`rampup explain`: a key of the configuration, or the TPU slices that `--topology` takes."""

from __future__ import annotations

import argparse

from rich.console import Console

from rampup.cli.common import Result, arg
from rampup.config.files import BASE_FILE, explain
from rampup.rl.config import ROLLOUT_FILE
from rampup.show.console import make_table, print_explanation
from rampup.show.format import format_bytes, format_value

ARGUMENTS = {"key": arg("KEY", "a key of base.yml or rl.yml, or the word topology")}


def run(args: argparse.Namespace, console: object) -> Result:
    """Explain a key, or list the topologies."""
    if args.key == "topology":
        from rampup.engine.tpu_options import topology_facts
        from rampup.plan.topology import known_topologies

        rows = [topology_facts(topology) for topology in known_topologies()]

        def show(console: Console) -> None:
            titles = ["topology", "product", "devices", "HBM", "bfloat16\nTFLOP/s", "HBM\nGB/s", "links\nGB/s"]
            scales = {"peak_flops": 1e12, "hbm_bandwidth": 1e9, "ici_bandwidth": 1e9}
            table = make_table(console, titles, left=2)
            for row in rows:
                rates = [f"{row[name] / scale:,.4g}" for name, scale in scales.items()]
                sizes = (format_value(row["num_devices"]), format_bytes(row["hbm_bytes"]))
                table.add_row(row["name"], row["product_name"], *sizes, *rates)
            console.print(table)
            console.print(
                "HBM is what the compiler (libtpu 0.0.50) lets a program use; the other figures are published, for one device:"
            )
            for source in dict.fromkeys(row["source"] for row in rows):
                console.print(f"  {source}")
            console.print("several slices: 2*v5e:4x4; larger v4, v5p and tpu7x slices have sides that are multiples of 4")

        return Result(facts={"topologies": rows}, show=show)
    explanation = explain(args.key, (BASE_FILE, ROLLOUT_FILE))
    return Result(facts=explanation, show=lambda console: print_explanation(explanation, console))
