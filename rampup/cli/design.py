"""`rampup design`: from measurements to a ramp."""

from __future__ import annotations

import argparse
from pathlib import Path

import rampup
from rampup.cli.common import Result, add_config_arguments, check_output, count_devices, environment
from rampup.config.load import COMMAND_LINE
from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.plan.numbers import parse_count
from rampup.run.run_folder import CONFIG_FILE, as_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup design`."""
    add_config_arguments(parser, "CONFIG.yml|RUN_DIR", "a configuration file, or the folder of a measured run")
    parser.add_argument("--train-tokens", metavar="TOKENS", help="tokens of the run to design, such as 300B")
    parser.add_argument(
        "--measured",
        metavar="RUN_DIR",
        action="append",
        default=[],
        help="a measured run, or a file with the output of `rampup tune --json`, for step times; can be repeated",
    )
    parser.add_argument("--max-batch", metavar="SAMPLES", help="largest global batch to consider")
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")
    parser.add_argument("-o", "--output", metavar="FILE", help="draw the candidates into a .png, .svg or .pdf file")


def run(args: argparse.Namespace, console: object) -> Result:
    """Design schedules, and predict their steps, hours and loss."""
    from rampup.show.designs import draw_design, print_design

    config, folders = _read_inputs(args)
    if args.output is not None:
        from rampup.show.figures import FORMATS, import_matplotlib

        check_output(args.output, FORMATS)
        import_matplotlib("figure")  # it must not turn out to be missing after the work
    tokens = None if args.train_tokens is None else parse_count(args.train_tokens, what="train-tokens")
    most = None if args.max_batch is None else parse_count(args.max_batch, what="max-batch", key="max-batch")
    devices = count_devices(args, config)
    facts = rampup.design_ramp(config, folders, num_devices=devices, train_tokens=tokens, max_batch=most)
    if args.output is not None:
        draw_design(facts, args.output)
    return Result(facts=facts, show=lambda console: print_design(facts, console))


def _read_inputs(args: argparse.Namespace) -> tuple[Config, list[Path]]:
    """Return the configuration, and the folders and files with measurements."""
    source, measured = as_path(args.config), [as_path(path) for path in args.measured]
    if not source.is_dir():
        if not measured:
            raise ConfigError(
                "a design needs measurements: give --measured RUN_DIR, a run with measure_gradient_noise=true or one that "
                "`rampup critical` has measured",
                path=COMMAND_LINE,
                key="measured",
            )
        return rampup.load_config(args.config, args.overrides, environ=environment()), measured
    if not (source / CONFIG_FILE).is_file():
        raise ConfigError(f"{source} is not the folder of a run: it has no {CONFIG_FILE}", path=COMMAND_LINE)
    return rampup.load_config(source / CONFIG_FILE, args.overrides, environ=environment()), [source, *measured]
