"""Results that several tests of the benchmarks look at."""

import functools
import importlib.metadata

import pytest

from rampup.bench import bench


@functools.cache
def _run(name):
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        if name == "pipeline":  # the same table, whether MaxText is installed or not
            patch.setattr(importlib.metadata, "version", raise_not_found)
        result = bench(name)(quick=True, on_row=lambda row, done, total: rows.append((row, done, total)))
    return result, rows


def raise_not_found(name):
    """Report that a distribution is not installed."""
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture
def quick():
    """Return a function that runs a benchmark at its smallest size, once per process."""
    return lambda name: _run(name)[0]


@pytest.fixture
def quick_rows():
    """Return a function from a benchmark to the calls of `on_row` in that run."""
    return lambda name: _run(name)[1]
