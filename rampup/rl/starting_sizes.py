"""Starting sizes for reinforcement learning by model size: published values, values used in practice, and memory."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from typing import Any

from rampup.errors import ConfigError, RampupError, choice_error, raise_together
from rampup.plan.numbers import GIB, MAX_COUNT, parse_count, parse_memory_gib, plain_number

SYSTEMS = ("trlx", "skyrl", "verl", "maxtext_rl")
# Mixed-precision Adam: bfloat16 weights and gradients, float32 weights and both moments.
STATE_BYTES = {"weights": 2, "gradients": 2, "float32 weights": 4, "Adam moments": 8}
# A frozen reference policy: bfloat16 weights.
REFERENCE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingSizes:
    """Sizes for one model size, by trlX's keys. All are per process."""

    batch_size: int  # samples per optimizer step
    num_rollouts: int  # samples collected before training on them
    chunk_size: int  # prompts per call of the generator
    # Passes over the collected samples. None if the source does not have it (trlX's default is 4).
    ppo_epochs: int | None = None

    def to_dict(self) -> dict[str, int | None]:
        """Return the sizes by key."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyRLSizes:
    """Sizes for one model size, by SkyRL's keys, and the devices that they are for."""

    train_batch_size: int  # prompts per training step
    policy_mini_batch_size: int  # prompts per optimizer step
    micro_train_batch_size_per_gpu: int  # samples per replica and pass
    n_samples_per_prompt: int  # responses per prompt
    num_devices: int

    def to_dict(self) -> dict[str, int | None]:
        """Return the sizes by key."""
        return asdict(self)

    @property
    def notes(self) -> list[str]:
        """What follows from the sizes, and what to change when memory or time runs out."""
        prompts, responses, micro = self.train_batch_size, self.n_samples_per_prompt, self.micro_train_batch_size_per_gpu
        steps, samples = prompts // self.policy_mini_batch_size, self.policy_mini_batch_size * responses
        passes = samples // self.num_devices // micro
        smaller = f"then a smaller micro_train_batch_size_per_gpu than {micro}" if micro > 1 else "then more devices"
        return [
            f"{prompts:,} prompts * {responses} = {prompts * responses:,} samples; {steps} optimizer steps of {samples:,}; "
            f"{self.num_devices} replicas * {passes} passes of {micro}: both batch sizes count prompts",
            f"out of memory: first trainer.gradient_checkpointing=true, {smaller}; policy_mini_batch_size does not change the "
            "memory of a pass",
            f"slow: fewer responses (n_samples_per_prompt={responses // 2} halves generation and training), or larger mini "
            f"batches (policy_mini_batch_size={2 * self.policy_mini_batch_size} makes {steps // 2} optimizer steps of "
            f"{2 * samples:,})",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSizes:
    """A row of a published table."""

    label: str  # the model sizes as published
    # The range of model sizes in parameters
    smallest: int
    largest: int
    published: StartingSizes | SkyRLSizes  # the sizes in the table
    used: dict[int, StartingSizes]  # the sizes in the repository's own example, by parameters; empty without one


M, B = 10**6, 10**9


def _skyrl_row(label: str, smallest: int, largest: int, *sizes: int) -> PublishedSizes:
    names = [field.name for field in fields(SkyRLSizes)]
    published = SkyRLSizes(**dict(zip(names, sizes, strict=True)))
    return PublishedSizes(label=label, smallest=smallest, largest=largest, published=published, used={})


def _row(
    label: str, smallest: int, largest: int, published: tuple[int, ...], used: dict[int, tuple[int, ...]]
) -> PublishedSizes:
    names = [field.name for field in fields(StartingSizes)]
    sizes = {params: StartingSizes(**dict(zip(names, row, strict=False))) for params, row in ({0: published} | used).items()}
    return PublishedSizes(label=label, smallest=smallest, largest=largest, published=sizes.pop(0), used=sizes)


# batch_size, num_rollouts, chunk_size and ppo_epochs. Published: a community guide to trlX. Used: trlX 3340c2f,
# examples/hh/ppo_hh.py, lines 71-106.
TRLX = (
    _row("125M-1B", 125 * M, B, (32, 128, 128), {125 * M: (32, 128, 16, 4), B: (8, 64, 16, 4)}),
    _row("6B", 6 * B, 6 * B, (4, 128, 16), {6 * B: (4, 64, 16, 4)}),
    _row("20B", 20 * B, 20 * B, (1, 16, 4, 2), {20 * B: (1, 16, 4, 2)}),
)
# Published: a community guide to SkyRL.
SKYRL = (
    _skyrl_row("0.5B-3B", B // 2, 3 * B, 512, 128, 2, 8, 4),
    _skyrl_row("7B-14B", 7 * B, 14 * B, 256, 64, 1, 8, 8),
    _skyrl_row("70B+", 70 * B, MAX_COUNT, 128, 32, 1, 4, 16),
)
TABLES = {"trlx": TRLX, "skyrl": SKYRL}
TRADE_OFFS = (
    "a smaller batch needs less memory, but its gradient is noisier, so the learning rate may have to be lower",
    "fewer rollouts before training need less memory and keep samples closer to the policy, but are less diverse experience",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of a model's training state, by a rule of thumb."""

    params: int  # parameters of the policy
    device_bytes: int  # memory of one device

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and Adam's state of the policy, and of a frozen reference policy."""
        return self.params * (sum(STATE_BYTES.values()) + REFERENCE_BYTES)

    @property
    def least_devices(self) -> int:
        """The minimum number of devices for the state, sharded over all of them, without anything else in memory."""
        return -(-self.state_bytes // self.device_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes left on each of these devices for activations and the generator."""
        return self.device_bytes - -(-self.state_bytes // self.least_devices)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as in `rampup suggest --json`."""
        return {
            "bytes_per_parameter": STATE_BYTES | {"reference weights": REFERENCE_BYTES},
            "state_gib": float(Fraction(self.state_bytes, GIB)),
            "device_gib": plain_number(Fraction(self.device_bytes, GIB)),
            "least_devices": self.least_devices,
            "free_gib_per_device": float(Fraction(self.free_bytes, GIB)),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Starting sizes for one model."""

    system: str  # the system whose keys the sizes have
    params: int  # the model's parameters
    row: PublishedSizes | None  # the published row that applies. None if the system has no published table.
    used: StartingSizes | None  # the repository's sizes at the nearest model size of that row. None without a row.
    memory: Memory | None  # the rule of thumb for memory. None if the memory of a device was not given.

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the origin and the limits of these numbers."""
        notes = ["a starting point only: `rampup tune` finds the largest microbatch that fits"]
        if self.row is None:
            notes.append(
                f"no table of starting sizes is published for {self.system}; start with one sample per replica and pass, reach "
                "the batch size by accumulation, and use the remaining memory for more samples per pass"
            )
        else:
            notes += self._row_notes(self.row)
        if self.memory is not None:
            notes.append(
                f"rule of thumb: {sum(STATE_BYTES.values())} bytes per parameter for mixed-precision Adam and "
                f"{REFERENCE_BYTES} for a reference policy, shared by all devices; frozen layers or a generator on "
                "its own devices change it"
            )
        return (*notes, *TRADE_OFFS)

    def _row_notes(self, row: PublishedSizes) -> list[str]:
        notes = [f"the table is from a community guide, not from the project {self.system}"]
        if isinstance(row.published, SkyRLSizes):
            notes += row.published.notes
        else:
            notes.append(
                "rule of thumb behind the table: the larger the model, the smaller batch_size; all sizes are per process"
            )
        if not row.smallest <= self.params <= row.largest:
            side = "larger" if self.params > row.largest else "smaller"
            notes.append(f"the model is {side} than those the row is published for ({row.label}), so these sizes are a guess")
        given = {name: size for name, size in row.published.to_dict().items() if size is not None}
        if self.used is not None and not given.items() <= self.used.to_dict().items():
            notes.append("the repository does not use the published sizes; if they differ, prefer those of the repository")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return the suggestion as `rampup suggest --json` prints it."""
        return {
            "system": self.system,
            "params": self.params,
            "published_for": None if self.row is None else self.row.label,
            "published": None if self.row is None else self.row.published.to_dict(),
            "repository": None if self.used is None else self.used.to_dict(),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "notes": list(self.notes),
        }


def suggest(params: str | int, *, system: str, memory_gib: str | float | None = None) -> Suggestion:
    """Return starting sizes for a model.

    Args:
        params: parameters, such as `"6B"`.
        system: one of `SYSTEMS`.
        memory_gib: memory of one device in GiB, for the rule of thumb. Required for systems without a published table.

    Returns:
        The published row for this model size. Between two rows, the row of the larger models, which needs less memory.

    Raises:
        RampDefinitionError: If `params` is not a whole number, or `memory_gib` is not a number.
        ConfigError: If `params` or `memory_gib` is out of range, the system is unknown, or it has no table and no memory is
            given.

    Example:
        >>> suggest("6B", system="trlx").row.published
        StartingSizes(batch_size=4, num_rollouts=128, chunk_size=16, ppo_epochs=None)
        >>> suggest("7B", system="skyrl").row.published.to_dict()["train_batch_size"]
        256
        >>> suggest("7B", system="verl", memory_gib=80).memory.least_devices
        2
    """
    problems: list[RampupError] = []
    if system not in SYSTEMS:
        problems.append(choice_error("system", system, SYSTEMS))
    number, device_bytes = 0, None
    try:
        number = parse_count(params, what="params", key="params")
        if number < 1:
            problems.append(ConfigError(f"params={params} must be at least 1", key="params", nearest=(1,)))
    except RampupError as error:
        problems.append(error)
    try:
        device_bytes = None if memory_gib is None else parse_memory_gib(memory_gib)
    except RampupError as error:
        problems.append(error)
    raise_together(problems)
    if system not in TABLES and device_bytes is None:
        raise ConfigError(
            f"no table of starting sizes is published for {system}, only for {', '.join(TABLES)}; set memory-gib, the memory "
            "of a device, for a rule of thumb",
            key="memory-gib",
        )
    table = TABLES.get(system, ())
    row = next((row for row in table if number <= row.largest), table[-1]) if table else None
    return Suggestion(
        system=system,
        params=number,
        row=row,
        used=None if row is None or not row.used else row.used[min(row.used, key=lambda size: abs(math.log(size / number)))],
        memory=None if device_bytes is None else Memory(params=number, device_bytes=device_bytes),
    )
