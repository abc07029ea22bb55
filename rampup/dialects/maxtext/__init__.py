"""MaxText's base.yml: the keys that its batches depend on, and how its files are read."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from rampup.config.load import BASE
from rampup.config.yaml import Located, read_mapping
from rampup.dialects.reading import Entry, Settings, entry, read_leaves, rename, type_settings
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
    END: entry(12, "samples per device", kind="size", unit="samples", scope="device"),
    EVAL: entry(0, "that of evaluation; 0 = the same", kind="size", unit="samples", scope="device"),
    ACCUMULATION: entry(1, "passes per optimizer step"),
    EXPANSION: entry(-1, "above 1, 1 of this many hosts loads; below, fewer chips than before", kind="size"),
    RAMP: entry(False, "grow the batch linearly", kind="bool"),
    START: entry(4, "that of the first", kind="size", unit="samples", scope="device"),
    INCREMENT: entry(2, "growth per phase", kind="size", unit="samples", scope="device"),
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
_MAY_BE_EMPTY = ("quantization", "model_name", "decoder_block", TOPOLOGY)


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


def read(path: str | Path, overrides: Sequence[str]) -> Settings:
    """Read a base.yml, and the files in its folder that its `base_config` names.

    Raises:
        ConfigError: unreadable, mistyped, misspelt, or without a single key of MaxText; all problems at once.
    """
    located = {ALIASES.get(name, name): value for name, value in read_chain(path).items()}
    located = {name: value for name, value in located.items() if not (name in _MAY_BE_EMPTY and value.value in ("", None))}
    renamed = [rename(setting, ALIASES) for setting in overrides]
    return type_settings(located, renamed, KEYS, system="MaxText", path=str(path))


def read_chain(path: str | Path, seen: tuple[Path, ...] = ()) -> dict[str, Located]:
    """Return the dotted keys of a file and, below them, of the files that `base_config` names.

    A named file that is not in the folder of the naming one is assumed to be MaxText's own, with the defaults of `KEYS`.

    Args:
        path: the file.
        seen: the files that led to it.
    """
    file = Path(path)
    try:
        resolved = file.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot read the file: {error}", path=str(file)) from None
    if resolved in seen:
        raise ConfigError(f"{BASE} is a circular reference at {file.name}", key=BASE, path=str(file))
    own = read_leaves(read_mapping(file))
    base = own.get(BASE)
    if base is None or not isinstance(base.value, str) or not base.value.strip():
        return own
    try:
        found = (file.parent / base.value).is_file()
    except (OSError, ValueError):
        found = False
    return (read_chain(file.parent / base.value, (*seen, resolved)) | own) if found else own
