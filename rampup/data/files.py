"""The files of a data set: opened as row sources, split into training and evaluation rows, and fingerprinted."""

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
from rampup.data.sources import RecordRows, RowRange, RowSource, SyntheticRows, TokenRows
from rampup.errors import DataError

# Files up to this size are hashed completely, larger ones by evenly spaced blocks.
FULL_HASH_BYTES = 64 * 2**20
NUM_BLOCKS = 64
BLOCK_BYTES = 2**20
_THREADS = 8
_SETTLED_NS = 2 * 10**9


def open_sources(config: Config) -> tuple[RowSource, RowSource]:
    """Return the rows to train on and the rows to evaluate on.

    Files are named by glob patterns. Without `grain_train_files`, `text` is the Python standard library's own source. Without
    `grain_eval_files`, a fraction of the training data is held out: every n-th text file, or the last rows of other data and of
    few text files. `token_dtype` is the type of the tokens in .bin and ArrayRecord files.

    Raises:
        DataError: no such files, files that cannot be read, or too few rows.
    """
    shape: dict[str, Any] = {"sequence_length": config.max_target_length, "vocab_size": config.vocab_size}
    if config.dataset_type == "synthetic":
        return SyntheticRows(2**20, **shape), SyntheticRows(2**14, first=2**20, **shape)
    paths = _find_files(config.grain_train_files, "grain_train_files")
    eval_paths = None if config.grain_eval_files is None else _find_files(config.grain_eval_files, "grain_eval_files")
    if config.dataset_type == "text" and eval_paths is None:
        # Every n-th file, so that evaluation reads from all folders and not only from the last one.
        period = max(round(1 / config.eval_holdout_fraction), 2)
        eval_paths = paths[period // 2 :: period] or None  # None: too few files to spare one
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
            rows: RowSource = TokenRows([text], ["text"], starts=list(zip(offsets, files, strict=False)), **shape)
        elif config.dataset_type == "arrayrecord":
            rows = RecordRows(files, dtype=config.token_dtype, **shape)
        else:
            rows = TokenRows([open_token_file(path, config.token_dtype) for path in files], files, **shape)
        if len(rows) == 0:
            raise DataError(f"{', '.join(files)[:300]}: fewer than two tokens are not a row")
        return rows

    train = open_one(paths)
    if eval_paths is not None:
        return train, open_one(eval_paths)
    # The last rows, so that the numbers of the training rows do not depend on how many are held out.
    held_out = max(round(len(train) * config.eval_holdout_fraction), 1)
    if held_out >= len(train):
        problem = f"{', '.join(paths)[:300]}: {len(train)} rows are too few to hold out {held_out} for evaluation"
        fix = "add text, set a smaller max_target_length, or name grain_eval_files"
        raise DataError(f"{problem}; {fix}")
    split = len(train) - held_out
    return RowRange(train, 0, split), RowRange(train, split, len(train))


def _find_files(pattern: str | None, key: str) -> list[str]:
    if pattern is None:
        root = Path(sysconfig.get_path("stdlib"))
        skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
        files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
        if not files:
            raise DataError(f"no Python source files in {root}; set {key} to text files of your own", key=key)
        return [str(path) for path in sorted(files, key=lambda path: path.relative_to(root).as_posix())]
    # The order of the files is the order of the rows, and a file system may list them in any.
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir())
    if not paths:
        hint = f"; it is a folder: name its files, such as '{pattern.rstrip('/')}/*'" if Path(pattern).is_dir() else ""
        raise DataError(f"{key}={pattern!r} matches no file{hint}", key=key)
    for path in paths:
        if not Path(path).is_file():
            kind = "a broken link" if Path(path).is_symlink() else "not a regular file"
            raise DataError(f"{key}={pattern!r} matches {path}, which is {kind}", key=key)
    return paths


class _OpenFile:
    """A file that is open for as long as somebody has this object, and the place on the disk that it was opened at."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.status = os.fstat(self.descriptor)
        self.place = self.status.st_dev, self.status.st_ino

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# A system limits the files that a process has open, usually to 1,024, and a corpus may have more. A file that is dropped from
# here stays open until its last reader is done.
_open_file = functools.lru_cache(maxsize=64)(_OpenFile)


class TokenFile:
    """A file of tokens that is read in parts. Unlike a memory map, it raises an error if the file is truncated meanwhile.

    `offset` are the bytes before the first token, `size` is the number of tokens.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], *, offset: int, size: int) -> None:
        self._path = path
        self._dtype = dtype
        self._offset = offset
        self._size = size
        # Opened anew: one that was opened before this run may be of a file that is gone.
        self._place = _OpenFile(path).place

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._size)
        wanted = (stop - start) * self._dtype.itemsize
        place = self._offset + start * self._dtype.itemsize
        content = b""
        try:
            file = _open_file(self._path)
            if file.place != self._place:
                _open_file.cache_clear()
                file = _open_file(self._path)
        except OSError as error:
            raise DataError(f"{self._path} cannot be opened again: {error.strerror or error}") from error
        if file.place != self._place:
            raise DataError(f"{self._path} is another file than when the run started: it was replaced")
        # pread does not move a shared file position, so threads can read at the same time; it may return less than requested.
        while len(content) < wanted:
            try:
                more = os.pread(file.descriptor, wanted - len(content), place + len(content))
            except OSError as error:
                raise DataError(f"{self._path} cannot be read at byte {place:,}: {error.strerror or error}") from error
            if not more:
                end = os.fstat(file.descriptor).st_size
                raise DataError(f"{self._path} ends at byte {end:,}: it was truncated after the run started")
            content += more
        return np.frombuffer(content, self._dtype)


