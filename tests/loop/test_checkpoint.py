"""Tests of rampup.loop.checkpoint."""

import errno
import json
import logging
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from helpers import processes, toy

from rampup.data.batches import step_batches
from rampup.engine.processes import wait_for_all
from rampup.engine.state import create_state
from rampup.engine.step import train_step
from rampup.errors import ResumeMismatchError, StorageError
from rampup.loop import checkpoint
from rampup.loop.checkpoint import (
    CHECKSUMS_FILE,
    CheckpointOptions,
    Checkpoints,
    damage,
    find_checkpoint,
    write_checksums,
)
from rampup.loop.distributed import join


def new_state(tx=None):
    """Return a state on one device."""
    mesh = toy.mesh_of("one")
    return create_state(toy.new_params(mesh), tx or optax.sgd(0.1), mesh)


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
def test_save_keeps_the_state_of_its_own_step(tmp_path, name):
    """Checkpoints written in the background while training continues have the states of
    their own steps, and its shardings.
    """
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
        saved = find_checkpoint(tmp_path)
        for done, expected in kept.items():
            restored = checkpoints.restore(replace(saved, step=done), fresh)
            jax.tree.map(
                np.testing.assert_array_equal, jax.device_get(restored), expected
            )
            assert all(
                jax.tree.leaves(
                    jax.tree.map(lambda x, y: x.sharding == y.sharding, restored, state)
                )
            )
    assert (saved.step, saved.record["a"]) == (6, 1)


def test_only_the_newest_are_kept_and_restored_without_a_warning(tmp_path, caplog):
    """Older checkpoints are deleted beyond the number to keep, saving a step twice is
    no error, and Orbax logs nothing.
    """
    state = new_state()
    caplog.set_level(logging.WARNING, logger="absl")
    with Checkpoints(
        tmp_path, CheckpointOptions(max_to_keep=2, async_checkpointing=False)
    ) as checkpoints:
        assert checkpoints.latest is None
        assert find_checkpoint(tmp_path) is None
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert checkpoints.latest == 3
        checkpoints.restore(find_checkpoint(tmp_path), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (optax.adam(0.1), optax.adamw(0.1)),
        (optax.adamw(0.1), optax.adam(0.1)),
        (optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.sgd(0.1))),
        (optax.nadam(0.1), optax.adamw(0.1)),
    ],
)
def test_optimizers_that_differ_in_empty_states_are_refused(before, after, tmp_path):
    """They have the same arrays, so Orbax would fail in its own words."""
    options = CheckpointOptions(async_checkpointing=False)
    with Checkpoints(tmp_path, options) as checkpoints:
        checkpoints.save(4, new_state(before), {})
        saved = find_checkpoint(tmp_path)
        checkpoints.restore(saved, new_state(before))
        with pytest.raises(
            ResumeMismatchError, match=r"opt_state/\d is .*empty.*the kind of optimizer"
        ):
            checkpoints.restore(saved, new_state(after))


def test_checkpoints_of_another_format_or_structure_are_refused(tmp_path, monkeypatch):
    """That of another version of rampup is refused with both numbers, and the state of
    another optimizer does not fit.
    """
    state = new_state()
    with Checkpoints(
        tmp_path, CheckpointOptions(async_checkpointing=False)
    ) as checkpoints:
        checkpoints.save(4, state, {"who": "me"})
        with pytest.raises(
            ResumeMismatchError,
            match=r"not of this model and optimizer.*; restore the model and the kind of"
            r" optimizer of that run, or train in another folder .*folder of a Loop",
        ):
            checkpoints.restore(find_checkpoint(tmp_path), new_state(optax.adamw(0.1)))
    assert find_checkpoint(tmp_path).record == {"version": 2, "step": 4, "who": "me"}
    monkeypatch.setattr(checkpoint, "RECORD_VERSION", 99)
    with pytest.raises(ResumeMismatchError, match="format 2, this is format 99"):
        find_checkpoint(tmp_path)


@pytest.mark.core
def test_damage_names_each_kind_of_damage(tmp_path):
    """Missing, changed and unreadable files. Those that Orbax completes later count
    only if they are deeper down.
    """
    (tmp_path / "state").mkdir()
    for name in ("a", "_CHECKPOINT_METADATA", "state/commit_success.txt"):
        (tmp_path / name).write_text("one")
    write_checksums(tmp_path)
    (tmp_path / "commit_success.txt").write_text("x")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("other")
    assert damage(tmp_path) == ""
    (tmp_path / "state" / "commit_success.txt").write_text("other")
    assert damage(tmp_path) == "state/commit_success.txt has 5 bytes, not 3"
    (tmp_path / "a").write_text("two")
    assert damage(tmp_path) == "a was changed after it was written: its SHA-256 differs"
    (tmp_path / "a").unlink()
    assert damage(tmp_path) == "a cannot be read: No such file or directory"
    (tmp_path / "a").mkdir()
    assert damage(tmp_path).startswith("a has ")


