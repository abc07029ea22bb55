"""Benchmarks that compare rampup with baselines in one interleaved run: `rampup bench`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from rampup.errors import ConfigError

if TYPE_CHECKING:
    from rampup.bench.measure import Bench

# Name -> one line of help.
BENCHES = {
    "ramp": "a whole ramp, compiled from cold: rampup, a jit per batch size, optax.MultiSteps, optax.microbatching, the ideal",
    "transition": "the slowest step at a phase change over the median step, for the same systems",
    "accumulate": "one optimizer step of 1 to 16 microbatches: time, memory and all-reduces, for the same systems",
    "buffer": "bytes that a step of each phase moves to the device, compared with a padded buffer, and its program's memory",
    "pages": "a step on a CPU with huge pages, compared with small pages",
    "data": "rows per second of the loader, compared with Grain's own fixed batches",
    "plan": "look-ups and a resume at step 10^9 compared with MaxText's manager, and the host's work in a training step",
    "scale": "a step in 1, 2 and 4 processes, and plans for up to 65,536 devices and 10,000 phases",
    "pipeline": "a pipelined gradient: rampup, GPipe's order and MaxText's module on identical layers; the cost model",
    "noise": "one optimizer step with and without measure_gradient_noise: time, FLOPs and memory",
    "packing": "microbatches by token budget and balanced parts, compared with veRL's algorithm",
}
# Benchmarks that are not the function `run` of the module of their name.
_FUNCTIONS = {"noise": ("accumulate", "run_noise"), "transition": ("ramp", "run_transition"), "buffer": ("data", "run_buffer")}


def bench(name: str) -> Bench:
    """Return the function that runs a benchmark: `run(*, quick=False, on_row=...) -> BenchResult`.

    Raises:
        ConfigError: there is no such benchmark.
    """
    if name not in BENCHES:
        raise ConfigError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHES)}", key="bench", nearest=tuple(BENCHES))
    module, function = _FUNCTIONS.get(name, (name, "run"))
    run: Bench = getattr(importlib.import_module(f"rampup.bench.{module}"), function)
    return run
