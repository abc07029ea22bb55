"""Tests of benchmarks/accumulate.py: what the programs are, not how fast."""

import accumulate
import jax
import numpy as np
import pytest
from accumulate import PLAIN, RAMPUP, REDUCING_DEVICES, SYSTEMS, TUNED, build
from contenders import MICROBATCHING, MULTI_STEPS, QUICK
from measure import Seconds

from rampup.engine.mesh import make_mesh


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_rampup_reduces_once_for_any_number_of_microbatches(k):
    """A step reduces the bytes of one gradient, and none in a loop."""
    gradient = 4 * QUICK.model.num_parameters
    found = build(
        RAMPUP, QUICK, k, make_mesh(devices=jax.devices()[:REDUCING_DEVICES])
    ).reductions(k)
    assert found.in_loops == 0
    assert gradient <= found.num_bytes < gradient + 64


@pytest.mark.bench
def test_baselines_reduce_once_per_microbatch(quick):
    """The bytes that the other systems reduce grow with k."""
    gradient = 4 * QUICK.model.num_parameters
    rows = {row["system"]: row for row in quick("accumulate").rows if row["k"] == 2}
    assert set(rows) == set(SYSTEMS)
    for name in (MULTI_STEPS, MICROBATCHING):
        assert rows[name]["reduced_bytes"] >= 2 * gradient
    assert rows[MICROBATCHING]["in_loops"] > 0


@pytest.mark.bench
def test_rampup_accesses_the_gradients_once_more_for_one_microbatch():
    """On one device it accesses the bytes of the hand-written step, and reads and writes
    the gradients once more to divide their sum by the weight.
    """
    mesh, gradient = (
        make_mesh(devices=jax.devices()[:1]),
        4 * QUICK.model.num_parameters,
    )
    rampup, plain = (
        build(name, QUICK, 1, mesh).executable.cost_analysis()["bytes accessed"]
        for name in (RAMPUP, PLAIN)
    )
    assert rampup < plain + 2 * gradient


@pytest.mark.bench
def test_fastest_split_takes_the_least_time(monkeypatch):
    """Of one, two and four microbatches of the same 8 rows it takes the fastest, here
    two.
    """
    seen = []

    def turns(candidates, *, rounds):
        seen.append(sorted(candidates))
        return {
            name: Seconds(all=(abs(int(name) - 2.0),) * rounds) for name in candidates
        }

    monkeypatch.setattr(accumulate, "take_turns", turns)
    mesh = make_mesh(devices=jax.devices()[:1])
    problem, k = accumulate.fastest_split(QUICK, 4, mesh)
    assert (problem.rows, k) == (2 * QUICK.rows, 2)
    assert seen == [["1", "2", "4"]]
    trained = [
        build(name, *cut, mesh).step()
        for name, cut in ((TUNED, (problem, k)), (RAMPUP, (QUICK, 4)))
    ]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *trained
    )


@pytest.mark.bench
def test_systems_reach_the_same_parameters():
    """After three steps on the same rows, rampup, the hand-written step and
    optax.microbatching have the same parameters.
    """
    systems = [
        build(name, QUICK, 2, make_mesh(devices=jax.devices()[:1]))
        for name in (RAMPUP, PLAIN, MICROBATCHING)
    ]
    ours, *others = ([system.step() for _ in range(3)][-1] for system in systems)
    for theirs in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
            theirs,
            ours,
        )