def test_a_share_of_a_terabyte_takes_no_time(tmp_path):
    """The sizes of all files count, and the contents of those that other processes read
    do not.
    """
    for name in ("a", "b"):
        with open(tmp_path / name, "wb") as file:
            file.truncate(2**40)
    for size, problem in (
        (2**40 - 1, "b has 1,099,511,627,776 bytes, not 1,099,511,627,775"),
        (2**40, ""),
    ):
        (tmp_path / CHECKSUMS_FILE).write_text(
            json.dumps({"a": [2**40, "x"], "b": [size, "x"]})
        )
        assert damage(tmp_path, 2, 3) == problem


def test_nothing_waits_after_a_checkpoint_that_could_not_be_begun(
    tmp_path, monkeypatch
):
    """Where no folder can be made, no thread is left that keeps the process from
    ending.
    """
    checkpoints, state, mkdir = (
        Checkpoints(tmp_path / "checkpoints"),
        new_state(),
        os.mkdir,
    )
    before = set(threading.enumerate())

    def refuse(path, *args, **options):
        if Path(path).parent == tmp_path / "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(
        StorageError,
        match=r"checkpoint of step 3 could not be written: .*Permission denied",
    ):
        checkpoints.save(3, state, {})
    processes.wait_until(
        lambda: (
            not [
                thread
                for thread in set(threading.enumerate()) - before
                if not thread.daemon
            ]
        )
    )
    monkeypatch.undo()
    checkpoints.save(4, state, {})
    checkpoints.wait()
    assert checkpoints.latest == 4


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """The reason follows it, without the number of the system's error."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError) as caught:
        checkpoints.save(3, new_state(), {})
    assert f"{tmp_path / 'checkpoints'} cannot be written: File exists" in str(
        caught.value
    )


def test_the_reason_of_tensorstore_is_one_sentence(tmp_path):
    """What it was doing may stand before the code."""
    with Checkpoints(tmp_path) as checkpoints:
        assert (
            checkpoints._reason(ValueError("... [spec='w'] [os_error_code='27']"))
            == f"File too large in {tmp_path}"
        )


def save_and_find(number, port, folder, found):
    """Save a checkpoint in one of two processes, and find it; write the names and the
    bytes of the files that it read.
    """
    join(coordinator_address=f"localhost:{port}", num_processes=2, process_id=number)
    mesh, read, digest = jax.make_mesh((2,), ("data",)), [], checkpoint._size_and_digest

    def count(path):
        size, sha = digest(path)
        read.append((path.name, size))
        return [size, sha]

    checkpoint._size_and_digest = count
    values = np.random.default_rng(0).normal(size=(2, 2**18)).astype(np.float32)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    array = jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index]
    )
    state = create_state({"w": array}, optax.sgd(0.1), mesh)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, state, {})
        checkpoints.wait()
        written, read[:] = list(read), []
        saved = find_checkpoint(folder)
        checked, read[:] = list(read), []
        restored = checkpoints.restore(saved, state)
    np.testing.assert_array_equal(
        restored.params["w"].addressable_data(0), array.addressable_data(0)
    )
    # One bit of the other half, which process 0 does not read.
    if number == 0:
        (large,) = (
            path
            for path in folder.rglob("ocdbt.process_1/d/*")
            if path.stat().st_size > 2**19
        )
        content = bytearray(large.read_bytes())
        content[1000] ^= 1
        large.write_bytes(content)
    wait_for_all(mesh)
    with pytest.raises(
        ResumeMismatchError,
        match=r"ocdbt.process_1/d/\w+ was changed after it was written",
    ) as caught:
        find_checkpoint(folder)
    found.write_text(json.dumps([written, checked, str(caught.value)]))


def test_each_process_reads_its_part_of_a_checkpoint(tmp_path):
    """Process 0 takes all checksums; on resume each file is read once by one, and all
    see the damage.
    """
    folder, found, port = (
        tmp_path / "checkpoints",
        [tmp_path / f"{n}.json" for n in range(2)],
        processes.free_port(),
    )
    processes.run_all(
        save_and_find, [(n, port, folder, found[n]) for n in range(2)], tmp_path
    )
    written, checked, problems = zip(
        *(json.loads(file.read_text()) for file in found), strict=True
    )
    files = json.loads((folder / "3" / CHECKSUMS_FILE).read_text())
    for reads in (written, checked):
        read = sorted(size for one in reads for _, size in one)
        assert read == sorted(size for size, _ in files.values())
    assert written[1] == []
    assert max(sum(size for _, size in one) for one in checked) < 0.6 * sum(read)
    assert problems[0] == problems[1]
