"""What else would save memory, each lever with its effect on this model: compiled, and timed where it can run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rampup.config.schema import Config
from rampup.errors import RampupError
from rampup.lm.train import state_shapes, training_step
from rampup.run.offload import bytes_per_device, host_memory_problem, tells_host_memory
from rampup.tune.programs import Programs, Report, Size, take_turns

SHORT_TIMING_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change of the configuration that saves memory.

    Attributes:
        name: in words.
        settings: the keys to change; empty where it takes other devices.
        bytes: what training then takes of one device; None where that is not known.
        saved_bytes: how much less that is than without.
        fits: whether it is within the limit.
        slowdown: time of a step over the time without; None where it was not timed.
        compiled: whether the bytes are those of a compiled program, or arithmetic.
        remark: why it is not to be had, or what the number leaves out.
    """

    name: str
    settings: Mapping[str, Any]
    bytes: float | None = None
    saved_bytes: float | None = None
    fits: bool = False
    slowdown: float | None = None
    compiled: bool = True
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the lever by its names, for JSON."""
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "bytes": None if self.bytes is None else int(self.bytes),
            "saved_bytes": None if self.saved_bytes is None else int(self.saved_bytes),
            "fits": self.fits,
            "slowdown": self.slowdown,
            "compiled": self.compiled,
            "remark": self.remark,
        }


def find_levers(base: Programs, size: Size, usable: float, report: Report) -> tuple[Lever, ...]:
    """Return every lever, those that bring the step within the limit first, then by what they save.

    Args:
        base: the programs of the configuration as it is.
        size: the microbatch to compare at.
        usable: bytes of one device.
        report: called with a line about every lever.
    """
    levers = [_smaller(base, size, usable)]
    for name, settings in _changes(base.config, base):
        report(f"trying {name}")
        levers.append(_compiled(base, size, name, settings, usable))
    levers += [_offloaded(base, size, key, usable) for key in _OFFLOAD]
    levers += _more_devices(base, size, usable)
    known = [lever for lever in levers if lever is not None and (lever.saved_bytes is None or lever.saved_bytes > 0)]
    return tuple(sorted(known, key=lambda lever: (not lever.fits, -(lever.saved_bytes or 0))))


_OFFLOAD = {"optimizer_memory_host_offload": "opt_state", "parameter_memory_host_offload": "params"}


def _changes(config: Config, base: Programs) -> list[tuple[str, dict[str, Any]]]:
    """Return the levers that are a matter of compiling the step otherwise."""
    axes = base.mesh.shape
    changes: list[tuple[str, dict[str, Any]]] = []
    stronger = {"none": ("minimal", "full"), "minimal": ("full",), "full": ()}[config.remat_policy]
    changes += [(f"remat_policy={policy}", {"remat_policy": policy}) for policy in stronger]
    if base.free.num_stages > 1 and config.pipeline_keep != "nothing":
        changes.append(("pipeline_keep=nothing", {"pipeline_keep": "nothing"}))
    for axis in ("fsdp", "tensor"):
        ways = [n for n in (2, axes["data"]) if axes["data"] % n == 0 and n > 1]
        for n in sorted(set(ways) if axis == "fsdp" else set(ways[:1])):
            key, wanted = f"ici_{axis}_parallelism", n * axes[axis]
            within = getattr(config, key)
            if config.num_slices in (-1, 1) and within != -1:
                changes.append((f"{axis} axis of {wanted}", {key: n * within, "ici_data_parallelism": -1}))
    return changes


def _compiled(base: Programs, size: Size, name: str, settings: Mapping[str, Any], usable: float) -> Lever:
    """Return a lever measured by compiling the step with it, at the same microbatch and batch."""
    shown = {key: value for key, value in settings.items() if value != getattr(base.config, key)}
    try:
        programs = Programs(replace(base.config, **settings), base.devices)
        there = programs.size(size.microbatch_size)
        taken = programs.bytes(there)
    except RampupError as error:
        return Lever(name=name, settings=shown, remark=str(error).splitlines()[0])
    saved = base.bytes(size) - taken
    if math.isinf(taken):
        return Lever(name=name, settings=shown, remark="the compiler still runs out of memory")
    return Lever(
        name=name,
        settings=shown,
        bytes=taken,
        saved_bytes=None if math.isinf(saved) else saved,
        fits=taken <= usable,
        slowdown=_slowdown(base, size, programs, there),
    )


def _slowdown(base: Programs, size: Size, programs: Programs, there: Size) -> float | None:
    """Return the time of a step with a lever over the time without, if both can run here side by side."""
    if not (programs.fits_here(there) and base.fits_here(size)):
        return None
    steps: dict[str, Callable[[], None]] = {
        "without": base.step_of(size, size.num_microbatches),
        "with": programs.step_of(there, there.num_microbatches),
    }
    times = take_turns(steps, seconds=SHORT_TIMING_SECONDS)
    programs.forget_state()
    return times["with"].seconds / times["without"].seconds


def _smaller(base: Programs, size: Size, usable: float) -> Lever | None:
    """Return the next smaller microbatch that cuts every phase."""
    legal = [b for b in base.free.legal_microbatches(base.plan.ramp.sizes) if b < size.microbatch_size]
    if not legal:
        return None
    smaller = base.size(legal[-1])
    taken, settings = base.bytes(smaller), {"microbatch_size": smaller.microbatch_size}
    slowdown = None
    if base.fits_here(size) and base.fits_here(smaller):
        times = take_turns({b: base.step_of(b, b.num_microbatches) for b in (size, smaller)}, seconds=SHORT_TIMING_SECONDS)
        slowdown = times[smaller].seconds / times[size].seconds
    return Lever(
        name=f"a smaller microbatch, {smaller.microbatch_size}",
        settings=settings,
        bytes=taken,
        saved_bytes=base.bytes(size) - taken,
        fits=taken <= usable,
        slowdown=slowdown,
    )


def _offloaded(base: Programs, size: Size, key: str, usable: float) -> Lever | None:
    """Return what a part of the state in host memory saves: as compiled where the analysis tells the memories apart."""
    if getattr(base.config, key):
        return None
    if tells_host_memory(base.mesh):
        return _compiled(base, size, key, {key: True}, usable)
    shapes = state_shapes(base.config, base.mesh, training_step(base.config, base.plan, base.mesh).tx)
    saved = bytes_per_device(getattr(shapes, _OFFLOAD[key]))
    taken = base.bytes(size) - saved
    limits = "the most it can save: the step brings it back to the device part by part"
    remark = host_memory_problem(base.mesh) or limits
    return Lever(
        name=key,
        settings={key: True},
        bytes=None if math.isinf(taken) else taken,
        saved_bytes=saved,
        fits=taken <= usable,
        compiled=False,
        remark=remark,
    )


def _more_devices(base: Programs, size: Size, usable: float) -> Sequence[Lever]:
    """Return what twice the devices on the fsdp axis would save, where this run has only one to cut the batch over."""
    if base.mesh.shape["data"] > 1 or base.mesh.shape["fsdp"] > 1:
        return ()
    shapes = state_shapes(base.config, base.mesh, training_step(base.config, base.plan, base.mesh).tx)
    # Half of the parameters, of what the optimizer keeps, and of the gradients, which are as large as the parameters.
    saved = bytes_per_device((shapes.params, shapes.opt_state, shapes.params)) / 2
    taken = base.bytes(size) - saved
    return [
        Lever(
            name="two devices on the fsdp axis",
            settings={},
            bytes=None if math.isinf(taken) else taken,
            saved_bytes=saved,
            fits=taken <= usable,
            compiled=False,
            remark="cuts parameters, gradients and optimizer state in two; with ici_fsdp_parallelism=2 it is compiled",
        )
    ]
