"""Tests of rampup.bench.accumulate: what the programs are, not how fast."""

import jax
import numpy as np
import pytest

from rampup.bench import accumulate
from rampup.bench.accumulate import OURS, PLAIN, SYSTEMS, run
from rampup.bench.contenders import MICROBATCHING, MULTI_STEPS
from rampup.bench.problem import QUICK
from rampup.run.mesh import make_mesh


@pytest.fixture(scope="module")
def result():
    """Return the quick benchmark."""
    return run(quick=True)


def test_ours_reduces_once_whatever_k_is(result):
    """The bytes reduced in a step of ours are those of one gradient and none in a loop; the peers' grow with k."""
    gradient = 4 * QUICK.model.num_parameters
    of = {(row["system"], row["k"]): row for row in result.rows}
    assert set(of) == {(name, k) for name in SYSTEMS for k in (1, 2)}
    for k in (1, 2):
        assert of[OURS, k]["in_loops"] == 0
        assert gradient <= of[OURS, k]["reduced_bytes"] < gradient + 64
        for name in (MULTI_STEPS, MICROBATCHING):
            assert of[name, k]["reduced_bytes"] >= k * gradient
    assert of[MICROBATCHING, 2]["in_loops"] > 0
    assert of[OURS, 2]["all_reduces"] == of[OURS, 1]["all_reduces"]


def test_every_row_is_complete(result):
    """Times are positive, one system a k is the fastest, and the hand-written step is one times itself."""
    for k in (1, 2):
        rows = [row for row in result.rows if row["k"] == k]
        assert min(row["over_fastest"] for row in rows) == 1
        assert next(row["over_plain"] for row in rows if row["system"] == PLAIN) == 1
        assert all(row["step_ms"] > 0 and row["temp_bytes"] > 0 for row in rows)
    assert {tuple(row) for row in result.rows} == {result.columns}


def test_without_devices_to_reduce_over_it_says_so(monkeypatch):
    """On one device no all-reduce is counted and a note says why."""
    devices = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(accumulate, "QUICK_COUNTS", (1,))
    result = run(quick=True)
    assert all(row["all_reduces"] is None for row in result.rows)
    assert "fewer than 4 devices" in result.notes[-1]


def test_all_systems_train_alike():
    """After three steps on the same rows the hand-written step and optax.microbatching have our parameters."""
    mesh = make_mesh(devices=jax.devices()[:1])
    trained = {}
    for name in (OURS, PLAIN, MICROBATCHING):
        system = SYSTEMS[name](QUICK, 2, mesh)
        trained[name] = [system.step() for _ in range(3)][-1]
    for name in (PLAIN, MICROBATCHING):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), trained[name], trained[OURS])
