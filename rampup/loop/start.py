"""Starts a run in its folder: owns it, finds the checkpoint to resume from, and keeps the configuration there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from rampup.config.files import run_yaml
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.processes import broadcast_from_process0, check_joined, is_primary
from rampup.loop.checkpoint import SavedCheckpoint, find_checkpoint
from rampup.loop.distributed import check_reachable, watchdog
from rampup.loop.lock import own_run
from rampup.loop.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE, as_path, run_folder, write_whole

Run = TypeVar("Run")
Result = TypeVar("Result")


def run_in_folder(
    config: Any,
    make: Callable[[SavedCheckpoint | None], Run],
    train: Callable[[Run, Path], Result],
    *,
    heartbeat_timeout: float,
) -> Result:
    """Make a run, and train it in its folder.

    Args:
        config: a configuration with `base_output_directory`, `run_name` and `jax_cache_dir`. A run without a name gets a new
            folder.
        make: returns the run that resumes from a checkpoint, or a new one. It refuses what it can refuse: no folder is made
            before it returns.
        train: trains the run in a folder, and returns the result.
        heartbeat_timeout: seconds of silence after which another process counts as gone; see `watchdog`.
    """
    check_joined()
    check_reachable()
    enable_compilation_cache(config.jax_cache_dir)
    folder = as_path(config.base_output_directory) / config.run_name if config.run_name else None
    # Owned before its checkpoint is read: a process that is still training would write newer ones.
    is_shared = config.enable_checkpointing
    owned = contextlib.nullcontext() if folder is None else own_run(folder, only_existing=True, shared=is_shared)
    with watchdog(heartbeat_timeout), owned:
        run = make(None if folder is None else find_checkpoint(folder / CHECKPOINT_FOLDER))
        name = str(run_folder(config.base_output_directory, config.run_name)) if is_primary() else ""
        folder = as_path(broadcast_from_process0("folder", name))
        with own_run(folder):
            return train(run, folder)


def keep_config(config: Any, folder: Path) -> None:
    """Write config.yml. A run that is refused or finished must not: the file is that of the run in this folder."""
    if is_primary():
        text = run_yaml(config, num_devices=jax.device_count(), run_name=folder.name)
        write_whole(folder / CONFIG_FILE, text.encode())
