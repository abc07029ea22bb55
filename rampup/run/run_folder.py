"""The folder of one run: metrics.jsonl and eval.jsonl, one line a step, each step once whatever happened."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError, StorageError


class StepLog:
    """A file of JSON lines, each with a `step`; what is written is flushed at once.

    What a full disk refuses is kept in memory and written with the next line, or by `sync`.

    Args:
        path: the file.
        keep_below: lines of this step and later, and any line that a crash tore, are cut off first.
        writes: False in a process that leaves the file to another one.

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(self, path: Path, *, keep_below: int, writes: bool = True) -> None:
        self.path, self._unwritten = path, b""
        self._file: int | None = None
        if not writes:
            return
        kept = [line for line in read_lines(path) if line["step"] < keep_below]
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            os.replace(temporary, path)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is not None:
            self._unwritten += (json.dumps(record) + "\n").encode()
            with contextlib.suppress(OSError):
                self._write_out()

    def sync(self) -> None:
        """Return when every line is on the disk.

        Raises:
            StorageError: the disk takes no more; the lines stay in memory.
        """
        if self._file is not None:
            try:
                self._write_out()
                os.fsync(self._file)
            except OSError as error:
                raise StorageError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write_out(self) -> None:
        assert self._file is not None
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSON-lines file; none if there is no file."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def run_folder(base: str, name: str) -> Path:
    """Return the folder of a run, made if need be.

    Args:
        base: `base_output_directory`.
        name: the run's name, whose folder may exist; "" makes a new folder, named after the time.

    Raises:
        ConfigError: the folder cannot be made.
    """
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    names = iter([name]) if name else (f"run-{now}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    for candidate in names:
        folder = Path(base) / candidate
        try:
            folder.mkdir(parents=True, exist_ok=bool(name))
        except FileExistsError:
            if name:
                raise ConfigError(f"{folder} exists and is no folder", key="run_name") from None
            continue
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", key="base_output_directory") from None
        return folder
    raise ConfigError(f"no free folder name in {base}", key="run_name")
