"""Results that several tests of the benchmarks look at."""

import functools
import importlib
import importlib.metadata

import optax
import pytest

# The benchmarks compare with `optax.microbatching`, which the oldest supported Optax
# does not have.
collect_ignore_glob = [] if hasattr(optax, "microbatching") else ["test_*.py"]

# Benchmark -> its file and function.
BENCHES = {
    name: (name, "run")
    for name in (
        "ramp",
        "accumulate",
        "small",
        "pages",
        "data",
        "plan",
        "scale",
        "pipeline",
    )
}
BENCHES |= {
    "transition": ("ramp", "run_transition"),
    "noise": ("accumulate", "run_noise"),
    "buffer": ("data", "run_buffer"),
}


@functools.cache
def _run(name):
    module, function = BENCHES[name]
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        if name == "pipeline":  # the same table, whether MaxText is installed or not
            patch.setattr(importlib.metadata, "version", raise_not_found)
        run = getattr(importlib.import_module(module), function)
        result = run(
            quick=True, on_row=lambda row, done, total: rows.append((row, done, total))
        )
    return result, rows


def raise_not_found(name):
    """Report that a distribution is not installed."""
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture(params=BENCHES)
def bench_run(request):
    """Return the result of each benchmark in turn, and the calls of `on_row` in its
    run.
    """
    return request.param, *_run(request.param)


@pytest.fixture
def quick():
    """Return a function that runs a benchmark at its smallest size, once per
    process.
    """
    return lambda name: _run(name)[0]
