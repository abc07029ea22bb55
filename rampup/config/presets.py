"""Published rules for batch and hyperparameters, each as a set of keys that `preset` gives defaults to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rampup.errors import ConfigError

NANOCHAT_REFERENCE_TOKENS = 1_321_210_944
NANOCHAT_REFERENCE_BATCH = 2**19
# The keys with which a preset sets the batch.
RAMP_KEYS = ("enable_rampup_batch_size", "batch_size_schedule", "batch_size_schedule_unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published rule."""

    summary: str  # what it sets, in one or two sentences
    source: str  # where it is published
    keys: tuple[str, ...]  # the keys that it gives defaults to
    # Their values for a run, from its tokens per sample and its tokens, None without a budget. A key that is set in the same
    # file as `preset`, or nearer to the command line, wins.
    values: Callable[[int, int | None], Mapping[str, Any]]


def _samples(preset: str, tokens: int, length: int) -> int:
    """Return a batch of tokens in samples, which must be a whole number."""
    if tokens % length:
        legal = [2**k for k in range(20) if tokens % 2**k == 0 and 2**k < length][-1:]
        rule = f"preset={preset} has batches of {tokens:,} tokens, which max_target_length={length} does not divide"
        nearest = f"; nearest: {legal[0]}" if legal else ""
        raise ConfigError(f"{rule}{nearest}", key="max_target_length", nearest=legal)
    return tokens // length


def _schedule(preset: str, length: int, thresholds: list[tuple[int, int]]) -> dict[str, Any]:
    """Return a schedule from pairs of tokens consumed and tokens per batch."""
    pairs = " ".join(f"{start}:{_samples(preset, batch, length)}" for start, batch in thresholds)
    return dict(zip(RAMP_KEYS, (False, pairs, "tokens"), strict=True))


def _nanochat(length: int, tokens: int | None) -> dict[str, Any]:
    if tokens is None:
        rule = "preset=nanochat computes the batch and the weight decay from the tokens of the run"
        raise ConfigError(f"{rule}; set train_tokens or train_samples", key="train_tokens")
    wanted = NANOCHAT_REFERENCE_BATCH * (tokens / NANOCHAT_REFERENCE_TOKENS) ** 0.383
    return _schedule("nanochat", length, [(0, 2 ** round(math.log2(wanted)))]) | {
        "batch_scaling_reference": _samples("nanochat", NANOCHAT_REFERENCE_BATCH, length),
        "batch_scaling": "timescale",
        "adam_weight_decay_reference_tokens": NANOCHAT_REFERENCE_TOKENS,
    }


PRESETS: dict[str, Preset] = {
    "nanochat": Preset(
        summary="Three formulas for a run of D tokens: a batch of 2**19 * (D / 1.32B)**0.383 tokens, rounded to a power of 2; "
        "the learning rate times sqrt(batch / 2**19); and the weight decay times sqrt(batch / 2**19) * 1.32B / D, which keeps "
        "the timescale of AdamW. learning_rate and adam_weight_decay are those of a run of 1.32B tokens with a batch of 2**19. "
        "Not all of nanochat's recipe: it applies the weight decay to the matrices of Muon only, and lets it fall to 0.",
        source="karpathy/nanochat, scripts/base_train.py; exponent of Bergsma et al. 2025, arXiv 2505.13738; timescale of Wang "
        "& Aitchison 2024, arXiv 2405.13698",
        keys=(*RAMP_KEYS, "batch_scaling", "batch_scaling_reference", "adam_weight_decay_reference_tokens"),
        values=_nanochat,
    ),
    "marin": Preset(
        summary="adam_b2 is 0.999**(batch / 32), between 0.95 and 0.9999, for a batch in sequences of 4,096 tokens: the same "
        "half-life in tokens for every batch, and no lower than is stable. The sweep of issue 4567 finds slightly lower "
        "values.",
        source="marin-community/marin, pull request 2447 (the floor) and issue 4567 (the sweep); Marek et al. 2025, arXiv "
        "2507.07101",
        keys=("adam_b2", "batch_scaling", "adam_b2_floor", "batch_scaling_reference"),
        values=lambda length, tokens: {
            "adam_b2": 0.999,
            "batch_scaling": "half_life",
            "adam_b2_floor": 0.95,
            "batch_scaling_reference": _samples("marin", 32 * 4096, length),
        },
    ),
    "olmo": Preset(
        summary="The batch size warm-up of OLMo 1B: 1,024 sequences of 4,096 tokens, 2,048 after 168B tokens and 4,096 after "
        "503B, where measured critical batch sizes allow them. learning_rate is that of the first batch and grows by sqrt(2) "
        "with each doubling.",
        source="Merrill et al. 2025, arXiv 2505.23971",
        keys=(*RAMP_KEYS, "batch_scaling", "batch_scaling_reference"),
        values=lambda length, tokens: (
            _schedule("olmo", length, [(0, 1024 * 4096), (168 * 10**9, 2048 * 4096), (503 * 10**9, 4096 * 4096)])
            | {"batch_scaling": "sqrt", "batch_scaling_reference": _samples("olmo", 1024 * 4096, length)}
        ),
    ),
}
