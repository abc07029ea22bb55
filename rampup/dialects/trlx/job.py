"""What trlX computes from its configuration before it trains. Its words: sizes count samples of one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rampup.dialects.reading import Entry, Settings, entry

TRAIN, MICRO = "train.batch_size", "train.minibatch_size"
ROLLOUTS, CHUNK, INNER = "method.num_rollouts", "method.chunk_size", "method.ppo_epochs"
# NeMo's own file, or the mapping that stands in its place under train.trainer_kwargs.megatron_cfg.
NEMO_KEYS = {
    "num_nodes": "trainer.num_nodes",
    "devices": "trainer.devices",
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
}
NEMO_INSIDE = {name: f"train.trainer_kwargs.megatron_cfg.{key}" for name, key in NEMO_KEYS.items()}
MAX_LISTED = 10_000
# Defaults of the library's three ready-made configurations: PPO, ILQL, SFT.
BATCH_SIZES: Mapping[str, int] = {"ppo": 32, "ilql": 128, "sft": 8}

ENTRIES: dict[str, Entry] = {
    TRAIN: entry(None, "samples of an optimizer step; 32 for PPO, 128 for ILQL, 8 for SFT", unit="samples", scope="process"),
    MICRO: entry(None, "samples of a pass; null or 0 = all", unit="samples", scope="process"),
    "train.epochs": entry(100, "rounds of collecting and training"),
    "train.total_steps": entry(10_000, "optimizer steps at most", unit="steps"),
    "train.trainer": entry("AcceleratePPOTrainer", "which trainer runs", kind="text"),
    "method.name": entry("PPOConfig", "which method trains", kind="text"),
    ROLLOUTS: entry(128, "samples to collect before training", unit="samples", scope="process"),
    CHUNK: entry(128, "prompts of a generate call", unit="prompts", scope="process"),
    INNER: entry(4, "times that the collected samples are trained on"),
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_KEYS.items()},
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_INSIDE.items()},
    "num_processes": entry(1, "processes; given as num_processes=N"),
    "num_prompts": entry(None, "prompts of the training set, or samples of an offline one", unit="prompts"),
    "deepspeed": entry(False, "whether DeepSpeed runs under Accelerate; given as deepspeed=true", kind="bool"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrlxJob:
    """A trlX file's numbers, by its own formulas (trainer/accelerate_base_trainer.py, trainer/nemo_ppo_trainer.py).

    Attributes:
        settings: the file.
        usable: whether the counts are positive and there is at least one replica (derived).
    """

    settings: Settings
    usable: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "usable", self._is_usable())

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    def _is_usable(self) -> bool:
        counts = (TRAIN, "num_processes", "num_prompts", *((ROLLOUTS, CHUNK, INNER) if self.ppo else ()), *NEMO_KEYS.values())
        return (
            all(self[key] is None or self[key] >= 1 for key in (*counts, *NEMO_INSIDE.values()))
            and self.micro_given >= 0
            and (not self.nemo or (self.replicas >= 1 and self[MICRO] != 0))
        )

    @property
    def nemo(self) -> bool:
        """Whether NeMo trains."""
        return "nemo" in self["train.trainer"].lower() or bool(
            self.settings.given & {*NEMO_KEYS.values(), *NEMO_INSIDE.values()}
        )

    @property
    def method(self) -> str:
        """The method: `ppo`, or `ilql` or `sft`, which train on given samples."""
        text = (self["method.name"] + self["train.trainer"]).lower()
        return next((name for name in ("ilql", "sft") if name in text), "ppo")

    @property
    def ppo(self) -> bool:
        """Whether samples are collected from the model."""
        return self.method == "ppo"

    @property
    def batch(self) -> int:
        """Samples of an optimizer step and process."""
        given = self[TRAIN]
        return BATCH_SIZES[self.method] if given is None else int(given)

    @property
    def micro_given(self) -> int:
        """The micro size as written; 0 where unset."""
        return int(self[MICRO] or 0)

    @property
    def micro(self) -> int:
        """Samples of a pass and process."""
        return self.micro_given or self.batch

    @property
    def passes(self) -> int:
        """Passes per optimizer step."""
        return self.batch // self.micro

    def nemo_size(self, name: str) -> int:
        """Return one of NeMo's sizes, wherever the file has it."""
        inside, outside = self[NEMO_INSIDE[name]], self[NEMO_KEYS[name]]
        return int(next((size for size in (outside, inside) if size is not None), 1))

    @property
    def replicas(self) -> int:
        """Processes with samples of their own; NeMo rounds down."""
        if not self.nemo:
            return int(self["num_processes"])
        split = max(self.nemo_size("tensor") * self.nemo_size("pipeline"), 1)
        return self.nemo_size("num_nodes") * self.nemo_size("devices") // split

    @property
    def chunk(self) -> int:
        """Prompts of a generate call; NeMo rounds up to whole batches."""
        return -(-self[CHUNK] // self.batch) * self.batch if self.nemo else int(self[CHUNK])

    @property
    def prompts_seen(self) -> int | None:
        """Prompts of one reading of the set that a single process gets, where a short chunk can occur; None otherwise.

        With several processes Accelerate completes the last chunk from the beginning, and NeMo drops it.
        """
        num_prompts = self["num_prompts"]
        return None if num_prompts is None or self.nemo or self.replicas > 1 else int(num_prompts)

    @property
    def collected(self) -> int:
        """Samples that a process collects: whole chunks until there are enough, so usually some more than asked."""
        wanted, chunk, seen = int(self[ROLLOUTS]), self.chunk, self.prompts_seen
        if seen is None:
            return -(-wanted // chunk) * chunk
        rounds, rest = divmod(wanted - 1, seen)
        return rounds * seen + min(-(-(rest + 1) // chunk) * chunk, seen)

    @property
    def num_chunks(self) -> int:
        """Generate calls of a process before it trains."""
        wanted, chunk, seen = int(self[ROLLOUTS]), self.chunk, self.prompts_seen
        if seen is None:
            return -(-wanted // chunk)
        rounds, rest = divmod(wanted - 1, seen)
        return rounds * -(-seen // chunk) + -(-(rest + 1) // chunk)

    def chunk_sizes(self) -> list[int]:
        """Return the prompts of each generate call, in order."""
        seen, sizes = self.prompts_seen, []
        left = seen
        for _ in range(self.num_chunks):
            size = self.chunk if left is None else min(self.chunk, left)
            sizes.append(size)
            if left is not None:
                left = left - size or seen
        return sizes

    @property
    def mini_batches(self) -> int:
        """Optimizer steps of one pass over the collected samples; Accelerate's last is short, NeMo drops it."""
        return self.collected // self.batch if self.nemo else -(-self.collected // self.batch)

    @property
    def last_batch(self) -> int:
        """Samples of the last optimizer step of a pass."""
        return self.batch if self.nemo else self.collected - (self.mini_batches - 1) * self.batch

    @property
    def train_samples(self) -> int:
        """What NeMo believes a round trains on: it counts what is asked for, not what is collected."""
        return int(self.replicas * self[ROLLOUTS] * self[INNER])

    @property
    def planned_steps(self) -> int:
        """Optimizer steps of the run, as trlX plans them."""
        per_round = self.train_samples // (self.batch * self.replicas) if self.nemo else self.mini_batches * self[INNER]
        return int(min(self["train.epochs"] * per_round, self["train.total_steps"]))
