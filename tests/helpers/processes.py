"""Processes of a test: forked from one that has imported everything, so that none pays
for the imports again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
import time


def start(function, *arguments, log):
    """Call a function in a process of its own, whose output goes to the file `log`;
    return the process.

    An integer that the function returns is the process's exit code.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.preload"])
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(
        target=_call, args=(function, arguments, log), daemon=True
    )
    process.start()
    return process


def run_all(function, arguments, folder, timeout=300):
    """Call a function in a process for each tuple of arguments; return what each prints
    when all have ended well.
    """
    logs = [folder / f"{number}.log" for number in range(len(arguments))]
    started = [
        start(function, *own, log=log) for own, log in zip(arguments, logs, strict=True)
    ]
    for process, log in zip(started, logs, strict=True):
        process.join(timeout)
        assert process.exitcode == 0, log.read_text()
    return [log.read_text() for log in logs]


def wait_until(found, told=lambda: "", *, running=(), seconds=300):
    """Wait until a function returns something true, and return it; `running` processes
    must not end meanwhile.
    """
    deadline = time.monotonic() + seconds
    while not (seen := found()):
        assert time.monotonic() < deadline, told()
        assert all(process.poll() is None for process in running), told()
        time.sleep(0.05)
    return seen


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _call(function, arguments, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        sys.exit(function(*arguments))
    finally:
        # as at the end of any other process; JAX leaves its distributed service there
        atexit._run_exitfuncs()
