"""One process at a time owns the folder of a run.

The owner holds an exclusive lock of the operating system on a file there, which says
who it is. The system releases the lock when the process ends in any way, also on
another host that shares the file system. A bucket, and a file system without locks, has
a lease instead: the owner writes the file again every few seconds, with another number,
and a lease is free when nobody has written it for `STALE_SECONDS`. An owner that was
paused or cut off for longer may have lost it: `require_owner` says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from rampup.engine.processes import broadcast_from_process0, first_problem
from rampup.errors import ConfigError
from rampup.loop.run_folder import ANOTHER_FOLDER, absolute_path, is_bucket, parse_json

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
# Two processes may write a lease at once. Each waits this long and reads it again; the
# last writer owns it.
SETTLE_SECONDS = 2.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_VISIBLE_SECONDS = 60.0  # NFS may show an old view of a folder for so long
_OWNER_SECONDS = 24 * 3600
# The content of a lock: who has it, and since when.
Owner = dict[str, Any]
# Returns who has a run instead of its owner, or None.
FindOwner = Callable[[], Owner | None]
# The folders that this process owns -> the thread that does, and what finds a later
# owner.
_held: dict[Path, tuple[int, FindOwner]] = {}


class _TakenError(Exception):
    """Another process has the run; its argument is the content of the lock."""


@contextlib.contextmanager
def own_run(
    folder: Path, *, only_existing: bool = False, shared: bool = False
) -> Iterator[None]:
    """Own a run's folder within a context, in process 0 for all, or refuse it. Contexts
    of one thread may be nested.

    With `only_existing`, a folder that is not there is not made. With `shared`, all
    processes must see it.
    """
    with contextlib.ExitStack() as held:
        problem = broadcast_from_process0(
            "owner", lambda: _own(folder, only_existing, held), timeout=_OWNER_SECONDS
        )
        if problem:
            raise ConfigError(problem, key="run_name")
        if shared and not is_bucket(folder):
            owner = broadcast_from_process0("shared", lambda: _owner_in(folder))
            if problem := first_problem(_invisible(folder, owner)):
                raise ConfigError(problem, key="base_output_directory")
        yield


def require_owner(folder: Path) -> None:
    """Refuse to go on in a folder that another process owns now. Storage that is away
    says nothing.
    """
    _, find_owner = _held.get(absolute_path(folder), (0, lambda: None))
    owner = None
    with contextlib.suppress(OSError):
        owner = find_owner()
    if owner is not None:
        raise ConfigError(
            f"another process took over {folder}: {_words(owner)}; this one was paused"
            f" or cut off for longer than {STALE_SECONDS:g} s, or {LOCK_FILE} was"
            " deleted, and ends",
            key="run_name",
        )


def _owner_in(folder: Path) -> str:
    """Return who owns a folder, as this process sees it."""
    with contextlib.suppress(OSError):
        return _words(_read(folder / LOCK_FILE) or {})
    return ""


def _invisible(folder: Path, owner: str) -> str:
    """Return that this process does not see the folder that process 0 owns, or ""."""
    end = time.monotonic() + _VISIBLE_SECONDS
    while _owner_in(folder) != owner:
        if time.monotonic() > end:
            return (
                f"process {jax.process_index()} on {socket.gethostname()} does not see"
                f" the folder {folder} of process 0 on {owner}: it must be on a file"
                " system that all hosts share, or in a bucket"
            )
        time.sleep(_VISIBLE_SECONDS / 100)
    return ""


def _own(folder: Path, only_existing: bool, held: contextlib.ExitStack) -> str:
    """Own a folder until `held` is closed; return why that is not possible, or ""."""
    try:
        key, path = absolute_path(folder), folder / LOCK_FILE
        thread, _ = _held.get(key, (None, None))
        if thread == threading.get_ident() or (only_existing and not folder.is_dir()):
            return ""
        if thread is not None:
            return f"another thread of this process trains in {folder}"
        folder.mkdir(parents=True, exist_ok=True)
        find_owner = _lease(path, held) if is_bucket(path) else _lock(path, held)
    except _TakenError as error:
        return (
            f"another process trains in {folder}: {_words(error.args[0])}; stop it, or"
            f" {ANOTHER_FOLDER}. If it does not exist any more, delete"
            f" {folder / LOCK_FILE}"
        )
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror or error}"
    _held[key] = threading.get_ident(), find_owner
    held.callback(_held.pop, key)
    return ""


def _words(owner: Owner) -> str:
    return (
        f"{owner.get('host')}, process {owner.get('pid')}, since {owner.get('since')}"
    )


def _lock(path: Path, held: contextlib.ExitStack) -> FindOwner:
    """Lock the file until `held` is closed, and return what finds a later owner."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError):
                raise _TakenError(_read(path) or {}) from None
            if error.errno in _NO_LOCKS:
                return _lease(path, held)
            raise
        # The owner before may have deleted the file after it was opened here.
        if os.fstat(file).st_nlink:
            break
        os.close(file)

    def find_owner() -> Owner | None:
        return None if os.fstat(file).st_nlink else _read(path)

    def release() -> None:
        # Deleted before it is closed, so that nobody locks a file that is about to be
        # deleted.
        with contextlib.suppress(OSError):
            if os.fstat(file).st_nlink:
                path.unlink()
        os.close(file)

    held.callback(release)
    os.ftruncate(file, 0)
    os.write(file, json.dumps(_identity()).encode())
    return find_owner


def _lease(path: Path, held: contextlib.ExitStack) -> FindOwner:
    """Hold a lease until `held` is closed, and return what finds a later owner."""
    owner = _read(path)
    end = time.monotonic() + STALE_SECONDS
    # A lease that is there is free when it has stayed as it is.
    while owner is not None and time.monotonic() < end:
        time.sleep(HEARTBEAT_SECONDS / 5)
        now = _read(path)
        if now is not None and now != owner:
            raise _TakenError(owner)
        owner = now
    lease = _Lease(path)
    lease.write()
    time.sleep(SETTLE_SECONDS)
    if (found := lease.find_owner()) is not None:
        raise _TakenError(found)
    lease.thread.start()
    held.callback(lease.release)
    return lease.find_owner


class _Lease:
    """A lease that a thread renews until it is released, or until another process has
    it.
    """

    def __init__(self, path: Path) -> None:
        self.thread = threading.Thread(
            target=self._renew_again, name="rampup-run-lock", daemon=True
        )
        self._path = path
        self._content = {**_identity(), "token": uuid.uuid4().hex}
        self._released = threading.Event()
        self._owner: Owner | None = None

    def write(self) -> None:
        """Write the lease, with another time."""
        self._path.write_text(json.dumps({**self._content, "beat": time.time()}))

    def find_owner(self) -> Owner | None:
        """Renew the lease, or return who has it instead."""
        if self._owner is None:
            found = _read(self._path)
            if found is None or self._is_own(found):
                self.write()
            elif found:  # {}: somebody writes it right now
                self._owner = found
        return self._owner

    def release(self) -> None:
        """Stop renewing, and delete the lease."""
        self._released.set()
        # A sign of life that is being written would come back after it.
        self.thread.join(timeout=STALE_SECONDS)
        with contextlib.suppress(OSError):
            if self._is_own(_read(self._path) or {}):
                self._path.unlink()

    def _is_own(self, found: Owner) -> bool:
        return bool(found.get("token") == self._content["token"])

    def _renew_again(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                self.find_owner()


def _read(path: Path) -> Owner | None:
    """Return a lock's content; {} if it cannot be understood, None if there is no
    file.
    """
    try:
        content = parse_json(path.read_bytes())
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else {}


def _identity() -> Owner:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
