"""Pipelined gradients of rampup and MaxText on identical layers, and the cost model's
choice against measured times.

Shape suffixes: K microbatches, R rows of one microbatch; B rows of the batch, T tokens,
E width, F hidden width.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hlo import pipeline_loops
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxtext_baselines import Layers, MaxTextPipeline, arrange_layers
from measure import (
    ROUNDS,
    BenchResult,
    Measurements,
    OnRow,
    Seconds,
    ignore_row,
    main,
    take_turns,
)

from rampup.contrib.lab.design_model import weighted_line
from rampup.engine.mesh import STAGE, BatchAxes, make_mesh, replicated
from rampup.engine.pipeline import (
    LAYERS,
    PipelinedLoss,
    Stage,
    check_parts,
    check_sizes,
    permute_layers,
)
from rampup.engine.replicas import Replicas
from rampup.engine.sums import Recipe, Sums, as_summed
from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.pipeline import (
    DEFAULT_OVERHEAD_TOKENS,
    pass_ticks,
    predicted_time,
    stage_layer_order,
)

MIN_DEVICES = 4
COLUMNS = (
    "system",
    "p",
    "m",
    "v",
    "step_ms",
    "spread",
    "vs_maxtext",
    "temp_bytes",
    "iterations",
    "permutes",
    "matmuls",
)
COLUMNS += ("gradient_error", "predicted_rank", "regret")
ALL_TICKS = {1: "rampup 1f1b, all ticks", 2: "rampup interleaved, all ticks"}
GPIPE = "rampup gpipe reference"
# (m, v)
Candidate = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The model: layers of two matrix products, two per stage, so that v may be 1 or
    2.
    """

    batch: int  # B
    tokens: int  # T
    width: int  # E
    hidden: int  # F
    shapes: tuple[tuple[int, int], ...]  # (p, m) of the comparison with MaxText
    # p of the part about the cost model, which runs every m that divides the batch
    chooser_stages: int
    rounds: int  # number of measurements of each program

    @property
    def candidates(self) -> list[Candidate]:
        """The (m, v) of the part about the cost model."""
        p = self.chooser_stages
        return [
            (m, v)
            for v in ALL_TICKS
            for m in range(1, self.batch + 1)
            if self.batch % m == 0 and (m >= p or v == 1)
        ]

    def model(self, num_stages: int) -> Model:
        """Return the model for a number of stages: random layers and a random batch in
        float32.
        """
        rng, num_layers = np.random.default_rng(0), 2 * num_stages

        def normal(*shape: int, scale: float) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

        up = normal(num_layers, self.width, self.hidden, scale=self.width**-0.5)
        down = normal(num_layers, self.hidden, self.width, scale=self.hidden**-0.5)
        return Model(
            layers={"up": up, "down": down},
            x=normal(self.batch, self.tokens, self.width, scale=1.0),
        )


