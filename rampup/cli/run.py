"""`rampup train` and `generate`: the model, trained on text or by reinforcement
learning, and text that it continues.
"""

from __future__ import annotations

import argparse
import dataclasses

import rampup
from rampup.cli.common import (
    EXIT_INTERRUPTED,
    FAKE_DEVICES,
    OVERRIDES,
    Result,
    arg,
    environment,
    run_config,
    use_fake_devices,
)
from rampup.config.schema import Config
from rampup.contrib.rl.config import RolloutConfig, is_rollout_file, load_rollout_config
from rampup.errors import ConfigError
from rampup.loop.run_folder import absolute_path, as_path
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
)
JSON_KEYS += ("checkpoint", "seconds", "first_eval_loss", "final_eval_loss")
ROLLOUT_JSON_KEYS = (
    "steps",
    "samples",
    "accuracy_before",
    "accuracy_after",
    "reward_first",
    "reward_last",
)
ROLLOUT_JSON_KEYS += ("num_compilations", "seconds", "seconds_by_part", "checkpoint")
AUTO_KEYS = ("batch_size_schedule",)  # only with `batch_size_schedule: auto`
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
    config = _read_config(args)
    use_fake_devices(args.fake_devices)
    if isinstance(config, RolloutConfig):
        from rampup.contrib.rl.train import train

        json_keys = ROLLOUT_JSON_KEYS
    else:
        from rampup.lm.train import train

        json_keys = JSON_KEYS + AUTO_KEYS
    options = (
        "" if args.fake_devices is None else f" --fake-devices {args.fake_devices}"
    )
    progress = TrainProgress(
        args.console,
        log_period=config.log_period,
        quiet=args.quiet,
        resume_options=options,
    )
    try:
        summary = train(config, on_event=progress)
    finally:
        progress.close()
    exit_code = EXIT_INTERRUPTED if summary.interrupted else 0
    from rampup.engine.processes import (
        is_primary,  # with JAX, which a configuration that is refused need not load
    )

    if not is_primary():
        return Result(facts=None, exit_code=exit_code)
    facts = dataclasses.asdict(summary)
    return Result(
        facts={
            name: facts[name]
            for name in json_keys
            if name not in AUTO_KEYS or facts[name] is not None
        },
        show=lambda console: print_facts(
            {name: fact for name, fact in facts.items() if fact is not None}, console
        ),
        exit_code=exit_code,
    )


def _read_config(args: argparse.Namespace) -> Config | RolloutConfig:
    """Return the configuration: a file with its settings, or that of a run's folder,
    which the run then resumes in.
    """
    folder = as_path(args.config)
    file = run_config(folder) if folder.is_dir() else folder
    for setting in args.overrides if folder.is_dir() else ():
        if (key := setting.partition("=")[0]) in ("run_name", "base_output_directory"):
            raise ConfigError(
                f"{setting}: the run in {folder} keeps its folder; leave {key} out",
                key=key,
            )
    read = load_rollout_config if is_rollout_file(file) else rampup.load_config
    config = read(file, args.overrides, environ=environment())
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
    from rampup.contrib.rl.train import load  # loads both kinds of runs

    loaded = load(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    text = loaded.generate(args.prompt, args.tokens, **options)
    facts = {
        "checkpoint": str(loaded.folder),
        "step": loaded.step,
        "prompt": args.prompt,
        "text": text,
    }
    return Result(facts=facts | options, show=lambda console: print(args.prompt + text))
