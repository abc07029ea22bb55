"""The first minutes on an accelerator: is rampup right there, and how fast is it?

    python benchmarks/accelerator.py [--quick] [--out FOLDER] [--only PART ...]

It takes at most eight minutes on one GPU or TPU, prints every part as it ends, and writes
`accelerator.json` and `accelerator.md`. A part that fails is reported, and the others
still run; one that begins after the time is up is left out. `--quick` runs on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import small
from contenders import (
    JIT,
    MICROBATCHING,
    MULTI_STEPS,
    QUICK,
    SMALL,
    Problem,
    baseline,
    bench_optimizer,
    main_problem,
    no_compilation_cache,
    plan_for,
    problems,
    start_rampup,
)
from measure import ROUNDS, BenchResult, take_turns

import rampup
from rampup.contrib.lab.memory import program_memory
from rampup.plan import BatchRamp, MeshAxes

SECONDS = 480  # for all parts
MICROBATCHES = 8
# JAX reports no memory of a CPU: there a microbatch grows to this number of rows.
MOST_QUICK = 8

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Machine:
    """What the parts run on."""

    quick: bool

    @property
    def device(self) -> jax.Device:
        """The device that one-device parts use."""
        return jax.devices()[0]

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """A mesh of one device."""
        return rampup.make_mesh(devices=jax.devices()[:1])

    @property
    def problem(self) -> Problem:
        """The model that is timed: 138 M parameters, or a tiny one."""
        return main_problem(self.device, quick=self.quick)

    @property
    def rounds(self) -> int:
        """How often everything is timed."""
        return 3 if self.quick else ROUNDS

    def memory(self, name: str) -> int | None:
        """Return a number of bytes that the device reports, if it does."""
        return (self.device.memory_stats() or {}).get(name)


def versions(machine: Machine) -> Iterator[Row]:
    """What runs here."""
    found = {
        "device": f"{len(jax.devices())} x {machine.device.device_kind}",
        "memory": machine.memory("bytes_limit"),
        "platform": jax.extend.backend.get_backend().platform_version.split("\n")[0],
        "python": platform.python_version(),
    }
    for name in ("jax", "jaxlib", "flax", "optax", "numpy", "grain"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # A package on PYTHONPATH may be without its record.
            found[name] = "absent, or without a record"
    yield from ({"what": name, "value": value} for name, value in found.items())


def check_step(machine: Machine) -> Iterator[Row]:
    """The compiled step beside the same rows without a loop and without a mesh."""
    model = QUICK if machine.quick else replace(SMALL, rows=4)
    count = len(jax.devices())
    axes = {"whole": MeshAxes(data=count), "sharded over fsdp": MeshAxes(fsdp=count)}
    for dtype in ("float32", "bfloat16"):
        for name, sizes in axes.items():
            if name != "whole" and count == 1:
                continue  # there is nothing to shard
            problem = replace(model, model=replace(model.model, dtype=dtype))
            mesh = rampup.make_mesh(sizes)
            own = problem.model.on(mesh)
            shardings = own.shardings(mesh)
            if name == "whole":
                whole = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
                shardings = jax.tree.map(lambda _, whole=whole: whole, shardings)
            plan = problem.plan(MICROBATCHES, mesh)
            step = rampup.train_step(own.loss, bench_optimizer(), plan, mesh)
            params = jax.device_put(problem.params(), shardings)
            state = rampup.create_state(params, step.tx, mesh)
            rows = problem.source(plan.ramp.sizes[0])
            report = rampup.check_step(step, state, rows)
            worst = max(report.parameters, key=lambda p: p.difference / p.tolerance)
            yield {
                "type": dtype,
                "embedding": name,
                "microbatches": report.num_microbatches,
                "right": bool(report),
                "wrong": ", ".join(str(p) for p in report.wrong) or None,
                "worst": worst.name,
                "difference": worst.difference,
                "tolerance": worst.tolerance,
            }


def resume(machine: Machine) -> Iterator[Row]:
    """A ramp in one executable, stopped in its middle and resumed, bit for bit."""
    problem = QUICK if machine.quick else SMALL
    ramp = BatchRamp.from_schedule(
        f"0:{problem.rows} {4 * problem.rows}:{2 * problem.rows}"
        f" {12 * problem.rows}:{4 * problem.rows}"
    )
    rows = problem.source(256)

    def train(folder: str, stop: int | None) -> tuple[Any, int]:
        plan = plan_for(ramp, 12, microbatch_size=problem.rows)
        step, state = start_rampup(problem, plan, machine.mesh)
        done = [0]

        def should_stop() -> bool:
            done[0] += 1
            return stop is not None and done[0] > stop

        loop = rampup.Loop(
            plan=plan,
            step=step,
            batches=lambda start: rampup.step_batches(
                rows, plan, machine.mesh, start=start
            ),
            folder=Path(folder),
            checkpoints=rampup.CheckpointOptions(checkpoint_period=100),
        )
        state, _ = loop.run(state, should_stop=should_stop)
        return jax.device_get(state), step.num_compilations

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        whole, programs = train(one, None)
        train(two, 6)
        resumed, _ = train(two, None)
    equal = jax.tree.map(np.array_equal, whole, resumed)
    yield {
        "phases": len(ramp.phases),
        "steps": int(whole.step),
        "executables": programs,
        "resumed at": 6,
        "bit for bit": all(jax.tree.leaves(equal)),
    }


def step_time(machine: Machine) -> Iterator[Row]:
    """One step of eight microbatches, from rows in the memory of the host."""
    problem = machine.problem
    systems = {}
    for name in (small.HAND, small.RAMPUP, MULTI_STEPS, MICROBATCHING):
        systems[name] = small.build(name, problem, machine.mesh)
    systems[JIT] = _whole_batch(problem, machine)
    times = take_turns(systems, rounds=machine.rounds, warm_up=2)
    tokens = MICROBATCHES * problem.rows * problem.tokens
    hand = times[small.HAND].median
    for name, seconds in times.items():
        yield {
            "system": name,
            "step_ms": seconds.median * 1e3,
            "spread": seconds.spread,
            "over hand-written": seconds.median / hand,
            "tokens/s": tokens / seconds.median,
        }


def _whole_batch(problem: Problem, machine: Machine) -> Callable[[], Any]:
    """Return a function that takes a step on the whole batch at once."""
    plan = problem.plan(MICROBATCHES, machine.mesh)
    step, state = baseline(JIT, problem, plan, machine.mesh)
    rows = problem.source(plan.ramp.sizes[0]).arrays

    def run() -> Any:
        nonlocal state
        state, loss = step(state, jax.device_put(rows))
        return jax.block_until_ready((state[0], loss))

    return run


def noise(machine: Machine) -> Iterator[Row]:
    """What it costs to measure the noise of the gradients."""
    problem = machine.problem
    systems = {
        f"measured: {measures}": _steps(problem, machine, noise=measures)
        for measures in (False, True)
    }
    times = take_turns(systems, rounds=machine.rounds, warm_up=2)
    first = next(iter(times.values())).median
    for name, seconds in times.items():
        yield {
            "noise": name,
            "step_ms": seconds.median * 1e3,
            "spread": seconds.spread,
            "over unmeasured": seconds.median / first,
        }


def _steps(
    problem: Problem,
    machine: Machine,
    *,
    noise: bool = False,
    steps: int = 1,
    reads: bool = False,
) -> Callable[[], Any]:
    """Return a function that takes steps of rampup: on rows that lie on the device, or
    that the host reads.
    """
    plan = replace(problem.plan(MICROBATCHES, machine.mesh), total_steps=10**6)
    options = {"measure_gradient_noise": noise, "donate": True}
    step, state = start_rampup(problem, plan, machine.mesh, **options)
    source = problem.source(plan.ramp.sizes[0])
    batches = step.batches(source)
    batch = next(iter(step.batches(source)))
    number = 0

    def run() -> Any:
        nonlocal state, number
        for _ in range(steps):
            position = replace(batch.position, step=number)
            own = next(batches) if reads else batch._replace(position=position)
            state, metrics = step(state, own)
            number += 1
        return jax.block_until_ready((state.params, metrics))

    return run


def host(machine: Machine) -> Iterator[Row]:
    """Whether the host's part of a step is hidden behind the device's."""
    sizes = problems(machine.device, quick=machine.quick)
    if not machine.quick:
        sizes = [small.LINEAR, *sizes[:1], machine.problem]
    for problem in sizes:
        steps = 8 if machine.quick or problem is machine.problem else 32
        systems = {
            "device": _steps(problem, machine, steps=steps),
            "with host": _steps(problem, machine, steps=steps, reads=True),
        }
        times = take_turns(systems, rounds=machine.rounds, warm_up=1)
        alone, together = (times[name].median / steps for name in systems)
        yield {
            "model": problem.name,
            "rows on the device, ms": alone * 1e3,
            "rows from the host, ms": together * 1e3,
            "ratio": together / alone,
            "spread": times["with host"].spread,
        }


def compile_time(machine: Machine) -> Iterator[Row]:
    """The program of a ramp beside one jit for each of three batch sizes."""
    problem = machine.problem
    plan = problem.plan(MICROBATCHES, machine.mesh)
    with no_compilation_cache():
        step, state = start_rampup(problem, plan, machine.mesh)
        rows = problem.source(plan.ramp.sizes[0])
        row = jax.tree.map(lambda x: x[0], dict(rows.arrays))
        start = time.perf_counter()
        step.lower(state, row, plan.splits[0]).compile()
        yield {"system": small.RAMPUP, "programs": 1, "s": time.perf_counter() - start}
        total, sizes = 0.0, (1, 2, 4)
        for size in sizes:
            own, first = baseline(JIT, problem, plan, machine.mesh)
            count = size * problem.rows
            batch = {name: x[:count] for name, x in rows.arrays.items()}
            start = time.perf_counter()
            own.lower(first, batch).compile()
            total += time.perf_counter() - start
        yield {"system": JIT, "programs": len(sizes), "s": total}


def memory(machine: Machine) -> Iterator[Row]:
    """Memory that the compiler planned, as `rampup tune` reports it, beside the peak
    that the device saw.
    """
    problem = machine.problem
    before = machine.memory("peak_bytes_in_use")
    compiled, run = _program(problem, machine)
    run()
    peak = machine.memory("peak_bytes_in_use")
    planned = program_memory(compiled).total
    yield {
        "microbatch": problem.rows,
        "planned": planned,
        "peak before": before,
        "peak": peak,
        # The device counts since the start: an earlier part may have needed more.
        "peak over planned": None if not peak or peak == before else peak / planned,
    }


def _program(problem: Problem, machine: Machine) -> tuple[Any, Callable[[], Any]]:
    """Return the compiled step of a problem, and a function that runs one step."""
    plan = problem.plan(2, machine.mesh)
    step, state = start_rampup(problem, plan, machine.mesh)
    rows = problem.source(plan.ramp.sizes[0])
    row = jax.tree.map(lambda x: x[0], dict(rows.arrays))
    compiled = step.lower(state, row, plan.splits[0]).compile()

    def run() -> Any:
        return jax.block_until_ready(step(state, next(step.batches(rows))))

    return compiled, run


def largest(machine: Machine) -> Iterator[Row]:
    """The largest microbatch, a power of two, by planning and then by running."""
    limit = machine.memory("bytes_limit")
    problem, fits = machine.problem, 0
    planned: int | None = None
    size = problem.rows
    while limit or size <= MOST_QUICK:
        compiled, run = _program(replace(problem, rows=size), machine)
        needed = program_memory(compiled).total
        if limit and needed > limit:
            break
        del compiled
        run()
        fits, planned = size, needed
        size *= 2
    yield {
        "largest that ran": fits,
        "planned": planned,
        "limit": limit,
        "first that does not fit": size if limit else None,
    }


PARTS: Mapping[str, Callable[[Machine], Iterator[Row]]] = {
    "versions": versions,
    "check_step": check_step,
    "resume": resume,
    "step_time": step_time,
    "memory": memory,
    "host": host,
    "noise": noise,
    "compile_time": compile_time,
    "largest": largest,
}


def run_part(name: str, machine: Machine) -> tuple[BenchResult, float]:
    """Run a part, and return its table, with what failed as a note, and its seconds."""
    part, rows, notes = PARTS[name], [], []
    start = time.perf_counter()
    try:
        rows.extend(part(machine))
    except Exception as error:  # noqa: BLE001 - one part that fails leaves the others their minutes
        traceback.print_exc()
        notes.append(f"FAILED: {type(error).__name__}: {error}")
    gc.collect()  # the next part measures memory
    seconds = time.perf_counter() - start
    title = " ".join((part.__doc__ or "").split()).rstrip(".")
    return BenchResult(name=name, title=title, rows=rows, notes=notes), seconds


def main() -> int:
    """Run the parts, and write what they found. Return the number of those that failed
    or were left out.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine, start = Machine(args.quick), time.perf_counter()
    results: dict[str, Any] = {}
    tables, bad = [], 0
    for name in args.only:
        if time.perf_counter() - start > SECONDS:
            result, seconds = (
                BenchResult(name=name, title="", rows=[], notes=["no time was left"]),
                0.0,
            )
        else:
            result, seconds = run_part(name, machine)
        bad += bool(result.notes)
        results[name] = result.to_dict() | {"seconds": seconds}
        table = result.to_markdown() if result.rows else f"## {name}\n"
        tables.append(f"{table}\n".replace("\n\n\n", "\n\n"))
        if not result.rows:
            tables.append("".join(f"- {note}\n" for note in result.notes))
        print(tables[-1], f"({seconds:.0f} s)\n", flush=True)
        # After every part: the machine may go away.
        (args.out / "accelerator.json").write_text(json.dumps(results, indent=1) + "\n")
        (args.out / "accelerator.md").write_text("\n".join(tables))
    return bad


if __name__ == "__main__":
    sys.exit(min(main(), 1))
