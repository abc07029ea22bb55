"""The steps that were left out because their numbers went bad, and when there are too many."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.errors import NonFiniteError
from rampup.plan.ramp import BatchRamp
from rampup.run.run_folder import read_lines

NAMED_ROWS = 3


class SkippedSteps:
    """Counts skipped steps in a row.

    Args:
        before: those that an earlier process skipped just before; see `skipped_before`.
        limit: so many in a row stop the run; 0 = never.
        ramp: says which samples a step used.
        rows_of: from a step number to its rows, for a person.
        progress: told `skip`.
    """

    def __init__(
        self,
        before: Sequence[int],
        *,
        limit: int,
        ramp: BatchRamp,
        rows_of: Callable[[int], Sequence[str]],
        progress: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self._steps, self._limit = list(before), limit
        self._ramp, self._rows_of, self._progress = ramp, rows_of, progress

    def count(self, record: Mapping[str, Any]) -> None:
        """Look at the record of the next step.

        Raises:
            NonFiniteError: that was one too many.
        """
        if "skipped" not in record:
            self._steps = []
            return
        self._steps.append(record["step"])
        self._progress("skip", {"step": record["step"], "in_a_row": len(self._steps)})
        if len(self._steps) == self._limit:
            rows = "\n".join(self._rows_in_words(step) for step in self._steps[-NAMED_ROWS:])
            raise NonFiniteError(
                f"the loss or the gradient of step {', '.join(map(str, self._steps[-10:]))} was not finite, "
                f"{len(self._steps)} in a row: skip_nonfinite={self._limit} stops there; none of them changed "
                f"the parameters, and the checkpoints stay. The rows they used:\n{rows}",
                steps=self._steps,
                key="skip_nonfinite",
            )

    def _rows_in_words(self, step: int) -> str:
        ramp, rows = self._ramp, self._rows_of(step)
        samples = f"  step {step}: samples {ramp.samples_before(step):,} to {ramp.samples_before(step + 1) - 1:,}"
        more = f", and {len(rows) - NAMED_ROWS} more (rampup rows lists them)" if len(rows) > NAMED_ROWS else ""
        return f"{samples}: {', '.join(rows[:NAMED_ROWS])}{more}" if rows else samples


def skipped_before(path: Path, start: int) -> list[int]:
    """Return the steps that an earlier process skipped just before the one that this run starts with.

    Args:
        path: its metrics.jsonl.
        start: the run's first step.
    """
    done = [line for line in read_lines(path) if line["step"] < start]
    return [line["step"] for line in itertools.takewhile(lambda line: line.get("skipped"), reversed(done))][::-1]
