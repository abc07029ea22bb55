"""What a key of the configuration means, what it may be, and which other keys it goes together with."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rampup.config.key import Key
from rampup.config.schema import KEYS, Config
from rampup.config.template import base_values, yaml_value
from rampup.dialects.maxtext_rl.job import ENTRIES as MAXTEXT_RL
from rampup.errors import ConfigError
from rampup.plan.mesh_axes import AXES
from rampup.rl.config import ROLLOUT_KEYS, RolloutConfig
from rampup.rl.template import rollout_values

MAX_CLOSE = 6
_AXES = {group: tuple(f"{group}_{axis}_parallelism" for axis in AXES) for group in ("ici", "dcn")}
# What several keys rule together, beside what their own lines of documentation name.
RULES: dict[str, tuple[str, ...]] = {
    "a global batch is num_devices * per_device_batch_size * gradient_accumulation_steps, a whole number of samples": (
        "num_devices",
        "per_device_batch_size",
        "per_device_batch_size_start",
        "gradient_accumulation_steps",
    ),
    "the linear ramp goes from the start to the end in equal increments, each over an equal share of the samples": (
        "enable_rampup_batch_size",
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "per_device_batch_size",
        "global_rampup_samples",
        "rampup_carry_overshoot",
    ),
    "a schedule and the linear ramp exclude each other": ("batch_size_schedule", "enable_rampup_batch_size"),
    "every phase's batch is cut into replicas * passes * pipeline microbatches * microbatch, without a rest": (
        "per_device_batch_size",
        "batch_size_schedule",
        "microbatch_size",
        "rampup_microbatch",
        "gradient_accumulation_steps",
        "num_pipeline_microbatches",
        "ici_data_parallelism",
        "ici_fsdp_parallelism",
    ),
    "the ici axes multiply to the devices of a slice": ("num_devices", "num_slices", *_AXES["ici"]),
    "the dcn axes multiply to the slices": ("num_slices", *_AXES["dcn"]),
    "layers = stages * repeats * layers per stage": (
        "base_num_decoder_layers",
        "ici_pipeline_parallelism",
        "dcn_pipeline_parallelism",
        "num_pipeline_repeats",
        "num_layers_per_pipeline_stage",
    ),
    "pipeline microbatches are a multiple of the stages, and twice as many with delayed forwarding": (
        "num_pipeline_microbatches",
        "ici_pipeline_parallelism",
        "dcn_pipeline_parallelism",
        "pipeline_strict_multiple",
        "pipeline_delay_activation_forwarding",
    ),
    "the batch that is loaded, global batch * expansion_factor_real_data, is whole": (
        "expansion_factor_real_data",
        "per_device_batch_size",
    ),
    "the learning rate rises, stays and decays over one schedule": (
        "learning_rate",
        "lr_schedule_type",
        "learning_rate_schedule_steps",
        "steps",
        "warmup_steps_fraction",
        "learning_rate_final_fraction",
        "wsd_decay_steps_fraction",
        "wsd_decay_style",
        "learning_rate_clock",
        "learning_rate_batch_scaling",
    ),
    "only opt_type: adamw reads the adam keys": ("opt_type", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay"),
    "every head has an even width, base_emb_dim / base_num_query_heads, and query heads share those of keys and values": (
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
    ),
    "text needs 256 different tokens; tokens and arrayrecord need files": (
        "dataset_type",
        "vocab_size",
        "grain_train_files",
        "token_dtype",
    ),
    "a run of a name goes on from its last checkpoint": (
        "run_name",
        "base_output_directory",
        "enable_checkpointing",
        "checkpoint_period",
        "async_checkpointing",
        "max_num_checkpoints_to_keep",
    ),
    "evaluation reads its own files, or rows held out from training": (
        "eval_interval",
        "eval_steps",
        "eval_per_device_batch_size",
        "grain_eval_files",
        "eval_holdout_fraction",
    ),
    "rows come in an order of the seed, pass after pass": ("enable_data_shuffling", "data_shuffle_seed", "num_epoch"),
    "reading runs ahead of training": ("grain_num_threads", "grain_prefetch_buffer_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What there is to say about a key.

    Attributes:
        key: its name.
        file: the configuration that has it.
        section: the banner it stands under there.
        meaning: what it means.
        legal: what to write, in words.
        unit: the unit of its values, if they have one.
        default: what it is where it is not set.
        value_in_file: what it is in the file.
        maxtext_name: MaxText's name for it; None where MaxText has no such key.
        maxtext_default: what MaxText does by default, as written there.
        rules: what it rules together with others.
        interacts: those others, and keys that name it or that it names.
    """

    key: str
    file: str
    section: str
    meaning: str
    legal: str
    unit: str | None
    default: Any
    value_in_file: Any
    maxtext_name: str | None
    maxtext_default: str | None
    rules: tuple[str, ...]
    interacts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as `rampup explain --json` prints it."""
        return asdict(self)


def explain(name: str) -> Explanation:
    """Return what a key means; a key of base.yml, or else one of rl.yml.

    Raises:
        ConfigError: there is no such key; names the closest ones.

    Example:
        >>> explained = explain("global_rampup_samples")
        >>> explained.unit, explained.default, explained.maxtext_default
        ('samples', 1600, '500')
    """
    if name in KEYS:
        values = (Config().to_dict(), base_values())
        return _explanation(name, "base.yml", KEYS, *values, in_maxtext=not KEYS[name].own)
    if name in ROLLOUT_KEYS:
        values = (RolloutConfig().to_dict(), rollout_values())
        known = name in MAXTEXT_RL and MAXTEXT_RL[name].default is not None
        return _explanation(name, "rl.yml", ROLLOUT_KEYS, *values, in_maxtext=known)
    nearest = _close_keys(name.lower())
    hint = f"; close: {', '.join(nearest)}" if nearest else "; the README lists all keys"
    raise ConfigError(f"unknown key {name[:100]!r}{hint}", key=name, nearest=nearest)


def _close_keys(name: str) -> tuple[str, ...]:
    """Return keys that are spelt like a name, or of which a part is."""
    known = dict.fromkeys([*KEYS, *ROLLOUT_KEYS])
    parts = {part for key in known for part in re.split(r"[_.]", key) if len(part) > 2}
    alike = difflib.get_close_matches(name, parts, n=2, cutoff=0.75)
    close = difflib.get_close_matches(name, known, n=3)
    within = [key for key in known if (len(name) > 2 and name in key) or any(part in re.split(r"[_.]", key) for part in alike)]
    return tuple(dict.fromkeys([*close, *within]))[:MAX_CLOSE]


def _explanation(
    name: str, file: str, keys: Mapping[str, Key], defaults: Mapping[str, Any], values: Mapping[str, Any], *, in_maxtext: bool
) -> Explanation:
    key = keys[name]
    rules = {rule: names for rule, names in RULES.items() if name in names} if keys is KEYS else {}
    related = [other for names in rules.values() for other in names]
    related += [other for other in keys if _names(key.doc, other) or _names(keys[other].doc, name)]
    return Explanation(
        key=name,
        file=file,
        section=key.section,
        meaning=key.doc,
        legal=key.expected,
        unit=key.unit,
        default=defaults[name],
        value_in_file=values[name],
        maxtext_name=name if in_maxtext else None,
        maxtext_default=key.maxtext or (yaml_value(defaults[name]) if in_maxtext else None),
        rules=tuple(rules),
        interacts=tuple(other for other in dict.fromkeys(related) if other != name),
    )


def _names(text: str, name: str) -> bool:
    """Say whether a text names a key, and not merely a word that is one, such as steps."""
    return "_" in name and re.search(rf"(?<![\w.]){re.escape(name)}(?![\w])", text) is not None
