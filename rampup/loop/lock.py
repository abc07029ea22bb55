"""One process at a time owns the folder of a run.

The owner holds an exclusive lock of the operating system on a file there, which says who it is. The system releases the lock
when the process ends in any way, also on another host that shares the file system. A bucket, and a file system without locks,
has a lease instead: the owner writes the file again every few seconds, with another number, and a lease is free when nobody
has written it for `STALE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rampup.engine.processes import broadcast_from_process0, is_primary
from rampup.errors import ConfigError
from rampup.loop.run_folder import absolute_path, is_bucket

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS, STALE_SECONDS = 5.0, 30.0
# A lease has no exclusive creation: time after which a process that wrote at the same moment would have overwritten it.
SETTLE_SECONDS = 2.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_questions = itertools.count()
# The folders that this process owns -> the thread that does.
_held: dict[Path, int] = {}


@contextlib.contextmanager
def own_run(folder: Path, *, only_existing: bool = False) -> Iterator[None]:
    """Own a run's folder within a context. Contexts of one thread may be nested. With several processes, process 0 owns it.

    The folder is created if necessary; with `only_existing`, nothing is done if there is none.

    Raises:
        ConfigError: another process has the run.
    """
    key, problem, lock = absolute_path(folder), "", None
    if is_primary():
        thread = _held.get(key)
        if thread not in (None, threading.get_ident()):
            problem = f"another thread of this process trains in {folder}"
        elif thread is None and (folder.is_dir() or not only_existing):
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            lock, problem = _acquire(folder / LOCK_FILE)
    # Nested contexts of all processes are alike, so all of them ask the same questions.
    problem = broadcast_from_process0(f"owner{next(_questions)}", problem)
    if problem:
        raise ConfigError(problem, key="run_name")
    try:
        if lock is not None:
            _held[key] = threading.get_ident()
        yield
    finally:
        if lock is not None:
            del _held[key]
            lock.release()


def _acquire(path: Path) -> tuple[_Lock | _Lease | None, str]:
    """Return the lock or lease, or None and why another process has it or it cannot be written."""
    try:
        if not is_bucket(path):
            try:
                return _Lock.acquire(path), ""
            except BlockingIOError:
                return None, _refusal(path, _read(path) or {})
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        lease = _Lease(path)
        owner = lease.acquire()
        return (lease, "") if owner is None else (None, _refusal(path, owner))
    except OSError as error:
        return None, f"cannot write in {path.parent}: {error.strerror or error}"
    except RuntimeError as error:
        return None, f"cannot keep {path}: {error}; the limit of threads is reached (ulimit -u)"


class _Lock:
    def __init__(self, path: Path, file: int) -> None:
        self._path, self._file = path, file

    @classmethod
    def acquire(cls, path: Path) -> _Lock:
        """Lock the file. Raises BlockingIOError if another process has."""
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner before may have deleted the file after it was opened here. Then the lock is of no use.
                if os.fstat(file).st_nlink:
                    try:
                        os.ftruncate(file, 0)
                        os.write(file, json.dumps(_identity()).encode())
                    except OSError:
                        path.unlink()
                        raise
                    return cls(path, file)
            except OSError:
                os.close(file)
                raise
            os.close(file)

    def release(self) -> None:
        """Delete the file, and then release it, so that nobody locks a file that is about to be deleted."""
        with contextlib.suppress(OSError):
            if os.fstat(self._file).st_nlink:
                self._path.unlink()
        os.close(self._file)


class _Lease:
    def __init__(self, path: Path) -> None:
        self._path, self._beats, self._stop = path, itertools.count(), threading.Event()
        self._content = {**_identity(), "token": uuid.uuid4().hex}
        self._thread = threading.Thread(target=self._renew, name="rampup-run-lock", daemon=True)

    def acquire(self) -> dict[str, Any] | None:
        """Write the file, after waiting for signs of life of an owner, whom it returns if there is one."""
        owner, end = _read(self._path), time.monotonic() + STALE_SECONDS
        while owner is not None and time.monotonic() < end:
            time.sleep(HEARTBEAT_SECONDS / 5)
            now = _read(self._path)
            if now is not None and now != owner:
                return owner
            owner = now
        # The last writer wins, and all look who that was after a pause.
        self._write()
        time.sleep(SETTLE_SECONDS)
        owner = _read(self._path) or {}
        if owner.get("token") != self._content["token"]:
            return owner
        self._thread.start()
        return None

    def release(self) -> None:
        """Delete the file, if it is still this process's."""
        self._stop.set()
        # A sign of life that is being written would come back after it.
        self._thread.join(timeout=STALE_SECONDS)
        with contextlib.suppress(OSError):
            if self._is_own():
                self._path.unlink()

    def _is_own(self) -> bool:
        return (_read(self._path) or {}).get("token") == self._content["token"]

    def _write(self) -> None:
        self._path.write_text(json.dumps({**self._content, "beat": next(self._beats)}))

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                if self._is_own():
                    self._write()


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    return (
        f"another process trains in {path.parent}: {owner.get('host')}, process {owner.get('pid')}, "
        f"since {owner.get('since')}; stop it, or give this run another run_name. If it does not "
        f"exist any more, delete {path}"
    )


def _read(path: Path) -> dict[str, Any] | None:
    """Return a lock's content; {} if it cannot be understood, None if there is no file."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _identity() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
