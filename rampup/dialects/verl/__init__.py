"""veRL: its keys. Batch and mini batch count prompts; sizes per gpu count samples of one data-parallel replica."""

from __future__ import annotations

import re

from rampup.dialects.commands import Bases, Launch
from rampup.dialects.hydra import PARENT
from rampup.dialects.reading import Entry, entry

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
TRAIN, RESPONSES = "data.train_batch_size", f"{ROLLOUT}.n"
MINI, MICRO, OLD_MICRO = (f"{ACTOR}.ppo_{name}" for name in ("mini_batch_size", "micro_batch_size_per_gpu", "micro_batch_size"))
BUDGET, EPOCHS, DYNAMIC = f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_epochs", f"{ACTOR}.use_dynamic_bsz"
LOG_PROB, OLD_LOG_PROB = (f"{ROLLOUT}.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size"))
REF_LOG_PROB, OLD_REF_LOG_PROB = (f"{REF}.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size"))
CRITIC_MINI = "critic.ppo_mini_batch_size"
CRITIC_MICRO, OLD_CRITIC_MICRO = "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"
WORKERS = f"{ROLLOUT}.agent.num_workers"
# Devices that share a sequence with FSDP: the key of today and, if there is one, its deprecated name.
SEQUENCE = {
    model: f"{prefix}.ulysses_sequence_parallel_size"
    for model, prefix in {"actor": f"{ACTOR}.fsdp_config", "ref": f"{REF}.fsdp_config", "critic": "critic.fsdp"}.items()
}
OLD_SEQUENCE = {
    model: f"{prefix}.ulysses_sequence_parallel_size"
    for model, prefix in {"actor": ACTOR, "ref": REF, "critic": "critic"}.items()
}
ROLLOUT_SIZES = tuple(f"{ROLLOUT}.{name}_parallel_size" for name in ("tensor_model", "data", "pipeline_model"))
MEGATRON_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
TORCHTITAN_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
TORCHTITAN_REPLICAS = ("data_parallel_shard_size", "data_parallel_replicate_size")
# The sizes that multiply to the devices that share a sample, by backend; with FSDP it is a sequence's.
MODEL_SIZES = {"megatron": MEGATRON_SIZES, "torchtitan": TORCHTITAN_SIZES, "veomni": ("ulysses_parallel_size",)}
STRATEGIES = ("fsdp", "fsdp2", "fsdp_turbo", "megatron", "veomni", "torchtitan")
# The groups of veRL's base files, which decide the backend of all models.
ENGINES = {"dp": "fsdp", "megatron": "megatron", "veomni": "veomni", "torchtitan": "torchtitan"}
GEN, FILTER, REFILL = "data.gen_batch_size", "algorithm.filter_groups.enable", "trainer.v1.sampler.sync_refill_failed_groups"
# Fully asynchronous training, a trainer of its own (experimental/fully_async_policy).
ASYNC = "async_training."
ASYNC_BATCHES, ASYNC_SYNC = f"{ASYNC}require_batches", f"{ASYNC}trigger_parameter_sync_step"
ROLLOUT_DEVICES, ROLLOUT_NODES = "rollout.n_gpus_per_node", "rollout.nnodes"
# The recipe gkd, which distills from a served teacher with a trainer and sizes of its own.
DISTILL_MICRO, DISTILL_BUDGET = f"{ACTOR}.micro_batch_size", f"{ACTOR}.max_token_len"
# Memory, not batches.
CHECKPOINTING, FSDP_SIZE = "actor_rollout_ref.model.enable_gradient_checkpointing", f"{ACTOR}.fsdp_config.fsdp_size"
UTILIZATION = f"{ROLLOUT}.gpu_memory_utilization"
OFFLOADS = (
    *(f"{ACTOR}.fsdp_config.{name}_offload" for name in ("param", "optimizer")),
    *(f"{ACTOR}.megatron.{name}_offload" for name in ("param", "grad", "optimizer")),
)
MODES = ("sync", "colocate_async", "separate_async")
# Names from the examples' shell variables that people use as keys.
SHELL_NAMES = {
    "data.train_prompt_bsz": TRAIN,
    "infer_ppo_max_token_len": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ROLLOUT}.infer_ppo_max_token_len": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
}


def _log_prob(role: str) -> dict[str, Entry]:
    return {
        f"{role}.log_prob_micro_batch_size": entry(None, "deprecated: samples, whole job", unit="samples"),
        f"{role}.log_prob_micro_batch_size_per_gpu": entry(None, "samples of a log-probability pass", unit="samples"),
        f"{role}.log_prob_use_dynamic_bsz": entry(None, "fill these passes by tokens; null = as the actor", kind="bool"),
        f"{role}.log_prob_max_token_len_per_gpu": entry(None, "their token budget; null = as the actor", unit="tokens"),
    }


def _parallel_sizes(role: str, default: int | None) -> dict[str, Entry]:
    return {
        **{f"{role}.megatron.{name}": entry(default, f"Megatron's {name}") for name in MEGATRON_SIZES},
        **{f"{role}.torchtitan.{name}": entry(default, f"TorchTitan's {name}")
           for name in (*TORCHTITAN_SIZES, *TORCHTITAN_REPLICAS)},
    }  # fmt: skip


