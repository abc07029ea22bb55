"""One optimizer step of k microbatches: ours beside the plain big batch, optax.MultiSteps and optax.microbatching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rampup.bench.contenders import MICROBATCHING, MULTI_STEPS, big_batch, jitted, microbatched, new_state, our_state, strided
from rampup.bench.measure import ROUNDS, Seconds, take_turns
from rampup.bench.problem import Problem, bench_optimizer, problems
from rampup.bench.reductions import Reductions, all_reduces
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter
from rampup.run.accumulate import multi_steps
from rampup.run.compile import compile_program
from rampup.run.data.batches import step_batches
from rampup.run.mesh import batch_sharding, make_mesh
from rampup.run.step import train_step

OURS, TUNED, PLAIN = "ours", "ours, tuned", "plain big batch"
COUNTS, QUICK_COUNTS = (1, 2, 4, 16), (1, 2)
REDUCING_DEVICES = 4
SHORT_ROUNDS = 96


def run(*, quick: bool = False) -> BenchResult:
    """Time one optimizer step of every system, and read the all-reduces of its program for several devices.

    Args:
        quick: a tiny model, few microbatches and few rounds.
    """
    devices = jax.devices()
    mesh = make_mesh(devices=devices[:1])
    wide = make_mesh(devices=devices[:REDUCING_DEVICES]) if len(devices) >= REDUCING_DEVICES else None
    measured = problems(devices[0], quick=quick)
    rows = []
    for problem in measured:
        for k in QUICK_COUNTS if quick else COUNTS:
            rows += compare(problem, k, mesh, wide, rounds=3 if quick else rounds_of(k))
    return BenchResult(
        name="accumulate",
        title="one optimizer step of k microbatches, beside the plain big batch, optax.MultiSteps and optax.microbatching",
        rows=rows,
        notes=[
            *map(str, measured),
            f"one {devices[0].device_kind or devices[0].platform} device, medians of {rounds_of(1)} steps at k=1 to "
            f"{rounds_of(COUNTS[-1])} at k={COUNTS[-1]}, all systems in turn; over_fastest and over_plain are a system's time "
            "over the fastest's and over the hand-written step's at this k",
            "k microbatches of the same size: the batch grows with k. All run AdamW behind clipping by the global norm; "
            "only ours also returns the gradient norm",
            f"{TUNED}, cuts the same rows into whichever power of two of microbatches, up to k, took the least time, as "
            "`rampup tune` looks for it; with k microbatches the memory does not grow with the batch",
            "cpu_ms is the processor time of this process in a step, and cpu_over_least its ratio to the least: on a CPU that "
            "others use as well it says more than the time",
            "temp_bytes is of one program beside arguments and results",
            _reduction_note(wide),
        ],
    )


def rounds_of(k: int) -> int:
    """Return how many steps of k microbatches are timed: more of the short ones, whose times differ more."""
    return max(ROUNDS, SHORT_ROUNDS // k)


def compare(problem: Problem, k: int, mesh: Mesh, wide: Mesh | None, *, rounds: int) -> list[dict[str, Any]]:
    """Return a row for every system at one number of microbatches.

    Args:
        problem: the model.
        k: microbatches.
        mesh: one device, to be timed on.
        wide: several devices, whose program is compiled and not run; or None.
        rounds: steps that each is timed for.
    """
    cuts = dict.fromkeys(SYSTEMS, (problem, k)) | {TUNED: _fastest_cut(problem, k, mesh)}
    systems = {name: build(*cuts[name], mesh) for name, build in SYSTEMS.items()}
    cpu = {name: _CpuClock(system.step) for name, system in systems.items()}
    times = take_turns(cpu, rounds=rounds)
    fastest, plain = min(seconds.median for seconds in times.values()), times[PLAIN].median
    least_work = min(clock.median for clock in cpu.values())
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    rows = []
    for name, system in systems.items():
        microbatches = cuts[name][1]
        reductions = None if wide is None else SYSTEMS[name](*cuts[name], wide).reductions(microbatches)
        ratios = {
            "over_fastest": times[name].median / fastest,
            "over_plain": times[name].median / plain,
            "cpu_ms": cpu[name].median * 1e3 if is_cpu else None,
            "cpu_over_least": cpu[name].median / least_work if is_cpu else None,
        }
        first = {"model": problem.name, "k": k, "system": name, "microbatches": 1 if name == PLAIN else microbatches}
        rows.append(first | _times(times[name]) | ratios | _facts(system.executable, reductions))
    return rows


def _fastest_cut(problem: Problem, k: int, mesh: Mesh) -> tuple[Problem, int]:
    """Return the cut of the rows of k microbatches that takes the least time: a problem and its number of microbatches."""
    fewer = [2**power for power in range(k.bit_length()) if k % 2**power == 0]
    cuts = {str(number): (replace(problem, rows=problem.rows * k // number), number) for number in fewer}
    times = take_turns({name: _ours(*cut, mesh).step for name, cut in cuts.items()}, rounds=ROUNDS)
    return cuts[min(times, key=lambda name: times[name].median)]


class _CpuClock:
    """Runs a step and keeps what processor time this process spent on it, in all its threads."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step
        self._seconds: list[float] = []

    def __call__(self) -> None:
        start = time.process_time()
        self._step()
        self._seconds.append(time.process_time() - start)

    @property
    def median(self) -> float:
        return statistics.median(self._seconds[1:])


