"""A whole ramp with its compilations, and the cost of each phase change: rampup, the
baselines and the ideal.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
from contenders import (
    CONTENDERS,
    FIXED,
    QUICK,
    Problem,
    main_problem,
    no_compilation_cache,
    plan_for,
    start_run,
)
from jax.sharding import Mesh
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    Seconds,
    ignore_row,
    in_turns,
    main,
)

from rampup.engine.mesh import make_mesh
from rampup.loop.metrics import IN_FLIGHT
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp

PHASES = 8
# Rows of the ramp, in microbatches, and steps after it.
CPU_SIZES, DEVICE_SIZES, QUICK_SIZES = (56, 6), (5600, 100), (14, 3)
# Simulated devices share the cores and caches of the CPU, unlike real ones, so a ramp
# on a CPU runs on one.
CPU_DEVICES = 1

TRANSITION_PHASES = 3
# A step without a change is this many steps after one.
CONTROL = 3
# Steps of the first phase, long enough for the other phases to compile in the
# background, and of each later phase.
CPU_STEPS, DEVICE_STEPS, QUICK_STEPS = (100, 15), (1000, 200), (6, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """A contender's run through the ramp by one clock."""

    seconds: float  # from before the first step until the last loss is known
    first_seconds: (
        float  # until the first step was dispatched, which is its compilation
    )
    row_seconds: float  # time per row in the last phase, without its first step
    step_seconds: (
        float  # time of all steps if each took as long as the median step of its phase
    )

    @property
    def over_own(self) -> float:
        """The time over that of the first compilation and of undisturbed steps: the
        cost of the phase changes.
        """
        return self.seconds / (self.first_seconds + self.step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A contender's run through the ramp."""

    wall: Clocked  # by wall-clock time
    cpu: Clocked  # by the processor time of this process, over all threads
    compilations: int  # programs compiled for the step


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Run the ramp with every contender in turn, each with cold caches."""
    devices = jax.devices()
    device, mesh = (
        devices[0],
        make_mesh(
            devices=devices[:CPU_DEVICES] if devices[0].platform == "cpu" else devices
        ),
    )
    problem, rounds = main_problem(device, quick=quick), 1 if quick else ROUNDS
    plan = ramp_plan(problem, *sizes(device, quick=quick), replicas=mesh.size)
    trips: dict[str, list[Trip]] = {name: [] for name in CONTENDERS}
    found = Measurements(rounds * len(CONTENDERS), on_row)
    with no_compilation_cache():
        # The first compilation of a process takes longer than the others.
        trip(FIXED, QUICK, ramp_plan(QUICK, *QUICK_SIZES, replicas=mesh.size), mesh)
        for name in in_turns(CONTENDERS, rounds):
            trips[name].append(trip(name, problem, plan, mesh))
            last = trips[name][-1]
            found.add(
                [
                    {
                        "system": name,
                        "seconds": last.wall.seconds,
                        "cpu_s": last.cpu.seconds,
                    }
                ]
            )
    return BenchResult(
        name="ramp",
        title=(
            f"a ramp of {PHASES} phases from the first step to the last, compilations"
            " included"
        ),
        rows=rows(trips, plan),
        notes=[
            str(problem),
            (
                f"{plan.total_steps} steps, {plan.consumed_samples:,} rows, batches of"
                f" {plan.ramp.sizes[0]} to {plan.ramp.sizes[-1]}; {mesh.size} x"
                f" {device.device_kind or device.platform}; medians of {rounds} ramps"
                " each, in turn, with cold caches."
            ),
            (
                "ideal is rows * the best time per row in the last phase + the"
                " shortest first compilation, of any system. least_over_ideal is the"
                " same of the fastest runs, which other processes disturb least."
                " over_own is a system's time over its first compilation and steps,"
                " each as long as its phase's median: the cost of the phase changes."
                f" times_ours is the time over that of {FIXED}. Columns with cpu are by"
                " this process's processor time."
            ),
            (
                "A jit per batch size is MaxText's behaviour. The other baselines and"
                " rampup, fixed, take microbatches of the first phase's batch."
            ),
        ],
    )


def sizes(device: jax.Device, *, quick: bool) -> tuple[int, int]:
    """Return the rows of the ramp, in microbatches, and the steps after it."""
    return (
        QUICK_SIZES
        if quick
        else CPU_SIZES
        if device.platform == "cpu"
        else DEVICE_SIZES
    )


def ramp_plan(
    problem: Problem, ramp_microbatches: int, last_steps: int, *, replicas: int = 1
) -> RampPlan:
    """Return a linear ramp of 1 to 8 microbatches."""
    b = problem.rows * replicas
    ramp = BatchRamp.linear(
        start=b, increment=b, end=PHASES * b, samples=ramp_microbatches * b
    )
    return plan_for(ramp, ramp.ramp_steps + last_steps, replicas=replicas)


def trip(name: str, problem: Problem, plan: RampPlan, mesh: Mesh) -> Trip:
    """Run one contender through the ramp. Losses are fetched some steps later, as a
    training loop does.
    """
    jax.clear_caches()
    started = start_run(name, problem, plan, mesh)
    waiting: deque[jax.Array | None] = deque()
    readings = [_clocks()]
    for number, loss in enumerate(itertools.chain(started.losses, [None] * IN_FLIGHT)):
        if number == 0:
            readings.append(_clocks())
        waiting.append(loss)
        if len(waiting) > IN_FLIGHT and (known := waiting.popleft()) is not None:
            known.block_until_ready()
            readings.append(_clocks())
    wall, cpu = (_read_clock(clock, plan) for clock in zip(*readings, strict=True))
    return Trip(wall=wall, cpu=cpu, compilations=started.num_compilations())


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _read_clock(readings: Sequence[float], plan: RampPlan) -> Clocked:
    """Summarize the readings of one clock: at the start, after the first dispatch, and
    when each loss was known.
    """
    start, first, *known = readings
    num_rows = (plan.total_steps - 1 - plan.ramp.ramp_steps) * plan.ramp.sizes[-1]
    step_times = [now - before for before, now in itertools.pairwise([first, *known])]
    bounds = [*(phase.start_step for phase in plan.ramp.phases), len(step_times)]
    return Clocked(
        seconds=known[-1] - start,
        first_seconds=first - start,
        row_seconds=(known[-1] - known[plan.ramp.ramp_steps]) / num_rows,
        step_seconds=sum(
            (end - begin) * statistics.median(step_times[begin:end])
            for begin, end in itertools.pairwise(bounds)
        ),
    )


def rows(trips: Mapping[str, Sequence[Trip]], plan: RampPlan) -> list[dict[str, Any]]:
    """Return the table: the ideal, then a row for every contender."""
    wall = {name: _median([trip.wall for trip in of]) for name, of in trips.items()}
    cpu = {name: _median([trip.cpu for trip in of]) for name, of in trips.items()}
    ideal, cpu_ideal = _ideal(wall.values(), plan), _ideal(cpu.values(), plan)
    least_ideal = _ideal([trip.wall for of in trips.values() for trip in of], plan)

    def row(
        name: str, clocked: Clocked, work: Clocked, of: Sequence[Trip]
    ) -> dict[str, Any]:
        return {
            "system": name,
            "seconds": clocked.seconds,
            "spread": (
                Seconds(all=tuple(trip.wall.seconds for trip in of)).spread
                if of
                else None
            ),
            "over_ideal": clocked.seconds / ideal.seconds,
            "least_over_ideal": (
                min(trip.wall.seconds for trip in of) / least_ideal.seconds
                if of
                else 1.0
            ),
            "over_own": (
                statistics.median(trip.wall.over_own for trip in of) if of else 1.0
            ),
            "times_ours": clocked.seconds / wall[FIXED].seconds,
            "compilations": max(trip.compilations for trip in of) if of else 1,
            "first_compile_s": clocked.first_seconds,
            "row_ms": clocked.row_seconds * 1e3,
            "cpu_s": work.seconds,
            "cpu_over_ideal": work.seconds / cpu_ideal.seconds,
            "cpu_over_own": (
                statistics.median(trip.cpu.over_own for trip in of) if of else 1.0
            ),
        }

    return [
        row("ideal", ideal, cpu_ideal, ()),
        *(row(name, wall[name], cpu[name], of) for name, of in trips.items()),
    ]


def _median(trips: Sequence[Clocked]) -> Clocked:
    names = [field.name for field in fields(Clocked)]
    return Clocked(
        **{
            name: statistics.median(getattr(trip, name) for trip in trips)
            for name in names
        }
    )


def _ideal(trips: Iterable[Clocked], plan: RampPlan) -> Clocked:
    """Return one compilation and then every row at the best rate of any system."""
    found = list(trips)
    first, row = (
        min(trip.first_seconds for trip in found),
        min(trip.row_seconds for trip in found),
    )
    steps = plan.consumed_samples * row
    return Clocked(
        seconds=first + steps, first_seconds=first, row_seconds=row, step_seconds=steps
    )


# Phase changes: every step is waited for, and the steps at a change are compared with
# the others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one contender's run."""

    seconds: tuple[
        float, ...
    ]  # time of every step with its batch, until its loss is known
    microbatch_sizes: tuple[int, ...]  # microbatch size of every step
    compilations: int  # programs compiled for the step

    def changes(self, plan: RampPlan) -> list[int]:
        """Return the steps, after the first, at which the phase or the microbatch size
        changes.
        """
        first = {phase.start_step for phase in plan.ramp.phases}
        sizes = self.microbatch_sizes
        return [
            i for i in range(1, len(sizes)) if i in first or sizes[i] != sizes[i - 1]
        ]

    def over_median(self, step: int, plan: RampPlan) -> float:
        """Return a step's time over the median of the steps of the same phase and
        microbatch size.
        """
        phase, size = plan.position(step).phase, self.microbatch_sizes[step]
        steps = enumerate(zip(self.seconds, self.microbatch_sizes, strict=True))
        same = (
            seconds
            for i, (seconds, other) in steps
            if other == size and plan.position(i).phase == phase
        )
        return self.seconds[step] / statistics.median(same)

    def slowest_change(self, plan: RampPlan, later: int = 0) -> float:
        """Return the largest `over_median` of the steps at a change, or a number of
        steps later, as a control.
        """
        return max(
            self.over_median(min(step + later, len(self.seconds) - 1), plan)
            for step in self.changes(plan)
        )


def run_transition(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Run a ramp of three phases with every contender in turn, step by step."""
    device = jax.devices()[0]
    problem, rounds = main_problem(device, quick=quick), 1 if quick else ROUNDS
    steps = (
        QUICK_STEPS
        if quick
        else CPU_STEPS
        if device.platform == "cpu"
        else DEVICE_STEPS
    )
    plan = transition_plan(problem, *steps)
    found: dict[str, list[Steps]] = {name: [] for name in CONTENDERS}
    measured = Measurements(rounds * len(CONTENDERS), on_row)
    with no_compilation_cache():
        for name in in_turns(CONTENDERS, rounds):
            found[name].append(timed_steps(name, problem, plan))
            measured.add(
                [
                    {
                        "system": name,
                        "slowest_change": found[name][-1].slowest_change(plan),
                    }
                ]
            )
    return BenchResult(
        name="transition",
        title="the slowest step at a phase change over the median step of its phase",
        rows=transition_rows(found, plan),
        notes=[
            str(problem),
            (
                f"{TRANSITION_PHASES} phases of {steps[0]}, {steps[1]} and {steps[1]}"
                f" steps, batches of {', '.join(map(str, plan.ramp.sizes))}; one"
                f" {device.device_kind or device.platform} device; {rounds} runs each,"
                " in turn, every step waited for, with cold caches."
            ),
            (
                "A change is the first step of a phase or in another microbatch size."
                " slowest_change is the slowest of a run's changes, each over the"
                " median of its phase and size: the median over the runs; least is the"
                " smallest. control is the same of steps without a change."
            ),
        ],
    )


def transition_plan(problem: Problem, first: int, steps: int) -> RampPlan:
    """Return three phases of 1, 2 and 3 microbatches on one device."""
    pairs, consumed = [], 0
    for k in range(1, TRANSITION_PHASES + 1):
        pairs.append((consumed, k * problem.rows))
        consumed += (first if k == 1 else steps) * k * problem.rows
    return plan_for(BatchRamp.piecewise(pairs), first + (TRANSITION_PHASES - 1) * steps)


def timed_steps(name: str, problem: Problem, plan: RampPlan) -> Steps:
    """Run one contender and wait for every step."""
    jax.clear_caches()
    started = start_run(name, problem, plan, make_mesh(devices=jax.devices()[:1]))
    times = [time.perf_counter()]
    for loss in started.losses:
        loss.block_until_ready()
        times.append(time.perf_counter())
    return Steps(
        seconds=tuple(now - before for before, now in itertools.pairwise(times)),
        microbatch_sizes=tuple(started.microbatch_sizes),
        compilations=started.num_compilations(),
    )


def transition_rows(
    found: Mapping[str, Sequence[Steps]], plan: RampPlan
) -> list[dict[str, Any]]:
    """Return a row for every contender, from its runs."""
    changes = {
        name: Seconds(all=tuple(steps.slowest_change(plan) for steps in runs))
        for name, runs in found.items()
    }
    return [
        {
            "system": name,
            "slowest_change": changes[name].median,
            "spread": changes[name].spread,
            "least": min(changes[name].all),
            "control": statistics.median(
                steps.slowest_change(plan, later=CONTROL) for steps in runs
            ),
            "times_ours": changes[name].median / changes[FIXED].median,
            "slowest_ms": (
                1e3
                * statistics.median(
                    max(steps.seconds[i] for i in steps.changes(plan)) for steps in runs
                )
            ),
            "median_ms": (
                1e3
                * statistics.median(
                    second for steps in runs for second in steps.seconds
                )
            ),
            "compilations": max(steps.compilations for steps in runs),
        }
        for name, runs in found.items()
    ]


if __name__ == "__main__":
    main(ramp=run, transition=run_transition)
