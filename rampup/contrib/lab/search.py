"""Find the largest microbatch that fits in memory, the settings that make the run
fastest, and other ways to save memory.

`tune` works in three steps. A bisection over programs that are compiled and not run
finds the largest microbatch that fits, so it cannot run out of memory. The sizes near
it then run a few steps on synthetic rows. The measured times rank the proposals:
settings that leave the ramp unchanged and only split its batches differently. With a
topology nothing runs: the programs are compiled for absent TPU slices, a size fits if
their compiler accepts it, and a roofline estimate ranks the settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from rampup.config.build import build_plan, with_slices
from rampup.config.schema import KEYS, PER_ACCUMULATION_KEYS, Config, RunKeys
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
from rampup.contrib.lab.topology import (
    Target,
    compiler_version,
    refused_bytes,
    topology_devices,
)
from rampup.engine.compile import enable_compilation_cache, topology_facts
from rampup.engine.offload import (
    bytes_per_device,
    device_limit,
    host_memory_problem,
    is_out_of_memory,
    peak_bytes,
    reports_host_memory,
)
from rampup.errors import ConfigError, RampupError
from rampup.lm.train import unconstrained
from rampup.loop.run_folder import is_bucket
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
# Relative differences below this are ties, of times and of estimates. The proposal with
# fewer shapes then wins.
TIE_TOLERANCE, ESTIMATE_TOLERANCE = 0.05, 0.25
# Sizes that are compiled for absent slices: with a large model each takes minutes. The
# search may take more.
MAX_COMPILED_SIZES = 3
NEAR_THE_TOP = 3  # the largest sizes, per kind of proposal, that are worth timing
MAX_SHAPES = 8
SHORT_TIMING_SECONDS = (
    15.0  # for a memory option, whose step takes turns with that of the configuration
)
# Configuration key -> the part of the training state that it keeps in host memory.
OFFLOAD_KEYS = {
    "optimizer_memory_host_offload": "opt_state",
}
NOT_RUN = "not run: this is computed"
# Of `RampPlan.phase_rows`.
PHASE_KEYS = (
    "start_step",
    "global_batch_size",
    "per_device_batch_size",
    "accumulation_steps",
    "num_pipeline_microbatches",
)
PHASE_KEYS += ("microbatch_size",)
Facts = dict[
    str, Any
]  # the result as JSON: docs/reference/json_output.md says what its keys mean
Times = Mapping[
    tuple[int, int], Timing
]  # by microbatch size and number of microbatches


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

    def seconds(self, step_time: Callable[[int, int], float]) -> float:
        """Return the time of all steps of the run without compilation, from that of a
        step by microbatch size and number.
        """
        starts = [phase.start_step for phase in self.plan.ramp.phases][
            : len(self.reached)
        ]
        steps = [
            end - start
            for start, end in itertools.pairwise([*starts, self.plan.total_steps])
        ]
        pairs = zip(steps, self.reached, strict=True)
        return sum(
            number * step_time(split.microbatch_size, split.num_microbatches)
            for number, split in pairs
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as they are written in a configuration file."""
        return {
            key: to_yaml_number(value) if isinstance(value, Fraction) else value
            for key, value in self.settings.items()
        }


