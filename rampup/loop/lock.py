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
# A lease cannot be created exclusively: two processes may write it at once. Each waits this long and reads it again; the last
# writer owns it.
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
    key, path, problem = absolute_path(folder), folder / LOCK_FILE, ""
    with contextlib.ExitStack() as held:
        if is_primary():
            thread = _held.get(key)
            if thread not in (None, threading.get_ident()):
                problem = f"another thread of this process trains in {folder}"
            elif thread is None and (folder.is_dir() or not only_existing):
                with contextlib.suppress(OSError):
                    folder.mkdir(parents=True, exist_ok=True)
                try:
                    owner = _lease(path, held) if is_bucket(path) else _lock(path, held)
                    if owner is None:
                        _held[key] = threading.get_ident()
                        held.callback(_held.pop, key)
                    else:
                        problem = (
                            f"another process trains in {folder}: {owner.get('host')}, process {owner.get('pid')}, "
                            f"since {owner.get('since')}; stop it, or give this run another run_name. If it does not "
                            f"exist any more, delete {path}"
                        )
                except OSError as error:
                    problem = f"cannot write in {folder}: {error.strerror or error}"
                except RuntimeError as error:
                    problem = f"cannot keep {path}: {error}; the limit of threads is reached (ulimit -u)"
        # Nested contexts of all processes are alike, so all of them ask the same questions.
        problem = broadcast_from_process0(f"owner{next(_questions)}", problem)
        if problem:
            raise ConfigError(problem, key="run_name")
        yield


def _lock(path: Path, held: contextlib.ExitStack) -> dict[str, Any] | None:
    """Lock the file until `held` is closed, or return the owner if another process has it."""
    while True:
        with contextlib.ExitStack() as opened:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read(path) or {}
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return _lease(path, held)
                raise

            def delete(file: int = file) -> None:
                with contextlib.suppress(OSError):
                    if os.fstat(file).st_nlink:
                        path.unlink()

            # The owner before may have deleted the file after it was opened here. Then the lock is of no use.
            if os.fstat(file).st_nlink:
                # Deleted before it is closed, so that nobody locks a file that is about to be deleted.
                opened.callback(delete)
                os.ftruncate(file, 0)
                os.write(file, json.dumps(_identity()).encode())
                held.enter_context(opened.pop_all())
                return None


def _lease(path: Path, held: contextlib.ExitStack) -> dict[str, Any] | None:
    """Hold a lease until `held` is closed, or return its owner. One that is there must stay as it is for `STALE_SECONDS`."""
    own, beats, stopped = {**_identity(), "token": uuid.uuid4().hex}, itertools.count(), threading.Event()

    def write() -> None:
        path.write_text(json.dumps({**own, "beat": next(beats)}))

    def is_own() -> bool:
        return (_read(path) or {}).get("token") == own["token"]

    def renew() -> None:
        while not stopped.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                if is_own():
                    write()

    def release() -> None:
        stopped.set()
        # A sign of life that is being written would come back after it.
        thread.join(timeout=STALE_SECONDS)
        with contextlib.suppress(OSError):
            if is_own():
                path.unlink()

    owner, end = _read(path), time.monotonic() + STALE_SECONDS
    while owner is not None and time.monotonic() < end:
        time.sleep(HEARTBEAT_SECONDS / 5)
        now = _read(path)
        if now is not None and now != owner:
            return owner
        owner = now
    # The last writer wins, and all look who that was after a pause.
    write()
    time.sleep(SETTLE_SECONDS)
    if not is_own():
        return _read(path) or {}
    thread = threading.Thread(target=renew, name="rampup-run-lock", daemon=True)
    thread.start()
    held.callback(release)
    return None


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
