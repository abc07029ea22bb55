"""Several processes as one run: joining, agreeing, and ending together when one of them
is gone.

Processes communicate through the key-value store of jax.distributed, without device
collectives, so no device waits for it.
"""

from __future__ import annotations

import atexit
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
from typing import Any, NoReturn

import jax

from rampup.engine.processes import (
    FOLDER,
    announced,
    broadcast_from_process0,
    gather_from_all,
    is_primary,
    kv_store,
)
from rampup.errors import ConfigError
from rampup.loop.launchers import find_launch, local_device_ids
from rampup.loop.meeting import meet

# from a decision to its effect; a host is at most `metrics.IN_FLIGHT` steps ahead of
# the devices of all
NOTICE_STEPS = 8
_DONE, _FAILED = "done", "failed "
_agreement_numbers, _check_numbers, _watch_numbers = (
    itertools.count() for _ in range(3)
)
_is_watching = threading.Lock()
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


def check_reachable() -> None:
    """Refuse, in every process, a host whose name leads to itself, if there are several
    and JAX connects their CPUs by name.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    name, address, place = socket.gethostname(), "", ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
    with contextlib.suppress(
        OSError
    ):  # Linux: the machine, and the network in which its containers see it
        place = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink(
            "/proc/self/ns/net"
        )
    found = [
        json.loads(each) for each in gather_from_all(json.dumps([name, address, place]))
    ]
    for number, (name, address, _) in enumerate(found):
        if (
            address.startswith("127.")
            and len({(other, place) for other, _, place in found}) > 1
        ):
            raise ConfigError(
                f"process {number} runs on {name}, a name that leads to {address}"
                " there: other hosts cannot reach it",
                fix=f"in /etc/hosts of that host, let {name} lead to its address in the"
                " network of the others",
                key="coordinator_address",
            )


def check_consistent(facts: Mapping[str, Any]) -> None:
    """Refuse, in every process, to run different things. All of them call this equally
    often.

    Facts are key -> value, of the configuration and the data, and for files a mapping
    from name to fingerprint. A process leaves out those that it does not know; process
    0 knows all.
    """
    # Process 0 compares, and the others wait for its answer: all of them end in the
    # same way.
    count = jax.process_count()
    if count == 1:
        return
    folder = f"{FOLDER}/facts{next(_check_numbers)}"
    kv_store().key_value_set(
        f"{folder}/{jax.process_index()}", json.dumps(facts, default=str)
    )
    differing = {}
    if is_primary():
        found = [
            json.loads(kv_store().blocking_key_value_get(f"{folder}/{n}", 300_000))
            for n in range(count)
        ]
        for key, first in found[0].items():
            others = {
                number: known[key]
                for number, known in enumerate(found)
                if known.get(key, first) != first
            }
            if others:
                number, value = next(iter(others.items()))
                more = f" (and in {len(others) - 1} more)" if len(others) > 1 else ""
                change = describe_change(
                    first, value, ("in process 0", f"in process {number}"), most=1
                )
                differing[key] = f"{key}: {', '.join(change)}{more}"
    problems = json.loads(broadcast_from_process0(folder, json.dumps(differing)))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems.values())
        raise ConfigError(
            f"the processes are not started alike:\n{lines}", key=next(iter(problems))
        )


def describe_change(
    one: Any, other: Any, places: tuple[str, str], *, most: int
) -> list[str]:
    """Return how two values of a fact about a run differ; of the fingerprints of its
    data, the first files that do.
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return [f"{one!r} {places[0]}, {other!r} {places[1]}"]
    found = []
    for name in [
        name
        for name in dict.fromkeys([*one, *other])
        if one.get(name) != other.get(name)
    ]:
        before, now = (files.get(name, "no such file") for files in (one, other))
        found.append(f"{name}: {before} {places[0]}, {now} {places[1]}")
    return found[:most] + (
        [f"and {len(found) - most:,} more files"] if len(found) > most else []
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
        self._has_asked = False

    def agreed(self, wants_to_stop: bool, step: int) -> bool:
        """Return whether the run stops before `step`, which is never smaller than in
        the call before.
        """
        if jax.process_count() == 1:
            return wants_to_stop
        if self._from_step is None:
            if wants_to_stop and not self._has_asked:
                kv_store().key_value_set(
                    f"{self._folder}/ready{jax.process_index()}", ""
                )
                self._has_asked = True
            found = dict(kv_store().key_value_dir_get(self._folder))
            decision = f"{self._folder}/from"
            if is_primary() and decision not in found and found:
                found[decision] = str(step + NOTICE_STEPS)
                kv_store().key_value_set(decision, found[decision])
            # A later look finds the same decision, so it does not matter when a process
            # looks first.
            self._from_step = int(found[decision]) if decision in found else None
        return self._from_step is not None and step >= self._from_step


def watchdog(timeout: float) -> contextlib.AbstractContextManager[None]:
    """End this process with a clear message when another one has been silent for
    `timeout` seconds, or has failed.

    So does JAX's own heartbeat, but later and from C++. A watchdog inside another one
    does nothing.
    """
    watches = jax.process_count() > 1 and _is_watching.acquire(blocking=False)
    return _watched(timeout) if watches else contextlib.nullcontext()


@contextlib.contextmanager
def _watched(timeout: float) -> Iterator[None]:
    own = jax.process_index()
    # a state of an earlier run, which its caller knows, ends none
    folder = f"{FOLDER}/alive{next(_watch_numbers)}"
    done = threading.Event()  # there is nothing more to watch

    def report(state: str) -> None:
        kv_store().key_value_set(f"{folder}/{own}", state[:1000], allow_overwrite=True)

    pause = min(timeout / 5, 1.0)
    seen: dict[str, tuple[str, float]] = {}
    answered = time.monotonic()

    def beat() -> None:
        # In a thread of its own: without a network, the store answers minutes later, or
        # never.
        nonlocal answered
        for number in itertools.count():
            now = time.monotonic()
            try:
                report(str(number))
                states = dict(kv_store().key_value_dir_get(folder))
                answered = now
            # That of JAX is a RuntimeError; without a store, it has no such method.
            except (RuntimeError, AttributeError):
                states = {}
            states.pop(f"{folder}/{own}", None)
            for key, state in states.items():
                # The clocks of two machines differ, so only the time since a state last
                # changed here counts.
                if key not in seen or seen[key][0] != state:
                    seen[key] = state, now
            if done.wait(pause):
                return

    def watch() -> None:
        # When this process was last continued after a pause, such as SIGSTOP, in which
        # it could hear nothing.
        before = continued = time.monotonic()
        while not done.wait(pause):
            now = time.monotonic()
            if now - before > timeout / 2:
                continued = now
            before = now
            heard = {
                key: (state, max(since, continued))
                for key, (state, since) in dict(seen).items()
            }
            problem = _problem(heard, now, max(answered, continued), timeout)
            if problem and not done.is_set():
                print(
                    f"rampup: {problem}; process {own} ends too. Start the job again to"
                    " resume.",
                    file=sys.stderr,
                    flush=True,
                )
                # The main thread may be inside a collective that waits for the process
                # that is gone: no exception and no signal handler reaches it there. It
                # may also hold the lock of standard output.
                os._exit(1)

    beats = threading.Thread(target=beat, name="rampup-heartbeat", daemon=True)
    thread = threading.Thread(target=watch, name="rampup-watchdog", daemon=True)
    final = _DONE
    has_failed.clear()
    try:
        beats.start()
        thread.start()
        yield
    except BaseException as error:
        has_failed.set()
        final = f"{_FAILED}{type(error).__name__}: {error}".removesuffix(": ")
        # Whether it, or an error that led to it, is of the devices or of the
        # connections between processes.
        cause: BaseException | None = error
        while (
            cause is not None
            and not isinstance(cause, jax.errors.JaxRuntimeError)
            and "Gloo " not in str(cause)
        ):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            # A broken connection fails at once, long before the process at its other
            # end counts as silent. Until the thread has named that process, this one
            # stays alive for the others, which look for the culprit as well.
            thread.join(timeout + 2)
        raise
    finally:
        _is_watching.release()  # first: Ctrl-C may end what follows
        done.set()
        for each in (thread, beats):
            if each.is_alive():
                each.join(
                    2
                )  # A sign of life that is being written would come after the report.
        with contextlib.suppress(Exception):
            report(final)
            if own == 0 and final != _DONE:
                time.sleep(
                    2.5 * pause
                )  # in which the others read it: then the store is gone


def leave(code: int) -> NoReturn:
    """End this process at once. JAX's own end waits for the other processes, and aborts
    if they are gone.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


atexit.register(lambda: leave(1) if has_failed.is_set() else None)


def _problem(
    seen: Mapping[str, tuple[str, float]], now: float, answered: float, timeout: float
) -> str | None:
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
