"""Files of tokens, read part by part."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rampup.errors import DataError


class TokenFile:
    """A file of tokens of which parts are read as needed; unlike a memory map, it notices that the file was cut short.

    Args:
        path: the file.
        dtype: type of the tokens.
        offset: bytes before the first token.
        size: number of tokens.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], *, offset: int, size: int) -> None:
        self._path, self._dtype, self._offset, self._size = path, dtype, offset, size
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - stays open for the run

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._size)
        wanted, place = (stop - start) * self._dtype.itemsize, self._offset + start * self._dtype.itemsize
        content = b""
        while len(content) < wanted:
            try:
                more = os.pread(self._file.fileno(), wanted - len(content), place + len(content))
            except OSError as error:
                raise DataError(f"{self._path} cannot be read at byte {place:,}: {error.strerror or error}") from error
            if not more:
                end = os.fstat(self._file.fileno()).st_size
                raise DataError(f"{self._path} ends at byte {end:,}: it was cut short since the run began")
            content += more
        return np.frombuffer(content, self._dtype)


def open_token_file(path: str, token_dtype: str) -> TokenFile:
    """Open a .npy file, or a .bin file of little-endian tokens.

    Args:
        path: the file.
        token_dtype: type of the tokens in a .bin file.

    Raises:
        DataError: a file of another kind, or one that cannot be read or is not whole.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(f"{folder}/tokens.npy", np.arange(5))
        ...     tokens = open_token_file(f"{folder}/tokens.npy", "uint16")
        >>> len(tokens), tokens[1:3].tolist()
        (5, [1, 2])
    """
    try:
        if path.endswith(".npy"):
            return _numpy_file(path)
        if path.endswith(".bin"):
            dtype, size = np.dtype(token_dtype).newbyteorder("<"), os.path.getsize(path)
            if size == 0 or size % dtype.itemsize:
                raise ValueError(f"{size:,} bytes are no whole number of tokens of {dtype.itemsize} bytes")
            return TokenFile(path, dtype, offset=0, size=size // dtype.itemsize)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as tokens: {error}") from error
    raise DataError(f"{path} must end in .npy or .bin for dataset_type=tokens", key="grain_train_files")


def _numpy_file(path: str) -> TokenFile:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive of arrays; save one array with numpy.save")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{path} must be a one-dimensional array of integers; it is {array.dtype} of shape {array.shape}")
    return TokenFile(path, array.dtype, offset=getattr(array, "offset", 0), size=array.size)
