"""Megatron: its arguments, and how they are read.

A file is YAML with underscores or dashes, NeMo's nested YAML, or a command line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rampup.config.yaml import Located, parse_scalar
from rampup.dialects.commands import Launch, Source, read_source
from rampup.dialects.reading import Entry, Settings, entry, type_settings
from rampup.dialects.script import Command, unknown_names
from rampup.errors import ConfigError

RAMP, SCHEDULE = "rampup_batch_size", "step_batch_size_schedule"
MICRO, GLOBAL, DECREASE = "micro_batch_size", "global_batch_size", "decrease_batch_size_if_needed"
TENSOR, STAGES, CONTEXT = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
MODEL_AXES = (TENSOR, STAGES, CONTEXT)
VIRTUAL, PER_CHUNK = "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"
GROUP, OVERLAP = "microbatch_group_size_per_vp_stage", "overlap_p2p_comm"
LAYERS, LAYOUT, PARTITION = "num_layers", "pipeline_model_parallel_layout", "pp_partition_method"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
EXTRAS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
VERSION = "megatron_version"
EVAL_MICRO, EVAL_GLOBAL = "eval_micro_batch_size", "eval_global_batch_size"
_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*\}")
_MAX_HOPS = 20
_DEVICES = ("nnodes", "nproc_per_node", "num_nodes", "devices")

KEYS: dict[str, Entry] = {
    MICRO: entry(None, "samples per replica and forward pass", unit="samples"),
    GLOBAL: entry(None, "samples per optimizer step; unset: one micro batch per replica", unit="samples"),
    RAMP: entry(None, "start, increment and samples of a linear ramp", kind="text", nullable=True),
    SCHEDULE: entry(None, "THRESHOLD:SIZE pairs of a ramp in steps", kind="text", nullable=True),
    DECREASE: entry(False, "round batches down to a multiple of micro batch * replicas", kind="bool"),
    "data_parallel_size": entry(None, "replicas; given as data_parallel_size=N", minimum=1),
    "world_size": entry(None, "devices of the job", minimum=1, unit="devices"),
    "nnodes": entry(None, "hosts (torchrun)", minimum=1),
    "nproc_per_node": entry(None, "devices per host (torchrun)", minimum=1, unit="devices"),
    "num_nodes": entry(None, "hosts (NeMo)", minimum=1),
    "devices": entry(None, "devices per host (NeMo)", minimum=1, also=(-1,), unit="devices"),
    TENSOR: entry(1, "devices that share each layer's matrices", minimum=1),
    STAGES: entry(1, "pipeline stages", minimum=1),
    CONTEXT: entry(1, "devices that share each sequence", minimum=1),
    VIRTUAL: entry(None, "layer chunks per stage"),
    PER_CHUNK: entry(None, "layers in a chunk", minimum=1, unit="layers"),
    GROUP: entry(None, "microbatches in a row through one chunk; unset: the stages", minimum=1),
    OVERLAP: entry(True, "send while computing; needed for two interleaved stages", kind="bool"),
    LAYERS: entry(None, "layers", minimum=1, unit="layers", optional=True),
    **{key: entry(None, f"layers of the {end} stage", minimum=1) for key, end in zip(ENDS, ("first", "last"), strict=True)},
    **{key: entry(False, "count it as a layer when layers are split over stages", kind="bool") for key in EXTRAS},
    LAYOUT: entry(None, "the layers of each stage, such as Et*3|(tt|)*29m|L", kind="text", nullable=True),
    PARTITION: entry(None, "how DeepSpeed splits layers over stages", kind="text", nullable=True),
    "deepspeed": entry(False, "Megatron-DeepSpeed", kind="bool"),
    VERSION: entry(
        "legacy", "legacy: rules until April 2026, with linear ramps; or head", kind="text", choices=("legacy", "head")
    ),
    "seq_length": entry(None, "tokens per sample", minimum=1, unit="tokens", optional=True),
    "train_iters": entry(None, "optimizer steps", minimum=0, unit="steps", optional=True),
    "max_steps": entry(None, "optimizer steps (NeMo)", minimum=-1, unit="steps", optional=True),
    "train_samples": entry(None, "samples of the run", minimum=0, unit="samples", optional=True),
    EVAL_MICRO: entry(None, "micro batch of evaluation; unset: that of training", minimum=1, unit="samples", optional=True),
    EVAL_GLOBAL: entry(None, "batch of evaluation; unset: that of training", minimum=1, unit="samples", optional=True),
}
ALIASES = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "encoder_seq_length": "seq_length",
    "gpus_per_node": "nproc_per_node",
    **{f"num_layers_in_{end}_pipeline_stage": key for end, key in zip(("first", "last"), ENDS, strict=True)},
}
_NEGATIVES = {"no_overlap_p2p_communication": "overlap_p2p_comm", "no_overlap_p2p_comm": "overlap_p2p_comm"}


def read(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read Megatron's arguments: YAML (flat, or nested as NeMo's; names with underscores or dashes), a script or a command.

    Raises:
        ConfigError: unreadable, mistyped, misspelt, given twice, or without a single argument that matters.
    """
    reading = read_source(source, overrides, launch)
    renamed = [_rename_override(setting) for setting in reading.overrides]
    overridden = {setting.partition("=")[0] for setting in renamed}
    # Groups such as MODEL_ARGS_2 beside MODEL_ARGS are further runs, as those in a script.
    groups = {name.rpartition(".")[0] for name in reading.leaves}
    later = sorted(group for group in groups if (match := re.fullmatch(r"(.+)_\d+", group)) and match[1] in groups)
    located = reading.leaves
    if reading.command is None:
        first = {name: value for name, value in located.items() if name.rpartition(".")[0] not in later}
        located = _from_yaml(first, reading.path, overridden)
    # What a script does not say about the devices is one question: the size of the job.
    if any(isinstance(located[name].value, str) and unknown_names(located[name].value) for name in _DEVICES if name in located):
        located = {name: value for name, value in located.items() if name not in _DEVICES}
    repeated = {canonical(name): line for name, line in reading.repeated.items()}
    # A ramp depends on the samples and tokens of the run, and the number of chunks on that of layers.
    depends = not {RAMP, SCHEDULE, PER_CHUNK}.isdisjoint({*located, *overridden})
    entries = {name: dataclasses.replace(entry, optional=False) for name, entry in KEYS.items()} if depends else KEYS
    notes = [*reading.notes, *([f"{', '.join(later)}: the keys of another run, which are not read."] if later else [])]
    reading = dataclasses.replace(reading, leaves=located, overrides=renamed, repeated=repeated, notes=tuple(notes))
    return type_settings(reading, entries, system="Megatron")


