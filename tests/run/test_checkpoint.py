"""Tests of rampup.run.checkpoint."""

import errno
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from helpers import toy

from rampup.errors import ResumeMismatchError, StorageError
from rampup.run import checkpoint
from rampup.run.checkpoint import CHECKSUMS_FILE, Checkpoints, damage, find_checkpoint, write_checksums
from rampup.run.data.batches import step_batches
from rampup.run.state import create_state
from rampup.run.step import train_step


def assert_equal(a, b):
    """Assert that two states are the same, bit for bit, and have the same shardings."""
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, y: x.sharding == y.sharding, a, b)))


@pytest.mark.parametrize("name", ["one", "data_fsdp_tensor"])
def test_save_keeps_the_state_of_its_own_step(tmp_path, name):
    """A checkpoint written in the background while training continues has the state of its own step."""
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
        restored = checkpoints.restore(saved, fresh)
    assert (saved.step, saved.record["a"]) == (6, 1)
    assert_equal(restored, state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), kept[6])


def test_save_keeps_only_the_newest(tmp_path):
    """Older checkpoints are deleted beyond the number to keep, and saving a step twice is no error."""
    mesh = toy.mesh_of("one")
    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)
    with Checkpoints(tmp_path, max_to_keep=2, async_checkpointing=False) as checkpoints:
        assert checkpoints.latest is None
        assert find_checkpoint(tmp_path) is None
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert checkpoints.latest == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def test_find_checkpoint_refuses_a_record_of_another_format(tmp_path, monkeypatch):
    """A checkpoint of another version of rampup is refused with both numbers."""
    mesh = toy.mesh_of("one")
    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)
    with Checkpoints(tmp_path, async_checkpointing=False) as checkpoints:
        checkpoints.save(4, state, {"who": "me"})
    assert find_checkpoint(tmp_path).record == {"version": 1, "step": 4, "who": "me"}
    monkeypatch.setattr(checkpoint, "RECORD_VERSION", 99)
    with pytest.raises(ResumeMismatchError, match="format 1, this is format 99"):
        find_checkpoint(tmp_path)


def test_restore_refuses_a_state_of_another_structure(tmp_path):
    """The state of another optimizer does not fit."""
    mesh = toy.mesh_of("one")
    with Checkpoints(tmp_path, async_checkpointing=False) as checkpoints:
        checkpoints.save(4, create_state(toy.new_params(mesh), optax.sgd(0.1), mesh), {})
        with pytest.raises(ResumeMismatchError, match="not of this model and optimizer"):
            checkpoints.restore(find_checkpoint(tmp_path), create_state(toy.new_params(mesh), optax.adamw(0.1), mesh))


def test_damage_ignores_files_that_are_written_later(tmp_path):
    """Files that Orbax completes after the checksums do not count at the top level, and the same names deeper down do."""
    (tmp_path / "state").mkdir()
    for name in ("a", "state/b", "_CHECKPOINT_METADATA", "state/commit_success.txt"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path)
    (tmp_path / "commit_success.txt").write_text("x")
    (tmp_path / "_CHECKPOINT_METADATA").write_text("other")
    assert damage(tmp_path) is None
    (tmp_path / "state" / "commit_success.txt").write_text("other")
    assert damage(tmp_path) == "state/commit_success.txt has 5 bytes, not 24"


def test_damage_names_each_kind_of_damage(tmp_path):
    """Missing, shorter, changed, unreadable, and no checksums at all."""
    (tmp_path / "a").write_text("one")
    write_checksums(tmp_path)
    (tmp_path / "a").write_text("two")
    assert damage(tmp_path) == "a was changed after it was written: its SHA-256 differs"
    (tmp_path / "a").unlink()
    assert damage(tmp_path) == "a is missing"
    (tmp_path / "a").mkdir()
    assert damage(tmp_path).startswith("a cannot be read: ")
    (tmp_path / CHECKSUMS_FILE).unlink()
    assert damage(tmp_path) == f"{CHECKSUMS_FILE} is missing"


def test_a_failed_save_is_one_sentence(tmp_path, monkeypatch, capsys):
    """A full disk is named as such, and the callbacks of the other files print nothing."""
    checkpoints, mesh = Checkpoints(tmp_path / "checkpoints"), toy.mesh_of("one")

    def fail(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: Error writing ... " + "long " * 200)

    monkeypatch.setattr(checkpoints._manager, "save", fail)
    with pytest.raises(StorageError) as caught:
        checkpoints.save(3, create_state(toy.new_params(mesh), optax.sgd(0.1), mesh), {})
    assert str(caught.value) == (
        "the checkpoint of step 3 could not be written: "
        f"No space left on device in {tmp_path / 'checkpoints'}; there is no other"
    )
    sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
    assert capsys.readouterr().err == ""


def test_nothing_waits_after_a_checkpoint_that_could_not_be_begun(tmp_path, monkeypatch):
    """Where no folder can be made, no thread is left that keeps the process from ending."""
    checkpoints, mesh, mkdir = Checkpoints(tmp_path / "checkpoints"), toy.mesh_of("one"), os.mkdir
    before = set(threading.enumerate())

    def refuse(path, *args, **options):
        if Path(path).parent == tmp_path / "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    state = create_state(toy.new_params(mesh), optax.sgd(0.1), mesh)
    with pytest.raises(StorageError, match=r"checkpoint of step 3 could not be written: .*Permission denied"):
        checkpoints.save(3, state, {})
    end = time.monotonic() + 60
    while left := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
        assert time.monotonic() < end, left
        time.sleep(0.02)
    monkeypatch.undo()
    checkpoints.save(4, state, {})
    checkpoints.wait()
    assert checkpoints.latest == 4


def test_late_callbacks_print_nothing_and_other_errors_do(tmp_path, monkeypatch):
    """An error of the library's threads may surface in either hook of the interpreter."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda *raised: shown.append(raised[1]))
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: shown.append(raised.exc_value))
    checkpoint._silence_late_callbacks.cache_clear()
    Checkpoints(tmp_path)
    late, other = RuntimeError("Event loop is closed"), RuntimeError("another")
    for error in (late, other):
        sys.excepthook(type(error), error, None)
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert shown == [other, other]
