"""`rampup design`: from measurements to a ramp."""

from __future__ import annotations

import argparse
import math
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
from rampup.contrib.lab.prediction import with_ends, write_prediction
from rampup.contrib.rl import config as rl
from rampup.loop import run_folder as files
from rampup.plan.noise_scale import NoiseEstimate
from rampup.plan.numbers import AUTO, parse_count
from rampup.show.console import make_table, print_notes
from rampup.show.figures import (
    DEFAULT_WIDTH,
    LINES,
    check_picture,
    line_style,
    new_figure,
    prepare,
    save,
)
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
    "--cost-per-prompt": arg(
        "RESPONSES",
        "of a run of reinforcement learning: the cost of a prompt in units of that of"
        " one response; default 0",
        type=float,
    ),
    "--write": arg(
        "RUN_DIR",
        "make the folder of a new run with the fastest schedule, and keep the"
        " prediction in it: `rampup train RUN_DIR` starts it (the keys of another"
        " schedule may follow), and `rampup report RUN_DIR` shows how far off the"
        " prediction was",
    ),
    "-o --output": arg("FILE", "draw the candidates into a .png, .svg or .pdf file"),
}


def design(args: argparse.Namespace) -> Result:
    """Design schedules, and predict their steps, hours and loss; of a run of rollouts,
    the sizes that its noise is worth.
    """
    source = files.as_path(args.config)
    if (
        source.is_dir()
        and (source / files.CONFIG_FILE).is_file()
        and rl.is_rollout_file(source / files.CONFIG_FILE)
    ):
        return _rollout_sizes(args, source)
    if args.cost_per_prompt is not None:
        rule = (
            "--cost-per-prompt is for the folder of a run of reinforcement learning;"
            " leave it out"
        )
        raise common.usage_error(rule, key="cost-per-prompt")
    file = args.config
    folders = [files.as_path(path) for path in args.measured]
    if source.is_dir():
        if (
            not (source / files.CONFIG_FILE).is_file()
            and (source / files.METRICS_FILE).is_file()
        ):
            problem = (
                f"{source} has no {files.CONFIG_FILE}, so that it is not the folder of"
                " a run of `rampup train`"
            )
            fix = (
                "name a configuration of the run to design, and give a run of another"
                f" loop as CONFIG.yml --measured {source}"
            )
            raise common.usage_error(f"{problem}; {fix}")
        file, folders = common.run_config(source), [source, *folders]
    elif not folders:
        problem = (
            "a design needs measurements: give --measured RUN_DIR, a run with"
            " measure_gradient_noise=true or one that "
        )
        raise common.usage_error(
            f"{problem}`rampup critical` has measured", key="measured"
        )
    config = rampup.load_config(file, args.overrides, environ=os.environ)
    check_picture(args.output)
    written = None if args.write is None else files.absolute_path(args.write)
    if (
        written is not None
        and written.exists()
        and (not written.is_dir() or any(written.iterdir()))
    ):
        raise common.usage_error(
            f"{written} is not empty; name the folder of a new run", key="write"
        )
    tokens = (
        None
        if args.train_tokens is None
        else parse_count(args.train_tokens, what="train-tokens")
    )
    most = (
        None
        if args.max_batch is None
        else parse_count(args.max_batch, what="max-batch", key="max-batch")
    )
    devices = common.count_devices(args, config)
    facts = rampup.contrib.lab.design_ramp(
        config,
        folders,
        num_devices=devices,
        train_tokens=tokens,
        max_batch=most,
        assume_growth=args.assume_growth,
    )
    if args.output is not None:
        draw_design(facts, args.output)
    if written is not None:
        fastest = next(
            each for each in facts["candidates"] if each["name"] == facts["fastest"]
        )
        where = {
            "num_devices": devices,
            "run_name": written.name,
            "base_output_directory": str(written.parent),
        }
        config = replace(config, **where, **fastest["settings"])
        files.run_folder(config.base_output_directory, config.run_name)
        # First, so that no run is started without it.
        write_prediction(written, config, facts)
        text = yaml_text(
            "# The configuration of a designed run, until it is started.\n",
            config.keys(),
            config.to_dict(),
        )
        files.write_whole(written / files.CONFIG_FILE, text.encode())
    return Result(
        facts=facts, show=lambda console: print_design(facts, console, written)
    )


