"""Tests of rampup.run.nonfinite; what it does to a run is in tests/faults."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rampup.run.nonfinite import all_finite, chosen, zero_unless


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_every_leaf_counts(bad):
    """One bad number anywhere is seen; integers and nothing at all are finite."""
    assert all_finite({"a": jnp.ones(3)}, jnp.int32(2), None)
    assert all_finite()
    assert not all_finite({"a": jnp.ones(3)}, [jnp.array([1.0, bad])])
    assert not all_finite(jnp.array([bad], jnp.bfloat16))


def test_zeros_are_clean():
    """What is zeroed keeps nothing of what it was."""
    np.testing.assert_array_equal(zero_unless(jnp.array(False), jnp.array([np.nan, 1.0])), [0, 0])
    np.testing.assert_array_equal(zero_unless(jnp.array(True), jnp.array([2.0, 1.0])), [2, 1])


def test_only_what_counts_steps_moves_on():
    """Of the old and the new state, the old is taken but for the counts of schedules."""
    tx = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: 1.0))
    old = tx.init(jnp.ones(2))
    _, new = tx.update(jnp.ones(2), old)
    kept = chosen(jnp.array(False), new, old)
    assert (int(kept[0].count), int(kept[1].count)) == (0, 1)
    np.testing.assert_array_equal(kept[0].mu, old[0].mu)
    np.testing.assert_array_equal(chosen(jnp.array(True), new, old)[0].mu, new[0].mu)
