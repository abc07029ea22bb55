"""The folder of one run: its files, and metrics.jsonl and eval.jsonl with one line per
step, each step once.

The folder is on a local file system, or in a bucket such as `gs://bucket/runs`. A
bucket stores whole objects, without appending, hard links and an atomic rename of
folders. It can be away for minutes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError, StorageError, a_type
from rampup.loop.events import OnEvent, StorageFailed, ignore_event

CONFIG_FILE = "config.yml"  # of the last start whose checkpoint was accepted
METRICS_FILE, EVAL_FILE = "metrics.jsonl", "eval.jsonl"
# what `rampup design --write` has predicted for the run
PREDICTION_FILE = "prediction.json"
# The way out of a folder that has another run.
ANOTHER_FOLDER = (
    "train in another folder (run_name of a configuration, folder of a Loop)"
)
# JSON values by name: of a checkpoint, of a line of metrics.jsonl, about a run.
Record = Mapping[str, Any]
# A line of a file, and its record, or None if it is not JSON with a step.
Line = tuple[bytes, dict[str, Any] | None]
PATIENCE_SECONDS = 300.0  # for a bucket that is away
RETRY_SECONDS = 5.0
CHECKPOINT_FOLDER = "checkpoints"
DAMAGED_FOLDER = "damaged_checkpoints"


class StepLog:
    """A file of JSON lines, each with a `step` that is not smaller than those before,
    that are flushed when they are written.

    Lines that a full disk refuses stay in memory and are written with the next line, or
    by `sync`. A bucket cannot append, so there lines wait for `sync`, which writes the
    whole file again.

    Damaged lines, those of step `keep_below` and later, and a last line that a crash
    left incomplete, are removed first; damage is reported. A process with
    `writes=False` leaves the file to another one.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_below: int,
        writes: bool = True,
        on_event: OnEvent = ignore_event,
    ) -> None:
        self.path = path
        self._writes = writes
        self._unwritten = bytearray()
        # Locally the open file. In a bucket None, and then its content there.
        self._file: int | None = None
        self._content = b""
        if not writes:
            return
        with writing(path):
            self._cut(keep_below, on_event)
            if not is_bucket(path):
                self._file = os.open(
                    path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666
                )

    def _cut(self, keep_below: int, on_event: OnEvent) -> None:
        """Remove lines from a step on, and damaged ones."""
        if problem := describe_damage(self.path):
            on_event(StorageFailed(problem=f"{problem}; such lines were removed"))
        content = self.path.read_bytes() if self.path.exists() else b""
        kept = b"".join(
            line
            for line, record in _parse(content.splitlines(keepends=True))
            if record is not None and record["step"] < keep_below
        )
        if is_bucket(self.path):
            self._content = kept
        if kept == content:
            return
        if is_bucket(self.path) or not content.startswith(kept):
            write_whole(self.path, kept)
        else:
            os.truncate(self.path, len(kept))  # needs no room on a full disk

    def write(self, record: Record) -> None:
        """Append one line."""
        if not self._writes:
            return
        self._unwritten += (json.dumps(record) + "\n").encode()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._append(self._file)

    def sync(self) -> None:
        """Wait until every line is on disk, or raise a StorageError: the lines stay in
        memory, unless the file is gone.
        """
        with writing(self.path):
            if self._file is not None:
                self._append(self._file)
                # A checkpoint may follow: after a power cut it must not be newer than
                # the lines of its steps.
                os.fsync(self._file)
                if not os.fstat(self._file).st_nlink:
                    raise FileNotFoundError(
                        errno.ENOENT, "it was deleted or replaced during the run"
                    )
            elif self._unwritten:
                self._upload()

    def _upload(self) -> None:
        """Write the whole file into a bucket, which may be away for a while."""
        end = time.monotonic() + PATIENCE_SECONDS
        content = self._content + self._unwritten
        while True:
            try:
                self.path.write_bytes(content)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_SECONDS)
        self._content = content
        self._unwritten.clear()

    def close(self) -> None:
        """Close the file; no call follows. In a bucket, it is tried once to write the
        lines that no `sync` wrote: after an error, they explain it.
        """
        if self._file is not None:
            os.close(self._file)
        elif self._unwritten:
            # Not above, as the lock needs this module.
            from rampup.loop.lock import require_owner

            # Without a wait, and not into the run of another process.
            with contextlib.suppress(OSError, ConfigError):
                require_owner(self.path.parent)
                self.path.write_bytes(self._content + self._unwritten)

    def _append(self, file: int) -> None:
        """Write what is unwritten. A full disk may take a part of the bytes; the rest
        stays in front.
        """
        while self._unwritten:
            del self._unwritten[: os.write(file, self._unwritten)]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of metrics.jsonl or eval.jsonl without those that are
    damaged; none if there is no such file.
    """
    return (record for _, record in _lines(path) if record is not None)


def first_and_last_line(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first and the last line of metrics.jsonl or eval.jsonl; {} if there
    are none.
    """
    first: dict[str, Any] = {}
    last = first
    for last in read_lines(path):
        first = first or last
    return first, last


