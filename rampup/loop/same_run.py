"""Is this the run of the checkpoint? What a run is, recorded in each checkpoint, and
compared with it at a resume.

A run is its ramp, the keys and data of its configuration (`CheckpointOptions.identity`),
and the rows and programs of a loop of the user's own. Whether a configuration goes on
with another ramp is decided before, by `rampup.config.resume`.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import flax
import jax
import numpy as np
import optax

import rampup
from rampup.engine.batch import check_batch
from rampup.engine.processes import is_primary
from rampup.errors import ResumeMismatchError, ResumeWarning, a_type, warn
from rampup.loop.components import Component, LoopPlan, LoopStep
from rampup.loop.run_folder import ANOTHER_FOLDER, Record
from rampup.plan.describe import describe_change

# Entries of a checkpoint's record, beside those of the identity.
RAMP_ROWS = "ramp_rows"
NUM_DEVICES = "num_devices"
IDENTITY_KEYS = "identity_keys"
ROWS = "rows"
PROGRAMS = "programs"
NAMED_FILES = 10  # in an error message, if the data have changed
_PLACES = ("in the checkpoint", "here")
_MAX_CONSTANT = 2**16


def check_same_run(
    record: Record, plan: LoopPlan, identity: Record, place: str
) -> None:
    """Refuse the record of a checkpoint, which `place` names, whose ramp or identity is
    another.
    """
    ramp, step = plan.ramp, record["step"]
    before, now = record.get(RAMP_ROWS), ramp.to_rows()
    if 0 < getattr(ramp, "first_step", 0) <= step and before is not None:
        # A ramp that goes on from here has to have the steps before in common.
        before, now = ([row for row in rows if row[0] < step] for rows in (before, now))
    if before != now:
        table = ramp.differences(record[RAMP_ROWS]) or "".join(
            describe_change(before, now, _PLACES, most=1)
        )
        # A ramp that is computed from the devices changes with them.
        was, here = record.get(NUM_DEVICES), getattr(plan, NUM_DEVICES, None)
        if was and here and was != here:
            place += f", a run on num_devices={was} and not on {here}"
        raise ResumeMismatchError(
            f"the ramp is not that of {place}:\n{table}\nrestore the ramp, continue it"
            f" with rampup.loop.ramp_to_continue, or {ANOTHER_FOLDER}",
            key=RAMP_ROWS,
        )
    # A key that is left out here is another value too.
    _refuse_differing(
        record,
        {**dict.fromkeys(record.get(IDENTITY_KEYS, ())), **identity},
        f"{place} is of another run",
        "set these back, as `rampup train RUN_DIR` does for a configuration, or"
        f" {ANOTHER_FOLDER}",
    )


class SameRun(Component):
    """Rows, optimizer and loss of a loop of the user's own, which a resume compares
    with those of the checkpoint.

    Other rows, by number, order and content of some of them, are an error. Another
    optimizer or loss, by its jaxpr, which also changes with the libraries, is a
    warning, and so are rows that `step_batches` does not read, which cannot be
    compared. Not seen: larger arrays in a closure, and what a pipeline or a loss with a
    class of its own computes. `step` is None if a configuration says what it computes.
    """

    def __init__(self, step: LoopStep | None) -> None:
        self._step = step
        self._before: Record = {}
        self._own: dict[str, Any] = {}

    def state(self) -> Record:
        """See `Component`."""
        return self._own

    def load(self, record: Record) -> None:
        """See `Component`."""
        self._before = record

    def check(self, batches: Any, state: Any, batch: Any) -> None:
        """Compare what is about to run with the checkpoint's record, before the first
        step.
        """
        place = f"the checkpoint of step {self._before.get('step')}"
        rows = getattr(batches, "identity", None) or {}
        # The names of the facts contain the numbers of rows, so that another number of
        # rows has other facts beside its own.
        _refuse_differing(
            {**rows, **self._before.get(ROWS, {})},
            rows,
            f"{place} is of a run with other rows",
            f"give the rows and the seed of that run, or {ANOTHER_FOLDER}",
        )
        self._own[ROWS] = rows
        if self._before and self._step is not None and not rows and is_primary():
            warn(
                f"whether the rows are those of {place} cannot be told: `batches`"
                f" returned {a_type(batches)}. See that they go on where they were, or"
                " return step.batches(...) itself, which is compared",
                ResumeWarning,
            )
        traced = getattr(self._step, "jaxprs", None)
        if traced is None:
            return
        check_batch(batch)
        programs = {
            name: _digest(jaxpr) for name, jaxpr in traced(state, batch.row).items()
        }
        versions = [module.__version__ for module in (jax, optax, flax, rampup)]
        self._own[PROGRAMS] = programs | {"versions": versions}
        before = self._before.get(PROGRAMS, {})
        if before.get("versions") != versions or not is_primary():
            return
        for name, digest in programs.items():
            if before.get(name) != digest:
                warn(
                    f"the {name} is not that of {place}: it computes something else, as"
                    " with another rate, factor or seed. If that is no mistake, ignore"
                    " this; otherwise restore it",
                    ResumeWarning,
                )


def _refuse_differing(before: Record, now: Record, problem: str, fix: str) -> None:
    """Refuse facts of which some were others before, with a line for each."""
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        table = "\n".join(
            f"  {key}: {change}"
            for key in differing
            for change in describe_change(
                before.get(key), now[key], _PLACES, most=NAMED_FILES
            )
        )
        raise ResumeMismatchError(f"{problem}:\n{table}\n{fix}", key=differing[0])


def _digest(jaxpr: Any) -> str:
    """Return a digest of a closed jaxpr and its small constants."""
    # Functions in it have addresses, and sets an order that differ from process to
    # process.
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr.jaxpr))
    text = re.sub(
        r"\{[^{}\n]*\}",
        lambda found: ",".join(sorted(re.split(r"[{},]\s*", found[0]))),
        text,
    )
    digest = hashlib.sha256(text.encode())
    for constant in jaxpr.consts:
        if jax.numpy.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        is_here = not isinstance(constant, jax.Array) or constant.is_fully_addressable
        # By size and type: constants of JAX 0.7 have no `nbytes`.
        if is_here and np.size(constant) * constant.dtype.itemsize <= _MAX_CONSTANT:
            digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()[:16]
