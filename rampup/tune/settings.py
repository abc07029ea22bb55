"""Which settings of a configuration make it run microbatches of the sizes that fit, without changing its ramp."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rampup.config.build import build_plan
from rampup.config.schema import PER_ACCUMULATION_KEYS, Config
from rampup.errors import RampupError
from rampup.plan.numbers import divisors, to_yaml_number
from rampup.plan.plan import RampPlan
from rampup.plan.split import AUTO
from rampup.tune.programs import free_splitter

NEAR_THE_TOP = 3
MAX_SHAPES = 8
# (microbatch size, microbatches of a step per replica) -> seconds of the step, or None where that was not measured.
StepTime = Callable[[int, int], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings and the plan that they make.

    Attributes:
        policy: `rampup_microbatch` of the plan.
        settings: the keys that differ from the configuration.
        plan: the same ramp in other microbatches.
    """

    policy: str
    settings: Mapping[str, Any]
    plan: RampPlan

    @property
    def sizes(self) -> frozenset[int]:
        """Microbatch sizes that the run uses."""
        return frozenset(split.microbatch_size for split in self.reached)

    @property
    def reached(self) -> tuple[Any, ...]:
        """The splits of the phases that the run's steps reach."""
        phases = self.plan.ramp.phases
        return tuple(
            split for phase, split in zip(phases, self.plan.splits, strict=True) if phase.start_step < self.plan.total_steps
        )

    def seconds(self, step_time: StepTime) -> float | None:
        """Return what all steps of the run take, compilation aside, or None where a size was not measured."""
        total, plan = 0.0, self.plan
        for phase, split in zip(plan.ramp.phases, plan.splits, strict=True):
            end = plan.total_steps if phase.num_steps is None else min(phase.start_step + phase.num_steps, plan.total_steps)
            if end > phase.start_step:
                time = step_time(split.microbatch_size, split.num_microbatches)
                if time is None:
                    return None
                total += (end - phase.start_step) * time
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as a configuration file has them."""
        return {key: to_yaml_number(value) if isinstance(value, Fraction) else value for key, value in self.settings.items()}


def legal_sizes(plan: RampPlan) -> list[tuple[int, ...]]:
    """Return the microbatch sizes that cut each phase's batch, whatever its accumulation, phase by phase."""
    free = free_splitter(plan.splitter)
    return [free.legal_microbatches([size]) for size in plan.ramp.sizes]


def proposals(config: Config, plan: RampPlan, found: int) -> tuple[Proposal, ...]:
    """Return the settings worth measuring, those of the configuration's own `rampup_microbatch` first.

    Every size near the top for one shape (`fixed`); pairs of them for the ramp and after it (`auto`); and the least
    accumulation with which every phase fits in it (`per_phase`).

    Args:
        config: the configuration.
        plan: its plan.
        found: the largest microbatch that fits.
    """
    made = [p for p in (*_fixed(config, plan, found), *_auto(config, plan, found), *_per_phase(config, plan, found)) if p]
    unique: dict[tuple[int, ...], Proposal] = {}
    for proposal in sorted(made, key=lambda p: p.policy != config.rampup_microbatch):
        unique.setdefault(tuple(split.microbatch_size for split in proposal.plan.splits), proposal)
    return tuple(unique.values())


def _fixed(config: Config, plan: RampPlan, found: int) -> Iterator[Proposal | None]:
    for size in _shared(plan, found)[:NEAR_THE_TOP]:
        settings = {"rampup_microbatch": "fixed", "microbatch_size": size}
        yield _proposal(config, plan, settings, found) or _proposal(config, plan, settings | _accumulating(config, 1), found)


def _auto(config: Config, plan: RampPlan, found: int) -> Iterator[Proposal | None]:
    free, last = free_splitter(plan.splitter), plan.ramp.sizes[-1]
    shared = _shared(plan, found)[:NEAR_THE_TOP]
    after = [size for size in reversed(free.legal_microbatches([last])) if shared[0] < size <= found]
    for final in after[:NEAR_THE_TOP]:
        accumulation = _accumulating(config, free.largest_microbatch(last) // final)
        settings = [{"rampup_microbatch": "auto", "microbatch_size": size, **accumulation} for size in shared]
        # The accumulation holds in every phase, so that the largest shared size may be too large for the first.
        yield next((made for each in settings if (made := _proposal(config, plan, each, found))), None)


def _per_phase(config: Config, plan: RampPlan, found: int) -> Iterator[Proposal | None]:
    free = free_splitter(plan.splitter)
    largest = [free.largest_microbatch(size) for size in plan.ramp.sizes]
    for accumulation in divisors(math.gcd(*largest)):
        if max(largest) <= found * accumulation:
            settings = {"rampup_microbatch": "per_phase", "microbatch_size": AUTO, **_accumulating(config, accumulation)}
            made = _proposal(config, plan, settings, found)
            if made:
                yield made if len(made.sizes) <= MAX_SHAPES or config.rampup_microbatch == "per_phase" else None
                return


def _shared(plan: RampPlan, found: int) -> list[int]:
    """Return the sizes that fit and cut every phase, largest first."""
    return [size for size in reversed(free_splitter(plan.splitter).legal_microbatches(plan.ramp.sizes)) if size <= found]


def _accumulating(config: Config, accumulation: int) -> dict[str, Any]:
    """Return the settings of another `gradient_accumulation_steps` that leave every batch as it is."""
    if accumulation == config.gradient_accumulation_steps:
        return {}
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if config.batch_size_schedule is None:
        factor = Fraction(config.gradient_accumulation_steps, accumulation)
        names = PER_ACCUMULATION_KEYS if config.enable_rampup_batch_size else ("per_device_batch_size",)
        settings |= {name: factor * getattr(config, name) for name in names}
    return settings


def _proposal(config: Config, plan: RampPlan, settings: Mapping[str, Any], found: int) -> Proposal | None:
    """Return a proposal if the settings are legal, leave the ramp as it is and only make microbatches that fit."""
    try:
        made = build_plan(replace(config, **settings), plan.num_devices)
    except RampupError:
        return None
    splits = [*made.splits, *([made.eval_split] if made.eval_split else [])]
    if made.ramp.phases != plan.ramp.phases or max(split.microbatch_size for split in splits) > found:
        return None
    changed = {key: value for key, value in settings.items() if value != getattr(config, key)}
    return Proposal(policy=made.splitter.rampup_microbatch, settings=changed, plan=made)
