"""Old import paths, kept for one release: each still works and warns with the new place."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Modules that moved. A name that moved out of a module which is still there is in that module's `__getattr__` (`moved_names`).
MOVED_MODULES = {
    "rampup.config.dialects": "rampup.dialects",
    "rampup.config.explain": "rampup.config.files",
    "rampup.config.json_schema": "rampup.config.files",
    "rampup.config.resume": "rampup.config.build",
    "rampup.config.rollout": "rampup.rl.config",
    "rampup.config.template": "rampup.config.files",
    "rampup.config.rollout_template": "rampup.rl.config",
    "rampup.config.yaml_file": "rampup.config.yaml",
    "rampup.plan.axes": "rampup.plan.mesh_axes",
    "rampup.plan.balancing": "rampup.packing",
    "rampup.plan.chooser": "rampup.plan.pipeline",
    "rampup.plan.definition": "rampup.plan.per_device",
    "rampup.plan.experience": "rampup.rl.sizes",
    "rampup.plan.manager": "rampup.plan.maxtext_manager",
    "rampup.plan.packed": "rampup.packing",
    "rampup.plan.packing": "rampup.packing",
    "rampup.plan.rollout": "rampup.rl.plan",
    "rampup.plan.scaling": "rampup.plan.learning_rate",
    "rampup.plan.schedules": "rampup.plan.timetable",
    "rampup.plan.sizes": "rampup.rl.sizes",
    "rampup.plan.stages": "rampup.plan.pipeline",
    "rampup.plan.starting_sizes": "rampup.rl.starting_sizes",
    "rampup.plan.units": "rampup.plan.numbers",
    "rampup.plan.updates": "rampup.rl.updates",
    "rampup.recipes": "rampup.lm",
    "rampup.recipes.lm": "rampup.lm.train",
    "rampup.recipes.lm_data": "rampup.lm.data",
    "rampup.recipes.transformer": "rampup.lm.transformer",
    "rampup.recipes.tune": "rampup.tune.search",
    "rampup.run.compiler": "rampup.run.compile",
    "rampup.run.memory": "rampup.run.offload",
    "rampup.run.nonfinite": "rampup.run.step",
    "rampup.run.pipeline_stage": "rampup.run.pipeline",
    "rampup.run.processes": "rampup.run.distributed",
    "rampup.run.rollout": "rampup.rl.minibatches",
    "rampup.run.step_programs": "rampup.run.step",
    "rampup.show.display": "rampup.show.notebook",
    "rampup.show.plots": "rampup.show.figures",
}


class _MovedModules:
    """Finds a module under its old name and puts the module of today in its place.

    A finder and loader without importlib's base classes, whose import takes longer than that of rampup.
    """

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make the module."""

    def find_spec(self, fullname: str, *_: Sequence[str] | ModuleType | None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED_MODULES else None  # type: ignore[arg-type]

    def exec_module(self, module: ModuleType) -> None:
        old, new = module.__name__, MOVED_MODULES[module.__name__]
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        # The import system returns what is in sys.modules after this call, so old and new name are one module.
        sys.modules[old] = importlib.import_module(new)


def support_moved_modules() -> None:
    """Let the old module names be imported, once per process.

    The finder comes first: `rampup.recipes` is `rampup.lm`, in whose folder Python would otherwise load `transformer.py` twice.
    """
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _MovedModules())


def moved_names(module: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` for names that moved elsewhere.

    Args:
        module: the module's `__name__`.
        places: for each old name, the new one as `package.module.NAME`.

    Example:
        >>> get = moved_names("rampup.run", {"mini_batches": "rampup.rl.minibatches.mini_batches"})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     get("mini_batches").__name__, str(caught[0].message)
        ('mini_batches', 'rampup.run.mini_batches is now rampup.rl.minibatches.mini_batches')
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 - it becomes the module's
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {places[name]}", DeprecationWarning, stacklevel=2)
        home, _, new_name = places[name].rpartition(".")
        return getattr(importlib.import_module(home), new_name)

    return __getattr__
