"""SkyRL: its keys. Batch and mini batch count prompts; micro sizes count samples of one data-parallel replica."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rampup.dialects.commands import Launch, Source
from rampup.dialects.hydra import Bases, read_hydra
from rampup.dialects.reading import Entry, Settings, entry

TRAIN, MINI = "trainer.train_batch_size", "trainer.policy_mini_batch_size"
CRITIC_MINI = "trainer.critic_mini_batch_size"
MICRO, FORWARD = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
RESPONSES, WORKERS = "generator.n_samples_per_prompt", "trainer.fully_async.num_parallel_generation_workers"
COLOCATE, COLOCATE_REF = "trainer.placement.colocate_all", "trainer.placement.colocate_policy_ref"
CHECKPOINTING = "trainer.gradient_checkpointing"
MODEL_SIZES = ("tensor_model", "pipeline_model", "context")
_ENGINE_SIZES = ("num_engines", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
ENGINE_KEYS = tuple(f"generator.inference_engine.{name}" for name in _ENGINE_SIZES)
OLD_ENGINE_KEYS = ("generator.num_inference_engines", *(f"generator.inference_engine_{name}" for name in _ENGINE_SIZES[1:]))


def device_keys(model: str) -> tuple[str, str]:
    """Return the keys of a model's devices per node and nodes."""
    return f"trainer.placement.{model}_num_gpus_per_node", f"trainer.placement.{model}_num_nodes"


def megatron_keys(model: str) -> tuple[str, ...]:
    """Return the keys of a model's Megatron sizes, which multiply to the devices that share a sample."""
    return tuple(f"trainer.{model}.megatron_config.{name}_parallel_size" for name in MODEL_SIZES)


KEYS: dict[str, Entry] = {
    TRAIN: entry(1024, "prompts of a training step", unit="prompts", scope="step"),
    MINI: entry(256, "prompts of a policy update", unit="prompts", scope="job"),
    CRITIC_MINI: entry(256, "prompts of a critic update", unit="prompts", scope="job"),
    MICRO: entry(1, "samples of a training pass", unit="samples", scope="replica"),
    FORWARD: entry(1, "samples of a forward-only pass", unit="samples", scope="replica"),
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
    COLOCATE: entry(True, "all models and engines share the devices", kind="bool"),
    COLOCATE_REF: entry(True, "otherwise: policy and reference share their devices", kind="bool"),
    CHECKPOINTING: entry(True, "compute activations again in the backward pass", kind="bool"),
    **{
        key: entry(1, f"{what} of the {model} model", unit=unit)
        for model in ("policy", "critic", "ref")
        for key, what, unit in zip(device_keys(model), ("devices per node", "nodes"), ("devices", "nodes"), strict=True)
    },
    **{f"trainer.{model}.sequence_parallel_size": entry(1, f"devices that share a sequence of the {model} model")
       for model in ("policy", "critic", "ref")},
    **{key: entry(1, f"Megatron size of the {model} model") for model in ("policy", "ref") for key in megatron_keys(model)},
    "trainer.fully_async.enabled": entry(False, "generation and training overlap fully", kind="bool"),
    "trainer.fully_async.max_staleness_steps": entry(4, "steps by which a sample may be old", minimum=0, unit="steps"),
    WORKERS: entry(768, "prompts generated at once", unit="prompts"),
    RESPONSES: entry(5, "responses per prompt", unit="samples"),
    "generator.eval_n_samples_per_prompt": entry(1, "responses per evaluation prompt", unit="samples"),
    **{name: entry(1, "size of the inference engines") for name in ENGINE_KEYS},
    **{name: entry(None, "old name of an engine size") for name in OLD_ENGINE_KEYS},
    "num_prompts": entry(None, "prompts of the data set; given as num_prompts=N", unit="prompts"),
}  # fmt: skip
LAUNCH = Launch(
    system="SkyRL",
    program=re.compile(
        r"\bskyrl[\w.]*\.main\w*|\bmain_(?:base|sft|dapo|fully_async|async)\w*|trainer\.policy_mini_batch_size="
    ),
    others=re.compile(r"main_(?:generate|gen)\b|tinker|entrypoints\.serve"),
    example="python -m skyrl.train.entrypoints.main_base key=value",
    known=KEYS.__contains__,
)
# Until March 2026 SkyRL had a YAML file; its sizes are those of the dataclasses.
BASES: Bases = {name: {} for name in ("ppo_base_config", "skyrl_gym_config/default")}


def read(source: Source, overrides: Sequence[str]) -> Settings:
    """Read a YAML file, a script or a command of SkyRL."""
    groups = ("data", "environment", "hydra", "terminal_bench_config", "harbor_trial_config")
    return read_hydra(source, overrides, LAUNCH, KEYS, bases=BASES, version="August 2026", groups=groups)
