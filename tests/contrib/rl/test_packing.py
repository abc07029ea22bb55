"""Tests of rampup.contrib.rl.packing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rampup.contrib.rl.packing import packed_rows

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=40)


@given(lengths=LENGTHS, more=st.integers(0, 30), replicas=st.integers(1, 4))
def test_every_token_is_in_one_place_of_one_pass(lengths, more, replicas):
    """Nothing is lost, cut or mixed: each segment is one sample, from its first token
    to its last, with positions from 0; all else is padding.
    """
    budget = max(lengths) + more
    # A token is the number of its sample and its place.
    tokens = np.zeros((len(lengths), 20), np.int32)
    for number, length in enumerate(lengths):
        tokens[number, :length] = 100 * (number + 1) + np.arange(length)
    rows = {"tokens": tokens, "weights": tokens / 2}
    packed = packed_rows(rows, lengths, token_budget=budget, num_replicas=replicas)
    assert {x.shape[1:] for x in packed.values()} == {(replicas, budget)}
    assert (packed["weights"] == packed["tokens"] / 2).all()
    assert ((packed["segments"] == 0) == (packed["tokens"] == 0)).all()
    found = []
    for row, segments, positions in zip(
        *(
            packed[name].reshape(-1, budget)
            for name in ("tokens", "segments", "positions")
        ),
        strict=True,
    ):
        for segment in range(1, segments.max() + 1):
            sample = row[segments == segment]
            assert (sample == sample[0] + np.arange(len(sample))).all()
            assert (positions[segments == segment] == np.arange(len(sample))).all()
            found.append((sample[0] // 100 - 1, len(sample)))
    assert sorted(found) == list(enumerate(lengths))


@given(lengths=LENGTHS, times=st.integers(1, 4), replicas=st.integers(1, 4))
def test_passes_are_no_more_than_a_plan_has_room_for(lengths, times, replicas):
    """A plan has room for the passes of samples that all have the maximum length."""
    longest = max(lengths)
    packed = packed_rows(
        {"tokens": np.ones((len(lengths), longest), np.int32)},
        lengths,
        token_budget=times * longest,
        num_replicas=replicas,
    )
    rows = -(-len(lengths) // times)
    assert len(packed["tokens"]) <= -(-rows // replicas)
