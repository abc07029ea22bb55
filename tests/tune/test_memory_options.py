"""Tests of rampup.tune.memory_options."""

import math

import jax
import pytest
from helpers.tiny import TUNED

from rampup import Config
from rampup.tune import memory_options
from rampup.tune.memory_options import find_memory_options
from rampup.tune.programs import Programs


@pytest.mark.slow
def test_memory_option_has_the_bytes_of_its_own_program(monkeypatch):
    """The bytes of `remat_policy=full` are those of a configuration that sets it."""
    monkeypatch.setattr(memory_options, "SHORT_TIMING_SECONDS", 0)
    programs, lines = Programs(Config(**TUNED), jax.devices()[:1]), []
    size = programs.size(1)  # which the tests of `tune` compile too
    options = find_memory_options(programs, size, math.inf, lines.append)
    by_name = {option["name"]: option for option in options}
    remat = by_name["remat_policy=full"]
    other = Programs(Config(**TUNED | {"remat_policy": "full"}), jax.devices()[:1])
    assert remat["bytes"] == other.bytes(other.size(1)) < programs.bytes(size)
    assert remat["slowdown"] > 0
    assert remat["compiled"]
    offloaded = by_name["optimizer_memory_host_offload"]
    # Adam's two moments are each as large as the parameters, and its counters are two int32.
    assert offloaded["saved_bytes"] == 2 * by_name["parameter_memory_host_offload"]["saved_bytes"] + 8
    assert "trying remat_policy=full" in lines