FULL = Sizes(
    batch=32,
    tokens=32,
    width=256,
    hidden=1024,
    shapes=((2, 8), (4, 4), (4, 16), (8, 16)),
    chooser_stages=4,
    rounds=ROUNDS,
)
QUICK = Sizes(
    batch=16, tokens=2, width=8, hidden=16, shapes=((2, 4),), chooser_stages=2, rounds=3
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The layers and the batch of all pipelines."""

    layers: (
        Layers  # stacked in the model's own order: `up` (L, E, F) and `down` (L, F, E)
    )
    x: jax.Array  # the batch (B, T, E)

    def gradients(self) -> Layers:
        """Return the gradients of the loss over the batch, without a pipeline."""
        return jax.jit(
            jax.grad(lambda layers, x_BTE: _sum_squares(_two_matmuls(layers, x_BTE)))
        )(self.layers, self.x)


def _two_matmuls(layers: Layers, x: jax.Array) -> jax.Array:
    """Apply stacked layers x + relu(x @ up) @ down, unrolled as in MaxText's stages."""
    for up, down in zip(layers["up"], layers["down"], strict=True):
        x = x + jax.nn.relu(x @ up) @ down
    return x


def _sum_squares(y: jax.Array) -> jax.Array:
    return jnp.sum(y * y) / 2


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Time pipelines in turn, and compare the cost model with measured times."""
    devices = jax.devices()
    if len(devices) < MIN_DEVICES:
        raise ConfigError(
            f"this benchmark needs at least {MIN_DEVICES} devices for its stages, but"
            f" JAX sees num_devices={len(devices)} ({devices[0].platform}); on a CPU,"
            " use --fake-devices 8",
            key="fake_devices",
            nearest=(8,),
        )
    sizes = QUICK if quick else FULL
    notes = _reading_notes(sizes, devices)
    maxtext: MaxTextPipeline | None = None
    try:
        maxtext = MaxTextPipeline.load()
    except MissingDependencyError as error:
        notes.append(f"The baseline was skipped. {error}")
    shapes = [(p, m) for p, m in sizes.shapes if p <= len(devices)]
    notes += [
        f"p={p} was not run: JAX sees {len(devices)} devices."
        for p, _ in sizes.shapes
        if p > len(devices)
    ]
    found = Measurements(
        len(shapes) * (7 if maxtext else 5) + len(sizes.candidates), on_row
    )
    for p, m in shapes:
        found.add(compare(sizes, p, m, maxtext, notes))
    found.add(check_cost_model(sizes, notes))
    title = (
        "loss and gradients with p stages, m microbatches and v repeats: rampup and"
        " MaxText on identical layers; then every split of one batch, and the cost"
        " model's choice"
    )
    return BenchResult(name="pipeline", title=title, rows=found.rows, notes=notes)


def compare(
    sizes: Sizes, p: int, m: int, maxtext: MaxTextPipeline | None, notes: list[str]
) -> list[dict[str, Any]]:
    """Time all systems on one model, in turn; return a row for each, and note what
    could not run.
    """
    model, mesh = sizes.model(p), make_mesh(MeshAxes(pipeline=p), jax.devices()[:p])
    programs = [
        rampup_program("rampup 1f1b", model, mesh, m),
        rampup_program(ALL_TICKS[1], model, mesh, m, skip_idle=False),
        rampup_program("rampup interleaved", model, mesh, m, num_repeats=2),
        rampup_program(ALL_TICKS[2], model, mesh, m, num_repeats=2, skip_idle=False),
        rampup_program(GPIPE, model, mesh, m),
    ]
    for v in ALL_TICKS if maxtext else ():
        try:
            program = maxtext_program(maxtext, model, mesh, m, v)
            program.run()
            programs.append(program)
        except Exception as error:  # noqa: BLE001 - another system may raise anything on a jax that it was not written for
            notes.append(
                f"MaxText's pipeline does not run at p={p}, m={m}, v={v}:"
                f" {type(error).__name__}: {error}"
            )
    wanted = model.gradients()
    errors = [program.gradient_error(wanted) for program in programs]
    times = list(
        take_turns(
            {str(n): program.run for n, program in enumerate(programs)},
            rounds=sizes.rounds,
        ).values()
    )
    baselines = {
        each.num_repeats: seconds.median
        for each, seconds in zip(programs, times, strict=True)
        if each.is_baseline
    }
    rows = []
    for program, seconds, error in zip(programs, times, errors, strict=True):
        baseline = None if program.is_baseline else baselines.get(program.num_repeats)
        ratio = None if baseline is None else seconds.median / baseline
        rows.append(
            _row(program, p, m, seconds, vs_maxtext=ratio, gradient_error=error)
        )
    return rows


def check_cost_model(sizes: Sizes, notes: list[str]) -> list[dict[str, Any]]:
    """Time every split of the batch; return a row for each, and note the cost model's
    choice.
    """
    p = sizes.chooser_stages
    # With idle ticks computed too, stages that share cores work in proportion to the
    # critical path on devices of their own.
    model, mesh = sizes.model(p), make_mesh(MeshAxes(pipeline=p), jax.devices()[:p])
    programs = {
        (m, v): rampup_program(
            ALL_TICKS[v], model, mesh, m, num_repeats=v, skip_idle=False
        )
        for m, v in sizes.candidates
    }
    times = take_turns(
        {str(key): program.run for key, program in programs.items()},
        rounds=sizes.rounds,
    )
    check = CostModelCheck(
        num_stages=p,
        samples=sizes.batch,
        seconds={key: times[str(key)].median for key in programs},
        default_overhead=Fraction(DEFAULT_OVERHEAD_TOKENS, sizes.tokens),
    )
    notes += check.notes()
    return [
        _row(program, p, key[0], times[str(key)], **check.columns(key))
        for key, program in programs.items()
    ]


def _row(
    program: Program, p: int, m: int, seconds: Seconds, **more: Any
) -> dict[str, Any]:
    loops = pipeline_loops(program.executable.as_text())
    known = {
        "system": program.system,
        "p": p,
        "m": m,
        "v": program.num_repeats,
        "step_ms": seconds.median * 1e3,
        "spread": seconds.spread,
        "temp_bytes": int(program.executable.memory_analysis().temp_size_in_bytes),
        "iterations": loops.iterations,
        "permutes": loops.permutes,
        "matmuls": loops.matmuls,
        **more,
    }
    return {name: known.get(name) for name in COLUMNS}


def _reading_notes(sizes: Sizes, devices: list[jax.Device]) -> list[str]:
    notes = [
        (
            "Layers are x + relu(x @ up) @ down, two per stage, float32,"
            f" B={sizes.batch}, T={sizes.tokens}, E={sizes.width}, F={sizes.hidden};"
            f" {len(devices)} {devices[0].platform} devices; medians of {sizes.rounds}"
            " rounds in which all programs of one (p, m) take turns. All recompute"
            " each chunk's forward in the backward."
        ),
        (
            "gradient_error is relative to the largest gradient of an array. vs_maxtext"
            " is the time over MaxText's at the same p, m and v. temp_bytes is of one"
            " device. iterations, permutes and matmuls are of the program's loops:"
            " MaxText and gpipe have two, added up. predicted_rank and regret (time"
            " over the best) are of the cost model."
        ),
        "Not run: real accelerators with several devices.",
    ]
    if devices[0].platform == "cpu":
        notes.append(
            f"Simulated devices share {os.cpu_count()} CPU cores, so a time is the"
            " total work of all stages and not the critical path. Skipping idle ticks"
            " shortens it only here; the rows with all ticks compute them too, as"
            " MaxText does. XLA on CPUs copies the weights at every tick if stages are"
            " a vmapped dimension, as in MaxText: expect another ratio on"
            " accelerators."
        )
    return notes


# The programs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled pipeline that returns the loss and its gradients."""

    system: str  # the name in the table
    num_repeats: int  # v
    executable: Any
    arguments: tuple[Any, ...]
    gradients: Callable[
        [Any], Layers
    ]  # takes the program's result and returns the layers' gradients in the model's own order
    is_baseline: bool = False  # whether it is not rampup's

    def run(self) -> Any:
        """Run it and wait for the result."""
        return jax.block_until_ready(self.executable(*self.arguments))

    def gradient_error(self, wanted: Layers) -> float:
        """Return the largest difference from other gradients, relative to the largest
        value of each array.
        """
        found = self.gradients(self.run())
        differences = (
            np.max(np.abs(np.asarray(found[name]) - wanted[name]))
            / np.max(np.abs(wanted[name]))
            for name in wanted
        )
        return float(max(differences))


def rampup_program(
    system: str,
    model: Model,
    mesh: Mesh,
    num_microbatches: int,
    *,
    num_repeats: int = 1,
    skip_idle: bool = True,
) -> Program:
    """Compile one of rampup's pipelines."""
    is_gpipe = system == GPIPE
    # GPipe keeps what its backward needs of every microbatch; recompute the chunks
    # there too, as the other systems do.
    chunk = jax.checkpoint(_two_matmuls) if is_gpipe else _two_matmuls
    loss = PipelinedLoss(
        first=lambda params, x_RTE, keys: x_RTE,
        stage=lambda layers, x_RTE, batch, keys, first_layer: chunk(layers, x_RTE),
        last=lambda params, y_RTE, batch, keys: (
            _sum_squares(y_RTE),
            jnp.float32(y_RTE.shape[0]),
            {},
        ),
        num_repeats=num_repeats,
        skip_idle=skip_idle,
    )
    order = stage_layer_order(len(model.layers["up"]), mesh.shape[STAGE], num_repeats)
    shardings = {
        "layers": {
            name: NamedSharding(mesh, PartitionSpec(STAGE)) for name in model.layers
        }
    }
    params = jax.device_put(
        permute_layers({"layers": dict(model.layers)}, order), shardings
    )
    shape = (num_microbatches, len(model.x) // num_microbatches)
    x_KRTE, keys_KR = (
        model.x.reshape(*shape, *model.x.shape[1:]),
        jax.random.split(jax.random.key(0), shape),
    )
    arguments = (
        params,
        *jax.device_put((x_KRTE, keys_KR), NamedSharding(mesh, PartitionSpec())),
    )

    def step(
        params: Any, x_KRTE: jax.Array, keys_KR: jax.Array
    ) -> tuple[jax.Array, Layers]:
        if is_gpipe:
            sums = gpipe_sums(
                loss, params, x_KRTE, keys_KR, mesh=mesh, param_shardings=shardings
            )
        else:
            sums = loss.sums(
                params,
                (x_KRTE, keys_KR),
                (num_microbatches, 1),
                Recipe(),
                mesh,
                shardings,
            )
        return sums.loss, sums.grads

    return Program(
        system=system,
        num_repeats=num_repeats,
        executable=jax.jit(step).lower(*arguments).compile(),
        arguments=arguments,
        gradients=lambda result: permute_layers(result[1], np.argsort(order).tolist())[
            "layers"
        ],
    )


def gpipe_sums(
    loss: PipelinedLoss,
    params: dict[str, Any],
    batch_KR: Any,
    keys_KR: jax.Array,
    *,
    mesh: Mesh,
    param_shardings: Any,
) -> Sums:
    """Sum loss and gradients of K microbatches by differentiating through the forward
    ticks, as GPipe and MaxText do.
    """
    check_sizes(loss, params, mesh)
    layers = NamedSharding(mesh, PartitionSpec(STAGE))
    shards = jax.tree.map(lambda _: replicated(mesh), params)
    shards[LAYERS] = jax.tree.map(lambda _: layers, params[LAYERS])
    replicas = Replicas(
        mesh=mesh,
        axes=BatchAxes.of(mesh),
        shardings=param_shardings,
        shards=shards,
        has_stages=True,
    )
    check_parts(loss, params, (batch_KR, keys_KR), replicas)

    def sum_stage(params: Any, batch_KR: Any, keys_KR: Any, *_: Any) -> Sums:
        def forward(params: Any) -> tuple[jax.Array, Sums]:
            # Without shardings of gradients, a stage runs the forward alone.
            forward_only = replace(replicas, shardings=None)
            stage = Stage(loss, params, (batch_KR, keys_KR), forward_only)
            sums = stage.run_pass(0, keys_KR.shape[0], stage.zeros())
            return sums.loss, sums

        grads, sums = jax.grad(forward, has_aux=True)(params)
        return sums._replace(grads=jax.tree.map(as_summed, grads))

    run = replicas.run(sum_stage)
    return run(params, batch_KR, keys_KR, None, Recipe())


def maxtext_program(
    maxtext: MaxTextPipeline,
    model: Model,
    mesh: Mesh,
    num_microbatches: int,
    num_repeats: int,
) -> Program:
    """Compile MaxText's pipeline."""
    layers = arrange_layers(model.layers, mesh, num_repeats)
    x_BTE = jax.device_put(model.x, NamedSharding(mesh, PartitionSpec(STAGE)))
    sizes = {"num_microbatches": num_microbatches, "num_repeats": num_repeats}
    forward = maxtext.forward(_two_matmuls, layers, x_BTE, mesh=mesh, **sizes)

    def loss(layers: Layers, x_BTE: jax.Array) -> jax.Array:
        return _sum_squares(forward(layers, x_BTE))

    return Program(
        system=f"maxtext {maxtext.version}",
        num_repeats=num_repeats,
        executable=jax.jit(jax.value_and_grad(loss)).lower(layers, x_BTE).compile(),
        arguments=(layers, x_BTE),
        gradients=lambda result: {
            name: g.reshape(model.layers[name].shape) for name, g in result[1].items()
        },
        is_baseline=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModelCheck:
    """Measured step times of all splits of a batch, and the order that the cost model
    predicts without them.
    """

    num_stages: int  # p
    samples: int  # samples B of the batch
    seconds: Mapping[Candidate, float]  # measured step time by (m, v)
    default_overhead: Fraction  # h if it is not measured, in samples

    @property
    def overheads(self) -> dict[str, Fraction]:
        """The values of h to predict with, by name: the fitted one first, if there is
        one.
        """
        fitted = self.fitted_overhead
        return ({} if fitted is None else {"fitted h": fitted}) | {
            "default h": self.default_overhead
        }

    @property
    def fitted_overhead(self) -> Fraction | None:
        """The h of t = ticks * c * (b + h) that fits the times with v = 1 best.

        None if h would be negative: a tick whose cost grows more than in proportion to
        b, or falls.

        Example:
            >>> seconds = {(1, 1): 4.0 * (16 + 3), (16, 1): 19.0 * (1 + 3)}
            >>> check = CostModelCheck(
            ...     num_stages=4, samples=16, seconds=seconds, default_overhead=Fraction(8)
            ... )
            >>> round(float(check.fitted_overhead), 9)
            3.0
        """
        points = [
            (self.samples / m, t / pass_ticks(self.num_stages, m))
            for (m, v), t in self.seconds.items()
            if v == 1
        ]
        # The line with the least squared errors relative to the times.
        start, slope, _ = weighted_line([(x, y, 1 / y**2) for x, y in points])
        # Rounding errors of the fit may leave h = 0 slightly negative.
        overhead = start / slope if slope > 0 else -1.0
        return Fraction(max(overhead, 0.0)) if overhead > -1e-9 else None

    def ranking(self, overhead: Fraction) -> list[Candidate]:
        """Return the measured splits in the order that the cost model predicts, the
        fastest first.
        """

        def predicted(candidate: Candidate) -> Fraction:
            m, v = candidate
            return predicted_time(
                m,
                self.samples // m,
                num_stages=self.num_stages,
                num_repeats=v,
                overhead=overhead,
            )

        return sorted(self.seconds, key=lambda each: (predicted(each), each))

    def columns(self, candidate: Candidate) -> dict[str, object]:
        """Return the table's columns for one (m, v): its predicted rank, and its time
        over the best.
        """
        rank = self.ranking(next(iter(self.overheads.values()))).index(candidate) + 1
        return {"predicted_rank": rank, "regret": self.regret(candidate)}

    def regret(self, candidate: Candidate) -> float:
        """Return a measured time over the best one."""
        return self.seconds[candidate] / min(self.seconds.values())

    def notes(self) -> list[str]:
        """Return a note for each h: the cost model's choice and its regret."""
        notes = []
        best = min(self.seconds, key=lambda key: self.seconds[key])
        for name, overhead in self.overheads.items():
            m, v = chosen = self.ranking(overhead)[0]
            notes.append(
                f"Cost model at p={self.num_stages}, B={self.samples}: with the {name}"
                f" of {float(overhead):.3g} samples it picks m={m}, v={v}; measured"
                f" best m={best[0]}, v={best[1]}; regret (chosen / best)"
                f" {self.regret(chosen):.3f}."
            )
        if self.fitted_overhead is None:
            notes.append(
                "The measured times give no h: the time of a tick is far from linear in"
                " the microbatch, or too noisy."
            )
        return notes


if __name__ == "__main__":
    main(pipeline=run)
