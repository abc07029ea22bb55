"""Other ways to save memory, and their measured effect on this model: compiled, and timed if both programs run here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rampup.config.schema import KEYS
from rampup.engine.offload import bytes_per_device, host_memory_problem, reports_host_memory
from rampup.errors import RampupError
from rampup.tune.programs import Programs, Report, Size, finite_bytes, take_turns

SHORT_TIMING_SECONDS = 15.0
# Configuration key -> the part of the training state that it keeps in host memory.
OFFLOAD_KEYS = {"optimizer_memory_host_offload": "opt_state", "parameter_memory_host_offload": "params"}


# A row of `levers` of `rampup tune --json`.
MemoryOption = dict[str, Any]


def find_memory_options(base: Programs, size: Size, usable: float, report: Report) -> list[MemoryOption]:
    """Return every option that saves memory at a microbatch: first those within `usable` bytes, then by the memory saved."""

    def estimate(saved: int, **more: Any) -> MemoryOption:
        return _option(base.bytes(size) - saved, saved, usable, compiled=False, **more)

    smaller = _smaller_microbatch(base, size, usable)
    options = [] if smaller is None else [smaller]
    for name, settings in _changes(base):
        report(f"trying {name}")
        options.append(_compile_with(base, size, name, settings, usable))
    shapes = base.state_shapes
    for key, part in OFFLOAD_KEYS.items():
        if getattr(base.config, key):
            continue
        if reports_host_memory(base.mesh):
            options.append(_compile_with(base, size, key, {key: True}, usable))
        else:
            most = "the most it can save: the step brings it back to the device part by part"
            saved, remark = bytes_per_device(getattr(shapes, part)), host_memory_problem(base.mesh) or most
            options.append(estimate(saved, name=key, settings={key: True}, remark=remark))
    if base.mesh.shape["data"] == base.mesh.shape["fsdp"] == 1:
        # Half of the parameters, of the optimizer state, and of the gradients, which are as large as the parameters.
        saved = bytes_per_device((shapes.params, shapes.opt_state, shapes.params)) // 2
        remark = "shards parameters, gradients and optimizer state in two; with ici_fsdp_parallelism=2 it is compiled"
        options.append(estimate(saved, name="two devices on the fsdp axis", settings={}, remark=remark))
    known = [option for option in options if option["saved_bytes"] is None or option["saved_bytes"] > 0]
    return sorted(known, key=lambda option: (not option["fits"], -(option["saved_bytes"] or 0)))


def _changes(base: Programs) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of the options that only take another compilation."""
    config, axes = base.config, base.mesh.shape
    known = KEYS["remat_policy"].choices
    for policy in [name for name in ("minimal", "full") if known.index(name) > known.index(config.remat_policy)]:
        yield f"remat_policy={policy}", {"remat_policy": policy}
    if base.splitter.num_stages > 1 and config.pipeline_keep != "nothing":
        yield "pipeline_keep=nothing", {"pipeline_keep": "nothing"}
    for axis in ("fsdp", "tensor"):
        key = f"ici_{axis}_parallelism"
        if config.num_slices not in (-1, 1) or getattr(config, key) == -1:
            continue
        # Move devices from the data axis to this one: two of them, and for fsdp also all.
        factors = [n for n in (2, axes["data"]) if axes["data"] % n == 0 and n > 1]
        for n in sorted(set(factors) if axis == "fsdp" else set(factors[:1])):
            yield f"{axis} axis of {n * axes[axis]}", {key: n * getattr(config, key), "ici_data_parallelism": -1}


def _compile_with(base: Programs, size: Size, name: str, settings: Mapping[str, Any], usable: float) -> MemoryOption:
    """Compile the step with other settings, at the same microbatch and batch."""
    changed = {key: value for key, value in settings.items() if value != getattr(base.config, key)}
    try:
        programs = Programs(replace(base.config, **settings), base.devices, target=base.target)
        same_size = programs.size(size.microbatch_size)
        used = programs.bytes(same_size)
        problem = "the compiler still runs out of memory"
    except RampupError as error:
        used, problem = math.inf, str(error).splitlines()[0]
    if math.isinf(used):
        return _option(used, used, usable, name=name, settings=changed, remark=problem)
    slowdown = _slowdown(base, size, programs, same_size)
    programs.forget_state()
    return _option(used, base.bytes(size) - used, usable, name=name, settings=changed, slowdown=slowdown)


def _smaller_microbatch(base: Programs, size: Size, usable: float) -> MemoryOption | None:
    """Return the next smaller microbatch that divides every phase."""
    legal = [b for b in base.splitter.legal_microbatches(base.plan.ramp.sizes) if b < size.microbatch_size]
    if not legal:
        return None
    smaller = base.size(legal[-1])
    used = base.bytes(smaller)
    name, settings = f"a smaller microbatch, {smaller.microbatch_size}", {"microbatch_size": smaller.microbatch_size}
    slowdown = _slowdown(base, size, base, smaller)
    return _option(used, base.bytes(size) - used, usable, name=name, settings=settings, slowdown=slowdown)


def _option(
    used: float,
    saved: float,
    usable: float,
    *,
    name: str,
    settings: Mapping[str, Any],  # the keys to change; none if it takes other devices
    compiled: bool = True,  # whether the bytes are those of a compiled program and not an estimate
    slowdown: float | None = None,  # time of a step over the time without the change
    remark: str = "",  # why it is not available, or what the number leaves out
) -> MemoryOption:
    return {
        "name": name,
        "settings": dict(settings),
        "bytes": finite_bytes(used),
        "saved_bytes": finite_bytes(saved),
        "fits": used <= usable,
        "slowdown": slowdown,
        "compiled": compiled,
        "remark": remark,
    }


def _slowdown(base: Programs, size: Size, changed: Programs, changed_size: Size) -> float | None:
    """Return the time of a changed step over that of the base, or None if one of them does not fit on this machine."""
    if not (changed.fits_here(changed_size) and base.fits_here(size)):
        return None
    steps = [made.step_of(each, each.num_microbatches) for made, each in ((base, size), (changed, changed_size))]
    times = take_turns(dict(enumerate(steps)), seconds=SHORT_TIMING_SECONDS)
    return times[1].seconds / times[0].seconds
