"""The keys of MaxText's base.yml that its batches depend on, and how its files are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rampup.config.load import BASE
from rampup.config.yaml import Located, read_mapping
from rampup.dialects.reading import Entry, Settings, entry, flatten, settings_from
from rampup.errors import ConfigError

# How MaxText's mesh axes map to ours; the names of each group are multiplied.
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


ENTRIES: dict[str, Entry] = {
    "per_device_batch_size": entry(12, "samples per device", kind="size", unit="samples", scope="device"),
    "eval_per_device_batch_size": entry(0, "that of evaluation; 0 = the same", kind="size", unit="samples", scope="device"),
    "gradient_accumulation_steps": entry(1, "passes per optimizer step"),
    "expansion_factor_real_data": entry(-1, "above 1, 1 of this many hosts loads; below, fewer chips than before", kind="size"),
    "enable_rampup_batch_size": entry(False, "grow the batch linearly", kind="bool"),
    "per_device_batch_size_start": entry(4, "that of the first", kind="size", unit="samples", scope="device"),
    "per_device_batch_size_increment": entry(2, "growth per phase", kind="size", unit="samples", scope="device"),
    "global_rampup_samples": entry(500, "samples asked for the ramp", unit="samples"),
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
    "num_layers_per_pipeline_stage": entry(1, "layers in one stage and repeat", unit="layers"),
    "num_pipeline_repeats": entry(-1, "times that each microbatch goes round; -1 = as the layers give"),
    "pipeline_parallel_layers": entry(-1, "layers in the pipeline; -1 = all", unit="layers"),
    "num_pipeline_microbatches": entry(-1, "microbatches of one pass; -1 = the stages"),
    "pipeline_delay_activation_forwarding": entry(False, "forward one tick later", kind="bool"),
    "pipeline_fsdp_ag_per_repeat": entry(False, "gather weights once per repeat", kind="bool"),
    "scan_layers_per_stage": entry(False, "scan over the layers of a stage", kind="bool"),
    "num_devices": entry(None, "devices of the run; given as num_devices=N", minimum=1, nullable=True, unit="devices"),
    **_axes(),
}  # fmt: skip
ALIASES = {"num_target_devices": "num_devices"}
# Text keys that may stand empty in a real file, which means their default.
_MAY_BE_EMPTY = ("quantization", "model_name", "decoder_block")


def read_maxtext(path: str | Path, overrides: Sequence[str]) -> Settings:
    """Read a base.yml, with the files that its `base_config` names where they stand beside it.

    Raises:
        ConfigError: unreadable, mistyped, misspelt, or without a single key of MaxText; all problems at once.
    """
    located = {ALIASES.get(name, name): value for name, value in read_chain(path).items()}
    located = {name: value for name, value in located.items() if not (name in _MAY_BE_EMPTY and value.value in ("", None))}
    renamed = [rename(setting, ALIASES) for setting in overrides]
    return settings_from(located, renamed, ENTRIES, system="MaxText", path=str(path))


def rename(setting: str, aliases: Mapping[str, str]) -> str:
    """Give `key=value` the key's canonical name.

    Example:
        >>> rename("num_target_devices=8", {"num_target_devices": "num_devices"})
        'num_devices=8'
    """
    name, equals, text = setting.partition("=")
    return f"{aliases.get(name, name)}{equals}{text}"


def read_chain(path: str | Path) -> dict[str, Located]:
    """Return the dotted keys of a file and, below them, of the files that `base_config` names.

    A named file that does not stand beside the naming one stands for MaxText's own, whose values are the entries' defaults.
    """
    return _chain(Path(path), seen=())


def _chain(file: Path, seen: tuple[Path, ...]) -> dict[str, Located]:
    resolved = _resolve(file)
    if resolved in seen:
        raise ConfigError(f"{BASE} goes round in a circle at {file.name}", key=BASE, path=str(file))
    own: dict[str, Located] = {}
    for top, value in read_mapping(file).items():
        nested = isinstance(value.value, Mapping) and value.value
        for name, leaf in flatten(value.value, f"{top}.") if nested else ((top, value.value),):
            if name in own:
                raise ConfigError(f"{name} stands twice", key=name, path=value.path, line=value.line)
            own[name] = Located(value=leaf, path=value.path, line=value.line)
    base = own.get(BASE)
    if base is None or not isinstance(base.value, str) or not base.value.strip():
        return own
    parent = file.parent / base.value
    return (_chain(parent, (*seen, resolved)) | own) if _is_file(parent) else own


def _resolve(file: Path) -> Path:
    try:
        return file.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot read the file: {error}", path=str(file)) from None


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except (OSError, ValueError):
        return False
