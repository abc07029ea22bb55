"""The start of several processes: all come to process 0's port before JAX uses it.

JAX ends a process from C++ if another one does not come, without a word about which.
So process 0 listens first, the others tell it their names, and when all are there it
lets them go on. What each says is one line: `process 2 of 3`, then `go` or a problem.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from types import SimpleNamespace

from rampup.errors import ConfigError
from rampup.loop.launchers import Launch

_GO = "go"
_PAUSE_SECONDS = 0.5
_LINE_SECONDS = 5.0  # in which a process that has connected says its name


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
    if launch.number == 0:
        _gather_others(launch, int(port), seconds, waiting)
    else:
        _come_to_process0(launch, (host.strip("[]"), int(port)), seconds, waiting)


def _gather_others(
    launch: Launch, port: int, seconds: float, waiting: SimpleNamespace
) -> None:
    deadline = time.monotonic() + seconds
    try:
        both = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=launch.count,
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise ConfigError(
            f"{waiting.words}: it cannot listen ({os.strerror(error.errno or 0)})",
            key="coordinator_address",
        ) from error
    names = [f"process {number} of {launch.count}" for number in range(1, launch.count)]
    here: dict[str, socket.socket] = {}
    with listener:
        while missing := ", ".join(name for name in names if name not in here):
            waiting.words = f"process 0 waits for {missing}"
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                problem = f"{missing} did not come to {launch.address}"
                _say(here.values(), problem)
                raise ConfigError(
                    problem,
                    fix="look whether it was started, and whether it reaches that"
                    " address",
                    key="coordinator_address",
                ) from None
            name = _line(connection, _LINE_SECONDS)
            if name in names:
                # One that has started again takes the place of the one before.
                here[name] = connection
    # The port is free before the others connect again, to JAX.
    _say(here.values(), _GO)


def _come_to_process0(
    launch: Launch, place: tuple[str, int], seconds: float, waiting: SimpleNamespace
) -> None:
    words, deadline = waiting.words, time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(place, timeout=_LINE_SECONDS) as connection:
                connection.sendall(
                    f"process {launch.number} of {launch.count}\n".encode()
                )
                waiting.words = f"{words} and the others"
                # Process 0 may have come later, and waits as long from then on.
                answer = _line(connection, 2 * seconds)
            if answer == _GO:
                return
            if answer.startswith("process "):
                raise ConfigError(answer, key="coordinator_address")
            problem = "what answers there is not process 0 of this run"
        except OSError as error:
            problem = f"no answer ({error.strerror or error})"
        waiting.words = f"{words}: {problem}"
        if time.monotonic() > deadline:
            raise ConfigError(f"{waiting.words}; gave up", key="coordinator_address")
        time.sleep(_PAUSE_SECONDS)


def _say(connections: Iterable[socket.socket], words: str) -> None:
    """Say a last line to processes, which may be gone."""
    for connection in connections:
        with connection, contextlib.suppress(OSError):
            connection.sendall(f"{words}\n".encode())


def _line(connection: socket.socket, seconds: float) -> str:
    """Return the line that comes within some seconds, or ""."""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        return lines.readline(1000).decode(errors="replace").rstrip("\n")
    return ""
