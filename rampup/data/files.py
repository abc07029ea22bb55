"""The files of a data set: opened as row sources, split into training and evaluation
rows, and fingerprinted.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rampup.config.schema import Config
from rampup.data.batches import Loading
from rampup.data.sources import RowRange, RowSource, SyntheticRows, TokenRows, reading
from rampup.engine.processes import broadcast_from_process0
from rampup.errors import DataError, DataWarning, warn
from rampup.plan.describe import format_count

NUM_BLOCKS = 8  # of a file that are in its fingerprint
BLOCK_BYTES = 2**20
_THREADS = 8
HOLDOUT = 0.05  # the share of the rows that are held out, without evaluation files


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
    eval_paths: list[str] = []
    if config.grain_eval_files is not None:
        eval_paths = _find_files(config.grain_eval_files, "grain_eval_files")
    elif config.dataset_type == "text":
        # Every n-th file, so that evaluation reads from all folders and not only from
        # the last one; none of too few files to spare one.
        period = round(1 / HOLDOUT)
        eval_paths = paths[period // 2 :: period]
        paths = [path for path in paths if path not in set(eval_paths)]

    def open_one(files: list[str]) -> RowSource:
        arrays: list[Any] = []
        starts: list[int] = []
        if config.dataset_type == "text":
            # All bytes, with a zero after each file.
            text = bytearray()
            for path in files:
                starts.append(len(text))
                with reading(path):
                    text += Path(path).read_bytes() + b"\0"
            arrays.append(np.frombuffer(text, np.uint8))
        else:
            arrays += [open_token_file(path, config.token_dtype) for path in files]
        rows = TokenRows(arrays, files, starts=starts, **shape)
        if len(rows) == 0:
            raise DataError(
                f"{', '.join(files)[:300]}: fewer than two tokens are not a row"
            )
        return rows

    train = open_one(paths)
    if eval_paths:
        return train, open_one(eval_paths)
    # The last rows, so that the numbers of the training rows do not depend on how many
    # are held out.
    held_out = max(round(len(train) * HOLDOUT), 1)
    if held_out >= len(train):
        raise DataError(
            f"{', '.join(paths)[:300]}: {format_count(len(train), 'row')}, too few to"
            f" hold out {held_out} for evaluation",
            fix="add text, set a smaller max_target_length, or name grain_eval_files",
        )
    split = len(train) - held_out
    return RowRange(train, 0, split), RowRange(train, split, len(train))


def shared_sources(loading: Loading, config: Config) -> tuple[RowSource, RowSource]:
    """Open the sources in the processes that read; the others open no file, and get
    synthetic rows.
    """
    if loading.factor == 1:
        return open_sources(config)
    opened = open_sources(config) if loading.reads else None
    # The others need the numbers of rows, for the order of samples, and rows of the
    # same shapes, on which nobody trains.
    train, held_out = json.loads(
        broadcast_from_process0(
            "sources", lambda: json.dumps([len(rows) for rows in opened or ()])
        )
    )
    shape = {
        "sequence_length": config.max_target_length,
        "vocab_size": config.vocab_size,
    }
    return opened or (SyntheticRows(train, **shape), SyntheticRows(held_out, **shape))


def _find_files(pattern: str | None, key: str) -> list[str]:
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {
            "site-packages",
            "dist-packages",
            "test",
            "tests",
            "idlelib",
            "lib2to3",
        }
        return sorted(
            str(path)
            for path in root.rglob("*.py")
            if not skipped & set(path.relative_to(root).parts)
        )
    # The order of the files is the order of the rows, and a file system may list them
    # in any.
    paths = sorted(
        path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir()
    )
    if not paths:
        raise DataError(
            f"{key}={pattern!r} matches no file from the working directory"
            f" {os.getcwd()}; name the files of a folder as 'folder/*'",
            key=key,
        )
    for path in paths:
        if not Path(path).is_file():
            raise DataError(
                f"{key}={pattern!r} matches {path}, which is not a regular file",
                key=key,
            )
    return paths


def _place(file: Any) -> tuple[int, int]:
    """Return which file of the system an open file is."""
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


# A system limits the files that a process has open, usually to 1,024, and a corpus may
# have more. A file that is dropped from here stays open until its last reader is done.
@functools.lru_cache(maxsize=64)
def _open_file(path: str, place: tuple[int, int]) -> Any:
    """Open a file, or refuse another one that has taken its place."""
    file = open(path, "rb", buffering=0)  # noqa: SIM115 - see above
    if _place(file) != place:
        raise DataError(
            f"{path} is another file than when the run started: it was replaced"
        )
    return file


@dataclass(eq=False)
class TokenFile:
    """A file of tokens that is read in parts. Unlike a memory map, it raises an error
    if the file is truncated meanwhile.
    """

    path: str
    dtype: np.dtype[Any]
    _: KW_ONLY
    offset: int  # bytes before the first token
    size: int  # number of tokens

    def __post_init__(self) -> None:
        with open(self.path, "rb") as file:
            self._place = _place(file)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.size)
        wanted = (stop - start) * self.dtype.itemsize
        first = self.offset + start * self.dtype.itemsize
        with reading(self.path):
            file = _open_file(self.path, self._place)
            # pread does not move a shared file position, so threads can read at the
            # same time. One call returns at most 2 GiB, and nothing at the end.
            content = b""
            while len(content) < wanted and (
                more := os.pread(
                    file.fileno(), wanted - len(content), first + len(content)
                )
            ):
                content += more
        if len(content) < wanted:
            raise DataError(
                f"{self.path} ends at byte {os.fstat(file.fileno()).st_size:,}: it was"
                " truncated after the run started"
            )
        return np.frombuffer(content, self.dtype)


def open_token_file(path: str, token_dtype: str) -> TokenFile:
    """Open a .npy file, or a .bin file of little-endian tokens of type
    `token_dtype`.
    """
    if path.endswith(".bin"):
        dtype = np.dtype(token_dtype).newbyteorder("<")
        with reading(path):
            size = os.path.getsize(path)
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"{path} cannot be read: its size, {size:,}, is not a multiple of"
                f" {dtype.itemsize} bytes per token"
            )
        tokens = TokenFile(path, dtype, offset=0, size=size // dtype.itemsize)
        first = tokens[:1000]
        if first[::2].any() and not first[1::2].any():
            warn(
                f"{path}: every second token is 0, of the first 1,000, as if each had"
                f" twice the {dtype.itemsize} bytes of token_dtype={token_dtype}; if so,"
                " set token_dtype to their type",
                DataWarning,
            )
        return tokens
    if not path.endswith(".npy"):
        raise DataError(
            f"{path} must end in .npy or .bin for dataset_type=tokens",
            key="grain_train_files",
        )
    # Mapped to find where the data begin. Reading through the map would be a signal, not
    # an error, if it is truncated.
    with reading(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if (
        not isinstance(array, np.memmap)
        or array.ndim != 1
        or array.dtype.kind not in "iu"
    ):
        raise DataError(
            f"{path} must be a one-dimensional array of integers, saved with numpy.save"
        )
    return TokenFile(path, array.dtype, offset=array.offset, size=array.size)


def fingerprints(paths: Sequence[str]) -> dict[str, str]:
    """Return size and digest of each file, by its name relative to the folder that all
    of them share.

    Of files above 8 MiB, 8 evenly spaced blocks of 1 MiB are read, the first and the
    last among them: bytes changed in place elsewhere go unnoticed.
    """
    whole = [os.path.abspath(path) for path in paths]
    shared = os.path.commonpath([os.path.dirname(path) for path in whole] or ["."])
    names = [os.path.relpath(path, shared) for path in whole]

    def fingerprint(path: str) -> str:
        with reading(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for number in range(NUM_BLOCKS):
                # Of a file that is not larger than all blocks, they follow each other.
                last = max(size, NUM_BLOCKS * BLOCK_BYTES) - BLOCK_BYTES
                file.seek(last * number // (NUM_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
            return f"{size} bytes, SHA-256 {digest.hexdigest()[:12]}"

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(names, threads.map(fingerprint, paths), strict=True))
