"""Tests of rampup.run.run_lock: one run, one owner."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rampup.errors import ConfigError
from rampup.run import run_lock
from rampup.run.run_lock import LOCK_FILE, own_run

OWNER = """
import sys, time
from pathlib import Path
from rampup.run.run_lock import own_run
with own_run(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns the folder."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def lock(folder, **changes):
    """Write a lock file like that of this process, with changes."""
    content = run_lock._identity() | {"token": "x", "since": "then"} | changes
    (folder / LOCK_FILE).write_text(json.dumps(content))


def test_a_second_process_is_refused_with_host_and_process(tmp_path, owner):
    """While the owner lives, also if it is stopped, the folder is its own."""
    for change in (None, signal.SIGSTOP):
        if change:
            owner.send_signal(change)
        with pytest.raises(ConfigError, match=f"process {owner.pid}, since") as caught, own_run(tmp_path):
            pass
        assert caught.value.key == "run_name"
    assert os.listdir(tmp_path) == [LOCK_FILE]


def test_the_lock_of_a_killed_process_is_taken_over_at_once(tmp_path, owner):
    """A process of this host that is dead owns nothing, and the folder is clean afterwards."""
    owner.kill()
    owner.wait()
    with own_run(tmp_path), own_run(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert os.listdir(tmp_path) == []


def test_a_process_number_that_is_used_again_is_no_owner(tmp_path):
    """The number of the dead owner may be that of another process now, even of this one."""
    lock(tmp_path, started="1")
    with own_run(tmp_path):
        pass
    lock(tmp_path)  # This process is alive, and started when the lock says.
    with pytest.raises(ConfigError, match="another process trains"), own_run(tmp_path):
        pass


def test_a_lock_of_another_host_needs_signs_of_life(tmp_path, monkeypatch):
    """It is refused if somebody touches it, and taken over if nobody does."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.0)
    lock(tmp_path, host="elsewhere", machine="elsewhere")
    stop = threading.Event()

    def touch():
        while not stop.wait(0.1):
            os.utime(tmp_path / LOCK_FILE)

    other = threading.Thread(target=touch)
    other.start()
    with pytest.raises(ConfigError, match="elsewhere"), own_run(tmp_path):
        pass
    stop.set()
    other.join()
    with own_run(tmp_path):
        pass


def test_a_lock_from_the_future_does_not_hold_for_ever(tmp_path, monkeypatch):
    """The clock was wrong when another host touched it: nobody touches it now, so it is taken over as soon as any other."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 0.5)
    lock(tmp_path, host="elsewhere", machine="elsewhere")
    future = time.time() + 100_000
    os.utime(tmp_path / LOCK_FILE, (future, future))
    taken = threading.Event()

    def take():
        with own_run(tmp_path):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    assert taken.wait(60)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"machine": null, "pid": "x"}'])
def test_a_lock_that_cannot_be_read_is_judged_by_its_age(tmp_path, content):
    """A file system that lost its content is no reason to give up for ever."""
    (tmp_path / LOCK_FILE).write_text(content)
    old = time.time() - 1000
    os.utime(tmp_path / LOCK_FILE, (old, old))
    with own_run(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_of_many_processes_one_takes_over(tmp_path):
    """Ten processes that find the lock of a dead one: one gets it."""
    lock(tmp_path, started="1")
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        deadline = time.monotonic() + 300
        while sum(process.poll() is None for process in processes) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert sum(process.poll() is None for process in processes) == 1
        refused = [process for process in processes if process.poll() is not None]
        assert all("another process trains" in process.stderr.read() for process in refused)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_nothing_stays_of_a_lock_that_could_not_be_taken(tmp_path, monkeypatch):
    """A disk that is full, or a system without another thread: the error says so, and the next process finds no lock."""

    def fail(*_, **__):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(ConfigError, match="can't start new thread; the limit of threads"), own_run(tmp_path):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(run_lock.Path, "write_text", _write_a_part)
        with pytest.raises(ConfigError, match="No space left"), own_run(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def _write_a_part(path, text):
    path.write_bytes(text[:1].encode())
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_hard_links(tmp_path, monkeypatch):
    """A file system without hard links has the lock as well."""

    def refuse(*_):
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with own_run(tmp_path):
        content = json.loads((tmp_path / LOCK_FILE).read_text())
    assert content["pid"] == os.getpid()


def test_another_thread_is_refused(tmp_path):
    """Two loops of one process in one folder destroy each other as well."""
    problems = []

    def train():
        try:
            with own_run(tmp_path):
                pass
        except ConfigError as error:
            problems.append(str(error))

    with own_run(tmp_path):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert "another thread" in problems[0]
