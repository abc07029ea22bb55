"""Tests of rampup.bench.accumulate: what the programs are, not how fast."""

import jax
import numpy as np
import pytest

from rampup.bench import accumulate
from rampup.bench.accumulate import PLAIN, RAMPUP, REDUCING_DEVICES, SYSTEMS, TUNED, build, run
from rampup.bench.contenders import MICROBATCHING, MULTI_STEPS, QUICK
from rampup.bench.measure import Seconds
from rampup.run.mesh import make_mesh


@pytest.fixture(scope="module")
def result():
    """Return the quick benchmark of two microbatches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulate, "QUICK_COUNTS", (2,))
        return run(quick=True)


def test_ours_reduces_once_whatever_k_is(result):
    """The bytes reduced in a step of ours are those of one gradient and none in a loop; the peers' grow with k."""
    gradient = 4 * QUICK.model.num_parameters
    of = {row["system"]: row for row in result.rows}
    assert set(of) == set(SYSTEMS)
    assert of[RAMPUP]["in_loops"] == 0
    assert gradient <= of[RAMPUP]["reduced_bytes"] < gradient + 64
    for name in (MULTI_STEPS, MICROBATCHING):
        assert of[name]["reduced_bytes"] >= 2 * gradient
    assert of[MICROBATCHING]["in_loops"] > 0
    single = build(RAMPUP, QUICK, 1, make_mesh(devices=jax.devices()[:REDUCING_DEVICES])).reductions(1)
    assert (single.number, single.num_bytes) == (of[RAMPUP]["all_reduces"], of[RAMPUP]["reduced_bytes"])


def test_one_microbatch_costs_no_pass_over_the_gradients():
    """On one device ours moves what the hand-written step moves: no gradient is divided after it is there."""
    mesh, gradient = make_mesh(devices=jax.devices()[:1]), 4 * QUICK.model.num_parameters
    ours, plain = (build(name, QUICK, 1, mesh).executable.cost_analysis()["bytes accessed"] for name in (RAMPUP, PLAIN))
    assert ours < plain + gradient


def test_every_row_is_complete(result):
    """Times are positive, one system is the fastest, and the hand-written step is one times itself."""
    assert min(row["over_fastest"] for row in result.rows) == 1
    assert next(row["over_plain"] for row in result.rows if row["system"] == PLAIN) == 1
    assert all(row["step_ms"] > 0 and row["temp_bytes"] > 0 for row in result.rows)
    assert {tuple(row) for row in result.rows} == {result.columns}


def test_tuned_takes_the_cut_that_was_fastest(monkeypatch):
    """Of one, two and four microbatches of the same 8 rows it takes the one that took the least time, here two."""
    asked = []

    def turns(candidates, *, rounds):
        asked.append(sorted(candidates))
        return {name: Seconds(all=(abs(int(name) - 2.0),) * rounds) for name in candidates}

    monkeypatch.setattr(accumulate, "take_turns", turns)
    mesh = make_mesh(devices=jax.devices()[:1])
    problem, k = accumulate.fastest_split(QUICK, 4, mesh)
    assert (problem.rows, k) == (2 * QUICK.rows, 2)
    assert asked == [["1", "2", "4"]]
    trained = [build(name, *cut, mesh).step() for name, cut in ((TUNED, (problem, k)), (RAMPUP, (QUICK, 4)))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *trained)


def test_without_devices_to_reduce_over_it_says_so(monkeypatch):
    """On one device no all-reduce is counted and a note says why."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(accumulate, "QUICK_COUNTS", (1,))
    monkeypatch.setattr(accumulate, "SYSTEMS", (RAMPUP, PLAIN))
    result = run(quick=True)
    assert all(row["all_reduces"] is None for row in result.rows)
    assert "fewer than 4 devices" in result.notes[-1]


def test_all_systems_train_alike():
    """After three steps on the same rows the hand-written step and optax.microbatching have our parameters."""
    mesh = make_mesh(devices=jax.devices()[:1])
    trained = {}
    for name in (RAMPUP, PLAIN, MICROBATCHING):
        system = build(name, QUICK, 2, mesh)
        trained[name] = [system.step() for _ in range(3)][-1]
    for name in (PLAIN, MICROBATCHING):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), trained[name], trained[RAMPUP])