KEYS: dict[str, Entry] = {
    TRAIN: entry(1024, "prompts of a training step", unit="prompts"),
    GEN: entry(None, "prompts that the data loader gives at once", unit="prompts"),
    "data.val_batch_size": entry(None, "deprecated: prompts of a validation batch", unit="prompts"),
    "data.max_prompt_length": entry(512, "longest prompt", unit="tokens"),
    "data.max_response_length": entry(512, "longest response", unit="tokens"),
    RESPONSES: entry(1, "responses per prompt", unit="samples"),
    "model_engine": entry(None, "backend of all models; null = by strategy", kind="text", choices=tuple(ENGINES)),
    f"{ACTOR}.strategy": entry(None, "backend of the actor; null = as model_engine", kind="text", choices=STRATEGIES),
    DISTILL_MICRO: entry(None, "gkd: samples of a training pass; there 2 by default", unit="samples"),
    DISTILL_BUDGET: entry(None, "gkd: token budget of a training pass; there 1024 by default", unit="tokens"),
    f"{ACTOR}.ppo_mini_batch_size": entry(256, "prompts of an actor update", unit="prompts"),
    f"{ACTOR}.ppo_micro_batch_size": entry(None, "deprecated: samples of a pass, whole job", unit="samples"),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": entry(None, "samples of a training pass", unit="samples"),
    f"{ACTOR}.use_dynamic_bsz": entry(False, "fill passes by tokens", kind="bool"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": entry(16384, "token budget of a training pass", unit="tokens"),
    f"{ACTOR}.ppo_epochs": entry(1, "times that a step's samples are trained on"),
    f"{ACTOR}.use_kl_loss": entry(False, "a reference policy in the loss", kind="bool"),
    f"{ACTOR}.ulysses_sequence_parallel_size": entry(1, "deprecated: devices that share a sequence"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    f"{ACTOR}.veomni.ulysses_parallel_size": entry(1, "devices that share a sequence"),
    **_parallel_sizes(ACTOR, 1),
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": entry(None, "layer chunks per pipeline stage"),
    "actor_rollout_ref.model.use_remove_padding": entry(True, "pack sequences without padding", kind="bool"),
    **_log_prob(ROLLOUT),
    **_log_prob(REF),
    f"{REF}.ulysses_sequence_parallel_size": entry(None, "deprecated: devices that share a sequence"),
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    f"{REF}.veomni.ulysses_parallel_size": entry(None, "devices that share a sequence; null = as the actor"),
    **_parallel_sizes(REF, None),
    f"{ROLLOUT}.tensor_model_parallel_size": entry(2, "devices of an inference engine"),
    f"{ROLLOUT}.data_parallel_size": entry(1, "data-parallel size of an inference engine"),
    f"{ROLLOUT}.pipeline_model_parallel_size": entry(1, "pipeline stages of an inference engine"),
    f"{ROLLOUT}.agent.num_workers": entry(8, "processes that generate"),
    "critic.enable": entry(None, "whether there is a critic; null = for gae", kind="bool"),
    "critic.strategy": entry(None, "backend of the critic; null = as the actor", kind="text", choices=STRATEGIES),
    "critic.ppo_mini_batch_size": entry(None, "prompts of a critic update; null = as the actor", unit="prompts"),
    "critic.ppo_micro_batch_size": entry(None, "deprecated: samples of a critic pass", unit="samples"),
    "critic.ppo_micro_batch_size_per_gpu": entry(None, "samples of a critic pass", unit="samples"),
    "critic.use_dynamic_bsz": entry(None, "fill the critic's passes by tokens; null = as the actor", kind="bool"),
    "critic.ppo_max_token_len_per_gpu": entry(32768, "token budget of a critic pass", unit="tokens"),
    "critic.ppo_epochs": entry(None, "as the actor's; null = the same"),
    "critic.ulysses_sequence_parallel_size": entry(1, "deprecated: devices that share a sequence until April 2026"),
    "critic.fsdp.ulysses_sequence_parallel_size": entry(1, "devices that share a sequence"),
    "critic.veomni.ulysses_parallel_size": entry(1, "devices that share a sequence"),
    **_parallel_sizes("critic", 1),
    "algorithm.adv_estimator": entry("gae", "how advantages are estimated", kind="text", nullable=True),
    "algorithm.use_kl_in_reward": entry(False, "a reference policy in the reward", kind="bool"),
    FILTER: entry(False, "DAPO: generate again for prompts whose responses are all alike", kind="bool"),
    REFILL: entry(False, "generate again for prompts without responses", kind="bool"),
    ASYNC_BATCHES: entry(None, "mini batches of a step of fully asynchronous training; there 1 by default"),
    ASYNC_SYNC: entry(None, "steps between two updates of its generator's weights; there 4 by default", unit="steps"),
    ROLLOUT_DEVICES: entry(None, "devices per node that only generate", minimum=0, unit="devices"),
    ROLLOUT_NODES: entry(None, "nodes that only generate", minimum=0, unit="nodes"),
    CHECKPOINTING: entry(True, "compute activations again in the backward pass", kind="bool"),
    FSDP_SIZE: entry(-1, "devices over which FSDP shards a copy; -1 = all", unit="devices"),
    UTILIZATION: entry(0.5, "share of a device's memory that an engine takes", kind="float"),
    **{key: entry(False, "keep it in host memory while it is not used", kind="bool") for key in OFFLOADS},
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
# The sizes that veRL's base files set, where they differ from its defaults, as of August 2026 and (legacy) January 2026.
_DP, _MEGATRON = {"model_engine": "dp"}, {"model_engine": "megatron"}
_ASYNC = {GEN: 1, "rollout.n": 4, ROLLOUT_NODES: 1, ROLLOUT_DEVICES: 8, f"{ASYNC}staleness_threshold": 0.1}
_ASYNC |= {ASYNC_SYNC: 4, ASYNC_BATCHES: 1}
# Trainers that build on the older one.
_OLDER = {"trainer.use_v1": False}
_ONE_STEP_OFF = {**_OLDER, ROLLOUT_NODES: 1, ROLLOUT_DEVICES: 8}
_DAPO = {**_OLDER, GEN: f"${{{TRAIN}}}"}
_BOTH: Bases = {
    "fully_async_ppo": _ASYNC,
    "one_step_off_ppo": _ONE_STEP_OFF,
    "transfer_queue_ppo": {},
    "dapo": _DAPO,
    "dapo_qat": _DAPO,
}


def _lengths(tokens: int) -> dict[str, int]:
    return {TRAIN: 256, "data.max_prompt_length": tokens, "data.max_response_length": tokens}


BASES: Bases = {
    "ppo_trainer": _DP,
    "ppo_megatron_trainer": _MEGATRON,
    **{
        f"{name}{kind}": {PARENT: f"ppo{kind}", **sizes}
        for kind in ("_trainer", "_megatron_trainer")
        for name, sizes in _BOTH.items()
    },
    **{f"{name}_trainer": {**_DP, **_DAPO} for name in ("entropy", "flowrl")},
    "dapo_transfer_queue_trainer": {PARENT: "ppo_megatron_trainer", **_DAPO},
    **{f"{name}_trainer": {**_DP, **_OLDER} for name in ("gvpo", "rep_exp", "spin", "spo", "sppo")},
    **{f"{name}_trainer": _DP for name in ("dynamo", "rob_ppo", "specRL")},
    "prime_trainer": {**_DP, **_OLDER, RESPONSES: 4, "algorithm.adv_estimator": "rloo", "trainer.balance_batch": False},
    "atropos_trainer": {**_DP, **_OLDER, "algorithm.adv_estimator": "grpo"},
    "on_policy_distill_trainer": {
        **_MEGATRON, DISTILL_MICRO: 2, DISTILL_BUDGET: 1024, ROLLOUT_SIZES[0]: 1, CHECKPOINTING: False,
        "actor_rollout_ref.model.use_remove_padding": False,
        "trainer.n_gpus_per_node": 4, ROLLOUT_DEVICES: 4, ROLLOUT_NODES: 1,
    },
    **{
        f"{name}_multiturn_grpo{suffix}": {**_DP, **_lengths(tokens)}
        for name, suffix, tokens in (
            ("gsm8k", "", 1024), ("gsm8k", "_server", 1024), ("gsm8k", "_w_interaction", 1024), ("retool", "", 1024),
            ("search", "", 1024), ("search", "_one_step_off", 1024), ("geo3k", "", 2048),
        )
    },
    **{
        f"{name}_multiturn_megatron_grpo": {PARENT: "ppo_megatron_trainer", **_lengths(tokens)}
        for name, tokens in (("gsm8k", 1024), ("geo3k", 2048))
    },
}  # fmt: skip
# The base files that programs start from if no `--config-name` names another.
PROGRAMS = {
    "fully_async_main": "fully_async_ppo_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    "main_gkd": "on_policy_distill_trainer",
    **{f"main_{name.removesuffix('_trainer')}": name for name in BASES if name.endswith("_trainer") and "ppo" not in name},
    "": "ppo_trainer",
}
LAUNCH = Launch(
    system="veRL",
    program=re.compile(
        r"\bverl[\w.]*\.\w*main\w*|\bmain_(?:ppo|dapo|gkd|\w+po|prime|spin|\w*split)\w*\b|actor_rollout_ref\.\w+\.\w+="
    ),
    others=re.compile(r"sft_trainer\w*|main_(?:generation|eval)\w*|model_merger"),
    example="python3 -m verl.trainer.main_ppo key=value",
    entries=KEYS,
    groups=(
        *("reward_model", "reward", "custom_reward_function", "ray_kwargs", "ray_init", "global_profiler", "transfer_queue"),
        *("async_training", "rollout", "distillation", "hydra", "env", "model", "optim", "engine"),
    ),
    bases=BASES,
    version="August 2026",
    programs=PROGRAMS,
)
