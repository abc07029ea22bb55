"""Starting sizes for reinforcement learning by model size: published values, values
used in practice, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from rampup.errors import ConfigError, choice_error
from rampup.plan.numbers import (
    GIB,
    MAX_COUNT,
    parse_count,
    parse_memory_gib,
    plain_number,
)

SYSTEMS = ("trlx", "skyrl", "verl", "maxtext_rl")
# Mixed-precision Adam: bfloat16 weights and gradients, float32 weights and both
# moments.
STATE_BYTES = {"weights": 2, "gradients": 2, "float32 weights": 4, "Adam moments": 8}
# A frozen reference policy: bfloat16 weights.
REFERENCE_BYTES = 2

Sizes = Mapping[str, int | None]
_SKYRL = (
    "train_batch_size",
    "policy_mini_batch_size",
    "micro_train_batch_size_per_gpu",
    "n_samples_per_prompt",
    "num_devices",
)
# The keys of the sizes below. Those of trlX are per process.
KEYS = {
    "trlx": ("batch_size", "num_rollouts", "chunk_size", "ppo_epochs"),
    "skyrl": _SKYRL,
}


class Row(NamedTuple):
    """A row of a published table."""

    label: str  # the model sizes as published
    smallest: int  # the range of model sizes in parameters
    largest: int
    sizes: tuple[
        int | None, ...
    ]  # None where the source leaves out the epochs; trlX's default is 4


M, B = 10**6, 10**9
# Community guides to trlX and SkyRL.
TABLES = {
    "trlx": (
        Row("125M-1B", 125 * M, B, (32, 128, 128, None)),
        Row("6B", 6 * B, 6 * B, (4, 128, 16, None)),
        Row("20B", 20 * B, 20 * B, (1, 16, 4, 2)),
    ),
    "skyrl": (
        Row("0.5B-3B", B // 2, 3 * B, (512, 128, 2, 8, 4)),
        Row("7B-14B", 7 * B, 14 * B, (256, 64, 1, 8, 8)),
        Row("70B+", 70 * B, MAX_COUNT, (128, 32, 1, 4, 16)),
    ),
}
# Sizes in the repository's own example, by parameters: trlX 3340c2f,
# examples/hh/ppo_hh.py, lines 71-106.
USED = {
    "trlx": {
        125 * M: (32, 128, 16, 4),
        B: (8, 64, 16, 4),
        6 * B: (4, 64, 16, 4),
        20 * B: (1, 16, 4, 2),
    }
}
FIRST_NOTE = (
    "a starting point only: `rampup tune` finds the largest microbatch that fits"
)
TRADE_OFFS = (
    (
        "a smaller batch needs less memory, but its gradient is noisier, so the"
        " learning rate may have to be lower"
    ),
    (
        "fewer rollouts before training need less memory and keep samples closer to the"
        " policy, but are less diverse experience"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Starting sizes for one model, as `rampup suggest --json` prints them."""

    system: str  # the system whose keys the sizes have
    params: int  # the model's parameters
    published_for: (
        str | None
    )  # the row of a published table that applies. None if the system has no table.
    published: Sizes | None  # its sizes
    repository: (
        Sizes | None
    )  # those of the repository at the nearest model size of that row; None without any
    memory: (
        Mapping[str, Any] | None
    )  # the rule of thumb for memory. None if the memory of a device was not given.
    notes: list[str]  # sentences about the origin and the limits of these numbers

    def to_dict(self) -> dict[str, Any]:
        """Return the suggestion as JSON."""
        return asdict(self)


