"""The start of a run of a configuration: in the folder that its keys name, new or from
the newest checkpoint there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rampup.config.files import run_yaml
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.processes import broadcast_from_process0, check_joined, is_primary
from rampup.loop.checkpoint import SavedCheckpoint, find_checkpoint
from rampup.loop.distributed import leaving_on_error
from rampup.loop.lock import own_run
from rampup.loop.run_folder import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    as_path,
    run_folder,
    write_whole,
)


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
            is_shared = config.enable_checkpointing
            held.enter_context(own_run(folder, only_existing=True, shared=is_shared))
            saved = find_checkpoint(folder / CHECKPOINT_FOLDER)
        run = make(saved)
        made = str(run_folder(base, name)) if is_primary() else ""
        folder = as_path(broadcast_from_process0("folder", made))
        with own_run(folder):
            return train(run, folder)


def keep_config(config: Any, folder: Path) -> None:
    """Write config.yml. A run that is refused or finished must not: the file is that of
    the run in this folder.
    """
    if is_primary():
        text = run_yaml(config, num_devices=jax.device_count(), run_name=folder.name)
        write_whole(folder / CONFIG_FILE, text.encode())