def tune(
    config: Config,
    *,
    memory_gib: str | float | None = None,
    num_devices: int | None = None,
    topology: Topology | str | None = None,
    memory_options: bool = False,
    report: Report = lambda line: None,
) -> Facts:
    """Return what `rampup tune --json` prints. Ctrl-C ends the search with what it has
    found so far, if anything.

    `memory_gib` is that of one device; None = the devices' own. If nothing fits,
    `memory_options` are always measured.
    """
    if config.gradient_accumulation != "fused":
        rule = (
            f"gradient_accumulation={config.gradient_accumulation} is not tuned, only"
            " fused"
        )
        raise ConfigError(rule, key="gradient_accumulation", nearest=("fused",))
    if config.rampup_microbatch == "whole":
        rule = (
            "tune searches for a microbatch, but with rampup_microbatch=whole each"
            " is one"
        )
        raise ConfigError(rule, key="rampup_microbatch", nearest=("fixed",))
    if topology is None:
        devices, margin = jax.devices(), MARGIN
        if num_devices is not None:
            if not 1 <= num_devices <= len(devices):
                rule = (
                    f"--devices={num_devices} must be between 1 and the {len(devices)}"
                    " devices of this machine"
                )
                nearest = (min(max(num_devices, 1), len(devices)),)
                raise ConfigError(
                    f"{rule}; --fake-devices {num_devices} simulates them",
                    key="devices",
                    nearest=nearest,
                )
            devices = devices[:num_devices]
        limit = memory_limit(memory_gib, devices)
        enable_compilation_cache(config.jax_cache_dir)
        programs = Programs(config, devices, report)
    else:
        target = _target(config, topology, memory_gib, num_devices)
        config = with_slices(config, target.topology)
        devices, margin = (
            topology_devices(target.topology),
            Fraction(0),
        )  # the compiler itself keeps what it needs
        limit = target.limit
        programs = Programs(config, devices, report, target=target)
    usable = int(limit * (1 - margin))
    facts: Facts = {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "memory_gib": limit / GIB,
        "memory_is_named": memory_gib is not None,
        "margin": float(margin),
        "usable_bytes": usable,
        **dict.fromkeys(("largest_microbatch", "next_larger")),
        "next_larger_run": NOT_RUN,
        **dict.fromkeys(
            ("measured_peak_bytes", "settings", "run_seconds", "pipeline_tick_overhead")
        ),
        **{
            name: []
            for name in ("candidates", "phases", "alternatives", "levers", "notes")
        },
    }
    if programs.target is not None:
        unknown = (
            "executables",
            "compile_seconds",
            "memory",
            "collectives_per_step",
            "roofline_seconds",
            "roofline",
        )
        facts |= {
            "topology": programs.target.topology.name,
            "compiled_for": f"{NOT_RUN_ON}: every number about time is an estimate",
            "compiler": compiler_version(),
            "slices": topology_facts(programs.target.topology),
            "hbm_bytes": limit,
            **dict.fromkeys((*unknown, "roofline_run_seconds")),
        }
    try:
        _search(facts, programs, memory_options, report)
    except KeyboardInterrupt:
        if not programs.compiled_sizes:
            raise
        rows = facts["candidates"] = _candidates(programs, {}, usable)
        largest = max(
            (row["microbatch_size"] for row in rows if row["fits"]), default=None
        )
        larger = [
            b
            for row in rows
            if not row["fits"] and (b := row["microbatch_size"]) > (largest or 0)
        ]
        facts |= {
            "largest_microbatch": largest,
            "next_larger": min(larger, default=None),
            "interrupted": True,
        }
        if programs.target is not None and largest is not None:
            # The best settings that take no other sizes.
            made = proposals(config, programs.plan, largest)
            known = programs.compiled_sizes
            choices = [
                each
                for each in made
                if {split.microbatch_size for split in each.plan.splits} <= known
            ]
            if choices:
                _choose(facts, programs, choices, {})
    return facts


def problem_of(facts: Facts) -> ConfigError | None:
    """Return the error to report if no settings can be recommended."""
    if facts["settings"] is not None or facts.get("interrupted"):
        return None
    if (largest := facts["largest_microbatch"]) is not None:
        rule = (
            "no settings split every phase into such microbatches and leave the ramp"
            " unchanged"
        )
        return ConfigError(
            f"microbatches of up to {largest} samples fit, but {rule}",
            key="microbatch_size",
        )
    smallest = facts["candidates"][0]
    limit = int(facts["memory_gib"] * GIB)
    # For absent slices, the refusal says how much it needs.
    placed = (
        refused_bytes(facts["next_larger_run"])
        if smallest["bytes"] is None
        else smallest["bytes"]
    )
    needs = (
        "more than the compiler could place"
        if math.isinf(placed)
        else f"{int(placed):,} bytes"
    )
    enough = [option["name"] for option in facts["levers"] if option["fits"]]
    fix = (
        f"; enough would be: {', '.join(enough)}"
        if enough
        else "; no single memory option is enough"
    )
    less = f" ({limit:,} less {facts['margin']:.0%})" if facts["margin"] else ""
    return ConfigError(
        f"no microbatch fits: a step with microbatch_size={smallest['microbatch_size']}"
        f" needs {needs} of each device's {facts['usable_bytes']:,} usable"
        f" bytes{less}{fix}",
        key="microbatch_size",
    )


