"""Whether a loop of one's own resumes with the rows, the optimizer and the loss that it was started with.

Rows are compared by number, order and content, of some of them, and another value is an error. Optimizer and loss are compared
by their jaxprs, and another one is a warning: a jaxpr changes with the versions of the libraries, and may for other reasons.
Not seen: rows that `step_batches` does not read, other values of arrays of more than `_MAX_CONSTANT` bytes in a closure, and
what a pipeline or a loss with a class of its own computes.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import flax
import jax
import numpy as np
import optax

import rampup
from rampup.engine.processes import is_primary
from rampup.errors import ResumeMismatchError, ResumeWarning
from rampup.loop.components import Component, LoopStep

ROWS, PROGRAMS = "rows", "programs"
_MAX_CONSTANT = 2**16


class SameRun(Component):
    """Knows rows, optimizer and loss of a run, and compares them at a resume.

    Args:
        step: the training step; None if something else says what it computes, such as a configuration.
    """

    def __init__(self, step: LoopStep | None) -> None:
        self._step = step
        self._before: Mapping[str, Any] = {}
        self._own: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """See `Component`."""
        return self._own

    def load(self, record: Mapping[str, Any]) -> None:
        """See `Component`."""
        for name in (ROWS, PROGRAMS):
            if not isinstance(found := record.get(name, {}), dict):
                raise ResumeMismatchError(f"the record of the checkpoint is damaged: its {name} are {found!r:.100}", key=name)
        self._before = record

    def check(self, batches: Any, state: Any, batch: Any) -> None:
        """Compare what is about to run with the checkpoint's record, before the first step.

        Raises:
            ResumeMismatchError: other rows, or in another order.
        """
        rows: dict[str, Any] = getattr(batches, "identity", None) or {}
        before: Mapping[str, Any] = self._before.get(ROWS, {})
        self._own[ROWS] = rows
        # The names of the facts contain the numbers of rows, so that another number of rows has other facts beside its own.
        differing = [name for name in rows if before.get(name, rows[name]) != rows[name]]
        if differing:
            table = "\n".join(f"  {name}: {before[name]} in the checkpoint, {rows[name]} here" for name in differing)
            raise ResumeMismatchError(
                f"the checkpoint of step {self._before['step']} is of a run with other rows:\n{table}\n"
                "give the rows and the seed of that run, or train in another folder",
                key=ROWS,
            )
        traced = getattr(self._step, "jaxprs", None)
        if traced is None:
            return
        programs: dict[str, Any] = {name: _digest(jaxpr) for name, jaxpr in traced(state, batch.row).items()}
        programs |= {"versions": [module.__version__ for module in (jax, optax, flax, rampup)]}
        before = self._before.get(PROGRAMS, {})
        self._own[PROGRAMS] = programs
        if before.get("versions") != programs["versions"] or not is_primary():
            return
        for name, digest in programs.items():
            if before.get(name, digest) != digest:
                warnings.warn(
                    f"the {name} is not that of the checkpoint of step {self._before['step']}: it computes something else, as "
                    "with another rate or factor. If that is no mistake, ignore this; otherwise restore it",
                    ResumeWarning,
                    stacklevel=2,
                )


def _digest(jaxpr: Any) -> str:
    """Return a digest of a closed jaxpr and its small constants."""
    # Functions in it have addresses, and sets an order that differ from process to process.
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr.jaxpr))
    text = re.sub(r"\{[^{}\n]*\}", lambda found: ",".join(sorted(re.split(r"[{},]\s*", found[0]))), text)
    digest = hashlib.sha256(text.encode())
    for constant in jaxpr.consts:
        if jax.numpy.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        is_here = not isinstance(constant, jax.Array) or constant.is_fully_addressable
        if is_here and math.prod(np.shape(constant)) * constant.dtype.itemsize <= _MAX_CONSTANT:
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()[:16]