def canonical(name: str) -> str:
    """Return Megatron's name for an option, a YAML key or one of its older names.

    Example:
        >>> canonical("--micro-batch-size"), canonical("model.encoder_seq_length")
        ('micro_batch_size', 'seq_length')
    """
    plain = name.rpartition(".")[2].lstrip("-").replace("-", "_")
    return ALIASES.get(plain, plain)


def _rename_override(setting: str) -> str:
    name, equals, value = setting.partition("=")
    known = canonical(name)
    return f"{known}{equals}{value}" if not name.startswith("-") and known in KEYS else setting


def _from_yaml(leaves: Mapping[str, Located], path: str, overridden: Collection[str]) -> dict[str, Located]:
    found: dict[str, list[str]] = {}
    for name in leaves:
        found.setdefault(canonical(name), []).append(name)
    located: dict[str, Located] = {}
    for known, names in found.items():
        # The least nested of several names counts.
        depth = min(name.count(".") for name in names)
        (first, value), *rest = [(name, _resolve_reference(leaves[name], leaves)) for name in names if name.count(".") == depth]
        for other, second in rest:
            if known in KEYS and known not in overridden and second.value != value.value:
                raise ConfigError(
                    f"{known} is given twice, as {first}={value.value!r} and {other}={second.value!r}; choose one with "
                    f"{known}=...",
                    key=known,
                    path=path,
                    line=leaves[other].line,
                )
        located.update([_normalize(known, value)])
    return located


def _resolve_reference(value: Located, leaves: Mapping[str, Located]) -> Located:
    for _ in range(_MAX_HOPS):
        match = _REFERENCE.fullmatch(value.value.strip()) if isinstance(value.value, str) else None
        if match is None or match[1] not in leaves:
            return value
        value = leaves[match[1]]
    return value


def _normalize(name: str, value: Located) -> tuple[str, Located]:
    """Return a key and its value in the form that the key takes: lists as text, a negative option as its opposite."""
    content = value.value
    if name in _NEGATIVES and isinstance(content, bool):
        return _NEGATIVES[name], dataclasses.replace(value, value=not content)
    if name == RAMP and isinstance(content, list):
        return name, dataclasses.replace(value, value=" ".join(map(str, content)) or "[]")
    if name == LAYOUT and isinstance(content, list):
        from rampup.dialects.megatron.layers import write_layout  # which imports this module

        return name, dataclasses.replace(value, value=write_layout(content))
    if name in (RAMP, SCHEDULE) and isinstance(content, int | float) and not isinstance(content, bool):
        return name, dataclasses.replace(value, value=str(content))
    return name, value


def read_options(command: Command, path: str) -> dict[str, Located]:
    """Return the keys that the options of a command set."""
    located: dict[str, Located] = {}
    for index, word in enumerate(command.words):
        if word.startswith("--") and len(word) > 2:
            name, equals, attached = word.partition("=")
            values = [attached] if equals else list(_values_after(command.words, index))
            value = _option(canonical(name), values, path)
            known, value = _normalize(canonical(name), dataclasses.replace(value, line=command.line or None))
            located[known] = value
    return located


def _values_after(words: Sequence[str], index: int) -> Iterable[str]:
    for word in words[index + 1 :]:
        if word.startswith("--"):
            return
        yield word


def _option(name: str, values: Sequence[str], path: str) -> Located:
    """Return an option's value: true for a flag, the numbers of a triple, the pairs of a schedule, otherwise the first."""
    value: Any = True
    if name == RAMP:
        numbers = [v for v in values if re.match(r"[-+\d]", v) or unknown_names(v)]
        value = " ".join(numbers or values[:1])
    elif name == SCHEDULE:
        value = " ".join(v for v in values if ":" in v or unknown_names(v)) or " ".join(values[:1])
    elif values and not (name in KEYS and KEYS[name].key.kind == "bool") and name not in _NEGATIVES:
        value = values[0] if unknown_names(values[0]) else parse_scalar(values[0], path)
    elif values and values[0].lower() in ("true", "false"):
        value = values[0].lower() == "true"
    return Located(value=value, path=path)


LAUNCH = Launch(
    system="Megatron",
    program=re.compile(r"(?i)(?:pretrain|finetune|train|sft)\w*\.py|megatron[\w.]*train|--(?:micro|global|rampup)-batch-size"),
    others=re.compile(
        r"(?i)\b(?:tools|tasks)/\S*\.py|\w*(?:evaluat|generat|convert|preprocess|inference|predict|export)\w*\.py"
    ),
    example="torchrun pretrain_gpt.py --micro-batch-size 1",
    entries=KEYS,
    canonical=canonical,
    read=read_options,
)
# Names that files of other systems have as well.
SHARED = (*MODEL_AXES, *_DEVICES, "data_parallel_size", "world_size", "max_steps")
