"""Pipelined training beside MaxText's own pipeline on identical layers, and what the chooser's pick costs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax

from rampup.bench.maxtext_pipeline import MaxTextPipeline
from rampup.bench.measure import ROUNDS, Seconds, take_turns
from rampup.bench.pipeline_chooser import ChooserCheck
from rampup.bench.pipeline_programs import Model, Program, maxtext_program, our_program, pipeline_loops
from rampup.bench.result import BenchResult
from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.pipeline import DEFAULT_OVERHEAD_TOKENS
from rampup.run.mesh import make_mesh

NAME = "pipeline"
TITLE = (
    "loss and gradients with p stages, m microbatches and v repeats: ours and MaxText's on identical layers; then every way to "
    "cut one batch, and the chooser's pick"
)
MIN_DEVICES = 4
COLUMNS = ("system", "p", "m", "v", "step_ms", "spread", "vs_maxtext", "temp_bytes", "iterations", "permutes", "matmuls")
COLUMNS += ("gradient_error", "predicted_rank", "regret")
ALL_TICKS = {1: "our 1f1b, all ticks", 2: "our interleaved, all ticks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is run: a model of two-matmul layers, two per stage, so that v may be 1 or 2.

    Attributes:
        batch, tokens, width, hidden: B, T, E and F.
        shapes: (p, m) of the comparison with the peer.
        chooser_stages: p of the chooser's part, which runs every m that divides the batch.
        rounds: times that each program is timed.
    """

    batch: int
    tokens: int
    width: int
    hidden: int
    shapes: tuple[tuple[int, int], ...]
    chooser_stages: int
    rounds: int

    def model(self, num_stages: int) -> Model:
        """Return the model for a number of stages."""
        sizes = {"batch": self.batch, "tokens": self.tokens, "width": self.width, "hidden": self.hidden}
        return Model.make(num_layers=2 * num_stages, **sizes)


FULL = Sizes(
    batch=32,
    tokens=32,
    width=256,
    hidden=1024,
    shapes=((2, 8), (4, 4), (4, 16), (8, 16)),
    chooser_stages=4,
    rounds=ROUNDS,
)
QUICK = Sizes(batch=16, tokens=2, width=8, hidden=16, shapes=((2, 4),), chooser_stages=2, rounds=3)


def run(*, quick: bool = False) -> BenchResult:
    """Measure pipelines side by side, and the chooser against measured times.

    Args:
        quick: tiny sizes, for a look at the table and not at the times.

    Raises:
        ConfigError: JAX sees fewer than four devices.
    """
    devices = jax.devices()
    if len(devices) < MIN_DEVICES:
        raise ConfigError(
            f"bench {NAME} needs at least {MIN_DEVICES} devices for its stages, but JAX sees num_devices={len(devices)} "
            f"({devices[0].platform}); on a CPU, use --fake-devices 8",
            key="fake_devices",
            nearest=(8,),
        )
    sizes = QUICK if quick else FULL
    notes = _reading_notes(sizes, devices)
    peer: MaxTextPipeline | None = None
    try:
        peer = MaxTextPipeline.load()
    except MissingDependencyError as error:
        notes.append(f"The peer was skipped. {error}")
    rows: list[dict[str, Any]] = []
    for p, m in sizes.shapes:
        if p > len(devices):
            notes.append(f"p={p} was not run: JAX sees {len(devices)} devices.")
        else:
            rows += compare(sizes, p, m, peer, notes)
    rows += check_chooser(sizes, notes)
    return BenchResult(name=NAME, title=TITLE, rows=rows, notes=notes)


def compare(sizes: Sizes, p: int, m: int, peer: MaxTextPipeline | None, notes: list[str]) -> list[dict[str, Any]]:
    """Time all systems on one model, taking turns; return a row for each.

    Args:
        sizes: the model.
        p: stages.
        m: microbatches.
        peer: MaxText's pipeline, if there is one.
        notes: takes what could not run.
    """
    model, mesh = sizes.model(p), make_mesh(MeshAxes(pipeline=p), jax.devices()[:p])
    programs = [
        our_program("our 1f1b", model, mesh, m),
        our_program(ALL_TICKS[1], model, mesh, m, skip_idle=False),
        our_program("our interleaved", model, mesh, m, num_repeats=2),
        our_program(ALL_TICKS[2], model, mesh, m, num_repeats=2, skip_idle=False),
        our_program("our gpipe reference", model, mesh, m, is_gpipe=True),
    ]
    for v in ALL_TICKS if peer else ():
        try:
            program = maxtext_program(peer, model, mesh, m, v)
            program.run()
            programs.append(program)
        except Exception as error:  # noqa: BLE001 - whatever another system raises on a jax that it was not written for
            notes.append(f"MaxText's pipeline does not run at p={p}, m={m}, v={v}: {type(error).__name__}: {error}")
    wanted = model.gradients()
    errors = [program.gradient_error(wanted) for program in programs]
    times = _timed(dict(enumerate(programs)), sizes.rounds)
    peers = {program.num_repeats: times[n].median for n, program in enumerate(programs) if program.is_peer}
    rows = []
    for n, program in enumerate(programs):
        beside = None if program.is_peer else peers.get(program.num_repeats)
        ratio = None if beside is None else times[n].median / beside
        rows.append(_row(program, p, m, times[n], vs_maxtext=ratio, gradient_error=errors[n]))
    return rows


