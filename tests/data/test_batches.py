"""Tests of rampup.data.batches."""

import threading
import warnings
from collections import Counter
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from helpers import toy
from hypothesis import given
from hypothesis import strategies as st

from rampup.data.batches import (
    BatchLoader,
    SampleOrder,
    microbatches,
    step_batches,
)
from rampup.data.sources import ItemRows
from rampup.errors import DataWarning
from rampup.plan import BatchRamp, BatchSplitter, RampPlan


def ids(batch):
    """Return the rows of a batch, in the order of its samples."""
    held = np.concatenate([np.asarray(chunk) for chunk in batch.chunks])
    return held[: batch.num_microbatches].ravel().tolist()


@pytest.mark.parametrize("name", [toy.slow("one"), "data_fsdp_tensor"])
@pytest.mark.parametrize("mode", ["fixed", "per_phase", "auto"])
@pytest.mark.parametrize(("seed", "number"), [(None, 7), (5, 150), (5, 60)])
def test_step_batches_reads_every_row_once_an_epoch(name, mode, seed, number):
    """Over three phases and epochs that end in a step, or many of which are in a step,
    every row is read once an epoch.
    """
    mesh = toy.mesh_of(name)
    plan = toy.plan_for(mesh, steps=25, rampup_microbatch=mode)
    order = SampleOrder(number, seed=seed)
    stream = [
        row
        for batch in step_batches(range(number), plan, mesh, seed=seed)
        for row in ids(batch)
    ]
    assert len(stream) == plan.consumed_samples > 6 * number
    assert stream == order.rows(range(plan.consumed_samples)).tolist()
    epochs = [
        stream[start : start + number]
        for start in range(0, len(stream) - number, number)
    ]
    assert all(Counter(epoch) == Counter(range(number)) for epoch in epochs)
    if seed is not None:
        assert epochs[0] != epochs[1] != sorted(epochs[1])


@pytest.mark.core
def test_step_batches_starts_anywhere_with_the_same_rows():
    """Batches from step N on are those of the full run from step N on."""
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh)
    whole = [
        (b.position.step, ids(b)) for b in step_batches(range(300), plan, mesh, seed=1)
    ]
    for start in (0, 1, 4, 5, 9, 10, 11, 12):
        part = [
            (b.position.step, ids(b))
            for b in step_batches(range(300), plan, mesh, seed=1, start=start)
        ]
        assert part == whole[start:]


def part_of_the_rows(process, count):
    """Return a `Loading` of one of several processes, without the others."""
    return SimpleNamespace(
        rows_to_read=lambda mesh, num_rows, axes: np.split(np.arange(num_rows), count)[
            process
        ]
    )


@pytest.mark.parametrize(("number", "warns"), [(15, True), (16, False)])
def test_a_batch_with_rows_more_than_once_is_warned_of(number, warns):
    """A source with fewer rows than a batch is legal, and not meant as a rule."""
    mesh = toy.mesh_of("one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DataWarning)
        found = ids(next(step_batches(range(number), toy.plan_for(mesh, "0:16"), mesh)))
    assert found == [row % number for row in range(16)]
    words = f"a step takes 16 rows, but the source has {number}"
    assert [words in str(each.message) for each in caught] == [True] * warns


@pytest.mark.core
@given(
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
)
def test_processes_share_a_batch_without_overlap(per_process, factors, num_processes):
    """However many processes read, together they read each microbatch's rows, each its
    own.
    """
    R = per_process * num_processes
    ramp = BatchRamp.piecewise(
        [(n * 100, R * factor) for n, factor in enumerate(factors)]
    )
    splitter = BatchSplitter(data_parallel_size=R, microbatch_size=1)
    plan = RampPlan(ramp=ramp, splitter=splitter, num_devices=R, total_steps=40)
    mesh = jax.sharding.AbstractMesh((R,), ("data",))
    loadings = [
        part_of_the_rows(process, num_processes) for process in range(num_processes)
    ]
    loaders = [
        BatchLoader(source=None, plan=plan, mesh=mesh, order=None, loading=own)
        for own in loadings
    ]
    for step in (0, 7, 39):
        position = plan.position(step)
        parts = [loader.samples_of(position) for loader in loaders]
        assert {part.shape for part in parts} == {
            (position.split.num_microbatches, per_process)
        }
        assert np.concatenate(parts, axis=1).ravel().tolist() == list(plan.rows(step))


@pytest.mark.core
def test_microbatches_have_one_shape():
    """Through the whole ramp, microbatches are of one shape and hold the samples in
    order.
    """
    mesh = toy.mesh_of("data")
    plan = toy.plan_for(mesh)
    seen = list(microbatches(range(1000), plan, mesh))
    assert {batch.shape for batch in seen} == {(16,)}
    assert np.concatenate(seen).tolist() == list(range(plan.consumed_samples))
    assert all(batch.sharding.is_equivalent_to(seen[0].sharding, 1) for batch in seen)


class CountedRows:
    """A source that remembers which rows were read."""

    def __init__(self, number):
        self.number, self.read = number, []

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        self.read.append(row)
        return np.int32(row)


def test_step_batches_reads_ahead_and_looks_up_each_position_once(monkeypatch):
    """When a batch is yielded, the next ones have been read; a shuffled and mapped
    MapDataset is a source of rows.
    """
    mesh = toy.mesh_of("one")
    plan, asked, position = toy.plan_for(mesh), [], RampPlan.position
    monkeypatch.setattr(
        RampPlan,
        "position",
        lambda self, step: asked.append(step) or position(self, step),
    )
    read = []
    source = (
        grain.MapDataset.range(400)
        .shuffle(seed=3)
        .map(lambda row: read.append(row) or {"x": np.int32(row)})
    )
    batches = step_batches(source, plan, mesh)
    held = np.asarray(next(batches).chunks[0]["x"])[0]
    assert len(read) >= 48
    assert held.tolist() == [int(source[n]["x"]) for n in range(16)]
    assert [batch.position.step for batch in batches] == list(range(1, 12))
    assert sorted(asked) == list(range(12))


@pytest.mark.parametrize(("inline_bytes", "reads_here"), [(0, False), (2**20, True)])
def test_few_rows_in_memory_are_read_without_a_thread(
    inline_bytes, reads_here, monkeypatch
):
    """Which thread reads a step does not change its rows."""
    mesh = toy.mesh_of("one")
    plan = toy.plan_for(mesh)
    expected = [ids(batch) for batch in step_batches(range(300), plan, mesh, seed=1)]
    readers = set()

    class Source(ItemRows):
        def read(self, rows):
            readers.add(threading.current_thread())
            return super().read(rows)

    monkeypatch.setattr("rampup.data.batches.INLINE_BYTES", inline_bytes)
    source = Source(range(300))
    found = [ids(batch) for batch in step_batches(source, plan, mesh, seed=1)]
    assert found == expected
    assert (readers == {threading.main_thread()}) == reads_here


def test_a_step_has_the_rows_of_a_process():
    """A process among several reads those of its part, microbatch by microbatch."""
    mesh = toy.mesh_of("data")
    plan, source = toy.plan_for(mesh, rampup_microbatch="per_phase"), CountedRows(1000)
    order = SampleOrder(1000, seed=None)
    loader = BatchLoader(
        source=ItemRows(source),
        plan=plan,
        mesh=mesh,
        order=order,
        loading=part_of_the_rows(1, 2),
    )
    step = loader.read_step(11)
    assert step.position == plan.position(11)
    planned = loader.samples_of(step.position)
    assert step.rows.tolist() == planned.ravel().tolist()
    assert step.numbers.tolist() == planned.ravel().tolist()