def _rollout_sizes(args: argparse.Namespace, folder: Path) -> Result:
    """Return how many prompts and responses the noise of a run of reinforcement
    learning makes worth it.
    """
    from rampup.contrib.rl.noise import advice_from_line

    names = (
        "train_tokens",
        "measured",
        "max_batch",
        "assume_growth",
        "devices",
        "write",
        "output",
    )
    if others := [name for name in names if getattr(args, name) not in (None, [])]:
        rule = (
            "is for ramps of pre-training; leave it out for a run of reinforcement"
            " learning"
        )
        raise common.usage_error(
            f"--{others[0].replace('_', '-')} {rule}", key=others[0]
        )
    cost = args.cost_per_prompt or 0.0
    if not 0 <= cost < math.inf:
        raise common.usage_error(
            f"--cost-per-prompt={cost} must be 0 or more",
            key="cost-per-prompt",
            nearest=(0,),
        )
    config = rl.load_rollout_config(
        folder / files.CONFIG_FILE, args.overrides, environ=os.environ
    )
    # Without the settings of this command: the noise scale in the lines is that of the
    # responses that the run had.
    key = "rl.num_generations"
    responses = config.num_generations
    measured = rl.load_rollout_config(folder / files.CONFIG_FILE)
    if responses != measured.num_generations:
        rule = (
            "is not that of the run, whose noise scale is for"
            f" {measured.num_generations} responses"
        )
        problem = (
            f"{key}={responses} {rule}; leave it out: the command lists other numbers"
            " of responses"
        )
        raise common.usage_error(problem, key=key, nearest=(measured.num_generations,))
    lines = (
        line
        for line in files.read_lines_backwards(folder / files.METRICS_FILE)
        if line.get("noise_between_prompts") is not None
    )
    facts = advice_from_line(
        next(lines, {}),
        responses=responses,
        reuse=config.num_iterations,
        cost_per_prompt=cost,
    )
    facts["mini_batch_prompts"] = (
        config.batch_size if config.mini_batch_size == AUTO else config.mini_batch_size
    )

    def show(console: Any) -> None:
        scale = NoiseEstimate(**facts["noise_scale_prompts"])
        prompts = facts["mini_batch_prompts"]
        reused = f" and {facts['reuse']} updates on each at the same learning rate" * (
            facts["reuse"] > 1
        )
        console.print(
            f"noise scale: {scale} prompts, with {responses} responses each{reused}"
        )
        console.print(
            f"a mini batch has {prompts} prompts; above the noise scale, more prompts"
            " pay less and less"
        )
        for name, what in (
            ("between", "between prompts"),
            ("within", "within a prompt's responses"),
        ):
            console.print(
                f"variance {what}: {NoiseEstimate(**facts[f'noise_{name}_prompts'])}"
            )
        console.print(
            "for the same noise, with the mean gradient taken as fixed; it falls with"
            " fewer responses, which are not listed:"
        )
        for row in facts["choices"]:
            some = "" if row["prompts"] is None else f"{row['prompts']:,.3g} prompts, "
            console.print(
                f"{row['num_generations']:3} responses:"
                f" {some}{row['relative_cost']:.2f} of the cost"
            )

    return Result(facts=facts, show=show)


