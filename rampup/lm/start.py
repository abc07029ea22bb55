"""The start of a run of a configuration: in the folder that its keys name, new or from
the newest checkpoint there.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rampup.config.files import changed_keys, run_yaml
from rampup.config.rules import BUDGET_KEYS
from rampup.config.schema import Config
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.processes import broadcast_from_process0, check_joined, is_primary
from rampup.errors import ConfigError
from rampup.loop.checkpoint import SavedCheckpoint, find_checkpoint
from rampup.loop.distributed import leaving_on_error
from rampup.loop.events import LearningRateChanged, OnEvent
from rampup.loop.lock import own_run
from rampup.loop.run_folder import CONFIG_FILE, as_path, write_whole
from rampup.plan.numbers import AUTO

# What the learning rate at a step follows from, and the length of a run or rollout.
RATE_KEYS = {
    name
    for name, key in Config.keys().items()
    if key.section == "Learning rate" or key.ramp
}
LENGTH_KEYS = {*BUDGET_KEYS, "num_batches"}


def run_in_folder(
    config: Any,
    make: Callable[[SavedCheckpoint | None], Any],
    train: Callable[[Any, Path], Any],
) -> Any:
    """Make a run, new or from a checkpoint, and train it in its folder; one without a
    name gets a new folder.

    `make` refuses what it can refuse: no folder is made before it returns.
    """
    check_joined()
    enable_compilation_cache(config.jax_cache_dir)
    base, name = config.base_output_directory, config.run_name
    with leaving_on_error(), contextlib.ExitStack() as held:
        saved = None
        if name:
            folder = as_path(base) / name
            # Owned before its checkpoint is read: a process that is still training
            # would write newer ones.
            held.enter_context(
                own_run(folder, only_existing=True, shared=config.enable_checkpointing)
            )
            saved = find_checkpoint(folder)
        if saved is None and config.num_devices not in (AUTO, jax.device_count()):
            raise ConfigError(
                f"num_devices={config.num_devices}, but JAX finds {jax.device_count()}"
                " here",
                fix="set num_devices=-1 to train on those; `rampup train --fake-devices"
                " N` simulates N on a CPU",
                key="num_devices",
                nearest=(AUTO, jax.device_count()),
            )
        run = make(saved)
        made = broadcast_from_process0("folder", lambda: str(run_folder(base, name)))
        folder = as_path(made)
        with own_run(folder):
            return train(run, folder)


def run_folder(base: str, name: str) -> Path:
    """Return the folder of a run in `base`, created if necessary. Without a name, it is
    new and named after the time.
    """
    # Down to microseconds, so that two runs that start together have two folders.
    folder = as_path(base) / (
        name or datetime.datetime.now().strftime("run-%Y%m%d-%H%M%S-%f")
    )
    try:
        folder.mkdir(parents=True, exist_ok=bool(name))
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {folder}: {error.strerror or error}",
            key="run_name" if folder.exists() else "base_output_directory",
        ) from None
    return folder


def keep_config(config: Any, folder: Path, start: int, on_event: OnEvent) -> None:
    """Write config.yml, and report which keys of the learning rate a run that resumes at
    step `start` has changed.

    A run that is refused or finished must not write it: the file is that of the run in
    this folder.
    """
    if not is_primary():
        return
    file = folder / CONFIG_FILE
    if start and file.exists():
        # The length counts only where it is also that of the schedule, as in rollouts.
        names = RATE_KEYS
        if getattr(config, "learning_rate_schedule_steps", AUTO) == AUTO:
            names = RATE_KEYS | LENGTH_KEYS
        if changed := changed_keys(config, file.read_text(encoding="utf-8"), names):
            on_event(LearningRateChanged(step=start - 1, keys=tuple(changed)))
    text = run_yaml(config, num_devices=jax.device_count(), run_name=folder.name)
    write_whole(file, text.encode())
