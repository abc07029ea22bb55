"""Checkpoints with Orbax: the training state, where the run stands, and what it belongs to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from rampup.errors import ResumeMismatchError

RECORD_VERSION = 1


class Checkpoints:
    """The checkpoints of one run, labelled with the number of optimizer steps that they hold.

    Args:
        folder: where they lie; made when the first is written.
        keep: older ones are deleted; None keeps all.
        asynchronous: write in the background.
    """

    def __init__(self, folder: Path, *, keep: int | None = None, asynchronous: bool = True) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=asynchronous, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Optimizer steps done in the newest checkpoint, or None."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: Any, record: Mapping[str, Any]) -> None:
        """Write a checkpoint; in the background if asynchronous, but free to change `state` on return.

        Args:
            step: optimizer steps done.
            state: the training state.
            record: what it belongs to, as JSON: at least what `restore` is to check.
        """
        if step in self._manager.all_steps():
            return
        content = {"version": RECORD_VERSION, "step": step, **record}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(_as_tree(state)), record=ocp.args.JsonSave(content))
        )

    def wait(self) -> None:
        """Return when every checkpoint is written; raise what went wrong in the background."""
        self._manager.wait_until_finished()

    def restore(self, state: Any, check: Callable[[Mapping[str, Any]], None]) -> tuple[Any, int] | None:
        """Return the newest state and its step, or None where there is no checkpoint.

        Args:
            state: a state of the same structure; what is restored takes its shapes, types and shardings.
            check: raises if a record does not belong to this run.

        Raises:
            ResumeMismatchError: from `check`, or a record of another version of rampup.
        """
        step = self.latest
        if step is None:
            return None
        record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if record.get("version") != RECORD_VERSION:
            raise ResumeMismatchError(
                f"{self.folder / str(step)} was written in format {record.get('version')}, this is format {RECORD_VERSION}"
            )
        check(record)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_tree(state))
        tree = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        return state.replace(**tree), step


def _as_tree(state: Any) -> dict[str, Any]:
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    mutable = getattr(state, "mutable", None)
    return tree if mutable is None else tree | {"mutable": mutable}
