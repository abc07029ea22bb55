"""Packs sequences of different lengths into microbatches of few shapes, by best-fit
decreasing onto a ladder of shapes.

The result is deterministic: the same lengths give the same microbatches on every
machine.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rampup.errors import ConfigError
from rampup.plan.numbers import MAX_COUNT

Bins = Sequence[Sequence[int]]

# More empty microbatches than this are an error, so that a typing error does not
# exhaust memory.
MAX_EMPTY = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatches:
    """Sequences in microbatches of a few static shapes, with the same number of
    microbatches on every replica.

    `replicas[r][j]` has the indices of the sequences in microbatch j of replica r.
    """

    lengths: tuple[int, ...]  # tokens of each sequence
    token_budget: int  # the maximum number of tokens in a microbatch
    ladder: tuple[int, ...]  # the allowed shapes in tokens, ascending
    microbatch_shapes: tuple[
        int, ...
    ]  # the shape of microbatch j in tokens. The same on every replica, which run one program.
    replicas: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of one replica."""
        return len(self.microbatch_shapes)

    @property
    def padded_tokens(self) -> int:
        """Tokens computed on all replicas, including padding."""
        return len(self.replicas) * sum(self.microbatch_shapes)

    @property
    def padding_fraction(self) -> float:
        """Padding as a fraction of the computed tokens."""
        return 1 - sum(self.lengths) / self.padded_tokens

    @property
    def shapes(self) -> tuple[int, ...]:
        """The different shapes in ascending order. Each is compiled once."""
        return tuple(sorted(set(self.microbatch_shapes)))


