"""MaxText's base.yml: the keys that its batches depend on, and how its files are read."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

from rampup.config.load import BASE
from rampup.config.yaml import Located
from rampup.dialects.commands import Bases, Launch, Source, read_source
from rampup.dialects.reading import Entry, Reading, Settings, entry, type_settings
from rampup.dialects.script import show_unknown, unknown_names
from rampup.errors import ConfigError

START, INCREMENT, END = "per_device_batch_size_start", "per_device_batch_size_increment", "per_device_batch_size"
EVAL, SAMPLES, ACCUMULATION = "eval_per_device_batch_size", "global_rampup_samples", "gradient_accumulation_steps"
MICROBATCHES, REPEATS, LAYERS = "num_pipeline_microbatches", "num_pipeline_repeats", "pipeline_parallel_layers"
EXPANSION, DELAY = "expansion_factor_real_data", "pipeline_delay_activation_forwarding"
RAMP, STAGE_LAYERS = "enable_rampup_batch_size", "num_layers_per_pipeline_stage"
SHARD_OPTIMIZER, TUNIX, GRAD_DTYPE = "shard_optimizer_over_data", "use_tunix_gradient_accumulation", "grad_dtype"
TOPOLOGY, TOPOLOGY_SLICES = "compile_topology", "compile_topology_num_slices"
# How MaxText's mesh axes map to rampup's; the sizes of each group are multiplied.
AXIS_GROUPS: dict[str, tuple[str, ...]] = {
    "data": ("diloco", "data"),
    "fsdp": ("fsdp", "fsdp_transpose"),
    "tensor": ("tensor", "tensor_transpose", "tensor_sequence", "autoregressive"),
    "context": ("context", "context_usp_ulysses", "context_autoregressive", "sequence"),
    "expert": ("expert",),
    "pipeline": ("pipeline",),
}
AUTOMATIC = {"ici": "fsdp", "dcn": "data"}


def _axes() -> dict[str, Entry]:
    return {
        f"{group}_{axis}_parallelism": entry(
            -1 if axis == AUTOMATIC[group] else 1, f"{where} along the {axis} axis; -1 = the rest", unit="devices"
        )
        for group, where in (("ici", "devices of a slice"), ("dcn", "slices"))
        for axes in AXIS_GROUPS.values()
        for axis in axes
    }


KEYS: dict[str, Entry] = {
    END: entry(12, "samples per device", kind="size", unit="samples"),
    EVAL: entry(0, "that of evaluation; 0 = the same", kind="size", unit="samples"),
    ACCUMULATION: entry(1, "passes per optimizer step"),
    EXPANSION: entry(-1, "above 1, 1 of this many hosts loads; below, fewer chips than before", kind="size"),
    RAMP: entry(False, "grow the batch linearly", kind="bool"),
    START: entry(4, "that of the first", kind="size", unit="samples"),
    INCREMENT: entry(2, "growth per phase", kind="size", unit="samples"),
    SAMPLES: entry(500, "samples requested for the ramp", unit="samples"),
    "steps": entry(150_001, "optimizer steps; -1 = learning_rate_schedule_steps", unit="steps"),
    "learning_rate_schedule_steps": entry(-1, "length of the schedule; -1 = steps", unit="steps"),
    "eval_interval": entry(-1, "steps between evaluations; -1 = never", unit="steps"),
    "eval_steps": entry(-1, "evaluation batches; -1 = all", unit="steps"),
    "max_target_length": entry(2048, "tokens per sample", minimum=1, unit="tokens"),
    "num_vocab_tiling": entry(1, "parts in which logits are computed", minimum=1),
    "base_num_decoder_layers": entry(16, "layers", minimum=0, unit="layers"),
    "first_num_dense_layers": entry(0, "dense layers before the experts (deepseek)", minimum=0, unit="layers"),
    "decoder_block": entry("llama2", "style of the decoder", kind="text"),
    "model_name": entry("default", "a model whose own file sets the layers", kind="text"),
    "quantization": entry(None, "quantization of the matrix products", kind="text", nullable=True),
    "num_slices": entry(-1, "slices; -1 = as many as the dcn axes imply", minimum=1, also=(-1,), unit="slices"),
    STAGE_LAYERS: entry(1, "layers in one stage and repeat", unit="layers"),
    REPEATS: entry(-1, "times that each microbatch goes round; -1 = as the layers give"),
    LAYERS: entry(-1, "layers in the pipeline; -1 = all", unit="layers"),
    MICROBATCHES: entry(-1, "microbatches of one pass; -1 = the stages"),
    DELAY: entry(False, "forward one tick later", kind="bool"),
    "pipeline_fsdp_ag_per_repeat": entry(False, "gather weights once per repeat", kind="bool"),
    "scan_layers_per_stage": entry(False, "scan over the layers of a stage", kind="bool"),
    SHARD_OPTIMIZER: entry(False, "shard the optimizer state over the data axis", kind="bool"),
    TUNIX: entry(False, "divide each accumulation pass by its own tokens", kind="bool"),
    GRAD_DTYPE: entry("float32", "type that gradients are cast to", kind="text", choices=("float32", "bfloat16", "float16")),
    TOPOLOGY: entry(None, "hardware to compile for, which gives the devices", kind="text", nullable=True),
    TOPOLOGY_SLICES: entry(-1, "its slices", unit="slices"),
    "num_devices": entry(None, "devices of the run; given as num_devices=N", minimum=1, nullable=True, unit="devices"),
    **_axes(),
}  # fmt: skip
# Devices of a slice per number in its name, as in v5p-128; a3 has no number (MaxText `utils/accelerator_to_spec_map.py`).
DEVICES_PER_NUMBER = {"v4": Fraction(1, 2), "v5p": Fraction(1, 2), "v5e": Fraction(1), "v6e": Fraction(1), "tpu7x": Fraction(1)}
ALIASES = {"num_target_devices": "num_devices"}
# Text keys that are empty in many files, which means their default.
MAY_BE_EMPTY = ("quantization", "model_name", "decoder_block", TOPOLOGY)


def topology_devices(name: str) -> int | None:
    """Return the devices of a slice of MaxText's `compile_topology`, or None if its name is unknown.

    Example:
        >>> topology_devices("v5p-128"), topology_devices("v6e-256"), topology_devices("a3"), topology_devices("h100-8")
        (64, 256, 8, None)
    """
    generation, _, number = name.rpartition("-")
    if name == "a3":
        return 8
    devices = DEVICES_PER_NUMBER.get(generation, 0) * (int(number) if number.isdecimal() and len(number) < 7 else 0)
    return int(devices) or None


# The sizes that MaxText's own configuration files set, where they differ from base.yml.
_SIZES = ("per_device_batch_size", "steps", "max_target_length", "base_num_decoder_layers", "model_name")


def _sizes(*values: Any, **others: Any) -> dict[str, Any]:
    return {name: value for name, value in zip(_SIZES, values, strict=False) if value is not None} | others


BASES: Bases = {
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
LAUNCH = Launch(
    system="MaxText",
    program=re.compile(r"(?i)\bmaxtext[\w./]*[./](?:\w*train\w*|sft\w*|dpo\w*|distill\w*)\b|\bper_device_batch_size="),
    others=re.compile(r"train_(?:tokenizer|rl|grpo)\b|train_compile_xaot"),
    example="python3 -m maxtext.trainers.pre_train.train base.yml key=value",
    entries=KEYS,
    canonical=lambda name: ALIASES.get(name, name),
    bases=BASES,
    version="August 2026",
)


def read_chain(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a base.yml, a script or a command, and the files that `base_config` or the command names.

    The arguments are those of `read_source`.

    Raises:
        ConfigError: see `type_settings`; or a file that `base_config` names is neither beside this one nor one that MaxText
            ships, or starts from itself.
    """
    reading, base = _follow(source, overrides, launch)
    leaves = {name: value for name, value in reading.leaves.items() if not (name in MAY_BE_EMPTY and value.value in ("", None))}
    reading = dataclasses.replace(reading, leaves=leaves, recognized=reading.recognized or bool(base))
    shipped = {name: value for name, value in launch.bases.get(base, {}).items() if name in launch.entries}
    settings = type_settings(reading, launch.entries, system=launch.system, defaults=shipped)
    if base in ("", "base.yml"):
        return settings
    note = f"what the source does not set is from MaxText's own {base} of {launch.version}."
    return dataclasses.replace(settings, notes=(*settings.notes, note))