def _search(
    facts: Facts, programs: Programs, memory_options: bool, report: Report
) -> None:
    """Add everything that the search finds."""
    usable = facts["usable_bytes"]
    is_estimate = programs.target is not None
    largest, next_larger = (find_largest_compiled if is_estimate else find_largest)(
        programs, usable
    )
    facts |= {"largest_microbatch": largest, "next_larger": next_larger}
    if is_estimate:
        refusal = (
            "no larger size was tried"
            if next_larger is None
            else programs.answer(programs.size(next_larger)).refusal
        )
        facts["next_larger_run"] = f"not run: {refusal}"
    choices = (
        () if largest is None else proposals(programs.config, programs.plan, largest)
    )
    times: Times = {}
    if is_estimate:
        # Those that take few further compilations, and the first one.
        sizes, taken = set(programs.compiled_sizes), list[Proposal]()
        for choice in choices:
            if (
                not taken
                or choice.sizes <= sizes
                or len(sizes | choice.sizes) <= MAX_COMPILED_SIZES
            ):
                sizes |= choice.sizes
                taken.append(choice)
        choices = tuple(taken)
        new = sorted(sizes - programs.compiled_sizes)
        for number, b in enumerate(new, start=1):
            programs.memory(programs.size(b), more=len(new) - number)
    elif choices:
        # The sizes of the proposals that fit on this machine, each with one pass and
        # with the most microbatches.
        wanted = list(
            dict.fromkeys(
                b for choice in choices for b in sorted(choice.sizes, reverse=True)
            )
        )[:MAX_TIMED_SIZES]
        timed = [
            size
            for b in wanted
            if programs.bytes(size := programs.size(b)) <= usable
            and programs.fits_here(size)
        ]
        numbers = [
            (size, n)
            for size in timed
            for n in sorted({programs.pass_unit, size.num_microbatches})
        ]
        steps = {
            (size.microbatch_size, n): programs.step_of(size, n) for size, n in numbers
        }
        if steps:
            report(
                "timing microbatches of"
                f" {', '.join(f'{size.microbatch_size:,}' for size in sorted(timed))}"
            )
            times = take_turns(steps)
    size = programs.size(min(programs.compiled_sizes))
    if choices:
        size = programs.size(max(_choose(facts, programs, choices, times).sizes))
        if not is_estimate:
            facts["next_larger_run"] = _run_next_larger(
                programs, next_larger, facts["memory_is_named"]
            )
        facts["measured_peak_bytes"] = peak_bytes(programs.devices) if times else None
    facts["candidates"] = _candidates(programs, times, usable)
    if memory_options or not choices:
        facts["levers"] = find_memory_options(programs, size, usable, report)


def _choose(
    facts: Facts, programs: Programs, choices: Sequence[Proposal], times: Times
) -> Proposal:
    """Choose the fastest proposal, and add it with its phases and with the others."""
    is_estimate = programs.target is not None
    step_time = _step_time(programs, times)
    choices = tuple(
        replace(choice, run_seconds=choice.seconds(step_time)) for choice in choices
    )
    chosen = _fastest(choices, ESTIMATE_TOLERANCE if is_estimate else TIE_TOLERANCE)
    seconds_key = "roofline_run_seconds" if is_estimate else "run_seconds"
    overhead = _tick_overhead(programs, times)
    others = (choice for choice in choices if choice is not chosen)
    facts |= {
        "settings": chosen.to_dict(),
        seconds_key: finite_or_none(chosen.run_seconds),
        "phases": _phases(programs, chosen, step_time),
        "alternatives": [
            {
                "rampup_microbatch": other.plan.splitter.rampup_microbatch,
                "settings": other.to_dict(),
                "executables": len(other.sizes),
                seconds_key: finite_or_none(other.run_seconds),
            }
            for other in sorted(others, key=lambda choice: choice.run_seconds)
        ],
        "pipeline_tick_overhead": overhead,
        "notes": list(_notes(programs, choices, chosen, times, overhead)),
    }
    if programs.target is not None:
        facts |= _compiled_facts(programs, programs.target, chosen)
    return chosen


