"""Find the largest microbatch that fits in memory and the settings that make the run fastest.

`tune` works in three steps. A bisection over compiled programs, none of which runs, finds the largest microbatch that fits.
The sizes near it then run a few steps on synthetic rows. The measured times rank the proposals: settings that leave the ramp
unchanged and only split its batches differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from rampup.config.build import build_plan, with_slices
from rampup.config.schema import PER_ACCUMULATION_KEYS, Config
from rampup.errors import ConfigError, RampupError
from rampup.plan.numbers import AUTO, GIB, divisors, parse_memory_gib, to_yaml_number
from rampup.plan.plan import RampPlan
from rampup.plan.split import BatchSplit
from rampup.plan.topology import NOT_RUN_ON, Topology
from rampup.run.compile import compiler_version, enable_compilation_cache, topology_devices
from rampup.run.offload import device_limit, is_out_of_memory, peak_bytes
from rampup.run.run_folder import is_bucket
from rampup.tune.memory_options import MemoryOption, find_memory_options
from rampup.tune.programs import Programs, Report, Size, Timing, fit_line, fit_tick_overhead, take_turns, unconstrained
from rampup.tune.topology import Target, refused_bytes

# Left free of a device's memory, for fragmentation and for what the backend's libraries allocate themselves.
MARGIN = Fraction(5, 100)
# The search ends at this many times the largest batch of the plan.
SEARCH_FACTOR = 64
MAX_TIMED_SIZES = 8
# Relative differences below this are ties on a machine that is not idle. The proposal with fewer shapes then wins.
TIE_TOLERANCE = 0.05
# An estimate knows nothing of what each microbatch costs apart from its arithmetic, so it cannot rank more finely.
ESTIMATE_TOLERANCE = 0.25
# Each size that is estimated takes a compilation.
MAX_ESTIMATED_SIZES = 4
# The largest sizes, per kind of proposal, that are worth timing.
NEAR_THE_TOP = 3
MAX_SHAPES = 8
NOT_RUN = "not run: this is computed"
TIMING_KEYS = {"step_seconds": "seconds", "spread": "spread", "rounds": "rounds"}

# (microbatch size, microbatches of a step per replica) -> seconds of the step, or None if that size was not timed.
StepTime = Callable[[int, int], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A microbatch size that was compiled."""

    size: Size
    bytes: float  # memory of one device; infinite if the compiler ran out of memory
    fits: bool  # whether that is within the limit
    timing: Timing | None = None  # times of a step of the largest batch, or None if it was not timed
    tokens_per_second: float | None = None  # throughput of that step, or None

    def to_dict(self) -> dict[str, Any]:
        """Return the trial for JSON."""
        return {
            "microbatch_size": self.size.microbatch_size,
            "num_microbatches": self.size.num_microbatches,
            "bytes": _finite_bytes(self.bytes),
            "fits": self.fits,
            **{key: getattr(self.timing, name, None) for key, name in TIMING_KEYS.items()},
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings, and the plan that they give."""

    policy: str  # `rampup_microbatch` of the plan
    settings: Mapping[str, Any]  # the keys that differ from the configuration
    plan: RampPlan  # the same ramp, split into other microbatches
    run_seconds: float | None = None  # predicted time of all steps of the run, or None if one of its sizes was not timed

    @property
    def reached(self) -> tuple[BatchSplit, ...]:
        """The splits of the phases that the run reaches."""
        phases = self.plan.ramp.phases
        pairs = zip(phases, self.plan.splits, strict=True)
        return tuple(split for phase, split in pairs if phase.start_step < self.plan.total_steps)

    @property
    def sizes(self) -> frozenset[int]:
        """The microbatch sizes that the run uses."""
        return frozenset(split.microbatch_size for split in self.reached)

    def seconds(self, step_time: StepTime) -> float | None:
        """Return the time of all steps of the run without compilation, or None if a size was not timed."""
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
        """Return the settings as they are written in a configuration file."""
        return {key: to_yaml_number(value) if isinstance(value, Fraction) else value for key, value in self.settings.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The result of `tune`."""

    device: str  # the device kind
    num_devices: int  # number of devices that the plan is for
    limit_bytes: int  # memory of one device
    named: bool  # whether that limit was given and is not the device's own
    largest: int | None  # the largest microbatch that fits, or None
    next_larger: int | None  # the next candidate, which does not fit, or None if every candidate fits
    next_larger_run: str  # `failed: ...` or `ran: ...` if it was also run, otherwise the reason why it was not
    trials: tuple[Trial, ...]  # every size that was compiled, ascending
    chosen: Proposal | None = None  # the recommended settings, or None
    others: tuple[Proposal, ...] = ()  # the other proposals
    phases: tuple[Mapping[str, Any], ...] = ()  # one row for each phase of the chosen plan
    tick_overhead: float | None = None  # a fitted value for `pipeline_tick_overhead`, or None
    memory_options: tuple[MemoryOption, ...] = ()  # other ways to save memory, if requested or if nothing fits
    measured_peak_bytes: int | None = None  # the peak memory of the devices while steps ran, if they report it
    notes: tuple[str, ...] = ()  # remarks, in sentences
    margin: Fraction = MARGIN  # the share of the memory that is left free
    slices: Mapping[str, Any] | None = None  # for slices that are not here: what was compiled, from `_describe_slices`

    @property
    def usable_bytes(self) -> int:
        """The limit less the margin."""
        return usable_bytes(self.limit_bytes, self.margin)

    @property
    def problem(self) -> ConfigError | None:
        """The error to report if no settings can be recommended."""
        if self.chosen is not None:
            return None
        if self.largest is not None:
            rule = "no settings split every phase into such microbatches and leave the ramp unchanged"
            return ConfigError(f"microbatches of up to {self.largest} samples fit, but {rule}", key="microbatch_size")
        smallest = self.trials[0]
        # For slices that are not here, the refusal says how much it needs.
        placed = refused_bytes(self.next_larger_run) if math.isinf(smallest.bytes) else smallest.bytes
        needs = "more than the compiler could place" if math.isinf(placed) else f"{int(placed):,} bytes"
        enough = [option.name for option in self.memory_options if option.fits]
        fix = f"; enough would be: {', '.join(enough)}" if enough else "; no single memory option is enough"
        less = f" ({self.limit_bytes:,} less {float(self.margin):.0%})" if self.margin else ""
        return ConfigError(
            f"no microbatch fits: a step with microbatch_size={smallest.size.microbatch_size} needs {needs} of each device's "
            f"{self.usable_bytes:,} usable bytes{less}{fix}",
            key="microbatch_size",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        is_estimate, run = self.slices is not None, self.chosen and self.chosen.run_seconds
        return {
            "device": self.device,
            "num_devices": self.num_devices,
            "memory_gib": self.limit_bytes / GIB,
            "memory_is_named": self.named,
            "margin": float(self.margin),
            "usable_bytes": self.usable_bytes,
            "largest_microbatch": self.largest,
            "next_larger": self.next_larger,
            "next_larger_run": self.next_larger_run,
            "measured_peak_bytes": self.measured_peak_bytes,
            "candidates": [trial.to_dict() for trial in self.trials],
            "settings": self.chosen and self.chosen.to_dict(),
            "run_seconds": None if is_estimate else run,
            "phases": [dict(row) for row in self.phases],
            "alternatives": [
                {
                    "rampup_microbatch": p.policy,
                    "settings": p.to_dict(),
                    ("roofline_run_seconds" if is_estimate else "run_seconds"): p.run_seconds,
                }
                for p in self.others
            ],
            "pipeline_tick_overhead": self.tick_overhead,
            "levers": [option.to_dict() for option in self.memory_options],
            "notes": list(self.notes),
            **({**self.slices, "roofline_run_seconds": run} if self.slices is not None else {}),
        }


def tune(
    config: Config,
    *,
    memory_gib: str | float | None = None,
    num_devices: int | None = None,
    topology: Topology | str | None = None,
    memory_options: bool = False,
    report: Report = lambda line: None,
) -> Tuning:
    """Find the largest microbatch that fits, time the sizes near it, and choose the settings of the fastest run.

    The search reads memory from compiled programs and runs none of them, so it cannot run out of memory. Sizes that fit on
    this machine then run a few steps on synthetic rows. With a topology nothing runs: the programs are compiled for TPU slices
    that are not here, a size fits if their compiler accepts its program, and the settings are ranked by a roofline estimate.

    Args:
        config: the configuration.
        memory_gib: memory of one device in GiB; None = the devices' own. Required for devices without a limit, such as CPUs.
        num_devices: number of this machine's devices to use; None = all.
        topology: the slices, or their name, such as `v5e:4x4`; excludes `num_devices`.
        memory_options: also measure other ways to save memory. If nothing fits, they are always measured.
        report: called with a line of progress.

    Raises:
        RampupError: the configuration cannot run here, or the memory is not known.
        MissingDependencyError: a topology is given, and the TPU compiler is not installed.
    """
    if config.gradient_accumulation != "fused":
        rule = f"gradient_accumulation={config.gradient_accumulation} is not tuned, only fused"
        raise ConfigError(rule, key="gradient_accumulation", nearest=("fused",))
    if topology is None:
        devices, margin = _select_devices(num_devices), MARGIN
        limit, named = memory_limit(memory_gib, devices)
        enable_compilation_cache(config.jax_cache_dir)
        programs = Programs(config, devices, report)
    else:
        target = _target(config, topology, memory_gib, num_devices)
        config = with_slices(config, target.topology)
        devices, margin = topology_devices(target.topology), Fraction(0)  # the compiler itself keeps what it needs
        limit, named = target.limit, target.hbm_bytes is not None
        programs = Programs(config, devices, report, target=target)
    usable = usable_bytes(limit, margin)

    boundary = find_largest(programs, usable)
    refusal = _refusal(programs, boundary)
    trials = [Trial(size=programs.size(b), bytes=used, fits=used <= usable) for b, used in sorted(boundary.costs.items())]
    found = Tuning(
        device=devices[0].device_kind,
        num_devices=len(devices),
        limit_bytes=limit,
        named=named,
        largest=boundary.largest,
        next_larger=boundary.next_larger,
        next_larger_run=NOT_RUN if programs.target is None else refusal,
        trials=tuple(trials),
        margin=margin,
        slices=_describe_slices(programs, None),
    )
    choices = () if boundary.largest is None else proposals(config, programs.plan, boundary.largest)
    if not choices:
        return replace(found, memory_options=find_memory_options(programs, trials[0].size, usable, report))

    times = _time_sizes(programs, choices, usable, report)
    # The time of a step is a line over its number of microbatches: a constant for the update, and the passes.
    lines = {b: fit_line([(n, timing.seconds) for n, timing in by_number.items()]) for b, by_number in times.items()}

    def step_time(microbatch_size: int, num_microbatches: int) -> float | None:
        if programs.target is not None:
            return _roofline_seconds(programs, microbatch_size, num_microbatches, usable)
        line = lines.get(microbatch_size)
        return None if line is None else max(line.at(num_microbatches), 0.0)

    if programs.target is not None:
        # Those proposals whose sizes are among the first few; at least the first one.
        estimated: set[int] = set()
        for choice in choices:
            estimated |= choice.sizes if len(estimated | choice.sizes) <= MAX_ESTIMATED_SIZES or not estimated else set()
        choices = tuple(choice for choice in choices if choice.sizes <= estimated)
    choices = tuple(replace(choice, run_seconds=choice.seconds(step_time)) for choice in choices)
    chosen = _choose_fastest(choices, TIE_TOLERANCE if programs.target is None else ESTIMATE_TOLERANCE)
    overhead = _fit_overhead(programs, times)
    found = replace(
        found,
        trials=_with_timings(programs, trials, times, usable),
        chosen=chosen,
        others=tuple(sorted((c for c in choices if c is not chosen), key=lambda c: c.run_seconds or math.inf)),
        phases=tuple(_phase_rows(programs, chosen, step_time)),
        tick_overhead=overhead,
        notes=tuple(_notes(programs, choices, chosen, times, overhead)),
        next_larger_run=_run_next_larger(programs, boundary, named) if programs.target is None else refusal,
        measured_peak_bytes=peak_bytes(programs.devices) if times else None,
        slices=_describe_slices(programs, chosen),
    )
    if memory_options:
        largest = programs.size(max(chosen.sizes))
        found = replace(found, memory_options=find_memory_options(programs, largest, usable, report))
    return found


def _select_devices(number: int | None) -> Sequence[jax.Device]:
    devices = jax.devices()
    if number is None:
        return devices
    if not 1 <= number <= len(devices):
        rule = f"--devices={number} must be between 1 and the {len(devices)} devices of this machine"
        nearest = (min(max(number, 1), len(devices)),)
        raise ConfigError(f"{rule}; --fake-devices {number} simulates them", key="devices", nearest=nearest)
    return devices[:number]


def memory_limit(memory_gib: str | float | None, devices: Sequence[jax.Device]) -> tuple[int, bool]:
    """Return the memory of one device in bytes, as given in GiB or else as the devices report it, and whether it was given.

    Example:
        >>> memory_limit("0.5", jax.devices())
        (536870912, True)
    """
    if memory_gib is not None:
        return parse_memory_gib(memory_gib), True
    limits = [limit for device in devices if (limit := device_limit(device)) is not None]
    if len(limits) < len(devices):
        problem = f"the device {devices[0].device_kind!r} has no memory limit of its own"
        raise ConfigError(f"{problem}; pass the limit to tune for, such as --memory-gib 16", key="memory-gib")
    return min(limits), False


def usable_bytes(limit_bytes: int, margin: Fraction = MARGIN) -> int:
    """Return the part of a device's memory that a step may use."""
    return int(limit_bytes * (1 - margin))


# Slices that are not here.


def _target(config: Config, topology: Topology | str, memory_gib: str | float | None, num_devices: int | None) -> Target:
    """Return what to compile for."""
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    if num_devices is not None:
        raise ConfigError("--devices counts devices of this machine; leave it out with --topology", key="devices")
    hbm_bytes = None if memory_gib is None else parse_memory_gib(memory_gib)
    if hbm_bytes is not None and hbm_bytes > topology.hbm_bytes:
        rule = f"a device of {topology.name} has {topology.hbm_bytes / GIB:.4g} GiB; --memory-gib can only name less"
        raise ConfigError(rule, key="memory-gib", nearest=(topology.hbm_bytes / GIB,))
    folder = config.jax_cache_dir
    # Results are small files that several processes may write at once, so a bucket has none.
    cache = None if folder is None or is_bucket(folder) else Path(folder).expanduser() / "topology"
    return Target(topology=topology, hbm_bytes=hbm_bytes, cache=cache)


def _refusal(programs: Programs, boundary: Boundary) -> str:
    """Return why the next larger size does not fit on slices that are not here, in the compiler's words."""
    if programs.target is None or boundary.next_larger is None:
        return "not run: no larger size was tried"
    answer = programs.answer(programs.size(boundary.next_larger))
    return f"not run: {answer.refusal}"


def _roofline_seconds(programs: Programs, microbatch_size: int, num_microbatches: int, usable: float) -> float | None:
    """Return the estimated time of a step, or None if it does not fit."""
    size = programs.size(microbatch_size)
    if programs.bytes(size) > usable:
        return None
    assert programs.target is not None
    account, trips = programs.answer(size).account, programs.loop_trips(microbatch_size, num_microbatches)
    return account and account.roofline(programs.target.topology, trips).seconds


def _describe_slices(programs: Programs, chosen: Proposal | None) -> dict[str, Any] | None:
    """Return the facts for JSON about slices that are not here: those of the chosen settings in their last phase."""
    if programs.target is None:
        return None
    topology = programs.target.topology
    facts: dict[str, Any] = {
        "topology": topology.name,
        "compiled_for": f"{NOT_RUN_ON}: every number about time is an estimate",
        "compiler": compiler_version(),
        "slices": topology.to_dict(),
        "hbm_bytes": programs.target.limit,
        "executables": None,
        "compile_seconds": None,
        "memory": None,
        "collectives_per_step": None,
        "roofline_seconds": None,
        "roofline": None,
    }
    if chosen is None:
        return facts
    sizes = [programs.size(b) for b in sorted(chosen.sizes)]
    answers = [programs.answer(size) for size in sizes]
    last, answer = chosen.reached[-1], programs.answer(programs.size(chosen.reached[-1].microbatch_size))
    largest = max((each.memory for each in answers if each.memory), key=lambda memory: memory.total, default=None)
    facts |= {
        "executables": len(sizes),
        "compile_seconds": sum(each.seconds for each in answers),
        "memory": largest and {**asdict(largest), "total": largest.total},
    }
    if answer.account is not None:
        trips = programs.loop_trips(last.microbatch_size, last.num_microbatches)
        roofline = answer.account.roofline(topology, trips)
        facts |= {
            "collectives_per_step": answer.account.collective_rows(trips),
            "roofline_seconds": roofline.seconds,
            "roofline": {
                **asdict(roofline),
                "flops": sum(answer.account.total_flops(trips).values()),
                "memory_bytes": answer.account.total_memory_bytes(trips),
                "kernels_of_unknown_cost": list(answer.account.kernels),
            },
        }
    return facts


def _finite_bytes(number: float) -> int | None:
    return None if math.isinf(number) else int(number)


# The search: each trial is a compilation, so the number of trials matters.


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The sizes at which a limit is crossed."""

    largest: int | None  # the largest size that fits, or None if none does
    next_larger: int | None  # the next size, which was tried and does not fit, or None if all sizes fit
    costs: Mapping[int, float]  # the cost of every size that was tried


def find_largest(programs: Programs, usable: float) -> Boundary:
    """Return the boundary between the microbatch sizes that fit and those that do not.

    Sizes that take the largest batch in one pass are searched first and separately: their program has no loop and therefore
    one gradient buffer less, so such a size can fit although a smaller one does not.
    """
    legal = sorted({size for sizes in legal_sizes(programs.plan) for size in sizes})
    one_pass = legal[-1]

    def cost(microbatch_size: int) -> float:
        return programs.bytes(programs.size(microbatch_size))

    above = largest_within(candidate_sizes([one_pass], least=one_pass, most=SEARCH_FACTOR * one_pass), cost, usable)
    if above.largest is not None or one_pass == 1:
        return above
    below = largest_within(candidate_sizes(legal, least=1, most=one_pass - 1), cost, usable)
    return replace(below, next_larger=below.next_larger or one_pass, costs={**above.costs, **below.costs})


def largest_within(sizes: Sequence[int], cost: Callable[[int], float], limit: float) -> Boundary:
    """Return the largest of ascending sizes whose cost, which must not decrease, is within a limit. The next was tried too.

    Two of three trials are where the straight line through the two nearest costs meets the limit, the third bisects. A cost
    of the form `constant + factor * size` takes about four trials, any other at most three times the logarithm.

    Example:
        >>> found = largest_within(range(1, 1000), lambda size: 100 + 3 * size, 1000)
        >>> found.largest, found.next_larger, len(found.costs)
        (300, 301, 4)
    """
    costs: dict[int, float] = {}

    def fits(index: int) -> bool:
        costs[sizes[index]] = cost(sizes[index])
        return costs[sizes[index]] <= limit

    # Invariant: sizes[:low + 1] fit and sizes[high:] do not. The ends are tried first.
    low, high = -1, len(sizes)
    for end in sorted({0, len(sizes) - 1} if sizes else ()):
        if low < end < high:
            low, high = (end, high) if fits(end) else (low, end)
    trial = 0
    while high - low > 1:
        index = (low + high) // 2 if trial % 3 == 2 else _interpolate(sizes, costs, low, high, limit)
        low, high = (index, high) if fits(index) else (low, index)
        trial += 1
    next_larger = sizes[high] if high < len(sizes) else None
    return Boundary(largest=sizes[low] if low >= 0 else None, next_larger=next_larger, costs=costs)


def _interpolate(sizes: Sequence[int], costs: Mapping[int, float], low: int, high: int, limit: float) -> int:
    """Return the index strictly between two others at which the line through their costs reaches the limit."""
    start, rise = costs[sizes[low]], costs[sizes[high]] - costs[sizes[low]]
    if not math.isfinite(rise):
        return (low + high) // 2
    size = sizes[low] + (limit - start) * (sizes[high] - sizes[low]) / rise
    within = (index for index in range(high - 1, low, -1) if sizes[index] <= size)
    return next(within, low + 1)


def candidate_sizes(legal: Iterable[int], *, least: int, most: int) -> tuple[int, ...]:
    """Return the sizes to try from `least` to `most`: the legal ones and the powers of two.

    Example:
        >>> candidate_sizes([1, 3, 6], least=2, most=8)
        (2, 3, 4, 6, 8)
    """
    powers = (1 << exponent for exponent in range(most.bit_length()))
    return tuple(sorted({size for size in (*legal, *powers) if least <= size <= most}))


# The proposals: settings that change the microbatches and not the ramp.


def legal_sizes(plan: RampPlan) -> list[tuple[int, ...]]:
    """Return, phase by phase, the microbatch sizes that divide the batch for some accumulation."""
    splitter = unconstrained(plan.splitter)
    return [splitter.legal_microbatches([size]) for size in plan.ramp.sizes]


def proposals(config: Config, plan: RampPlan, found: int) -> tuple[Proposal, ...]:
    """Return the settings worth timing if `found` is the largest microbatch that fits, those with the own policy first.

    These are each size near the top for the whole ramp (`fixed`), pairs of sizes for the ramp and the phase after it
    (`auto`), and the smallest accumulation with which every phase fits (`per_phase`).
    """
    splitter, last = unconstrained(plan.splitter), plan.ramp.sizes[-1]
    # Sizes that fit and divide every phase, the largest first.
    shared = [size for size in reversed(splitter.legal_microbatches(plan.ramp.sizes)) if size <= found][:NEAR_THE_TOP]

    def fixed() -> Iterator[Proposal | None]:
        for size in shared:
            settings = {"rampup_microbatch": "fixed", "microbatch_size": size}
            yield _propose(config, plan, settings, found) or _propose(config, plan, settings | _accumulation(config, 1), found)

    def auto() -> Iterator[Proposal | None]:
        after = [size for size in reversed(splitter.legal_microbatches([last])) if shared[0] < size <= found]
        for final in after[:NEAR_THE_TOP]:
            accumulation = _accumulation(config, splitter.largest_microbatch(last) // final)
            settings = [{"rampup_microbatch": "auto", "microbatch_size": size, **accumulation} for size in shared]
            # The accumulation applies to every phase, so the largest shared size may be too large for the first.
            yield next((made for each in settings if (made := _propose(config, plan, each, found))), None)

    def per_phase() -> Iterator[Proposal | None]:
        largest = [splitter.largest_microbatch(size) for size in plan.ramp.sizes]
        for accumulation in divisors(math.gcd(*largest)):
            if max(largest) <= found * accumulation:
                settings = {"rampup_microbatch": "per_phase", "microbatch_size": AUTO, **_accumulation(config, accumulation)}
                made = _propose(config, plan, settings, found)
                if made:
                    yield made if len(made.sizes) <= MAX_SHAPES or config.rampup_microbatch == "per_phase" else None
                    return

    made = [proposal for proposal in (*fixed(), *auto(), *per_phase()) if proposal]
    unique: dict[tuple[int, ...], Proposal] = {}
    for proposal in sorted(made, key=lambda proposal: proposal.policy != config.rampup_microbatch):
        unique.setdefault(tuple(split.microbatch_size for split in proposal.plan.splits), proposal)
    return tuple(unique.values())


def _accumulation(config: Config, accumulation: int) -> dict[str, Any]:
    """Return the settings that change `gradient_accumulation_steps` and leave every global batch as it is."""
    if accumulation == config.gradient_accumulation_steps:
        return {}
    settings: dict[str, Any] = {"gradient_accumulation_steps": accumulation}
    if config.batch_size_schedule is None:
        factor = Fraction(config.gradient_accumulation_steps, accumulation)
        names = PER_ACCUMULATION_KEYS if config.enable_rampup_batch_size else ("per_device_batch_size",)
        settings |= {name: factor * getattr(config, name) for name in names}
    return settings


def _propose(config: Config, plan: RampPlan, settings: Mapping[str, Any], found: int) -> Proposal | None:
    """Return a proposal if the settings are legal, leave the ramp unchanged and give only microbatches that fit."""
    try:
        made = build_plan(replace(config, **settings), plan.num_devices)
    except RampupError:
        return None
    splits = [*made.splits, *([made.eval_split] if made.eval_split else [])]
    if made.ramp.phases != plan.ramp.phases or max(split.microbatch_size for split in splits) > found:
        return None
    changed = {key: value for key, value in settings.items() if value != getattr(config, key)}
    return Proposal(policy=made.splitter.rampup_microbatch, settings=changed, plan=made)


# The measurement, and the choice that follows from it.

# Microbatch size -> number of microbatches -> times.
Times = dict[int, dict[int, Timing]]


def _time_sizes(programs: Programs, choices: Sequence[Proposal], usable: float, report: Report) -> Times:
    """Time the sizes of the proposals that fit on this machine, each with one pass and with the most microbatches."""
    wanted = list(dict.fromkeys(b for choice in choices for b in sorted(choice.sizes, reverse=True)))[:MAX_TIMED_SIZES]
    steps: dict[tuple[int, int], Callable[[], None]] = {}
    for b in wanted:
        size = programs.size(b)
        if programs.bytes(size) <= usable and programs.fits_here(size):
            for number in sorted({programs.pass_unit, size.num_microbatches}):
                steps[b, number] = programs.step_of(size, number)
    if not steps:
        return {}
    report(f"timing microbatches of {', '.join(f'{b:,}' for b in sorted({b for b, _ in steps}))}")
    times: Times = {b: {} for b, _ in steps}
    for (b, number), timing in take_turns(steps).items():
        times[b][number] = timing
    return times


def _choose_fastest(choices: Sequence[Proposal], tolerance: float = TIE_TOLERANCE) -> Proposal:
    """Return the fastest proposal. Ties go to fewer shapes, then to the earlier one."""
    timed = [(choice.run_seconds, choice) for choice in choices if choice.run_seconds is not None]
    if not timed:
        return choices[0]
    best = min(seconds for seconds, _ in timed)
    tied = [choice for seconds, choice in timed if seconds <= best * (1 + tolerance)]
    return min(tied, key=lambda choice: (len(choice.sizes), choices.index(choice)))


def _with_timings(programs: Programs, trials: Iterable[Trial], times: Times, usable: float) -> tuple[Trial, ...]:
    """Return the trials, with the sizes that were timed among them, ascending."""
    by_size = {trial.size.microbatch_size: trial for trial in trials}
    for b, by_number in times.items():
        size = programs.size(b)
        timing, used = by_number[size.num_microbatches], programs.bytes(size)
        tokens = b * size.num_microbatches * programs.splitter.data_parallel_size * programs.config.max_target_length
        by_size[b] = Trial(size=size, bytes=used, fits=used <= usable, timing=timing, tokens_per_second=tokens / timing.seconds)
    return tuple(by_size[b] for b in sorted(by_size))


def _phase_rows(programs: Programs, chosen: Proposal, step_time: StepTime) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase: how its batch is split, the memory it needs of a device, and its speed."""
    for phase, split, row in zip(chosen.plan.ramp.phases, chosen.plan.splits, chosen.plan.phase_rows(), strict=True):
        b = split.microbatch_size
        size = Size(microbatch_size=b, num_microbatches=chosen.plan.max_microbatches[b])
        seconds = step_time(b, split.num_microbatches)
        tokens = split.global_batch_size * programs.config.max_target_length
        is_estimate = programs.target is not None
        yield {
            "start_step": phase.start_step,
            "global_batch_size": split.global_batch_size,
            "per_device_batch_size": row["per_device_batch_size"],
            "accumulation_steps": split.accumulation_steps,
            "num_pipeline_microbatches": split.num_pipeline_microbatches,
            "microbatch_size": b,
            "bytes": _finite_bytes(programs.bytes(size)),
            "step_seconds": None if is_estimate else seconds,
            "tokens_per_second": tokens / seconds if seconds and not is_estimate else None,
            **({"roofline_seconds": seconds} if is_estimate else {}),
        }


def _fit_overhead(programs: Programs, times: Times) -> float | None:
    if programs.splitter.num_stages == 1:
        return None
    points = {b: [(programs.ticks(b, n), timing.seconds) for n, timing in by_n.items()] for b, by_n in times.items()}
    return fit_tick_overhead(points, num_repeats=programs.splitter.num_repeats)


def _notes(
    programs: Programs, choices: Sequence[Proposal], chosen: Proposal, times: Times, overhead: float | None
) -> Iterator[str]:
    if programs.target is not None:
        yield f"{NOT_RUN_ON}; seconds are roofline estimates at published peaks, so a real step takes longer"
        account = programs.answer(programs.size(chosen.reached[-1].microbatch_size)).account
        if programs.target.topology.num_slices > 1:
            sent = sum(c.num_bytes for c in account.collectives if c.between_slices) if account else 0
            yield f"the estimate leaves out the data-center network between slices, over which a device sends {sent:,} bytes"
        if account and account.kernels:
            yield f"the estimate leaves out {len(account.kernels)} kernels, such as those of attention, whose cost is unknown"
    elif len(times) < len({b for choice in choices for b in choice.sizes}):
        yield "not every size was timed: the others do not fit in this machine's memory, or there are too many"
    spread = max((timing.spread for by_number in times.values() for timing in by_number.values()), default=0.0)
    limit = (chosen.run_seconds or 0.0) * (1 + spread)
    close = sum(choice is not chosen and choice.run_seconds is not None and choice.run_seconds <= limit for choice in choices)
    if close and spread > TIE_TOLERANCE:
        yield (
            f"the times vary by up to {spread:.0%}, and {close} of the alternatives are that close to the recommended ones: "
            "which is faster is not certain; tune again on a quiet machine"
        )
    if programs.splitter.num_stages > 1 and overhead is None:
        yield "pipeline_tick_overhead could not be fitted: it takes two microbatch sizes whose times grow with them"
    before, after = programs.plan.eval_split, chosen.plan.eval_split
    if before and after and before.global_batch_size != after.global_batch_size:
        sizes = f"{after.global_batch_size} samples instead of {before.global_batch_size}"
        yield f"evaluation batches become {sizes}, since eval_per_device_batch_size follows per_device_batch_size"


def _run_next_larger(programs: Programs, boundary: Boundary, named: bool) -> str:
    """Run the smallest size that does not fit, on devices that refuse an allocation and survive it."""
    if boundary.next_larger is None:
        return "not run: no larger size was tried"
    if named or any(device_limit(device) is None for device in programs.devices):
        return NOT_RUN
    size = programs.size(boundary.next_larger)
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
