"""trlX: its keys. Sizes count samples of one process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rampup.config.yaml import Located
from rampup.dialects.commands import Launch, Source, option
from rampup.dialects.hydra import read_hydra
from rampup.dialects.reading import Entry, Settings, entry, flatten
from rampup.dialects.script import Command

TRAIN, MICRO = "train.batch_size", "train.minibatch_size"
ROLLOUTS, CHUNK, INNER = "method.num_rollouts", "method.chunk_size", "method.ppo_epochs"
GENERATIONS, IMPROVE = "method.n_generations_per_prompt", "method.n_improve_steps"
# NeMo's own file, or the mapping in its place under train.trainer_kwargs.megatron_cfg.
NEMO_KEYS = {
    "num_nodes": "trainer.num_nodes",
    "devices": "trainer.devices",
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
}
NEMO_NESTED = {name: f"train.trainer_kwargs.megatron_cfg.{key}" for name, key in NEMO_KEYS.items()}

KEYS: dict[str, Entry] = {
    TRAIN: entry(None, "samples of an optimizer step; 32 for PPO, 128 for ILQL, 8 for SFT", unit="samples", scope="process"),
    MICRO: entry(None, "samples of a pass; null or 0 = all", unit="samples", scope="process"),
    "train.epochs": entry(100, "rounds of collecting and training"),
    "train.total_steps": entry(10_000, "optimizer steps at most", unit="steps"),
    "train.trainer": entry("AcceleratePPOTrainer", "the trainer class", kind="text"),
    "method.name": entry("PPOConfig", "the method's configuration class", kind="text"),
    ROLLOUTS: entry(128, "samples to collect before training", unit="samples", scope="process"),
    CHUNK: entry(128, "prompts of a generate call", unit="prompts", scope="process"),
    INNER: entry(4, "times that the collected samples are trained on"),
    GENERATIONS: entry(32, "RFT: responses per prompt of a growth step"),
    IMPROVE: entry(4, "RFT: epochs on each set of responses, with a rising threshold", unit="steps"),
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_KEYS.items()},
    **{key: entry(None, f"{name} of the NeMo job") for name, key in NEMO_NESTED.items()},
    "num_processes": entry(1, "processes; given as num_processes=N"),
    "num_prompts": entry(None, "prompts of the training set, or samples of an offline one", unit="prompts"),
    "deepspeed": entry(False, "whether DeepSpeed runs under Accelerate; given as deepspeed=true", kind="bool"),
}  # fmt: skip


def read_words(command: Command, path: str) -> dict[str, Located]:
    """Return the keys of the JSON argument of a trlX script, and Accelerate's processes."""
    located: dict[str, Located] = {}
    for word in command.words:
        if word.startswith("{"):
            try:
                found = json.loads(word)
            except (ValueError, RecursionError):
                continue
            located |= {name: Located(value=value, path=path, line=command.line or None) for name, value in flatten(found)}
    processes = option(command, "--num_processes", "--num-processes")
    if processes is not None:
        value = int(processes) if processes.isdigit() else processes
        located["num_processes"] = Located(value=value, path=path, line=command.line or None)
    return located


LAUNCH = Launch(
    system="trlX",
    program=re.compile(r"accelerate launch|trlx|\b(?:ppo|ilql|sft|rft|nemo)_\w+\.py"),
    example="accelerate launch --num_processes 8 ppo_sentiments.py '{\"train.batch_size\": 32}'",
    known=KEYS.__contains__,
    read=read_words,
)


def read(source: Source, overrides: Sequence[str]) -> Settings:
    """Read a YAML file, or the JSON argument in a script or a command."""
    groups = ("model", "optimizer", "scheduler", "tokenizer")
    return read_hydra(source, overrides, LAUNCH, KEYS, groups=groups)
