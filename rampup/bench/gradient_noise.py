"""The cost of measuring the gradient noise scale: the same training step with and without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from rampup.bench.contenders import MEDIUM, QUICK, Problem, start_rampup
from rampup.bench.measure import ROUNDS, BenchResult, Measurements, OnRow, ignore_row, take_turns
from rampup.run.compile import compile_program
from rampup.run.data.batches import step_batches
from rampup.run.mesh import make_mesh

MICROBATCHES = 16
TOKENS = 256


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time a step of 16 microbatches with and without the measurement, in turns, and compare the programs."""
    mesh = make_mesh(devices=jax.devices()[:1])
    # As many tokens in a microbatch as fill the machine, as in training; the cost is per microbatch and not per token.
    problem, k = (QUICK, 2) if quick else (replace(MEDIUM, tokens=TOKENS), MICROBATCHES)
    found = Measurements(2, on_row)
    found.add(compare(problem, k, mesh, rounds=3 if quick else ROUNDS))
    return BenchResult(
        name="noise",
        title="one optimizer step with and without measure_gradient_noise",
        rows=found.rows,
        notes=[
            str(problem),
            f"{k} microbatches on one {jax.devices()[0].device_kind} device, in turns; medians. Both geometries, AdamW.",
            "flops and temp_bytes are of the compiled program, in which a loop over microbatches counts once.",
        ],
    )


def compare(problem: Problem, k: int, mesh: Mesh, *, rounds: int) -> list[dict[str, Any]]:
    """Return a row for the step without the measurement, and one with it."""
    programs = {measures: build(problem, k, mesh, measures=measures) for measures in (False, True)}
    times = take_turns({str(measures): step for measures, (step, _) in programs.items()}, rounds=rounds)
    # The ratio of neighbours in time, which share the disturbances of other processes.
    ratios = sorted(on / off for off, on in zip(times["False"].all, times["True"].all, strict=True))
    rows = []
    for measures, (_, program) in programs.items():
        analysis = program.memory_analysis()
        rows.append(
            {
                "measures": measures,
                "step_ms": times[str(measures)].median * 1e3,
                "spread": times[str(measures)].spread,
                "over_without": ratios[len(ratios) // 2] if measures else 1.0,
                "flops": program.cost_analysis().get("flops"),
                "temp_bytes": None if analysis is None else int(analysis.temp_size_in_bytes),
            }
        )
    return rows


def build(problem: Problem, k: int, mesh: Mesh, *, measures: bool) -> tuple[Callable[[], Any], Any]:
    """Return a function that takes an optimizer step and waits for it, and the program."""
    plan = problem.plan(k, mesh)
    source = problem.source(plan.consumed_samples)
    train, state = start_rampup(problem, plan, mesh, measure_gradient_noise=measures)
    (batch,) = step_batches(source, plan, mesh)
    row, numbers = jax.tree.map(lambda x: x[0], source.arrays), itertools.count()
    program = compile_program(train.lower(state, row, plan.splits[0]))

    def step() -> None:
        nonlocal state
        state, metrics = train(state, batch.at_step(next(numbers)))
        jax.block_until_ready((state, metrics))

    return step, program
