"""Checkpoints with Orbax: the training state, and a record of the step and the run that it belongs to.

Every checkpoint has the checksums of its files, so that damage after it was written is noticed. A bucket has checksums of its
own, so there a checkpoint is intact if Orbax has completed it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import jax
import orbax.checkpoint as ocp

from rampup.errors import ResumeMismatchError, StorageError
from rampup.run.distributed import broadcast_from_process0, is_primary
from rampup.run.events import CheckpointDamaged, OnEvent, ignore_event
from rampup.run.run_folder import DAMAGED_FOLDER, absolute_path, is_bucket
from rampup.run.state import replace_fields

RECORD_VERSION = 1
CHECKSUMS_FILE = "checksums.json"
# Files that Orbax adds or completes after the checksums are taken. They contain no part of the state.
_WRITTEN_LATER = frozenset({"commit_success.txt", "_CHECKPOINT_METADATA"})
_THREADS = 8
# Leaves that an error message names if a checkpoint has another structure.
MAX_DIFFERENCES = 5
_question_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """When a run writes checkpoints, and what is in them besides the state.

    Attributes:
        checkpoint_period: steps between checkpoints; None = write none.
        max_to_keep: older checkpoints are deleted; None keeps all.
        async_checkpointing: write in the background.
        on_checkpoint_error: if a checkpoint cannot be written, `stop` the run, or `continue` with the existing checkpoints.
        identity: values that must be the same in a checkpoint and in the run that resumes it.
        extra_metadata: extra metadata stored with each checkpoint and not validated on resume.
        to_saved, from_saved: between the state in training and the state in checkpoints, if they differ.
    """

    checkpoint_period: int | None = None
    max_to_keep: int | None = None
    async_checkpointing: bool = True
    on_checkpoint_error: Literal["stop", "continue"] = "stop"
    identity: Mapping[str, Any] = field(default_factory=dict)
    extra_metadata: Mapping[str, Any] = field(default_factory=dict)
    to_saved: Callable[[Any], Any] = lambda state: state
    from_saved: Callable[[Any], Any] = lambda state: state


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """The newest intact checkpoint of a folder, as `find_checkpoint` returns it.

    Attributes:
        step: optimizer steps done.
        record: its record, read once.
        damaged: newer checkpoints that are damaged: optimizer steps -> the problem.
    """

    step: int
    record: Mapping[str, Any]
    damaged: Mapping[int, str] = field(default_factory=dict)


def find_checkpoint(folder: Path) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint in a folder, the same in every process, or None if there is none.

    Nothing is opened for writing, created or moved. Only process 0 looks at the files.

    Raises:
        ResumeMismatchError: every checkpoint is damaged, or the newest intact one has a record of another version of rampup.
    """
    step, content, damaged = None, None, {}
    if is_primary():
        for candidate in reversed(checkpoint_steps(folder)):
            problem = damage(folder / str(candidate))
            if problem is None:
                step, content = candidate, (folder / str(candidate) / "record" / "metadata").read_text(encoding="utf-8")
                break
            damaged[candidate] = problem
    # Every process must resume from the same step, and their file systems may not show the same files at the same time.
    found = json.dumps([step, content, list(damaged.items())])
    step, content, problems = json.loads(broadcast_from_process0(f"checkpoint{next(_question_numbers)}", found))
    if step is None:
        if problems:
            lines = "\n".join(f"  {folder / str(number)}: {problem}" for number, problem in problems)
            raise ResumeMismatchError(
                f"every checkpoint is damaged, and none is deleted:\n{lines}\n"
                "restore one from a copy, or give the run another run_name to start from the beginning",
                key="run_name",
            )
        return None
    try:
        record = json.loads(content)
    except (ValueError, RecursionError):
        record = None
    version = record.get("version") if isinstance(record, Mapping) else None
    if version != RECORD_VERSION:
        raise ResumeMismatchError(f"{folder / str(step)} was written in format {version}, this is format {RECORD_VERSION}")
    if record.get("step") != step:
        raise ResumeMismatchError(f"the record of {folder / str(step)} is of step {record.get('step')!r:.100}")
    return SavedCheckpoint(step=step, record=record, damaged=dict(problems))


def read_state(folder: Path, step: int, state: Any) -> Any:
    """Return the state of a checkpoint of a run that may be training, without changing anything in its folder.

    Args:
        folder: the folder of the checkpoints.
        step: optimizer steps done, those of an intact checkpoint.
        state: a state of the same structure, or its shapes, whose types and shardings the returned state gets.

    Raises:
        ResumeMismatchError: a state of another structure.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(state))
    options = ocp.CheckpointManagerOptions(read_only=True)
    with ocp.CheckpointManager(absolute_path(folder), options=options) as manager:
        try:
            tree = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:500]
            raise ResumeMismatchError(
                f"the state in {folder / str(step)} is not of this model and optimizer: {reason}"
            ) from error
    return replace_fields(state, **tree)


def checkpoint_steps(folder: Path) -> tuple[int, ...]:
    """Return the optimizer steps done in each checkpoint of a folder, oldest first."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()))


