"""Several processes as one run, and plans for many devices and phases."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from rampup.bench.maxtext_manager import MakeManager, maxtext_manager
from rampup.bench.measure import ROUNDS, Seconds, take_turns
from rampup.bench.result import BenchResult
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter, RampupMicrobatch

FAKE_DEVICES, PROCESSES, QUICK_PROCESSES = 8, (1, 2, 4), (1, 2)
PLANNED_DEVICES, PHASES = (4_096, 65_536), 10_000
QUICK_PLANNED_DEVICES, QUICK_PHASES = (4_096,), 100
# Steps of the first phase of a planned ramp; the last phases have one for every `PHASES` of them.
FIRST_STEPS = 1_000_000
REPLAYED = 300_000
TIMEOUT_SECONDS = 600
COLUMNS = (
    "case",
    "devices",
    "processes",
    "phases",
    "ms",
    "spread",
    "peer_ms",
    "ratio",
    "peak_bytes",
    "compilations",
    "rows_here",
    "loss_difference",
)


def run(*, quick: bool = False) -> BenchResult:
    """Start runs of one, two and four processes, and plan for thousands of devices.

    Args:
        quick: fewer processes, phases and rounds.
    """
    peer, origin = maxtext_manager()
    rounds = 3 if quick else ROUNDS
    rows = [*process_rows_of(QUICK_PROCESSES if quick else PROCESSES, rounds, quick=quick)]
    devices, phases = (QUICK_PLANNED_DEVICES, QUICK_PHASES) if quick else (PLANNED_DEVICES, PHASES)
    for num_devices in devices:
        rows += planning_rows(num_devices, phases, peer, rounds)
    return BenchResult(
        name="scale",
        title="one training step in several processes, and plans for many devices and phases",
        rows=[{name: row.get(name) for name in COLUMNS} for row in rows],
        notes=[
            f"a step: {FAKE_DEVICES} pretended CPU devices in all, real processes joined by jax.distributed, all on the cores "
            "of this machine; the peer is a hand-written jitted step on the whole batch; ratio is ours over it",
            "loss_difference is the largest relative difference of a loss from that of one process; rows_here is what one "
            "process reads of a step",
            "a plan: built, checked and cut, phase by phase, and its last step looked up; the peer is the replay of the ramp's "
            f"steps by {origin}, timed for {REPLAYED:,} of them and extrapolated; it checks and cuts nothing",
            f"medians of {rounds} rounds in turn; peak_bytes is what Python allocated for a plan at most",
            "not run: several machines, accelerators, and more than 4 processes",
        ],
    )


def process_rows_of(numbers: tuple[int, ...], rounds: int, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for every number of processes.

    Args:
        numbers: of processes.
        rounds: steps that are timed.
        quick: a tiny model.
    """
    losses: list[float] = []
    for number in numbers:
        found = run_processes(number, rounds, quick=quick)
        losses = losses or found["losses"]
        seconds, peer = Seconds(all=tuple(found["seconds"])), Seconds(all=tuple(found["peer_seconds"]))
        yield {
            "case": "training step",
            "devices": FAKE_DEVICES,
            "processes": number,
            "ms": seconds.median * 1e3,
            "spread": seconds.spread,
            "peer_ms": peer.median * 1e3,
            "ratio": seconds.median / peer.median,
            "compilations": found["compilations"],
            "rows_here": found["rows"],
            "loss_difference": max(abs(a - b) / abs(b) for a, b in zip(found["losses"], losses, strict=True)),
        }


def run_processes(number: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """Start so many processes and return what the first one found; see `rampup.bench.scale_process`.

    Args:
        number: of processes; it divides the devices.
        rounds: steps that are timed.
        quick: a tiny model.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "rampup.bench.scale_process", str(FAKE_DEVICES), str(number)]
    started = [
        subprocess.Popen(
            [*command, str(place), address, str(rounds), "quick" if quick else "full"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(number)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"process {started.index(process)} of {number} failed:\n{errors[-2000:]}")
    found: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def planning_rows(num_devices: int, phases: int, peer: MakeManager, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for a plan of one shape and for one of a shape per phase.

    Args:
        num_devices: devices, all of them replicas.
        phases: of the ramp, one row per device more in each.
        peer: MaxText's manager.
        rounds: times that each is timed.
    """
    config = SimpleNamespace(
        per_device_batch_size_start=1,
        per_device_batch_size_increment=1,
        per_device_batch_size=phases,
        global_rampup_samples=FIRST_STEPS * num_devices * (phases - 1),
        num_target_devices=num_devices,
    )
    for mode in ("fixed", "per_phase"):
        make = _maker(config, mode)
        plan, peak = _traced(make)
        times = take_turns({"ours": make, "replay": lambda: peer(config, REPLAYED)}, rounds=rounds)
        replay = times["replay"].median * plan.ramp.ramp_steps / REPLAYED
        yield {
            "case": f"plan, {mode}",
            "devices": num_devices,
            "phases": len(plan.ramp.phases),
            "ms": times["ours"].median * 1e3,
            "spread": times["ours"].spread,
            "peer_ms": replay * 1e3,
            "ratio": times["ours"].median / replay,
            "peak_bytes": peak,
            "compilations": plan.num_compiled_shapes,
        }


def _maker(config: Any, mode: RampupMicrobatch) -> Any:
    devices = config.num_target_devices

    def make() -> RampPlan:
        ramp = BatchRamp.linear(
            start=devices,
            increment=devices,
            end=devices * config.per_device_batch_size,
            samples=config.global_rampup_samples,
        )
        splitter = BatchSplitter(data_parallel_size=devices, rampup_microbatch=mode)
        plan = RampPlan(ramp=ramp, splitter=splitter, num_devices=devices, total_steps=2 * ramp.ramp_steps)
        plan.position(plan.total_steps - 1)
        return plan

    return make


def _traced(make: Any) -> tuple[RampPlan, int]:
    """Return a plan and the most bytes that Python had allocated while it was made."""
    tracemalloc.start()
    try:
        plan = make()
        return plan, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
