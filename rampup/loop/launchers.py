"""How this process was started: the variables that launchers set, and what JAX's own
detectors of clusters find.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

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
_ALONE = "distributed=off trains in this process alone"
_ADDRESS = f"set JAX_COORDINATOR_ADDRESS to its host and port. {_ALONE}"


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among several."""

    count: int  # processes
    number: int  # of this process, from 0
    address: str = ""  # host:port of process 0
    by: str = ""  # what says so
    cluster: Any = None  # JAX's detector, which knows the address


def find_launch(
    address: str | None = None,
    count: int | None = None,
    number: int | None = None,
    *,
    timeout: int = 300,
) -> Launch | None:
    """Return the place of this process among those that it was started with; None if it
    is alone.

    The arguments (address of process 0, with or without a port, count and number) take
    precedence, then JAX's variables. The rest comes from JAX's detectors if there is no
    address, and otherwise from the variables of launchers.
    """
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    count = (
        _number_in("JAX_NUM_PROCESSES", "JAX_PROCESS_COUNT") if count is None else count
    )
    if number is None:
        number = _number_in("JAX_PROCESS_ID")
        if number is None and os.environ.get("JAX_PROCESS_COUNT"):
            # What xpk sets for CPUs: a Job per slice, with an index of its own in each.
            index, job, per_job = map(
                _number_in, ("JOB_COMPLETION_INDEX", "JOB_INDEX", "PROCESSES_IN_JOB")
            )
            number = None if index is None else (job or 0) * (per_job or 0) + index
    found, problem = (None if count == 1 else _launcher()), ""
    if count != 1 and (address is None or (found is None and None in (count, number))):
        detected, problem = _ask_jax()
        found = detected or found
    if address is None and found is not None and found.cluster is not None:
        port = os.environ.get("JAX_COORDINATOR_PORT") or None
        options = {"timeout_secs": timeout, "override_coordinator_port": port}
        known = inspect.signature(
            found.cluster.get_coordinator_address
        ).parameters  # JAX 0.7 has no override
        place, error = _asked(
            found.cluster.get_coordinator_address,
            **{name: options[name] for name in options if name in known},
        )
        if error is not None:
            raise ConfigError(
                f"{found.by} does not find process 0:"
                f" {' '.join(str(error).split())[:500]}",
                fix=_ADDRESS,
                key="coordinator_address",
            ) from error
        address = str(place)
        address = f"{address.rpartition(':')[0]}:{port}" if port else address
    elif (
        address is None
        and found is not None
        and (hosts := os.environ.get("SKYPILOT_NODE_IPS"))
    ):
        address = hosts.split()[0]
    elif address is None and found is not None:
        unknown = "JAX does not know this launcher, or not all that it sets is here"
        problem = problem or (
            "Start it with srun" if found.by.startswith("SLURM") else unknown
        )
        words = (
            f"{found.by}: this process was started as number {found.number} of"
            f" {found.count}"
        )
        words += f", but it does not know where process 0 is. {problem}"
        raise ConfigError(f"{words}; or {_ADDRESS}", key="coordinator_address")
    if found is not None:
        count, number = (
            found.count if count is None else count,
            found.number if number is None else number,
        )
    if count is not None and number is not None and not 0 <= number < count:
        rule = f"process_id={number} must be from 0 to num_processes - 1 = {count - 1}"
        raise ConfigError(rule, key="process_id", nearest=(0, count - 1))
    if count == 1:
        return None
    given = {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": number,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        # Index > 0 proves that there are other pods: refuse. Index 0 may be the only
        # one: run, and say so.
        index = _number_in("JOB_COMPLETION_INDEX")
        if index is not None:
            problem = (
                problem
                or "JAX finds the others with the package kubernetes: pip install 'jax[k8s]'"
            )
            words = (
                f"JOB_COMPLETION_INDEX={index}: a pod of an indexed Job, but nothing"
                f" says how many there are. {problem}"
            )
            fix = "set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
            if index > 0:
                raise ConfigError(
                    f"{words}; or {fix}. {_ALONE}", key="coordinator_address"
                )
            problem = f"{words}; if there are others, {fix}"
        if problem:
            print(
                f"rampup: this process runs alone. {problem}",
                file=sys.stderr,
                flush=True,
            )
        return None
    if address is None or count is None or number is None:
        named = " and ".join(name for name in given if name not in missing)
        problem = (
            f"{named} is given without {' and '.join(missing)}; several processes need"
            " all three"
        )
        raise ConfigError(problem, key=missing[0])
    if ":" not in address.rpartition("]")[2]:  # [::1] is an address without a port
        address = f"{address}:{os.environ.get('JAX_COORDINATOR_PORT') or DEFAULT_PORT}"
    return Launch(count, number, address)


def local_device_ids() -> list[int] | None:
    """Return the GPUs of this host for this process, as JAX numbers them; None = all.
    Refuse to leave some of them unused.

    JAX gives a process of Slurm or Open MPI one GPU, also if it is the only one on its
    host.
    """
    if os.environ.get("JAX_LOCAL_DEVICE_IDS") or jax.config.jax_platforms == "cpu":
        return None
    tasks = _number_in("OMPI_COMM_WORLD_LOCAL_SIZE")
    number = _number_in("OMPI_COMM_WORLD_LOCAL_RANK")
    if (
        tasks is None
        and "SLURM_STEP_TASKS_PER_NODE" in os.environ
        and "SLURM_STEP_NODELIST" in os.environ
    ):
        # Such as `4(x2),3`: four on each of two nodes, and three.
        parts = [
            part.rstrip(")").partition("(x")
            for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(",")
        ]
        counts = [
            int(count) for count, _, nodes in parts for _ in range(int(nodes or 1))
        ]
        node = _number_in("SLURM_NODEID") or 0
        number = _number_in("SLURM_LOCALID")
        tasks = counts[node] if node < len(counts) else None
    if tasks is None or number is None or tasks == 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = len(visible.split(",")) if visible else _number_in("SLURM_GPUS_ON_NODE")
    if visible and gpus == 1:
        return None
    if gpus is not None and gpus > tasks:
        source = (
            f"CUDA_VISIBLE_DEVICES={visible}"
            if visible
            else f"SLURM_GPUS_ON_NODE={gpus}"
        )
        problem = (
            f"{tasks} processes are started on a host with {gpus} GPUs ({source}), and"
            " each would use one"
        )
        fix = (
            f"start one process per GPU (srun --ntasks-per-node={gpus}) or one per host"
            " (--ntasks-per-node=1), which"
        )
        raise ConfigError(
            f"{problem}; {fix} then uses all of them, or set JAX_LOCAL_DEVICE_IDS in"
            " each",
            key="num_processes",
        )
    return [number]


def _launcher() -> Launch | None:
    """Return the first launcher whose variables say that it started several
    processes.
    """
    for names, own in _VARIABLES:
        name = next((name for name in names if os.environ.get(name)), names[0])
        count = os.environ.get(name, "")
        number = os.environ.get(own, "")
        # Other programs use such short names too, and not always for numbers.
        if count.isdecimal() and number.isdecimal() and int(count) > 1:
            return Launch(int(count), int(number), by=f"{name}={count}, {own}={number}")
    return None


def _ask_jax() -> tuple[Launch | None, str]:
    """Return the launch of several processes that a detector of JAX finds, or None; and
    the problem of one that failed.
    """
    try:
        from jax._src.clusters import ClusterEnv

        clusters = [
            cluster
            for cluster in ClusterEnv._cluster_types
            if not cluster.opt_in_only_method
        ]
    except (
        ImportError,
        AttributeError,
    ):  # no public names; then only the variables count
        return None, ""
    problem = ""
    # Set by srun, and not in a batch script or an interactive shell.
    task = all(
        os.environ.get(name)
        for name in (
            "SLURM_STEP_NODELIST",
            "SLURM_NTASKS",
            "SLURM_PROCID",
            "SLURM_LOCALID",
        )
    )
    for cluster in clusters:
        name = cluster.__name__
        if "Slurm" in name and (
            os.environ.get("SLURM_STEP_NUM_TASKS") == "1" or not task
        ):
            # It would take the tasks of the whole job, and in JAX 0.7 also those of a
            # shell.
            continue
        if "Tpu" in name and "tpu" not in (jax.config.jax_platforms or "tpu"):
            continue  # A run on the CPUs of a TPU VM is one of this host alone.
        count: Any = None
        number: Any = None
        is_here, error = _asked(cluster.is_env_present)
        if is_here:
            count, error = _asked(cluster.get_process_count)
        if count is not None and count > 1:
            number, error = _asked(cluster.get_process_id)
        if number is not None:
            return Launch(count, number, by=f"JAX's {name}", cluster=cluster), ""
        if error is not None:
            words = (
                f"JAX's {name} says: {type(error).__name__}:"
                f" {' '.join(str(error).split())[:300].rstrip('.')}"
            )
            # A pod that asks in vain is often the only one. A host with TPUs is often
            # one of several.
            hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get(
                "TPU_WORKER_HOSTNAMES"
            )
            if (count or 0) > 1 or ("Tpu" in name and (hosts is None or "," in hosts)):
                raise ConfigError(
                    words,
                    fix="set coordinator_address, num_processes and process_id in each"
                    f" process. {_ALONE}",
                    key="coordinator_address",
                ) from None
            problem = problem or words
    return None, problem


def _asked(question: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Return what a detector of JAX answers, or None and its error: no metadata server,
    no package and no permission each have one of their own.
    """
    try:
        return question(**options), None
    except Exception as error:  # noqa: BLE001 - see above
        return None, error


def _number_in(*names: str) -> int | None:
    """Return the number in the first variable that is set, or None."""
    for name in names:
        if value := os.environ.get(name):
            if not value.isdecimal():
                raise ConfigError(f"{name}={value!r} must be a whole number", key=name)
            return int(value)
    return None
