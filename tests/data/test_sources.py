"""Tests of rampup.data.sources."""

import numpy as np
import pytest
from helpers.toy import all_tokens, open_rows

from rampup.data.sources import TokenRows, as_source


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 8, 9, 10])
def test_token_rows_have_every_token_as_target_once(number):
    """Rows cover an array without loss: every token but the last is an input once, every token but the first a target."""
    source = TokenRows([np.arange(number)], ["array"], sequence_length=4, vocab_size=100)
    assert all_tokens(source) == (list(range(number - 1)), list(range(1, number)))


def test_token_rows_do_not_cross_arrays():
    """Each file has rows of its own, which name it."""
    source = TokenRows([np.arange(6), np.arange(50, 53)], ["one", "two"], sequence_length=4, vocab_size=100)
    assert source.read(np.array([2]))["tokens"].tolist() == [[50, 51, 52, 0, 0]]
    assert [source.describe(row) for row in range(3)] == [
        "one from token 0 (row 0)",
        "one from token 4 (row 1)",
        "two from token 0 (row 2)",
    ]


def test_synthetic_rows_follow_from_their_number():
    """Row n is the same every time, whatever it is read with, and other rows are held out. A source is taken as it is."""
    rows, held_out = open_rows("synthetic")
    assert (rows.read(np.array([3, 9]))["tokens"][1] == rows.read(np.array([9]))["tokens"][0]).all()
    assert not (rows.read(np.array([0]))["tokens"] == held_out.read(np.array([0]))["tokens"]).all()
    assert as_source(rows) is rows
    assert as_source([{"a": (1, 2)}, {"a": (3, 4)}]).read(np.array([1]))["a"][1].tolist() == [4]
