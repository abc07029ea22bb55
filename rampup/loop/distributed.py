"""Several processes as one run: joining, agreeing, and ending. When one of them is gone,
JAX ends the others.

Processes communicate through the key-value store of jax.distributed, without device
collectives, so no device waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import jax

from rampup.engine.processes import (
    FOLDER,
    announced,
    broadcast_from_process0,
    first_problem,
    is_primary,
    kv_store,
)
from rampup.errors import ConfigError
from rampup.loop.launchers import find_launch, local_device_ids
from rampup.loop.meeting import meet
from rampup.loop.run_folder import Record
from rampup.plan.describe import describe_change

# from a decision to its effect; a host is at most `metrics.IN_FLIGHT` steps ahead of
# the devices of all
NOTICE_STEPS = 8
_LAST_SECONDS = 2.0
_agreement_numbers = itertools.count()
has_failed = threading.Event()  # the last run of several processes, in this one


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    distributed: str = "auto",
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 60,
) -> None:
    """Join the other processes of the run, if there are any. Call it before JAX looks
    for devices.

    All meet at process 0's port first, so that one that never comes has a name; see
    `rampup.loop.meeting`.

    Args:
        coordinator_address: host and port of process 0; without it, and what follows,
            the environment decides.
        num_processes: of the run.
        process_id: the number of this one.
        distributed: `on` refuses to run alone, `off` does not join.
        initialization_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds after which JAX ends a process that hears nothing.

    Raises:
        ConfigError: a process did not come, or the arguments do not fit together.

    Example:
        >>> join(distributed="off")
    """
    if jax.distributed.is_initialized() or distributed == "off":
        return
    with announced("this process waits for what JAX looks up: the name of process 0"):
        launch = find_launch(
            coordinator_address,
            num_processes,
            process_id,
            timeout=initialization_timeout,
        )
    if launch is None:
        if distributed == "on":
            raise ConfigError(
                "distributed=on, but this process was started alone",
                fix="set coordinator_address, num_processes and process_id, or start it"
                " with a launcher",
                key="distributed",
                nearest=("auto",),
            )
        return
    devices = local_device_ids()
    me = f"process {launch.number} of {launch.count}"
    with announced(f"{me} waits for {launch.address}") as waiting:
        meet(launch, initialization_timeout, waiting)
        waiting.words = f"{me} connects to the others at {launch.address}"
        try:
            jax.distributed.initialize(
                coordinator_address=launch.address,
                num_processes=launch.count,
                process_id=launch.number,
                local_device_ids=devices,
                # JAX's detectors would be asked once more, also those that fail here.
                cluster_detection_method="deactivate",
                initialization_timeout=initialization_timeout,
                heartbeat_timeout_seconds=heartbeat_timeout,
            )
        except RuntimeError as error:
            raise ConfigError(
                f"{me} could not join the others at {launch.address}:"
                f" {' '.join(str(error).split())[:300]}",
                key="coordinator_address",
            ) from None


def check_consistent(facts: Record) -> None:
    """Refuse, in every process, to run different things. All of them call this equally
    often.

    Facts are key -> value, of the configuration and the data, and for files a mapping
    from name to fingerprint. A process leaves out those that it does not know; process
    0 knows all.
    """
    if jax.process_count() == 1:
        return
    own = json.dumps(facts, default=str)
    first = json.loads(broadcast_from_process0("facts", lambda: own))
    known = {**first, **json.loads(own)}
    places = ("in process 0", f"in process {jax.process_index()}")
    problem = first_problem(
        "\n".join(
            f"  {key}: {', '.join(describe_change(first[key], known[key], places, most=1))}"
            for key in first
            if known[key] != first[key]
        )
    )
    if problem:
        raise ConfigError(
            f"the processes are not started alike:\n{problem}",
            key=problem.partition(":")[0].strip(),
        )


class StopConsensus:
    """Agrees on the step before which a run stops, without stopping any process
    meanwhile.

    When a process says that it wants to stop, process 0 sets a step a little ahead,
    which all find before they reach it.
    """

    def __init__(self) -> None:
        self._folder = f"{FOLDER}/agreement{next(_agreement_numbers)}"
        self._from_step: int | None = None

    def agreed(self, wants_to_stop: bool, step: int) -> bool:
        """Return whether the run stops before `step`, which is never smaller than in
        the call before.
        """
        if jax.process_count() == 1:
            return wants_to_stop
        if self._from_step is None:
            if wants_to_stop:
                kv_store().key_value_set(
                    f"{self._folder}/ready{jax.process_index()}",
                    "",
                    allow_overwrite=True,
                )
            found = dict(kv_store().key_value_dir_get(self._folder))
            decision = f"{self._folder}/from"
            if is_primary() and decision not in found and found:
                found[decision] = str(step + NOTICE_STEPS)
                kv_store().key_value_set(decision, found[decision])
            # A later look finds the same decision, so it does not matter when a process
            # looks first.
            self._from_step = int(found[decision]) if decision in found else None
        return self._from_step is not None and step >= self._from_step


@contextlib.contextmanager
def leaving_on_error() -> Iterator[None]:
    """Let a process whose run fails end at once: the others notice it by its silence,
    and JAX ends them in its own words.
    """
    has_failed.clear()
    try:
        yield
    except BaseException:
        if jax.process_count() > 1 and not has_failed.is_set():
            has_failed.set()
            # The others hear through process 0 what all of them say, so it ends last.
            time.sleep(_LAST_SECONDS if is_primary() else 0)
        raise


def leave(code: int) -> NoReturn:
    """End this process at once. JAX's own end waits for the other processes, and aborts
    if they are gone.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


atexit.register(lambda: leave(1) if has_failed.is_set() else None)
