"""Tests of how a loop goes on: data that end, a ramp that changes, more devices, and
records that are damaged.
"""

import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import optax
import pytest
from helpers import toy

import rampup
from rampup.errors import (
    DataEndedError,
    DataError,
    ResumeMismatchError,
    ResumeWarning,
    StorageError,
)
from rampup.loop import Component, find_checkpoint, ramp_to_continue
from rampup.loop.checkpoint import write_checksums
from rampup.loop.metrics import MetricOptions, Metrics

ROWS = [{"n": np.int32(n), "x": np.float32(n % 7)} for n in range(48)]


def run(
    folder,
    batches=None,
    *,
    ramp="0:8",
    steps=10,
    mesh="one",
    period=3,
    stop=None,
    identity=None,
):
    """Run or resume a loop, with the batches that a function makes of (step, start);
    return the summary and the rows that were read.
    """
    mesh, tx, read = toy.mesh_of(mesh), optax.sgd(0.1), []
    ramp = rampup.BatchRamp.from_schedule(ramp) if isinstance(ramp, str) else ramp
    plan = rampup.RampPlan(
        ramp=ramp,
        splitter=rampup.BatchSplitter(data_parallel_size=mesh.shape["data"]),
        num_devices=mesh.size,
        total_steps=steps,
    )

    def loss_fn(params, batch, keys):
        errors = (params["w"] - batch["x"]) ** 2
        return errors.sum(), errors.size, {}

    step = rampup.train_step(loss_fn, tx, plan, mesh)

    def noted(start):
        found = step.batches(ROWS, start) if batches is None else batches(step, start)
        for batch in found:
            read.extend(np.ravel(batch.chunks[0]["n"]).tolist())
            yield batch

    calls = iter(range(1000))
    loop = rampup.Loop(
        plan=plan,
        step=step,
        batches=noted,
        folder=folder,
        checkpoints=rampup.CheckpointOptions(
            checkpoint_period=period, identity=identity or {}
        ),
    )
    state = rampup.create_state({"w": np.float32(0)}, tx, mesh)
    _, summary = loop.run(state, should_stop=lambda: next(calls) == stop)
    return summary, read


ENDINGS = {
    "a stream at a step": lambda step, start: step.stream(iter(ROWS), start),
    "a stream inside a step": lambda step, start: step.stream(iter(ROWS[:-2]), start),
    "the remainder dropped": lambda step, start: step.stream(
        iter(ROWS), start, drop_remainder=True
    ),
    "a generator": lambda step, start: (
        batch for batch in step.batches(ROWS, start, stop=6)
    ),
}