def _follow(source: Source, overrides: Sequence[str], launch: Launch) -> tuple[Reading, str]:
    """Return the keys of a source and of the files beside it from which it starts, and the name of the shipped one below."""
    reading = read_source(source, overrides, launch).rename(launch.canonical)
    given = [setting for setting in reading.overrides if setting.partition("=")[0] == BASE]
    rest = [setting for setting in reading.overrides if setting not in given]
    leaves, name = dict(reading.leaves), given[-1].partition("=")[2] if given else ""
    folder = Path() if isinstance(source, tuple) else Path(source).parent
    seen = [] if isinstance(source, tuple) else [_resolve(Path(source))]
    if reading.command is not None and not name:
        name = next((word for word in reading.command.words if word.endswith((".yml", ".yaml")) and "=" not in word), "")
        place = Located(value=name, path=reading.path, line=reading.command.line or None)
    else:
        place = leaves.get(BASE, Located(value="", path=reading.path))
        name = name or (place.value if isinstance(place.value, str) else "")
    shipped = ""
    while name.strip():
        file = folder / name
        if unknown_names(name) or not _is_file(file):
            shipped = _find_shipped(name, launch.bases) or ""
            if shipped:
                break
            raise ConfigError(
                f"{BASE}={show_unknown(name)} is neither beside this file nor one that MaxText ships; put it there, or add "
                f"{BASE}=base.yml for MaxText's defaults",
                key=BASE,
                path=place.path,
                line=place.line,
            )
        if _resolve(file) in seen:
            raise ConfigError(f"{BASE} is a circular reference at {file.name}", key=BASE, path=str(file))
        seen.append(_resolve(file))
        below = read_source(file, (), launch).rename(launch.canonical)
        place = below.leaves.get(BASE, Located(value="", path=str(file)))
        name, folder = place.value if isinstance(place.value, str) else "", file.parent
        leaves = {**below.leaves, **leaves}
    return dataclasses.replace(reading, leaves=leaves, overrides=rest), shipped


def _find_shipped(name: str, bases: Bases) -> str | None:
    """Return the file of MaxText's configs that a path ends with."""
    parts = PurePosixPath(show_unknown(name)).parts
    for first in range(len(parts)):
        if "/".join(parts[first:]) in bases:
            return "/".join(parts[first:])
    return next((shipped for shipped in bases if shipped.endswith(f"/{parts[-1]}")), None) if parts else None


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False


def _resolve(file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot read the file: {error}", path=str(file)) from None
