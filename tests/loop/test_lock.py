"""Tests of rampup.loop.lock: one run, one owner."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax.numpy as jnp
import pytest
from helpers import toy
from helpers.processes import wait_until

from rampup.errors import ConfigError, StorageError
from rampup.loop import lock as run_lock
from rampup.loop.checkpoint import Checkpoints
from rampup.loop.lock import LOCK_FILE, own_run, require_owner

OWNER = """
import sys, time
from pathlib import Path
from rampup.loop.lock import own_run
with own_run(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_with_host_and_process(tmp_path, owner):
    """While the owner lives, also if it is stopped, the folder is its own."""
    for change in (None, signal.SIGSTOP):
        if change:
            owner.send_signal(change)
        with (
            pytest.raises(ConfigError, match=f"process {owner.pid}, since") as caught,
            own_run(tmp_path),
        ):
            pass
        assert caught.value.key == "run_name"
        assert "folder of a Loop" in str(caught.value)
    assert os.listdir(tmp_path) == [LOCK_FILE]


@pytest.mark.parametrize("content", [None, "", "[1]", "{", '{"pid": 1}'])
def test_the_lock_of_a_dead_process_is_taken_over_at_once(
    tmp_path, content, request, monkeypatch
):
    """Whatever it or a power cut left in the file, only the lock of the system counts;
    nothing stays, also on a full disk.
    """
    if content is None:
        owner = request.getfixturevalue("owner")
        owner.kill()
        owner.wait()
    else:
        (tmp_path / LOCK_FILE).write_text(content)

    with own_run(tmp_path), own_run(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(
        os,
        "write",
        mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")),
    )
    with pytest.raises(ConfigError, match="No space left"), own_run(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_of_many_processes_one_takes_over(tmp_path):
    """Four processes that find the file of a dead one: one gets the lock."""
    (tmp_path / LOCK_FILE).write_text("{}")
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        wait_until(lambda: sum(process.poll() is None for process in processes) <= 1)
        assert sum(process.poll() is None for process in processes) == 1
        refused = [process for process in processes if process.poll() is not None]
        assert all(
            "another process trains" in process.stderr.read() for process in refused
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_deleted_lock_file_is_not_the_lock(tmp_path, owner):
    """As the refusal says, deleting the file gives the folder free; the old owner does
    not delete the file of the new one.
    """
    (tmp_path / LOCK_FILE).unlink()
    with own_run(tmp_path):
        owner.kill()
        owner.wait()
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        (tmp_path / LOCK_FILE).unlink()
        (tmp_path / LOCK_FILE).write_text("{}")
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_a_file_system_without_locks_has_a_lease(tmp_path, monkeypatch):
    """The owner is refused to others while it writes, and a lease that nobody renews is
    free.
    """
    monkeypatch.setattr(
        fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "no locks here"))
    )
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 2.0)
    (tmp_path / LOCK_FILE).write_text("{")
    with own_run(tmp_path):
        monkeypatch.setattr(run_lock, "_held", {})  # as in another process
        words = (
            rf"another process trains in {tmp_path}: .*, process {os.getpid()}, since"
        )
        with pytest.raises(ConfigError, match=words), own_run(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("locks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_owner_ends_when_another_process_has_taken_over(
    tmp_path, monkeypatch, locks
):
    """Whether its file was deleted or its lease ran out during a pause, no step and no
    checkpoint follows.
    """
    if not locks:
        monkeypatch.setattr(
            fcntl,
            "flock",
            mock.Mock(side_effect=OSError(errno.ENOSYS, "no locks here")),
        )
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 60.0)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    lock = tmp_path / LOCK_FILE
    with (
        own_run(tmp_path),
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
    ):
        require_owner(tmp_path)
        time.sleep(0.6)
        # Renews a lease that ran out and that nobody has taken.
        require_owner(tmp_path)
        lock.unlink()
        lock.write_text(
            json.dumps({"host": "far", "pid": 7, "since": "noon", "token": "t"})
        )
        with pytest.raises(
            ConfigError,
            match=(
                f"another process took over {tmp_path}: far, process 7, since noon;"
                " this one was"
            ),
        ):
            require_owner(tmp_path)
        words = "the checkpoint of step 1 could not be written: another process took"
        with pytest.raises(StorageError, match=words):
            checkpoints.save(1, toy.Arrays(jnp.zeros(2)), {})
    assert json.loads(lock.read_text())["host"] == "far"


def test_another_thread_is_refused(tmp_path):
    """Two loops of one process in one folder destroy each other as well."""
    with (
        own_run(tmp_path),
        ThreadPoolExecutor() as pool,
        pytest.raises(ConfigError, match="another thread"),
    ):
        pool.submit(own_run(tmp_path).__enter__).result()
