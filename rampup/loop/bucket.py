"""Paths in a bucket, whose failures are all `StorageError`.

`etils.epath` gives `gs://` the methods of `pathlib.Path`. What
fails behind it, such as an HTTP client, raises errors that are no `OSError`, and would
pass by code that treats a full disk and an absent bucket alike.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError, StorageError

# Methods of a path that send requests.
_METHODS = (
    "exists",
    "is_dir",
    "mkdir",
    "unlink",
    "rename",
    "stat",
    "iterdir",
    "glob",
    "write_bytes",
    "write_text",
)


def bucket_path(path: str | os.PathLike[str]) -> Any:
    """Return the path of a URL in a bucket, or refuse another URL and a bucket that
    cannot be reached.
    """
    text = os.fspath(path)
    if not text.startswith("gs://"):
        raise ConfigError(
            f"{text} is neither a folder nor a bucket",
            fix="buckets begin with gs://",
            key="base_output_directory",
        )
    if isinstance(path, _path_class()):
        return path
    bucket = _path_class()(text)
    try:
        bucket.exists()  # epath imports the package of a scheme at the first access
    except ImportError as error:
        raise MissingDependencyError(
            "gs:// needs a package that is not installed: pip install"
            f" 'rampup[gcs]' ({error})",
            key="base_output_directory",
        ) from error
    return bucket


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what a storage library raises as a `StorageError`. A missing file, and
    others of the system's errors, stay.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError | ImportError | NotImplementedError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        # Named by its root, such as gs://bucket.
        raise StorageError(
            f"{'/'.join(os.fspath(path).split('/')[:3])} cannot be used: {reason}"
        ) from error


@functools.cache
def _path_class() -> type[Any]:
    """Return the class of paths in buckets, made here because etils is slow to import
    and most runs have no bucket.
    """
    from etils import epath

    class BucketPath(type(epath.Path("gs://bucket"))):  # type: ignore[misc]
        """A path in a bucket. An object that is read is in memory as a whole, so that
        reading it cannot fail later.
        """

        def open(self, mode: str = "r", **options: Any) -> Any:
            with storage_errors(self):
                if "r" not in mode:
                    return super().open(mode, **options)
                with super().open("rb") as file:
                    content = file.read()
            return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with storage_errors(self):
                found = method(self, *args, **options)
                return iter(list(found)) if isinstance(found, Iterator) else found

        return call

    for name in _METHODS:
        setattr(BucketPath, name, guarded(getattr(BucketPath, name)))
    return BucketPath
