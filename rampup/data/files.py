"""The files of a data set: opened as row sources, split into training and evaluation
rows, and fingerprinted.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import os
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rampup.config.schema import Config
from rampup.data.batches import Loading
from rampup.data.sources import (
    PlaceholderRows,
    RecordRows,
    RowRange,
    RowSource,
    SyntheticRows,
    TokenRows,
)
from rampup.engine.processes import broadcast_from_process0
from rampup.errors import DataError

FULL_HASH_BYTES = 64 * 2**20  # larger files are hashed by evenly spaced blocks
NUM_BLOCKS = 64
BLOCK_BYTES = 2**20
_THREADS = 8
HOLDOUT = 0.05  # the share of the rows that are held out, without evaluation files
_SETTLED_NS = 2 * 10**9


def open_sources(config: Config) -> tuple[RowSource, RowSource]:
    """Return the rows to train on and the rows to evaluate on.

    Without `grain_train_files`, `text` is the Python standard library's own source.
    Without `grain_eval_files`, a fraction of the training data is held out: every n-th
    text file, or the last rows of other data and of few text files.
    """
    shape: dict[str, Any] = {
        "sequence_length": config.max_target_length,
        "vocab_size": config.vocab_size,
    }
    if config.dataset_type == "synthetic":
        return SyntheticRows(2**20, **shape), SyntheticRows(2**14, first=2**20, **shape)
    paths = _find_files(config.grain_train_files, "grain_train_files")
    eval_paths = (
        None
        if config.grain_eval_files is None
        else _find_files(config.grain_eval_files, "grain_eval_files")
    )
    if config.dataset_type == "text" and eval_paths is None:
        # Every n-th file, so that evaluation reads from all folders and not only from
        # the last one.
        period = max(round(1 / HOLDOUT), 2)
        eval_paths = (
            paths[period // 2 :: period] or None
        )  # None: too few files to spare one
        paths = [path for path in paths if path not in set(eval_paths or ())]

    def open_one(files: list[str]) -> RowSource:
        if config.dataset_type == "text":
            # All bytes, with a zero after each file.
            pieces: list[bytes] = []
            for path in files:
                with _naming(path):
                    pieces.append(Path(path).read_bytes() + b"\0")
            offsets = itertools.accumulate(map(len, pieces), initial=0)
            text = np.frombuffer(b"".join(pieces), np.uint8)
            rows: RowSource = TokenRows(
                [text],
                ["text"],
                starts=list(zip(offsets, files, strict=False)),
                **shape,
            )
        elif config.dataset_type == "arrayrecord":
            rows = RecordRows(files, dtype=config.token_dtype, **shape)
        else:
            rows = TokenRows(
                [open_token_file(path, config.token_dtype) for path in files],
                files,
                **shape,
            )
        if len(rows) == 0:
            raise DataError(
                f"{', '.join(files)[:300]}: fewer than two tokens are not a row"
            )
        return rows

    train = open_one(paths)
    if eval_paths is not None:
        return train, open_one(eval_paths)
    # The last rows, so that the numbers of the training rows do not depend on how many
    # are held out.
    held_out = max(round(len(train) * HOLDOUT), 1)
    if held_out >= len(train):
        problem = (
            f"{', '.join(paths)[:300]}: {len(train)} rows are too few to hold out"
            f" {held_out} for evaluation"
        )
        raise DataError(
            f"{problem}; add text, set a smaller max_target_length, or name"
            " grain_eval_files"
        )
    split = len(train) - held_out
    return RowRange(train, 0, split), RowRange(train, split, len(train))


def shared_sources(loading: Loading, config: Config) -> tuple[RowSource, RowSource]:
    """Open the sources in the processes that read; the others open no file, and get
    placeholders.
    """
    opened = open_sources(config) if loading.reads else None
    if loading.factor == 1 and opened is not None:
        return opened
    # The others need the numbers of rows, for the order of samples.
    numbers = json.loads(
        broadcast_from_process0(
            "sources", json.dumps([len(rows) for rows in opened or ()])
        )
    )
    shape = {
        "sequence_length": config.max_target_length,
        "vocab_size": config.vocab_size,
    }
    return opened or (
        PlaceholderRows(numbers[0], **shape),
        PlaceholderRows(numbers[1], **shape),
    )


def _find_files(pattern: str | None, key: str) -> list[str]:
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {
            "site-packages",
            "dist-packages",
            "__pycache__",
            "test",
            "tests",
            "idlelib",
            "lib2to3",
        }
        files = [
            path
            for path in root.rglob("*.py")
            if not skipped & set(path.relative_to(root).parts)
        ]
        if not files:
            raise DataError(
                f"no Python source files in {root}; set {key} to text files of"
                " your own",
                key=key,
            )
        return [
            str(path)
            for path in sorted(
                files, key=lambda path: path.relative_to(root).as_posix()
            )
        ]
    # The order of the files is the order of the rows, and a file system may list them
    # in any.
    paths = sorted(
        path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir()
    )
    if not paths:
        hint = (
            f"; it is a folder: name its files, such as '{pattern.rstrip('/')}/*'"
            if Path(pattern).is_dir()
            else ""
        )
        raise DataError(f"{key}={pattern!r} matches no file{hint}", key=key)
    for path in paths:
        if not Path(path).is_file():
            kind = "a broken link" if Path(path).is_symlink() else "not a regular file"
            raise DataError(
                f"{key}={pattern!r} matches {path}, which is {kind}", key=key
            )
    return paths


class _OpenFile:
    """A file that is open for as long as somebody has this object, and the place on the
    disk that it was opened at.
    """

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.status = os.fstat(self.descriptor)
        self.place = self.status.st_dev, self.status.st_ino

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# A system limits the files that a process has open, usually to 1,024, and a corpus may
# have more. A file that is dropped from here stays open until its last reader is done.
_open_file = functools.lru_cache(maxsize=64)(_OpenFile)


class TokenFile:
    """A file of tokens that is read in parts. Unlike a memory map, it raises an error
    if the file is truncated meanwhile.
    """

    def __init__(
        self, path: str, dtype: np.dtype[Any], *, offset: int, size: int
    ) -> None:
        self._path = path
        self._dtype = dtype
        self._offset = offset  # bytes before the first token
        self._size = size  # number of tokens
        # Opened anew: one that was opened before this run may be of a file that is
        # gone.
        self._place = _OpenFile(path).place

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._size)
        wanted = (stop - start) * self._dtype.itemsize
        place = self._offset + start * self._dtype.itemsize
        try:
            file = _open_file(self._path)
            if file.place != self._place:
                _open_file.cache_clear()
                file = _open_file(self._path)
        except OSError as error:
            raise DataError(
                f"{self._path} cannot be opened again: {error.strerror or error}"
            ) from error
        if file.place != self._place:
            raise DataError(
                f"{self._path} is another file than when the run started: it was"
                " replaced"
            )
        content = b""
        # pread does not move a shared file position, so threads can read at the same
        # time; it may return less than requested.
        while len(content) < wanted:
            try:
                more = os.pread(
                    file.descriptor, wanted - len(content), place + len(content)
                )
            except OSError as error:
                raise DataError(
                    f"{self._path} cannot be read at byte {place:,}:"
                    f" {error.strerror or error}"
                ) from error
            if not more:
                end = os.fstat(file.descriptor).st_size
                raise DataError(
                    f"{self._path} ends at byte {end:,}: it was truncated after the run"
                    " started"
                )
            content += more
        return np.frombuffer(content, self._dtype)


def open_token_file(path: str, token_dtype: str) -> TokenFile:
    """Open a .npy file, or a .bin file of little-endian tokens of type
    `token_dtype`.
    """
    if not path.endswith((".npy", ".bin")):
        raise DataError(
            f"{path} must end in .npy or .bin for dataset_type=tokens",
            key="grain_train_files",
        )
    try:
        if path.endswith(".bin"):
            dtype = np.dtype(token_dtype).newbyteorder("<")
            size = os.path.getsize(path)
            if size == 0 or size % dtype.itemsize:
                raise ValueError(
                    f"{size:,} bytes are not a multiple of {dtype.itemsize} bytes per"
                    " token"
                )
            return TokenFile(path, dtype, offset=0, size=size // dtype.itemsize)
        # Mapped to find where the data begin. Reading through the map would be a
        # signal, not an error, if it is truncated.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if (
            isinstance(array, np.ndarray)
            and array.ndim == 1
            and array.dtype.kind in "iu"
        ):
            return TokenFile(
                path, array.dtype, offset=getattr(array, "offset", 0), size=array.size
            )
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as tokens: {error}") from error
    if not isinstance(array, np.ndarray):
        raise DataError(
            f"{path} is an archive of arrays; save a single array with numpy.save"
        )
    raise DataError(
        f"{path} must be a one-dimensional array of integers; it is {array.dtype} of"
        f" shape {array.shape}"
    )


def fingerprints(
    paths: Sequence[str], share: int = 0, num_shares: int = 1
) -> dict[str, str]:
    """Return size and digest of each file, by its name relative to the folder that all
    of them share.

    Of files above 64 MiB, 64 evenly spaced blocks of 1 MiB are read, the first and the
    last among them: a few bytes changed in place can go unnoticed. The result is kept
    beside JAX's compilation cache, so that a file whose size and times are as they were
    is not read again. With `num_shares`, only one file of so many, from number `share`
    on, is read and in the result.
    """
    names, shared = _names_below(paths)
    own = dict(list(zip(names, paths, strict=True))[share::num_shares])
    folder = jax.config.jax_compilation_cache_dir
    rule = hashlib.sha256(
        json.dumps([str(shared), FULL_HASH_BYTES, NUM_BLOCKS, BLOCK_BYTES]).encode()
    ).hexdigest()[:16]
    cache = Path(folder or "").expanduser() / "fingerprints" / f"{rule}.json"
    is_kept = bool(folder) and "://" not in folder
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(cache.read_bytes())) if is_kept else {}

    def fingerprint(name: str, path: str) -> list[Any]:
        with _naming(path), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            if known.get(name, [])[:-1] == facts:
                return known[name]
            digest = hashlib.sha256()
            if status.st_size <= FULL_HASH_BYTES:
                digest = hashlib.file_digest(file, "sha256")
            else:
                # The block number 0 starts at byte 0, and the last one ends at the end
                # of the file.
                for number in range(NUM_BLOCKS):
                    file.seek(
                        (status.st_size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1)
                    )
                    digest.update(file.read(BLOCK_BYTES))
            return [
                *facts,
                f"{status.st_size} bytes, SHA-256 {digest.hexdigest()[:12]}",
            ]

    settled = time.time_ns() - _SETTLED_NS
    with ThreadPoolExecutor(_THREADS) as threads:
        found = dict(zip(own, threads.map(fingerprint, own, own.values()), strict=True))
    # A file that is being written may change once more without another time.
    kept = known | {
        name: entry for name, entry in found.items() if max(entry[1:3]) < settled
    }
    if is_kept and kept != known:
        # The folder may be read-only or full, and then the files are read again.
        with contextlib.suppress(OSError):
            cache.parent.mkdir(parents=True, exist_ok=True)
            whole = cache.with_name(f"{cache.name}.{os.getpid()}")
            whole.write_text(json.dumps(kept))
            whole.replace(cache)
    return {name: digest for name, (*_, digest) in found.items()}


def beginnings(paths: Sequence[str]) -> dict[str, str]:
    """Return size and a digest of the first 4 KiB of each file, by the names of
    `fingerprints`: what every process can read.
    """

    def beginning(path: str) -> str:
        with _naming(path), open(path, "rb") as file:
            digest = hashlib.sha256(file.read(4096)).hexdigest()[:12]
            return (
                f"{os.fstat(file.fileno()).st_size} bytes, SHA-256 {digest} of the"
                " first 4 KiB"
            )

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(
            zip(_names_below(paths)[0], threads.map(beginning, paths), strict=True)
        )


def _names_below(paths: Sequence[str]) -> tuple[list[str], Path]:
    """Return the names of files relative to the folder that all of them share, and the
    folder.
    """
    shared = os.path.commonpath(
        [os.path.dirname(os.path.abspath(path)) for path in paths] or ["."]
    )
    return [
        Path(os.path.relpath(os.path.abspath(path), shared)).as_posix()
        for path in paths
    ], Path(shared)


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn an error of the system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
