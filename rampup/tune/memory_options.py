"""Other ways to save memory, and their measured effect on this model: compiled, and timed if both programs run here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rampup.config.schema import KEYS
from rampup.engine.offload import bytes_per_device, host_memory_problem, reports_host_memory
from rampup.errors import RampupError
from rampup.plan.numbers import finite_or_none
from rampup.tune.programs import Programs, Report, Size, take_turns

SHORT_TIMING_SECONDS = 15.0
# Configuration key -> the part of the training state that it keeps in host memory.
OFFLOAD_KEYS = {"optimizer_memory_host_offload": "opt_state", "parameter_memory_host_offload": "params"}


# A row of `levers` of `rampup tune --json`.
MemoryOption = dict[str, Any]


def find_memory_options(base: Programs, size: Size, usable: float, report: Report) -> list[MemoryOption]:
    """Return every option that saves memory at a microbatch: first those within `usable` bytes, then by the memory saved."""
    config = base.config
    axes = base.mesh.shape
    shapes = base.state_shapes
    before = base.bytes(size)
    options: list[MemoryOption] = []

    def add(name: str, settings: Mapping[str, Any], used: float, saved: float, **more: Any) -> None:
        """Add an option with the keys to change, none if it takes other devices."""
        row = {"name": name, "settings": settings, "bytes": finite_or_none(used), "saved_bytes": finite_or_none(saved)}
        # `slowdown` is the time of a step over the time without the change. Bytes that are not `compiled` are an estimate. The
        # remark says why an option is not available, or what its bytes leave out.
        options.append(row | {"fits": used <= usable, "slowdown": None, "compiled": True, "remark": ""} | more)

    def estimate(name: str, settings: Mapping[str, Any], saved: int, remark: str) -> None:
        add(name, settings, before - saved, saved, compiled=False, remark=remark)

    def slowdown(programs: Programs, changed: Size) -> float | None:
        """Return the time of a changed step over that of the base, or None if one of them does not fit on this machine."""
        if not (programs.fits_here(changed) and base.fits_here(size)):
            return None
        steps = [made.step_of(each, each.num_microbatches) for made, each in ((base, size), (programs, changed))]
        times = take_turns(dict(enumerate(steps)), seconds=SHORT_TIMING_SECONDS)
        return times[1].seconds / times[0].seconds

    def compile_with(name: str, settings: Mapping[str, Any]) -> None:
        """Compile the step with other settings, at the same microbatch and batch."""
        changed = {key: value for key, value in settings.items() if value != getattr(config, key)}
        try:
            programs = Programs(replace(config, **settings), base.devices, target=base.target)
            same_size = programs.size(size.microbatch_size)
            used = programs.bytes(same_size)
            problem = "the compiler still runs out of memory"
        except RampupError as error:
            used, problem = math.inf, str(error).splitlines()[0]
        if math.isinf(used):
            add(name, changed, used, used, remark=problem)
        else:
            add(name, changed, used, before - used, slowdown=slowdown(programs, same_size))
            programs.forget_state()

    # The next smaller microbatch that divides every phase.
    if legal := [b for b in base.splitter.legal_microbatches(base.plan.ramp.sizes) if b < size.microbatch_size]:
        smaller = base.size(legal[-1])
        settings = {"microbatch_size": legal[-1]}
        used = base.bytes(smaller)
        add(f"a smaller microbatch, {legal[-1]}", settings, used, before - used, slowdown=slowdown(base, smaller))
    # Options that only take another compilation.
    known = KEYS["remat_policy"].choices
    policies = [name for name in ("minimal", "full") if known.index(name) > known.index(config.remat_policy)]
    changes: list[tuple[str, dict[str, Any]]] = [(f"remat_policy={name}", {"remat_policy": name}) for name in policies]
    if base.splitter.num_stages > 1 and config.pipeline_keep != "nothing":
        changes.append(("pipeline_keep=nothing", {"pipeline_keep": "nothing"}))
    for axis in ("fsdp", "tensor"):
        key = f"ici_{axis}_parallelism"
        if config.num_slices not in (-1, 1) or getattr(config, key) == -1:
            continue
        # Move devices from the data axis to this one: two of them, and for fsdp also all.
        factors = [n for n in (2, axes["data"]) if axes["data"] % n == 0 and n > 1]
        for n in sorted(set(factors) if axis == "fsdp" else set(factors[:1])):
            moved = {key: n * getattr(config, key), "ici_data_parallelism": -1}
            changes.append((f"{axis} axis of {n * axes[axis]}", moved))
    for name, change in changes:
        report(f"trying {name}")
        compile_with(name, change)
    for key, part in OFFLOAD_KEYS.items():
        if getattr(config, key):
            continue
        if reports_host_memory(base.mesh):
            compile_with(key, {key: True})
        else:
            most = "the most it can save: the step brings it back to the device part by part"
            estimate(key, {key: True}, bytes_per_device(getattr(shapes, part)), host_memory_problem(base.mesh) or most)
    if axes["data"] == axes["fsdp"] == 1:
        # Half of the parameters, of the optimizer state, and of the gradients, which are as large as the parameters.
        saved = bytes_per_device((shapes.params, shapes.opt_state, shapes.params)) // 2
        remark = "shards parameters, gradients and optimizer state in two; with ici_fsdp_parallelism=2 it is compiled"
        estimate("two devices on the fsdp axis", {}, saved, remark)
    saving = [option for option in options if option["saved_bytes"] is None or option["saved_bytes"] > 0]
    return sorted(saving, key=lambda option: (not option["fits"], -(option["saved_bytes"] or 0)))