def _raise(error: StorageError) -> NoReturn:
    raise error


class Checkpoints:
    """The checkpoints of one run. Each is named after the number of optimizer steps done.

    Orbax writes a checkpoint into a temporary folder, with the checksums of its files, and then renames it: a checkpoint is
    complete or absent.

    Args:
        folder: the folder; created with the first checkpoint.
        max_to_keep: older ones are deleted; None keeps all.
        async_checkpointing: write in the background.
        on_error: called with a StorageError if a checkpoint cannot be written. By default it is raised.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_to_keep: int | None = None,
        async_checkpointing: bool = True,
        on_error: Callable[[StorageError], None] = _raise,
    ) -> None:
        # Orbax logs failures that it also raises, which are reported here.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        _silence_late_callbacks()
        self.folder = folder
        self._max_to_keep, self._asynchronous, self._on_error = max_to_keep, async_checkpointing, on_error
        self._writing: int | None = None
        self._manager = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # An error while closing must not hide the error that led to closing.
        with contextlib.suppress(*(() if error is None else (Exception,))):
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """Optimizer steps done in the newest checkpoint, or None."""
        return max(checkpoint_steps(self.folder), default=None)

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Write a checkpoint. On return `state` may be changed, also if it is written in the background.

        Args:
            step: optimizer steps done.
            state: the training state.
            record: JSON values to store with it.

        Raises:
            StorageError: from `on_error`, for this checkpoint or the one before it.
        """
        # Orbax reports the failure of an asynchronous write at the next call: it belongs to the checkpoint before this one.
        self.wait()
        if step in checkpoint_steps(self.folder):
            return
        content = {"version": RECORD_VERSION, "step": step, **record}
        self._writing = step
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(_as_tree(state)), record=ocp.args.JsonSave(content))

        def write() -> None:
            if is_primary() and not is_bucket(self.folder):
                # If a folder cannot be made, Orbax's threads would wait ten minutes for it, and the process for them.
                self.folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryDirectory(dir=self.folder).cleanup()
            self._manager.save(step, args=arguments, force=True)

        self._attempt(write)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until every checkpoint is written.

        Raises:
            StorageError: from `on_error`, if one could not be written.
        """
        self._attempt(self._manager.wait_until_finished)

    def restore(self, saved: SavedCheckpoint, state: Any, on_event: OnEvent = ignore_event) -> Any:
        """Return the state of a checkpoint, and move newer, damaged checkpoints into `damaged_checkpoints` next to the folder.

        Args:
            saved: from `find_checkpoint`.
            state: a state of the same structure, whose shapes, types and shardings the restored state gets.
            on_event: called with `CheckpointDamaged`.

        Raises:
            ResumeMismatchError: a state of another structure; nothing is moved then.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(state))
        # Orbax would fail at one of these leaves, with a page of messages from its threads.
        with ocp.StandardCheckpointer() as reader:
            stored = reader.metadata(absolute_path(self.folder) / str(saved.step) / "state")
        self._refuse(saved.step, _format_differences(stored.item_metadata.tree, abstract))
        try:
            tree = self._manager.restore(saved.step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        except (ValueError, KeyError, TypeError) as error:
            self._refuse(saved.step, " ".join(str(error).split())[:500], error)
        self._move_aside(saved, on_event)
        return replace_fields(state, **tree)

    def _refuse(self, step: int, reason: str, cause: Exception | None = None) -> None:
        if reason:
            raise ResumeMismatchError(
                f"the state in {self.folder / str(step)} is not of this model and optimizer: {reason}"
            ) from cause

    def _move_aside(self, saved: SavedCheckpoint, on_event: OnEvent) -> None:
        for step, problem in saved.damaged.items():
            source, target = self.folder / str(step), self.folder.parent / DAMAGED_FOLDER
            names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
            target /= next(name for name in names if not (target / name).exists())
            # In a bucket, Orbax itself has deleted a checkpoint that it did not complete.
            if is_primary() and source.exists():
                target.parent.mkdir(exist_ok=True)
                source.rename(target)
            on_event(CheckpointDamaged(steps=step, problem=problem, moved_to=target, used=saved.step))
        if saved.damaged:
            # The others must not list the folder before process 0 has moved everything.
            broadcast_from_process0(f"moved{next(_question_numbers)}", "")
            self._manager.reload()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._max_to_keep,
            create=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        return ocp.CheckpointManager(absolute_path(self.folder), options=options)

    def _seal(self) -> None:
        """Write the checksums. Orbax calls it when all files of a checkpoint are written, before it renames the folder."""
        if not is_primary() or is_bucket(self.folder):
            return
        # Orbax writes into a folder with the step's number and a suffix that depends on its version.
        for unfinished in self.folder.glob(f"{self._writing}.*"):
            write_checksums(unfinished)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what a full disk raises depends on the library and its version
            step, self._writing = self._writing, None
            warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)  # Orbax drops the rest.
            # A manager whose write has failed raises that error again in every later call, so a new one takes its place.
            with contextlib.suppress(Exception):
                self._manager.close()
            if is_primary():
                for unfinished in () if is_bucket(self.folder) else self.folder.glob(f"{step}.*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            self._manager = self._open()
            existing = "there is no other" if self.latest is None else f"the newest is {self.folder / str(self.latest)}"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if re.search("RESOURCE_EXHAUSTED|ENOSPC|No space left", reason):
                reason = f"No space left on device in {self.folder}"
            failure = StorageError(f"the checkpoint of step {step} could not be written: {reason}; {existing}")
            failure.__cause__ = error
            self._on_error(failure)


def _format_differences(stored: Any, expected: Any) -> str:
    """Return the leaves that two trees of shapes do not share, in words; nothing if they agree.

    Example:
        >>> def tree(**shapes):
        ...     return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        >>> _format_differences(tree(a=(4,), b=(2, 3)), tree(a=(5,), c=()))
        'a is (4,) in the checkpoint and (5,) here; b is only in the checkpoint; c is only here'
    """
    shapes = [
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            if getattr(leaf, "shape", None) is not None
        }
        for tree in (stored, expected)
    ]
    before, now = shapes
    changed = [name for name in before if now.get(name, before[name]) != before[name]]
    found = [f"{name} is {before[name]} in the checkpoint and {now[name]} here" for name in changed]
    found += [f"{name} is only in the checkpoint" for name in before if name not in now]
    found += [f"{name} is only here" for name in now if name not in before]
    more = f"; and {len(found) - MAX_DIFFERENCES:,} more" if len(found) > MAX_DIFFERENCES else ""
    return "; ".join(found[:MAX_DIFFERENCES]) + more


