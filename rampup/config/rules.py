"""The rules between keys: what a configuration contradicts, without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rampup.errors import ConfigError, RampupError
from rampup.plan.nearest import INCREMENT, RAMP_SAMPLES, START
from rampup.plan.numbers import divisors, nearest_in
from rampup.plan.ramp_keys import AUTO_SCHEDULE

if TYPE_CHECKING:
    from rampup.config.schema import Config

# The switch of the linear ramp, and the keys that only it uses.
LINEAR = "enable_rampup_batch_size"
LINEAR_KEYS = (START, INCREMENT, RAMP_SAMPLES, "rampup_carry_overshoot")

# The keys that set the length of a run; one of them is given.
BUDGET_KEYS = ("steps", "train_samples", "train_tokens")


def contradictions(config: Config) -> Iterator[RampupError]:
    """Yield an error for each rule between keys that the values break."""
    for rules in (
        _of_length,
        _of_accumulation,
        _of_model_and_data,
        _of_auto,
        _of_seesaw,
        _of_constants,
        head_problems,
        _of_linear_ramp,
    ):
        yield from rules(config)


def refuse(key: str, rule: str, *nearest: object) -> ConfigError:
    """Return the error about a rule between keys: the key to change, the message, and
    the nearest legal values.
    """
    return ConfigError(rule, key=key, nearest=nearest)


def _of_length(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with the length of a run and its learning rate."""
    if config.total_steps == -1:
        yield refuse(
            "steps",
            "steps=-1 takes learning_rate_schedule_steps, which is -1 too; set one of"
            " them, train_samples or train_tokens",
        )
    if config.warmup_steps is not None and config.seesaw_factor is not None:
        yield refuse(
            "warmup_steps",
            f"seesaw_factor={config.seesaw_factor:g} places its cuts on a schedule whose"
            " warm-up is a share of the samples; set warmup_steps_fraction instead of"
            " warmup_steps",
            None,
        )
    warmup = 0.0
    if config.warmup_steps is None:
        warmup = config.warmup_steps_fraction
    decay = config.wsd_decay_steps_fraction
    if config.lr_schedule_type == "wsd" and warmup + decay > 1:
        yield refuse(
            "wsd_decay_steps_fraction",
            f"warmup_steps_fraction + wsd_decay_steps_fraction = {warmup} + {decay}"
            " must not exceed 1",
            float(1 - Fraction(repr(warmup))),
        )


