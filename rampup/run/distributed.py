"""Several processes as one run: joining, agreeing, and ending together when one of them is gone.

Processes communicate through the key-value store of jax.distributed, without device collectives, so no device waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rampup.errors import ConfigError
from rampup.run.data.files import changed_files

# Steps from a decision to its effect. A step ends for all processes together, so none is this many steps ahead of another.
NOTICE_STEPS = 8
_LAUNCHERS = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS")
_FOLDER = "rampup"
_ALIVE, _DONE, _FAILED = f"{_FOLDER}/alive", "done", "failed "
_EXIT_FAILED = 1
_agreement_numbers, _check_numbers = itertools.count(), itertools.count()


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 60,
) -> None:
    """Join the other processes of the run, if there are any. Call it before JAX looks for devices.

    Without arguments the environment decides: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or the variables
    that Slurm, Open MPI and Cloud TPU set when they start several processes.

    Args:
        coordinator_address: host:port of process 0.
        num_processes: total number of processes.
        process_id: number of this process, from 0.
        initialization_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds without a heartbeat after which JAX gives a process up.

    Raises:
        ConfigError: only some of the three are given, or the others do not come.
    """
    if jax.distributed.is_initialized():
        return
    given = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _int_or_environment(num_processes, "JAX_NUM_PROCESSES"),
        "process_id": _int_or_environment(process_id, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in given.items() if value is None]
    timeouts = {"initialization_timeout": initialization_timeout, "heartbeat_timeout_seconds": heartbeat_timeout}
    if len(missing) == len(given):
        if _launcher_started_several():
            jax.distributed.initialize(**timeouts)
        return
    if missing:
        raise ConfigError(
            f"{', '.join(name for name in given if name not in missing)} is given without {' and '.join(missing)}; several "
            "processes need all three",
            key=missing[0],
        )
    number, count = given["process_id"], given["num_processes"]
    if not 0 <= number < count:
        raise ConfigError(
            f"process_id={number} must be from 0 to num_processes - 1 = {count - 1}", key="process_id", nearest=(0, count - 1)
        )
    try:
        jax.distributed.initialize(**given, **timeouts)
    except RuntimeError as error:
        raise ConfigError(
            f"process {number} of {count} could not join the others at {given['coordinator_address']} within "
            f"{initialization_timeout} s: {' '.join(str(error).split())[:300]}",
            key="coordinator_address",
        ) from None


def is_primary() -> bool:
    """Return whether this is process 0, which writes the files that a run has only once."""
    return jax.process_index() == 0


def kv_store() -> Any:
    """Return the key-value store that all processes share."""
    # It has no public name; Orbax and others take it from here too.
    from jax._src import distributed

    return distributed.global_state.client


def broadcast_from_process0(name: str, value: str, *, timeout: int = 300) -> str:
    """Return process 0's value, in every process."""
    if jax.process_count() == 1:
        return value
    key = f"{_FOLDER}/first/{name}"
    if is_primary():
        kv_store().key_value_set(key, value, allow_overwrite=True)
        return value
    return str(kv_store().blocking_key_value_get(key, 1000 * timeout))


def check_consistent(facts: Mapping[str, Any], *, timeout: int = 300) -> None:
    """Check that all processes are about to run the same thing. All of them call this equally often.

    Args:
        facts: key -> value, of the configuration and the data. The value for files is a mapping from name to fingerprint. A
            process leaves out the facts that it does not know; process 0 knows all.
        timeout: seconds to wait for the others.

    Raises:
        ConfigError: in every process, with the keys that differ.
    """
    # Process 0 compares, and the others wait for its answer: all of them end in the same way.
    count = jax.process_count()
    if count == 1:
        return
    folder = f"{_FOLDER}/facts{next(_check_numbers)}"
    kv_store().key_value_set(f"{folder}/{jax.process_index()}", json.dumps(facts, default=str))
    if is_primary():
        found = [json.loads(kv_store().blocking_key_value_get(f"{folder}/{n}", 1000 * timeout)) for n in range(count)]
        kv_store().key_value_set(f"{folder}/verdict", json.dumps(_differences(found)))
    problems = json.loads(kv_store().blocking_key_value_get(f"{folder}/verdict", 1000 * timeout))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        raise ConfigError(f"the processes are not started alike:\n{lines}", key=next(iter(problems)))


class StepConsensus:
    """Agrees on the step from which a decision applies, without stopping any process.

    Each process reports when it is ready. When enough are, process 0 sets a step a little ahead, which all of them find in the
    store before they reach it. Every process creates its instances in the same order. A single process decides at once.

    Args:
        any_process: whether one ready process is enough; otherwise all of them must be ready.
    """

    def __init__(self, *, any_process: bool = False) -> None:
        self._any_process = any_process
        self._prefix = f"{_FOLDER}/agreement{next(_agreement_numbers)}"
        self._from_step: dict[str, int] = {}
        self._reported: set[str] = set()

    def agreed(self, name: str, ready: bool, step: int) -> bool:
        """Return whether the decision applies at `step`.

        Args:
            name: the decision.
            ready: whether this process is ready for it.
            step: the step, never smaller than in the call before.
        """
        if jax.process_count() == 1:
            return ready
        if name not in self._from_step:
            self._update(name, ready, step)
        return name in self._from_step and step >= self._from_step[name]

    def _update(self, name: str, ready: bool, step: int) -> None:
        folder = f"{self._prefix}/{name}"
        if ready and name not in self._reported:
            kv_store().key_value_set(f"{folder}/ready{jax.process_index()}", "")
            self._reported.add(name)
        found = dict(kv_store().key_value_dir_get(folder))
        decision = f"{folder}/from"
        enough = 1 if self._any_process else jax.process_count()
        if is_primary() and decision not in found and len(found) >= enough:
            found[decision] = str(step + NOTICE_STEPS)
            kv_store().key_value_set(decision, found[decision])
        # A later look finds the same decision, so it does not matter when a process looks first.
        if decision in found:
            self._from_step[name] = int(found[decision])