def _points(times: Times) -> dict[int, list[tuple[int, float]]]:
    """Return the number of microbatches and the seconds of the timed steps, by
    microbatch size.
    """
    return {
        b: [(n, timing.seconds) for (other, n), timing in times.items() if other == b]
        for b, _ in times
    }


def _step_time(programs: Programs, times: Times) -> Callable[[int, int], float]:
    """Return the seconds of a step by microbatch size and number: a line over the
    number, with a constant for the update, or an estimate for absent slices.
    """
    lines = {b: fit_line(numbers) for b, numbers in _points(times).items()}

    def timed(microbatch_size: int, num_microbatches: int) -> float:
        start, slope = lines.get(microbatch_size, (math.inf, 0.0))
        return max(start + slope * num_microbatches, 0.0)

    def estimated(microbatch_size: int, num_microbatches: int) -> float:
        found = _roofline_seconds(programs, microbatch_size, num_microbatches)
        return found or math.inf

    return timed if programs.target is None else estimated


def _fastest(choices: Sequence[Proposal], tolerance: float) -> Proposal:
    """Return the fastest proposal, of ties that with fewer shapes, then the earlier
    one; the first if no time is known.
    """
    least = min(choice.run_seconds for choice in choices)
    if not math.isfinite(least):
        return choices[0]
    tied = [each for each in choices if each.run_seconds <= least * (1 + tolerance)]
    return min(tied, key=lambda choice: len(choice.sizes))


def _phases(
    programs: Programs, chosen: Proposal, step_time: Callable[[int, int], float]
) -> list[dict[str, Any]]:
    """Return the phases of a proposal, with memory and speed."""
    is_estimate = programs.target is not None
    phases = []
    for split, row in zip(chosen.plan.splits, chosen.plan.phase_rows(), strict=True):
        b = split.microbatch_size
        # The program of the run; an estimate takes the one that was compiled, whose
        # buffer is that of the largest batch.
        size = Size(b, chosen.plan.max_microbatches[b])
        if is_estimate:
            size = programs.size(b)
        seconds = finite_or_none(step_time(b, split.num_microbatches))
        tokens = split.global_batch_size * programs.config.max_target_length
        rate = tokens / seconds if seconds else None
        speed = {"step_seconds": seconds, "tokens_per_second": rate}
        if is_estimate:
            speed = dict.fromkeys(speed) | {
                "roofline_seconds": seconds,
                "roofline_tokens_per_second": rate,
            }
        memory = {"bytes": finite_or_none(programs.bytes(size))}
        phases.append({name: row[name] for name in PHASE_KEYS} | memory | speed)
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


def _compiled_facts(
    programs: Programs, target: Target, chosen: Proposal
) -> dict[str, Any]:
    """Return the facts of the programs of the chosen settings for absent slices; the
    collectives and the estimate are those of a step in the last phase.
    """
    last = chosen.reached[-1]
    answers = [programs.answer(programs.size(b)) for b in chosen.sizes]
    largest = max(
        (each.memory for each in answers if each.memory),
        key=lambda memory: memory.total,
        default=None,
    )
    found = {
        "executables": len(answers),
        "compile_seconds": sum(each.seconds for each in answers),
        "memory": largest and {**asdict(largest), "total": largest.total},
    }
    account = programs.answer(programs.size(last.microbatch_size)).account
    if account is None:
        return found
    trips = programs.loop_trips(last.microbatch_size, last.num_microbatches)
    roofline = account.roofline(target.topology, trips)
    return found | {
        "collectives_per_step": account.collective_rows(trips),
        "roofline_seconds": roofline.seconds,
        "roofline": {
            **asdict(roofline),
            "flops": sum(account.total_flops(trips).values()),
            "memory_bytes": account.total_memory_bytes(trips),
            "kernels_of_unknown_cost": list(account.kernels),
        },
    }


def _roofline_seconds(
    programs: Programs, microbatch_size: int, num_microbatches: int
) -> float | None:
    """Return the estimated time of a step on absent slices, or None if it does not
    fit.
    """
    assert programs.target is not None
    account = programs.answer(programs.size(microbatch_size)).account
    trips = programs.loop_trips(microbatch_size, num_microbatches)
    return account and account.roofline(programs.target.topology, trips).seconds