@pytest.mark.parametrize("batches", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize("period", [3, 4])
def test_a_loop_whose_data_end_says_so_and_takes_no_row_twice(
    tmp_path, batches, period
):
    """The steps before the end are saved. Another start reads nothing, a plan of as
    many steps is finished, and new rows go on after the file is deleted.
    """
    with pytest.raises(DataEndedError, match="ended after"):
        run(tmp_path, batches, period=period)
    done = max(int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]"))
    assert done in (5, 6)
    with pytest.raises(DataEndedError, match=rf"ended after step {done} of 10.*delete"):
        run(tmp_path, batches, period=period)
    summary, read = run(tmp_path, batches, steps=done)
    assert (summary.steps, summary.interrupted, read) == (done, False, [])
    (tmp_path / "data_ended.json").unlink()
    new = {"n": np.int32(99), "x": np.float32(1)}
    summary, read = run(
        tmp_path, lambda step, start: step.stream(iter([new] * 99), start)
    )
    assert (summary.steps, set(read)) == (10, {99})


def test_data_that_ended_after_the_newest_checkpoint(tmp_path):
    """As among several processes, which save nothing where the data end: the error
    names the step of the end, and a plan of as many steps goes on.
    """
    batches = ENDINGS["a generator"]
    with pytest.raises(DataEndedError):
        run(tmp_path, batches, period=4)
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    with pytest.raises(
        DataEndedError, match=r"after step 6 of 10.* a plan of total_steps=6"
    ):
        run(tmp_path, batches, period=4)
    summary, read = run(tmp_path, batches, steps=6)
    assert (summary.resumed_from, summary.steps) == (4, 6)
    assert read == list(range(32, 48))
    with pytest.raises(DataEndedError, match="after step 6 of 10"):
        run(tmp_path, batches)


def test_a_damaged_note_of_the_end_refuses_too(tmp_path):
    """Nothing starts over only because the file cannot be read."""
    with pytest.raises(DataEndedError):
        run(tmp_path, ENDINGS["a generator"])
    (tmp_path / "data_ended.json").write_text("[")
    with pytest.raises(DataEndedError, match="after step 6 of 10"):
        run(tmp_path, ENDINGS["a generator"])


@pytest.mark.parametrize("mesh", ["one", "data"])
def test_a_loop_of_ones_own_goes_on_with_another_ramp(tmp_path, mesh):
    """Its plan is made with the ramp of the checkpoint and the new sizes, also on more
    devices than the first batches can be split for.
    """
    ramp = rampup.BatchRamp.from_schedule("0:2 4:4")
    assert ramp_to_continue(tmp_path, ramp) == ramp
    run(tmp_path, ramp=ramp, stop=5)
    other = rampup.BatchRamp.from_schedule("0:2 16:8")
    with pytest.raises(ResumeMismatchError, match="ramp_to_continue"):
        run(tmp_path, ramp=other)
    with pytest.warns(ResumeWarning, match="batch_scaling_reference .* is 4"):
        continued = ramp_to_continue(tmp_path, other)
    assert continued.to_rows() == [[0, 0, 2], [2, 4, 4], [5, 16, 8]]
    summary, read = run(tmp_path, ramp=continued, mesh=mesh, steps=7)
    assert (summary.resumed_from, summary.steps) == (5, 7)
    assert read[:16] == list(range(16, 32))
    assert summary.consumed_samples == 16 + 2 * 8


def test_a_ramp_of_other_devices_names_them(tmp_path):
    """A loop whose batches come from the number of its devices is refused on others,
    with both numbers; on the same ones, none is named.
    """
    run(tmp_path, ramp="0:2", stop=5)
    with pytest.raises(
        ResumeMismatchError, match="a run on num_devices=1 and not on 8"
    ) as caught:
        run(tmp_path, ramp="0:8", mesh="data")
    assert "folder of a Loop" in str(caught.value)
    with pytest.raises(ResumeMismatchError) as caught:
        run(tmp_path, ramp="0:8")
    assert "num_devices" not in str(caught.value)


def test_a_ramp_that_goes_on_has_the_steps_that_were_done(tmp_path):
    """A ramp that is resumed at a step, but had other batches before it, is refused."""
    run(tmp_path, ramp="0:2 4:4", stop=5)
    other = rampup.BatchRamp.from_schedule("0:4").resumed_at(5)
    with pytest.raises(ResumeMismatchError, match="the ramp is not that of"):
        run(tmp_path, ramp=other)


DAMAGE = {
    "short rows": {"ramp_rows": [[0, 0]]},
    "nulls": {"ramp_rows": [[0, 0, None], [2, None, 4]]},
    "no rows": {"ramp_rows": 7},
    "a text": {"ramp_rows": "rows"},
    "programs": {"programs": 3},
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_record_with_right_checksums_is_refused_in_words(tmp_path, change):
    """Whatever the record has instead of what it had, no bare exception comes out."""
    run(tmp_path, stop=5)
    folder = tmp_path / "checkpoints" / "5"
    record = folder / "record" / "metadata"
    record.write_text(json.dumps(json.loads(record.read_text()) | change))
    write_checksums(folder)
    for read in (
        run,
        lambda path: ramp_to_continue(path, rampup.BatchRamp.constant(8)),
    ):
        with pytest.raises(
            ResumeMismatchError, match=r"record of .*/5 is damaged, or was changed by"
        ):
            read(tmp_path)
    shutil.rmtree(folder)
    assert run(tmp_path)[0].steps == 10


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl"])
def test_a_folder_in_place_of_a_file_is_refused_in_words(tmp_path, name):
    """At the start and at a resume."""
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(StorageError, match=f"{name} is a folder and not a file; move"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("order", "number"),
    [([0, 1, 2, 3, 4] * 2, 10), ([0, 1, 1, 3, 4], 5), ([0, 1, 2, 4], 4), ([], 0)],
)
def test_metrics_with_lines_twice_or_missing_are_reported(tmp_path, order, number):
    """A copy of the lines is not taken for a run, nor one in place of another."""
    run(tmp_path, stop=5)
    file, events = tmp_path / "metrics.jsonl", []
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[step] for step in order))
    options = MetricOptions(on_event=events.append)
    Metrics(tmp_path, 5, options=options, components=()).close()
    assert [event.problem for event in events] == [
        f"{file} has {number} lines, and not one each of the 5 steps before this start"
    ]


