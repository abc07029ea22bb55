"""Paths in a bucket, whose failures are all `StorageError`.

`etils.epath` gives `gs://`, `s3://` and `az://` the methods of `pathlib.Path`. What fails behind it raises errors of its own:
of the storage library, of its HTTP client, of the credentials. Few of them are an `OSError`, so they would pass by code that
treats a full disk and an absent bucket alike.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from rampup.errors import ConfigError, MissingDependencyError, StorageError

# The schemes of buckets, with the packages that they need.
PACKAGES = {"gs": "'rampup[gcs]'", "s3": "s3fs", "az": "adlfs"}
# Methods of a path that send requests. Those that return an iterator are read to its end.
_METHODS = ("exists", "is_dir", "mkdir", "rmdir", "rmtree", "unlink", "rename", "replace", "copy", "stat")
_ITERATORS = ("iterdir", "glob")


def bucket_path(path: str | os.PathLike[str]) -> Any:
    """Return the path of a URL in a bucket.

    Raises:
        ConfigError: the URL is not of a bucket.
        MissingDependencyError: the package for this kind of bucket is not installed.
        StorageError: the bucket cannot be reached.
    """
    text = os.fspath(path)
    scheme = text.partition("://")[0]
    if scheme not in PACKAGES:
        problem = f"{text} is neither a folder nor a bucket; buckets begin with {', '.join(f'{name}://' for name in PACKAGES)}"
        raise ConfigError(problem, key="base_output_directory")
    if isinstance(path, _path_class()):
        return path
    bucket = _path_class()(text)
    try:
        bucket.exists()  # epath imports the package of a scheme at the first access
    except ImportError as error:
        problem = f"{scheme}:// needs a package that is not installed: pip install {PACKAGES[scheme]} ({error})"
        raise MissingDependencyError(problem, key="base_output_directory") from error
    return bucket


@contextlib.contextmanager
def storage_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what a storage library raises as a `StorageError`. A missing file, and others of the system's errors, stay."""
    try:
        yield
    except (OSError, ImportError, NotImplementedError):
        raise
    except Exception as error:
        root = "/".join(os.fspath(path).split("/")[:3])
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise StorageError(f"{root} cannot be used: {reason}") from error


@functools.cache
def _path_class() -> type[Any]:
    """Return the class of paths in buckets. It is made here, because etils is slow to import and most runs have no bucket."""
    from etils import epath

    for name in ("gcsfs", "gcsfs.retry", "google.auth._default"):
        logging.getLogger(name).addFilter(_say_once())

    class BucketPath(type(epath.Path("gs://bucket"))):  # type: ignore[misc]
        """A path in a bucket."""

        def open(self, mode: str = "r", **options: Any) -> Any:
            """Open an object. One that is read is in memory as a whole, so that reading it cannot fail later."""
            if "r" not in mode:
                with storage_errors(self):
                    return super().open(mode, **options)
            content = self.read_bytes()
            return io.BytesIO(content) if "b" in mode else io.StringIO(content.decode())

        def read_bytes(self) -> bytes:
            """Return the content of an object."""
            with storage_errors(self), super().open("rb") as file:
                return bytes(file.read())

        def read_text(self, encoding: str | None = None) -> str:
            """Return the content of an object as text."""
            return self.read_bytes().decode(encoding or "utf-8")

        def write_bytes(self, content: bytes) -> int:
            """Replace an object."""
            with storage_errors(self), super().open("wb") as file:
                return int(file.write(content))

        def write_text(self, content: str, encoding: str | None = None) -> int:
            """Replace an object by text."""
            return self.write_bytes(content.encode(encoding or "utf-8"))

    def guarded(name: str) -> Callable[..., Any]:
        method = getattr(BucketPath, name)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            with storage_errors(self):
                found = method(self, *args, **options)
                return iter(list(found)) if name in _ITERATORS else found

        return call

    for name in (*_METHODS, *_ITERATORS):
        setattr(BucketPath, name, guarded(name))
    return BucketPath


def _say_once() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that passes each kind of message once, and no traceback of an error that is raised anyway."""
    seen = set()

    def passes(record: logging.LogRecord) -> bool:
        kind = str(record.msg).split(":")[0]
        is_new = kind not in seen and record.exc_info is None
        seen.add(kind)
        return is_new

    return passes
