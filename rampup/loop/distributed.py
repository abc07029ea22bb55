"""Several processes as one run: joining, agreeing, and ending together when one of them is gone.

Processes communicate through the key-value store of jax.distributed, without device collectives, so no device waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

from rampup.engine.processes import FOLDER, announced, gather_from_all, is_primary, kv_store
from rampup.errors import ConfigError
from rampup.loop.launchers import Launch, find_launch, local_device_ids

# Steps from a decision to its effect. A step ends on the devices of all processes together, and a host starts at most a few
# more (`metrics.IN_FLIGHT`), so no process is this many steps ahead of another.
NOTICE_STEPS = 8
_ALIVE, _DONE, _FAILED = f"{FOLDER}/alive", "done", "failed "
_agreement_numbers = itertools.count()
_check_numbers = itertools.count()
# Whether this process watches the others. A watchdog inside another one does nothing.
_is_watching = threading.Lock()


def join(
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    distributed: str = "auto",
    initialization_timeout: int = 300,
    heartbeat_timeout: int = 60,
) -> None:
    """Join the other processes of the run, if there are any. Call it before JAX looks for devices.

    Without arguments the environment decides, as the guide to several hosts says.

    Args:
        coordinator_address: host:port of process 0.
        num_processes: total number of processes.
        process_id: number of this process, from 0.
        distributed: `auto`: join if this process is one of several; `on`: refuse to run alone; `off`: do not join.
        initialization_timeout: seconds to wait for the others.
        heartbeat_timeout: seconds without a heartbeat after which JAX gives a process up.

    Raises:
        ConfigError: this process is one of several, but what it needs to join is not known, or process 0 does not come.
    """
    if jax.distributed.is_initialized() or distributed == "off":
        return
    with announced("this process waits for what JAX looks up: the name of process 0"):
        launch = find_launch(coordinator_address, num_processes, process_id, timeout=initialization_timeout)
    if launch is None:
        if distributed == "on":
            problem = "distributed=on, but this process was started alone"
            fix = "set coordinator_address, num_processes and process_id, or start it with a launcher"
            raise ConfigError(f"{problem}; {fix}", key="distributed", nearest=("auto",))
        return
    devices = local_device_ids()
    deadline = time.monotonic() + initialization_timeout
    with announced(f"process {launch.number} of {launch.count} waits for {launch.address}") as waiting:
        _reach_process0(launch, initialization_timeout, waiting)
        waiting.words = f"process {launch.number} of {launch.count} waits at {launch.address} for the others"
        try:
            jax.distributed.initialize(
                coordinator_address=launch.address,
                num_processes=launch.count,
                process_id=launch.number,
                local_device_ids=devices,
                # JAX's detectors would be asked once more, also those that fail here.
                cluster_detection_method="deactivate",
                initialization_timeout=max(int(deadline - time.monotonic()), 1),
                heartbeat_timeout_seconds=heartbeat_timeout,
            )
        except RuntimeError as error:
            problem = f"process {launch.number} of {launch.count} could not join the others at {launch.address}"
            raise ConfigError(f"{problem}: {' '.join(str(error).split())[:300]}", key="coordinator_address") from None
    if launch.number == 0:
        _keep_connections(int(launch.address.rpartition(":")[2]), heartbeat_timeout)


def _keep_connections(port: int, seconds: int) -> None:
    """Let the server of process 0 wait for the others as long as they may be silent.

    gRPC closes a connection after 20 s without an answer. As soon as the network is back, that ends the process at the other
    end, from C++.
    """
    for file in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with (
            contextlib.suppress(OSError, IndexError),
            socket.fromfd(int(file), socket.AF_INET, socket.SOCK_STREAM) as connection,
        ):
            if connection.getsockname()[1] == port:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)


def check_reachable() -> None:
    """Refuse a host whose name leads to itself, if there are several and JAX connects their CPUs by name.

    Raises:
        ConfigError: in every process, with the host.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    name, address, place = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    with contextlib.suppress(OSError):  # Linux: the machine, and the network in which its containers see it
        place = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    found = [json.loads(each) for each in gather_from_all(json.dumps([name, address, place]))]
    for number, (name, address, _) in enumerate(found):
        if address.startswith("127.") and len({(other, place) for other, _, place in found}) > 1:
            problem = f"process {number} runs on {name}, a name that leads to {address} there: other hosts cannot reach it"
            fix = f"in /etc/hosts of that host, let {name} lead to its address in the network of the others"
            raise ConfigError(f"{problem}; {fix}", key="coordinator_address")


