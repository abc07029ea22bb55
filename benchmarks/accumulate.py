"""One optimizer step of k microbatches: rampup, the plain big batch, optax.MultiSteps
and optax.microbatching.

Also rampup with and without the measurement of the gradient noise scale.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from contenders import (
    MEDIUM,
    MICROBATCHING,
    MULTI_STEPS,
    QUICK,
    Problem,
    baseline,
    baseline_calls,
    problems,
    start_rampup,
    stepper,
)
from hlo import Reductions, all_reduces
from jax.sharding import Mesh
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    ignore_row,
    main,
    take_turns,
)

from rampup.data.batches import step_batches
from rampup.engine.compile import compile_program
from rampup.engine.mesh import batch_sharding, make_mesh

RAMPUP, TUNED, PLAIN = "rampup", "rampup, tuned", "plain big batch"
SYSTEMS = (RAMPUP, TUNED, PLAIN, MULTI_STEPS, MICROBATCHING)
COUNTS, QUICK_COUNTS = (1, 2, 4, 16), (1, 2)
REDUCING_DEVICES = 4
SHORT_ROUNDS = 96
# Of the comparison with and without the gradient noise scale.
NOISE_MICROBATCHES, NOISE_TOKENS = 16, 256


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time one optimizer step of every system, and read the all-reduces of its program
    for several devices.
    """
    devices = jax.devices()
    mesh = make_mesh(devices=devices[:1])
    wide = (
        make_mesh(devices=devices[:REDUCING_DEVICES])
        if len(devices) >= REDUCING_DEVICES
        else None
    )
    measured, counts = (
        problems(devices[0], quick=quick),
        QUICK_COUNTS if quick else COUNTS,
    )
    found = Measurements(len(measured) * len(counts) * len(SYSTEMS), on_row)
    for problem in measured:
        for k in counts:
            found.add(
                compare(problem, k, mesh, wide, rounds=3 if quick else rounds_of(k))
            )
    return BenchResult(
        name="accumulate",
        title=(
            "one optimizer step of k microbatches: rampup, the plain big batch,"
            " optax.MultiSteps and optax.microbatching"
        ),
        rows=found.rows,
        notes=[
            *map(str, measured),
            (
                f"One {devices[0].device_kind or devices[0].platform} device; medians"
                f" of {rounds_of(1)} steps at k=1 to {rounds_of(COUNTS[-1])} at"
                f" k={COUNTS[-1]}, in turn. The batch grows with k. All systems run"
                " AdamW after clipping by the global norm; only rampup also returns"
                " that norm."
            ),
            (
                f"{TUNED}: the same rows in the number of microbatches, among the"
                " powers of two up to k, that took the least time."
            ),
            (
                "cpu_ms is this process's processor time in a step; other processes"
                " disturb it less than the time."
            ),
            (
                "temp_bytes is the temporary memory of one program, without arguments"
                " and results."
            ),
            (
                f"all_reduces were not counted: JAX sees fewer than {REDUCING_DEVICES}"
                " devices."
                if wide is None
                else (
                    "all_reduces and reduced_bytes are of one optimizer step on"
                    f" {wide.size} devices; one in a loop counts once per iteration."
                    " Compilers may combine arrays into one all-reduce, so compare the"
                    " bytes."
                )
            ),
        ],
    )


