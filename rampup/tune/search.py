"""`rampup tune`: the largest microbatch that fits, found without running out of memory, and the settings that are fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.plan.numbers import exact_fraction
from rampup.run.compile import enable_compilation_cache
from rampup.run.offload import device_limit, is_out_of_memory, peak_bytes
from rampup.tune.bisection import Boundary, candidate_sizes, largest_within
from rampup.tune.fitting import Line, fit_line, fit_tick_overhead
from rampup.tune.memory_options import find_levers
from rampup.tune.programs import Programs, Report, Size, Timing, take_turns
from rampup.tune.result import GIB, Trial, Tuning, usable_of, whole_bytes
from rampup.tune.settings import Proposal, legal_sizes, proposals

MAX_GIB = 10**6
# How far beyond the largest batch of the plan the search goes.
BEYOND = 64
MAX_TIMED = 8
# Times closer than this are alike on a machine that is not idle; then fewer shapes and more of a size win.
ALIKE = 0.05


def memory_limit(memory_gib: str | float | None, devices: Sequence[jax.Device]) -> tuple[int, bool]:
    """Return the memory of one device in bytes, and whether it was stated.

    Args:
        memory_gib: as stated, in GiB; None = what the devices have.
        devices: the devices.

    Raises:
        ConfigError: no number above 0 and up to 1,000,000, or none for devices without memory of their own.

    Example:
        >>> memory_limit("0.5", jax.devices())
        (536870912, True)
    """
    if memory_gib is not None:
        size = exact_fraction(memory_gib, what="memory-gib", key="memory-gib")
        if size * GIB < 1 or size > MAX_GIB:
            raise ConfigError(
                f"memory-gib={memory_gib} must be above 0 and at most {MAX_GIB:,} GiB",
                key="memory-gib",
                nearest=(1,) if size < 1 else (MAX_GIB,),
            )
        return int(size * GIB), True
    limits = [device_limit(device) for device in devices]
    if any(limit is None for limit in limits):
        raise ConfigError(
            f"the device {devices[0].device_kind!r} has no memory limit of its own; say what to tune for, such as "
            "--memory-gib 16",
            key="memory-gib",
        )
    return min(limit for limit in limits if limit is not None), False


def tune(
    config: Config,
    *,
    memory_gib: str | float | None = None,
    num_devices: int | None = None,
    levers: bool = False,
    report: Report = lambda line: None,
) -> Tuning:
    """Find the largest microbatch that fits, time those near it, and choose the settings of the fastest run.

    Memory comes from compiled programs that are not run, so that nothing runs out of it while searching. What fits on this
    machine is then run for some steps on synthetic rows.

    Args:
        config: the configuration.
        memory_gib: memory of one device, in GiB; None = that of these devices. Required where they have none of their own.
        num_devices: use so many of this machine's devices; None = all.
        levers: also try what else saves memory, which happens anyway where nothing fits.
        report: called with a line about what is being done.

    Raises:
        RampupError: the configuration cannot be run here, or the memory is not known.
    """
    devices = _devices(num_devices)
    if config.gradient_accumulation != "fused":
        raise ConfigError(
            f"gradient_accumulation={config.gradient_accumulation} is not tuned, only fused",
            key="gradient_accumulation",
            nearest=("fused",),
        )
    limit, named = memory_limit(memory_gib, devices)
    enable_compilation_cache(config.jax_cache_dir)
    programs, usable = Programs(config, devices, report), usable_of(limit)
    boundary = find_largest(programs, usable)
    facts: dict[str, Any] = {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "limit_bytes": limit,
        "named": named,
        "largest": boundary.largest,
        "next_larger": boundary.next_larger,
    }
    trials = [Trial(size=programs.size(b), bytes=taken, fits=taken <= usable) for b, taken in sorted(boundary.costs.items())]
    choices = () if boundary.largest is None else proposals(config, programs.plan, boundary.largest)
    if not choices:
        found = find_levers(programs, trials[0].size, usable, report)
        return Tuning(**facts, next_larger_run=NOT_RUN, trials=tuple(trials), levers=found)
    times = _time(programs, choices, usable, report)
    result = _result(programs, choices, times, trials, usable)
    ran_next = _run_next(programs, boundary, named)
    found = find_levers(programs, _reference(programs, result["chosen"]), usable, report) if levers else ()
    return Tuning(**facts, **result, next_larger_run=ran_next, levers=found, measured_peak_bytes=_peak(programs, times))


NOT_RUN = "not run: this is computed"


def find_largest(programs: Programs, usable: float) -> Boundary:
    """Return where microbatch sizes stop fitting.

    Sizes that take all of the largest batch in one pass are searched on their own: without a loop their program has one
    buffer for gradients less, so that such a size can fit where a smaller one does not.
    """
    legal = sorted({size for sizes in legal_sizes(programs.plan) for size in sizes})
    whole = legal[-1]

    def cost(microbatch_size: int) -> float:
        return programs.bytes(programs.size(microbatch_size))

    above = largest_within(candidate_sizes([whole], least=whole, most=BEYOND * whole), cost, usable)
    if above.largest is not None or whole == 1:
        return above
    below = largest_within(candidate_sizes(legal, least=1, most=whole - 1), cost, usable)
    return Boundary(largest=below.largest, next_larger=below.next_larger or whole, costs={**above.costs, **below.costs})


Times = dict[int, dict[int, Timing]]


def _time(programs: Programs, choices: Sequence[Proposal], usable: float, report: Report) -> Times:
    """Time the sizes of the proposals that can run here: at their most microbatches, and at one pass.

    Returns:
        Microbatch size -> microbatches -> times.
    """
    wanted = list(dict.fromkeys(b for choice in choices for b in sorted(choice.sizes, reverse=True)))[:MAX_TIMED]
    steps: dict[tuple[int, int], Callable[[], None]] = {}
    for b in wanted:
        size = programs.size(b)
        if programs.bytes(size) <= usable and programs.fits_here(size):
            for number in sorted({programs.pass_unit, size.num_microbatches}):
                steps[b, number] = programs.step_of(size, number)
    if not steps:
        return {}
    report(f"timing microbatches of {', '.join(f'{b:,}' for b in sorted({b for b, _ in steps}))}")
    times: Times = {}
    for (b, number), timing in take_turns(steps).items():
        times.setdefault(b, {})[number] = timing
    return times


def _result(
    programs: Programs, choices: Sequence[Proposal], times: Times, trials: Sequence[Trial], usable: float
) -> dict[str, Any]:
    """Return what was measured, and the choice that follows."""
    lines = {b: fit_line([(n, timing.seconds) for n, timing in of_size.items()]) for b, of_size in times.items()}

    def step_time(microbatch_size: int, num_microbatches: int) -> float | None:
        line = lines.get(microbatch_size)
        return None if line is None else max(line.at(num_microbatches), 0.0)

    seconds = {id(p): time for p in choices if (time := p.seconds(step_time)) is not None}
    chosen = _fastest(choices, seconds)
    tokens = programs.config.max_target_length
    rows = tuple(_phase_rows(programs, chosen, lines, tokens))
    overhead, notes = _overhead(programs, times), []
    if len(times) < len({b for p in choices for b in p.sizes}):
        notes.append("not every size was timed: the others do not fit in this machine's memory, or are too many")
    if programs.free.num_stages > 1 and overhead is None:
        notes.append("pipeline_tick_overhead could not be fitted: it takes two microbatch sizes whose times grow with them")
    before, after = programs.plan.eval_split, chosen.plan.eval_split
    if before and after and before.global_batch_size != after.global_batch_size:
        notes.append(
            f"evaluation batches become {after.global_batch_size} samples instead of {before.global_batch_size}, since "
            "eval_per_device_batch_size follows per_device_batch_size"
        )
    return {
        "trials": _timed_trials(programs, times, trials, usable, tokens),
        "chosen": chosen,
        "others": tuple(p for p in choices if p is not chosen),
        "run_seconds": seconds,
        "phases": rows,
        "tick_overhead": overhead,
        "notes": tuple(notes),
    }


def _fastest(choices: Sequence[Proposal], seconds: Mapping[int, float]) -> Proposal:
    """Return the fastest choice; among those alike the one of fewest shapes, of the configuration's kind, of most in memory."""
    timed = [choice for choice in choices if id(choice) in seconds]
    if not timed:
        return choices[0]
    best = min(seconds[id(choice)] for choice in timed)
    alike = [choice for choice in timed if seconds[id(choice)] <= best * (1 + ALIKE)]
    return min(alike, key=lambda choice: (len(choice.sizes), choices.index(choice)))


