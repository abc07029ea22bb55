"""`rampup design`: from measurements to a ramp."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import rampup
from rampup.cli import common
from rampup.cli.common import Result, arg
from rampup.config.files import yaml_text
from rampup.config.schema import Config
from rampup.contrib.lab.prediction import with_ends, write_prediction
from rampup.loop import run_folder as files
from rampup.plan.numbers import parse_count
from rampup.show.console import print_notes, print_table
from rampup.show.format import format_si, format_value

DESIGN = {
    "config": arg(
        "CONFIG.yml|RUN_DIR", "a configuration file, or the folder of a measured run"
    ),
    **common.OVERRIDES,
    "--train-tokens": arg("TOKENS", "tokens of the run to design, such as 300B"),
    "--measured": arg(
        "RUN_DIR",
        "a measured run, or a file with the output of `rampup tune --json`, for step"
        " times; can be repeated",
        action="append",
        default=[],
    ),
    "--max-batch": arg("SAMPLES", "largest global batch to consider"),
    "--assume-growth": arg(
        "POWER",
        "power of the noise scale's growth after its last measurement, such as 0.47, or"
        " 0 for none; needed if it would exceed 4 times the measured one",
        type=float,
    ),
    **common.DEVICES,
    "--write": arg(
        "RUN_DIR",
        "make the folder of a new run with the fastest schedule, and keep the"
        " prediction in it: `rampup train RUN_DIR` starts it (the keys of another"
        " schedule may follow), and `rampup report RUN_DIR` shows how far off the"
        " prediction was",
    ),
}


def design(args: argparse.Namespace) -> Result:
    """Design schedules, and predict their steps, hours and loss."""
    source = files.as_path(args.config)
    file, folders = args.config, [files.as_path(path) for path in args.measured]
    if source.is_dir():
        file, folders = common.run_config(source), [source, *folders]
    config = rampup.load_config(file, args.overrides, environ=os.environ)
    written = None if args.write is None else files.absolute_path(args.write)
    if written is not None and written.exists():
        raise common.usage_error(
            f"{written} exists; name the folder of a new run", key="write"
        )
    devices = common.count_devices(args, config)
    facts = rampup.contrib.lab.design_ramp(
        config,
        folders,
        num_devices=devices,
        train_tokens=_count(args.train_tokens, "train-tokens"),
        max_batch=_count(args.max_batch, "max-batch"),
        assume_growth=args.assume_growth,
    )
    if written is not None:
        _write_run(written, config, facts, devices)
    return Result(
        facts=facts, show=lambda console: print_design(facts, console, written)
    )


def _count(text: str | None, name: str) -> int | None:
    return None if text is None else parse_count(text, what=name, key=name)


def _write_run(
    folder: Path, config: Config, facts: Mapping[str, Any], devices: int
) -> None:
    """Make the folder of a run with the fastest schedule, and keep the prediction."""
    fastest = next(
        each for each in facts["candidates"] if each["name"] == facts["fastest"]
    )
    config = replace(
        config,
        num_devices=devices,
        run_name=folder.name,
        base_output_directory=str(folder.parent),
        **fastest["settings"],
    )
    # Not above: it loads JAX.
    from rampup.lm.start import run_folder

    run_folder(config.base_output_directory, config.run_name)
    # First, so that no run is started without it.
    write_prediction(folder, config, facts)
    text = yaml_text(
        "# The configuration of a designed run, until it is started.\n",
        config.keys(),
        config.to_dict(),
    )
    files.write_whole(folder / files.CONFIG_FILE, text.encode())


def print_design(
    facts: Mapping[str, Any], console: Console, written: Path | None = None
) -> None:
    """Print the candidates with their steps, time and loss, their schedules, what the
    ramp gains, and the assumptions.
    """
    start, end = (
        _with_ends(facts, f"noise_scale_{place}", format_value)
        for place in ("start", "end")
    )
    capped = (
        ", capped: it was measured to grow faster" * facts["noise_growth_is_capped"]
    )
    console.print(
        f"{format_si(facts['train_tokens'])} tokens, {facts['train_samples']:,} samples;"
        f" noise scale in samples: {start} at the start, {end} at the end"
        f" ({facts['noise_source']}; last measured:"
        f" {format_value(facts['noise_scale_last_measured'])}, then growing with the"
        f" power {facts['noise_growth']:.2f}{capped})"
    )
    console.print(
        "a batch of the noise scale costs 100% more tokens than a very small one, a"
        " fifth of it 20%"
    )
    unit, per_hour = "hours", 1
    if max(each["hours"] for each in facts["candidates"]) < 1:
        unit, per_hour = "minutes", 60

    def time(hours: float) -> str:
        return format_value(hours * per_hour)

    forms = {"hours": time, "loss_penalty": "{:.4f}".format, "hours_to_same_loss": time}
    rows = []
    for each in facts["candidates"]:
        name = each["name"] + " *" * (each["name"] == facts["fastest"])
        cells = (_with_ends(each, key, form) for key, form in forms.items())
        rows.append((name, f"{each['steps']:,}", *cells))
    titles = ("schedule", "steps", unit, "loss penalty", f"{unit} to\nsame loss")
    print_table(console, titles, rows, left=1)
    console.print("*: the fastest to the loss that the smallest batch has at the end")
    for each in facts["candidates"]:
        rule = " ".join(f"{key}={value}" for key, value in each["rate_rule"].items())
        console.print(
            f"{each['name']}: enable_rampup_batch_size=false"
            f' batch_size_schedule="{each["batch_size_schedule"]}" {rule}'
        )
        console.print(
            f"  {_with_ends(each, 'token_overhead', '{:.0%}'.format)} more tokens"
            " than a very small batch"
        )
    console.print(
        f"The ramp saves {facts['hours_saved']:.1%} of the hours of the best constant"
        f" batch among these sizes. One between them may be better: against the best of"
        f" any size, with a noise scale that always grows with a power of"
        f" {facts['noise_growth']:.2f} and step times on a line, no ramp saves more than"
        f" {facts['most_hours_saved']:.1%}."
    )
    console.print("This is a model, not a measurement. It assumes:")
    for sentence in facts["assumptions"]:
        console.print(f"- {sentence}")
    print_notes(facts["notes"], console)
    if written is not None:
        console.print(
            f"wrote {written}: `rampup train {written}` starts {facts['fastest']}",
            soft_wrap=True,
        )


def _with_ends(facts: Mapping[str, Any], key: str, text: Callable[[float], str]) -> str:
    """Return a prediction as text, with its interval if that shows."""
    value, low, high = (facts[f"{key}{end}"] for end in ("", "_low", "_high"))
    return with_ends(value, low, high, text)