def rounds_of(k: int) -> int:
    """Return the number of timed steps of k microbatches: more for short steps, whose
    times vary more.
    """
    return max(ROUNDS, SHORT_ROUNDS // k)


def compare(
    problem: Problem, k: int, mesh: Mesh, wide: Mesh | None, *, rounds: int
) -> list[dict[str, Any]]:
    """Return a row for every system at one number of microbatches."""
    sizes = dict.fromkeys(SYSTEMS, (problem, k)) | {
        TUNED: fastest_split(problem, k, mesh)
    }
    systems = {name: build(name, *sizes[name], mesh) for name in SYSTEMS}
    cpu: dict[str, list[float]] = {name: [] for name in SYSTEMS}

    def clocked(name: str) -> None:
        start = time.process_time()
        systems[name].step()
        cpu[name].append(time.process_time() - start)

    times = take_turns(
        {name: partial(clocked, name) for name in SYSTEMS}, rounds=rounds
    )
    work = {name: statistics.median(seconds[1:]) for name, seconds in cpu.items()}
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    rows = []
    for name in SYSTEMS:
        microbatches, seconds = sizes[name][1], times[name]
        reductions = (
            None
            if wide is None
            else build(name, *sizes[name], wide).reductions(microbatches)
        )
        rows.append(
            {
                "model": problem.name,
                "k": k,
                "system": name,
                "microbatches": 1 if name == PLAIN else microbatches,
                "step_ms": seconds.median * 1e3,
                "spread": seconds.spread,
                "over_fastest": (
                    seconds.median / min(other.median for other in times.values())
                ),
                "over_plain": seconds.median / times[PLAIN].median,
                "cpu_ms": work[name] * 1e3 if is_cpu else None,
                "cpu_over_least": work[name] / min(work.values()) if is_cpu else None,
                "temp_bytes": systems[name].temp_bytes,
                "all_reduces": reductions and reductions.number,
                "reduced_bytes": reductions and reductions.num_bytes,
                "in_loops": reductions and reductions.in_loops,
            }
        )
    return rows


def fastest_split(problem: Problem, k: int, mesh: Mesh) -> tuple[Problem, int]:
    """Return the fastest split of the rows of k microbatches: a problem and its number
    of microbatches.
    """
    fewer = [2**power for power in range(k.bit_length()) if k % 2**power == 0]
    splits = {
        str(number): (replace(problem, rows=problem.rows * k // number), number)
        for number in fewer
    }
    times = take_turns(
        {name: build(RAMPUP, *split, mesh).step for name, split in splits.items()},
        rounds=ROUNDS,
    )
    return splits[min(times, key=lambda name: times[name].median)]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A compiled way to take an optimizer step."""

    executable: Any
    # Runs one optimizer step from the state that the last one left, waits for it and
    # returns the parameters.
    step: Callable[[], Any]
    calls: int = 1  # calls of the program in one optimizer step

    @property
    def temp_bytes(self) -> int | None:
        """Temporary memory of the program, without arguments and results; None if the
        compiler does not tell.
        """
        analysis = self.executable.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def reductions(self, k: int) -> Reductions:
        """Return the all-reduces of one optimizer step of k microbatches."""
        return all_reduces(self.executable.as_text(), unknown_trips=k).times(self.calls)


def build(name: str, problem: Problem, k: int, mesh: Mesh) -> System:
    """Compile a system."""
    if name in (RAMPUP, TUNED):
        return build_rampup(problem, k, mesh)
    plan = problem.plan(k, mesh)
    step, state = baseline(name, problem, plan, mesh)
    on_devices = partial(jax.device_put, device=batch_sharding(mesh))
    arrays = problem.source(plan.consumed_samples).arrays
    calls = [
        (on_devices(rows_B), *more)
        for rows_B, *more in baseline_calls(name, arrays, plan)
    ]
    compiled = step.lower(state, *calls[0]).compile()

    def baseline_step() -> Any:
        nonlocal state
        for arguments in calls:
            state, loss = compiled(state, *arguments)
        jax.block_until_ready((state, loss))
        return state[0]

    return System(executable=compiled, step=baseline_step, calls=len(calls))


def build_rampup(problem: Problem, k: int, mesh: Mesh, **options: Any) -> System:
    """Compile rampup's step, with further options of `train_step`."""
    plan = problem.plan(k, mesh)
    source = problem.source(plan.consumed_samples)
    train, state = start_rampup(problem, plan, mesh, **options)
    (batch,) = step_batches(source, plan, mesh)
    executable = compile_program(
        train.lower(state, jax.tree.map(lambda x: x[0], source.arrays), plan.splits[0])
    )
    step = stepper(train, state)
    return System(executable=executable, step=lambda: step(batch)[0].params)


def run_noise(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time a step of 16 microbatches with and without the measurement of the gradient
    noise scale, in turns.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    # As many tokens in a microbatch as fill the machine, as in training; the cost is
    # per microbatch and not per token.
    problem, k = (
        (QUICK, 2)
        if quick
        else (replace(MEDIUM, tokens=NOISE_TOKENS), NOISE_MICROBATCHES)
    )
    systems = {
        measures: build_rampup(problem, k, mesh, measure_gradient_noise=measures)
        for measures in (False, True)
    }
    times = take_turns(
        {str(measures): system.step for measures, system in systems.items()},
        rounds=3 if quick else ROUNDS,
    )
    # The ratio of neighbours in time, which share the disturbances of other processes.
    ratios = sorted(
        on / off for off, on in zip(times["False"].all, times["True"].all, strict=True)
    )
    found = Measurements(2, on_row)
    found.add(
        {
            "measures": measures,
            "step_ms": times[str(measures)].median * 1e3,
            "spread": times[str(measures)].spread,
            "over_without": ratios[len(ratios) // 2] if measures else 1.0,
            "flops": system.executable.cost_analysis().get("flops"),
            "temp_bytes": system.temp_bytes,
        }
        for measures, system in systems.items()
    )
    return BenchResult(
        name="noise",
        title="one optimizer step with and without measure_gradient_noise",
        rows=found.rows,
        notes=[
            str(problem),
            (
                f"{k} microbatches on one {jax.devices()[0].device_kind} device, in"
                " turns; medians. Both geometries, AdamW."
            ),
            (
                "flops and temp_bytes are of the compiled program, in which a loop over"
                " microbatches counts once."
            ),
        ],
    )


if __name__ == "__main__":
    main(accumulate=run, noise=run_noise)
