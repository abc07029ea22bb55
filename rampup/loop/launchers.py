"""How this process was started: alone, or as one of several.

The arguments say so, then JAX's variables, then JAX's own detection of clusters. The
variables of other launchers have the numbers, but not where process 0 is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rampup.errors import ConfigError

DEFAULT_PORT = "8476"  # unless JAX_COORDINATOR_PORT is set
# Variables with the number of processes (the first that is set is taken) and with the
# number of this one. The more specific come first: mpirun may run within a Slurm job,
# and SLURM_NTASKS is that of the job in the step of an interactive shell.
_VARIABLES = (
    (("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_RANK"),
    (("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_PROCID"),
    (("NNODES",), "NODE_RANK"),
    (("SKYPILOT_NUM_NODES",), "SKYPILOT_NODE_RANK"),
    (("PMI_SIZE",), "PMI_RANK"),
    (("WORLD_SIZE",), "RANK"),
)
_FIX = (
    "start it with a launcher that JAX knows, such as srun, or set"
    " JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. distributed=off"
    " trains in this process alone"
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among several."""

    count: int  # processes
    number: int  # of this process, from 0
    address: str  # host:port of process 0


def find_launch(
    address: str | None, count: int | None, number: int | None, *, timeout: int
) -> Launch | None:
    """Return the place of this process among those that it was started with; None if it
    is alone.

    Address of process 0, with or without a port, count and number may be given, or be
    in JAX's variables. If the address is, a launcher's variables may have the rest.
    Without any of them, JAX is asked.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = _number_in("JAX_NUM_PROCESSES") if count is None else count
    number = _number_in("JAX_PROCESS_ID") if number is None else number
    if count == 1:
        return None
    known_count, known_number, words = _launcher()
    if (address, count, number) == (None, None, None):
        found = _ask_jax(timeout)
        if found is None and words:
            raise ConfigError(
                f"{words}: this process was started as number {known_number} of"
                f" {known_count}, but it does not know where process 0 is",
                fix=_FIX,
                key="coordinator_address",
            )
        return found
    count = known_count if count is None else count
    number = known_number if number is None else number
    given = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": number,
    }
    missing = [name for name, value in given.items() if value is None]
    if address is None or count is None or number is None:
        raise ConfigError(
            f"{' and '.join(name for name in given if name not in missing)} is given"
            f" without {' and '.join(missing)}; several processes need all three",
            key=missing[0],
        )
    if not 0 <= number < count:
        raise ConfigError(
            f"process_id={number} must be from 0 to num_processes - 1 = {count - 1}",
            key="process_id",
            nearest=(0, count - 1),
        )
    if ":" not in address.rpartition("]")[2]:  # [::1] is an address without a port
        address = f"{address}:{os.environ.get('JAX_COORDINATOR_PORT') or DEFAULT_PORT}"
    return Launch(count, number, address)


def local_device_ids() -> list[int] | None:
    """Return the GPU of this process, as JAX numbers those of its host; None = all.

    JAX gives a process of Slurm or Open MPI one GPU, also if it is the only one on its
    host: that one gets all.
    """
    on_host = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or os.environ.get(
        "SLURM_STEP_TASKS_PER_NODE", "1"
    )
    if (
        "JAX_LOCAL_DEVICE_IDS" in os.environ
        or re.fullmatch(r"1(\(x\d+\))?", on_host)  # such as 1(x4): one on each of four
        # the launcher has given it one already
        or os.environ.get("CUDA_VISIBLE_DEVICES", "").isdecimal()
    ):
        return None
    number = _number_in("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    return None if number is None else [number]


def _launcher() -> tuple[int | None, int | None, str]:
    """Return count, own number and the variables of the first launcher that says that
    it started several processes; None, None and "" without one.
    """
    for names, own in _VARIABLES:
        name = next((name for name in names if os.environ.get(name)), names[0])
        count = os.environ.get(name, "")
        number = os.environ.get(own, "")
        # Other programs use such short names too, and not always for numbers.
        if count.isdecimal() and number.isdecimal() and int(count) > 1:
            return int(count), int(number), f"{name}={count}, {own}={number}"
    return None, None, ""


def _ask_jax(timeout: int) -> Launch | None:
    """Return what JAX's own detection finds, as `jax.distributed.initialize` would, or
    None if this process is alone.
    """
    # A shell of a Slurm job is one process, and JAX would take the tasks of the job. A
    # single TPU host may have no metadata server to ask.
    in_shell = (
        "SLURM_JOB_ID" in os.environ
        and os.environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        and "OMPI_COMM_WORLD_SIZE" not in os.environ
    )
    if in_shell or os.environ.get("TPU_WORKER_HOSTNAMES") == "localhost":
        return None
    try:
        # It has no public name.
        from jax._src.clusters import ClusterEnv

        address, count, number, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, [], None, timeout
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            "JAX cannot say how this process was started:"
            f" {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}",
            fix=_FIX,
            key="coordinator_address",
        ) from error
    if address is None or number is None or count in (None, 1):
        return None
    return Launch(count, number, address)


def _number_in(*names: str) -> int | None:
    """Return the number in the first variable that is set, or None."""
    for name in names:
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ConfigError(f"{name}={value!r} must be a whole number", key=name)
            return int(value)
    return None
