"""Compile programs for absent TPU slices: their devices, memory, account, and a cache
of the last two.

Whether a program fits is the compiler's own answer: it refuses a program that needs
more memory than a chip has.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.contrib.lab.account import Account, account_of
from rampup.contrib.lab.hlo import Program
from rampup.engine.compile import compile_for_tpu, topology_facts
from rampup.engine.offload import ProgramMemory, is_out_of_memory, program_memory
from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan.topology import Topology

_FORMAT = (
    5  # part of a cached result's key: raise it if the account of a program changes
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MAX_REFUSAL = 300
COMPILER_THREAD = "rampup-topology-compiler"
INSTALL = "pip install 'rampup[tpu-compile]' installs the version that JAX needs"
# For libtpu on a machine without a TPU: it asks no metadata server, searches for no
# worker, logs nothing, and its lock file does not end a second process that compiles
# too.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_HBM_OPTION = "xla_tpu_max_hbm_size_mib"  # caps the memory that a program may use
# The version that JAX 0.7.2 asks for. Older ones end the process with a segmentation
# fault after a compilation.
_OLDEST_LIBTPU = (0, 0, 23)
_libtpu_lock = threading.Lock()


def compiler_version() -> str:
    """Return the version of the TPU compiler, or refuse one that is missing or too
    old.
    """
    for package in ("libtpu", "libtpu-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package)
            if (
                package == "libtpu"
                and tuple(map(int, re.findall(r"\d+", version)))[:3] < _OLDEST_LIBTPU
            ):
                needed = ".".join(map(str, _OLDEST_LIBTPU))
                problem = (
                    f"libtpu {version} cannot compile for an absent TPU, but {needed}"
                    " and newer can"
                )
                raise MissingDependencyError(f"{problem}; {INSTALL}")
            return f"{package} {version}"
    raise MissingDependencyError(
        f"compiling for an absent TPU takes its compiler, the package libtpu; {INSTALL}"
    )


def use_cpu_as_host() -> None:
    """Keep JAX of a command away from a TPU runtime: with libtpu installed, it would
    search for chips on this machine.
    """
    jax.config.update("jax_platforms", "cpu")


def topology_devices(topology: Topology | str) -> Sequence[Any]:
    """Return the devices of a topology or its name. Programs can be compiled for them
    but cannot run on them.

    Args:
        topology: such as "v5e:4x4" or "2*v5p:4x4x4"; `rampup explain topology` lists
            the names.

    Returns:
        The devices, for `rampup.make_mesh(devices=...)`.

    Raises:
        ConfigError: there is no such topology.
        MissingDependencyError: libtpu is not installed.

    Example:
        >>> topology_devices("v5e:3x3")
        Traceback (most recent call last):
        rampup.errors.ConfigError: topology=v5e:3x3 is not a shape of its slices; nearest: v5e:2x4, v5e:4x4
    """
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    compiler_version()
    with _libtpu_lock:
        return _devices(topology)


@functools.cache
def _devices(topology: Topology) -> Sequence[Any]:
    from jax.experimental import topologies

    options: dict[str, Any] = {"chips_per_host_bounds": topology.chips_per_host}
    options |= {"wrap": topology.wrap} if any(topology.wrap) else {}
    options |= {"num_slices": topology.num_slices} if topology.num_slices > 1 else {}
    options |= (
        {}
        if topology.chip.config is None
        else {"chip_config_name": topology.chip.config}
    )
    # libtpu reads them when it is loaded; a compilation later does not need them.
    absent = {
        name: value for name, value in _ENVIRONMENT.items() if name not in os.environ
    }
    os.environ.update(absent)
    try:
        found = topologies.get_topology_desc(
            topology.slice_name, platform="tpu", **options
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        problem = f"the compiler {compiler_version()} refuses topology={topology.name}"
        raise ConfigError(f"{problem}: {reason}", key="topology") from error
    finally:
        for name in absent:
            os.environ.pop(name, None)
    if len(found.devices) != topology.num_devices:
        rule = f"topology={topology.name} has {topology.num_devices} devices"
        raise ConfigError(
            f"{rule}, but {compiler_version()} gives {len(found.devices)}",
            key="topology",
        )
    return tuple(found.devices)


def compile_for(lowered: Any, *, kind: str = "", hbm_bytes: int | None = None) -> Any:
    """Compile a program for a topology, with the options that `rampup train` has for a
    kind of TPU.

    `hbm_bytes` limits the memory of a device that it may use, rounded down to MiB.
    """
    options = {} if hbm_bytes is None else {_HBM_OPTION: str(hbm_bytes >> 20)}
    # JAX writes such programs into its cache but cannot read them back without a TPU:
    # it would warn and compile again.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(name, 1e9)
    try:
        return compile_for_tpu(lowered, kind, options)
    finally:
        jax.config.update(name, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What programs are compiled for."""

    topology: Topology  # the slices
    hbm_bytes: int | None = (
        None  # memory of a device that programs may use, or None for all of it
    )
    cache: Path | None = None  # folder of earlier results, or None

    @property
    def limit(self) -> int:
        """Memory of a device in bytes."""
        return self.topology.hbm_bytes if self.hbm_bytes is None else self.hbm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiler's answer about one program."""

    memory: (
        ProgramMemory | None
    )  # of a device, or None if the compiler refuses the program because it does not fit
    account: Account | None  # what a run costs, or None
    refusal: str = ""  # the compiler's reason
    seconds: float  # of the compilation
    cached: bool = False  # whether the answer is from an earlier compilation


