"""Tests of rampup.run.data.buffer."""

from hypothesis import given
from hypothesis import strategies as st

from rampup.plan.split import BatchSplitter
from rampup.run.data.buffer import buffer_layout


@given(st.integers(1, 4), st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 16))
def test_layout_holds_every_phase_and_wastes_less_than_a_chunk(d, factors, max_chunks):
    """Every phase's microbatches fit, in at most the chunks allowed, and its last chunk is not empty."""
    splits = BatchSplitter(data_parallel_size=d, microbatch_size=1).split([d * factor for factor in factors])
    layout = buffer_layout(splits[0], max(split.num_microbatches for split in splits), max_chunks=max_chunks)
    assert layout.rows == d
    assert layout.num_chunks <= max_chunks
    for split in splits:
        filled = layout.chunks_for(split.num_microbatches)
        assert filled <= layout.num_chunks
        assert 0 <= filled * layout.chunk_size - split.num_microbatches < layout.chunk_size
