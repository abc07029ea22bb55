"""`rampup explain topology`: the slices of TPUs for which a run can be planned."""

from __future__ import annotations

import argparse

from rich.console import Console

from rampup.cli.common import Result
from rampup.plan.topology import known_topologies
from rampup.show.console import print_table
from rampup.show.format import format_bytes, format_value


def explain(args: argparse.Namespace) -> Result:
    """List the topologies."""
    slices = [topology.to_dict() for topology in known_topologies()]

    def show(console: Console) -> None:
        rows = [
            (
                row["name"],
                row["product_name"],
                format_value(row["num_devices"]),
                format_bytes(row["hbm_bytes"]),
            )
            for row in slices
        ]
        print_table(console, ("topology", "product", "devices", "HBM"), rows, left=2)
        console.print(
            "HBM is what the compiler (libtpu 0.0.50) lets a program use. Several"
            " slices: 2*v5e:4x4; larger v4, v5p and tpu7x slices have sides that are"
            " multiples of 4"
        )

    return Result(facts={"topologies": slices}, show=show)
