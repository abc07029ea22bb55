"""Programs compiled for TPU slices that are not here: their memory, their account, and a cache of both.

Whether a program fits is the compiler's own answer: it refuses a program that needs more memory than a chip has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rampup.plan.topology import Topology
from rampup.run.account import Account, account_of
from rampup.run.compile import compile_for, compiler_version
from rampup.run.hlo import Program
from rampup.run.offload import ProgramMemory, is_out_of_memory, program_memory

# Part of a cached result's key: raise it if the account of a program changes.
_FORMAT = 4
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MAX_REFUSAL = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What programs are compiled for.

    Attributes:
        topology: the slices.
        hbm_bytes: memory of a device that programs may use, or None for all of it.
        cache: folder of earlier results, or None.
    """

    topology: Topology
    hbm_bytes: int | None = None
    cache: Path | None = None

    @property
    def limit(self) -> int:
        """Memory of a device in bytes."""
        return self.topology.hbm_bytes if self.hbm_bytes is None else self.hbm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The compiler's answer about one program.

    Attributes:
        memory: memory of a device, or None if the compiler refuses the program because it does not fit.
        account: what a run costs, or None.
        refusal: the compiler's reason.
        seconds: time of the compilation.
        cached: whether the answer is from an earlier compilation.
    """

    memory: ProgramMemory | None
    account: Account | None
    refusal: str = ""
    seconds: float
    cached: bool = False

    def to_json(self) -> str:
        """Return the answer as text, for `from_json`."""
        memory = self.memory and dataclasses.asdict(self.memory)
        account = self.account and self.account.to_json()
        return json.dumps({"memory": memory, "account": account, "refusal": self.refusal, "seconds": self.seconds})

    @classmethod
    def from_json(cls, text: str) -> Compiled:
        """Return the answer that `to_json` wrote."""
        data = json.loads(text)
        return cls(
            memory=data["memory"] and ProgramMemory(**data["memory"]),
            account=data["account"] and Account.from_json(data["account"]),
            refusal=data["refusal"],
            seconds=data["seconds"],
            cached=True,
        )


def compile_on(target: Target, lowered: Any, mesh: jax.sharding.Mesh) -> Compiled:
    """Compile a program for a target, or return the result of an earlier compilation of the same program.

    Args:
        target: the slices and the cache.
        lowered: a `jax.stages.Lowered` for devices of the target.
        mesh: the mesh of the program.
    """
    file = target.cache and target.cache / f"{_key(target, lowered, mesh)}.json"
    if file is not None:
        # A file of another version, or one that was cut short, is written again.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return Compiled.from_json(file.read_text(encoding="utf-8"))
    start = time.perf_counter()
    try:
        compiled = compile_for(lowered, kind=target.topology.chip.name, hbm_bytes=target.hbm_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = Compiled(memory=None, account=None, refusal=_reason(error), seconds=time.perf_counter() - start)
    else:
        seconds = time.perf_counter() - start
        shape = tuple((str(name), size) for name, size in mesh.shape.items())
        account = account_of(Program(compiled.as_text()), shape)
        found = Compiled(memory=program_memory(compiled), account=account, seconds=seconds)
    if file is not None:
        with contextlib.suppress(OSError):
            _write(file, found.to_json())
    return found


def refused_bytes(refusal: str) -> float:
    """Return the bytes that the compiler says a refused program needs, or infinity if it does not say.

    Example:
        >>> refused_bytes("memory required for HLO temporaries (2.5G) exceeds available HBM (1.75G)") / 2**30
        2.5
    """
    match = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of", refusal)
    if match is None:
        return math.inf
    number, unit = (match.group(1), match.group(2)) if match.group(1) else (match.group(3), match.group(4))
    return float(number) * 1024 ** " KMGT".index(unit or " ")


def _key(target: Target, lowered: Any, mesh: jax.sharding.Mesh) -> str:
    """Return what identifies a result: the program, the compiler with its flags, and the devices in their order."""
    facts = {
        "format": _FORMAT,
        "versions": [compiler_version(), jax.__version__, jax.lib.__version__],
        "flags": {name: os.environ.get(name, "") for name in _FLAGS},
        "topology": target.topology.to_dict(),
        "hbm_bytes": target.hbm_bytes,
        "mesh": [list(mesh.shape.items()), [device.id for device in mesh.devices.flat]],
    }
    digest = hashlib.sha256(json.dumps(facts, default=str).encode())
    digest.update(lowered.as_text().encode())
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REFUSAL]


def _write(file: Path, text: str) -> None:
    """Write a file at once, so that another process never reads half of it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8", delete=False) as part:
        part.write(text)
    os.replace(part.name, file)
