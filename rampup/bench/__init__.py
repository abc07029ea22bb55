"""What `rampup bench` measures, each beside its peer in one run."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from rampup.bench.result import BenchResult
from rampup.errors import ConfigError

# Name -> what is measured, in a line; the module of the same name has `run`.
BENCHES = {
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