def suggest(
    params: str | int, *, system: str, memory_gib: str | float | None = None
) -> Suggestion:
    """Return starting sizes for a model: between two published rows, that of the larger
    models, which needs less memory.

    The memory of one device, for the rule of thumb, is required for systems without a
    published table.
    """
    if system not in SYSTEMS:
        raise choice_error("system", system, SYSTEMS)
    number = parse_count(params, what="params", key="params")
    if number < 1:
        raise ConfigError(
            f"params={params} must be at least 1", key="params", nearest=(1,)
        )
    memory = None if memory_gib is None else _memory(number, memory_gib)
    if system not in TABLES and memory is None:
        raise ConfigError(
            f"no table of starting sizes is published for {system}, only for"
            f" {', '.join(TABLES)}",
            fix="set memory-gib, the memory of a device, for a rule of thumb",
            key="memory-gib",
        )
    row = used = None
    notes = [
        f"no table of starting sizes is published for {system}; start with one sample"
        " per replica and pass, reach the batch size by accumulation, and use the"
        " remaining memory for more samples per pass"
    ]
    if system in TABLES:
        rows = TABLES[system]
        row = next((row for row in rows if number <= row.largest), rows[-1])
        used = _nearest_used(system, row, number)
        notes = _notes(system, row, used, number)
    if memory is not None:
        notes.append(
            f"rule of thumb: {sum(STATE_BYTES.values())} bytes per parameter for"
            f" mixed-precision Adam and {REFERENCE_BYTES} for a reference policy, shared"
            " by all devices; frozen layers or a generator on its own devices change it"
        )
    return Suggestion(
        system=system,
        params=number,
        published_for=row and row.label,
        published=row and dict(zip(KEYS[system], row.sizes, strict=True)),
        repository=used and dict(zip(KEYS[system], used, strict=True)),
        memory=memory,
        notes=[FIRST_NOTE, *notes, *TRADE_OFFS],
    )


def _nearest_used(system: str, row: Row, number: int) -> tuple[int, ...] | None:
    """Return the sizes that the repository uses at the nearest model size of a row."""
    used = USED.get(system, {})
    in_row = [size for size in used if row.smallest <= size <= row.largest]
    nearest = min(in_row, key=lambda size: abs(math.log(size / number)), default=None)
    return None if nearest is None else used[nearest]


def _notes(
    system: str, row: Row, used: tuple[int, ...] | None, number: int
) -> list[str]:
    """Return where the sizes of a row come from, what follows from them, and their
    limits.
    """
    notes = [f"the table is from a community guide, not from the project {system}"]
    if system == "trlx":
        notes.append(
            "rule of thumb behind the table: the larger the model, the smaller"
            " batch_size; all sizes are per process"
        )
    else:
        prompts, mini, micro, responses, num_devices = map(int, filter(None, row.sizes))
        steps, samples = prompts // mini, mini * responses
        smaller = (
            f"a smaller micro_train_batch_size_per_gpu than {micro}"
            if micro > 1
            else "more devices"
        )
        notes += [
            f"{prompts:,} prompts * {responses} = {prompts * responses:,} samples;"
            f" {steps} optimizer steps of {samples:,}; {num_devices} replicas *"
            f" {samples // num_devices // micro} passes of {micro}: both batch sizes"
            " count prompts",
            "out of memory: first trainer.gradient_checkpointing=true, then"
            f" {smaller}; policy_mini_batch_size does not change the memory of a pass",
            f"slow: fewer responses (n_samples_per_prompt={responses // 2} halves"
            " generation and training), or larger mini batches (policy_mini_batch_size"
            f"={2 * mini} makes {steps // 2} optimizer steps of {2 * samples:,})",
        ]
    if not row.smallest <= number <= row.largest:
        side = "larger" if number > row.largest else "smaller"
        notes.append(
            f"the model is {side} than those the row is published for ({row.label}), so"
            " these sizes are a guess"
        )
    if used is not None and used != row.sizes:
        notes.append(
            "the repository does not use the published sizes; if they differ, prefer"
            " those of the repository"
        )
    return notes


def _memory(number: int, memory_gib: str | float) -> dict[str, Any]:
    """Return the fewest devices that hold the state, sharded over all of them, without
    anything else in memory; activations and the generator have what is left on each.
    """
    device_bytes = parse_memory_gib(memory_gib)
    state = number * (sum(STATE_BYTES.values()) + REFERENCE_BYTES)
    least = -(-state // device_bytes)
    return {
        "bytes_per_parameter": STATE_BYTES | {"reference weights": REFERENCE_BYTES},
        "state_gib": state / GIB,
        "device_gib": plain_number(Fraction(device_bytes, GIB)),
        "least_devices": least,
        "free_gib_per_device": (device_bytes - -(-state // least)) / GIB,
    }
