"""Tests of rampup.loop.meeting: processes that come, late or never."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from helpers.processes import free_port

from rampup.errors import ConfigError
from rampup.loop.launchers import Launch
from rampup.loop.meeting import meet


def come(number, port, *, count=3, seconds=20, host="localhost", delay=0.0):
    """Come to the meeting as one of several processes; return the words of the error,
    or when it was over.
    """
    time.sleep(delay)
    try:
        meet(
            Launch(count, number, f"{host}:{port}"),
            seconds,
            SimpleNamespace(words=f"process {number} waits"),
        )
    except ConfigError as error:
        return str(error)
    return time.monotonic()


def all_come(*calls, **options):
    """Return what each of some processes, a thread each, gets from the meeting."""
    port = free_port()
    with ThreadPoolExecutor(len(calls)) as threads:
        found = [
            threads.submit(come, port=port, **{**options, **call}) for call in calls
        ]
        return [each.result(60) for each in found]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_nobody_goes_on_before_all_are_there(late):
    """Whoever comes last, process 0 or another one, all go on after it."""
    began = time.monotonic()
    found = all_come(*({"number": n, "delay": 1.0 * (n == late)} for n in range(3)))
    assert all(over - began > 0.9 for over in found), found


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1"])
def test_the_port_is_free_after_the_meeting(host):
    """JAX can listen at the port at once, by either protocol."""
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        found = [
            threads.submit(come, n, port, count=2, host=host).result for n in range(2)
        ]
        assert all(isinstance(get(30), float) for get in found)
    with socket.create_server(("", port)):
        pass


def test_the_missing_are_named_in_all_that_came():
    """Two of five never come: the three that do have one sentence."""
    found = all_come({"number": 0}, {"number": 2}, {"number": 4}, count=5, seconds=1.5)
    for words in found:
        assert "process 1 of 5, process 3 of 5 did not come to localhost:" in words


def test_another_number_of_processes_does_not_join():
    """A process that was started as one of four does not join three."""
    found = all_come(
        {"number": 0}, {"number": 1, "count": 4}, {"number": 2}, seconds=1.5
    )
    assert "process 1 of 3 did not come" in found[0]
    assert "gave up" in found[1]


def test_another_program_at_the_port_is_no_process_0():
    """What answers in other words is not taken for a run."""
    with socket.create_server(("localhost", 0)) as server:

        def answer():
            for _ in range(9):
                try:
                    connection, _ = server.accept()
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                    connection.close()
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        port = server.getsockname()[1]
        words = come(1, port, count=2, seconds=1)
        assert "what answers there is not process 0 of this run; gave up" in words
        assert "it cannot listen (Address already in use)" in come(
            0, port, count=2, seconds=0.5
        )
