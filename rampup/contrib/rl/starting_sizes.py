"""Starting sizes for reinforcement learning by model size: published values, values
used in practice, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from rampup.errors import ConfigError, RampupError, choice_error, raise_together
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
    problems: list[RampupError] = (
        [] if system in SYSTEMS else [choice_error("system", system, SYSTEMS)]
    )
    number = 0
    device_bytes = None
    try:
        if (number := parse_count(params, what="params", key="params")) < 1:
            raise ConfigError(
                f"params={params} must be at least 1", key="params", nearest=(1,)
            )
    except RampupError as error:
        problems.append(error)
    try:
        device_bytes = None if memory_gib is None else parse_memory_gib(memory_gib)
    except RampupError as error:
        problems.append(error)
    raise_together(problems)
    if system not in TABLES and device_bytes is None:
        text = (
            f"no table of starting sizes is published for {system}, only for"
            f" {', '.join(TABLES)}; set memory-gib, the "
        )
        raise ConfigError(
            f"{text}memory of a device, for a rule of thumb", key="memory-gib"
        )
    notes = [
        "a starting point only: `rampup tune` finds the largest microbatch that fits"
    ]
    row = None
    sizes = None
    used = None
    if system not in TABLES:
        text = (
            f"no table of starting sizes is published for {system}; start with one"
            " sample per replica and pass, reach the "
        )
        notes.append(
            f"{text}batch size by accumulation, and use the remaining memory for more"
            " samples per pass"
        )
    else:
        row = next(
            (row for row in TABLES[system] if number <= row.largest), TABLES[system][-1]
        )
        in_row = [
            size for size in USED.get(system, {}) if row.smallest <= size <= row.largest
        ]
        used = (
            USED[system][min(in_row, key=lambda size: abs(math.log(size / number)))]
            if in_row
            else None
        )
        sizes, used = (
            None if found is None else dict(zip(KEYS[system], found, strict=True))
            for found in (row.sizes, used)
        )
        notes.append(
            f"the table is from a community guide, not from the project {system}"
        )
        if system == "skyrl":
            # What follows from the sizes, and what to change when memory or time runs
            # out.
            prompts, mini, micro, responses, num_devices = row.sizes
            steps = prompts // mini
            samples = mini * responses
            smaller = (
                f"then a smaller micro_train_batch_size_per_gpu than {micro}"
                if micro > 1
                else "then more devices"
            )
            notes += [
                (
                    f"{prompts:,} prompts * {responses} = {prompts * responses:,}"
                    f" samples; {steps} optimizer steps of {samples:,}; {num_devices}"
                    f" replicas * {samples // num_devices // micro} passes of {micro}:"
                    " both batch sizes count prompts"
                ),
                (
                    "out of memory: first trainer.gradient_checkpointing=true,"
                    f" {smaller}; policy_mini_batch_size does not change the memory of"
                    " a pass"
                ),
                (
                    f"slow: fewer responses (n_samples_per_prompt={responses // 2}"
                    " halves generation and training), or larger mini batches"
                    f" (policy_mini_batch_size={2 * mini} makes {steps // 2} optimizer"
                    f" steps of {2 * samples:,})"
                ),
            ]
        else:
            text = (
                "the larger the model, the smaller batch_size; all sizes are per"
                " process"
            )
            notes.append(f"rule of thumb behind the table: {text}")
        if not row.smallest <= number <= row.largest:
            side = "larger" if number > row.largest else "smaller"
            notes.append(
                f"the model is {side} than those the row is published for"
                f" ({row.label}), so these sizes are a guess"
            )
        if used is not None and any(
            size not in (None, used[name]) for name, size in sizes.items()
        ):
            notes.append(
                "the repository does not use the published sizes; if they differ,"
                " prefer those of the repository"
            )
    memory = None
    if device_bytes is not None:
        # The fewest devices hold the state, sharded over all of them, without anything
        # else in memory; activations and the generator have what is left on each.
        state = number * (sum(STATE_BYTES.values()) + REFERENCE_BYTES)
        least_devices = -(-state // device_bytes)
        memory = {
            "bytes_per_parameter": STATE_BYTES | {"reference weights": REFERENCE_BYTES},
            "state_gib": float(Fraction(state, GIB)),
            "device_gib": plain_number(Fraction(device_bytes, GIB)),
            "least_devices": least_devices,
            "free_gib_per_device": float(
                Fraction(device_bytes - -(-state // least_devices), GIB)
            ),
        }
        text = (
            f"rule of thumb: {sum(STATE_BYTES.values())} bytes per parameter for"
            f" mixed-precision Adam and {REFERENCE_BYTES} "
        )
        text += (
            "for a reference policy, shared by all devices; frozen layers or a"
            " generator on its own devices change it"
        )
        notes.append(text)
    label = None if row is None else row.label
    found: dict[str, Any] = {
        "published_for": label,
        "published": sizes,
        "repository": used,
        "memory": memory,
    }
    return Suggestion(
        system=system, params=number, **found, notes=[*notes, *TRADE_OFFS]
    )
