"""The folder of one run: its files, and metrics.jsonl and eval.jsonl with one line per step, each step once.

The folder is on a local file system, or in a bucket such as `gs://bucket/runs`. A bucket stores whole objects. It has no
appending, no hard links and no atomic rename of folders, so the files of a run are written differently there: see `StepLog`,
`own_run` and `Checkpoints`.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError, StorageError

# The configuration that the run was last started with; written after the run's checkpoint, if there is one, was accepted.
CONFIG_FILE = "config.yml"
METRICS_FILE, EVAL_FILE = "metrics.jsonl", "eval.jsonl"
# `rampup critical` keeps its results next to the run, in RUN.critical/step-.../result.json.
CRITICAL_SUFFIX, CRITICAL_RESULT = ".critical", "result.json"
# A file in a bucket is written again as a whole, which should not happen in every step.
UPLOAD_SECONDS = 60.0
CHECKPOINT_FOLDER, DAMAGED_FOLDER = "checkpoints", "damaged_checkpoints"
# The schemes of buckets, with the packages that they need.
_PACKAGES = {"gs": "'rampup[gcs]'", "s3": "s3fs", "az": "adlfs"}


class StepLog:
    """A file of JSON lines, each with a `step`, that are flushed when they are written.

    Lines that a full disk refuses stay in memory and are written with the next line, or by `sync`. In a bucket, which cannot
    append, the whole file is written again: at most every `UPLOAD_SECONDS`, by `sync` and by `close`.

    Args:
        path: the file.
        keep_below: lines of this step and later, and any line that a crash left incomplete, are removed first.
        writes: False in a process that leaves the file to another one.

    Raises:
        StorageError: the file cannot be read or created.
    """

    def __init__(self, path: Path, *, keep_below: int, writes: bool = True) -> None:
        self.path, self._unwritten = path, b""
        self._file: int | None = None
        # In a bucket: the lines that are there, or None.
        self._content: bytes | None = None
        self._uploaded = -UPLOAD_SECONDS
        if not writes:
            return
        try:
            kept = [line for line in read_lines(path) if line["step"] < keep_below]
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        if is_bucket(path):
            self._content = "".join(json.dumps(line) + "\n" for line in kept).encode()
            self.sync()
            return
        temporary = path.with_suffix(".tmp")
        try:
            # Written next to the file and moved into its place, so that a crash leaves the old file or the new one.
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(temporary, path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._content is not None:
            self._unwritten += (json.dumps(record) + "\n").encode()
            if time.monotonic() - self._uploaded >= UPLOAD_SECONDS:
                with contextlib.suppress(OSError):
                    self._upload()
        if self._file is not None:
            self._unwritten += (json.dumps(record) + "\n").encode()
            with contextlib.suppress(OSError):
                self._write_out()

    def sync(self) -> None:
        """Wait until every line is on disk.

        Raises:
            StorageError: the disk is full, and the lines stay in memory; or the file is gone.
        """
        if self._file is not None or self._content is not None:
            try:
                if self._content is not None:
                    self._upload()
                    return
                assert self._file is not None
                self._write_out()
                # A checkpoint may follow: after a power cut it must not be newer than the lines of its steps.
                os.fsync(self._file)
                if not os.fstat(self._file).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "it was deleted or replaced during the run")
            except OSError as error:
                raise StorageError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._content is not None:
            with contextlib.suppress(OSError):
                self._upload()
            self._content = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_out(self) -> None:
        assert self._file is not None
        # A full disk may take a part of the bytes; the rest stays in front.
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]

    def _upload(self) -> None:
        assert self._content is not None
        self._uploaded = time.monotonic()
        self.path.write_bytes(self._content + self._unwritten)
        self._content, self._unwritten = self._content + self._unwritten, b""


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of metrics.jsonl or eval.jsonl; none if there is no such file.

    A line that a crash left incomplete is skipped.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def write_config(folder: Path, text: str) -> None:
    """Write the configuration that a run is started with.

    Raises:
        StorageError: the disk is full.
    """
    temporary = folder / f"{CONFIG_FILE}.tmp"
    try:
        if is_bucket(folder):
            # An object is there as a whole or not at all.
            (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / CONFIG_FILE)
    except OSError as error:
        raise StorageError(f"{folder / CONFIG_FILE} cannot be written: {error.strerror or error}") from error


def run_folder(base: str, name: str) -> Path:
    """Return the folder of a run, created if necessary.

    Args:
        base: `base_output_directory`.
        name: the run's name, whose folder may exist; "" creates a new folder with the time as its name.

    Raises:
        ConfigError: the folder cannot be created.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = iter([name]) if name else (f"run-{now}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    for candidate in names:
        folder = as_path(base) / candidate
        try:
            folder.mkdir(parents=True, exist_ok=bool(name))
        except FileExistsError:
            if name:
                raise ConfigError(f"{folder} exists and is not a folder", key="run_name") from None
            continue
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", key="base_output_directory") from None
        return folder
    raise ConfigError(f"no free folder name in {base}", key="run_name")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path`, or for a bucket an `etils.epath.Path`, which has the same methods.

    Raises:
        ConfigError: the URL is not of a bucket.
        MissingDependencyError: the package for this kind of bucket is not installed.

    Example:
        >>> as_path("runs"), is_bucket("runs"), is_bucket("gs://bucket/runs")
        (PosixPath('runs'), False, True)
    """
    text = os.fspath(path)
    if not is_bucket(text):
        return Path(path)
    if isinstance(path, PurePath):
        return path  # type: ignore[return-value]
    scheme = text.partition("://")[0]
    if scheme not in _PACKAGES:
        raise ConfigError(
            f"{text} is neither a folder nor a bucket; buckets begin with {', '.join(f'{name}://' for name in _PACKAGES)}",
            key="base_output_directory",
        )
    from etils import epath

    # epath imports the package of a scheme at the first access.
    bucket = epath.Path(text)
    try:
        bucket.exists()
    except ImportError as error:
        raise MissingDependencyError(
            f"{scheme}:// needs a package that is not installed: pip install {_PACKAGES[scheme]} ({error})",
            key="base_output_directory",
        ) from error
    return bucket  # type: ignore[return-value]


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a bucket or an object in it."""
    return re.match(r"\w+://", os.fspath(path)) is not None


def absolute_path(path: str | os.PathLike[str], *, follow: bool = True) -> Path:
    """Return an absolute path; that of a bucket is. `epath` would put the working directory in front of it.

    Args:
        path: the path; see `as_path`.
        follow: resolve symbolic links.
    """
    found = as_path(path)
    return found if is_bucket(found) else found.resolve() if follow else found.absolute()
