"""`rampup train` and `generate`: a model trained on text, and text that it
continues.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rampup
from rampup.cli.common import (
    EXIT_INTERRUPTED,
    FAKE_DEVICES,
    OVERRIDES,
    Result,
    arg,
    commands_of,
    run_config,
    usage_error,
    use_fake_devices,
)
from rampup.errors import ConfigError
from rampup.loop.run_folder import CONFIG_FILE, absolute_path, as_path
from rampup.show.console import print_facts
from rampup.show.progress import TrainProgress

JSON_KEYS = (
    "steps",
    "consumed_samples",
    "first_loss",
    "final_loss",
    "num_compilations",
    "ramp_steps",
    "tokens_per_second",
    "checkpoint",
    "seconds",
    "first_eval_loss",
    "final_eval_loss",
)
TRAIN = {
    "config": arg(
        "CONFIG.yml|RUN_DIR", "a configuration file, or the folder of a run to resume"
    ),
    **OVERRIDES,
    **FAKE_DEVICES,
    "--quiet": arg(None, "print the summary only"),
}
GENERATE = {
    "run": arg("RUN_DIR", "the folder of a run, or one of its checkpoints"),
    "--prompt": arg(
        "TEXT", "the text to continue, or what to ask a policy", default="\n"
    ),
    "--tokens": arg(
        "N", "tokens (bytes) to sample at most, 200 by default", type=int, default=200
    ),
    "--temperature": arg(
        "T", "0.8 by default; 0 takes the most probable token", type=float, default=0.8
    ),
    "--top-k": arg("K", "sample from the K most probable tokens only", type=int),
    "--seed": arg("S", "seed of the random numbers, 0 by default", type=int, default=0),
}


def train(args: argparse.Namespace) -> Result:
    """Train, and return the summary of the run."""
    if (others := commands_of(_config_file(args))) is not None:
        return others.train(args)
    config = read_run_config(args, rampup.load_config)
    use_fake_devices(args.fake_devices)
    # With JAX, which a configuration that is refused need not load.
    from rampup.lm.train import train as train_model

    return run_to_end(args, config, train_model, (*JSON_KEYS, "batch_size_schedule"))


def run_to_end(
    args: argparse.Namespace,
    config: Any,
    train: Callable[..., Any],
    json_keys: tuple[str, ...],
    progress: type[TrainProgress] = TrainProgress,
) -> Result:
    """Train as configured, show it, and return the summary, of which `json_keys` are
    printed with `--json`.
    """
    options = ""
    if args.fake_devices is not None:
        options = f" --fake-devices {args.fake_devices}"
    shown = progress(
        args.console,
        log_period=config.log_period,
        quiet=args.quiet,
        resume_options=options,
    )
    try:
        summary = train(config, on_event=shown)
    except KeyboardInterrupt:
        args.console.print(
            "stopped at once; nothing was saved after the newest checkpoint, from which"
            " the run resumes"
        )
        raise
    finally:
        shown.close()
    from rampup.engine.processes import is_primary

    exit_code = EXIT_INTERRUPTED if summary.interrupted else 0
    if not is_primary():
        return Result(facts=None, exit_code=exit_code)
    facts = dataclasses.asdict(summary)
    if facts.get("batch_size_schedule", "") is None:  # only `auto` has one
        del facts["batch_size_schedule"]
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return Result(
        facts={name: facts[name] for name in json_keys if name in facts},
        show=lambda console: print_facts(known, console),
        exit_code=exit_code,
    )


def _config_file(args: argparse.Namespace) -> Path:
    """Return the configuration's file, of a run the one in its folder."""
    folder = as_path(args.config)
    if folder.is_dir():
        return run_config(folder)
    if len(folder.parts) > 1 and not folder.suffix and not folder.exists():
        raise usage_error(f"{folder}: no such run folder, nor a configuration")
    return folder


def read_run_config(args: argparse.Namespace, read: Callable[..., Any]) -> Any:
    """Return the configuration: a file with its settings, or that of a run's folder,
    which the run then resumes in.
    """
    folder = as_path(args.config)
    for setting in args.overrides if folder.is_dir() else ():
        if (key := setting.partition("=")[0]) in ("run_name", "base_output_directory"):
            raise ConfigError(
                f"{setting}: the run in {folder} keeps its folder; leave {key} out",
                key=key,
            )
    config = read(_config_file(args), args.overrides, environ=os.environ)
    if not folder.is_dir():
        return config
    # The folder may have been moved since, and config.yml must not name it relative to
    # where this command is.
    place = folder if folder.name not in ("", "..") else folder.resolve()
    if absolute_path(config.base_output_directory) != absolute_path(place.parent):
        config = dataclasses.replace(
            config, base_output_directory=str(absolute_path(place.parent))
        )
    return dataclasses.replace(config, run_name=place.name)


def generate(args: argparse.Namespace) -> Result:
    """Load a checkpoint and sample from it."""
    from rampup.lm.load import load, named_checkpoint

    file = named_checkpoint(args.run)[0] / CONFIG_FILE
    others = None
    # A loop of one's own may have a config.yml of any kind.
    with contextlib.suppress(ConfigError):
        others = commands_of(file) if file.is_file() else None
    if others is not None:
        return others.generate(args)
    return show_text(load(args.run), args)


def show_text(loaded: Any, args: argparse.Namespace) -> Result:
    """Return what a `LoadedRun` continues the prompt with."""
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    text = loaded.generate(args.prompt, args.tokens, **options)
    facts = {
        "checkpoint": str(loaded.folder),
        "step": loaded.step,
        "prompt": args.prompt,
        "text": text,
    }
    return Result(facts=facts | options, show=lambda console: print(args.prompt + text))
