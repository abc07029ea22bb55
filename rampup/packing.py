"""Balances sequences of different lengths over parts (`balance`), and packs them into microbatches of few shapes (`pack`).

`balance` improves up to three simple partitions by exchanging a few items between parts. `pack` uses best-fit decreasing
onto a ladder of shapes. Both are deterministic and exact: costs are whole numbers of any size.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Literal

import numpy as np

from rampup.errors import ConfigError
from rampup.notebook_repr import NotebookRepr
from rampup.plan.numbers import MAX_COUNT, exact_fraction

Cost = Literal["tokens"] | tuple[object, object]
Array = np.ndarray[Any, Any]
Bins = Sequence[Sequence[int]]

# More empty microbatches than this are an error, so that a typing error does not exhaust memory.
MAX_EMPTY = 10**6
# Larger inputs offer so many exchanges that the first start reaches the lower bound, or nearly so.
MORE_STARTS_ITEMS = 20_000
# Items times parts, beyond which differencing single items takes too long.
DIFFERENCING_WORK = 100_000
# 128 items of one part and 128 of another have enough pairs that their differences cover nearly every number near 0.
POOL_ITEMS = 128
# The items of a large part that may be exchanged, in eighths of the part sorted by size. Later rounds try other ranges.
POOLS = ((3, 5), (4, 6), (2, 4), (0, 8), (5, 7))
# The number of parts, cheapest first, that the most expensive part tries to exchange with.
PARTNERS = 16
# Exchanges per round, as a multiple of the number of parts.
EXCHANGES_PER_PART = 4
# How many items move (from, to) the most expensive part.
EXCHANGES = ((2, 2), (1, 1), (2, 1), (1, 2), (1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatches(NotebookRepr):
    """Sequences in microbatches of a few static shapes, with the same number of microbatches on every replica.

    Attributes:
        lengths: tokens of each sequence.
        token_budget: the maximum number of tokens in a microbatch.
        ladder: the allowed shapes in tokens, ascending.
        microbatch_shapes: the shape of microbatch j in tokens. The same on every replica, which run one program.
        replicas: `replicas[r][j]` has the indices of the sequences in microbatch j of replica r. It is empty, so all padding,
            only if there are fewer sequences than microbatches.
    """

    lengths: tuple[int, ...]
    token_budget: int
    ladder: tuple[int, ...]
    microbatch_shapes: tuple[int, ...]
    replicas: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas."""
        return len(self.replicas)

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of one replica."""
        return len(self.microbatch_shapes)

    @property
    def num_empty(self) -> int:
        """Number of microbatches, over all replicas, without a sequence."""
        return sum(not members for replica in self.replicas for members in replica)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens computed on all replicas, including padding."""
        return self.num_replicas * sum(self.microbatch_shapes)

    @property
    def padding_fraction(self) -> float:
        """Padding as a fraction of the computed tokens."""
        return 1 - self.num_tokens / self.padded_tokens

    @property
    def shapes(self) -> tuple[int, ...]:
        """The different shapes in ascending order. Each is compiled once."""
        return tuple(sorted(set(self.microbatch_shapes)))