def _target(
    config: RunKeys,
    topology: Topology | str,
    memory_gib: str | float | None,
    num_devices: int | None,
) -> Target:
    """Return what to compile for."""
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    if num_devices is not None:
        raise ConfigError(
            "--devices counts devices of this machine; leave it out with --topology",
            key="devices",
        )
    hbm_bytes = None if memory_gib is None else parse_memory_gib(memory_gib)
    if hbm_bytes is not None and hbm_bytes > topology.hbm_bytes:
        rule = (
            f"a device of {topology.name} has {topology.hbm_bytes / GIB:.4g} GiB;"
            " --memory-gib can only name less"
        )
        raise ConfigError(rule, key="memory-gib", nearest=(topology.hbm_bytes / GIB,))
    folder = config.jax_cache_dir
    # Results are small files that several processes may write at once, so a bucket has
    # none.
    cache = (
        None
        if folder is None or is_bucket(folder)
        else Path(folder).expanduser() / "topology"
    )
    return Target(topology=topology, hbm_bytes=hbm_bytes, cache=cache)


def find_largest(programs: Programs, usable: float) -> tuple[int | None, int | None]:
    """Return the largest microbatch size that fits, and the next one, which was tried
    and does not; None if there is none.
    """
    legal = {
        b
        for size in programs.plan.ramp.sizes
        for b in programs.splitter.legal_microbatches([size])
    }
    one_pass = max(legal)
    next_larger = None

    def fits(size: int) -> bool:
        return programs.bytes(programs.size(size)) <= usable

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


def find_largest_compiled(
    programs: Programs, usable: float
) -> tuple[int | None, int | None]:
    """Return the same for absent slices, of the sizes that divide the largest batch,
    with few compilations.

    Each may take minutes. A program far beyond the limit takes the compiler longest, so
    it is avoided.
    """
    splitter = programs.splitter
    sizes_of_phases = programs.plan.ramp.sizes
    sizes = splitter.legal_microbatches([max(sizes_of_phases)])
    index = sizes.index(
        splitter.legal_microbatches(sizes_of_phases)[-1]
    )  # the largest that divides every phase
    low, high = -1, len(sizes)
    while high - low > 1:
        size = programs.size(sizes[index])
        memory = programs.memory(size, more=high - low - 2)
        used = programs.bytes(size)
        low, high = (index, high) if used <= usable else (low, index)
        index = (low + high) // 2
        if memory is not None and used <= usable:
            # Nearly a line over the size, which starts with the arguments: where it
            # meets the limit, or just above this size.
            slope = max(used - memory.arguments, 1) / sizes[low]
            index = max(
                [
                    n
                    for n in range(low + 1, high)
                    if memory.arguments + slope * sizes[n] <= usable
                ],
                default=low + 1,
            )
    return sizes[low] if low >= 0 else None, sizes[high] if high < len(sizes) else None