def compile_on(target: Target, lowered: Any, mesh: jax.sharding.Mesh) -> Compiled:
    """Compile a lowered program for a target, or return the result of an earlier
    compilation of the same program.
    """
    # What identifies a result: the program, the compiler with its flags, and the
    # devices in their order.
    facts = {
        "format": _FORMAT,
        "versions": [compiler_version(), jax.__version__, jax.lib.__version__],
        "flags": {name: os.environ.get(name, "") for name in _FLAGS},
        "topology": topology_facts(target.topology),
        "hbm_bytes": target.hbm_bytes,
        "mesh": [list(mesh.shape.items()), [device.id for device in mesh.devices.flat]],
    }
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    digest.update(lowered.as_text().encode())
    file = target.cache and target.cache / f"{digest.hexdigest()}.json"
    if file is not None:
        # A file of another version, or one that was cut short, is written again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(file.read_text(encoding="utf-8")) | {"cached": True}
            known["memory"] = known["memory"] and ProgramMemory(**known["memory"])
            return Compiled(
                **known
                | {"account": known["account"] and Account.from_json(known["account"])}
            )
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def compile_it() -> None:
        try:
            future.set_result(
                compile_for(
                    lowered, kind=target.topology.chip.name, hbm_bytes=target.hbm_bytes
                )
            )
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)

    start, compiled, refusal = time.perf_counter(), None, ""
    # In a thread, so that Ctrl-C ends the wait and not, minutes later, the compilation.
    threading.Thread(target=compile_it, name=COMPILER_THREAD, daemon=True).start()
    try:
        compiled = future.result()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        refusal = " ".join(str(error).split())[:_MAX_REFUSAL]
    seconds = time.perf_counter() - start
    shape = tuple((str(name), size) for name, size in mesh.shape.items())
    account = (
        None if compiled is None else account_of(Program(compiled.as_text()), shape)
    )
    memory = None if compiled is None else program_memory(compiled)
    found = Compiled(memory=memory, account=account, refusal=refusal, seconds=seconds)
    if file is not None:
        # At once, so that another process never reads half of a file.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, encoding="utf-8", delete=False
            ) as part:
                json.dump(dataclasses.asdict(found), part)
            os.replace(part.name, file)
    return found


def refused_bytes(refusal: str) -> float:
    """Return the bytes that the compiler says a refused program needs, or infinity if
    it does not say.
    """
    # Such as "memory required for HLO temporaries (2.5G) exceeds available HBM
    # (1.75G)".
    match = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds", refusal) or re.search(
        r"Used ([\d.]+)([KMGT]?) of", refusal
    )
    return (
        math.inf
        if match is None
        else float(match.group(1)) * 1024 ** " KMGT".index(match.group(2) or " ")
    )
