"""MaxText's ramp-up manager: the installed package's class, or the same replay written anew."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = ("utils", "rampup_batch.py")
CLASS = "RampupBatchManager"
# (config, step_num) -> a manager that has replayed `step_num` steps, with `update()` and `global_batch_size_current`.
MakeManager = Callable[[Any, int], Any]


class ReplayManager:
    """Counts batches as MaxText's manager does: a phase ends when it has used its share; a resume replays every step.

    Args:
        config: has MaxText's attributes of the ramp.
        step_num: steps to replay.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(per_device_batch_size_start=4, per_device_batch_size_increment=2,
        ...     per_device_batch_size=12, global_rampup_samples=500, num_target_devices=4)
        >>> ReplayManager(config, 8).global_batch_size_current
        24
    """

    def __init__(self, config: Any, step_num: int) -> None:
        devices = int(config.num_target_devices)
        growth = config.per_device_batch_size - config.per_device_batch_size_start
        self.global_batch_size_end = int(devices * config.per_device_batch_size)
        self.increment = int(devices * config.per_device_batch_size_increment)
        self.samples_per_increment = config.global_rampup_samples / (growth // config.per_device_batch_size_increment)
        self.global_batch_size_current = int(devices * config.per_device_batch_size_start)
        self.total_used_samples = self.num_accum_samples = 0
        for _ in range(step_num):
            self.update()

    def update(self) -> bool:
        """Count one batch; return whether the ramp is still on."""
        size = self.global_batch_size_current
        self.total_used_samples += size
        self.num_accum_samples += size
        if self.num_accum_samples >= self.samples_per_increment:
            self.global_batch_size_current = min(size + self.increment, self.global_batch_size_end)
            self.num_accum_samples = 0
        return self.global_batch_size_current < self.global_batch_size_end


def maxtext_manager() -> tuple[MakeManager, str]:
    """Return MaxText's manager and where it is from.

    Of the installed file only the class is executed, so that none of MaxText's dependencies is needed.
    """
    spec = importlib.util.find_spec("maxtext")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder).joinpath(*FILE)
        if path.is_file():
            return manager_of(path), "the installed MaxText's utils/rampup_batch.py"
    return ReplayManager, "our own writing of MaxText's replay, since MaxText is not installed"


def manager_of(path: Path) -> MakeManager:
    """Return the class of MaxText's file without importing what else it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == CLASS]
    names: dict[str, Any] = {"math": math}
    exec(compile(tree, str(path), "exec"), names)
    manager: MakeManager = names[CLASS]
    return manager