def proposals(config: Config, plan: RampPlan, found: int) -> tuple[Proposal, ...]:
    """Return the settings worth timing if `found` is the largest microbatch that fits,
    those with the own policy first.
    """
    splitter = unconstrained(plan.splitter)
    sizes = plan.ramp.sizes
    own = config.gradient_accumulation_steps

    def propose(
        policy: str, microbatch_size: int, accumulation: int
    ) -> Proposal | None:
        """Return the proposal if it is legal, leaves the ramp unchanged and has only
        microbatches that fit.
        """
        settings: dict[str, Any] = {
            "rampup_microbatch": policy,
            "microbatch_size": microbatch_size,
        }
        settings["gradient_accumulation_steps"] = accumulation
        if accumulation != own and config.batch_size_schedule is None:
            # Every global batch stays as it is.
            names = (
                PER_ACCUMULATION_KEYS
                if config.enable_rampup_batch_size
                else ("per_device_batch_size",)
            )
            settings |= {
                name: Fraction(own, accumulation) * getattr(config, name)
                for name in names
            }
        try:
            made = build_plan(replace(config, **settings), plan.num_devices)
        except RampupError:
            return None
        splits = [*made.splits, *([made.eval_split] if made.eval_split else [])]
        if (
            made.ramp.phases != plan.ramp.phases
            or max(split.microbatch_size for split in splits) > found
        ):
            return None
        return Proposal(
            settings={
                key: value
                for key, value in settings.items()
                if value != getattr(config, key)
            },
            plan=made,
        )

    # `fixed`: the largest sizes that fit and divide every phase.
    shared = [
        size for size in reversed(splitter.legal_microbatches(sizes)) if size <= found
    ][:NEAR_THE_TOP]
    made = [propose("fixed", size, own) or propose("fixed", size, 1) for size in shared]
    # `auto`: pairs of sizes for the ramp and the phase after it.
    after = [
        size
        for size in reversed(splitter.legal_microbatches(sizes[-1:]))
        if shared[0] < size <= found
    ]
    for final in after[:NEAR_THE_TOP]:
        # The accumulation applies to every phase, so the largest shared size may be too
        # large for the first.
        pairs = (
            propose("auto", size, splitter.largest_microbatch(sizes[-1]) // final)
            for size in shared
        )
        made.append(next(filter(None, pairs), None))
    # `per_phase`: the smallest accumulation with which every phase fits.
    largest = [splitter.largest_microbatch(size) for size in sizes]
    enough = (
        number
        for number in divisors(math.gcd(*largest))
        if max(largest) <= found * number
    )
    each_phase = next(
        filter(None, (propose("per_phase", AUTO, number) for number in enough)), None
    )
    if each_phase and (
        len(each_phase.sizes) <= MAX_SHAPES or config.rampup_microbatch == "per_phase"
    ):
        made.append(each_phase)
    unique: dict[tuple[int, ...], Proposal] = {}
    known = (proposal for proposal in made if proposal)
    for proposal in sorted(
        known,
        key=lambda each: (
            each.plan.splitter.rampup_microbatch != config.rampup_microbatch
        ),
    ):
        unique.setdefault(
            tuple(split.microbatch_size for split in proposal.plan.splits), proposal
        )
    return tuple(unique.values())


def _candidates(programs: Programs, times: Times, usable: float) -> list[Facts]:
    """Return a row for every size that was compiled, ascending, with the times of a
    step of the largest batch.
    """
    rows = []
    for b in sorted(programs.compiled_sizes):
        size = programs.size(b)
        used = programs.bytes(size)
        timing = times.get((b, size.num_microbatches))
        tokens = (
            b
            * size.num_microbatches
            * programs.splitter.data_parallel_size
            * programs.config.max_target_length
        )
        row: Facts = {
            "microbatch_size": b,
            "num_microbatches": size.num_microbatches,
            "bytes": finite_or_none(used),
        }
        row |= {
            "fits": used <= usable,
            **dict.fromkeys(("step_seconds", "spread", "rounds", "tokens_per_second")),
        }
        if timing is not None:
            row |= {
                "step_seconds": timing.seconds,
                "spread": timing.spread,
                "rounds": timing.rounds,
            }
            row["tokens_per_second"] = tokens / timing.seconds
        if programs.target is not None:
            seconds = _roofline_seconds(programs, b, size.num_microbatches)
            row |= {
                "roofline_seconds": seconds,
                "roofline_tokens_per_second": seconds and tokens / seconds,
            }
        rows.append(row)
    return rows


def _notes(
    programs: Programs,
    choices: Sequence[Proposal],
    chosen: Proposal,
    times: Times,
    overhead: float | None,
) -> Iterator[str]:
    best = min(choices, key=lambda choice: choice.run_seconds)
    if best.run_seconds < chosen.run_seconds:
        name = (
            " ".join(f"{key}={value}" for key, value in best.to_dict().items())
            or "the configuration as it is"
        )
        tolerance = TIE_TOLERANCE if programs.target is None else ESTIMATE_TOLERANCE
        why = "such times vary more than that"
        if programs.target is not None:
            why = (
                "an estimate leaves out what each microbatch costs apart from its"
                " arithmetic"
            )
        yield (
            f"{name} is {1 - best.run_seconds / chosen.run_seconds:.1%} faster than"
            f" what is recommended, but within {tolerance:.0%} it is a tie ({why}): the"
            " fewest compiled programs win, then the configuration's own"
            " rampup_microbatch, then the largest microbatch"
        )
    if programs.target is not None:
        yield (
            f"{NOT_RUN_ON}; seconds are roofline estimates at published peaks, so a"
            " real step takes longer"
        )
        account = programs.answer(
            programs.size(chosen.reached[-1].microbatch_size)
        ).account
        if programs.target.topology.num_slices > 1:
            sent = (
                sum(c.num_bytes for c in account.collectives if c.between_slices)
                if account
                else 0
            )
            yield (
                "the estimate leaves out the data-center network between slices, over"
                f" which a device sends {sent:,} bytes"
            )
        if account and account.kernels:
            yield (
                f"the estimate leaves out {len(account.kernels)} kernels, such as those"
                " of attention, whose cost is unknown"
            )
    elif len({b for b, _ in times}) < len(
        {b for choice in choices for b in choice.sizes}
    ):
        yield (
            "not every size was timed: the others do not fit in this machine's memory,"
            " or there are too many"
        )
    spread = max((timing.spread for timing in times.values()), default=0.0)
    limit = chosen.run_seconds * (1 + spread)
    close = sum(
        choice is not chosen and choice.run_seconds <= limit < math.inf
        for choice in choices
    )
    if close and spread > TIE_TOLERANCE:
        yield (
            f"the times vary by up to {spread:.0%}, and {close} of the alternatives are"
            " that close to the recommended ones: which is faster is not certain; tune"
            " again on a quiet machine"
        )
    if programs.splitter.num_stages > 1 and overhead is None:
        yield (
            "pipeline_tick_overhead could not be fitted: it takes two microbatch sizes"
            " whose times grow with them"
        )
    before, after = programs.plan.eval_split, chosen.plan.eval_split
    if before and after and before.global_batch_size != after.global_batch_size:
        sizes = (
            f"{after.global_batch_size} samples instead of {before.global_batch_size}"
        )
        yield (
            f"evaluation batches become {sizes}, since eval_per_device_batch_size"
            " follows per_device_batch_size"
        )


def _run_next_larger(programs: Programs, next_larger: int | None, named: bool) -> str:
    """Run the smallest size that does not fit, on devices that refuse an allocation and
    survive it.
    """
    if next_larger is None:
        return "not run: no larger size was tried"
    if named or any(device_limit(device) is None for device in programs.devices):
        return NOT_RUN
    size = programs.size(next_larger)
    if programs.memory(size) is None:
        return "failed: the compiler runs out of memory"
    try:
        programs.step_of(size, size.num_microbatches)()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return "failed: the device runs out of memory"
    finally:
        programs.forget_state()
    return "ran: it is within the margin"


def find_memory_options(
    base: Programs, size: Size, usable: float, report: Report
) -> list[Facts]:
    """Return every option that saves memory at a microbatch: first those within
    `usable` bytes, then by the memory saved.
    """
    found = _MemoryOptions(base, size, usable)
    # The next smaller microbatch that divides every phase.
    legal = base.splitter.legal_microbatches(base.plan.ramp.sizes)
    if smaller := [b for b in legal if b < size.microbatch_size]:
        settings = {"microbatch_size": smaller[-1]}
        name = f"a smaller microbatch, {smaller[-1]}"
        found.measure(name, settings, base, base.size(smaller[-1]))
    for name, settings in _compiled_changes(base):
        report(f"trying {name}")
        found.try_keys(name, settings)
    found.estimate_offloading()
    found.estimate_another_device()
    saving = [
        row
        for row in found.rows
        if row["saved_bytes"] is None or row["saved_bytes"] > 0
    ]
    return sorted(saving, key=lambda row: (not row["fits"], -(row["saved_bytes"] or 0)))


def _compiled_changes(base: Programs) -> list[tuple[str, dict[str, Any]]]:
    """Return the options that only take another compilation, with their keys."""
    config, axes = base.config, base.mesh.shape
    known = KEYS["remat_policy"].choices
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"remat_policy={name}", {"remat_policy": name})
        for name in ("minimal", "full")
        if known.index(name) > known.index(config.remat_policy)
    ]
    for axis in ("fsdp", "tensor"):
        key = f"ici_{axis}_parallelism"
        if config.num_slices not in (-1, 1) or getattr(config, key) == -1:
            continue
        # Move devices from the data axis to this one: two of them, and for fsdp also
        # all.
        factors = [n for n in (2, axes["data"]) if axes["data"] % n == 0 and n > 1]
        for n in sorted(set(factors) if axis == "fsdp" else set(factors[:1])):
            moved = {key: n * getattr(config, key), "ici_data_parallelism": -1}
            changes.append((f"{axis} axis of {n * axes[axis]}", moved))
    if reports_host_memory(base.mesh):
        changes += [(key, {key: True}) for key in OFFLOAD_KEYS]
    return [
        (name, settings)
        for name, settings in changes
        if any(getattr(config, key) != value for key, value in settings.items())
    ]


