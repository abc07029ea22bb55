"""Checksums of a folder's files, by which a checkpoint that was damaged after it was written is noticed."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHECKSUMS_FILE = "checksums.json"
# What the library that writes checkpoints adds or completes after the checksums are taken; it holds no part of the state.
_LATER = frozenset({"commit_success.txt", "_CHECKPOINT_METADATA"})
_THREADS = 8


def write_checksums(folder: Path) -> None:
    """Write the size and the SHA-256 of every file in a folder into a file there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     _ = (Path(name) / "a").write_text("x")
        ...     write_checksums(Path(name))
        ...     whole = damage(Path(name))
        ...     _ = (Path(name) / "a").write_text("y")
        ...     print(whole, "|", damage(Path(name)))
        None | a is not what was written: its SHA-256 differs
    """
    files = _files(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = dict(zip(files, threads.map(lambda name: _sum_of(folder / name), files), strict=True))
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1) + "\n")


def damage(folder: Path) -> str | None:
    """Say what is wrong with a folder that had its checksums written, or None if nothing is."""
    try:
        expected = json.loads((folder / CHECKSUMS_FILE).read_bytes())
        wanted = {str(name): (int(size), str(digest)) for name, (size, digest) in expected.items()}
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS_FILE} cannot be read"
    if extra := sorted(set(_files(folder)) - set(wanted)):
        return f"{extra[0]} was not written with it"
    with ThreadPoolExecutor(_THREADS) as threads:
        problems = threads.map(lambda name: _difference(folder / name, name, *wanted[name]), sorted(wanted))
        return next(filter(None, problems), None)


def _files(folder: Path) -> list[str]:
    """Return the files of a folder, without those that are added later to its top."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in names if name not in _LATER and name != CHECKSUMS_FILE)


def _sum_of(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _difference(path: Path, name: str, size: int, digest: str) -> str | None:
    try:
        found_size, found_digest = _sum_of(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if found_size != size:
        return f"{name} has {found_size:,} bytes, not {size:,}"
    return None if found_digest == digest else f"{name} is not what was written: its SHA-256 differs"
