"""Checkpoints with Orbax: the training state, and a record of the step and the run that
it belongs to.

Every checkpoint has the checksums of its files: Tensorstore restores a flipped bit in
the values of an array without an error. Process 0 takes them when all is written, and on
resume each process compares those of its share of the files. A bucket has checksums of
its own, so there a checkpoint is intact if Orbax has completed it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rampup.engine.processes import broadcast_from_process0, first_problem, is_primary
from rampup.engine.state import replace_fields
from rampup.engine.sums import differing_leaves
from rampup.errors import RampupError, ResumeMismatchError, StorageError
from rampup.loop.events import CheckpointDamaged, OnEvent, ignore_event
from rampup.loop.lock import require_owner
from rampup.loop.run_folder import (
    ANOTHER_FOLDER,
    CHECKPOINT_FOLDER,
    DAMAGED_FOLDER,
    Record,
    absolute_path,
    as_json,
    as_path,
    is_bucket,
    parse_json,
)
from rampup.plan.numbers import check_whole_or_none

RECORD_VERSION = 2
RESERVED = ("version", "step", "digest")  # entries of a record that are its own
RECORD_FILE = "record/metadata"
CHECKSUMS_FILE = "checksums.json"
# by Orbax; no part of the state
_WRITTEN_LATER = ("commit_success.txt", "_CHECKPOINT_METADATA")
_THREADS = 8
MAX_DIFFERENCES = 5  # leaves that an error message names


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """When a run writes checkpoints, and what is in them besides the state.

    Attributes:
        checkpoint_period: steps between checkpoints; None = write none.
        max_to_keep: how many checkpoints stay, the newest; older ones are deleted. By
            default, None, all stay, while `rampup train` keeps 3
            (`max_num_checkpoints_to_keep`).
        identity: JSON values that must be the same in a checkpoint and in the run that
            resumes it.
        extra_metadata: extra metadata stored with each checkpoint and not validated on
            resume.
        async_checkpointing: write in the background, while training goes on.
        to_saved, from_saved: convert the state in training to the one in checkpoints,
            and back; structure and shapes stay.

    Example:
        >>> CheckpointOptions(checkpoint_period=100, max_to_keep=3).async_checkpointing
        True
    """

    checkpoint_period: int | None = None
    max_to_keep: int | None = None
    async_checkpointing: bool = True
    identity: Record = field(default_factory=dict)
    extra_metadata: Record = field(default_factory=dict)
    to_saved: Callable[[Any], Any] = lambda state: state
    from_saved: Callable[[Any], Any] = lambda state: state

    def __post_init__(self) -> None:
        check_whole_or_none(
            1, checkpoint_period=self.checkpoint_period, max_to_keep=self.max_to_keep
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """The newest intact checkpoint of a folder, as `find_checkpoint` returns it."""

    step: int  # optimizer steps done
    record: Record  # as process 0 has read it
    # newer ones that are damaged: optimizer steps -> the problem
    damaged: Mapping[int, str] = field(default_factory=dict)


def find_checkpoint(folder: Path | str) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint in a folder, the same in every process, or
    None; refuse if all are damaged.

    Args:
        folder: of a run, or `checkpoints` in it.

    Returns:
        What `Loop.restore` takes, with `step`, the optimizer steps done.

    Raises:
        ResumeMismatchError: every checkpoint is damaged.

    Example:
        >>> find_checkpoint("runs/a-new-one") is None
        True
    """
    # Every process must resume from the same step, and their file systems may not show
    # the same files at the same time.
    problems, folder = dict[int, str](), as_path(folder)
    if (folder / CHECKPOINT_FOLDER).is_dir():
        folder /= CHECKPOINT_FOLDER
    steps = broadcast_from_process0(
        "checkpoints", lambda: json.dumps(checkpoint_steps(folder))
    )
    for step in reversed(json.loads(steps)):
        path = folder / str(step)
        problem = first_problem(damage(path, jax.process_index(), jax.process_count()))
        if not problem:
            content = broadcast_from_process0(
                "checkpoint",
                functools.partial((path / RECORD_FILE).read_text, encoding="utf-8"),
            )
            return SavedCheckpoint(
                step=step, record=read_record(path, content), damaged=problems
            )
        problems[step] = problem
    if problems:
        lines = "\n".join(
            f"  {folder / str(step)}: {problem}" for step, problem in problems.items()
        )
        raise ResumeMismatchError(
            f"every checkpoint is damaged, and none is deleted:\n{lines}\nrestore one"
            f" from a copy, or, to start from the beginning, {ANOTHER_FOLDER}",
            key="run_name",
        )
    return None