def _times(seconds: Seconds) -> dict[str, Any]:
    return {"step_ms": seconds.median * 1e3, "spread": seconds.spread}


def _facts(executable: Any, reductions: Reductions | None) -> dict[str, Any]:
    analysis = executable.memory_analysis()
    return {
        "temp_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
        "all_reduces": None if reductions is None else reductions.number,
        "reduced_bytes": None if reductions is None else reductions.num_bytes,
        "in_loops": None if reductions is None else reductions.in_loops,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A compiled way to take an optimizer step.

    Attributes:
        executable: the program.
        step: run one optimizer step from the state that the last one left, wait for it and return the parameters.
        calls: of the program in one optimizer step.
    """

    executable: Any
    step: Callable[[], Any]
    calls: int = 1

    def reductions(self, k: int) -> Reductions:
        """Return the all-reduces of one optimizer step of k microbatches."""
        return all_reduces(self.executable.as_text(), unknown_trips=k).times(self.calls)


def _plan(problem: Problem, k: int, mesh: Mesh) -> RampPlan:
    replicas = mesh.size
    return RampPlan(
        ramp=BatchRamp.constant(k * replicas * problem.rows),
        splitter=BatchSplitter(data_parallel_size=replicas, microbatch_size=problem.rows),
        num_devices=replicas,
        total_steps=1,
    )


def _ours(problem: Problem, k: int, mesh: Mesh) -> System:
    plan, tx = _plan(problem, k, mesh), bench_optimizer()
    step = train_step(problem.model.loss, tx, plan, mesh)
    state = our_state(problem, tx, mesh)
    source = problem.source(plan.consumed_samples)
    (batch,) = step_batches(source, plan, mesh)
    row = jax.tree.map(lambda x: x[0], source.read(range(1)))  # type: ignore[arg-type]
    executable = compile_program(step.lower(state, row, plan.splits[0]))

    def once() -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        return state.params

    return System(executable=executable, step=once)


def _plain(problem: Problem, k: int, mesh: Mesh) -> System:
    tx = bench_optimizer()
    batch_B = problem.source(k * mesh.size * problem.rows).arrays
    return _of_peer(big_batch(problem, tx), new_state(problem, tx, mesh), mesh, batch_B)


def _multi_steps(problem: Problem, k: int, mesh: Mesh) -> System:
    tx = multi_steps(bench_optimizer(), _plan(problem, k, mesh))
    batch_B = problem.source(mesh.size * problem.rows).arrays
    return _of_peer(big_batch(problem, tx), new_state(problem, tx, mesh), mesh, batch_B, calls=k)


def _optax_microbatching(problem: Problem, k: int, mesh: Mesh) -> System:
    tx, size = bench_optimizer(), mesh.size * problem.rows
    batch_B = strided(problem.source(k * size).arrays, size, k)
    return _of_peer(microbatched(problem, tx, size), new_state(problem, tx, mesh), mesh, batch_B, jnp.int32(k))


def _of_peer(step: Any, state: Any, mesh: Mesh, batch_B: Mapping[str, Any], *more: Any, calls: int = 1) -> System:
    rows = jax.device_put(dict(batch_B), batch_sharding(mesh))
    executable = jitted(step, mesh).lower(state, rows, *more).compile()

    def once() -> Any:
        nonlocal state
        for _ in range(calls):
            state, loss = executable(state, rows, *more)
        jax.block_until_ready((state, loss))
        return state[0]

    return System(executable=executable, step=once, calls=calls)


SYSTEMS: dict[str, Callable[[Problem, int, Mesh], System]] = {
    OURS: _ours,
    TUNED: _ours,
    PLAIN: _plain,
    MULTI_STEPS: _multi_steps,
    MICROBATCHING: _optax_microbatching,
}


def _reduction_note(wide: Mesh | None) -> str:
    if wide is None:
        return f"all-reduces were not counted: JAX sees fewer than {REDUCING_DEVICES} devices"
    return (
        f"all_reduces and reduced_bytes are of one optimizer step on {wide.size} devices, as its compiled program says (one in "
        "a loop counts as often as the loop runs; compilers put several arrays into one or not, so compare the bytes); "
        "in_loops is how many stand in loop bodies"
    )
