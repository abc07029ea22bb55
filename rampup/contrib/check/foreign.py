"""Systems whose files are known and not checked: their names, and what an update is
there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# What no file of another system says. It is looked for first, so that a launch with a
# word of a foreign system stays one.
COVERED = (
    r"(?i)\bactor_rollout_ref\b|\bpolicy_mini_batch_size\b|\bskyrl[\w.]*\.main\w*"
    r"|\bmaxtext[\w./]*[./]\w*train|\bbase_config\s*:|\btrlx\b|\btunix\b|\bper_device_batch_size\b"
    r"|\bici_\w+_parallelism\b"
)


class Foreign(NamedTuple):
    """A system whose files are not checked."""

    name: str
    marks: tuple[re.Pattern[str], ...]  # texts that its files have: all of them
    update: str  # the samples of an update there


_ACCUMULATED = (
    "per_device_train_batch_size * gradient_accumulation_steps * processes samples"
)
# The name of each system, what its files have, with ` & ` between, and its update. The
# first that fits counts.
_ROWS: tuple[tuple[str, str, str], ...] = (
    ("OLMo-core", r"\bolmo_core\b", "global_batch_size tokens"),
    ("torchtitan", r"\btorchtitan\b|--training\.(?:local|global)_batch_size\b", "training.global_batch_size sequences"),
    ("torchtitan", r"^\[training\] & ^(?:local|global)_batch_size *=", "training.global_batch_size sequences"),
    ("OpenRLHF", r"\bopenrlhf\b", "train_batch_size samples"),
    ("EasyR1", r"\bverl\.trainer\.main\b", "worker.actor.global_batch_size prompts * worker.rollout.n"),
    ("EasyR1", r"^worker\s*: & ^\s+rollout_batch_size\s*:", "worker.actor.global_batch_size prompts * worker.rollout.n"),
    ("slime", r"--rollout-batch-size\b & --num-rollout\b|--n-samples-per-prompt\b|\bslime\b", "--global-batch-size samples"),
    ("NeMo-RL", r"\bnum_prompts_per_step\b|\bnemo[_-]rl\b|\btrain_global_batch_size\b|\bval_global_batch_size\b",
     "policy.train_global_batch_size samples"),
    ("GPT-NeoX", r"\bpipe[-_]parallel[-_]size\b|\bdeepy\.py\b",
     "train_micro_batch_size_per_gpu * gradient_accumulation_steps * devices / (pipe * model parallel sizes) samples"),
    ("AReaL", r"\bareal\b|\ballocation_mode\b", "train_dataset.batch_size prompts * gconfig.n_samples"),
    ("prime-rl", r"\bprime[_-]rl\b|^\[orchestrator\b", "the orchestrator's batch_size rollouts"),
    ("MaxDiffusion", r"(?i)\bmaxdiffusion\b|\bbase_(?:xl\w*|flux\w*|wan\w*|2_base|14|21)\.yml\b", "per_device_batch_size * devices images"),
    ("Megatron-Bridge", r"\bmegatron\.bridge\b|\brun_recipe\.py\b|\brun_script\.py\b.*--recipe", "train.global_batch_size samples"),
    ("ms-swift", r"\bswift (?:sft|pt|rlhf)\b", _ACCUMULATED),
    ("ms-swift", r"\bmegatron rlhf\b & --rlhf_type (?:grpo|gkd)\b", "global_batch_size samples"),
    ("simply", r"\bsimply\.main\b|-m simply\b", "batch_size sequences"),
    ("LLaMA-Factory", r"\bllamafactory\b|\bllamafactory-cli\b|^\s*(?:--)?finetuning_type\b", _ACCUMULATED),
    ("axolotl", r"\baxolotl\b", "micro_batch_size * gradient_accumulation_steps * processes samples"),
    ("axolotl", r"^base_model\s*: & ^(?:datasets|rl)\s*: & ^micro_batch_size\s*:",
     "micro_batch_size * gradient_accumulation_steps * processes samples"),
    ("nanotron", r"\bnanotron\b|\bbatch_accumulation_per_replica\b", "micro_batch_size * batch_accumulation_per_replica * dp sequences"),
    ("Levanter", r"\blevanter\b|\bper_device_parallelism\b", "trainer.train_batch_size sequences"),
    ("Levanter", r"^\s+train_batch_size\s*: & ^\s+(?:tracker|num_train_steps)\s*:", "trainer.train_batch_size sequences"),
    ("TRL", r"\bper_device_train_batch_size\b & \bnum_generations\b|\btrl\b|\b(?:DPO|GRPO|SFT|PPO|KTO)(?:Config|Trainer)\b"
            r"|^beta\s*:|^(?:loss_type|max_prompt_length|use_vllm)\s*:", _ACCUMULATED),
    ("TRL", r"^\s*(?:accelerate launch|python3?|uv run)?.*\btrl (?:sft|dpo|grpo|ppo|kto|rloo|reward)\b", _ACCUMULATED),
    ("the Hugging Face Trainer", r"\bper_device_train_batch_size\b|\bTrainingArguments\b", _ACCUMULATED),
    ("DeepSpeed", r"\A\s*\{ & \"(?:train_micro_batch_size_per_gpu|zero_optimization|train_batch_size)\"",
     "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * devices samples"),
    ("accelerate", r"^distributed_type\s*: & ^(?:num_processes|mixed_precision|compute_environment)\s*:",
     "its program's; check the command that starts that"),
)  # fmt: skip
FOREIGN = tuple(
    Foreign(
        name,
        tuple(re.compile(part, re.MULTILINE) for part in marks.split(" & ")),
        update,
    )
    for name, marks, update in _ROWS
)
