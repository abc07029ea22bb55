"""The sizes that MaxText's own configuration files set, where they differ from base.yml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION = "August 2026"
_SIZES = ("per_device_batch_size", "steps", "max_target_length", "base_num_decoder_layers", "model_name")


def _sizes(*values: Any, **others: Any) -> dict[str, Any]:
    return {name: value for name, value in zip(_SIZES, values, strict=False) if value is not None} | others


BASES: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("base.yml", "inference/inference.yml", "inference/inference_jetstream.yml", "inference/vllm.yml")},
    **{f"post_train/{name}.yml": {} for name in ("sft", "rl_mt_jt", "lora_module_path")},
    **{f"post_train/sft-vision-{name}.yml": {} for name in ("chartqa", "coco-captions", "slidevqa")},
    "decoupled_base_test.yml": _sizes(1, 2, learning_rate_schedule_steps=2, dcn_data_parallelism=1),
    "gpu/gpu_smoke_test.yml": _sizes(2, 10, 1024, 8),
    "gpu/models/llama2_70b.yml": _sizes(6, 30, 4096, None, "llama2-70b"),
    "gpu/models/llama2_7b.yml": _sizes(4, 30, 4096, None, "llama2-7b"),
    "gpu/models/llama3.1_405b.yml": _sizes(1, 10, 4096, None, "llama3.1-405b"),
    "gpu/models/llama3_70b.yml": _sizes(4, 30, 8192, None, "llama3-70b"),
    "gpu/models/llama3_8b.yml": _sizes(None, 30, 8192, None, "llama3-8b"),
    "gpu/models/mixtral_8x1b.yml": _sizes(8, 30, 4096, 5, "mixtral-8x7b"),
    "gpu/models/mixtral_8x2b.yml": _sizes(8, 30, 4096, 10, "mixtral-8x7b"),
    "gpu/models/mixtral_8x7b.yml": _sizes(None, 30, 4096, None, "mixtral-8x7b"),
    "post_train/distillation.yml": _sizes(2, 200_000, learning_rate_schedule_steps=200_000),
    "post_train/distillation-sft.yml": _sizes(2, 200_000, learning_rate_schedule_steps=200_000),
    "post_train/distillation_gpt_oss_20b.yml": _sizes(
        1, 100_000, 32_768, learning_rate_schedule_steps=100_000, ici_data_parallelism=2, ici_fsdp_parallelism=64
    ),
    **{
        f"post_train/distillation_qwen3_30b_base{suffix}.yml": _sizes(
            size, 100_000, 8192, learning_rate_schedule_steps=100_000, ici_data_parallelism=4
        )
        for suffix, size in (("", 6), ("_pdbs8", 8))
    },
    "post_train/dpo.yml": _sizes(2, 10, 512, None, "qwen3-0.6b", eval_interval=5, eval_steps=2),
    # The defaults of the rules for MaxText RL are those of rl.yml.
    "post_train/rl.yml": {"eval_interval": 10, "max_target_length": 1024},
    "tpu/tpu_smoke_test.yml": _sizes(1, 10, None, 8),
}