def check_consistent(facts: Mapping[str, Any], *, timeout: int = 300) -> None:
    """Check that all processes are about to run the same thing. All of them call this equally often.

    Facts are key -> value, of the configuration and the data, and for files a mapping from name to fingerprint. A process
    leaves out those that it does not know; process 0 knows all.

    Raises:
        ConfigError: in every process, with the keys that differ.
    """
    # Process 0 compares, and the others wait for its answer: all of them end in the same way.
    count = jax.process_count()
    if count == 1:
        return
    folder = f"{FOLDER}/facts{next(_check_numbers)}"
    kv_store().key_value_set(f"{folder}/{jax.process_index()}", json.dumps(facts, default=str))
    if is_primary():
        found = [json.loads(kv_store().blocking_key_value_get(f"{folder}/{n}", 1000 * timeout)) for n in range(count)]
        differing = {}
        for key, first in found[0].items():
            others = {number: known[key] for number, known in enumerate(found) if known.get(key, first) != first}
            if others:
                number, value = next(iter(others.items()))
                more = f" (and in {len(others) - 1} more)" if len(others) > 1 else ""
                change = describe_change(first, value, ("in process 0", f"in process {number}"), most=1)
                differing[key] = f"{key}: {', '.join(change)}{more}"
        kv_store().key_value_set(f"{folder}/verdict", json.dumps(differing))
    problems = json.loads(kv_store().blocking_key_value_get(f"{folder}/verdict", 1000 * timeout))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        raise ConfigError(f"the processes are not started alike:\n{lines}", key=next(iter(problems)))


