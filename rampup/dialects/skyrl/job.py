"""What SkyRL computes from its configuration before it trains: sizes, replicas, padding. Its words: sizes count prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rampup.dialects.reading import Entry, Settings, entry

_PLACES = {
    f"trainer.placement.{role}_{name}": entry(1, f"{what} of the {role} model", unit=unit)
    for role in ("policy", "critic", "ref")
    for name, what, unit in (("num_nodes", "nodes", "nodes"), ("num_gpus_per_node", "devices per node", "devices"))
}
_MEGATRON = {
    f"trainer.{role}.megatron_config.{name}_parallel_size": entry(1, f"{name} parallel size of the {role} model")
    for role in ("policy", "ref")
    for name in ("tensor_model", "pipeline_model", "context")
}
_ENGINE_SIZES = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
ENGINE_KEYS = tuple(f"generator.inference_engine.{name}" for name in _ENGINE_SIZES)
OLD_ENGINE_KEYS = ("generator.num_inference_engines", *(f"generator.inference_engine_{name}" for name in _ENGINE_SIZES[1:]))
MODEL_SIZES = ("tensor_model", "pipeline_model", "context")

ENTRIES: dict[str, Entry] = {
    "trainer.train_batch_size": entry(1024, "prompts of a training step", unit="prompts", scope="step"),
    "trainer.policy_mini_batch_size": entry(256, "prompts of a policy update", unit="prompts", scope="job"),
    "trainer.critic_mini_batch_size": entry(256, "prompts of a critic update", unit="prompts", scope="job"),
    "trainer.micro_train_batch_size_per_gpu": entry(1, "samples of a training pass", unit="samples", scope="replica"),
    "trainer.micro_forward_batch_size_per_gpu": entry(1, "samples of a forward-only pass", unit="samples", scope="replica"),
    "trainer.max_tokens_per_microbatch": entry(-1, "token budget of a pass; -1 = count samples", unit="tokens"),
    "trainer.update_epochs_per_batch": entry(1, "times that a step's samples are trained on"),
    "trainer.epochs": entry(1, "times that the data set is read"),
    "trainer.eval_batch_size": entry(1024, "prompts of an evaluation batch", unit="prompts"),
    "trainer.strategy": entry("fsdp", "backend of training", kind="text", choices=("fsdp", "fsdp2", "megatron")),
    "trainer.critic.model.path": entry(None, "the critic; null = none", kind="text"),
    "trainer.use_sample_packing": entry(None, "old name of remove_microbatch_padding", kind="bool"),
    "trainer.algorithm.advantage_estimator": entry("grpo", "how advantages are estimated", kind="text"),
    "trainer.algorithm.use_kl_loss": entry(True, "a reference model in the loss", kind="bool"),
    "trainer.algorithm.use_kl_in_reward": entry(False, "a reference model in the reward", kind="bool"),
    "trainer.algorithm.loss_reduction": entry("token_mean", "how losses are averaged", kind="text"),
    "trainer.placement.colocate_all": entry(True, "all models and engines share the devices", kind="bool"),
    **_PLACES,
    **{f"trainer.{role}.sequence_parallel_size": entry(1, f"devices that share a sequence of the {role} model")
       for role in ("policy", "critic", "ref")},
    **_MEGATRON,
    "trainer.fully_async.enabled": entry(False, "generation and training overlap fully", kind="bool"),
    "trainer.fully_async.max_staleness_steps": entry(4, "steps by which a sample may be old", minimum=0, unit="steps"),
    "trainer.fully_async.num_parallel_generation_workers": entry(768, "prompts generated at once", unit="prompts"),
    "generator.n_samples_per_prompt": entry(5, "responses per prompt", unit="samples"),
    "generator.eval_n_samples_per_prompt": entry(1, "responses per evaluation prompt", unit="samples"),
    **{name: entry(1, "size of the inference engines") for name in ENGINE_KEYS},
    **{name: entry(None, "old name of an engine size") for name in OLD_ENGINE_KEYS},
    "num_prompts": entry(None, "prompts of the data set; given as num_prompts=N", unit="prompts"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Role:
    """The policy's or the critic's numbers.

    Attributes:
        name: `policy` or `critic`.
        mini: prompts of an update.
        data_parallel_size: replicas.
        samples_per_prompt: responses per prompt.
        micro: samples of a pass.
    """

    name: str
    mini: int
    data_parallel_size: int
    samples_per_prompt: int
    micro: int

    @property
    def mini_samples(self) -> int:
        """Samples of an update, whole job."""
        return self.mini * self.samples_per_prompt

    @property
    def checked_per_replica(self) -> int:
        """Samples of an update and replica, rounded down, as SkyRL's check has it."""
        return self.mini_samples // self.data_parallel_size

    @property
    def padding(self) -> int:
        """Empty samples that the run adds to each mini batch (distributed/dispatch.py)."""
        return -self.mini_samples % self.data_parallel_size

    @property
    def per_replica(self) -> int:
        """Samples of an update and replica in the run."""
        return (self.mini_samples + self.padding) // self.data_parallel_size

    @property
    def passes(self) -> int:
        """Forward and backward passes per update and replica; the last may be smaller."""
        return -(-self.per_replica // self.micro)


@dataclass(frozen=True, slots=True)
class SkyRLJob:
    """A SkyRL file's numbers, by SkyRL's own formulas (train/utils/utils.py, train/trainer.py).

    Attributes:
        settings: the file.
        usable: whether all counts are positive and every model has at least one replica (derived).
    """

    settings: Settings
    usable: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "usable", self._is_usable())

    def _is_usable(self) -> bool:
        counts = (*COUNTS, *([] if not self.has_critic else CRITIC_COUNTS), *(REF_COUNTS if self.has_ref else []))
        if not all(self.settings[name] >= 1 for name in counts):
            return False
        return 0 not in self.data_parallel_sizes and not any(self.splits_badly(role) for role in self.roles)

    @property
    def prompts(self) -> int:
        """Prompts of a training step."""
        return int(self.settings["trainer.train_batch_size"])

    @property
    def samples_per_prompt(self) -> int:
        """Responses per prompt."""
        return int(self.settings["generator.n_samples_per_prompt"])

    @property
    def samples(self) -> int:
        """Responses of a training step."""
        return self.prompts * self.samples_per_prompt

    @property
    def epochs(self) -> int:
        """Passes over a step's samples."""
        return int(self.settings["trainer.update_epochs_per_batch"])

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains."""
        return bool(self.settings["trainer.strategy"] == "megatron")

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.settings["trainer.critic.model.path"] is not None

    @property
    def has_ref(self) -> bool:
        """Whether there is a reference model."""
        return bool(self.settings["trainer.algorithm.use_kl_loss"] or self.settings["trainer.algorithm.use_kl_in_reward"])

    def devices(self, role: str) -> int:
        """Return the devices of a model."""
        place = f"trainer.placement.{role}_num"
        return int(self.settings[f"{place}_nodes"] * self.settings[f"{place}_gpus_per_node"])

    def model_size(self, role: str) -> int:
        """Return how many devices share one sample; the critic is never split by Megatron's sizes."""
        if self.megatron and role != "critic":
            return math.prod(self.settings[f"trainer.{role}.megatron_config.{name}_parallel_size"] for name in MODEL_SIZES)
        return int(self.settings[f"trainer.{role}.sequence_parallel_size"])

    def data_parallel_size(self, role: str) -> int:
        """Return a model's replicas, rounded down; 0 where it has too few devices."""
        return self.devices(role) // max(self.model_size(role), 1)

    def splits_badly(self, role: str) -> bool:
        """Return whether Megatron's sizes do not divide a model's devices; the critic never has them."""
        return self.megatron and role != "critic" and self.devices(role) % max(self.model_size(role), 1) != 0

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that take part."""
        return ("policy", *(["critic"] if self.has_critic else []), *(["ref"] if self.has_ref else []))

    @property
    def data_parallel_sizes(self) -> tuple[int, ...]:
        """Replicas of every model that takes part."""
        return tuple(self.data_parallel_size(role) for role in self.roles)

    @property
    def lcm_checked(self) -> int:
        """The common multiple of replicas that SkyRL's check looks at: policy and reference."""
        sizes = [self.data_parallel_size("policy"), *([self.data_parallel_size("ref")] if self.has_ref else [])]
        return math.lcm(*sizes)

    @property
    def prompt_stride(self) -> int:
        """What the number of prompts must be a multiple of for every replica of every model to get whole samples."""
        common = math.lcm(*self.data_parallel_sizes)
        return common // math.gcd(common, self.samples_per_prompt)

    def role(self, name: str) -> Role:
        """Return the policy's or the critic's numbers."""
        return Role(
            name=name,
            mini=self.settings[f"trainer.{name}_mini_batch_size"],
            data_parallel_size=self.data_parallel_size(name),
            samples_per_prompt=self.samples_per_prompt,
            micro=self.settings["trainer.micro_train_batch_size_per_gpu"],
        )

    @property
    def by_tokens(self) -> bool:
        """Whether passes are filled by a token budget, so that their number depends on lengths."""
        return bool(self.settings["trainer.max_tokens_per_microbatch"] > 0)

    @property
    def engine_devices(self) -> int | None:
        """Devices of the inference engines; None where the file does not say."""
        if not self.settings.given & {*ENGINE_KEYS, *OLD_ENGINE_KEYS}:
            return None
        pairs = zip(ENGINE_KEYS, OLD_ENGINE_KEYS, strict=True)
        sizes = [self.settings[new] if self.settings[old] is None else self.settings[old] for new, old in pairs]
        return math.prod(map(int, sizes))


COUNTS = (
    "trainer.train_batch_size",
    "trainer.policy_mini_batch_size",
    "trainer.micro_train_batch_size_per_gpu",
    "trainer.micro_forward_batch_size_per_gpu",
    "generator.n_samples_per_prompt",
    "trainer.placement.policy_num_nodes",
    "trainer.placement.policy_num_gpus_per_node",
    "trainer.policy.sequence_parallel_size",
    *(name for name in _MEGATRON if ".policy." in name),
)
CRITIC_COUNTS = (
    "trainer.critic_mini_batch_size",
    "trainer.placement.critic_num_nodes",
    "trainer.placement.critic_num_gpus_per_node",
    "trainer.critic.sequence_parallel_size",
)
REF_COUNTS = (
    "trainer.placement.ref_num_nodes",
    "trainer.placement.ref_num_gpus_per_node",
    "trainer.ref.sequence_parallel_size",
    *(name for name in _MEGATRON if ".ref." in name),
)