@contextlib.contextmanager
def watchdog(timeout: float) -> Iterator[None]:
    """End this process with a clear message when another one has been silent for `timeout` seconds, or has failed.

    JAX's own heartbeat ends the process as well, later and from C++, or at once if process 0 is gone.
    """
    if jax.process_count() == 1:
        yield
        return
    done, disconnected = threading.Event(), threading.Event()
    thread = threading.Thread(target=_watch, args=(done, disconnected, timeout), name="rampup-watchdog", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if _is_of_a_collective(error):
            # A broken connection fails here at once, long before the process at its other end counts as silent. Wait until the
            # thread has named that process. Until then this one stays alive for the others, which look for the culprit as well.
            disconnected.set()
            thread.join(timeout + 2)
        done.set()
        _report_state(f"{_FAILED}{type(error).__name__}: {error}")
        raise
    done.set()
    thread.join()
    _report_state(_DONE)


def _watch(done: threading.Event, disconnected: threading.Event, timeout: float) -> None:
    """Report that this process is alive, and look for processes that have stopped reporting it.

    Args:
        done: set when there is nothing more to watch.
        disconnected: set when the main thread has left its collective with an error, and ends by itself.
        timeout: seconds of silence that are a problem.
    """
    seen: dict[str, tuple[str, float]] = {}
    answered, beat = time.monotonic(), 0
    while not done.wait(min(timeout / 5, 1.0)):
        now, beat = time.monotonic(), beat + 1
        try:
            kv_store().key_value_set(f"{_ALIVE}/{jax.process_index()}", str(beat), allow_overwrite=True)
            states, answered = dict(kv_store().key_value_dir_get(_ALIVE)), now
        except Exception:  # noqa: BLE001 - whatever it is, the store does not answer
            states = {}
        states.pop(f"{_ALIVE}/{jax.process_index()}", None)
        for key, state in states.items():
            # The clocks of two machines differ, so only the time since a state last changed here counts.
            if key not in seen or seen[key][0] != state:
                seen[key] = state, now
        problem = _problem(seen, now, answered, timeout)
        if problem and not done.is_set():
            own = jax.process_index()
            print(f"rampup: {problem}; process {own} ends too. Start the job again to resume.", file=sys.stderr, flush=True)
            if disconnected.is_set():
                return
            # The main thread is inside a collective that waits for the process that is gone. No exception reaches it there, and
            # jax.distributed.shutdown would wait for that process as well.
            os._exit(_EXIT_FAILED)


def _problem(seen: Mapping[str, tuple[str, float]], now: float, answered: float, timeout: float) -> str | None:
    """Return the problem of another process, or None."""
    if now - answered > timeout:
        return f"process 0 has not answered for {timeout:g} s"
    for key, (state, since) in seen.items():
        number = key.rsplit("/", 1)[-1]
        if state.startswith(_FAILED):
            return f"process {number} failed with {state.removeprefix(_FAILED)}"
        if state != _DONE and now - since > timeout:
            return f"process {number} has been silent for {timeout:g} s"
    return None


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return whether an error, or one that led to it, is of the devices or of the connections between processes."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or "Gloo " in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _report_state(state: str) -> None:
    with contextlib.suppress(Exception):
        kv_store().key_value_set(f"{_ALIVE}/{jax.process_index()}", state[:1000], allow_overwrite=True)


def _int_or_environment(given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} must be a whole number", key=variable)
    return int(text)


def _launcher_started_several() -> bool:
    sizes = (os.environ.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    several = any(size.isdecimal() and int(size) > 1 for size in sizes) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return any(name in os.environ for name in _LAUNCHERS) and (several or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ)


def _differences(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return the facts that differ from those of process 0, by key. A process need not know every fact."""
    problems = {}
    for key, first in found[0].items():
        others = {number: facts[key] for number, facts in enumerate(found) if facts.get(key, first) != first}
        if others:
            number, value = next(iter(others.items()))
            more = f" (and in {len(others) - 1} more)" if len(others) > 1 else ""
            problems[key] = f"{key}: {_format_difference(first, value, number)}{more}"
    return problems


def _format_difference(first: Any, value: Any, number: int) -> str:
    if not isinstance(first, Mapping):
        return f"{first!r} in process 0, {value!r} in process {number}"
    files = changed_files(first, value)
    more = f", and {len(files) - 1:,} more files" if len(files) > 1 else ""
    return f"{files[0][0]}: {files[0][1]} in process 0, {files[0][2]} in process {number}{more}"
