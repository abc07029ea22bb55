"""Several processes as one run: joining, agreeing on what is run, and noticing that one is gone.

What is said between processes goes through the key-value store of jax.distributed, so that no device waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rampup.errors import ConfigError, RampupError
from rampup.run.data.fingerprint import changed_files

_LAUNCHERS = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS")
_FOLDER = "rampup"
_ALIVE, _DONE, _FAILED = f"{_FOLDER}/alive", "done", "failed "
_EXIT_FAILED = 1
_PATIENCE = 5
_AGAIN = "Start the job again to resume."
_WITNESS = "import sys; sys.stdin.buffer.read() or print(sys.argv[1], file=sys.stderr, flush=True)"


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 60,
) -> None:
    """Join the other processes of the run, if there are any; before JAX sees its devices.

    Without arguments the environment decides: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or what Slurm,
    Open MPI and Cloud TPU set where they start several processes.

    Args:
        coordinator_address: host:port of process 0.
        num_processes: processes in all.
        process_id: the number of this one, from 0.
        initialization_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds of silence after which JAX gives a process up.

    Raises:
        ConfigError: some of the three are given and not all, or the others do not come.
    """
    if jax.distributed.is_initialized():
        return
    given = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number(num_processes, "JAX_NUM_PROCESSES"),
        "process_id": _number(process_id, "JAX_PROCESS_ID"),
    }
    missing = [name for name, value in given.items() if value is None]
    timeouts = {"initialization_timeout": initialization_timeout, "heartbeat_timeout_seconds": heartbeat_timeout}
    if len(missing) == len(given):
        if _launched_with_others():
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


def is_first() -> bool:
    """Say whether this process writes what is written once."""
    return jax.process_index() == 0


def from_first(name: str, value: str, *, timeout: int = 300) -> str:
    """Return process 0's value, in every process."""
    if jax.process_count() == 1:
        return value
    key = f"{_FOLDER}/first/{name}"
    if is_first():
        store().key_value_set(key, value, allow_overwrite=True)
        return value
    return str(store().blocking_key_value_get(key, 1000 * timeout))


def check_same(facts: Mapping[str, Any], *, timeout: int = 300) -> None:
    """Refuse to start where the processes are not about to run the same.

    Args:
        facts: key -> value, of the configuration and the data; of files, a mapping from name to fingerprint. What a process
            does not know it leaves out, process 0 nothing.
        timeout: seconds to wait for the others.

    Raises:
        ConfigError: in every process, with the keys that differ.
    """
    count = jax.process_count()
    if count == 1:
        return
    store().key_value_set(f"{_FOLDER}/facts/{jax.process_index()}", json.dumps(facts, default=str), allow_overwrite=True)
    if is_first():
        found = [json.loads(store().blocking_key_value_get(f"{_FOLDER}/facts/{n}", 1000 * timeout)) for n in range(count)]
        store().key_value_set(f"{_FOLDER}/verdict", json.dumps(_differences(found)), allow_overwrite=True)
    problems = json.loads(store().blocking_key_value_get(f"{_FOLDER}/verdict", 1000 * timeout))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        raise ConfigError(f"the processes are not started alike:\n{lines}", key=next(iter(problems)))


