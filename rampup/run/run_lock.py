"""One process at a time owns the folder of a run.

The owner has a file there with its host and process id, created with an exclusive hard link, which is atomic on network file
systems too, and touches it every few seconds. The file of a dead process is replaced: at once if the process was on this host,
and otherwise when nobody has touched the file for `STALE_SECONDS`. In a bucket, where an object can neither be linked nor
touched, the owner writes it again with another number.
"""

from __future__ import annotations

import contextlib
import errno
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

from rampup.errors import ConfigError
from rampup.run.distributed import broadcast_from_process0, is_primary
from rampup.run.run_folder import absolute_path, is_bucket

LOCK_FILE = "run.lock"
HEARTBEAT_SECONDS, STALE_SECONDS = 5.0, 30.0
# The folders that this process owns -> the thread that does.
_questions = itertools.count()
# In a bucket: time after which a process that wrote the object at the same moment would have overwritten it.
SETTLE_SECONDS = 2.0
_held: dict[Path, int] = {}


@contextlib.contextmanager
def own_run(folder: Path, *, only_existing: bool = False) -> Iterator[None]:
    """Own a run's folder within a context. Contexts of one thread may be nested. With several processes, process 0 owns it.

    Args:
        folder: the folder, created if necessary.
        only_existing: do nothing if there is no such folder.

    Raises:
        ConfigError: another process has the run.
    """
    key, problem, lock = absolute_path(folder), "", None
    if is_primary():
        thread = _held.get(key)
        if thread not in (None, threading.get_ident()):
            problem = f"another thread of this process trains in {folder}"
        elif thread is None and (folder.is_dir() or not only_existing):
            lock = (_BucketLock if is_bucket(folder) else _Lock)(folder / LOCK_FILE)
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            problem = lock.acquire()
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


class _Lock:
    def __init__(self, path: Path) -> None:
        self._path, self._token = path, uuid.uuid4().hex
        self._stop = threading.Event()

    def acquire(self) -> str:
        """Create the file, and return why that is not possible, or "". Waits for signs of life of an owner on another host."""
        # Written under a name of its own and then linked: a link is atomic, also on NFS, and no lock is seen half written.
        own = self._path.with_name(f"{LOCK_FILE}.{self._token}")
        try:
            try:
                own.write_text(json.dumps({**_identity(), "token": self._token, "since": time.strftime("%Y-%m-%d %H:%M:%S")}))
            except OSError as error:
                return f"cannot write in {self._path.parent}: {error.strerror or error}"
            while not _link(own, self._path):
                owner = _read(self._path)
                if owner is None:
                    continue  # It was released in this moment.
                if not self._is_dead(owner, own):
                    return _refusal(self._path, owner)
                self._remove(owner)
        finally:
            with contextlib.suppress(OSError):
                own.unlink()
        try:
            threading.Thread(target=self._beat, name="rampup-run-lock", daemon=True).start()
        except RuntimeError as error:
            self.release()
            return f"cannot keep {self._path}: {error}; the limit of threads is reached (ulimit -u)"
        return ""

    def release(self) -> None:
        """Delete the file, if it is still this process's."""
        self._stop.set()
        owner = _read(self._path)
        if owner is not None and owner.get("token") == self._token:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def _is_dead(self, owner: dict[str, Any], own: Path) -> bool:
        mine = _identity()
        if owner.get("machine") == mine["machine"]:
            return _started(owner.get("pid")) != owner.get("started")
        # The clocks of two hosts may differ, so both times are the file system's. It may have been set back since.
        seen, end = None, time.monotonic() + STALE_SECONDS
        while time.monotonic() < end:
            try:
                touched = self._path.stat().st_mtime
                os.utime(own)
                age = own.stat().st_mtime - touched
            except OSError:
                return True
            if age > STALE_SECONDS:
                return True
            if seen not in (None, touched):
                return False
            seen = touched
            time.sleep(HEARTBEAT_SECONDS / 5)
        return True

    def _remove(self, owner: dict[str, Any]) -> None:
        """Delete the file of a dead owner, and not that of a process that was faster."""
        aside = self._path.with_name(f"{LOCK_FILE}.{self._token}.old")
        with contextlib.suppress(FileNotFoundError):
            # Between reading and deleting, another process may have taken over: move first, then look whose lock it was.
            os.rename(self._path, aside)
            if (_read(aside) or {}).get("token") != owner.get("token"):
                _link(aside, self._path)
            aside.unlink()


class _BucketLock:
    def __init__(self, path: Path) -> None:
        self._path, self._token = path, uuid.uuid4().hex
        self._stop, self._beats = threading.Event(), itertools.count()
        self._thread = threading.Thread(target=self._beat, name="rampup-run-lock", daemon=True)
        self._since = time.strftime("%Y-%m-%d %H:%M:%S")

    def acquire(self) -> str:
        """Write the object, and return why that is not possible, or "". Waits for signs of life of an owner."""
        try:
            owner = _read(self._path)
            if owner is not None and not self._is_dead(owner):
                return _refusal(self._path, owner)
            # A bucket has no exclusive creation. The last writer wins, and all look who that was after a pause.
            self._write()
            time.sleep(SETTLE_SECONDS)
            owner = _read(self._path) or {}
        except OSError as error:
            return f"cannot write in {self._path.parent}: {error.strerror or error}"
        if owner.get("token") != self._token:
            return _refusal(self._path, owner)
        self._thread.start()
        return ""

    def release(self) -> None:
        """Delete the object, if it is still this process's."""
        self._stop.set()
        # A sign of life that is being written would come back after it.
        self._thread.join(timeout=STALE_SECONDS)
        with contextlib.suppress(OSError):
            if (_read(self._path) or {}).get("token") == self._token:
                self._path.unlink()

    def _write(self) -> None:
        content = {**_identity(), "token": self._token, "since": self._since, "beat": next(self._beats)}
        self._path.write_text(json.dumps(content))

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                if (_read(self._path) or {}).get("token") == self._token:
                    self._write()

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        if owner.get("machine") == _identity()["machine"]:
            return _started(owner.get("pid")) != owner.get("started")
        end = time.monotonic() + STALE_SECONDS
        while time.monotonic() < end:
            time.sleep(HEARTBEAT_SECONDS / 5)
            now = _read(self._path)
            if now is None:
                return True
            if now != owner:
                return False
        return True


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    return (
        f"another process trains in {path.parent}: {owner.get('host')}, process {owner.get('pid')}, "
        f"since {owner.get('since')}; stop it, or give this run another run_name. If it does not "
        f"exist any more, delete {path}"
    )


def _link(own: Path, path: Path) -> bool:
    """Give a file a second name, and return whether that name was free."""
    try:
        os.link(own, path)
    except FileExistsError:
        # The answer of a network file system may get lost after it has made the link.
        return own.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        try:  # A file system without hard links.
            with open(path, "x") as file:
                file.write(own.read_text())
        except FileExistsError:
            return False
    return True


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
    """Return host, process, and the machine within which the number of a process means something."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return {"host": parts[0], "pid": os.getpid(), "started": _started(os.getpid()), "machine": " ".join(parts)}


def _started(pid: Any) -> str | None:
    """Return when a process of this machine started, because numbers of processes are used again; None if it is dead."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (OSError, TypeError, OverflowError):
        return None
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""  # No /proc: alive, and nothing more is known.
    return None if state in "ZX" else fields[18]
