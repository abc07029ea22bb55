"""Paths of run folders: on a local file system, or in a bucket such as `gs://bucket/runs`.

A bucket stores whole objects. It has no appending, no hard links and no atomic rename of folders, so the files of a run are
written differently there: see `StepLog`, `own_run` and `Checkpoints`.
"""

from __future__ import annotations

import os
from pathlib import Path

from rampup.errors import ConfigError, MissingDependencyError

SCHEMES = ("gs", "s3", "az")


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return a `pathlib.Path`, or for a bucket an `etils.epath.Path`, which has the same methods.

    Raises:
        ConfigError: the URL is not of a bucket.
        MissingDependencyError: the package for this kind of bucket is not installed.

    Example:
        >>> as_path("runs"), is_bucket("runs"), is_bucket("gs://bucket/runs")
        (PosixPath('runs'), False, True)
    """
    text = os.fspath(path)
    if not is_bucket(text):
        return Path(path)
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{text} is neither a folder nor a bucket; buckets begin with {', '.join(f'{name}://' for name in SCHEMES)}",
            key="base_output_directory",
        )
    from etils import epath

    # epath imports the package of a scheme at the first access.
    bucket = epath.Path(text)
    try:
        bucket.exists()
    except ImportError as error:
        raise MissingDependencyError(
            f"{scheme}:// needs a package that is not installed: pip install {_PACKAGES[scheme]} ({error})",
            key="base_output_directory",
        ) from error
    return bucket  # type: ignore[return-value]


def is_bucket(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the URL of a bucket or an object in it."""
    return "://" in os.fspath(path)


def absolute_path(path: Path) -> Path:
    """Return an absolute path; that of a bucket is. `epath` would put the working directory in front of it."""
    return path if is_bucket(path) else path.resolve()


_PACKAGES = {"gs": "'rampup[gcs]'", "s3": "s3fs", "az": "adlfs"}