def describe_change(one: Any, other: Any, places: tuple[str, str], *, most: int) -> list[str]:
    """Return how two values of a fact about a run differ; of the fingerprints of its data, the first files that do.

    Example:
        >>> describe_change({"a": "x", "b": "y"}, {"a": "x", "c": "z"}, ("before", "now"), most=1)
        ['b: y before, no such file now', 'and 1 more files']
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return [f"{one!r} {places[0]}, {other!r} {places[1]}"]
    found = []
    for name in [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]:
        before, now = (files.get(name, "no such file") for files in (one, other))
        found.append(f"{name}: {before} {places[0]}, {now} {places[1]}")
    return found[:most] + ([f"and {len(found) - most:,} more files"] if len(found) > most else [])


class StopConsensus:
    """Agrees on the step before which a run stops, without stopping any process meanwhile.

    A process that wants to stop says so. Process 0 then sets a step a little ahead, which all of them find in the store before
    they reach it. Every process creates its instances in the same order. A single process decides at once.
    """

    def __init__(self) -> None:
        self._folder = f"{FOLDER}/agreement{next(_agreement_numbers)}"
        self._from_step: int | None = None
        self._has_asked = False

    def agreed(self, wants_to_stop: bool, step: int) -> bool:
        """Return whether the run stops before `step`, which is never smaller than in the call before."""
        if jax.process_count() == 1:
            return wants_to_stop
        if self._from_step is None:
            if wants_to_stop and not self._has_asked:
                kv_store().key_value_set(f"{self._folder}/ready{jax.process_index()}", "")
                self._has_asked = True
            found = dict(kv_store().key_value_dir_get(self._folder))
            decision = f"{self._folder}/from"
            if is_primary() and decision not in found and found:
                found[decision] = str(step + NOTICE_STEPS)
                kv_store().key_value_set(decision, found[decision])
            # A later look finds the same decision, so it does not matter when a process looks first.
            self._from_step = int(found[decision]) if decision in found else None
        return self._from_step is not None and step >= self._from_step


@contextlib.contextmanager
def watchdog(timeout: float) -> Iterator[None]:
    """End this process with a clear message when another one has been silent for `timeout` seconds, or has failed.

    JAX's own heartbeat ends the process as well, later and from C++, or at once if process 0 is gone.
    """
    if jax.process_count() == 1 or not _is_watching.acquire(blocking=False):
        yield
        return
    try:
        with _watched(timeout):
            yield
    finally:
        _is_watching.release()


@contextlib.contextmanager
def _watched(timeout: float) -> Iterator[None]:
    """Watch the other processes; see `watchdog`."""
    # `done` is set when there is nothing more to watch, and `device_error` when the main thread has failed with an error of the
    # devices or of the connections between processes: then it ends by itself.
    own = jax.process_index()
    done = threading.Event()
    device_error = threading.Event()

    def report(state: str) -> None:
        kv_store().key_value_set(f"{_ALIVE}/{own}", state[:1000], allow_overwrite=True)

    pause = min(timeout / 5, 1.0)
    seen: dict[str, tuple[str, float]] = {}
    answered = time.monotonic()

    def beat() -> None:
        # In a thread of its own: without a network, the store answers minutes later, or never.
        nonlocal answered
        for number in itertools.count():
            now = time.monotonic()
            try:
                report(str(number))
                states = dict(kv_store().key_value_dir_get(_ALIVE))
                answered = now
            except Exception:  # noqa: BLE001 - whatever it is, the store does not answer
                states = {}
            states.pop(f"{_ALIVE}/{own}", None)
            for key, state in states.items():
                # The clocks of two machines differ, so only the time since a state last changed here counts.
                if key not in seen or seen[key][0] != state:
                    seen[key] = state, now
            if done.wait(pause):
                return

    def watch() -> None:
        # When this process was last continued after a pause, such as SIGSTOP, in which it could hear nothing.
        before = continued = time.monotonic()
        while not done.wait(pause):
            now = time.monotonic()
            if now - before > timeout / 2:
                continued = now
            before = now
            heard = {key: (state, max(since, continued)) for key, (state, since) in dict(seen).items()}
            problem = _problem(heard, now, max(answered, continued), timeout)
            if problem and not done.is_set():
                print(f"rampup: {problem}; process {own} ends too. Start the job again to resume.", file=sys.stderr, flush=True)
                if device_error.is_set():
                    return
                # The main thread is inside a collective that waits for the process that is gone. No exception and no signal
                # handler reaches it there, and jax.distributed.shutdown would wait for that process too: nothing else ends
                # this process.
                os._exit(1)

    beats = threading.Thread(target=beat, name="rampup-heartbeat", daemon=True)
    thread = threading.Thread(target=watch, name="rampup-watchdog", daemon=True)
    beats.start()
    thread.start()
    try:
        yield
    except BaseException as error:
        # Whether it, or an error that led to it, is of the devices or of the connections between processes.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, jax.errors.JaxRuntimeError) and "Gloo " not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            # A broken connection fails here at once, long before the process at its other end counts as silent. Wait until the
            # thread has named that process. Until then this one stays alive for the others, which look for the culprit as well.
            device_error.set()
            thread.join(timeout + 2)
        done.set()
        beats.join(2)  # A sign of life that is being written would come after the report.
        with contextlib.suppress(Exception):
            report(f"{_FAILED}{type(error).__name__}: {error}")
        raise
    done.set()
    thread.join()
    beats.join(2)
    with contextlib.suppress(Exception):
        report(_DONE)


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


def _reach_process0(launch: Launch, timeout: float, waiting: SimpleNamespace) -> None:
    """Wait until process 0 listens; in process 0, until it can. Refuse after `timeout` seconds.

    JAX would end the process from C++, without an exception: after the timeout, and at once if the port is in use.
    """
    host, _, port = launch.address.rpartition(":")
    words, deadline = waiting.words, time.monotonic() + timeout
    while True:
        try:
            if launch.number:
                socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
                return
            socket.getaddrinfo(host.strip("[]"), int(port))  # process 0 is a client too
            if "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
                with socket.socket() as listener:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(("", int(port)))
            return
        except socket.gaierror:
            problem = f"the name {host} cannot be resolved here"
        except OSError as error:
            problem = f"{'no answer' if launch.number else 'it cannot listen'} ({error.strerror or error})"
        except ValueError:
            raise ConfigError(f"{launch.address}: the port must be a number", key="coordinator_address") from None
        waiting.words = f"{words}: {problem}"
        if time.monotonic() > deadline:
            raise ConfigError(f"{waiting.words}; gave up after {timeout:g} s", key="coordinator_address")
        time.sleep(0.5)