def read_record(checkpoint: Path, content: str | None = None) -> Record:
    """Return the record of an intact checkpoint, by default from its file, or refuse
    that of another version of rampup.
    """
    record = parse_json(
        (checkpoint / RECORD_FILE).read_bytes() if content is None else content
    )
    version = record.get("version") if isinstance(record, Mapping) else None
    if version != RECORD_VERSION:
        raise ResumeMismatchError(
            f"{checkpoint} was written in format {version}, this is format"
            f" {RECORD_VERSION}"
        )
    digest = record.pop("digest", None)
    if record.get("step") != int(checkpoint.name) or digest != _digest(record):
        raise ResumeMismatchError(
            f"the record of {checkpoint} is damaged, or was changed by hand",
            fix="move that checkpoint away to resume from the one before",
        )
    return record


def _digest(record: Record) -> str:
    """Return the digest of a record, as JSON has it."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def read_state(folder: Path, step: int, state: Any) -> Any:
    """Return the state of an intact checkpoint of a run that may be training, without
    changing anything in its folder.

    `state` is a state of the same structure, or its shapes, with the types and
    shardings of the result.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(state))
    # Orbax would fail at a leaf that differs, with a page of messages from its threads.
    checkpoint = absolute_path(folder) / str(step)
    stored = _stored_shapes(checkpoint)

    def is_empty(part: Any) -> bool:
        return part is None or (isinstance(part, (tuple, list, dict)) and not part)

    def shape(leaf: Any) -> tuple[int, ...] | str | None:
        if is_empty(leaf):
            return "empty"
        return None if getattr(leaf, "shape", None) is None else tuple(leaf.shape)

    found = [
        f"{name} is {'absent' if old is None else old} in the checkpoint and"
        f" {'absent' if new is None else new} here"
        for name, old, new in differing_leaves(
            stored, abstract, shape, is_empty, simple=True, separator="/"
        )
    ]
    if found:
        raise ResumeMismatchError(
            f"the state in {folder / str(step)} is not of this model and optimizer:"
            f" {'; '.join(found[:MAX_DIFFERENCES])} ({len(found):,} in all)",
            fix="restore the model and the kind of optimizer of that run, or"
            f" {ANOTHER_FOLDER}",
        )
    return replace_fields(state, **restore_tree(checkpoint, abstract))


def restore_tree(checkpoint: Path, shapes: Any = None) -> Any:
    """Return the state of a checkpoint like `shapes`, with its shardings; by default as
    nested dicts on one device.
    """
    if shapes is None:
        shapes = on_first_device(_stored_shapes(checkpoint))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(
            checkpoint, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        ).state


def _stored_shapes(checkpoint: Path) -> Any:
    """Return the shapes of the state in a checkpoint, as nested dicts."""
    # The handler of the item itself: that of the whole checkpoint asks in warnings for a
    # registry of handlers.
    return ocp.StandardCheckpointHandler().metadata(checkpoint / "state").tree