def test_rows_that_cannot_be_compared_are_said(tmp_path):
    """A generator around the batches hides which rows they are: a resume warns, and a
    start does not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, stop=5)
    # Also by a run that writes no checkpoints of its own.
    with pytest.warns(
        ResumeWarning, match=r"cannot be told: .*a generator.* itself"
    ) as caught:
        summary, _ = run(tmp_path, period=None, steps=7)
    assert [each.filename for each in caught] == [__file__]
    assert summary.resumed_from == 5
    with pytest.warns(ResumeWarning, match="cannot be told"):
        run(tmp_path)


@pytest.mark.parametrize("first", [False, True])
def test_a_run_that_goes_on_without_whole_batches_says_so(tmp_path, first):
    """Or with them. The loss function is the same, and computes something else."""
    mesh, tx = toy.mesh_of("one"), optax.sgd(0.1)
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(8),
        splitter=rampup.BatchSplitter(data_parallel_size=1, microbatch_size=4),
        num_devices=1,
        total_steps=4,
    )

    def loss_fn(params, batch, keys):
        spread = batch["x"] - batch["x"].mean()
        return ((params["w"] - spread) ** 2).sum(), len(keys), {}

    def go_on(whole, stop):
        own = plan.with_whole_batches() if whole else plan
        step = rampup.train_step(loss_fn, tx, own, mesh)
        calls = iter(range(10))
        loop = rampup.Loop(
            plan=own,
            step=step,
            batches=lambda start: step.batches(ROWS, start),
            folder=tmp_path,
            checkpoints=rampup.CheckpointOptions(checkpoint_period=4),
        )
        state = rampup.create_state({"w": np.float32(0)}, tx, mesh)
        loop.run(state, should_stop=lambda: next(calls) == stop)

    go_on(first, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on(first, 1)
    with pytest.warns(ResumeWarning, match="the loss.* is not that of the checkpoint"):
        go_on(not first, None)


def test_a_plan_that_ends_before_the_run_says_that_no_step_runs(tmp_path):
    """The summary is that of the longer run."""
    run(tmp_path, steps=6)
    with pytest.warns(
        ResumeWarning, match="has done 6 steps, and its plan ends after 4"
    ):
        summary, read = run(tmp_path, steps=4)
    assert (summary.steps, read) == (6, [])


def test_a_checkpoint_has_each_fact_of_the_run_once(tmp_path):
    """The ramp is its rows, and nothing that follows from them."""
    run(tmp_path, stop=5)
    record = json.loads(
        (tmp_path / "checkpoints" / "5" / "record" / "metadata").read_text()
    )
    assert record["ramp_rows"] == [[0, 0, 8]]
    assert not {"fingerprint", "consumed_samples"} & record.keys()
    assert jax.tree.leaves(record).count(8) == 1


class Place(Component):
    """Saves the place of an iterator, as users of Grain's iterators do."""

    def __init__(self, rows):
        self.rows = rows

    def state(self):
        """Return the place."""
        return {"place": self.rows.place}

    def load(self, record):
        """Go to the place."""
        self.rows.place = record["place"]


class Counting:
    """An iterator of numbers that has a place."""

    place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        return {"n": np.int32(self.place), "x": np.float32(self.place % 7)}


def own_loop(folder, components=(), rows=ROWS, **options):
    """Return a loop of 6 steps of 8 rows, and its first state."""
    mesh, tx = toy.mesh_of("one"), optax.sgd(0.1)
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.constant(8),
        splitter=rampup.BatchSplitter(data_parallel_size=1),
        num_devices=1,
        total_steps=6,
    )

    def loss_fn(params, batch, keys):
        return ((params["w"] - batch["x"]) ** 2).sum(), batch["x"].size, {}

    step = rampup.train_step(loss_fn, tx, plan, mesh)
    read = step.batches if isinstance(rows, list) else step.stream
    loop = rampup.Loop(
        plan=plan,
        step=step,
        batches=lambda start: read(rows, start),
        folder=folder,
        components=tuple(components),
        checkpoints=rampup.CheckpointOptions(checkpoint_period=100, **options),
    )
    return loop, rampup.create_state({"w": np.float32(1)}, tx, mesh)


