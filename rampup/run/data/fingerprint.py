"""What a file holds, in a few letters, so that a run does not go on with other data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from rampup.errors import DataError

WHOLE_BYTES = 64 * 2**20
NUM_BLOCKS = 64
BLOCK_BYTES = 2**20
_THREADS = 8


def fingerprints(paths: Sequence[str]) -> dict[str, str]:
    """Return size and digest of each file, by its name below the folder that all of them share.

    Files up to 64 MiB are read whole, of larger ones 64 blocks of 1 MiB from the first to the last, evenly spread. So a change
    in place of a few bytes of a large file can go unnoticed; a file that is longer, shorter or another one cannot.

    Args:
        paths: the files.

    Raises:
        DataError: a file cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "a.txt").write_text("x")
        ...     fingerprints([f"{folder}/a.txt"])
        {'a.txt': '1 bytes, SHA-256 2d711642b726'}
    """
    if not paths:
        return {}
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    names = [Path(os.path.relpath(os.path.abspath(path), shared)).as_posix() for path in paths]
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(_fingerprint, paths), strict=True))


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (name, fingerprint before, fingerprint now) of the files that differ.

    Example:
        >>> changed_files({"a": "x", "b": "y"}, {"a": "x", "c": "z"})
        [('b', 'y', 'no such file'), ('c', 'no such file', 'z')]
    """
    names = (name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name))
    return [(name, before.get(name, "no such file"), now.get(name, "no such file")) for name in names]


def _fingerprint(path: str) -> str:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256") if size <= WHOLE_BYTES else _of_blocks(file, size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{size} bytes, SHA-256 {digest.hexdigest()[:12]}"


def _of_blocks(file: BinaryIO, size: int) -> hashlib._Hash:
    digest = hashlib.sha256()
    for number in range(NUM_BLOCKS):
        file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
        digest.update(file.read(BLOCK_BYTES))
    return digest