def _phase_rows(
    programs: Programs, chosen: Proposal, lines: Mapping[int, Line], tokens_per_sample: int
) -> list[dict[str, Any]]:
    """Return a row for each phase: how it is cut, what it takes of a device, and how fast it is."""
    names = (
        "start_step",
        "global_batch_size",
        "per_device_batch_size",
        "accumulation_steps",
        "num_pipeline_microbatches",
        "microbatch_size",
    )
    rows = []
    for split, row in zip(chosen.plan.splits, chosen.plan.phase_rows(), strict=True):
        b = split.microbatch_size
        size = Size(microbatch_size=b, num_microbatches=chosen.plan.most_microbatches[b])
        seconds = lines[b].at(split.num_microbatches) if b in lines else None
        rate = split.global_batch_size * tokens_per_sample / seconds if seconds else None
        rows.append(
            {
                **{name: row[name] for name in names},
                "bytes": whole_bytes(programs.bytes(size)),
                "step_seconds": seconds,
                "tokens_per_second": rate,
            }
        )
    return rows


def _timed_trials(
    programs: Programs, times: Times, trials: Sequence[Trial], usable: float, tokens_per_sample: int
) -> tuple[Trial, ...]:
    """Return the trials with those that were timed among them, ascending."""
    by_size = {trial.size.microbatch_size: trial for trial in trials}
    for b, of_size in times.items():
        size = programs.size(b)
        timing, samples = of_size[size.num_microbatches], b * size.num_microbatches * programs.free.data_parallel_size
        rate = samples * tokens_per_sample / timing.seconds
        taken = programs.bytes(size)
        by_size[b] = Trial(size=size, bytes=taken, fits=taken <= usable, timing=timing, tokens_per_second=rate)
    return tuple(by_size[b] for b in sorted(by_size))


def _overhead(programs: Programs, times: Times) -> float | None:
    if programs.free.num_stages == 1:
        return None
    points = {b: [(programs.ticks(b, n), timing.seconds) for n, timing in of_size.items()] for b, of_size in times.items()}
    return fit_tick_overhead(points, num_repeats=programs.free.num_repeats)


def _run_next(programs: Programs, boundary: Boundary, named: bool) -> str:
    """Run the size that does not fit, on devices that refuse what is too much for them and live on."""
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


def _reference(programs: Programs, chosen: Proposal) -> Size:
    """Return the size at which levers are compared: the largest of the recommended plan."""
    return programs.size(max(chosen.sizes))


def _peak(programs: Programs, times: Times) -> int | None:
    return peak_bytes(programs.devices) if times else None


def _devices(number: int | None) -> Sequence[jax.Device]:
    devices = jax.devices()
    if number is None:
        return devices
    if not 1 <= number <= len(devices):
        raise ConfigError(
            f"--devices={number} must be between 1 and the {len(devices)} of this machine; --fake-devices {number} pretends to "
            "have them",
            key="devices",
            nearest=(min(max(number, 1), len(devices)),),
        )
    return devices[:number]