def _of_accumulation(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with how gradients are accumulated."""
    others = {
        "measure_gradient_noise": False,
        "gradient_accumulator_dtype": "float32",
    }
    is_whole = config.rampup_microbatch == "whole"
    if is_whole:
        others["rampup_microbatch"] = "fixed"
    for name, legal in (
        others.items() if config.gradient_accumulation != "fused" else ()
    ):
        if (value := getattr(config, name)) != legal:
            yield refuse(
                name,
                f"{name}={str(value).lower()} needs gradient_accumulation=fused, it is"
                f" {config.gradient_accumulation}",
                legal,
            )
    if is_whole and config.measure_gradient_noise:
        yield refuse(
            "measure_gradient_noise",
            "measure_gradient_noise=true compares microbatches, but with"
            " rampup_microbatch=whole a step has only one",
            False,
        )


def _of_model_and_data(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with the model and its rows."""
    size, tiles = config.vocab_size, config.num_vocab_tiling
    if config.dataset_type == "text" and size < 256:
        yield refuse(
            "vocab_size",
            f"vocab_size={size} must be at least 256 for dataset_type=text, whose"
            " tokens are bytes",
            256,
        )
    if size % tiles:
        yield refuse(
            "num_vocab_tiling",
            f"vocab_size={size} must be a multiple of num_vocab_tiling={tiles}",
            *nearest_in(tiles, divisors(size)),
        )
    if config.attention == "flash" and config.max_target_length % 128:
        yield refuse(
            "attention",
            "attention=flash needs a max_target_length that is a multiple of 128,"
            f" not {config.max_target_length}",
            "autoselected",
            "dot_product",
        )
    if config.dataset_type == "tokens" and config.grain_train_files is None:
        yield refuse(
            "grain_train_files",
            f"dataset_type={config.dataset_type} needs grain_train_files, a glob"
            " pattern of the files to read",
        )


def _of_auto(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with `batch_size_schedule: auto`, and the keys of the length."""
    if config.batch_size_schedule == AUTO_SCHEDULE:
        # What must be known before step 0 cannot depend on batches that are decided
        # later.
        has_budget = config.total_steps is None
        needed = auto_implies(has_budget=has_budget) | {
            "rampup_microbatch": "fixed",
            "seesaw_factor": None,
            "warmup_steps": None,
        }
        needed |= (
            {"learning_rate_schedule_steps": -1}
            if has_budget
            else {"adam_weight_decay_reference_tokens": None}
        )
        for name, legal in needed.items():
            if getattr(config, name) != legal:
                shown = "null" if legal is None else str(legal).lower()
                yield refuse(
                    name,
                    f"batch_size_schedule=auto needs {name}={shown}: its batches"
                    " are not known before the run",
                    legal,
                )
    budgets = [
        f"{name}={value}"
        for name in BUDGET_KEYS
        if (value := getattr(config, name)) not in (None, -1)
    ]
    if len(budgets) > 1:
        rule = (
            f"{' and '.join(budgets)} both set the length of the run; set one of them"
        )
        if config.steps == -1:
            yield refuse("train_samples", rule)
        else:
            yield refuse("steps", rule, -1)


def _of_seesaw(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with Seesaw."""
    factor = config.seesaw_factor
    largest = config.seesaw_max_batch_size
    if factor is None and largest is not None:
        yield refuse(
            "seesaw_max_batch_size",
            f"seesaw_max_batch_size={largest} limits seesaw_factor, which is null;"
            " set both or none",
        )
    kind = config.lr_schedule_type
    decay = config.wsd_decay_steps_fraction
    last = config.learning_rate_final_fraction
    if factor is not None and (
        kind == "constant" or last >= 1 or (kind != "cosine" and decay <= 0)
    ):
        yield refuse(
            "seesaw_factor",
            f"seesaw_factor={factor} replaces falls of the learning rate, but"
            f" lr_schedule_type={kind} with learning_rate_final_fraction={last} has"
            " none",
        )
    if factor is not None and config.learning_rate_clock != "samples":
        yield refuse(
            "learning_rate_clock",
            "seesaw_factor needs learning_rate_clock=samples: the batch, and so the"
            " number of steps, depends on the schedule",
            "samples",
        )


def _of_constants(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with AdamW's constants."""
    scaling, adam = config.batch_scaling, config.batch_rule[1]
    if adam.is_active and config.opt_type != "adamw":
        yield refuse(
            "batch_scaling",
            f"batch_scaling={scaling} scales constants of AdamW, but"
            f" opt_type={config.opt_type}",
            "none",
            "linear",
        )
    for name, scaled in (
        ("adam_b2_floor", adam.b2),
        ("adam_weight_decay_reference_tokens", adam.weight_decay),
    ):
        if getattr(config, name) is not None and scaled == "none":
            yield refuse(
                name,
                f"{name}={getattr(config, name)} has no effect with"
                f" batch_scaling={scaling}",
            )


def _of_linear_ramp(config: Config) -> Iterator[ConfigError]:
    """Yield what is wrong with the keys of a linear ramp that may not be meant."""
    # A key of the linear ramp is set, and nothing says whether there is one; with
    # an explicit false, they are ignored.
    is_auto = config.batch_size_schedule == AUTO_SCHEDULE
    # `auto` starts with the first size of the ramp.
    ignored = [
        name
        for name in LINEAR_KEYS
        if name in config._given and not (is_auto and name == START)
    ]
    if ignored and LINEAR not in config._given:
        values = config.to_dict()
        found = ", ".join(f"{name}={values[name]}" for name in ignored)
        if config.batch_size_schedule is not None:
            yield refuse(
                ignored[0],
                f"{found} and batch_size_schedule are two ramps; remove one, or set"
                f" {LINEAR}: false to keep the schedule",
            )
        else:
            yield refuse(
                LINEAR,
                f"{found} describes a linear ramp, but {LINEAR} is not set: set it to"
                " true for the ramp, to false for a constant batch",
                True,
            )


def auto_implies(*, has_budget: bool) -> dict[str, Any]:
    """Return the only values that work with `batch_size_schedule: auto`: no second
    ramp, the measurement, and the clock that counts what the length of the run counts,
    as the other unit depends on later batches.
    """
    clock = "samples" if has_budget else "steps"
    return {
        LINEAR: False,
        "measure_gradient_noise": True,
        "learning_rate_clock": clock,
    }


def head_problems(config: Any) -> Iterator[RampupError]:
    """Yield errors unless the heads divide the width and each other, for any
    configuration with a model.
    """
    heads, width = config.base_num_query_heads, config.base_emb_dim
    if width % (2 * heads):
        yield refuse(
            "base_num_query_heads",
            f"base_emb_dim={width} must be a multiple of 2 * base_num_query_heads ="
            f" {2 * heads}, so that every head has an even width",
            *nearest_in(heads, divisors(width // 2 if width % 2 == 0 else 0)),
        )
    if heads % config.num_kv_heads:
        yield refuse(
            "base_num_kv_heads",
            f"base_num_query_heads={heads} must be a multiple of"
            f" base_num_kv_heads={config.num_kv_heads}",
            *nearest_in(config.num_kv_heads, divisors(heads)),
        )
