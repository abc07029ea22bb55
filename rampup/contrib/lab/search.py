"""Find the largest microbatch that fits in memory and the settings that make the run
fastest.

`tune` works in three steps. Programs that are compiled and not run tell the largest
microbatch that fits, so nothing runs out of memory. The sizes near it then run a few
steps on synthetic rows. The measured times rank the proposals: settings that leave the
ramp unchanged and only split its batches differently. With a topology nothing runs: a
size fits if the compiler for these absent TPU slices accepts its program.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax

from rampup.config.build import build_plan, with_slices
from rampup.config.schema import PER_ACCUMULATION_KEYS, Config
from rampup.contrib.lab.largest import MARGIN, largest_of, memory_limit
from rampup.contrib.lab.programs import (
    Programs,
    Report,
    Size,
    Timing,
    fit_line,
    fit_tick_overhead,
    take_turns,
)
from rampup.contrib.lab.topology import compiler_version, topology_devices
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.offload import peak_bytes
from rampup.errors import ConfigError, RampupError
from rampup.lm.train import unconstrained
from rampup.plan.numbers import (
    AUTO,
    GIB,
    divisors,
    finite_or_none,
    parse_memory_gib,
    to_yaml_number,
)
from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.topology import NOT_RUN_ON, Topology

SEARCH_FACTOR = 64  # the search ends at this many times the largest batch of the plan
MAX_TIMED_SIZES = 8
# Relative differences below this are ties. The proposal with fewer shapes then wins.
TIE_TOLERANCE = 0.05
NEAR_THE_TOP = 3  # the largest sizes, per kind of proposal, that are worth timing
MAX_SHAPES = 8
# Of `RampPlan.phase_rows`.
PHASE_KEYS = (
    "start_step",
    "global_batch_size",
    "per_device_batch_size",
    "accumulation_steps",
    "num_pipeline_microbatches",
    "microbatch_size",
)
# The result as JSON: docs/reference/json_output.md says what its keys mean.
Facts = dict[str, Any]
# By microbatch size and number of microbatches.
Times = Mapping[tuple[int, int], Timing]
StepTime = Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings, and the plan that they give."""

    settings: Mapping[str, Any]  # the keys that differ from the configuration
    plan: RampPlan  # the same ramp, split into other microbatches
    # predicted time of all steps of the run; infinite if one of its sizes was not timed
    run_seconds: float = math.inf

    @property
    def reached(self) -> tuple[BatchSplit, ...]:
        """The splits of the phases that the run reaches."""
        pairs = zip(self.plan.ramp.phases, self.plan.splits, strict=True)
        return tuple(
            split for phase, split in pairs if phase.start_step < self.plan.total_steps
        )

    @property
    def sizes(self) -> frozenset[int]:
        """The microbatch sizes that the run uses."""
        return frozenset(split.microbatch_size for split in self.reached)

    def seconds(self, step_time: StepTime) -> float:
        """Return the time of all steps of the run without compilation, from that of a
        step by microbatch size and number.
        """
        starts = [phase.start_step for phase in self.plan.ramp.phases]
        ends = [*starts[: len(self.reached)], self.plan.total_steps]
        steps = [end - start for start, end in itertools.pairwise(ends)]
        return sum(
            number * step_time(split.microbatch_size, split.num_microbatches)
            for number, split in zip(steps, self.reached, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as they are written in a configuration file."""
        return {
            key: to_yaml_number(value) if isinstance(value, Fraction) else value
            for key, value in self.settings.items()
        }

    def __str__(self) -> str:
        pairs = (f"{key}={value}" for key, value in self.to_dict().items())
        return " ".join(pairs) or "the configuration as it is"


def tune(
    config: Config,
    *,
    memory_gib: str | float | None = None,
    num_devices: int | None = None,
    topology: Topology | str | None = None,
    report: Report = lambda line: None,
) -> Facts:
    """Return what `rampup tune --json` prints. `memory_gib` is that of one device;
    None = the devices' own.
    """
    _refuse(config)
    if topology is None:
        devices = _devices_here(num_devices)
        limit, margin = memory_limit(memory_gib, devices), MARGIN
        enable_compilation_cache(config.jax_cache_dir)
        programs = Programs(config, devices, report)
    else:
        programs, limit = _absent(config, topology, memory_gib, num_devices, report)
        margin = Fraction(0)  # the compiler itself keeps what it needs
    usable = int(limit * (1 - margin))
    largest, next_larger = find_largest(programs, usable)
    choices: tuple[Proposal, ...] = ()
    if largest is not None:
        choices = proposals(config, programs.plan, largest)
    times = _timed(programs, choices, usable, report)
    facts: Facts = {
        "device": programs.devices[0].device_kind,
        "num_devices": len(programs.devices),
        "memory_gib": limit / GIB,
        "memory_is_named": memory_gib is not None,
        "margin": float(margin),
        "usable_bytes": usable,
        "largest_microbatch": largest,
        "next_larger": next_larger,
        "measured_peak_bytes": peak_bytes(programs.devices) if times else None,
        "pipeline_tick_overhead": _tick_overhead(programs, times),
        "settings": None,
        "run_seconds": None,
        "phases": [],
        "alternatives": [],
        "notes": [],
    }
    if programs.topology is not None:
        facts["topology"] = programs.topology.name
        facts["compiled_for"] = f"{NOT_RUN_ON}, so no time is known"
        facts["compiler"] = compiler_version()
    if choices:
        facts |= _chosen(programs, choices, times)
    facts["candidates"] = _candidates(programs, times, usable)
    return facts


def _refuse(config: Config) -> None:
    """Refuse a configuration that has no microbatch to search for."""
    if config.gradient_accumulation != "fused":
        raise ConfigError(
            f"gradient_accumulation={config.gradient_accumulation} is not tuned, only"
            " fused",
            key="gradient_accumulation",
            nearest=("fused",),
        )
    if config.rampup_microbatch == "whole":
        raise ConfigError(
            "tune searches for a microbatch, but with rampup_microbatch=whole each"
            " is one",
            key="rampup_microbatch",
            nearest=("fixed",),
        )


def _devices_here(number: int | None) -> Sequence[jax.Device]:
    """Return so many devices of this machine, or all."""
    devices = jax.devices()
    if number is None:
        return devices
    if not 1 <= number <= len(devices):
        raise ConfigError(
            f"--devices={number} must be between 1 and the {len(devices)} devices of"
            f" this machine; --fake-devices {number} simulates them",
            key="devices",
            nearest=(min(max(number, 1), len(devices)),),
        )
    return devices[:number]


def _absent(
    config: Config,
    topology: Topology | str,
    memory_gib: str | float | None,
    num_devices: int | None,
    report: Report,
) -> tuple[Programs, int]:
    """Return the programs for absent slices, and the bytes of a device that they may
    use.
    """
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    if num_devices is not None:
        raise ConfigError(
            "--devices counts devices of this machine; leave it out with --topology",
            key="devices",
        )
    limit = topology.hbm_bytes if memory_gib is None else parse_memory_gib(memory_gib)
    if limit > topology.hbm_bytes:
        most = topology.hbm_bytes / GIB
        raise ConfigError(
            f"a device of {topology.name} has {most:.4g} GiB; --memory-gib can only"
            " name less",
            key="memory-gib",
            nearest=(most,),
        )
    config, devices = with_slices(config, topology), topology_devices(topology)
    return Programs(config, devices, report, topology=topology, limit=limit), limit


def problem_of(facts: Facts) -> ConfigError | None:
    """Return the error to report if no settings can be recommended."""
    if facts["settings"] is not None:
        return None
    if (largest := facts["largest_microbatch"]) is not None:
        return ConfigError(
            f"microbatches of up to {largest} samples fit, but no settings split every"
            " phase into such microbatches and leave the ramp unchanged",
            key="microbatch_size",
        )
    smallest = facts["candidates"][0]
    needs = "more than the compiler could place"
    if smallest["bytes"] is not None:
        needs = f"{smallest['bytes']:,} bytes"
    return ConfigError(
        f"no microbatch fits: a step with microbatch_size={smallest['microbatch_size']}"
        f" needs {needs} of each device's"
        f" {facts['usable_bytes']:,} usable bytes",
        fix="remat_policy=full, ici_fsdp_parallelism=2 and"
        " optimizer_memory_host_offload=true save memory",
        key="microbatch_size",
    )


def find_largest(programs: Programs, usable: float) -> tuple[int | None, int | None]:
    """Return the largest microbatch size that fits, and the next one, which was tried
    and does not; None if there is none.
    """
    splitter, batches = programs.splitter, programs.plan.ramp.sizes

    def fits(size: int) -> bool:
        return programs.bytes(programs.size(size)) <= usable

    if programs.topology is not None:
        # A compilation may take minutes: only sizes that divide the largest batch.
        return largest_of(splitter.legal_microbatches([max(batches)]), fits)
    legal = {b for size in batches for b in splitter.legal_microbatches([size])}
    one_pass = max(legal)
    next_larger = None
    # Sizes that take the largest batch in one pass come first and separately: their
    # program has no loop and therefore one gradient buffer less, so such a size can fit
    # although a smaller one does not.
    for least, most in ((one_pass, SEARCH_FACTOR * one_pass), (1, one_pass - 1)):
        # Powers of two are tried too.
        powers = {1 << exponent for exponent in range(most.bit_length())}
        sizes = sorted(size for size in legal | powers if least <= size <= most)
        largest, larger = largest_of(sizes, fits)
        next_larger = larger or next_larger
        if largest is not None:
            return largest, next_larger
    return None, next_larger


def proposals(config: Config, plan: RampPlan, found: int) -> tuple[Proposal, ...]:
    """Return the settings worth timing if `found` is the largest microbatch that fits,
    those with the own policy first.
    """
    shared = [
        size
        for size in reversed(
            unconstrained(plan.splitter).legal_microbatches(plan.ramp.sizes)
        )
        if size <= found
    ][:NEAR_THE_TOP]
    made = [
        *_one_shape(config, plan, found, shared),
        *_two_shapes(config, plan, found, shared),
        *_shape_per_phase(config, plan, found),
    ]
    made.sort(key=lambda each: _policy(each) != config.rampup_microbatch)
    unique: dict[tuple[int, ...], Proposal] = {}
    for proposal in made:
        cut = tuple(split.microbatch_size for split in proposal.plan.splits)
        unique.setdefault(cut, proposal)
    return tuple(unique.values())


def _policy(proposal: Proposal) -> str:
    return proposal.plan.splitter.rampup_microbatch


def _one_shape(
    config: Config, plan: RampPlan, found: int, shared: Sequence[int]
) -> Iterator[Proposal]:
    """Yield `fixed` with the largest sizes that fit and divide every phase."""
    own = config.gradient_accumulation_steps
    for size in shared:
        for accumulation in (own, 1):
            if made := _propose(config, plan, found, "fixed", size, accumulation):
                yield made
                break


def _two_shapes(
    config: Config, plan: RampPlan, found: int, shared: Sequence[int]
) -> Iterator[Proposal]:
    """Yield `auto`: a size for the ramp and a larger one for the phase after it."""
    splitter, last = unconstrained(plan.splitter), plan.ramp.sizes[-1]
    larger = [
        size
        for size in reversed(splitter.legal_microbatches([last]))
        if shared[0] < size <= found
    ]
    for final in larger[:NEAR_THE_TOP]:
        # The accumulation applies to every phase, so the largest shared size may be too
        # large for the first.
        accumulation = splitter.largest_microbatch(last) // final
        for size in shared:
            if made := _propose(config, plan, found, "auto", size, accumulation):
                yield made
                break


def _shape_per_phase(config: Config, plan: RampPlan, found: int) -> Iterator[Proposal]:
    """Yield `per_phase` with the smallest accumulation with which every phase fits."""
    splitter = unconstrained(plan.splitter)
    largest = [splitter.largest_microbatch(size) for size in plan.ramp.sizes]
    for number in divisors(math.gcd(*largest)):
        if max(largest) <= found * number and (
            made := _propose(config, plan, found, "per_phase", AUTO, number)
        ):
            is_own = config.rampup_microbatch == "per_phase"
            if is_own or len(made.sizes) <= MAX_SHAPES:
                yield made
            return


def _propose(
    config: Config,
    plan: RampPlan,
    found: int,
    policy: str,
    microbatch_size: int,
    accumulation: int,
) -> Proposal | None:
    """Return the proposal if it is legal, leaves the ramp unchanged and has only
    microbatches that fit.
    """
    settings: dict[str, Any] = {
        "rampup_microbatch": policy,
        "microbatch_size": microbatch_size,
        "gradient_accumulation_steps": accumulation,
    }
    own = config.gradient_accumulation_steps
    if accumulation != own and config.batch_size_schedule is None:
        # Every global batch stays as it is.
        names: Iterable[str] = ("per_device_batch_size",)
        if config.enable_rampup_batch_size:
            names = PER_ACCUMULATION_KEYS
        for name in names:
            settings[name] = Fraction(own, accumulation) * getattr(config, name)
    try:
        made = build_plan(replace(config, **settings), plan.num_devices)
    except RampupError:
        return None
    splits = list(made.splits)
    if made.eval_split is not None:
        splits.append(made.eval_split)
    fits = max(split.microbatch_size for split in splits) <= found
    if made.ramp.phases != plan.ramp.phases or not fits:
        return None
    changed = {
        key: value for key, value in settings.items() if value != getattr(config, key)
    }
    return Proposal(settings=changed, plan=made)


def _timed(
    programs: Programs, choices: Sequence[Proposal], usable: float, report: Report
) -> Times:
    """Return the times of the sizes of the proposals that fit on this machine, each
    with one pass and with the most microbatches.
    """
    wanted = [b for choice in choices for b in sorted(choice.sizes, reverse=True)]
    steps = {}
    for b in list(dict.fromkeys(wanted))[:MAX_TIMED_SIZES]:
        size = programs.size(b)
        if programs.fits_here(size) and programs.bytes(size) <= usable:
            for number in sorted({programs.pass_unit, size.num_microbatches}):
                steps[b, number] = programs.step_of(size, number)
    if not steps:
        return {}
    sizes = ", ".join(f"{b:,}" for b in sorted({b for b, _ in steps}))
    report(f"timing microbatches of {sizes}")
    return take_turns(steps)


def _chosen(
    programs: Programs, choices: Sequence[Proposal], times: Times
) -> dict[str, Any]:
    """Return the facts about the fastest proposal, and about the others."""
    step_time = _step_time(times)
    choices = [
        replace(choice, run_seconds=choice.seconds(step_time)) for choice in choices
    ]
    chosen = _fastest(choices)
    others = [choice for choice in choices if choice is not chosen]
    return {
        "settings": chosen.to_dict(),
        "run_seconds": finite_or_none(chosen.run_seconds),
        "phases": _phases(programs, chosen, step_time),
        "alternatives": [
            {
                "rampup_microbatch": _policy(other),
                "settings": other.to_dict(),
                "executables": len(other.sizes),
                "run_seconds": finite_or_none(other.run_seconds),
            }
            for other in sorted(others, key=lambda choice: choice.run_seconds)
        ],
        "notes": list(_notes(programs, others, chosen, times)),
    }


def _points(times: Times) -> dict[int, list[tuple[int, float]]]:
    """Return the number of microbatches and the seconds of the timed steps, by
    microbatch size.
    """
    return {
        b: [(n, timing.seconds) for (other, n), timing in times.items() if other == b]
        for b, _ in times
    }


def _step_time(times: Times) -> StepTime:
    """Return the seconds of a step by microbatch size and number: a line over the
    number, with a constant for the update.
    """
    lines = {b: fit_line(numbers) for b, numbers in _points(times).items()}

    def timed(microbatch_size: int, num_microbatches: int) -> float:
        start, slope = lines.get(microbatch_size, (math.inf, 0.0))
        return max(start + slope * num_microbatches, 0.0)

    return timed


def _fastest(choices: Sequence[Proposal]) -> Proposal:
    """Return the fastest proposal, of ties that with fewer shapes, then the earlier
    one; the first if no time is known.
    """
    least = min(choice.run_seconds for choice in choices)
    if not math.isfinite(least):
        return choices[0]
    limit = least * (1 + TIE_TOLERANCE)
    tied = [choice for choice in choices if choice.run_seconds <= limit]
    return min(tied, key=lambda choice: len(choice.sizes))


def _phases(
    programs: Programs, chosen: Proposal, step_time: StepTime
) -> list[dict[str, Any]]:
    """Return the phases of a proposal, with memory and speed."""
    phases = []
    for split, row in zip(chosen.plan.splits, chosen.plan.phase_rows(), strict=True):
        b = split.microbatch_size
        # The program of the run; for absent slices the one that was compiled, whose
        # buffer is that of the largest batch.
        size = Size(b, chosen.plan.max_microbatches[b])
        if programs.topology is not None:
            size = programs.size(b)
        seconds = finite_or_none(step_time(b, split.num_microbatches))
        tokens = split.global_batch_size * programs.config.max_target_length
        phases.append(
            {name: row[name] for name in PHASE_KEYS}
            | {
                "bytes": finite_or_none(programs.bytes(size)),
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds else None,
            }
        )
    return phases


def _tick_overhead(programs: Programs, times: Times) -> float | None:
    """Return `pipeline_tick_overhead` from the timed steps; None without stages."""
    if programs.splitter.num_stages == 1:
        return None
    ticks = {
        b: [(math.prod(programs.loop_trips(b, n)), time) for n, time in numbers]
        for b, numbers in _points(times).items()
    }
    return fit_tick_overhead(ticks, num_repeats=programs.splitter.num_repeats)


def _candidates(programs: Programs, times: Times, usable: float) -> list[Facts]:
    """Return a row for every size that was compiled, ascending, with the times of a
    step of the largest batch.
    """
    rows = []
    for b in programs.compiled_sizes:
        size = programs.size(b)
        used = programs.bytes(size)
        row: Facts = {
            "microbatch_size": b,
            "num_microbatches": size.num_microbatches,
            "bytes": finite_or_none(used),
            "fits": used <= usable,
        }
        row |= dict.fromkeys(("step_seconds", "spread", "rounds", "tokens_per_second"))
        if (timing := times.get((b, size.num_microbatches))) is not None:
            samples = b * size.num_microbatches * programs.splitter.data_parallel_size
            tokens = samples * programs.config.max_target_length
            row |= {
                "step_seconds": timing.seconds,
                "spread": timing.spread,
                "rounds": timing.rounds,
                "tokens_per_second": tokens / timing.seconds,
            }
        rows.append(row)
    return rows


def _notes(
    programs: Programs, others: Sequence[Proposal], chosen: Proposal, times: Times
) -> Iterator[str]:
    best = min((chosen, *others), key=lambda choice: choice.run_seconds)
    if best.run_seconds < chosen.run_seconds:
        yield (
            f"{best} is {1 - best.run_seconds / chosen.run_seconds:.1%} faster than"
            f" what is recommended, but within {TIE_TOLERANCE:.0%} it is a tie (such"
            " times vary more than that): the fewest compiled programs win, then the"
            " configuration's own rampup_microbatch, then the largest microbatch"
        )
    spread = max((timing.spread for timing in times.values()), default=0.0)
    limit = chosen.run_seconds * (1 + spread)
    close = sum(other.run_seconds <= limit < math.inf for other in others)
    if close and spread > TIE_TOLERANCE:
        yield (
            f"the times vary by up to {spread:.0%}, and {close} of the alternatives are"
            " that close to the recommended ones: which is faster is not certain; tune"
            " again on a quiet machine"
        )
    before, after = programs.plan.eval_split, chosen.plan.eval_split
    if before and after and before.global_batch_size != after.global_batch_size:
        yield (
            f"evaluation batches become {after.global_batch_size} samples instead of"
            f" {before.global_batch_size}, since eval_per_device_batch_size follows"
            " per_device_batch_size"
        )
