"""One decision for all processes of a run, without stopping any of them."""

from __future__ import annotations

import itertools

import jax

from rampup.run.distributed import store

# Steps from a decision to its effect: more than any process is ahead of another, since a step ends for all of them together.
NOTICE_STEPS = 8
_numbers = itertools.count()


class Agreement:
    """Agrees on the step from which something holds: a few steps after it was said in every process.

    Every process makes its agreements in the same order. A single process agrees with itself at once.

    Args:
        by_any: one process that says it is enough.
    """

    def __init__(self, *, by_any: bool = False) -> None:
        self._by_any = by_any
        self._prefix = f"rampup/agreement{next(_numbers)}"
        self._from_step: dict[str, int] = {}
        self._said: set[str] = set()

    def reached(self, name: str, ready: bool, step: int) -> bool:
        """Say whether it holds at `step`.

        Args:
            name: what is to be agreed on.
            ready: whether this process is ready for it.
            step: the step that is asked about; never smaller than before.
        """
        if jax.process_count() == 1:
            return ready
        if name not in self._from_step:
            self._look(name, ready, step)
        return name in self._from_step and step >= self._from_step[name]

    def _look(self, name: str, ready: bool, step: int) -> None:
        folder = f"{self._prefix}/{name}"
        if ready and name not in self._said:
            store().key_value_set(f"{folder}/ready{jax.process_index()}", "")
            self._said.add(name)
        found = dict(store().key_value_dir_get(folder))
        decision = f"{folder}/from"
        enough = 1 if self._by_any else jax.process_count()
        if jax.process_index() == 0 and decision not in found and len(found) >= enough:
            found[decision] = str(step + NOTICE_STEPS)
            store().key_value_set(decision, found[decision])
        if decision in found:
            self._from_step[name] = int(found[decision])