def on_first_device(shapes: Any) -> Any:
    """Return shapes with the sharding of the first device of this process."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
    )


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the optimizer steps done in each checkpoint of a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in folder.iterdir()
        if path.name.isdecimal() and path.is_dir()
    )


@dataclass(eq=False)
class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run. Each is named after the number of optimizer steps
    done.

    Orbax writes a checkpoint into a temporary folder, with the checksums of its files,
    and then renames it: a checkpoint is complete or absent. If one cannot be written,
    that is a StorageError, and no other is written.
    """

    folder: Path
    options: CheckpointOptions = field(default_factory=CheckpointOptions)

    def __post_init__(self) -> None:
        # The step that is being written, and the last one that was: another process may
        # not see it in the folder yet.
        self._writing: int | None = None
        self._saved: int | None = None
        self._has_failed = False
        self._manager = self._open()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        # Among several processes, to close a manager whose write has failed is to wait
        # for the others, which wait for this write.
        if self._has_failed and jax.process_count() > 1:
            return
        # An error while closing must not hide the error that led to closing.
        with contextlib.suppress(*(() if error is None else (Exception,))):
            self._manager.close()

    @property
    def latest(self) -> int | None:
        """Optimizer steps done in the newest checkpoint, or None."""
        return max(checkpoint_steps(self.folder), default=None)

    def save(self, step: int, state: Any, record: Record) -> bool:
        """Write a checkpoint after `step` optimizer steps, unless there is one; return
        whether it is written, or begun.

        When this returns, `state` has been copied and may be donated.

        Raises:
            StorageError: this one, or the one before it, cannot be written.
        """
        # Orbax reports the failure of an asynchronous write at the next call: it
        # belongs to the checkpoint before this one.
        self.wait()
        if step == self._saved:
            return False
        content = as_json({**record, "version": RECORD_VERSION, "step": step})
        arguments = ocp.args.Composite(
            state=ocp.args.StandardSave(_as_tree(state)),
            record=ocp.args.JsonSave({**content, "digest": _digest(content)}),
        )
        self._writing = step
        with self._told():
            # Orbax waits for all processes, so that none may begin what another one
            # cannot do.
            if problem := first_problem(self._problem()):
                raise StorageError(problem)
            self._manager.save(step, args=arguments, force=True)
        self._saved = step
        if not self.options.async_checkpointing:
            self.wait()
        return True

    def _problem(self) -> str:
        """Return why this process cannot write a checkpoint, or "". Orbax itself would
        wait for a thread that has failed.
        """
        if not is_primary():
            return ""
        probe = self.folder / "probe"
        try:
            require_owner(self.folder.parent)
            if is_bucket(self.folder):
                probe.write_bytes(b"")
                probe.unlink()
            else:
                # Its parents are not made: if they are gone, the run was moved. A
                # killed run may have left the probe.
                self.folder.mkdir(exist_ok=True)
                probe.mkdir(exist_ok=True)
                probe.rmdir()
        except RampupError as error:
            return str(error)
        except OSError as error:
            return f"{self.folder} cannot be written: {error.strerror or error}"
        return ""

    def wait(self) -> None:
        """Wait until every checkpoint is written, or raise a StorageError."""
        with self._told():
            self._manager.wait_until_finished()

    def restore(
        self, saved: SavedCheckpoint, state: Any, on_event: OnEvent = ignore_event
    ) -> Any:
        """Return the state of a checkpoint, like `state`, or refuse; then move newer,
        damaged ones aside.
        """
        restored = read_state(self.folder, saved.step, state)
        for step, problem in saved.damaged.items():
            source, aside = self.folder / str(step), self.folder.parent / DAMAGED_FOLDER
            target = aside / str(step)
            while target.exists():  # an earlier one of this step
                target = aside / f"{target.name}-"
            # In a bucket, Orbax itself has deleted a checkpoint that it did not
            # complete.
            if is_primary() and source.exists():
                aside.mkdir(exist_ok=True)
                source.rename(target)
            on_event(
                CheckpointDamaged(
                    steps=step, problem=problem, moved_to=target, used=saved.step
                )
            )
        if saved.damaged:
            # The others must not list the folder before process 0 has moved everything.
            broadcast_from_process0("moved", str)
            self._manager.reload()
        return restored

    def _open(self) -> ocp.CheckpointManager:
        def take_checksums() -> None:
            for unfinished in self._unfinished():
                write_checksums(unfinished)

        owner, wait = threading.get_ident(), ocp.multihost.get_barrier_sync_fn()

        def barrier(*, key: str, timeout_ms: int) -> None:
            # Where a write has failed, Orbax comes to its last barrier, in a `finally`.
            # The others are at an earlier one and do not come: this process ends, and
            # JAX ends them.
            if threading.get_ident() == owner or sys.exception() is None:
                wait(key=key, timeout_ms=timeout_ms)

        # Despite its name, Orbax calls `post_finalization_callback` before it renames
        # the folder, when the files of all processes are written.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.options.max_to_keep,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                barrier_sync_fn=barrier,
                post_finalization_callback=take_checksums if is_primary() else None,
            ),
        )
        return ocp.CheckpointManager(absolute_path(self.folder), options=options)

    def _unfinished(self) -> Iterable[Path]:
        # Orbax writes into a folder with the step's number and a suffix that depends on
        # its version.
        if is_bucket(self.folder):
            return ()
        return self.folder.glob(f"{self._writing}.*")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say in a sentence which checkpoint could not be written, and why."""
        try:
            yield
        except Exception as error:
            self._has_failed = True
            # Orbax would delete it at the next start, while it writes there again.
            for unfinished in self._unfinished() if is_primary() else ():
                shutil.rmtree(unfinished, ignore_errors=True)
            existing: Any = "unknown"
            with contextlib.suppress(OSError):  # a bucket that is away
                existing = self.latest and self.folder / str(self.latest)
            raise StorageError(
                f"the checkpoint of step {self._writing} could not be written:"
                f" {self._reason(error)}; the newest is {existing}"
            ) from error

    def _reason(self, error: BaseException) -> str:
        """Return why a checkpoint could not be written, in a part of a sentence."""
        reason = " ".join(str(error).split()) or type(error).__name__
        if re.search("RESOURCE_EXHAUSTED|ENOSPC|No space left", reason):
            return f"No space left on device in {self.folder}"
        # Tensorstore says in a page what it was doing, with the facts in any order.
        code = re.search(r"\[os_error_code='?(\d+)", reason)
        return f"{os.strerror(int(code[1]))} in {self.folder}" if code else reason[:300]


def _as_tree(state: Any) -> dict[str, Any]:
    """Return all fields of a state that contain arrays, such as the moving average in a
    subclass of Flax's TrainState.
    """
    fields = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    names = [
        f.name
        for f in fields
        if f.metadata.get("pytree_node", not f.metadata.get("static", False))
    ]
    names = names or state._fields  # of a named tuple
    return {
        name: value for name in names if (value := getattr(state, name)) is not None
    }


def write_checksums(folder: Path) -> None:
    """Write size and SHA-256 of every file of a checkpoint."""
    names = _files_to_check(folder)
    with ThreadPoolExecutor(_THREADS) as threads:
        entries = threads.map(lambda name: _size_and_digest(folder / name), names)
        content = json.dumps(dict(zip(names, entries, strict=True)), indent=1)
    (folder / CHECKSUMS_FILE).write_text(content + "\n")


def damage(folder: Path, share: int = 0, num_shares: int = 1) -> str:
    """Return how a folder differs from its checksums, or ""; contents are checked of one
    of `num_shares` parts of it.
    """
    if is_bucket(folder):
        return (
            "" if ocp.utils.is_checkpoint_finalized(folder) else "it was not completed"
        )
    try:
        expected = parse_json((folder / CHECKSUMS_FILE).read_bytes())
    except OSError as error:
        return f"{CHECKSUMS_FILE} cannot be read: {error.strerror or error}"
    if not isinstance(expected, dict) or not all(map(_is_entry, expected.values())):
        return f"{CHECKSUMS_FILE} cannot be read"
    if extra := sorted(set(_files_to_check(folder)) - set(expected)):
        return f"{extra[0]} was not written with it"
    # Dealt out by size: neighbours in the row are about as large.
    to_read = set(
        sorted(expected, key=lambda name: (-expected[name][0], name))[share::num_shares]
    )

    def problem(name: str) -> str:
        path, size = folder / name, expected[name][0]
        try:
            # First the size: a file that has lost its end is not worth reading.
            found_size = path.stat().st_size
            if found_size != size:
                return f"{name} has {found_size:,} bytes, not {size:,}"
            if name in to_read and _size_and_digest(path) != expected[name]:
                return f"{name} was changed after it was written: its SHA-256 differs"
        # Such as a bad sector, which the disk reports only when it is read.
        except OSError as error:
            return f"{name} cannot be read: {error.strerror or error}"
        return ""

    with ThreadPoolExecutor(_THREADS) as threads:
        return next(filter(None, threads.map(problem, sorted(expected))), "")


def _is_entry(entry: Any) -> bool:
    """Return whether an entry of the checksums is a size and a digest."""
    return isinstance(entry, list) and list(map(type, entry)) == [int, str]


def _files_to_check(folder: Path) -> list[str]:
    """Return the files of a folder, without those that are written later at its top
    level.
    """
    names = (
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir()
    )
    return sorted(
        name
        for name in names
        if name not in _WRITTEN_LATER and not name.startswith(CHECKSUMS_FILE)
    )


def _size_and_digest(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]
