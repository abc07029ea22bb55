"""What `rampup bench` measures, each beside its peer in one run."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rampup.bench.result import BenchResult
from rampup.errors import ConfigError

# Name -> what is measured, in a line; the module of the same name has `run`.
BENCHES = {
    "ramp": "a whole ramp, compiled from cold: ours, a jit per batch size, optax.MultiSteps, optax.microbatching, the ideal",
    "transition": "the slowest step at a phase change over the median step, for the same systems",
    "accumulate": "one optimizer step of 1 to 16 microbatches: time, memory and all-reduces, for the same systems",
    "buffer": "bytes that a step of each phase moves to the device, beside a padded buffer, and its program's memory",
    "pages": "a step on a CPU with large memory pages, beside one with small pages",
    "data": "rows per second of the loader, beside Grain's own fixed batches",
    "plan": "look-ups and a resume at step 10^9 beside MaxText's manager, and the host's work in a training step",
    "scale": "a step in 1, 2 and 4 processes, and plans for up to 65,536 devices and 10,000 phases",
    "pipeline": "a pipelined gradient: ours, GPipe's order and MaxText's module on identical layers, and the chooser's regret",
    "packing": "microbatches by token budget and balanced parts, beside veRL's algorithm",
}


def bench(name: str) -> Callable[..., BenchResult]:
    """Return the function that runs a benchmark: `run(*, quick=False) -> BenchResult`.

    Raises:
        ConfigError: there is no such benchmark.
    """
    if name not in BENCHES:
        raise ConfigError(f"unknown benchmark {name!r}; choose from {', '.join(BENCHES)}", key="bench", nearest=tuple(BENCHES))
    run: Callable[..., BenchResult] = importlib.import_module(f"rampup.bench.{name}").run
    return run