def describe_damage(path: Path) -> str:
    """Return which line of metrics.jsonl or eval.jsonl is damaged first, as a sentence,
    or ""; not a last one without an end.
    """
    for number, (_, record) in enumerate(_lines(path), start=1):
        if record is None:
            return f"{path} is damaged: line {number} is not JSON with a step"
    return ""


def _lines(path: Path) -> Iterator[Line]:
    """Yield each line, and its record, or None if it is not JSON with a step."""
    if path.is_dir():
        raise StorageError(
            f"{path} is a folder and not a file", fix="move it away, or rename it"
        )
    if path.exists():
        with path.open("rb") as file:
            yield from _parse(file)


def _parse(lines: Iterable[bytes]) -> Iterator[Line]:
    """Yield each line and its record, or None, but not a last line that is
    incomplete.
    """
    for line in lines:
        record = parse_json(line)
        if not line.endswith(b"\n"):
            continue
        valid = isinstance(record, dict) and isinstance(record.get("step"), int)
        yield line, record if valid else None


def parse_json(content: str | bytes) -> Any:
    """Return the value of a JSON text, or None if it is none, or cannot be held."""
    try:
        return json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None


def as_json(values: Record) -> Any:
    """Return the values of a checkpoint as they will be read, such as lists for tuples,
    or refuse what JSON has not.
    """

    def refuse(value: Any) -> None:
        raise ConfigError(
            f"a checkpoint takes JSON values, and not {a_type(value)}",
            fix="let identity and components have numbers of Python, texts, lists and"
            " dicts",
            key="components",
        )

    return json.loads(json.dumps(values, default=refuse))


def write_whole(file: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves either the old content or the new one, or
    raise StorageError.
    """
    with writing(file):
        if is_bucket(file):  # an object is there as a whole or not at all
            file.write_bytes(content)
            return
        temporary = file.with_name(f"{file.name}.tmp")
        with open(temporary, "wb") as opened:
            opened.write(content)
            # After a power cut, too: on disk before it takes the place of the old one.
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, file)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what the system refuses as a StorageError with the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}"
        ) from error


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path`, or for a bucket an `etils.epath.Path`, which has the
    same methods.
    """
    if not is_bucket(path):
        return Path(path)
    from rampup.loop.bucket import bucket_path

    return bucket_path(path)


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a bucket or an object in it."""
    return re.match(r"\w+://", os.fspath(path)) is not None


def absolute_path(path: str | os.PathLike[str], *, follow: bool = True) -> Path:
    """Return an absolute path; `follow` resolves symbolic links. The URL of a bucket
    stays as it is.
    """
    found = as_path(path)
    return (
        found if is_bucket(found) else found.resolve() if follow else found.absolute()
    )
