"""Tests of rampup.run.data.batches."""

from collections import Counter

import grain
import jax
import numpy as np
import pytest
from helpers import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from rampup.errors import DataError
from rampup.plan import BatchRamp, BatchSplitter, RampPlan
from rampup.run.data.batches import SampleOrder, StepDataset, local_samples, microbatches, step_batches
from rampup.run.data.sources import ItemRows


def ids(batch):
    """Return the rows that a batch holds, in the order of its samples."""
    held = np.concatenate([np.asarray(chunk) for chunk in batch.chunks])
    return held[: batch.num_microbatches].ravel().tolist()


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
@pytest.mark.parametrize("mode", ["fixed", "per_phase", "auto"])
@pytest.mark.parametrize("seed", [None, 5])
def test_no_row_is_lost_and_none_repeated(name, mode, seed):
    """Over three phases and several epochs, with steps that straddle an epoch's end, every row is read once an epoch."""
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh, steps=25, rampup_microbatch=mode)
    number = 150
    order = SampleOrder(number, seed=seed)
    stream = [row for batch in step_batches(range(number), plan, mesh, seed=seed) for row in ids(batch)]
    assert len(stream) == plan.consumed_samples > 6 * number
    assert stream == order.rows(range(plan.consumed_samples)).tolist()
    epochs = [stream[start : start + number] for start in range(0, len(stream) - number, number)]
    assert all(Counter(epoch) == Counter(range(number)) for epoch in epochs)
    if seed is not None:
        assert epochs[0] != epochs[1] != sorted(epochs[1])


@pytest.mark.parametrize("start", [0, 1, 4, 5, 9, 10, 11, 12])
def test_any_start_gives_the_same_rows(start):
    """Batches from step N on are those of the whole run from step N on."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh)
    whole = [(b.position.step, ids(b)) for b in step_batches(range(300), plan, mesh, seed=1)]
    part = [(b.position.step, ids(b)) for b in step_batches(range(300), plan, mesh, seed=1, start=start)]
    assert part == whole[start:]
    assert [(b.position.step, ids(b)) for b in step_batches(range(300), plan, mesh, seed=1, start=plan.position(start))] == part


@settings(deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([1, 2, 4]))
def test_processes_share_the_batch_without_overlap(per_process, factors, num_processes):
    """However many processes read, together they read each microbatch's rows, each its own."""
    R = per_process * num_processes
    plan = RampPlan(
        ramp=BatchRamp.piecewise([(n * 100, R * factor) for n, factor in enumerate(factors)]),
        splitter=BatchSplitter(data_parallel_size=R, microbatch_size=1),
        num_devices=R,
        total_steps=40,
    )
    for step in (0, 7, 39):
        position = plan.position(step)
        parts = [local_samples(position, np.arange(p * per_process, (p + 1) * per_process)) for p in range(num_processes)]
        cut = [part.reshape(position.split.num_microbatches, per_process) for part in parts]
        assert np.concatenate(cut, axis=1).ravel().tolist() == list(plan.rows(step))


def test_step_dataset_is_a_grain_dataset():
    """It has a length, can be sliced, and element i is the batch of step i."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh)
    dataset = StepDataset(ItemRows(range(300)), plan, SampleOrder(300, seed=None), mesh)
    assert isinstance(dataset, grain.MapDataset)
    assert len(dataset) == 12
    assert dataset[5].ravel().tolist() == list(plan.rows(5))
    assert dataset[3:5][1].ravel().tolist() == list(plan.rows(4))


def test_early_phases_move_only_their_own_rows():
    """A phase with a third of the microbatches fills a third of the chunks."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, microbatch_size=2)
    for batch in step_batches(range(400), plan, mesh):
        moved = len(batch.chunks) * batch.layout.chunk_size * 2
        assert 0 <= moved - batch.position.split.global_batch_size < batch.layout.chunk_size * 2
        assert batch.layout.num_chunks == 8


def test_microbatches_have_one_shape():
    """Through the whole ramp, microbatches are of one shape and hold the samples in order."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh)
    seen = list(microbatches(range(1000), plan, mesh))
    assert {batch.shape for batch in seen} == {(16,)}
    assert np.concatenate(seen).tolist() == list(range(plan.consumed_samples))
    assert all(batch.sharding.is_equivalent_to(seen[0].sharding, 1) for batch in seen)


def test_a_grain_dataset_is_a_source():
    """A MapDataset of one's own, shuffled and mapped, feeds the ramp."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh, steps=3)
    source = grain.MapDataset.range(100).shuffle(seed=3).map(lambda n: {"x": np.int32(n)})
    (first, *_) = step_batches(source, plan, mesh)
    assert np.concatenate([np.asarray(c["x"]) for c in first.chunks]).ravel().tolist() == [
        int(source[n]["x"]) for n in range(16)
    ]


def test_too_few_rows_are_noticed_before_the_first_batch():
    """A bounded number of epochs that cannot feed the run is refused with the number that can."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh)
    with pytest.raises(DataError, match="num_epoch=1 of 100 rows are 100; set num_epoch=4 or -1") as caught:
        next(step_batches(range(100), plan, mesh, num_epochs=1))
    assert caught.value.nearest == (4, -1)
    assert len(list(step_batches(range(100), plan, mesh, num_epochs=4))) == 12
    with pytest.raises(DataError, match="no rows"):
        next(step_batches([], plan, mesh))


def test_a_row_that_cannot_be_read_reaches_the_caller():
    """An exception in a reading thread is a DataError that names the row."""

    class Broken:
        def __len__(self):
            return 400

        def __getitem__(self, row):
            if row == 40:
                raise OSError("disk on fire")
            return np.int32(row)

    mesh = toy.mesh_of("one")
    batches = step_batches(Broken(), toy.plan_for(mesh), mesh)
    with pytest.raises(DataError, match=r"row 40 .*disk on fire"):
        list(batches)


def test_order_without_seed_is_the_sources():
    """Without a seed, samples are the source's rows, round and round."""
    assert SampleOrder(3, seed=None).rows(range(8)).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_shuffling_more_rows_than_it_can_is_refused():
    """The shuffle's limit is said, with the way out."""
    with pytest.raises(DataError, match="enable_data_shuffling=false"):
        SampleOrder(2**32, seed=0)


def test_batches_are_put_ahead_of_use():
    """When a batch is handed out, the next ones have been read."""
    read = []

    class Watched:
        def __len__(self):
            return 400

        def __getitem__(self, row):
            read.append(row)
            return np.int32(row)

    mesh = toy.mesh_of("one")
    batches = step_batches(Watched(), toy.plan_for(mesh), mesh)
    next(batches)
    assert max(read) >= 47
    jax.block_until_ready(next(batches).chunks)