def open_token_file(path: str, token_dtype: str) -> TokenFile:
    """Open a .npy file, or a .bin file of little-endian tokens of type `token_dtype`.

    Raises:
        DataError: a file of another kind, or one that cannot be read or is truncated.
    """
    try:
        if path.endswith(".npy"):
            # Mapped to find where the data begin. Reading through the map would be a signal, not an error, if it is truncated.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(array, np.ndarray):
                raise DataError(f"{path} is an archive of arrays; save a single array with numpy.save")
            if array.ndim != 1 or array.dtype.kind not in "iu":
                found = f"{array.dtype} of shape {array.shape}"
                raise DataError(f"{path} must be a one-dimensional array of integers; it is {found}")
            return TokenFile(path, array.dtype, offset=getattr(array, "offset", 0), size=array.size)
        if path.endswith(".bin"):
            dtype = np.dtype(token_dtype).newbyteorder("<")
            size = os.path.getsize(path)
            if size == 0 or size % dtype.itemsize:
                raise ValueError(f"{size:,} bytes are not a multiple of {dtype.itemsize} bytes per token")
            return TokenFile(path, dtype, offset=0, size=size // dtype.itemsize)
    except DataError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as tokens: {error}") from error
    raise DataError(f"{path} must end in .npy or .bin for dataset_type=tokens", key="grain_train_files")


def fingerprints(paths: Sequence[str], share: int = 0, num_shares: int = 1) -> dict[str, str]:
    """Return size and digest of each file, by its name relative to the folder that all of them share.

    Files up to 64 MiB are read completely. Of larger files, 64 evenly spaced blocks of 1 MiB are read, the first and the last
    among them: a few bytes changed in place can go unnoticed, a file that is longer, shorter or another one cannot. The result
    is kept beside JAX's compilation cache, so that a file whose size and times are as they were is not read again.

    With `num_shares`, only one file of so many, from number `share` on, is read and in the result.

    Raises:
        DataError: a file cannot be read.
    """
    names, shared = _names_below(paths)
    rule = [str(shared), FULL_HASH_BYTES, NUM_BLOCKS, BLOCK_BYTES]
    file = _cache_file(rule)
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(file.read_bytes())) if file else {}
    found: dict[str, str] = {}
    new: dict[str, Any] = {}

    def fingerprint(name: str, path: str) -> None:
        with _naming(path), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            digest = hashlib.sha256()
            size = status.st_size
            times = [status.st_mtime_ns, status.st_ctime_ns]
            if known.get(name, [])[:-1] == [size, *times]:
                found[name] = known[name][-1]
                return
            if size <= FULL_HASH_BYTES:
                digest = hashlib.file_digest(file, "sha256")
            else:
                # The block number 0 starts at byte 0, and the last one ends at the end of the file.
                for number in range(NUM_BLOCKS):
                    file.seek((size - BLOCK_BYTES) * number // (NUM_BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
        found[name] = f"{size} bytes, SHA-256 {digest.hexdigest()[:12]}"
        # A file that is being written may change once more without another time.
        if time.time_ns() - max(times) > _SETTLED_NS:
            new[name] = [size, *times, found[name]]

    own = list(zip(names, paths, strict=True))[share::num_shares]
    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(lambda each: fingerprint(*each), own))
    if file and new:
        # The folder may be read-only or full, and then the files are read again.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            whole = file.with_name(f"{file.name}.{os.getpid()}")
            whole.write_text(json.dumps(known | new))
            whole.replace(file)
    return {name: found[name] for name, _ in own}


def beginnings(paths: Sequence[str]) -> dict[str, str]:
    """Return size and a digest of the first 4 KiB of each file, by the names of `fingerprints`: what every process can read."""

    def beginning(path: str) -> str:
        with _naming(path), open(path, "rb") as file:
            digest = hashlib.sha256(file.read(4096)).hexdigest()[:12]
            return f"{os.fstat(file.fileno()).st_size} bytes, SHA-256 {digest} of the first 4 KiB"

    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(_names_below(paths)[0], threads.map(beginning, paths), strict=True))


def _names_below(paths: Sequence[str]) -> tuple[list[str], Path]:
    """Return the names of files relative to the folder that all of them share, and the folder."""
    shared = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths] or ["."])
    return [Path(os.path.relpath(os.path.abspath(path), shared)).as_posix() for path in paths], Path(shared)


def _cache_file(rule: Sequence[Any]) -> Path | None:
    """Return the file of known fingerprints, or None if there is no folder for it on a disk."""
    folder = jax.config.jax_compilation_cache_dir
    name = hashlib.sha256(json.dumps(rule).encode()).hexdigest()[:16]
    return None if not folder or "://" in folder else Path(folder).expanduser() / "fingerprints" / f"{name}.json"


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn an error of the system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
