"""Tests of rampup.run.checkpoint."""

import jax
import numpy as np
import optax
import pytest
from helpers import toy

from rampup.errors import ResumeMismatchError
from rampup.run import checkpoint
from rampup.run.checkpoint import Checkpoints
from rampup.run.data.batches import step_batches
from rampup.run.step import create_state, train_step


def assert_equal(a, b):
    """Assert that two states are the same, bit for bit, and lie on the devices in the same way."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, a, b)))


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
def test_what_is_saved_is_the_state_at_that_moment(tmp_path, name):
    """A checkpoint written in the background while training goes on holds the state of its own step."""
    mesh = toy.mesh_of(name)
    plan, tx = toy.plan_for(mesh, steps=6), optax.adamw(1e-2)
    step = train_step(toy.loss_fn, tx, plan, mesh)
    state = create_state(toy.new_params(mesh), tx, mesh)
    kept = {}
    with Checkpoints(tmp_path) as checkpoints:
        for batch in step_batches(toy.rows(), plan, mesh):
            state, _ = step(state, batch)
            done = batch.position.step + 1
            kept[done] = jax.tree.map(np.array, jax.device_get(state))
            checkpoints.save(done, state, {"a": 1})
        checkpoints.wait()
        fresh = create_state(toy.new_params(mesh), tx, mesh)
        restored, found = checkpoints.restore(fresh, lambda record: None)
    assert found == 6
    assert_equal(restored, state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), kept[6])


def test_only_the_newest_are_kept(tmp_path):
    """Older checkpoints are deleted beyond the number to keep, and saving a step twice is no error."""
    mesh = toy.mesh_of("one")
    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)
    with Checkpoints(tmp_path, keep=2, asynchronous=False) as checkpoints:
        assert checkpoints.latest is None
        assert checkpoints.restore(state, lambda record: None) is None
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert checkpoints.latest == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_a_record_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    """What `check` says of the record reaches the caller, and a record of another format is refused."""
    mesh = toy.mesh_of("one")
    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)

    def refuse(record):
        raise ResumeMismatchError(f"{record['step']} {record['who']}")

    with Checkpoints(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(4, state, {"who": "me"})
        with pytest.raises(ResumeMismatchError, match="4 me"):
            checkpoints.restore(state, refuse)
        monkeypatch.setattr(checkpoint, "RECORD_VERSION", 99)
        with pytest.raises(ResumeMismatchError, match="format 1, this is format 99"):
            checkpoints.restore(state, lambda record: None)
