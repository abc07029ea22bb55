"""The start of several processes: all come to process 0's port before JAX uses it.

JAX ends a process from C++ if another one does not come, without a word about which.
So process 0 listens first, the others tell it their numbers, and when all are there it
lets them go on. What each says is one line: `rampup 2 of 3`, then `go` or a problem.
"""

from __future__ import annotations

import os
import re
import socket
import time
from types import SimpleNamespace

from rampup.errors import ConfigError
from rampup.loop.launchers import Launch

_GO = "go"
_PROBLEM = "problem: "
_PAUSE_SECONDS = 0.5
_LINE_SECONDS = 5.0  # in which a process that has connected says its number


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
    arrive = _gather_others if launch.number == 0 else _come_to_process0
    arrive(launch, (host.strip("[]"), int(port)), time.monotonic() + seconds, waiting)


def _gather_others(
    launch: Launch, place: tuple[str, int], deadline: float, waiting: SimpleNamespace
) -> None:
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(
            ("", place[1]), family=family, backlog=launch.count, dualstack_ipv6=both
        )
    except OSError as error:
        raise ConfigError(
            f"{waiting.words}: it cannot listen ({os.strerror(error.errno or 0)})",
            key="coordinator_address",
        ) from error
    here: dict[int, socket.socket] = {}
    with listener:
        while missing := sorted(set(range(1, launch.count)) - here.keys()):
            who = f"process {', '.join(map(str, missing))} of {launch.count}"
            waiting.words = f"process 0 waits for {who}"
            listener.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                problem = f"{who} did not come to {launch.address}"
                for connection in here.values():
                    _say(connection, _PROBLEM + problem)
                raise ConfigError(
                    problem,
                    fix="look whether it was started, and whether it reaches that"
                    " address",
                    key="coordinator_address",
                ) from None
            found = re.fullmatch(
                rf"rampup (\d+) of {launch.count}", _line(connection, _LINE_SECONDS)
            )
            if found and int(found[1]) in range(1, launch.count):
                # One that has started again takes the place of the one before.
                here[int(found[1])] = connection
            else:
                _say(
                    connection,
                    f"{_PROBLEM}process 0 was started with num_processes="
                    f"{launch.count}, and this one is none of them",
                )
    # The port is free before the others connect again, to JAX.
    for connection in here.values():
        _say(connection, _GO)


def _come_to_process0(
    launch: Launch, place: tuple[str, int], deadline: float, waiting: SimpleNamespace
) -> None:
    words = waiting.words
    # Process 0 may have come later, and waits as long from then on.
    patience = 2 * (deadline - time.monotonic()) + _LINE_SECONDS
    while True:
        try:
            with socket.create_connection(place, timeout=_LINE_SECONDS) as connection:
                connection.sendall(
                    f"rampup {launch.number} of {launch.count}\n".encode()
                )
                waiting.words = f"{words} and the others"
                answer = _line(connection, patience)
            if answer == _GO:
                return
            if answer.startswith(_PROBLEM):
                raise ConfigError(
                    answer.removeprefix(_PROBLEM), key="coordinator_address"
                )
            problem = "what answers there is not process 0 of this run"
        except OSError as error:
            problem = f"no answer ({error.strerror or error})"
        waiting.words = f"{words}: {problem}"
        if time.monotonic() > deadline:
            raise ConfigError(f"{waiting.words}; gave up", key="coordinator_address")
        time.sleep(_PAUSE_SECONDS)


def _say(connection: socket.socket, words: str) -> None:
    """Say a last line to a process, which may be gone."""
    with connection:
        try:
            connection.sendall(f"{words}\n".encode())
        except OSError:
            return


def _line(connection: socket.socket, seconds: float) -> str:
    """Return the line that comes within some seconds, or ""."""
    connection.settimeout(seconds)
    try:
        with connection.makefile("r", encoding="utf-8", errors="replace") as lines:
            return lines.readline(1000).rstrip("\n")
    except OSError:
        return ""
