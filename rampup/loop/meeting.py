"""The start of several processes: all come to process 0's port before JAX uses it.

JAX ends a process from C++ if another one does not come, without a word about which.
So process 0 listens first, the others tell it their numbers, and when all are there it
lets them go on. What each says is one line: `rampup 2 of 3`, then `go` or a problem.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import time
from types import SimpleNamespace

from rampup.errors import ConfigError
from rampup.loop.launchers import Launch

_GO = "go"
_PROBLEM = "problem: "
_PAUSE_SECONDS = 0.5
_LINE_SECONDS = 5.0  # in which a process that has connected says its number
_MOST_NAMED = 5
# gRPC, with which JAX connects, looks for a host behind a proxy if one is set.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def meet(launch: Launch, seconds: float, waiting: SimpleNamespace) -> None:
    """Wait until all processes of a launch are at the port of process 0.

    Args:
        launch: the place of this process.
        seconds: after which it gives up.
        waiting: its `words` say for whom it waits.

    Raises:
        ConfigError: a process has not come, in all that have; or process 0 cannot
            listen, or is not there.
    """
    host, _, port = launch.address.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(
            f"{launch.address}: the port must be a number", key="coordinator_address"
        )
    if proxy := next((name for name in _PROXIES if name in os.environ), ""):
        waiting.words += f" ({proxy} is set: {host} must be in no_proxy)"
    arrive = _gather_others if launch.number == 0 else _come_to_process0
    arrive(launch, (host.strip("[]"), int(port)), time.monotonic() + seconds, waiting)


def _gather_others(
    launch: Launch, place: tuple[str, int], deadline: float, waiting: SimpleNamespace
) -> None:
    words = waiting.words
    while True:
        try:
            socket.getaddrinfo(*place)  # process 0 is a client too
            listener = _listen(place[1], launch.count)
            break
        except socket.gaierror:
            problem = f"the name {place[0]} cannot be resolved here"
        except OSError as error:
            problem = f"it cannot listen ({os.strerror(error.errno or 0)})"
        waiting.words = f"{words}: {problem}"
        _give_up_after(deadline, waiting.words)
    here: dict[int, socket.socket] = {}
    with listener, selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        while missing := sorted(set(range(1, launch.count)) - here.keys()):
            named = ", ".join(map(str, missing[:_MOST_NAMED]))
            more = len(missing) - _MOST_NAMED
            who = f"process {named}" + (f" and {more} more" if more > 0 else "")
            waiting.words = f"process 0 of {launch.count} waits for {who}"
            if time.monotonic() > deadline:
                problem = f"{who} of {launch.count} did not come to {launch.address}"
                _answer(here, _PROBLEM + problem)
                raise ConfigError(
                    problem,
                    fix="look whether it was started, and whether it reaches that"
                    " address",
                    key="coordinator_address",
                )
            for key, _ in events.select(_PAUSE_SECONDS):
                if key.fileobj is not listener:
                    # A process that waits says nothing: this one is gone.
                    events.unregister(key.fileobj)
                    here.pop(key.data).close()
                elif (found := _greet(listener, launch.count)) is not None:
                    number, connection = found
                    if number in here:
                        events.unregister(here[number])
                        here.pop(number).close()
                    here[number] = connection
                    events.register(connection, selectors.EVENT_READ, number)
    # Closed before the others connect again, to JAX.
    _answer(here, _GO)


def _come_to_process0(
    launch: Launch, place: tuple[str, int], deadline: float, waiting: SimpleNamespace
) -> None:
    words, seconds = waiting.words, deadline - time.monotonic()
    while True:
        try:
            with socket.create_connection(place, timeout=_LINE_SECONDS) as connection:
                connection.sendall(
                    f"rampup {launch.number} of {launch.count}\n".encode()
                )
                waiting.words = (
                    f"process {launch.number} of {launch.count} waits at"
                    f" {launch.address} for the others"
                )
                # Process 0 may have come later, and waits as long from then on.
                connection.settimeout(2 * seconds + _LINE_SECONDS)
                answer = _line(connection)
            if answer == _GO:
                return
            if answer.startswith(_PROBLEM):
                raise ConfigError(
                    answer.removeprefix(_PROBLEM), key="coordinator_address"
                )
            problem = "what answers there is not process 0 of this run"
        except socket.gaierror:
            problem = f"the name {place[0]} cannot be resolved here"
        except OSError as error:
            problem = f"no answer ({error.strerror or error})"
        waiting.words = f"{words}: {problem}"
        _give_up_after(deadline, waiting.words)


def _listen(port: int, count: int) -> socket.socket:
    """Listen where JAX will."""
    bound = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "")
    host, _, own_port = bound.rpartition(":")
    if own_port.isdecimal():
        port = int(own_port)
    if host not in ("", "[::]"):
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        place = (host.strip("[]"), port)
        return socket.create_server(place, family=family, backlog=count)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=count, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=count)


def _greet(listener: socket.socket, count: int) -> tuple[int, socket.socket] | None:
    """Return the number of a process that has come and its connection, or None for
    anything else that connects.
    """
    try:
        connection, _ = listener.accept()
        connection.settimeout(_LINE_SECONDS)
        found = re.fullmatch(r"rampup (\d+) of (\d+)", _line(connection))
    except OSError:
        return None
    if found is None:
        connection.close()
        return None
    number, others = int(found[1]), int(found[2])
    if others != count or not 0 < number < count:
        _answer(
            {number: connection},
            f"{_PROBLEM}process 0 was started with num_processes={count}, and process"
            f" {number} with {others}",
        )
        return None
    return number, connection


def _answer(here: dict[int, socket.socket], words: str) -> None:
    """Tell processes something, and wait until they have closed their connections: the
    port is then free.
    """
    for connection in here.values():
        try:
            connection.sendall(f"{words}\n".encode())
        except OSError:
            continue
    for connection in here.values():
        with connection:
            try:
                connection.recv(1)
            except OSError:
                continue


def _line(connection: socket.socket) -> str:
    with connection.makefile("r", encoding="utf-8", errors="replace") as lines:
        return lines.readline(1000).rstrip("\n")


def _give_up_after(deadline: float, words: str) -> None:
    if time.monotonic() > deadline:
        raise ConfigError(f"{words}; gave up", key="coordinator_address")
    time.sleep(_PAUSE_SECONDS)
