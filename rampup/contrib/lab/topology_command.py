"""`rampup explain topology`: the slices of TPUs for which a run can be planned."""

from __future__ import annotations

import argparse

from rich.console import Console

from rampup.cli.common import Result
from rampup.engine.compile import topology_facts
from rampup.plan.topology import known_topologies
from rampup.show.console import make_table
from rampup.show.format import format_bytes, format_value


def explain(args: argparse.Namespace) -> Result:
    """List the topologies."""
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
