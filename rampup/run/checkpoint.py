"""Checkpoints with Orbax: the training state, where the run stands, and what it belongs to."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import jax
import orbax.checkpoint as ocp

from rampup.errors import ResumeMismatchError, StorageError
from rampup.run.checksums import damage, write_checksums
from rampup.run.distributed import from_first, is_first

RECORD_VERSION = 1
DAMAGED_FOLDER = "damaged_checkpoints"
_questions = itertools.count()


def _fail(error: StorageError) -> NoReturn:
    raise error


class Checkpoints:
    """The checkpoints of one run, labelled with the number of optimizer steps that they hold.

    Each is written beside its final place, with the checksums of its files, and then moved there; so it is whole or not there.

    Args:
        folder: where they lie; made when the first is written.
        keep: older ones are deleted; None keeps all.
        asynchronous: write in the background.
        on_error: called with a StorageError if one cannot be written; those before it stay. By default it is raised.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | None = None,
        asynchronous: bool = True,
        on_error: Callable[[StorageError], None] = _fail,
    ) -> None:
        # What fails is raised as well, and said in our own words.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = folder
        self._keep, self._asynchronous, self._on_error = keep, asynchronous, on_error
        self._writing: int | None = None
        self._manager = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # What goes wrong while closing must not hide why it is closed.
        with contextlib.suppress(*(() if error is None else (Exception,))):
            self._manager.close()

    @property
    def steps(self) -> tuple[int, ...]:
        """Optimizer steps done in each checkpoint, oldest first."""
        if not self.folder.is_dir():
            return ()
        return tuple(sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()))

    @property
    def latest(self) -> int | None:
        """Optimizer steps done in the newest checkpoint, or None."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Write a checkpoint; in the background if asynchronous, but free to change `state` on return.

        Args:
            step: optimizer steps done.
            state: the training state.
            record: what it belongs to, as JSON: at least what `restore` is to check.

        Raises:
            StorageError: from `on_error`, for this checkpoint or the one before it.
        """
        self.wait()
        if step in self.steps:
            return
        content = {"version": RECORD_VERSION, "step": step, **record}
        self._writing = step
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(_as_tree(state)), record=ocp.args.JsonSave(content))
        self._attempt(lambda: self._manager.save(step, args=arguments, force=True))
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Return when every checkpoint is written.

        Raises:
            StorageError: from `on_error`, if one could not be written.
        """
        self._attempt(self._manager.wait_until_finished)

    def restore(
        self,
        state: Any,
        check: Callable[[Mapping[str, Any]], None],
        tell: Callable[[str, Mapping[str, Any]], None] = lambda event, values: None,
    ) -> tuple[Any, int] | None:
        """Return the newest state that is whole and its step, or None where there is no checkpoint.

        Damaged checkpoints that are newer are moved into `damaged_checkpoints`, beside the folder.

        Args:
            state: a state of the same structure; what is restored takes its shapes, types and shardings.
            check: raises if a record does not belong to this run.
            tell: called with the event `damaged_checkpoint` and its step, problem, where it is now and the step used instead.

        Raises:
            ResumeMismatchError: from `check`, a record of another version of rampup, a state of another structure, or no
                checkpoint that is whole; nothing is moved then.
        """
        step, damaged = self._newest_whole()
        if step is None:
            return None
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        version = record.get("version") if isinstance(record, Mapping) else None
        if version != RECORD_VERSION:
            raise ResumeMismatchError(
                f"{self.folder / str(step)} was written in format {version}, this is format {RECORD_VERSION}"
            )
        if record.get("step") != step:
            raise ResumeMismatchError(f"{self.folder / str(step)} says that it is of step {record.get('step')!r:.100}")
        check(record)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(state))
        try:
            tree = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:500]
            raise ResumeMismatchError(
                f"the state in {self.folder / str(step)} is not of this model and optimizer: {reason}"
            ) from error
        self._move_aside(damaged, step, tell)
        return state.replace(**tree), step

    def _newest_whole(self) -> tuple[int | None, dict[int, str]]:
        """Return the newest checkpoint that is whole, and what is wrong with those after it, the same in every process."""
        found: tuple[int | None, dict[int, str]] = (None, {})
        if is_first():
            for step in reversed(self.steps):
                problem = damage(self.folder / str(step))
                if problem is None:
                    found = step, found[1]
                    break
                found[1][step] = problem
        answer = json.loads(from_first(f"checkpoint{next(_questions)}", json.dumps([found[0], list(found[1].items())])))
        step, damaged = answer[0], {int(number): str(problem) for number, problem in answer[1]}
        if step is None and damaged:
            lines = "\n".join(f"  {self.folder / str(number)}: {problem}" for number, problem in damaged.items())
            raise ResumeMismatchError(
                f"every checkpoint is damaged, and none is deleted:\n{lines}\n"
                "put one back from a copy, or give the run another run_name to start from the beginning",
                key="run_name",
            )
        return step, damaged

    def _move_aside(self, damaged: Mapping[int, str], used: int, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        for step, problem in damaged.items():
            source, target = self.folder / str(step), self.folder.parent / DAMAGED_FOLDER
            names = itertools.chain([str(step)], (f"{step}-{number}" for number in itertools.count(2)))
            target /= next(name for name in names if not (target / name).exists())
            if is_first():
                target.parent.mkdir(exist_ok=True)
                source.rename(target)
            tell("damaged_checkpoint", {"step": step, "problem": problem, "moved_to": str(target), "used": used})
        if damaged:
            from_first(f"moved{next(_questions)}", "")
            self._manager.reload()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            create=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        return ocp.CheckpointManager(self.folder.resolve(), options=options)

    def _seal(self) -> None:
        """Write the checksums; called when all files of a checkpoint are written and before it is moved to its place."""
        if not is_first():
            return
        for unfinished in self.folder.glob(f"{self._writing}.*"):
            write_checksums(unfinished)

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - what a full disk raises depends on the library and its version
            step, self._writing = self._writing, None
            with contextlib.suppress(Exception):
                self._manager.close()
            if is_first():
                for unfinished in self.folder.glob(f"{step}.*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            self._manager = self._open()
            good = "there is no other" if self.latest is None else f"the newest is {self.folder / str(self.latest)}"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            failure = StorageError(f"the checkpoint of step {step} could not be written: {reason}; {good}")
            failure.__cause__ = error
            self._on_error(failure)


def newest_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of the newest checkpoint in a folder whose record can be read, without opening the folder; or None."""
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    for step in sorted(steps, reverse=True):
        try:
            record = json.loads((folder / str(step) / "record" / "metadata").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            return record
    return None


def _as_tree(state: Any) -> dict[str, Any]:
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    mutable = getattr(state, "mutable", None)
    return tree if mutable is None else tree | {"mutable": mutable}
