"""Tests of rampup.engine.batch."""

import numpy as np
import pytest
from helpers import toy
from hypothesis import given
from hypothesis import strategies as st

from rampup.data.batches import step_batches
from rampup.engine import batch
from rampup.engine.batch import MAX_CHUNKS, MAX_WHOLE, layout_of, put_batch
from rampup.plan import BatchRamp, BatchSplitter, RampPlan


@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.sampled_from([None, 1, 5]),
    st.integers(1, MAX_WHOLE),
)
def test_layout_holds_every_phase_and_wastes_less_than_a_chunk(
    d, factors, chunk_size, size
):
    """Every phase's microbatches fit, in at most `MAX_CHUNKS` chunks by default or one
    if they are small.
    """
    plan = RampPlan(
        ramp=BatchRamp.piecewise(
            [(n * 10**6, d * factor) for n, factor in enumerate(factors)]
        ),
        splitter=BatchSplitter(data_parallel_size=d, microbatch_size=1),
        num_devices=d,
        total_steps=1,
    )
    layout = layout_of(plan, plan.splits[0], size, chunk_size=chunk_size)
    assert layout.num_rows == d
    assert chunk_size in (None, layout.chunk_size)
    most = max(split.num_microbatches for split in plan.splits)
    if chunk_size is None:
        assert layout.num_chunks <= (1 if most * d * size <= MAX_WHOLE else MAX_CHUNKS)
    for split in plan.splits if layout.num_chunks > 1 else ():
        filled = -(-split.num_microbatches // layout.chunk_size)
        assert filled <= layout.num_chunks
        assert (
            0 <= filled * layout.chunk_size - split.num_microbatches < layout.chunk_size
        )


def test_a_large_buffer_transfers_only_the_rows_of_early_phases(monkeypatch):
    """A phase with a third of the microbatches fills a third of the chunks, and a small
    buffer is one chunk.
    """
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, microbatch_size=2)
    assert all(
        found.layout.num_chunks == 1 for found in step_batches(range(400), plan, mesh)
    )
    monkeypatch.setattr(batch, "MAX_WHOLE", 47)
    for found in step_batches(range(400), plan, mesh):
        moved = len(found.chunks) * found.layout.chunk_size * 2
        assert (
            0
            <= moved - found.position.split.global_batch_size
            < found.layout.chunk_size * 2
        )
        assert found.layout.num_chunks == 8


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
@pytest.mark.parametrize("limit", [0, MAX_WHOLE])
def test_put_batch_keeps_rows_in_order_and_pads_with_zeros(name, limit, monkeypatch):
    """In one chunk or in several, on one device or sharded, the rows are the given
    ones, and what follows them is zero.
    """
    monkeypatch.setattr(batch, "MAX_WHOLE", limit)
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh, "0:16 64:80")
    rows = {"x": np.arange(32.0).reshape(16, 2), "id": np.arange(16)}
    split = plan.splits[0]
    batch_nR = {
        key: x.reshape(split.num_microbatches, -1, *x.shape[1:])
        for key, x in rows.items()
    }
    found = put_batch(batch_nR, plan.position(0), plan, mesh)
    assert len(found.chunks) == -(-split.num_microbatches // found.layout.chunk_size)
    for key, x in rows.items():
        held = np.concatenate(
            [np.asarray(chunk[key]) for chunk in found.chunks]
        ).reshape(-1, *x.shape[1:])
        np.testing.assert_array_equal(held[:16], x)
        assert not held[16:].any()
