"""Packs samples of different lengths into passes of a token budget, with Grain.

The result is deterministic: the same lengths give the same passes on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grain
import numpy as np


def packed_rows(
    rows: Mapping[str, np.ndarray],
    lengths: Sequence[int] | np.ndarray,
    *,
    token_budget: int,
    num_replicas: int = 1,
) -> dict[str, np.ndarray]:
    """Return rows of one sample, such as those of `loss_rows`, packed into passes:
    arrays (n, replicas, token_budget).

    First fit, the longest sample first, so every row but the last has as many samples
    as it has room for, if all had the maximum length. All passes have one shape.

    Args:
        rows: arrays (S, T), with `tokens`; only the first `lengths` entries are used.
        lengths: tokens of each sample (S,), each at most the budget.
        token_budget: tokens of a pass of one replica.
        num_replicas: data-parallel replicas, which get the same number of passes.

    Returns:
        The packed rows, with `positions`, which begin at 0 in each sample, and
        `segments`: 1, 2, ...; padding is 0.

    Example:
        >>> tokens = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
        >>> packed = packed_rows({"tokens": tokens}, [2, 1, 3], token_budget=4)
        >>> packed["tokens"].tolist(), packed["segments"].tolist()
        ([[[4, 5, 6, 3]], [[1, 2, 0, 0]]], [[[1, 1, 1, 2]], [[1, 1, 0, 0]]])
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    samples = [
        {name: x[member, : lengths[member]] for name, x in rows.items()}
        for member in order
    ]
    # As many bins as there are samples, so that Grain never closes one early.
    packed = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(samples).to_iter_dataset(
            grain.ReadOptions(num_threads=0)
        ),
        length_struct=dict.fromkeys(rows, token_budget),
        num_packing_bins=len(samples),
        shuffle_bins=False,
        meta_features=[name for name in rows if name != "tokens"],
    )
    bins = list(packed)
    bins += [{name: np.zeros_like(x) for name, x in bins[0].items()}] * (
        -len(bins) % num_replicas
    )
    found = {
        name: np.stack([each[name] for each in bins]).reshape(
            -1, num_replicas, token_budget
        )
        for name in bins[0]
    }
    found["positions"] = found.pop("tokens_positions")
    found["segments"] = found.pop("tokens_segment_ids")
    return found