def check_chooser(sizes: Sizes, notes: list[str]) -> list[dict[str, Any]]:
    """Time every way to cut the batch, and compare what the chooser picks with the fastest; return a row for each.

    All ticks are computed, also the idle ones: stages that share cores then work in proportion to the critical path that they
    would have on devices of their own.

    Args:
        sizes: the model and the batch.
        notes: takes what the chooser picked.
    """
    p = sizes.chooser_stages
    model, mesh = sizes.model(p), make_mesh(MeshAxes(pipeline=p), jax.devices()[:p])
    programs = {
        (m, v): our_program(ALL_TICKS[v], model, mesh, m, num_repeats=v, skip_idle=False)
        for v in ALL_TICKS
        for m in range(1, sizes.batch + 1)
        if sizes.batch % m == 0 and (m >= p or v == 1)
    }
    times = _timed(programs, sizes.rounds)
    check = ChooserCheck(
        num_stages=p,
        samples=sizes.batch,
        seconds={cut: seconds.median for cut, seconds in times.items()},
        default_overhead=Fraction(DEFAULT_OVERHEAD_TOKENS, sizes.tokens),
    )
    notes += check.notes()
    return [_row(program, p, cut[0], times[cut], **check.columns(cut)) for cut, program in programs.items()]


def _timed(programs: Mapping[Any, Program], rounds: int) -> dict[Any, Seconds]:
    times = take_turns({str(key): program.run for key, program in programs.items()}, rounds=rounds)
    return {key: times[str(key)] for key in programs}


def _row(program: Program, p: int, m: int, seconds: Seconds, **more: Any) -> dict[str, Any]:
    loops = pipeline_loops(program.executable.as_text())
    known = {
        "system": program.system,
        "p": p,
        "m": m,
        "v": program.num_repeats,
        "step_ms": seconds.median * 1e3,
        "spread": seconds.spread,
        "temp_bytes": program.temp_bytes,
        "iterations": loops.iterations,
        "permutes": loops.permutes,
        "matmuls": loops.matmuls,
        **more,
    }
    return {name: known.get(name) for name in COLUMNS}


def _reading_notes(sizes: Sizes, devices: list[jax.Device]) -> list[str]:
    notes = [
        f"Layers are x + relu(x @ up) @ down, two per stage, float32, B={sizes.batch}, T={sizes.tokens}, E={sizes.width}, "
        f"F={sizes.hidden}; {len(devices)} {devices[0].platform} devices; medians of {sizes.rounds} rounds in which all "
        "programs of one (p, m) take turns. spread is the middle half of the times over their median.",
        "All systems compute each chunk's forward again in the backward. gradient_error is against the model without a "
        "pipeline, relative to the largest gradient of an array.",
        "vs_maxtext is our time over MaxText's at the same p, m and v. temp_bytes is of one device. iterations, permutes and "
        "matmuls are those of the loops in the compiled program: MaxText and gpipe have a forward and a backward loop, added "
        "up, ours have one for both. predicted_rank and regret (time over the best) are of the chooser's part.",
        "Not run: real accelerators with several devices.",
    ]
    if devices[0].platform == "cpu":
        notes.append(
            f"Fake devices share {os.cpu_count()} CPU cores, so a step's time measures the total work of all stages and not "
            "the critical path. Skipping idle ticks shortens it here; with a device for each stage it saves energy and not "
            "time. The rows with all ticks compute the idle ones too, as MaxText does, and compare like with like. Part of "
            "what is left belongs to XLA on CPUs, which copies and transposes the weights at every tick where stages are a "
            "vmapped dimension, as in MaxText: expect no such ratio on accelerators."
        )
    return notes
