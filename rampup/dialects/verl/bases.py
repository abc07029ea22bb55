"""The sizes that veRL's base files set, where they differ from its defaults, as of August 2026 and (legacy) January 2026."""

from __future__ import annotations

from rampup.dialects.hydra import Bases

VERSION = "August 2026"
_ASYNC = {"data.gen_batch_size": 1, "rollout.n": 4, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8} | {
    f"async_training.{name}": value
    for name, value in {"staleness_threshold": 0.1, "trigger_parameter_sync_step": 4, "require_batches": 1}.items()
}
# Trainers that build on the older one.
_OLDER = {"trainer.use_v1": False}
_ONE_STEP_OFF = {**_OLDER, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
_DAPO = {**_OLDER, "data.gen_batch_size": "${data.train_batch_size}"}


def _lengths(tokens: int) -> dict[str, int]:
    return {"data.train_batch_size": 256, "data.max_prompt_length": tokens, "data.max_response_length": tokens}


BASES: Bases = {
    "ppo_trainer": {},
    "ppo_megatron_trainer": {"model_engine": "megatron"},
    **{
        f"{name}{kind}": {"defaults": f"ppo{kind}", **sizes}
        for kind in ("_trainer", "_megatron_trainer")
        for name, sizes in {
            "fully_async_ppo": _ASYNC,
            "one_step_off_ppo": _ONE_STEP_OFF,
            "transfer_queue_ppo": {},
            "dapo": _DAPO,
            "dapo_qat": _DAPO,
        }.items()
    },
    **{f"{name}_trainer": _DAPO for name in ("entropy", "flowrl")},
    "dapo_transfer_queue_trainer": {"defaults": "ppo_megatron_trainer", **_DAPO},
    **{f"{name}_trainer": _OLDER for name in ("gvpo", "rep_exp", "spin", "spo", "sppo")},
    **{f"{name}_trainer": {} for name in ("dynamo", "rob_ppo", "specRL")},
    "prime_trainer": {
        **_OLDER,
        "actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "rloo", "trainer.balance_batch": False,
    },
    "atropos_trainer": {**_OLDER, "algorithm.adv_estimator": "grpo"},
    **{
        f"{name}_multiturn_grpo{suffix}": _lengths(tokens)
        for name, suffix, tokens in (
            ("gsm8k", "", 1024), ("gsm8k", "_server", 1024), ("gsm8k", "_w_interaction", 1024), ("retool", "", 1024),
            ("search", "", 1024), ("search", "_one_step_off", 1024), ("geo3k", "", 2048),
        )
    },
    **{
        f"{name}_multiturn_megatron_grpo": {"defaults": "ppo_megatron_trainer", **_lengths(tokens)}
        for name, tokens in (("gsm8k", 1024), ("geo3k", 2048))
    },
}  # fmt: skip
# The base files that programs start from if no `--config-name` names another.
PROGRAMS = {
    "fully_async_main": "fully_async_ppo_trainer",
    "one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
    **{f"main_{name.removesuffix('_trainer')}": name for name in BASES if name.endswith("_trainer") and "ppo" not in name},
}