@contextlib.contextmanager
def watchdog(timeout: float) -> Iterator[None]:
    """End this process with a clear message when another one has been silent for `timeout` seconds.

    JAX notices that too, later, and ends the process from C++ without a word from Python; it does so at once when process 0 is
    gone. For that case a small process beside this one says what has happened.
    """
    if jax.process_count() == 1:
        yield
        return
    done = threading.Event()
    with _last_words() as witness:
        thread = threading.Thread(target=_watch, args=(done, timeout, witness), name="rampup-watchdog", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            done.set()
            _say(f"{_FAILED}{type(error).__name__}: {error}")
            _leave_at_once(error)
            raise
        done.set()
        thread.join()
        _say(_DONE)


@contextlib.contextmanager
def _last_words() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that speaks when this one ends without having closed its input by a word."""
    message = (
        f"rampup: process {jax.process_index()} was ended from outside: killed, or by JAX because process 0 is gone. {_AGAIN}"
    )
    witness = subprocess.Popen([sys.executable, "-S", "-c", _WITNESS, message], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield witness
    finally:
        _dismiss(witness)


def _dismiss(witness: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        witness.communicate(b"end", timeout=10)


def store() -> Any:
    """Return the key-value store that all processes share."""
    # It has no public name; Orbax and others take it from here too.
    from jax._src import distributed

    return distributed.global_state.client


def _number(given: int | None, variable: str) -> int | None:
    text = os.environ.get(variable)
    if given is not None or text is None:
        return given
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r} must be a whole number", key=variable)
    return int(text)


def _launched_with_others() -> bool:
    sizes = (os.environ.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    several = any(size.isdecimal() and int(size) > 1 for size in sizes) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
    return any(name in os.environ for name in _LAUNCHERS) and (several or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ)


def _differences(found: list[dict[str, Any]]) -> dict[str, str]:
    """Return what differs from process 0, by key; a process need not know every fact."""
    problems = {}
    for key, first in found[0].items():
        others = {number: facts[key] for number, facts in enumerate(found) if facts.get(key, first) != first}
        if others:
            number, value = next(iter(others.items()))
            more = f" (and in {len(others) - 1} more)" if len(others) > 1 else ""
            problems[key] = f"{key}: {_told(first, value, number)}{more}"
    return problems


def _told(first: Any, value: Any, number: int) -> str:
    if not isinstance(first, Mapping):
        return f"{first!r} in process 0, {value!r} in process {number}"
    files = changed_files(first, value)
    more = f", and {len(files) - 1:,} more files" if len(files) > 1 else ""
    return f"{files[0][0]}: {files[0][1]} in process 0, {files[0][2]} in process {number}{more}"


def _watch(done: threading.Event, timeout: float, witness: subprocess.Popen[bytes]) -> None:
    """Say that this process is alive, and look for those that have stopped saying so."""
    seen: dict[str, tuple[str, float]] = {}
    heard, beat = time.monotonic(), 0
    while not done.wait(min(timeout / 5, 1.0)):
        now, beat = time.monotonic(), beat + 1
        try:
            store().key_value_set(f"{_ALIVE}/{jax.process_index()}", str(beat), allow_overwrite=True)
            states, heard = dict(store().key_value_dir_get(_ALIVE)), now
        except Exception:  # noqa: BLE001 - whatever it is, the store does not answer
            states = {}
        for key, state in states.items():
            if key not in seen or seen[key][0] != state:
                seen[key] = state, now
        problem = _problem(seen, now, heard, timeout)
        if problem and not done.is_set():
            own = jax.process_index()
            print(f"rampup: {problem}; process {own} ends too. {_AGAIN}", file=sys.stderr, flush=True)
            _dismiss(witness)
            os._exit(_EXIT_FAILED)


def _problem(seen: Mapping[str, tuple[str, float]], now: float, heard: float, timeout: float) -> str | None:
    """Return what is wrong with another process, if anything."""
    if now - heard > timeout:
        return f"process 0 has not answered for {timeout:g} s"
    for key, (state, since) in seen.items():
        number = key.rsplit("/", 1)[-1]
        if state.startswith(_FAILED):
            return f"process {number} failed with {state.removeprefix(_FAILED)}"
        if state != _DONE and now - since > timeout:
            return f"process {number} has been silent for {timeout:g} s"
    return None


def _say(state: str) -> None:
    with contextlib.suppress(Exception):
        store().key_value_set(f"{_ALIVE}/{jax.process_index()}", state[:1000], allow_overwrite=True)


def _leave_at_once(error: BaseException) -> None:
    """Let the end of this process not wait for the others, which cannot end their steps without it."""
    code = 2 if isinstance(error, RampupError) else 130 if isinstance(error, KeyboardInterrupt) else _EXIT_FAILED

    def leave() -> None:
        if is_first():
            _let_others_leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)


def _let_others_leave() -> None:
    """Wait a little for processes that end by themselves: JAX ends them from C++ when process 0 is gone."""
    for _ in range(_PATIENCE):
        with contextlib.suppress(Exception):
            states = [state for _, state in store().key_value_dir_get(_ALIVE)]
            if len(states) == jax.process_count() and all(state == _DONE or state.startswith(_FAILED) for state in states):
                break
        time.sleep(1)
    time.sleep(1)
