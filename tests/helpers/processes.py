"""Processes of a test: forked from one that has imported everything, so that none pays for the imports again."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys


def start(function, *arguments, log):
    """Call a function in a process of its own, whose output goes to the file `log`; return the process.

    An integer that the function returns is the process's exit code.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.preload"])
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_call, args=(function, arguments, log), daemon=True)
    process.start()
    return process


def _call(function, arguments, log):
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        sys.exit(function(*arguments))
    finally:
        atexit._run_exitfuncs()  # as at the end of any other process; JAX leaves its distributed service there
