"""What a loss carries from microbatch to microbatch changes more often than in a step by
hand, which a warning says.
"""

import warnings

import jax.numpy as jnp
import pytest
from helpers.toy import loss_fn, rows, start

WORDS = "once per microbatch, up to 4 times in a step"


def averaging(params, batch, keys, mutable):
    """The loss of `helpers.toy`, with a running average."""
    average = 0.9 * mutable["average"] + 0.1 * jnp.mean(batch["x"])
    new = {"average": average, "n": mutable["n"] + 1}
    return *loss_fn(params, batch, keys), new


def run(microbatch_size, mutable, loss=averaging):
    """Return the state after two steps of 16 rows."""
    step, state = start(
        "one", loss, mutable=mutable, microbatch_size=microbatch_size, steps=2
    )
    for batch in step.batches(rows()):
        state, _ = step(state, batch)
    return state


def test_a_running_average_is_warned_of_once():
    """Of several microbatches; the state then changes as many times."""
    start_value = {"average": jnp.float32(1), "n": jnp.int32(0)}
    with pytest.warns(RuntimeWarning, match=WORDS) as caught:
        state = run(4, start_value)
    assert sum("once per microbatch" in str(w.message) for w in caught) == 1
    assert int(state.mutable["n"]) == 8


@pytest.mark.parametrize(("size", "kind"), [(16, "average"), (4, "count")])
def test_what_changes_as_by_hand_is_not_warned_of(size, kind):
    """One microbatch is a step by hand, and a counter says what it counts."""

    def counting(params, batch, keys, mutable):
        return *loss_fn(params, batch, keys), {"n": mutable["n"] + 1}

    given = {"average": jnp.float32(1), "n": jnp.int32(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if kind == "average":
            run(size, given)
        else:
            run(size, {"n": jnp.int32(0)}, counting)