@pytest.mark.filterwarnings("ignore::rampup.errors.ResumeWarning")
@pytest.mark.parametrize("stop", range(1, 6))
def test_an_iterator_is_saved_at_the_place_of_the_steps_done(tmp_path, stop):
    """A run that is stopped takes no batch for a step that it does not do: the resumed
    run has the rows of an uninterrupted one.
    """

    def run(folder, stop=None):
        rows, calls = Counting(), iter(range(10))
        loop, state = own_loop(folder, [Place(rows)], rows)
        state, summary = loop.run(state, should_stop=lambda: next(calls) == stop)
        assert rows.place == 8 * summary.steps
        return float(state.params["w"])

    whole = run(tmp_path / "whole")
    run(tmp_path / "stopped", stop)
    assert run(tmp_path / "stopped") == whole


class Entries(Component):
    """Has some entries in a checkpoint."""

    def __init__(self, entries):
        self.entries = entries

    def state(self):
        """Return them."""
        return self.entries


@pytest.mark.parametrize(
    ("components", "identity", "words"),
    [
        ([Entries({"rows": 7})], {}, "an Entries has the entry rows"),
        ([Entries({"step": 7})], {}, "an Entries has the entry step"),
        ([Entries({"a": 1}), type("B", (Entries,), {})({"a": 2})], {}, "a B has the"),
        ([Entries({"lr": 7})], {"lr": 7}, "an Entries has the entry lr"),
        ([Entries({"a": np.int64(7)})], {}, "takes JSON values, and not an int64"),
        ([], {"a": np.arange(3)}, "takes JSON values, and not a ndarray"),
    ],
)
def test_entries_that_no_resume_could_read_are_refused(
    tmp_path, components, identity, words
):
    """Before the first step: a name that another part of the run has, and what JSON has
    not.
    """
    loop, state = own_loop(tmp_path, components, identity=identity)
    with pytest.raises(rampup.RampupError, match=words):
        loop.run(state)
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_key_that_a_resume_leaves_out_of_the_identity_is_refused(tmp_path):
    """A forgotten argument would take its guard from the run for good."""
    own = {"data": "A", "seed": 1}
    run(tmp_path, steps=2, period=2, identity=own)
    for left in ({}, {"data": "A"}):
        with pytest.raises(ResumeMismatchError, match="seed: 1 in the checkpoint"):
            run(tmp_path, steps=4, identity=left)
    run(tmp_path, steps=4, identity=own)


def test_an_identity_is_compared_as_json_has_it(tmp_path):
    """A tuple is a list in a checkpoint, and no other value."""
    for steps in (2, 6):
        loop, state = own_loop(tmp_path, identity={"sizes": (1, 2)})
        calls = iter(range(steps, 100))
        _, summary = loop.run(state, should_stop=lambda calls=calls: next(calls) == 4)
        assert summary.steps == (2 if steps == 2 else 6)


def test_a_rate_may_be_a_schedule_of_optax(tmp_path):
    """Which returns an array."""
    loop, state = own_loop(tmp_path)
    schedule = optax.linear_schedule(1.0, 0.0, 10)
    dataclasses.replace(loop, metrics=MetricOptions(learning_rate=schedule)).run(state)
    lines = [
        json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().split("\n") if x
    ]
    assert lines[5]["learning_rate"] == pytest.approx(0.5)


def test_rows_in_place_of_a_batch_are_refused_in_words(tmp_path):
    """In a loop, too: a step takes what it makes of rows."""
    loop, state = own_loop(tmp_path)
    loop = dataclasses.replace(loop, batches=lambda start: [{"x": np.zeros(8)}] * 6)
    with pytest.raises(DataError, match="a step takes a Batch and not a dict"):
        loop.run(state)


def test_a_checkpoint_is_found_by_the_folder_of_its_run(tmp_path):
    """Or by that of the checkpoints, as a text or a path."""
    loop, state = own_loop(tmp_path / "run")
    assert find_checkpoint(tmp_path / "run") is None
    loop.run(state)
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        assert find_checkpoint(folder).step == find_checkpoint(str(folder)).step == 6
    again, state = own_loop(tmp_path / "run")
    restored, done = again.restore(state, find_checkpoint(tmp_path / "run"))
    assert (int(restored.step), done) == (6, 6)
