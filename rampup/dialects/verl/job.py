"""What veRL computes from its configuration before it trains: sizes, replicas, padding. Its words: sizes count prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from rampup.dialects.reading import Entry, Settings, entry

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
TRAIN, RESPONSES = "data.train_batch_size", f"{ROLLOUT}.n"
MEGATRON_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni")
MODES = ("sync", "colocate_async", "separate_async")
# Names that people write because examples use them as shell variables.
SHELL_NAMES = {
    "data.train_prompt_bsz": TRAIN,
    "infer_ppo_max_token_len": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.infer_ppo_max_token_len": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
}


def _log_prob(role: str) -> dict[str, Entry]:
    return {
        f"{role}.log_prob_micro_batch_size": entry(None, "deprecated: samples, whole job", unit="samples", scope="job"),
        f"{role}.log_prob_micro_batch_size_per_gpu": entry(
            None, "samples of a log-probability pass", unit="samples", scope="replica"
        ),
        f"{role}.log_prob_use_dynamic_bsz": entry(None, "fill these passes by tokens; null = as the actor", kind="bool"),
        f"{role}.log_prob_max_token_len_per_gpu": entry(None, "their token budget; null = as the actor", unit="tokens"),
    }


def _megatron(role: str, default: int | None) -> dict[str, Entry]:
    return {f"{role}.megatron.{name}": entry(default, f"Megatron's {name}") for name in MEGATRON_SIZES}


ENTRIES: dict[str, Entry] = {
    TRAIN: entry(1024, "prompts of a training step", unit="prompts", scope="step"),
    "data.gen_batch_size": entry(None, "prompts that the data loader gives at once", unit="prompts"),
    "data.val_batch_size": entry(None, "deprecated: prompts of a validation batch", unit="prompts"),
    "data.max_prompt_length": entry(512, "longest prompt", unit="tokens"),
    "data.max_response_length": entry(512, "longest response", unit="tokens"),
    RESPONSES: entry(1, "responses per prompt", unit="samples"),
    f"{ACTOR}.strategy": entry("fsdp", "backend of training", kind="text", choices=STRATEGIES),
    f"{ACTOR}.ppo_mini_batch_size": entry(256, "prompts of an actor update", unit="prompts", scope="job"),
    f"{ACTOR}.ppo_micro_batch_size": entry(None, "deprecated: samples of a pass, whole job", unit="samples", scope="job"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": entry(None, "samples of a training pass", unit="samples", scope="replica"),
    f"{ACTOR}.use_dynamic_bsz": entry(False, "fill passes by tokens", kind="bool"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": entry(16384, "token budget of a training pass", unit="tokens"),
    f"{ACTOR}.ppo_epochs": entry(1, "times that a step's samples are trained on"),
    f"{ACTOR}.use_kl_loss": entry(False, "a reference policy in the loss", kind="bool"),
    f"{ACTOR}.ulysses_sequence_parallel_size": entry(1, "deprecated: devices that share a sequence"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    f"{ACTOR}.veomni.ulysses_parallel_size": entry(1, "devices that share a sequence"),
    **_megatron(ACTOR, 1),
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": entry(None, "layer chunks per pipeline stage"),
    "actor_rollout_ref.model.use_remove_padding": entry(True, "pack sequences without padding", kind="bool"),
    **_log_prob(ROLLOUT),
    **_log_prob(REF),
    f"{REF}.ulysses_sequence_parallel_size": entry(None, "deprecated: devices that share a sequence"),
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    f"{REF}.veomni.ulysses_parallel_size": entry(None, "devices that share a sequence; null = as the actor"),
    **_megatron(REF, None),
    f"{ROLLOUT}.tensor_model_parallel_size": entry(2, "devices of an inference engine"),
    f"{ROLLOUT}.data_parallel_size": entry(1, "data-parallel size of an inference engine"),
    f"{ROLLOUT}.pipeline_model_parallel_size": entry(1, "pipeline stages of an inference engine"),
    f"{ROLLOUT}.agent.num_workers": entry(8, "processes that generate"),
    "critic.enable": entry(None, "whether there is a critic; null = for gae", kind="bool"),
    "critic.strategy": entry(None, "backend of the critic; null = as the actor", kind="text", choices=STRATEGIES),
    "critic.ppo_mini_batch_size": entry(None, "prompts of a critic update; null = as the actor", unit="prompts"),
    "critic.ppo_micro_batch_size": entry(None, "deprecated: samples of a critic pass", unit="samples"),
    "critic.ppo_micro_batch_size_per_gpu": entry(None, "samples of a critic pass", unit="samples", scope="replica"),
    "critic.use_dynamic_bsz": entry(None, "fill the critic's passes by tokens; null = as the actor", kind="bool"),
    "critic.ppo_max_token_len_per_gpu": entry(32768, "token budget of a critic pass", unit="tokens"),
    "critic.ppo_epochs": entry(None, "as the actor's; null = the same"),
    "critic.ulysses_sequence_parallel_size": entry(1, "deprecated: read by the check alone"),
    "critic.fsdp.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    "critic.veomni.ulysses_parallel_size": entry(1, "devices that share a sequence"),
    **_megatron("critic", 1),
    "algorithm.adv_estimator": entry("gae", "how advantages are estimated", kind="text"),
    "algorithm.use_kl_in_reward": entry(False, "a reference policy in the reward", kind="bool"),
    "trainer.n_gpus_per_node": entry(8, "devices per node", unit="devices"),
    "trainer.nnodes": entry(1, "nodes", unit="nodes"),
    "trainer.balance_batch": entry(True, "give each replica samples of like total length", kind="bool"),
    "trainer.total_epochs": entry(30, "times that the data set is read"),
    "trainer.use_v1": entry(True, "the newer trainer, which pads", kind="bool"),
    "trainer.v1.trainer_mode": entry("sync", "how generation and training overlap", kind="text", choices=MODES),
    **{f"trainer.v1.{mode}.parameter_sync_step": entry(4 if mode == "separate_async" else 1, "parts of a step")
       for mode in MODES},
    "verl_version": entry("head", "head, or legacy: rules until April 2026", kind="text", choices=("head", "legacy")),
    "num_prompts": entry(None, "prompts of the data set; given as num_prompts=N", unit="prompts"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Role:
    """The actor's or the critic's numbers.

    Attributes:
        name: `actor` or `critic`.
        key: the key of its mini batch.
        mini: prompts of an update.
        samples_per_prompt: responses per prompt.
        data_parallel_size: replicas.
        epochs: passes over a step's samples.
    """

    name: str
    key: str
    mini: int
    samples_per_prompt: int
    data_parallel_size: int
    epochs: int

    @property
    def mini_samples(self) -> int:
        """Samples of an update, whole job."""
        return self.mini * self.samples_per_prompt

    @property
    def per_replica(self) -> int:
        """Samples of an update and replica, rounded down."""
        return self.mini_samples // self.data_parallel_size


@dataclass(frozen=True, slots=True)
class VerlJob:
    """A veRL file's numbers, by veRL's own formulas (trainer/ppo, workers/engine_workers.py).

    Attributes:
        settings: the file.
        usable: whether all counts are positive and every model has a replica (derived).
    """

    settings: Settings
    usable: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "usable", self._is_usable())

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    def either(self, key: str, other: Any) -> Any:
        """Return a key's value, or another one where it is unset."""
        return other if self[key] is None else self[key]

    def _is_usable(self) -> bool:
        counts = (*COUNTS, *(() if self.dynamic else STATIC_COUNTS), *(CRITIC_COUNTS if self.has_critic else ()))
        return all(self[key] is None or self[key] >= 1 for key in counts) and all(
            self.data_parallel_size(role) >= 1 for role in self.models
        )

    @property
    def models(self) -> tuple[str, ...]:
        """The trained and reference models that take part."""
        return ("actor", *(["critic"] if self.has_critic else []), *(["ref"] if self.has_ref else []))

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return bool(self.either("critic.enable", self["algorithm.adv_estimator"] == "gae"))

    @property
    def has_ref(self) -> bool:
        """Whether there is a reference policy."""
        return bool(self["algorithm.use_kl_in_reward"] or self[f"{ACTOR}.use_kl_loss"])

    @property
    def legacy(self) -> bool:
        """Whether the rules until April 2026 apply: sizes per replica rounded down, remainders allowed."""
        return bool(self["verl_version"] == "legacy")

    @property
    def v1(self) -> bool:
        """Whether the newer trainer runs, which pads."""
        return bool(self["trainer.use_v1"]) and not self.legacy

    @property
    def mode(self) -> str:
        """How generation and training overlap; only the newer trainer has a choice."""
        return str(self["trainer.v1.trainer_mode"]) if self.v1 else "sync"

    @property
    def sync_step(self) -> int:
        """Parts in which a step's samples are trained on before the weights are sent."""
        return int(self[f"trainer.v1.{self.mode}.parameter_sync_step"]) if self.v1 else 1

    @property
    def dynamic(self) -> bool:
        """Whether the actor's passes are filled by tokens."""
        return bool(self[f"{ACTOR}.use_dynamic_bsz"])

    def log_prob_dynamic(self, role: str) -> bool:
        """Return whether the log-probability passes of the rollout or the reference are filled by tokens."""
        return bool(self.either(f"{role}.log_prob_use_dynamic_bsz", self.dynamic))

    @property
    def critic_dynamic(self) -> bool:
        """Whether the critic's keys ask for a token budget; its engine uses one in any case."""
        return bool(self.either("critic.use_dynamic_bsz", self.dynamic))

    @property
    def critic_micro_per_gpu(self) -> int | None:
        """The critic's micro size; its default is the deprecated key."""
        key = "critic.ppo_micro_batch_size_per_gpu"
        value = self[key] if key in self.settings.given else self["critic.ppo_micro_batch_size"]
        return None if value is None else int(value)

    @property
    def devices(self) -> int:
        """Devices of the training job."""
        return int(self["trainer.n_gpus_per_node"] * self["trainer.nnodes"])

    def strategy(self, role: str) -> str:
        """Return a model's backend."""
        actor = self[f"{ACTOR}.strategy"]
        return str(self.either("critic.strategy", actor) if role == "critic" else actor)

    def model_size(self, role: str) -> int:
        """Return how many devices share one sample."""
        prefix = {"actor": ACTOR, "ref": REF, "critic": "critic"}[role]
        strategy = self.strategy(role)
        if strategy == "megatron":
            return math.prod(int(self.either(f"{prefix}.megatron.{n}", self[f"{ACTOR}.megatron.{n}"])) for n in MEGATRON_SIZES)
        if strategy == "veomni":
            key = "veomni.ulysses_parallel_size"
            return int(self.either(f"{prefix}.{key}", self[f"{ACTOR}.{key}"]))
        if role == "critic":
            return int(self["critic.fsdp.ulysses_sequence_parallel_size"])
        old = self[f"{ACTOR}.ulysses_sequence_parallel_size"]
        if role == "ref":
            old = self.either(f"{REF}.ulysses_sequence_parallel_size", old)
        return int(old if old > 1 else self[f"{prefix}.fsdp_config.ulysses_sequence_parallel_size"])

    def data_parallel_size(self, role: str) -> int:
        """Return a model's replicas, rounded down; 0 where it has too few devices."""
        return self.devices // max(self.model_size(role), 1)

    @property
    def samples_per_prompt(self) -> int:
        """Responses per prompt."""
        return int(self[RESPONSES])

    @property
    def prompts(self) -> int:
        """Prompts of a step: the older trainer's data loader gives gen_batch_size where it is set."""
        return int(self[TRAIN] if self.v1 else self.either("data.gen_batch_size", self[TRAIN]))

    @property
    def samples(self) -> int:
        """Responses of a training step."""
        return self.prompts * self.samples_per_prompt

    def role(self, name: str) -> Role:
        """Return the actor's or the critic's numbers."""
        mini, epochs = self[f"{ACTOR}.ppo_mini_batch_size"], self[f"{ACTOR}.ppo_epochs"]
        key = f"{ACTOR}.ppo_mini_batch_size"
        if name == "critic":
            key = "critic.ppo_mini_batch_size"
            mini, epochs = self.either(key, mini), self.either("critic.ppo_epochs", epochs)
        return Role(
            name=name,
            key=key,
            mini=mini,
            samples_per_prompt=self.samples_per_prompt,
            data_parallel_size=self.data_parallel_size(name),
            epochs=epochs,
        )

    @property
    def required_multiple(self) -> int:
        """What the newer trainer fills each part of a step up to (trainer_base.py)."""
        roles = [self.role("actor"), *([self.role("critic")] if self.has_critic else [])]
        return math.lcm(self.data_parallel_size("actor"), *(role.mini_samples for role in roles))

    @property
    def part_samples(self) -> int:
        """Samples of each part of a step."""
        return self.samples // self.sync_step

    @property
    def filled_part_samples(self) -> int:
        """The same with what the newer trainer adds."""
        multiple = self.required_multiple if self.v1 else 1
        return -(-self.part_samples // multiple) * multiple

    @property
    def padding(self) -> int:
        """Short artificial samples added to a step."""
        return (self.filled_part_samples - self.part_samples) * self.sync_step

    def mini_batches(self, name: str) -> int:
        """Return the updates of a pass over a step's samples; the old code also updates on what is left over."""
        role = self.role(name)
        if self.legacy:
            return -(-(self.samples // role.data_parallel_size) // max(role.per_replica, 1))
        return self.filled_part_samples // role.mini_samples * self.sync_step

    @property
    def micro(self) -> int | None:
        """Samples of a training pass and replica; None for a token budget or where no key that is used says so."""
        old, new = self[f"{ACTOR}.ppo_micro_batch_size"], self[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        if self.dynamic:
            return None
        if new is None and old is not None and self.legacy:
            return int(old // self.data_parallel_size("actor"))
        return None if new is None else int(new)

    @property
    def minimal_batch(self) -> int | None:
        """What the check wants the samples of a step to be a multiple of; None where it cannot be computed."""
        if self.strategy("actor") != "megatron":
            return self.devices
        micro = self[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
        return None if micro is None else int(self.data_parallel_size("actor") * micro)

    @property
    def rollout_size(self) -> int:
        """Devices of one inference engine."""
        return math.prod(int(self[key]) for key in ROLLOUT_SIZES)


ROLLOUT_SIZES = tuple(f"{ROLLOUT}.{name}_parallel_size" for name in ("tensor_model", "data", "pipeline_model"))
COUNTS = (
    TRAIN,
    "data.gen_batch_size",
    RESPONSES,
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    f"{ACTOR}.veomni.ulysses_parallel_size",
    *(f"{role}.megatron.{name}" for role in (ACTOR, REF) for name in MEGATRON_SIZES),
    f"{REF}.ulysses_sequence_parallel_size",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size",
    f"{REF}.veomni.ulysses_parallel_size",
    *ROLLOUT_SIZES,
    f"{ROLLOUT}.agent.num_workers",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    *(f"trainer.v1.{mode}.parameter_sync_step" for mode in MODES),
)
STATIC_COUNTS = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    *(f"{role}.log_prob_micro_batch_size{suffix}" for role in (ROLLOUT, REF) for suffix in ("", "_per_gpu")),
)
CRITIC_COUNTS = (
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_epochs",
    "critic.ulysses_sequence_parallel_size",
    "critic.fsdp.ulysses_sequence_parallel_size",
    "critic.veomni.ulysses_parallel_size",
    *(f"critic.megatron.{name}" for name in MEGATRON_SIZES),
)