def _as_tree(state: Any) -> dict[str, Any]:
    """Return all fields of a state that contain arrays, such as the moving average in a subclass of Flax's TrainState."""
    if dataclasses.is_dataclass(state):
        fields = [f for f in dataclasses.fields(state) if f.metadata.get("pytree_node", not f.metadata.get("static", False))]
        tree = {field.name: getattr(state, field.name) for field in fields}
    else:
        tree = state._asdict()
    return {name: value for name, value in tree.items() if value is not None}


@functools.cache
def _silence_late_callbacks() -> None:
    """Keep tensorstore's threads from printing a traceback for every file of a failed read or write.

    Orbax reports the failure itself and closes its event loop. The callbacks of the other files then find it closed. Where that
    surfaces depends on the thread.
    """

    def quiet(shown: Callable[..., Any], error_of: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*raised: Any) -> None:
            error = error_of(*raised)
            late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
            if not late and not (isinstance(error, ImportError) and "sys.meta_path is None" in str(error)):
                shown(*raised)

        return hook

    sys.excepthook = quiet(sys.excepthook, lambda kind, error, trace: error)
    sys.unraisablehook = quiet(sys.unraisablehook, lambda unraisable: unraisable.exc_value)


def write_checksums(folder: Path) -> None:
    """Write the size and the SHA-256 of every file in a folder into a file there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     _ = (Path(name) / "a").write_text("x")
        ...     write_checksums(Path(name))
        ...     before = damage(Path(name))
        ...     _ = (Path(name) / "a").write_text("y")
        ...     print(before, "|", damage(Path(name)))
        None | a was changed after it was written: its SHA-256 differs
    """
    files = _files_to_check(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        sums = dict(zip(files, threads.map(lambda name: _size_and_digest(folder / name), files), strict=True))
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1) + "\n")


def damage(folder: Path) -> str | None:
    """Return how a folder differs from its checksums, or None if it is intact."""
    if is_bucket(folder):
        return None if ocp.utils.is_checkpoint_finalized(folder) else "it was not completed"
    try:
        expected = json.loads((folder / CHECKSUMS_FILE).read_bytes())
        wanted = {str(name): (int(size), str(digest)) for name, (size, digest) in expected.items()}
    except FileNotFoundError:
        return f"{CHECKSUMS_FILE} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS_FILE} cannot be read"
    if extra := sorted(set(_files_to_check(folder)) - set(wanted)):
        return f"{extra[0]} was not written with it"
    with ThreadPoolExecutor(_THREADS) as threads:
        problems = threads.map(lambda name: _file_damage(folder / name, name, *wanted[name]), sorted(wanted))
        return next(filter(None, problems), None)


def _files_to_check(folder: Path) -> list[str]:
    """Return the files of a folder, without those that are written later at its top level."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in names if name not in _WRITTEN_LATER and name != CHECKSUMS_FILE)


def _size_and_digest(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _file_damage(path: Path, name: str, size: int, digest: str) -> str | None:
    try:
        found_size, found_digest = _size_and_digest(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:  # such as a bad sector, which the disk reports only when it is read
        return f"{name} cannot be read: {error.strerror or error}"
    if found_size != size:
        return f"{name} has {found_size:,} bytes, not {size:,}"
    return None if found_digest == digest else f"{name} was changed after it was written: its SHA-256 differs"
