"""What a phase change costs: the slowest step at a change over the median step, ours beside what people use."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rampup.bench.contenders import CONTENDERS, FIXED, start_run
from rampup.bench.measure import ROUNDS, Seconds
from rampup.bench.problem import Problem, main_problem, no_compilation_cache
from rampup.bench.ramp import join_compilations
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.mesh import make_mesh

PHASES = 3
# Steps of the first phase, long enough for the background to compile the others, and of each later one.
CPU_STEPS, DEVICE_STEPS, QUICK_STEPS = (100, 15), (1000, 200), (6, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one contender's run.

    Attributes:
        seconds: of every step, its batch included, until its loss is known.
        microbatch_sizes: what each was cut into.
        compilations: programs compiled for the step.
        num_late: steps that ran in the shape of a phase before.
    """

    seconds: tuple[float, ...]
    microbatch_sizes: tuple[int, ...]
    compilations: int
    num_late: int = 0

    def changes(self, plan: RampPlan) -> list[int]:
        """Return the steps at which something changes after the first: the phase, or the size of the microbatch."""
        first = {phase.start_step for phase in plan.ramp.phases}
        sizes = self.microbatch_sizes
        return [i for i in range(1, len(sizes)) if i in first or sizes[i] != sizes[i - 1]]

    def over_median(self, step: int, plan: RampPlan) -> float:
        """Return a step's time over the median of the steps of its phase that were cut alike.

        Args:
            step: its number.
            plan: says which steps are of one phase.
        """
        phase, size = plan.position(step).phase, self.microbatch_sizes[step]
        alike = [
            seconds
            for number, (seconds, other) in enumerate(zip(self.seconds, self.microbatch_sizes, strict=True))
            if plan.position(number).phase == phase and other == size
        ]
        return self.seconds[step] / statistics.median(alike)

    def slowest_change(self, plan: RampPlan) -> float:
        """Return the largest `over_median` of the steps at a change."""
        return max(self.over_median(step, plan) for step in self.changes(plan))

    def slowest_control(self, plan: RampPlan) -> float:
        """Return the same of as many steps at which nothing changes, those three steps after."""
        after = [min(step + 3, len(self.seconds) - 1) for step in self.changes(plan)]
        return max(self.over_median(step, plan) for step in after)


def run(*, quick: bool = False) -> BenchResult:
    """Run a ramp of three phases with every contender in turn, step by step.

    Args:
        quick: a tiny model, a few steps and one round.
    """
    device = jax.devices()[0]
    problem, rounds = main_problem(device, quick=quick), 1 if quick else ROUNDS
    steps = QUICK_STEPS if quick else CPU_STEPS if device.platform == "cpu" else DEVICE_STEPS
    plan = transition_plan(problem, *steps)
    found: dict[str, list[Steps]] = {name: [] for name in CONTENDERS}
    with no_compilation_cache():
        for number in range(rounds):
            for place in range(len(CONTENDERS)):
                name = CONTENDERS[(place + number) % len(CONTENDERS)]
                found[name].append(timed_steps(name, problem, plan))
    return BenchResult(
        name="transition",
        title="the slowest step at a phase change over the median step of its phase",
        rows=rows(found, plan),
        notes=[
            str(problem),
            f"{PHASES} phases of {steps[0]}, {steps[1]} and {steps[1]} steps, batches of "
            f"{', '.join(map(str, plan.ramp.sizes))}; one {device.device_kind or device.platform} "
            f"device; {rounds} runs each, in turn, every step waited for, caches cold",
            "a change is the first step of a phase, or the first in another microbatch size; slowest_change is the slowest of "
            "a run's, each over the median of the steps of its phase cut alike, the median over the runs; least is the least "
            "of the runs, which noise does not raise; control is slowest_change of steps at which nothing changes; slowest_ms "
            "is the slowest step at a change itself",
            "late_steps ran in the shape of the phase before, because the new one was still being compiled",
            "while a shape is compiled in the background, training and compiler share the cores of this CPU, so that the first "
            "phase's steps are slower; with an accelerator they do not meet"
            if device.platform == "cpu"
            else "shapes are compiled in the background on the host",
        ],
    )


def transition_plan(problem: Problem, first: int, steps: int) -> RampPlan:
    """Return three phases of 1, 2 and 3 microbatches on one device.

    Args:
        problem: says how many rows a microbatch has.
        first: steps of the first phase.
        steps: of each later one.
    """
    pairs, consumed = [], 0
    for k in range(1, PHASES + 1):
        pairs.append((consumed, k * problem.rows))
        consumed += (first if k == 1 else steps) * k * problem.rows
    ramp = BatchRamp.piecewise(pairs)
    return RampPlan(
        ramp=ramp, splitter=BatchSplitter(data_parallel_size=1), num_devices=1, total_steps=first + (PHASES - 1) * steps
    )


def timed_steps(name: str, problem: Problem, plan: RampPlan) -> Steps:
    """Run one contender and wait for every step.

    Args:
        name: the contender.
        problem: the model.
        plan: the ramp.
    """
    jax.clear_caches()
    source = problem.source(4 * plan.ramp.sizes[-1])
    started = start_run(name, problem, plan, source, make_mesh(devices=jax.devices()[:1]))
    seconds = []
    before = time.perf_counter()
    for loss in started.losses:
        loss.block_until_ready()
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    join_compilations()
    return Steps(
        seconds=tuple(seconds),
        microbatch_sizes=tuple(started.microbatch_sizes),
        compilations=started.num_compilations(),
        num_late=len(started.late_steps),
    )


def rows(found: Mapping[str, Sequence[Steps]], plan: RampPlan) -> list[dict[str, Any]]:
    """Return the table: a row for every contender.

    Args:
        found: the steps of every contender, one a round.
        plan: the ramp.
    """
    changes = {name: Seconds(all=tuple(steps.slowest_change(plan) for steps in of)) for name, of in found.items()}
    return [
        {
            "system": name,
            "slowest_change": changes[name].median,
            "spread": changes[name].spread,
            "least": min(changes[name].all),
            "control": statistics.median(steps.slowest_control(plan) for steps in of),
            "times_ours": changes[name].median / changes[FIXED].median,
            "slowest_ms": 1e3 * statistics.median(max(steps.seconds[i] for i in steps.changes(plan)) for steps in of),
            "median_ms": 1e3 * statistics.median(second for steps in of for second in steps.seconds),
            "late_steps": statistics.median(steps.num_late for steps in of),
            "compilations": max(steps.compilations for steps in of),
        }
        for name, of in found.items()
    ]