def print_design(
    facts: Mapping[str, Any], console: Console, written: Path | None = None
) -> None:
    """Print the candidates with their steps, time and loss, their schedules, and the
    assumptions.
    """
    tokens = format_si(facts["train_tokens"])
    ends = ("", "_low", "_high")
    start, end = (
        with_ends(*(facts[f"noise_scale_{place}{each}"] for each in ends))
        for place in ("start", "end")
    )
    console.print(
        f"{tokens} tokens, {facts['train_samples']:,} samples; noise scale in samples:"
        f" {start} at the start, {end} at the end ({facts['noise_source']}; last"
        f" measured: {format_value(facts['noise_scale_last_measured'])}, then growing"
        f" with the power {facts['noise_growth']:.2f})"
    )
    console.print(
        "a batch of the noise scale costs 100% more tokens than a very small one, a"
        " fifth of it 20%"
    )
    unit, per_hour = (
        ("minutes", 60)
        if max(each["hours"] for each in facts["candidates"]) < 1
        else ("hours", 1)
    )

    def time(hours: float) -> str:
        return format_value(hours * per_hour)

    forms = {"hours": time, "loss_penalty": "{:.4f}".format, "hours_to_same_loss": time}
    rows = []
    for candidate in facts["candidates"]:
        name = candidate["name"] + (
            " *" if candidate["name"] == facts["fastest"] else ""
        )
        rows.append(
            (
                name,
                f"{candidate['steps']:,}",
                *(_with_interval(candidate, key, form) for key, form in forms.items()),
            )
        )
    console.print(
        make_table(
            console,
            ("schedule", "steps", unit, "loss penalty", f"{unit} to\nsame loss"),
            rows,
            left=1,
        )
    )
    console.print("*: the fastest to the loss that the smallest batch has at the end")
    for candidate in facts["candidates"]:
        rule = " ".join(
            f"{key}={value}" for key, value in candidate["rate_rule"].items()
        )
        console.print(
            f"{candidate['name']}:"
            f' batch_size_schedule="{candidate["batch_size_schedule"]}" {rule}'
        )
        costs = (
            f"{_with_interval(candidate, 'token_overhead', '{:.0%}'.format)} more"
            " tokens than a very small batch"
        )
        wrong = (
            "if the noise scale is half of this, it costs"
            f" {candidate['more_tokens_if_noise_is_half']:.0%} more tokens"
        )
        console.print(f"  {costs}; {wrong}")
        if candidate["hours_to_same_loss_if_noise_is_forgotten"] is not None:
            taken = time(candidate["hours_to_same_loss_if_noise_is_forgotten"])
            best = ", the fastest" * (
                candidate["name"] == facts["fastest_if_noise_is_forgotten"]
            )
            console.print(
                f"  if its noise is forgotten: {taken} {unit} to the same loss{best}"
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


def _with_interval(
    candidate: Mapping[str, Any], key: str, text: Callable[[float], str]
) -> str:
    """Return a prediction as text, with its interval if that shows."""
    if candidate[key] is None:
        return "-"
    value, low, high = (text(candidate[f"{key}{end}"]) for end in ("", "_low", "_high"))
    return value if low == value == high else f"{value} ({low} to {high})"


def draw_design(facts: Mapping[str, Any], path: str) -> None:
    """Draw the batch of every candidate over the tokens, and its hours by its loss
    penalty.
    """
    figure = new_figure(DEFAULT_WIDTH, 4.2)
    over_tokens, by_loss = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, candidate in enumerate(facts["candidates"]):
        marker = LINES[number % len(LINES)]["marker"]
        style = line_style(number) | (
            {"linewidth": 3.0, "alpha": 0.5} if number >= len(LINES) else {}
        )
        sizes = candidate["sizes"]
        edges = [*candidate["start_tokens"], facts["train_tokens"]]
        over_tokens.step(
            edges,
            [*sizes, sizes[-1]],
            where="post",
            label=candidate["name"],
            marker=marker,
            markevery=[-1],
            **style,
        )
        if candidate["loss_penalty"] is not None:
            low, high = (
                abs(candidate["loss_penalty"] - candidate[f"loss_penalty_{end}"])
                for end in ("low", "high")
            )
            place = candidate["hours"], candidate["loss_penalty"]
            by_loss.errorbar(
                *place,
                yerr=[[low], [high]],
                fmt=marker,
                capsize=3,
                color=style["color"],
            )
    prepare(over_tokens, x="tokens", y="global batch, samples", from_zero=False)
    over_tokens.set_yscale("log", base=2)
    used = sorted(
        {size for candidate in facts["candidates"] for size in candidate["sizes"]}
    )
    over_tokens.set_yticks(used, [f"{size:,}" for size in used])
    over_tokens.minorticks_off()
    prepare(by_loss, x="hours", y="expected loss penalty", from_zero=False)
    hours = [candidate["hours"] for candidate in facts["candidates"]]
    by_loss.set_xlim(
        0.95 * min(hours), 1.05 * max(hours)
    )  # so that hours that are equal have different numbers below them
    figure.legend(
        *over_tokens.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=3,
        frameon=False,
    )
    save(figure, path)
