"""A whole ramp, from the first step to the last with its compilations: ours beside what people use, and the ideal."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from rampup.bench.contenders import CONTENDERS, FIXED, start_run
from rampup.bench.measure import ROUNDS, Seconds
from rampup.bench.problem import QUICK, ArrayRows, Problem, main_problem, no_compilation_cache
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.mesh import make_mesh
from rampup.run.metrics import IN_FLIGHT

PHASES = 8
# Rows of the ramp, in microbatches, and steps after it: on a CPU, on an accelerator, and for a first look.
CPU_SIZES, DEVICE_SIZES, QUICK_SIZES = (56, 6), (5600, 100), (14, 3)
# The devices that a CPU pretends to have share its cores and caches, which is not what a ramp on several devices is like.
CPU_DEVICES = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocked:
    """What one clock says of a contender's way through the ramp.

    Attributes:
        seconds: from before the first step until the last loss is known.
        first_seconds: until the first step was on its way, which is its compilation.
        row_seconds: time per row in the last phase, its first step left out.
        step_seconds: what the steps would take if each took as long as the median step of its phase.
    """

    seconds: float
    first_seconds: float
    row_seconds: float
    step_seconds: float

    @property
    def over_own(self) -> float:
        """The time over that of the first compilation and of undisturbed steps: what the changes cost."""
        return self.seconds / (self.first_seconds + self.step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """One contender's way through the ramp.

    Attributes:
        wall: by the clock on the wall.
        cpu: by the processor time of this process, in all its threads.
        compilations: programs compiled for the step.
    """

    wall: Clocked
    cpu: Clocked
    compilations: int


def run(*, quick: bool = False) -> BenchResult:
    """Run the ramp with every contender in turn, each with cold caches.

    Args:
        quick: a tiny model, a short ramp and one round.
    """
    device, mesh = jax.devices()[0], make_mesh(devices=_devices())
    problem, rounds = main_problem(device, quick=quick), 1 if quick else ROUNDS
    plan = ramp_plan(problem, *sizes(device, quick=quick), replicas=mesh.size)
    trips: dict[str, list[Trip]] = {name: [] for name in CONTENDERS}
    with no_compilation_cache():
        # The first compilation of a process takes longer.
        trip(FIXED, QUICK, ramp_plan(QUICK, *QUICK_SIZES, replicas=mesh.size), mesh)
        for number in range(rounds):
            for place in range(len(CONTENDERS)):
                name = CONTENDERS[(place + number) % len(CONTENDERS)]
                trips[name].append(trip(name, problem, plan, mesh))
    return BenchResult(
        name="ramp",
        title=f"a ramp of {PHASES} phases from the first step to the last, compilations included",
        rows=rows(trips, plan),
        notes=[
            str(problem),
            f"{plan.total_steps} steps, {plan.consumed_samples:,} rows, batches of {plan.ramp.sizes[0]} to "
            f"{plan.ramp.sizes[-1]}; {mesh.size} x {device.device_kind or device.platform}; medians of {rounds} whole "
            "ramps each, in turn, JAX's caches cleared before each and none kept on disk",
            "ideal is rows * the best time per row of any system in the last phase + the shortest first compilation; "
            "least_over_ideal is the same of each system's fastest run and of the fastest single compilation and row, which "
            "others on the machine disturb least; over_own is a system's time over its own first compilation and its own "
            "steps, each as long as the median of its phase: what the changes cost it, run by run; times_ours is a system's "
            "time over that of ours, fixed",
            "the columns with cpu are the same by this process's processor time, background compilations included; others on "
            "the machine disturb it less",
            "jit per batch size is what MaxText does; the fixed microbatches of ours, of optax.MultiSteps and of "
            "optax.microbatching are the first phase's batch",
            "per_phase and auto compile in the background, on the same cores here: a ramp as short as this one ends before "
            "that work pays"
            if device.platform == "cpu"
            else "per_phase and auto compile in the background, on the host's cores",
        ],
    )


def _devices() -> list[jax.Device]:
    """All devices; of those that a CPU pretends to have, one."""
    devices = jax.devices()
    return devices[:CPU_DEVICES] if devices[0].platform == "cpu" else devices


def sizes(device: jax.Device, *, quick: bool) -> tuple[int, int]:
    """Return the rows of the ramp, in microbatches, and the steps after it."""
    return QUICK_SIZES if quick else CPU_SIZES if device.platform == "cpu" else DEVICE_SIZES


def ramp_plan(problem: Problem, ramp_microbatches: int, last_steps: int, *, replicas: int = 1) -> RampPlan:
    """Return a linear ramp of 1 to 8 microbatches.

    Args:
        problem: says how many rows a microbatch has.
        ramp_microbatches: length of the ramp, in microbatches.
        last_steps: steps after it.
        replicas: devices on the data axis.
    """
    b = problem.rows * replicas
    ramp = BatchRamp.linear(start=b, increment=b, end=PHASES * b, samples=ramp_microbatches * b)
    splitter = BatchSplitter(data_parallel_size=replicas)
    return RampPlan(ramp=ramp, splitter=splitter, num_devices=replicas, total_steps=ramp.ramp_steps + last_steps)


def trip(name: str, problem: Problem, plan: RampPlan, mesh: Mesh) -> Trip:
    """Run one contender through the ramp; losses are fetched some steps later, as a training loop does.

    Args:
        name: the contender.
        problem: the model.
        plan: the ramp.
        mesh: the devices.
    """
    jax.clear_caches()
    started = start_run(name, problem, plan, _rows_for(problem, plan), mesh)
    waiting: deque[jax.Array] = deque()
    readings = [_clocks()]
    for number, loss in enumerate(started.losses):
        if number == 0:
            readings.append(_clocks())
        waiting.append(loss)
        if len(waiting) > IN_FLIGHT:
            waiting.popleft().block_until_ready()
            readings.append(_clocks())
    for loss in waiting:
        loss.block_until_ready()
        readings.append(_clocks())
    wall, cpu = (_clocked(clock, plan) for clock in zip(*readings, strict=True))
    join_compilations()
    return Trip(wall=wall, cpu=cpu, compilations=started.num_compilations())


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _clocked(readings: Sequence[float], plan: RampPlan) -> Clocked:
    """Read one clock: at the start, when the first step was on its way, and when each loss was known."""
    start, first, *known = readings
    rows = (plan.total_steps - 1 - plan.ramp.ramp_steps) * plan.ramp.sizes[-1]
    taken = [now - before for before, now in itertools.pairwise([first, *known])]
    bounds = [*(phase.start_step for phase in plan.ramp.phases), len(taken)]
    return Clocked(
        seconds=known[-1] - start,
        first_seconds=first - start,
        row_seconds=(known[-1] - known[plan.ramp.ramp_steps]) / rows,
        step_seconds=sum((end - begin) * statistics.median(taken[begin:end]) for begin, end in itertools.pairwise(bounds)),
    )


def join_compilations() -> None:
    """Wait for compilations that a run which is over left in the background, so that they do not disturb the next."""
    for thread in threading.enumerate():
        if thread.name.startswith("rampup-compile"):
            thread.join()


def rows(trips: Mapping[str, Sequence[Trip]], plan: RampPlan) -> list[dict[str, Any]]:
    """Return the table: the ideal, then a row for every contender.

    Args:
        trips: of every contender, one a round.
        plan: the ramp.
    """
    wall = {name: _median([trip.wall for trip in of]) for name, of in trips.items()}
    cpu = {name: _median([trip.cpu for trip in of]) for name, of in trips.items()}
    best, least = _ideal(wall.values(), plan), _ideal(cpu.values(), plan)
    shortest = {name: min(trip.wall.seconds for trip in of) for name, of in trips.items()}
    undisturbed = _ideal([trip.wall for of in trips.values() for trip in of], plan).seconds
    spreads = {name: Seconds(all=tuple(trip.wall.seconds for trip in of)).spread for name, of in trips.items()}
    own = {name: [(trip.wall.over_own, trip.cpu.over_own) for trip in of] for name, of in trips.items()}
    own |= {"ideal": [(1.0, 1.0)]}
    compilations = {name: max(trip.compilations for trip in of) for name, of in trips.items()}
    return [
        {
            "system": name,
            "seconds": of.seconds,
            "spread": spreads.get(name),
            "over_ideal": of.seconds / best.seconds,
            "least_over_ideal": shortest.get(name, undisturbed) / undisturbed,
            "over_own": statistics.median(ratio for ratio, _ in own[name]),
            "times_ours": of.seconds / wall[FIXED].seconds,
            "compilations": compilations.get(name, 1),
            "first_compile_s": of.first_seconds,
            "row_ms": of.row_seconds * 1e3,
            "cpu_s": work.seconds,
            "cpu_over_ideal": work.seconds / least.seconds,
            "cpu_over_own": statistics.median(ratio for _, ratio in own[name]),
        }
        for name, of, work in [("ideal", best, least), *((name, wall[name], cpu[name]) for name in trips)]
    ]


def _median(trips: Sequence[Clocked]) -> Clocked:
    return Clocked(
        seconds=statistics.median(trip.seconds for trip in trips),
        first_seconds=statistics.median(trip.first_seconds for trip in trips),
        row_seconds=statistics.median(trip.row_seconds for trip in trips),
        step_seconds=statistics.median(trip.step_seconds for trip in trips),
    )


def _ideal(medians: Iterable[Clocked], plan: RampPlan) -> Clocked:
    """Return one compilation and then every row at the best rate of any system."""
    found = list(medians)
    first, row = min(of.first_seconds for of in found), min(of.row_seconds for of in found)
    steps = plan.consumed_samples * row
    return Clocked(seconds=first + steps, first_seconds=first, row_seconds=row, step_seconds=steps)


def _rows_for(problem: Problem, plan: RampPlan) -> ArrayRows:
    return problem.source(4 * plan.ramp.sizes[-1])