def make_ladder(token_budget: int, rungs: int = 4) -> tuple[int, ...]:
    """Return evenly spaced shapes up to the token budget.

    All microbatches except the last are nearly full, and the last may have any number of tokens. Even spacing pads it least on
    average, and by at most token_budget / rungs.

    Args:
        token_budget: the maximum number of tokens in a microbatch, and the largest shape.
        rungs: the number of shapes. Each is compiled once.

    Raises:
        ConfigError: If either is not a whole number of at least 1, or there are more rungs than tokens.

    Example:
        >>> make_ladder(16384, 4)
        (4096, 8192, 12288, 16384)
    """
    _check_count(token_budget, "token_budget")
    _check_count(rungs, "rungs", maximum=token_budget, limit="token_budget")
    return tuple(-(-token_budget * rung // rungs) for rung in range(1, rungs + 1))


def imbalance(lengths: Sequence[int], parts: Sequence[Sequence[int]], cost: Cost = "tokens") -> float:
    """Return how much the most expensive part exceeds the mean, as a fraction of the mean.

    Example:
        >>> imbalance([5, 5, 4, 3, 3], [(0, 1), (2, 3, 4)]), imbalance([3, 1], [(0,), (1,)])
        (0.0, 0.5)
    """
    values = _check_lengths(lengths)
    linear, square = _cost_coefficients(cost)
    costs = [sum((linear + square * values[index]) * values[index] for index in part) for part in parts]
    return float(Fraction(max(costs) * len(costs), sum(costs)) - 1)


def balance(lengths: Sequence[int], k: int, cost: Cost = "tokens", equal_count: bool = False) -> tuple[tuple[int, ...], ...]:
    """Partition sequences into parts of nearly equal cost.

    The first start is a tree of differences between rows of k neighbors in size. If exchanges do not bring it down to the
    lower bound and the input is not large, largest-first and Karmarkar-Karp differencing are tried too. Exchanges move up to
    two sequences of the most expensive part to a cheap part, and up to two back. The same input gives the same parts on every
    machine.

    Args:
        lengths: tokens of each sequence, as a list or an integer array.
        k: number of parts, at most one per sequence.
        cost: `"tokens"`, or the coefficients (a, b) of a * L + b * L**2, which are used exactly.
        equal_count: parts differ by at most one in their number of sequences (by none if k divides it).

    Returns:
        For each part, the indices of its sequences in ascending order. Every index appears once, and no part is empty.

    Raises:
        ConfigError: If k, a length or a coefficient is out of range.

    Example:
        >>> balance([5, 5, 4, 3, 3], 2)
        ((2, 3, 4), (0, 1))
        >>> balance([10, 1, 1, 1, 1, 1], 2, cost=(1, 1), equal_count=True)
        ((0, 3, 5), (1, 2, 4))
    """
    tokens = _token_array(lengths)
    _check_count(k, "k", maximum=len(tokens), limit="the number of sequences")
    linear, square = _cost_coefficients(cost)
    longest = int(tokens.max())
    order = np.argsort((longest - tokens).astype(np.min_scalar_type(longest)), kind="stable")
    # Python integers take over if a sum of costs could overflow int64.
    fits_int64 = len(tokens) * (linear + square * longest) * longest < 2**62
    descending = tokens[order].astype(np.int64 if fits_int64 else object)
    labels = np.empty(len(tokens), dtype=np.min_scalar_type(k))
    labels[order] = _partition(linear * descending + square * descending**2, k, equal_count)
    members = np.argsort(labels, kind="stable").tolist()
    ends = np.bincount(labels, minlength=k).cumsum().tolist()
    return tuple(tuple(members[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def pack(
    lengths: Sequence[int], token_budget: int, ladder: Sequence[int], *, num_replicas: int = 1, multiple_of: int = 1
) -> PackedMicrobatches:
    """Pack sequences into as few microbatches as it can find, each within the budget and of a shape on the ladder.

    All replicas run one program, so microbatch j has the same shape on all of them. Larger shapes come first. A microbatch is
    empty only if there are fewer sequences than microbatches.

    Args:
        lengths: tokens of each sequence, as a list or an integer array. None exceeds the budget.
        token_budget: the maximum number of tokens in a microbatch.
        ladder: shapes to pad to, ascending to the budget. See `make_ladder`.
        num_replicas: data-parallel replicas. Each gets the same number of microbatches.
        multiple_of: the number of microbatches of a replica is a multiple of this number, for example of pipeline stages.

    Raises:
        ConfigError: If a sequence is longer than the budget, the ladder does not end there, or a number is out of range.

    Example:
        >>> packed = pack([100, 200, 300, 400, 500, 600], 1000, make_ladder(1000, 4))
        >>> packed.replicas, packed.microbatch_shapes, round(packed.padding_fraction, 3)
        ((((1, 2, 4), (3, 5), (0,)),), (1000, 1000, 250), 0.067)
    """
    values = _check_lengths(lengths)
    _check_count(token_budget, "token_budget")
    rungs = _check_ladder(ladder, token_budget)
    _check_count(num_replicas, "num_replicas")
    _check_count(multiple_of, "multiple_of")
    if too_long := [index for index, length in enumerate(values) if length > token_budget]:
        others = f" (and {len(too_long) - 1:,} more)" if len(too_long) > 1 else ""
        raise ConfigError(
            f"lengths[{too_long[0]}]={values[too_long[0]]:,} tokens{others} exceeds token_budget={token_budget:,}, and a "
            f"sequence is never split; nearest token_budget: {max(values):,}, or leave the sequence out",
            key="token_budget",
            nearest=[max(values)],
        )
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    unit = num_replicas * multiple_of
    bins = _pack_fewest(values, order, token_budget, unit)
    num_places = -(-len(bins) // unit) * unit
    if num_places - len(values) > MAX_EMPTY:
        raise ConfigError(
            f"num_replicas * multiple_of = {unit:,} gives {num_places:,} microbatches for {len(values):,} sequences; at most "
            f"{MAX_EMPTY:,} may be empty",
            key="num_replicas",
        )
    shape = rungs, num_places // num_replicas, num_replicas
    candidates = [bins]
    if (on_rungs := _pack_onto_ladder(values, order, *shape)) is not None:
        candidates.insert(0, on_rungs)
    packed = [_arrange(values, found, *shape) for found in candidates]
    # A balanced partition can save a whole rung of padding if the best-fit bins are uneven.
    smallest_gap = min((high - low for low, high in itertools.pairwise(rungs)), default=MAX_COUNT)
    if packed[0].padded_tokens - sum(values) >= smallest_gap * num_replicas:
        even = balance(values, min(num_places, len(values)))
        if _largest_load(values, even) <= token_budget:
            packed.append(_arrange(values, even, *shape))
    return min(packed, key=lambda candidate: candidate.padded_tokens)


# --- balance: two starts, improved by exchanges. Costs are in descending order, and a label is the part of an item. ---


def _partition(costs: Array, num_parts: int, equal_count: bool) -> Array:
    """Return the part of each item."""
    n = len(costs)
    counts = (n // num_parts, -(-n // num_parts)) if equal_count else (1, n)
    # Lower bounds on the most expensive part. It costs a multiple of the common divisor and at least the mean. If each part has
    # several items, so has that of the largest item. Two of the num_parts + 1 largest items share a part.
    unit = math.gcd(*costs[:: n // 64 + 1].tolist())
    unit = unit if unit == 1 else math.gcd(*costs.tolist())
    bound = max(-(-int(costs.sum()) // (num_parts * unit)) * unit, int(costs[0]) + int(costs[n - counts[0] + 1 :].sum()))
    if num_parts < n:
        bound = max(bound, int(costs[num_parts - 1]) + int(costs[num_parts]))
    best = _tree_of_differences(costs, num_parts)
    reached = _Exchanger(costs, best, num_parts, counts, bound).run()
    starts = [_largest_first] * (n <= MORE_STARTS_ITEMS)
    if starts and (equal_count or n * num_parts <= DIFFERENCING_WORK):
        starts.append(_largest_differences)
    for start in starts:
        if reached == bound:
            break
        labels = np.array(start(costs.tolist(), num_parts, equal_count), dtype=np.intp)
        if (other := _Exchanger(costs, labels, num_parts, counts, bound).run()) < reached:
            best, reached = labels, other
    return best


def _largest_first(costs: Sequence[int], num_parts: int, equal_count: bool) -> list[int]:
    """Assign every item, largest first, to the cheapest part that may have one more.

    Without `equal_count`, no part costs more than 4/3 - 1/(3 * num_parts) of the optimum (Graham 1969).
    """
    floor, extra = divmod(len(costs), num_parts) if equal_count else (len(costs), 0)
    heap = [(0, part) for part in range(num_parts)]
    counts = [0] * num_parts
    labels = []
    for cost in costs:
        load, part = heap[0]
        while counts[part] > floor or (counts[part] == floor and not extra):
            heapq.heappop(heap)
            load, part = heap[0]
        extra -= counts[part] == floor
        counts[part] += 1
        labels.append(part)
        heapq.heapreplace(heap, (load + cost, part))
    return labels


def _largest_differences(costs: Sequence[int], num_parts: int, equal_count: bool) -> list[int]:
    """Merge the two partial partitions of the largest spread, expensive parts with cheap ones (Karmarkar and Karp 1982).

    A partial partition has the costs and the items of its parts in descending order of cost. With `equal_count` it starts as
    a row of neighbors in size instead of a single item (Michiels et al. 2003).
    """
    width = num_parts if equal_count else 1
    heap = []
    for start in range(0, len(costs), width):
        row = [(cost, [start + place]) for place, cost in enumerate(costs[start : start + width])]
        row += [(0, list[int]())] * (num_parts - len(row))
        heap.append((row[-1][0] - row[0][0], start, row))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, start, first = heapq.heappop(heap)
        pairs = zip(first, reversed(heap[0][2]), strict=True)
        row = sorted(((a + b, items + others) for (a, items), (b, others) in pairs), key=operator.itemgetter(0), reverse=True)
        heapq.heapreplace(heap, (row[-1][0] - row[0][0], start, row))
    labels = [0] * len(costs)
    for part, (_, items) in enumerate(heap[0][2]):
        for item in items:
            labels[item] = part
    return labels


def _tree_of_differences(costs: Array, num_parts: int) -> Array:
    """Return a partition with equal counts: rows of neighbors are merged in pairs, expensive parts with cheap ones.

    All pairs of a level are merged at once, in log n levels. Zeros complete a missing or short row. This is
    the balanced differencing method of Michiels et al. 2003, with the rows paired by level instead of by a heap.
    """
    n = len(costs)
    rows = np.zeros((-(-n // num_parts), num_parts), dtype=costs.dtype)
    rows.ravel()[:n] = costs
    levels = []
    while len(rows) > 1:
        if len(rows) % 2:
            rows = np.concatenate([rows, np.zeros_like(rows[:1])])
        by_spread = np.argsort(rows[:, -1] - rows[:, 0], kind="stable")
        rows = rows[by_spread]
        merged = rows[0::2] + rows[1::2, ::-1]
        by_cost = np.argsort(-merged, axis=1, kind="stable")
        rows = np.take_along_axis(merged, by_cost, axis=1)
        levels.append((by_spread, by_cost))
    # Back down the tree: undo each level's two permutations to find the part of every item.
    labels = np.arange(num_parts, dtype=np.intp)[None]
    for by_spread, by_cost in reversed(levels):
        merged = np.empty_like(by_cost)
        np.put_along_axis(merged, by_cost, labels[: len(by_cost)], axis=1)
        labels = np.empty((len(by_spread), num_parts), dtype=np.intp)
        labels[by_spread[0::2]] = merged
        labels[by_spread[1::2]] = merged[:, ::-1]
    return labels.ravel()[:n]


class _Exchanger:
    """Lowers the most expensive part of a partition, in place, by exchanging a few items with another part.

    `labels` has the part of each item, `counts` the minimum and maximum number of items in a part. No partition has a most
    expensive part cheaper than `bound`.
    """

    def __init__(self, costs: Array, labels: Array, num_parts: int, counts: tuple[int, int], bound: int) -> None:
        self.costs, self.labels, self.num_parts, self.limits, self.bound = costs, labels, num_parts, counts, bound

    def run(self) -> int:
        """Exchange items until the most expensive part cannot be lowered. Return its cost."""
        for eighths in POOLS:
            self._group_by_part(eighths)
            for _ in range(EXCHANGES_PER_PART * self.num_parts):
                if not self._lower_largest():
                    break
            if self.loads.max() == self.bound or self.counts.max() <= POOL_ITEMS:
                break
        return int(self.loads.max())

    def _group_by_part(self, eighths: tuple[int, int]) -> None:
        """Sort the items by part. Pools will be taken from between these eighths of a part's items by size."""
        self.members = np.argsort(self.labels.astype(np.min_scalar_type(self.num_parts)), kind="stable")
        self.counts: Array = np.bincount(self.labels, minlength=self.num_parts)
        self.starts = self.counts.cumsum() - self.counts
        self.loads: Array = np.add.reduceat(self.costs[self.members], self.starts)
        self.eighths = eighths
        self.pools: dict[int, Array] = {}

    def _lower_largest(self) -> bool:
        part = int(np.argmax(self.loads))
        if self.loads[part] == self.bound:
            return False
        # The cheapest part usually works, so the others are sorted only if it does not.
        if self._exchange(part, int(np.argmin(self.loads))):
            return True
        return any(self._exchange(part, partner) for partner in self.loads.argsort(kind="stable")[1:PARTNERS].tolist())

    def _exchange(self, part: int, partner: int) -> bool:
        """Make the exchange that best lowers the larger of two parts. Return False if none lowers it."""
        high, low = int(self.loads[part]), int(self.loads[partner])
        pool, partner_pool = self._pool(part), self._pool(partner)
        (fewest, most), count, partner_count = self.limits, int(self.counts[part]), int(self.counts[partner])
        moves = [
            (given, taken)
            for given, taken in EXCHANGES
            if fewest <= count - given + taken <= most and fewest <= partner_count + given - taken <= most
        ]
        # First try to reach the bound without pushing the partner over it, then to meet in the middle.
        for wanted in dict.fromkeys([min(high - self.bound, self.bound - low), (high - low) // 2]):
            found = _find_nearest(self.costs[pool], self.costs[partner_pool], wanted, moves)
            if found is not None and 0 < found[0] < high - low:
                self._move(part, partner, *found)
                return True
        return False

    def _move(self, part: int, partner: int, net: int, given: list[int], taken: list[int]) -> None:
        pool, partner_pool = self._pool(part), self._pool(partner)
        to_partner, to_part = pool[given], partner_pool[taken]
        self.pools[part] = np.concatenate([np.delete(pool, given), to_part])
        self.pools[partner] = np.concatenate([np.delete(partner_pool, taken), to_partner])
        self.labels[to_partner], self.labels[to_part] = partner, part
        change = len(given) - len(taken)
        self.counts[part] -= change
        self.counts[partner] += change
        self.loads[part] -= net
        self.loads[partner] += net

    def _pool(self, part: int) -> Array:
        """Return the items of a part that may be exchanged."""
        if part not in self.pools:
            start, count = int(self.starts[part]), int(self.counts[part])
            places = np.arange(min(count, POOL_ITEMS))
            if count > POOL_ITEMS:
                first, end = (count * eighth // 8 for eighth in self.eighths)
                width = max(end - first, POOL_ITEMS)
                places = min(first, count - width) + places * width // POOL_ITEMS
            self.pools[part] = self.members[start + places]
        return self.pools[part]


def _find_nearest(
    costs: Array, partner_costs: Array, wanted: int, moves: list[tuple[int, int]]
) -> tuple[int, list[int], list[int]] | None:
    """Return the net cost of an exchange nearest to `wanted`, and the positions in both pools that make it.

    For each number of items (given, taken), sort the sums of the partner's choices and search them for every sum of ours.
    """
    best: tuple[int, int, list[int], list[int]] | None = None
    for given, taken in moves:
        sums, partner_sums = _sums(costs, given), _sums(partner_costs, taken)
        if not (len(sums) and len(partner_sums)):
            continue
        ordered = np.sort(partner_sums)
        above = np.searchsorted(ordered, sums - wanted)
        for place in (np.minimum(above, len(ordered) - 1), np.maximum(above - 1, 0)):
            net = sums - ordered[place]
            index = int(np.argmin(np.abs(net - wanted)))
            error = abs(int(net[index]) - wanted)
            if best is None or error < best[0]:
                partner_index = int((partner_sums == ordered[place[index]]).argmax())
                positions = _positions(len(costs), given, index), _positions(len(partner_costs), taken, partner_index)
                best = error, int(net[index]), *positions
            if error == 0:
                return best[1:]
    return best and best[1:]


@cache
def _pairs(count: int) -> tuple[Array, Array]:
    first, second = np.triu_indices(count, 1)
    return first, second


def _sums(costs: Array, size: int) -> Array:
    """Return the cost of every choice of 0, 1 or 2 items."""
    if size == 2:
        first, second = _pairs(len(costs))
        return costs[first] + costs[second]
    return costs if size else costs[:1] * 0


def _positions(count: int, size: int, index: int) -> list[int]:
    """Return the positions of the items of choice `index` of `_sums`."""
    return [int(half[index]) for half in _pairs(count)] if size == 2 else [index] * size


# --- pack: best fit, onto rows of shapes ---


def _largest_load(lengths: Sequence[int], bins: Bins) -> int:
    return max(sum(lengths[index] for index in members) for members in bins)


def _pack_fewest(lengths: list[int], order: list[int], token_budget: int, unit: int) -> Bins:
    """Return bins within the budget. Their number, rounded up to a multiple of `unit`, is the smallest that was found."""
    total = sum(lengths)
    # Best-fit opens a bin only if no other has room, so any two of its bins have more than one budget.
    most = min(len(lengths), 2 * total // token_budget + 1)
    found = _best_fit(lengths, order, [token_budget] * most)
    assert found is not None
    bins: Bins = [members for members in found if members]
    while True:
        fewer = (len(bins) - 1) // unit * unit
        if fewer * token_budget < total:
            return bins
        even = balance(lengths, fewer)
        if _largest_load(lengths, even) > token_budget:
            return bins
        bins = even


def _best_fit(lengths: Sequence[int], order: Sequence[int], capacities: Sequence[int]) -> list[list[int]] | None:
    """Put each sequence, in the given order, into the bin with the least room for it. Return None if one has no room anywhere.

    In descending order of length and with bins of one size this is best-fit decreasing, which needs at most 11/9 of the
    fewest bins plus a constant (Johnson 1974).
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
    lengths: Sequence[int], order: Sequence[int], ladder: Sequence[int], rows: int, width: int
) -> Bins | None:
    """Pack into rows of bins of one shape: first full rows, then one row of a middle shape, then rows of the smallest shape.

    Such layouts are numbered by their capacity. A doubling and then a binary search finds the smallest capacity for which
    best-fit places every sequence. None if it fails even with full rows only.
    """
    steps = len(ladder) - 1
    last = rows * steps

    def shapes_of(layout: int) -> list[int]:
        full, rung = divmod(layout, steps) if steps else (rows, 0)
        return ([ladder[-1]] * full + [ladder[rung]] + [ladder[0]] * rows)[:rows]

    def try_layout(layout: int) -> Bins | None:
        return _best_fit(lengths, order, [shape for shape in shapes_of(layout) for _ in range(width)])

    total = sum(lengths)
    first = bisect_left(range(last), total, key=lambda layout: width * sum(shapes_of(layout)))
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
    lengths: Sequence[int], bins: Bins, ladder: tuple[int, ...], num_microbatches: int, num_replicas: int
) -> PackedMicrobatches:
    """Return bins as microbatches, fullest first. Bins of similar size share a row of replicas, and a row has its lowest rung.

    If there are fewer bins than places, the fullest bins give up their shortest sequences until every place has one.
    """
    filled = [sorted(members, key=lambda index: (-lengths[index], index)) for members in bins if members]
    num_places = num_microbatches * num_replicas
    divisible = [(-sum(lengths[i] for i in m), m) for m in filled if len(m) > 1] if len(filled) < num_places else []
    heapq.heapify(divisible)
    while divisible and len(filled) < num_places:
        tokens, members = divisible[0]
        shortest = members.pop()
        filled.append([shortest])
        if len(members) > 1:
            heapq.heapreplace(divisible, (tokens + lengths[shortest], members))
        else:
            heapq.heappop(divisible)
    loads = sorted((-sum(lengths[index] for index in members), tuple(sorted(members))) for members in filled)
    places = loads + [(0, ())] * (num_places - len(loads))
    rows = [places[start : start + num_replicas] for start in range(0, num_places, num_replicas)]
    return PackedMicrobatches(
        lengths=tuple(lengths),
        token_budget=ladder[-1],
        ladder=ladder,
        microbatch_shapes=tuple(ladder[bisect_left(ladder, -row[0][0])] for row in rows),
        replicas=tuple(zip(*([members for _, members in row] for row in rows), strict=True)),
    )


# --- arguments ---


def _token_array(lengths: Sequence[int]) -> Array:
    """Return checked lengths as an int64 array. NumPy checks their range faster than Python does."""
    values = _to_integers(lengths)
    with contextlib.suppress(OverflowError):
        tokens: Array = np.array(values, dtype=np.int64)
        if tokens.min() >= 1 and tokens.max() <= MAX_COUNT:
            return tokens
    return np.array(_check_lengths(values), dtype=np.int64)


def _check_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths as Python integers, each between 1 and 10**18."""
    values = _to_integers(lengths)
    for limit, extreme in ((1, min(values)), (MAX_COUNT, max(values))):
        if not 1 <= extreme <= MAX_COUNT:
            where = f"lengths[{values.index(extreme)}]={extreme:,}"
            raise ConfigError(f"{where} tokens must be between 1 and 10**18", key="lengths", nearest=[limit])
    return values


def _to_integers(values: Any, name: str = "lengths") -> list[int]:
    """Return the elements of a sequence or an array as Python integers of any size."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        text = f"{items!r}"[:80]
        raise ConfigError(f"{name}={text} must be a sequence of token counts, for instance [512, 96]", key=name)
    if not items:
        raise ConfigError(f"{name} is empty; it must have at least 1 token count", key=name)
    if set(map(type, items)) == {int}:
        return list(items)
    found = []
    for index, item in enumerate(items):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise ConfigError(f"{name}[{index}]={str(item)[:80]!r} must be a whole number of tokens", key=name)
        found.append(operator.index(item))
    return found


def _check_count(value: object, name: str, *, maximum: int = MAX_COUNT, limit: str = "the largest count") -> None:
    """Raise a ConfigError unless a value is a whole number between 1 and a maximum, whose name is `limit`."""
    if type(value) is int and 1 <= value <= maximum:
        return
    nearest = [min(max(value, 1), maximum)] if type(value) is int else []
    raise ConfigError(f"{name}={value!r} must be a whole number between 1 and {limit} {maximum:,}", key=name, nearest=nearest)


def _check_ladder(ladder: Sequence[int], token_budget: int) -> tuple[int, ...]:
    """Return a ladder of shapes that ascends to the token budget, or raise a ConfigError."""
    rungs = tuple(_to_integers(ladder, "ladder"))
    nearest = [make_ladder(token_budget, min(len(rungs), token_budget))]
    rule = ""
    if rungs[0] < 1 or any(high <= low for low, high in itertools.pairwise(rungs)):
        rule = "be shapes of at least 1 token in ascending order"
    elif rungs[-1] != token_budget:
        problem = "a full microbatch would not fit" if rungs[-1] < token_budget else "a microbatch would exceed it"
        rule = f"end at token_budget={token_budget:,}, not at {rungs[-1]:,}: {problem}"
    if rule:
        raise ConfigError(f"ladder={rungs} must {rule}", key="ladder", nearest=nearest)
    return rungs


def _cost_coefficients(cost: Cost) -> tuple[int, int]:
    """Return a cost per length as whole coefficients (a, b) of a * L + b * L**2, scaled if they were fractions."""
    if isinstance(cost, str) and cost == "tokens":
        return 1, 0
    if not (isinstance(cost, tuple | list) and len(cost) == 2):
        raise ConfigError(f"cost={cost!r} must be 'tokens' or two coefficients (a, b) of a*L + b*L**2", key="cost")
    linear, square = (exact_fraction(value, what="cost", key="cost") for value in cost)
    if linear < 0 or square < 0 or not linear + square:
        raise ConfigError(f"cost={cost!r} must be two coefficients of at least 0, one of them above 0", key="cost")
    scale = math.lcm(linear.denominator, square.denominator)
    return int(linear * scale), int(square * scale)
