"""The configured data: files found, opened and cut into rows to train on and rows to evaluate on."""

from __future__ import annotations

import glob
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rampup.errors import DataError
from rampup.run.data.sources import RecordRows, RowRange, RowSource, SyntheticRows, TokenRows
from rampup.run.data.token_file import open_token_file


def open_sources(
    dataset_type: str,
    *,
    train_files: str | None,
    eval_files: str | None,
    holdout_fraction: float,
    sequence_length: int,
    vocab_size: int,
    token_dtype: str = "uint16",
) -> tuple[RowSource, RowSource]:
    """Return the rows to train on and the rows to evaluate on.

    Args:
        dataset_type: `text`, `tokens`, `arrayrecord` or `synthetic`.
        train_files: glob pattern; None with `text` means the Python standard library's own source files.
        eval_files: glob pattern; None holds out a part of the training data: every n-th text file, or the last rows
            where there are few text files, or none.
        holdout_fraction: the share held out.
        sequence_length: T, tokens per sample.
        vocab_size: tokens must be below this.
        token_dtype: type of the tokens in .bin and ArrayRecord files.

    Raises:
        DataError: no such files, files that cannot be read, or too few rows.
    """
    shape = {"sequence_length": sequence_length, "vocab_size": vocab_size}
    if dataset_type == "synthetic":
        return SyntheticRows(2**20, **shape), SyntheticRows(2**14, first=2**20, **shape)
    paths = _standard_library() if train_files is None else _matching(train_files, "grain_train_files")
    eval_paths = None if eval_files is None else _matching(eval_files, "grain_eval_files")
    if dataset_type == "text":
        if eval_paths is None:
            period = max(round(1 / holdout_fraction), 2)
            eval_paths = paths[period // 2 :: period]
            if not eval_paths:
                return _last_held_out(_text_rows(paths, **shape), holdout_fraction, paths)
            held_out = set(eval_paths)
            paths = [path for path in paths if path not in held_out]
        return _text_rows(paths, **shape), _text_rows(eval_paths, **shape)

    def open_one(files: list[str]) -> RowSource:
        if dataset_type == "arrayrecord":
            return RecordRows(files, dtype=token_dtype, **shape)
        return _not_empty(TokenRows([open_token_file(path, token_dtype) for path in files], files, **shape), files)

    train = open_one(paths)
    if eval_paths is not None:
        return train, open_one(eval_paths)
    return _last_held_out(train, holdout_fraction, paths)


def _last_held_out(rows: RowSource, fraction: float, paths: Sequence[str]) -> tuple[RowSource, RowSource]:
    held_out = max(round(len(rows) * fraction), 1)
    if held_out >= len(rows):
        raise DataError(f"{', '.join(paths)[:300]}: {len(rows)} rows are too few to hold out {held_out} for evaluation")
    split = len(rows) - held_out
    return RowRange(rows, 0, split), RowRange(rows, split, len(rows))


def _matching(pattern: str, key: str) -> list[str]:
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if not Path(path).is_dir())
    if not paths:
        raise DataError(f"{key}={pattern!r} matches no file", key=key)
    for path in paths:
        if not Path(path).is_file():
            what = "a link to nothing" if Path(path).is_symlink() else "no regular file"
            raise DataError(f"{key}={pattern!r} matches {path}, which is {what}", key=key)
    return paths


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
    paths = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    if not paths:
        raise DataError(
            f"no Python source files in {root}; set grain_train_files to text files of your own", key="grain_train_files"
        )
    return [str(path) for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())]


def _text_rows(paths: Sequence[str], *, sequence_length: int, vocab_size: int) -> RowSource:
    """Join text files, a zero byte after each, and cut the bytes into rows."""
    pieces, starts, offset = [], [], 0
    for path in paths:
        content = _read_bytes(path) + b"\0"
        pieces.append(content)
        starts.append((offset, path))
        offset += len(content)
    text = np.frombuffer(b"".join(pieces), np.uint8)
    rows = TokenRows([text], ["text"], sequence_length=sequence_length, vocab_size=vocab_size, starts=starts)
    return _not_empty(rows, paths)


def _read_bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _not_empty(rows: TokenRows, paths: Sequence[str]) -> TokenRows:
    if len(rows) == 0:
        raise DataError(f"{', '.join(paths)[:300]}: fewer than two tokens, which is no row")
    return rows
