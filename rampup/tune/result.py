"""What `rampup tune` has found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rampup.errors import ConfigError
from rampup.tune.memory_options import Lever
from rampup.tune.programs import Size, Timing
from rampup.tune.settings import Proposal

GIB = 2**30
# For what no analysis knows: memory that is free but in pieces, and what the libraries of the backend take for themselves.
MARGIN = Fraction(5, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A microbatch size that was compiled.

    Attributes:
        size: the size.
        bytes: of one device; infinite where the compiler ran out of memory.
        fits: whether that is within the limit.
        timing: of a step of the largest batch, or None.
        tokens_per_second: then.
    """

    size: Size
    bytes: float
    fits: bool
    timing: Timing | None = None
    tokens_per_second: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the trial by its names, for JSON."""
        return {
            "microbatch_size": self.size.microbatch_size,
            "num_microbatches": self.size.num_microbatches,
            "bytes": whole_bytes(self.bytes),
            "fits": self.fits,
            "step_seconds": None if self.timing is None else self.timing.seconds,
            "spread": None if self.timing is None else self.timing.spread,
            "rounds": None if self.timing is None else self.timing.rounds,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What was found.

    Attributes:
        device: what the devices call themselves.
        num_devices: how many the plan is for.
        limit_bytes: memory of one device.
        named: whether that was stated, and is not the device's own.
        largest: the largest microbatch that fits, or None.
        next_larger: the next one, which does not, or None where the search ended before.
        next_larger_run: `failed` or `ran` where it was run too, otherwise why it was not.
        trials: every size that was compiled, ascending.
        chosen: the settings recommended, or None.
        others: the other settings that were considered.
        run_seconds: settings -> what the run's steps take with them, where they were timed.
        phases: a row for each phase of the chosen plan.
        tick_overhead: h, for `pipeline_tick_overhead`; None without a pipeline or where it could not be fitted.
        levers: what else saves memory, where that was asked for or nothing fits.
        measured_peak_bytes: what the devices had in use at most while steps ran, where they say.
        notes: what is to be known besides, in sentences.
    """

    device: str
    num_devices: int
    limit_bytes: int
    named: bool
    largest: int | None
    next_larger: int | None
    next_larger_run: str
    trials: tuple[Trial, ...]
    chosen: Proposal | None = None
    others: tuple[Proposal, ...] = ()
    run_seconds: Mapping[int, float] = field(default_factory=dict)
    phases: tuple[Mapping[str, Any], ...] = ()
    tick_overhead: float | None = None
    levers: tuple[Lever, ...] = ()
    measured_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """The limit less the margin."""
        return usable_of(self.limit_bytes)

    @property
    def problem(self) -> ConfigError | None:
        """What is wrong where nothing fits."""
        if self.chosen is not None:
            return None
        if self.largest is not None:
            return ConfigError(
                f"microbatches of up to {self.largest} samples fit, but no settings cut every phase into such and leave the "
                "ramp as it is",
                key="microbatch_size",
            )
        smallest = self.trials[0]
        needs = "more than the compiler could place" if math.isinf(smallest.bytes) else f"{int(smallest.bytes):,} bytes"
        fitting = [lever.name for lever in self.levers if lever.fits]
        more = f"; what would help: {', '.join(fitting)}" if fitting else "; no single lever is enough"
        rule = f"{self.usable_bytes:,} usable bytes ({self.limit_bytes:,} less {float(MARGIN):.0%})"
        return ConfigError(
            f"no microbatch fits: a step with microbatch_size={smallest.size.microbatch_size} needs {needs} of each device's "
            f"{rule}{more}",
            key="microbatch_size",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what was found by its names, for JSON."""
        chosen = self.chosen
        return {
            "device": self.device,
            "num_devices": self.num_devices,
            "memory_gib": self.limit_bytes / GIB,
            "memory_is_named": self.named,
            "margin": float(MARGIN),
            "usable_bytes": self.usable_bytes,
            "largest_microbatch": self.largest,
            "next_larger": self.next_larger,
            "next_larger_run": self.next_larger_run,
            "measured_peak_bytes": self.measured_peak_bytes,
            "candidates": [trial.to_dict() for trial in self.trials],
            "settings": None if chosen is None else self.settings,
            "run_seconds": None if chosen is None else self.run_seconds.get(id(chosen)),
            "phases": [dict(row) for row in self.phases],
            "alternatives": [
                {"rampup_microbatch": p.policy, "settings": p.to_dict(), "run_seconds": self.run_seconds.get(id(p))}
                for p in self.others
            ],
            "pipeline_tick_overhead": self.tick_overhead,
            "levers": [lever.to_dict() for lever in self.levers],
            "notes": list(self.notes),
        }

    @property
    def settings(self) -> dict[str, Any]:
        """The keys to set."""
        assert self.chosen is not None
        return self.chosen.to_dict()


def usable_of(limit_bytes: int) -> int:
    """Return what a step may take of a device's memory."""
    return int(limit_bytes * (1 - MARGIN))


def whole_bytes(number: float) -> int | None:
    """Return bytes as JSON has them; None for what is infinite."""
    return None if math.isinf(number) else int(number)
