"""What processes of one run say to each other: through the key-value store of
jax.distributed, without device collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
from jax.sharding import Mesh

from rampup.errors import ConfigError

FOLDER = "rampup"
# Seconds after which a process says for whom it waits, and then says so again.
_QUIET_SECONDS = 10.0
_AGAIN_SECONDS = 60.0
_MEETING_SECONDS = 24 * 3600
# How often each name was used: threads may come to different ones in any order.
_numbers = defaultdict[str, "itertools.count[int]"](itertools.count)


def is_primary() -> bool:
    """Return whether this is process 0, which writes the files that a run has only
    once.
    """
    return jax.process_index() == 0


def kv_store() -> Any:
    """Return the key-value store that all processes share."""
    # It has no public name; Orbax and others take it from here too.
    from jax._src import distributed

    return distributed.global_state.client


def broadcast_from_process0(
    name: str, make: Callable[[], str], *, timeout: int = 300
) -> str:
    """Return the value that process 0 makes, in every process. They call this equally
    often with each name.
    """
    if jax.process_count() == 1:
        return make()
    key = f"{FOLDER}/first/{name}/{next(_numbers[name])}"
    if is_primary():
        value = make()
        kv_store().key_value_set(key, value, allow_overwrite=True)
        return value
    return str(kv_store().blocking_key_value_get(key, 1000 * timeout))


def gather_from_all(value: str, name: str = "all") -> list[str]:
    """Return the values of all processes, in every process. They call this equally
    often with each name, and may come hours apart.
    """
    count = jax.process_count()
    if count == 1:
        return [value]
    own, store = jax.process_index(), kv_store()
    folder = f"{FOLDER}/{name}/{next(_numbers[name])}"
    milliseconds = 1000 * _MEETING_SECONDS
    store.key_value_set(f"{folder}/{own}", value)
    # Process 0 collects them: as many messages as processes, and not their square.
    with announced(f"process {own} of {count} waits for process 0") as waiting:
        if own == 0:
            found = []
            for other in range(count):
                waiting.words = f"process 0 of {count} waits for process {other}"
                found.append(
                    store.blocking_key_value_get(f"{folder}/{other}", milliseconds)
                )
            store.key_value_set(f"{folder}/all", json.dumps(found))
        return list(
            json.loads(store.blocking_key_value_get(f"{folder}/all", milliseconds))
        )


def first_problem(problem: str) -> str:
    """Return the first problem of a process, in every process, or "". They call this
    equally often.
    """
    return next(filter(None, gather_from_all(problem)), "")


def check_joined() -> None:
    """Refuse to run in a process that sees the devices of others without having joined
    them. This starts JAX's backend.
    """
    if jax.process_count() > 1 and not jax.distributed.is_initialized():
        raise ConfigError(
            f"JAX sees the devices of {jax.process_count()} processes, but this one has"
            " not joined them: set coordinator_address, num_processes and process_id, or"
            " call jax.distributed.initialize() first",
            key="coordinator_address",
        )


def wait_for_all(mesh: Mesh) -> None:
    """Wait until all processes are here, if the mesh has devices of all: JAX's
    collectives between CPUs fail after 30 s.
    """
    if spans_all(mesh):
        check_joined()
        gather_from_all("", "meeting")


def spans_all(mesh: Mesh) -> bool:
    """Return whether there are several processes, and a mesh has devices of all."""
    count = len({device.process_index for device in mesh.devices.flat})
    return 1 < jax.process_count() == count


@contextlib.contextmanager
def announced(words: str) -> Iterator[SimpleNamespace]:
    """Say on standard error what this process waits for, in words that can be changed,
    if the context takes long.
    """
    waiting, done = SimpleNamespace(words=words), threading.Event()

    def announce() -> None:
        pause = _QUIET_SECONDS
        while not done.wait(pause):
            print(f"rampup: {waiting.words}", file=sys.stderr, flush=True)
            pause = _AGAIN_SECONDS

    threading.Thread(target=announce, name="rampup-waits", daemon=True).start()
    try:
        yield waiting
    finally:
        done.set()