def make_ladder(token_budget: int, rungs: int = 4) -> tuple[int, ...]:
    """Return as many evenly spaced shapes as there are rungs, up to the token budget of
    a microbatch.

    All microbatches except the last are nearly full, and the last may have any number
    of tokens. Even spacing pads it least on average, and by at most token_budget /
    rungs. Each shape is compiled once.

    Raises:
        ConfigError: either is not a whole number of at least 1, or there are more rungs
            than tokens.

    Example:
        >>> make_ladder(16384, 4)
        (4096, 8192, 12288, 16384)
    """
    _check_count(token_budget, "token_budget")
    _check_count(rungs, "rungs", maximum=token_budget, limit="token_budget")
    return tuple(-(-token_budget * rung // rungs) for rung in range(1, rungs + 1))


def pack(
    lengths: Sequence[int],
    token_budget: int,
    ladder: Sequence[int],
    *,
    num_replicas: int = 1,
) -> PackedMicrobatches:
    """Pack sequences into as few microbatches as it can find, each within the budget
    and of a shape on the ladder.

    All replicas run one program, so microbatch j has the same shape on all of them.
    Larger shapes come first. A microbatch is empty, so all padding, only if there are
    fewer sequences than microbatches.

    Args:
        lengths: tokens of each sequence, as a list or an integer array.
        token_budget: the maximum number of tokens in a microbatch.
        ladder: shapes to pad to, ascending to the budget. See `make_ladder`.
        num_replicas: data-parallel replicas. Each gets the same number of microbatches.

    Raises:
        ConfigError: a sequence is longer than the budget, the ladder does not end
            there, or a number is out of range.

    Example:
        >>> packed = pack([100, 200, 300, 400, 500, 600], 1000, make_ladder(1000, 4))
        >>> packed.replicas, packed.microbatch_shapes, round(packed.padding_fraction, 3)
        ((((1, 2, 4), (3, 5), (0,)),), (1000, 1000, 250), 0.067)
    """
    values = _to_integers(lengths, "lengths")
    for limit, extreme in ((1, min(values)), (MAX_COUNT, max(values))):
        if not 1 <= extreme <= MAX_COUNT:
            text = (
                f"lengths[{values.index(extreme)}]={extreme:,} tokens must be between 1"
                " and 10**18"
            )
            raise ConfigError(text, key="lengths", nearest=[limit])
    _check_count(token_budget, "token_budget")
    rungs = tuple(_to_integers(ladder, "ladder"))
    rule = ""
    if rungs[0] < 1 or any(high <= low for low, high in itertools.pairwise(rungs)):
        rule = "be shapes of at least 1 token in ascending order"
    elif rungs[-1] != token_budget:
        problem = (
            "a full microbatch would not fit"
            if rungs[-1] < token_budget
            else "a microbatch would exceed it"
        )
        rule = f"end at token_budget={token_budget:,}, not at {rungs[-1]:,}: {problem}"
    if rule:
        nearest = [make_ladder(token_budget, min(len(rungs), token_budget))]
        raise ConfigError(f"ladder={rungs} must {rule}", key="ladder", nearest=nearest)
    _check_count(num_replicas, "num_replicas")
    if too_long := [
        index for index, length in enumerate(values) if length > token_budget
    ]:
        others = f" (and {len(too_long) - 1:,} more)" if len(too_long) > 1 else ""
        text = (
            f"lengths[{too_long[0]}]={values[too_long[0]]:,} tokens{others} exceeds"
            f" token_budget={token_budget:,}, and a "
        )
        text += (
            f"sequence is never split; nearest token_budget: {max(values):,}, or leave"
            " the sequence out"
        )
        raise ConfigError(text, key="token_budget", nearest=[max(values)])
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    # Best-fit opens a microbatch only if no other has room, so any two of them have
    # more than one budget together.
    most = min(len(values), 2 * sum(values) // token_budget + 1)
    filled = [
        members
        for members in _best_fit(values, order, [token_budget] * most) or ()
        if members
    ]
    num_microbatches = -(-len(filled) // num_replicas)
    if num_microbatches * num_replicas - len(values) > MAX_EMPTY:
        text = (
            f"num_replicas={num_replicas:,} gives {num_microbatches * num_replicas:,}"
            f" microbatches for {len(values):,} "
        )
        raise ConfigError(
            f"{text}sequences; at most {MAX_EMPTY:,} may be empty", key="num_replicas"
        )
    shape = rungs, num_microbatches, num_replicas
    on_rungs = _pack_onto_ladder(values, order, *shape)
    candidates = [
        _arrange(values, bins, *shape)
        for bins in (on_rungs, filled)
        if bins is not None
    ]
    return min(candidates, key=lambda candidate: candidate.padded_tokens)


def _best_fit(
    lengths: Sequence[int], order: Sequence[int], capacities: Sequence[int]
) -> list[list[int]] | None:
    """Put each sequence, in the given order, into the bin with the least room for it.
    Return None if one has no room anywhere.

    For descending lengths and equal bins it needs at most 11/9 of the fewest bins plus
    a constant (Johnson 1974).
    """
    free = sorted((capacity, number) for number, capacity in enumerate(capacities))
    bins: list[list[int]] = [[] for _ in capacities]
    for index in order:
        place = bisect_left(free, (lengths[index], -1))
        if place == len(free):
            return None
        room, number = free.pop(place)
        bins[number].append(index)
        insort(free, (room - lengths[index], number))
    return bins


def _pack_onto_ladder(
    lengths: Sequence[int],
    order: Sequence[int],
    ladder: Sequence[int],
    rows: int,
    width: int,
) -> Bins | None:
    """Pack into rows of bins of one shape: first full rows, then one row of a middle
    shape, then rows of the smallest shape.

    Among such layouts, numbered by their capacity, doubling and bisection find the
    smallest into which best-fit places every sequence. None if it fails even with full
    rows only.
    """
    steps = len(ladder) - 1
    last = rows * steps

    def shapes_of(layout: int) -> list[int]:
        full, rung = divmod(layout, steps) if steps else (rows, 0)
        return ([ladder[-1]] * full + [ladder[rung]] + [ladder[0]] * rows)[:rows]

    def try_layout(layout: int) -> Bins | None:
        return _best_fit(
            lengths, order, [shape for shape in shapes_of(layout) for _ in range(width)]
        )

    total = sum(lengths)
    first = bisect_left(
        range(last), total, key=lambda layout: width * sum(shapes_of(layout))
    )
    failed, layout, step = first - 1, first, 1
    while (found := try_layout(layout)) is None:
        if layout == last:
            return None
        failed, layout, step = layout, min(layout + step, last), 2 * step
    while failed + 1 < layout:
        middle = (failed + layout) // 2
        if (smaller := try_layout(middle)) is None:
            failed = middle
        else:
            found, layout = smaller, middle
    return found


def _arrange(
    lengths: Sequence[int],
    bins: Bins,
    ladder: tuple[int, ...],
    num_microbatches: int,
    num_replicas: int,
) -> PackedMicrobatches:
    """Return bins as microbatches, fullest first, so that those of similar size share a
    row of replicas and its rung.

    If there are fewer bins than places, the fullest bins give up their shortest
    sequences until every place has one.
    """
    filled = [
        sorted(members, key=lambda index: (-lengths[index], index))
        for members in bins
        if members
    ]
    num_places = num_microbatches * num_replicas
    # Taken from the fullest bin each time, so that the rows of replicas stay even. A
    # bin of one sequence has nothing to give.
    divisible = [
        (-sum(lengths[i] for i in members), members)
        for members in filled
        if len(members) > 1
    ]
    heapq.heapify(divisible)
    while divisible and len(filled) < num_places:
        tokens, members = heapq.heappop(divisible)
        filled.append([members.pop()])
        if len(members) > 1:
            heapq.heappush(divisible, (tokens + lengths[filled[-1][0]], members))
    loads = sorted(
        (-sum(lengths[index] for index in members), tuple(sorted(members)))
        for members in filled
    )
    places = loads + [(0, ())] * (num_places - len(loads))
    rows = [
        places[start : start + num_replicas]
        for start in range(0, num_places, num_replicas)
    ]
    shapes = tuple(ladder[bisect_left(ladder, -row[0][0])] for row in rows)
    replicas = tuple(
        zip(*([members for _, members in row] for row in rows), strict=True)
    )
    budget = ladder[-1]
    own = tuple(lengths)
    return PackedMicrobatches(
        lengths=own,
        token_budget=budget,
        ladder=ladder,
        microbatch_shapes=shapes,
        replicas=replicas,
    )


def _to_integers(values: Any, name: str) -> list[int]:
    """Return the elements of a sequence or an array as Python integers of any size."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        text = f"{items!r}"[:80]
        raise ConfigError(
            f"{name}={text} must be a sequence of token counts, for instance [512, 96]",
            key=name,
        )
    if not items:
        raise ConfigError(
            f"{name} is empty; it must have at least 1 token count", key=name
        )
    for index, item in enumerate(items):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise ConfigError(
                f"{name}[{index}]={str(item)[:80]!r} must be a whole number of tokens",
                key=name,
            )
    return list(map(operator.index, items))


def _check_count(
    value: object,
    name: str,
    *,
    maximum: int = MAX_COUNT,
    limit: str = "the largest count",
) -> None:
    nearest = [min(max(value, 1), maximum)] if type(value) is int else []
    if nearest != [value]:
        text = (
            f"{name}={value!r} must be a whole number between 1 and {limit} {maximum:,}"
        )
        raise ConfigError(text, key=name, nearest=nearest)
