"""Tests of rampup.tune.memory_options."""

import math

import jax
import pytest
from helpers.tiny import TUNED

from rampup import Config
from rampup.tune import memory_options
from rampup.tune.memory_options import find_memory_options
from rampup.tune.programs import Programs
from rampup.tune.search import GIB, MARGIN, problem_of, tune


@pytest.mark.slow
def test_memory_options_are_ranked_and_have_the_bytes_of_their_own_programs(monkeypatch):
    """If nothing fits, options that are enough come first, then those that save most; those that compile have the bytes of
    a configuration that sets them.
    """
    monkeypatch.setattr(memory_options, "SHORT_TIMING_SECONDS", 0)
    programs, lines = Programs(Config(**TUNED), jax.devices()[:1]), []
    needs = programs.bytes(programs.size(1))
    limit = math.ceil((needs - 1) / (1 - MARGIN))
    found = tune(Config(**TUNED), memory_gib=f"{limit}/{GIB}", num_devices=1, report=lines.append)
    assert "trying remat_policy=full" in lines
    assert (found["largest_microbatch"], found["settings"]) == (None, None)
    problem, by_name = problem_of(found), {option["name"]: option for option in found["levers"]}
    assert f"microbatch_size=1 needs {needs:,} bytes" in str(problem)
    assert "optimizer_memory_host_offload" in str(problem)
    assert problem.key == "microbatch_size"
    fits = [option["fits"] for option in found["levers"]]
    assert fits == sorted(fits, reverse=True)
    for option in found["levers"]:
        assert option["saved_bytes"] > 0
        assert option["bytes"] == needs - option["saved_bytes"]
        assert option["fits"] == (option["bytes"] <= found["usable_bytes"])
    remat, other = by_name["remat_policy=full"], Programs(Config(**TUNED | {"remat_policy": "full"}), jax.devices()[:1])
    assert remat["bytes"] == other.bytes(other.size(1))
    assert remat["slowdown"] > 0
    assert remat["compiled"]
    # Adam's two moments are each as large as the parameters, and its counters are two int32.
    offloaded = by_name["optimizer_memory_host_offload"]
    assert offloaded["saved_bytes"] == 2 * by_name["parameter_memory_host_offload"]["saved_bytes"] + 8
    (smaller,) = (
        each for each in find_memory_options(programs, programs.size(2), math.inf, print) if "smaller" in each["name"]
    )
    assert (smaller["settings"], smaller["bytes"]) == ({"microbatch_size": 1}, needs)
