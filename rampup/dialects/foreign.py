"""Files of systems that the rules do not cover, recognized so that none is read as another system's."""

from __future__ import annotations

import re

# What no file of another system says. It is looked for first, so that a launch with a word of a foreign system stays one.
_COVERED = re.compile(
    r"(?i)\bactor_rollout_ref\b|\bpolicy_mini_batch_size\b|\bskyrl[\w.]*\.main\w*|\bmaxtext[\w./]*[./]\w*train"
    r"|\bbase_config\s*:|\btrlx\b|\bper_device_batch_size\b|\bici_\w+_parallelism\b"
)
# The name of each system, and texts that its files have: all of one row. The first system that fits counts.
_MARKS: tuple[tuple[str, str], ...] = (
    ("OLMo-core", r"\bolmo_core\b"),
    ("torchtitan", r"\btorchtitan\b|--training\.(?:local|global)_batch_size\b"),
    ("torchtitan", r"^\[training\] & ^(?:local|global)_batch_size *="),
    ("OpenRLHF", r"\bopenrlhf\b"),
    ("EasyR1", r"\bverl\.trainer\.main\b"),
    ("EasyR1", r"^worker\s*: & ^\s+rollout_batch_size\s*:"),
    ("slime", r"--rollout-batch-size\b & --num-rollout\b|--n-samples-per-prompt\b|\bslime\b"),
    ("NeMo-RL", r"\bnum_prompts_per_step\b|\bnemo[_-]rl\b|\btrain_global_batch_size\b|\bval_global_batch_size\b"),
    ("LLaMA-Factory", r"\bllamafactory\b|\bllamafactory-cli\b|^\s*(?:--)?finetuning_type\b"),
    ("axolotl", r"\baxolotl\b"),
    ("axolotl", r"^base_model\s*: & ^(?:datasets|rl)\s*: & ^micro_batch_size\s*:"),
    ("nanotron", r"\bnanotron\b|\bbatch_accumulation_per_replica\b"),
    ("Levanter", r"\blevanter\b|\bper_device_parallelism\b"),
    ("Levanter", r"^\s+train_batch_size\s*: & ^\s+(?:tracker|num_train_steps)\s*:"),
    ("TRL", r"\bper_device_train_batch_size\b & \bnum_generations\b|\btrl\b|\b(?:DPO|GRPO|SFT|PPO|KTO)(?:Config|Trainer)\b"
            r"|^beta\s*:|^(?:loss_type|max_prompt_length|use_vllm)\s*:"),
    ("TRL", r"^\s*(?:accelerate launch|python3?|uv run)?.*\btrl (?:sft|dpo|grpo|ppo|kto|rloo|reward)\b"),
    ("the Hugging Face Trainer", r"\bper_device_train_batch_size\b|\bTrainingArguments\b"),
    ("DeepSpeed", r"\A\s*\{ & \"(?:train_micro_batch_size_per_gpu|zero_optimization|train_batch_size)\""),
    ("accelerate", r"^distributed_type\s*: & ^(?:num_processes|mixed_precision|compute_environment)\s*:"),
)  # fmt: skip
_FOREIGN = tuple((name, tuple(re.compile(part, re.MULTILINE) for part in marks.split(" & "))) for name, marks in _MARKS)
_COMMENT = re.compile(r"(?m)(?:^|\s)#.*$")


def foreign_system(text: str) -> str | None:
    """Return the name of the system that a file or a command is made for, if the rules of no system here cover it.

    Example:
        >>> foreign_system("accelerate launch train.py --per_device_train_batch_size 4 --num_generations 8")
        'TRL'
        >>> foreign_system("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8")
    """
    said = _COMMENT.sub("", text)
    if _COVERED.search(said):
        return None
    return next((name for name, marks in _FOREIGN if all(mark.search(said) for mark in marks)), None)