class _MemoryOptions:
    """Options that save memory at a microbatch, as `rows`."""

    def __init__(self, base: Programs, size: Size, usable: float) -> None:
        self.rows: list[Facts] = []
        self._base, self._size, self._usable = base, size, usable
        self._before = base.bytes(size)

    def _add(
        self, name: str, settings: Mapping[str, Any], used: float, **more: Any
    ) -> None:
        """Add an option with the keys to change, none if it takes other devices."""
        saved = self._before - used if used < math.inf else math.inf
        row = {
            "name": name,
            "settings": settings,
            "bytes": finite_or_none(used),
            "saved_bytes": finite_or_none(saved),
            "fits": used <= self._usable,
            "slowdown": None,
            # Bytes that are not compiled are an estimate.
            "compiled": True,
            # Why there are no bytes, or what they leave out.
            "remark": "",
        }
        self.rows.append(row | more)

    def measure(
        self, name: str, settings: Mapping[str, Any], programs: Programs, size: Size
    ) -> None:
        """Add a compiled option, with the time of its step over that without the change
        if both run here.
        """
        used, slowdown = programs.bytes(size), None
        if programs.fits_here(size) and self._base.fits_here(self._size):
            pairs = ((self._base, self._size), (programs, size))
            steps = [made.step_of(each, each.num_microbatches) for made, each in pairs]
            times = take_turns(dict(enumerate(steps)), seconds=SHORT_TIMING_SECONDS)
            slowdown = times[1].seconds / times[0].seconds
        remark = "the compiler still runs out of memory" if math.isinf(used) else ""
        self._add(name, settings, used, slowdown=slowdown, remark=remark)

    def try_keys(self, name: str, settings: Mapping[str, Any]) -> None:
        """Add other keys of the configuration, or why they are refused."""
        base = self._base
        changed = {
            key: value
            for key, value in settings.items()
            if value != getattr(base.config, key)
        }
        try:
            config = replace(base.config, **settings)
            programs = Programs(config, base.devices, target=base.target)
            size = programs.size(self._size.microbatch_size)
            self.measure(name, changed, programs, size)
            programs.forget_state()
        except RampupError as error:
            remark = str(error).splitlines()[0]
            self._add(name, changed, math.inf, remark=remark)

    def estimate_offloading(self) -> None:
        """Add what host memory saves, where its program cannot be compiled here."""
        base = self._base
        if reports_host_memory(base.mesh):
            return
        most = (
            "the most it can save: the step brings it back to the device part by part"
        )
        remark = host_memory_problem(base.mesh) or most
        for key, part in OFFLOAD_KEYS.items():
            if not getattr(base.config, key):
                saved = bytes_per_device(getattr(base.state_shapes, part))
                used = self._before - saved
                more = {"saved_bytes": saved, "compiled": False, "remark": remark}
                self._add(key, {key: True}, used, **more)

    def estimate_another_device(self) -> None:
        """Add half of the parameters, of the optimizer state, and of the gradients,
        which are as large as the parameters.
        """
        axes, shapes = self._base.mesh.shape, self._base.state_shapes
        if not axes["data"] == axes["fsdp"] == 1:
            return
        saved = bytes_per_device((shapes.params, shapes.opt_state, shapes.params)) // 2
        remark = (
            "shards parameters, gradients and optimizer state in two; with"
            " ici_fsdp_parallelism=2 it is compiled"
        )
        name = "two devices on the fsdp axis"
        more = {"saved_bytes": saved, "compiled": False, "remark": remark}
        self._add(name, {}, self._before - saved, **more)
