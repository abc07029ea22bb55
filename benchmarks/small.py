"""One optimizer step of a small model, with the host's part: rows in the memory of the
host, to parameters on the device.

A small model computes so little that the time of a step is mostly that of Python, of
transfers and of calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contenders import (
    MICROBATCHING,
    MULTI_STEPS,
    QUICK,
    SMALL,
    ArrayRows,
    Problem,
    baseline,
    baseline_calls,
    bench_optimizer,
    new_state,
    scanned,
    start_rampup,
)
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

from rampup.engine.mesh import make_mesh, replicated
from rampup.lm.transformer import LanguageModel

HAND, RAMPUP, STREAM = "hand-written scan", "rampup", "rampup, stream of rows"
SYSTEMS = (HAND, RAMPUP, STREAM, MULTI_STEPS, MICROBATCHING)
# The way of the README, and its peer, without a wait in every step: the host prepares
# the next steps while the device computes.
BATCHES, HAND_AHEAD = (
    "rampup, step.batches(rows)",
    "hand-written scan, without a wait in every step",
)
AHEAD = (HAND_AHEAD, BATCHES)
AHEAD_STEPS = 32
MICROBATCHES = 8
WIDTH = 8


@dataclass(frozen=True)
class Linear:
    """Linear regression."""

    num_parameters: int = WIDTH + 1
    dtype: str = "float32"

    def init(self, key: Any) -> Any:  # noqa: ARG002 - as that of a language model
        """Return zeros."""
        return {"w": jnp.zeros(WIDTH), "b": jnp.zeros(())}

    def loss(self, params: Any, batch: Any, keys: Any = None) -> Any:  # noqa: ARG002 - as that of a language model
        """Return the squared error, the number of rows and no further sums."""
        return (
            jnp.sum((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2),
            batch["y"].size,
            {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProblem(Problem):
    """Linear regression on rows of a few numbers."""

    model: Any = Linear()

    def source(self, num_rows: int) -> ArrayRows:
        """Return random rows."""
        x = np.random.default_rng(0).standard_normal((num_rows, WIDTH), np.float32)
        return ArrayRows({"x": x, "y": x.sum(axis=1)})

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model.num_parameters} parameters, microbatches of"
            f" {self.rows} rows of {WIDTH} numbers"
        )


LINEAR = LinearProblem(name="linear", tokens=1, rows=4)
# Problem -> rounds: more for shorter steps, whose times vary more.
PROBLEMS = {
    LINEAR: 2000,
    replace(
        SMALL,
        name="0.6M",
        model=replace(SMALL.model, num_layers=3, mlp_dim=384),
        tokens=32,
        rows=4,
    ): 200,
    replace(
        SMALL,
        name="9M",
        model=LanguageModel(
            num_layers=6,
            width=384,
            mlp_dim=896,
            num_heads=6,
            num_kv_heads=3,
            vocab_size=256,
        ),
        tokens=32,
        rows=4,
    ): 60,
}


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time one step of every system, from a list of rows on the host to the new
    parameters.
    """
    mesh = make_mesh(devices=jax.devices()[:1])
    rounds_of = dict.fromkeys((LINEAR, QUICK), 3) if quick else PROBLEMS
    found = Measurements(len(rounds_of) * len((*SYSTEMS, *AHEAD)), on_row)
    for problem, rounds in rounds_of.items():
        for systems, steps in ((SYSTEMS, 1), (AHEAD, AHEAD_STEPS)):
            candidates = {name: build(name, problem, mesh, steps) for name in systems}
            times = take_turns(
                candidates, rounds=max(rounds // steps, 3), warm_up=ROUNDS
            )
            hand = times[systems[0]]
            found.add(
                {
                    "model": problem.name,
                    "system": name,
                    "step_ms": times[name].median / steps * 1e3,
                    "spread": times[name].spread,
                    "over_hand": times[name].median / hand.median,
                    # Neighbours in time share the disturbances of other processes.
                    "paired": statistics.median(
                        own / other
                        for own, other in zip(times[name].all, hand.all, strict=True)
                    ),
                }
                for name in systems
            )
    return BenchResult(
        name="small",
        title=(
            "one optimizer step of a small model, from rows in the memory of the host"
            " to new parameters"
        ),
        rows=found.rows,
        notes=[
            *map(str, rounds_of),
            (
                f"{MICROBATCHES} microbatches on one {jax.devices()[0].device_kind}"
                f" device; medians of {', '.join(map(str, rounds_of.values()))} steps,"
                " one of each system in turn. AdamW after clipping by the norm."
            ),
            (
                f"Without a wait in every step, {AHEAD_STEPS} steps are timed and"
                " waited for at once."
            ),
            (
                "All begin with the same list of rows and stack them. paired is the"
                " median of the ratios of each round."
            ),
            (
                "The hand-written step returns the loss. rampup also returns weight,"
                " aux and grad_norm."
            ),
        ],
    )


def build(name: str, problem: Problem, mesh: Mesh, steps: int = 1) -> Callable[[], Any]:
    """Return a function that takes the next steps of a system and returns the new
    parameters when they are there.
    """
    plan = replace(problem.plan(MICROBATCHES, mesh), total_steps=10**6)
    arrays = problem.source(plan.ramp.sizes[0]).arrays
    rows = [
        {key: x[number] for key, x in arrays.items()}
        for number in range(plan.ramp.sizes[0])
    ]
    if name in (RAMPUP, STREAM, BATCHES):
        train, state = start_rampup(problem, plan, mesh)
        batches = (
            train.batches(rows)
            if name == BATCHES
            else train.stream(rows[n % len(rows)] for n in range(10**9))
        )

        def rampup_step() -> Any:
            nonlocal state
            for _ in range(steps):
                state, metrics = train(
                    state, train.batch(stack(rows)) if name == RAMPUP else next(batches)
                )
            return jax.block_until_ready((state.params, metrics))[0]

        return rampup_step
    if name in (HAND, HAND_AHEAD):
        step = jax.jit(
            scanned(problem, bench_optimizer()),
            donate_argnums=0,
            out_shardings=replicated(mesh),
        )
        first = new_state(problem, bench_optimizer(), mesh)
    else:
        step, first = baseline(name, problem, plan, mesh)

    def baseline_step() -> Any:
        nonlocal first
        for _ in range(steps):
            batch_B = stack(rows)
            if name in (HAND, HAND_AHEAD):
                calls = [
                    (
                        {
                            key: x.reshape(MICROBATCHES, -1, *x.shape[1:])
                            for key, x in batch_B.items()
                        },
                    )
                ]
            else:
                calls = baseline_calls(name, batch_B, plan)
            for arguments in calls:
                first, loss = step(first, *arguments)
        return jax.block_until_ready((first[0], loss))[0]

    return baseline_step


def stack(rows: list[dict[str, np.ndarray]]) -> Mapping[str, np.ndarray]:
    """Return rows as arrays (rows, ...)."""
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


if __name__ == "__main__":
    main(small=run)
