"""Sequences into parts of nearly equal cost (`balance`), and into microbatches of a few static shapes (`pack`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rampup.plan.balancing import common_divisor, differencing, largest_first, smallest_maximum
from rampup.plan.numbers import MAX_COUNT
from rampup.plan.packed import (
    Bins,
    Cost,
    PackedMicrobatches,
    arrange,
    best_fit,
    check_budget,
    check_count,
    check_ladder,
    check_places,
    cost_coefficients,
    fitting_first,
    imbalance,
    integers,
    make_ladder,
    whole_lengths,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

__all__ = ["PackedMicrobatches", "balance", "imbalance", "make_ladder", "pack"]

EXACT_ITEMS = 10
# Larger inputs have so many exchanges that the first start reaches the least possible cost, or all but.
MORE_STARTS_ITEMS = 20_000
DIFFERENCING_WORK = 100_000
# Pairs out of 128 items of similar size, against as many of another part, differ by almost every whole number near 0.
POOL_ITEMS = 128
# Where a large part's pool is taken from, in eighths of its items by size: the middle, its neighbourhood, everywhere.
POOLS = ((3, 5), (4, 6), (2, 4), (0, 8), (5, 7))
PARTNERS = 16
EXCHANGES_PER_PART = 4
EXCHANGES = ((2, 2), (1, 1), (2, 1), (1, 2), (1, 0))


def balance(lengths: Sequence[int], k: int, cost: Cost = "tokens", equal_count: bool = False) -> tuple[tuple[int, ...], ...]:
    """Cut sequences into parts of nearly equal cost.

    Starts from a tree of differences between rows of k neighbours in size; where that does not reach the least possible
    cost and the input is not large, also from largest-first and from Karmarkar-Karp differencing. Each start is improved by
    exchanging up to two sequences of the most expensive part against up to two of a cheap one. Up to ten sequences are
    cut optimally. The same input gives the same parts on every machine.

    Args:
        lengths: tokens of each sequence; an integer array will do.
        k: number of parts, at most one per sequence.
        cost: `"tokens"`, or the coefficients (a, b) of a * L + b * L**2, which are taken exactly.
        equal_count: whether the parts' counts may differ by at most one (not at all where k divides their number).

    Returns:
        For each part, the indices of its sequences in ascending order; every index once, no part empty.

    Raises:
        ConfigError: k, a length or a coefficient is out of range.

    Example:
        >>> balance([5, 5, 4, 3, 3], 2)
        ((2, 3, 4), (0, 1))
        >>> balance([10, 1, 1, 1, 1, 1], 2, cost=(1, 1), equal_count=True)
        ((0, 3, 5), (1, 2, 4))
    """
    import numpy as np

    tokens = _token_array(lengths)
    check_count(k, "k", most=len(tokens), limit="the number of sequences")
    linear, square = cost_coefficients(cost)
    longest = int(tokens.max())
    order = np.argsort((longest - tokens).astype(np.min_scalar_type(longest)), kind="stable")
    fits = len(tokens) * (linear + square * longest) * longest < 2**62
    descending = tokens[order].astype(np.int64 if fits else object)
    labels = np.empty(len(tokens), dtype=np.min_scalar_type(k))
    labels[order] = _Balancer.of(linear * descending + square * descending**2, k, equal_count).solve()
    members = np.argsort(labels, kind="stable").tolist()
    ends = np.bincount(labels, minlength=k).cumsum().tolist()
    return tuple(tuple(members[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True))


def pack(
    lengths: Sequence[int], token_budget: int, ladder: Sequence[int], *, num_replicas: int = 1, multiple_of: int = 1
) -> PackedMicrobatches:
    """Pack sequences into as few microbatches as can be found, none over the budget, each of a shape on the ladder.

    All replicas run one program, so microbatch j has one shape on all of them; larger shapes come first. A microbatch is
    empty only where there are fewer sequences than microbatches.

    Args:
        lengths: tokens of each sequence, none over the budget; an integer array will do.
        token_budget: tokens that a microbatch may hold, all its sequences together.
        ladder: shapes to pad to, ascending to the budget; see `make_ladder`.
        num_replicas: data-parallel replicas, each of which gets the same number of microbatches.
        multiple_of: what the number of microbatches of a replica must be a multiple of, for instance a pipeline's stages.

    Raises:
        ConfigError: a sequence is longer than the budget, the ladder does not end there, or a number is out of range.

    Example:
        >>> packed = pack([100, 200, 300, 400, 500, 600], 1000, make_ladder(1000, 4))
        >>> packed.replicas, packed.microbatch_shapes, round(packed.padding_fraction, 3)
        ((((1, 2, 4), (3, 5), (0,)),), (1000, 1000, 250), 0.067)
    """
    values = whole_lengths(lengths)
    check_count(token_budget, "token_budget")
    rungs = check_ladder(ladder, token_budget)
    check_count(num_replicas, "num_replicas")
    check_count(multiple_of, "multiple_of")
    check_budget(values, token_budget)
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    unit = num_replicas * multiple_of
    bins = _fewest_bins(values, order, token_budget, unit)
    num_places = -(-len(bins) // unit) * unit
    check_places(num_places, len(values), unit)
    shape = rungs, num_places // num_replicas, num_replicas
    lowered = fitting_first(values, order, *shape)
    packed = [arrange(values, found, *shape) for found in (lowered, bins) if found is not None]
    gap = min((high - low for low, high in itertools.pairwise(rungs)), default=MAX_COUNT)
    if packed[0].padded_tokens - sum(values) >= gap * num_replicas:
        even = balance(values, min(num_places, len(values)))
        if max(sum(values[index] for index in part) for part in even) <= token_budget:
            packed.append(arrange(values, even, *shape))
    return min(packed, key=lambda candidate: candidate.padded_tokens)


def _fewest_bins(lengths: list[int], order: list[int], token_budget: int, unit: int) -> Bins:
    """Return bins, none over the budget, that need as few multiples of `unit` as can be found."""
    total = sum(lengths)
    # Best-fit opens a bin only if no other has room, so any two of its bins hold more than one budget.
    most = min(len(lengths), 2 * total // token_budget + 1)
    found = best_fit(lengths, order, [token_budget] * most)
    assert found is not None
    bins: Bins = [members for members in found if members]
    while True:
        fewer = (len(bins) - 1) // unit * unit
        if fewer * token_budget < total:
            return bins
        even = balance(lengths, fewer)
        if max(sum(lengths[index] for index in part) for part in even) > token_budget:
            return bins
        bins = even


def _token_array(lengths: Sequence[int]) -> Array:
    """Return checked lengths as an int64 array; NumPy looks at their range faster than Python does."""
    import numpy as np

    values = integers(lengths)
    try:
        tokens: Array = np.array(values, dtype=np.int64)
        in_range = tokens.min() >= 1 and tokens.max() <= MAX_COUNT
    except OverflowError:
        in_range = False
    return tokens if in_range else np.array(whole_lengths(values), dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Balancer:
    """Costs in descending order, and what their partition must keep to.

    Attributes:
        costs: int64 where no sum can overflow, otherwise Python integers.
        num_parts: parts to make.
        equal_count: whether the parts' counts may differ by at most one.
        least, most: items that a part may hold.
        bound: what the largest part costs in any partition, at least.
    """

    costs: Array
    num_parts: int
    equal_count: bool
    least: int
    most: int
    bound: int

    @classmethod
    def of(cls, costs: Array, num_parts: int, equal_count: bool) -> _Balancer:
        n = len(costs)
        least, most = (n // num_parts, -(-n // num_parts)) if equal_count else (1, n)
        # Parts cost a multiple of the common divisor; where each holds several, so does the largest item's; two of the
        # num_parts + 1 largest items share a part.
        unit = common_divisor(costs)
        bounds = [-(-int(costs.sum()) // (num_parts * unit)) * unit, int(costs[0]) + int(costs[n - least + 1 :].sum())]
        if num_parts < n:
            bounds.append(int(costs[num_parts - 1]) + int(costs[num_parts]))
        return cls(costs=costs, num_parts=num_parts, equal_count=equal_count, least=least, most=most, bound=max(bounds))

    def solve(self) -> Array:
        """Return the part of each item."""
        import numpy as np

        best, largest = None, 0
        for start in self._starts():
            labels = np.array(start, dtype=np.intp)
            reached = _Exchanger(self, labels).run()
            if best is None or reached < largest:
                best, largest = labels, reached
            if largest == self.bound:
                break
        assert best is not None
        if largest == self.bound or len(self.costs) > EXACT_ITEMS:
            return best
        limits = {"below": largest, "enough": self.bound, "least": self.least, "most": self.most}
        exact = smallest_maximum(self.costs.tolist(), self.num_parts, **limits)
        return best if exact is None else np.array(exact, dtype=np.intp)

    def _starts(self) -> Iterator[Array | list[int]]:
        yield _tree_of_differences(self.costs, self.num_parts)
        if len(self.costs) > MORE_STARTS_ITEMS:
            return
        costs = self.costs.tolist()
        yield largest_first(costs, self.num_parts, equal_count=self.equal_count)
        if self.equal_count or len(costs) * self.num_parts <= DIFFERENCING_WORK:
            yield differencing(costs, self.num_parts, equal_count=self.equal_count)


def _tree_of_differences(costs: Array, num_parts: int) -> Array:
    """Return a partition with equal counts, from rows of neighbours merged in pairs, heavy parts with light ones.

    All pairs of a level are merged at once, in log n levels. Where a row is missing or short, zeros stand in.
    """
    import numpy as np

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
    labels = np.arange(num_parts, dtype=np.intp)[None]
    for by_spread, by_cost in reversed(levels):
        merged = np.empty_like(by_cost)
        np.put_along_axis(merged, by_cost, labels[: len(by_cost)], axis=1)
        labels = np.empty((len(by_spread), num_parts), dtype=np.intp)
        labels[by_spread[0::2]] = merged
        labels[by_spread[1::2]] = merged[:, ::-1]
    return labels.ravel()[:n]


class _Exchanger:
    """Lowers the largest part of a partition, in place, by exchanging a few items with another part."""

    def __init__(self, balancer: _Balancer, labels: Array) -> None:
        self.balancer, self.costs, self.labels = balancer, balancer.costs, labels

    def run(self) -> int:
        """Exchange until the largest part cannot be lowered; return what it costs."""
        for eighths in POOLS:
            self._group(eighths)
            for _ in range(EXCHANGES_PER_PART * self.balancer.num_parts):
                if not self._lower_largest():
                    break
            if self.loads.max() == self.balancer.bound or self.counts.max() <= POOL_ITEMS:
                break
        return int(self.loads.max())

    def _group(self, eighths: tuple[int, int]) -> None:
        """Take stock of the parts, whose pools will come from between these eighths of their items by size."""
        import numpy as np

        num_parts = self.balancer.num_parts
        self.members = np.argsort(self.labels.astype(np.min_scalar_type(num_parts)), kind="stable")
        self.counts: Array = np.bincount(self.labels, minlength=num_parts)
        self.starts = self.counts.cumsum() - self.counts
        self.loads: Array = np.add.reduceat(self.costs[self.members], self.starts)
        self.eighths = eighths
        self.pools: dict[int, Array] = {}

    def _lower_largest(self) -> bool:
        import numpy as np

        part = int(np.argmax(self.loads))
        if self.loads[part] == self.balancer.bound:
            return False
        return any(self._exchange(part, partner) for partner in self._partners())

    def _partners(self) -> Iterator[int]:
        import numpy as np

        yield int(np.argmin(self.loads))
        yield from self.loads.argsort(kind="stable")[1:PARTNERS].tolist()

    def _exchange(self, part: int, partner: int) -> bool:
        """Make the exchange that best lowers the larger of two parts; false if none lowers it."""
        high, low, bound = int(self.loads[part]), int(self.loads[partner]), self.balancer.bound
        pools = self._pool(part), self._pool(partner)
        for wanted in dict.fromkeys([min(high - bound, bound - low), (high - low) // 2]):
            found = self._nearest(self.costs[pools[0]], self.costs[pools[1]], wanted, self._sizes(part, partner))
            if found is not None and 0 < found[0] < high - low:
                self._move(part, partner, *found)
                return True
        return False

    def _sizes(self, part: int, partner: int) -> list[tuple[int, int]]:
        """Return how many items may go each way so that both parts' counts stay legal."""
        counts, least, most = (int(self.counts[part]), int(self.counts[partner])), self.balancer.least, self.balancer.most
        return [
            (given, taken)
            for given, taken in EXCHANGES
            if least <= counts[0] - given + taken <= most and least <= counts[1] + given - taken <= most
        ]

    def _nearest(
        self, costs: Array, partner_costs: Array, wanted: int, sizes: list[tuple[int, int]]
    ) -> tuple[int, list[int], list[int]] | None:
        """Return the net cost nearest to the wanted one, and the positions in both pools that make it."""
        import numpy as np

        best: tuple[int, int, list[int], list[int]] | None = None
        for given, taken in sizes:
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

    def _move(self, part: int, partner: int, net: int, given: list[int], taken: list[int]) -> None:
        import numpy as np

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
        import numpy as np

        if part not in self.pools:
            start, count = int(self.starts[part]), int(self.counts[part])
            places = np.arange(min(count, POOL_ITEMS))
            if count > POOL_ITEMS:
                first, end = (count * eighth // 8 for eighth in self.eighths)
                width = max(end - first, POOL_ITEMS)
                places = min(first, count - width) + places * width // POOL_ITEMS
            self.pools[part] = self.members[start + places]
        return self.pools[part]


@cache
def _pairs(count: int) -> tuple[Array, Array]:
    import numpy as np

    first, second = np.triu_indices(count, 1)
    return first, second


def _sums(costs: Array, size: int) -> Array:
    """Return what every choice of 0, 1 or 2 items costs."""
    if size == 2:
        first, second = _pairs(len(costs))
        return costs[first] + costs[second]
    return costs if size else costs[:1] * 0


def _positions(count: int, size: int, index: int) -> list[int]:
    """Return the items of one of the choices that `_sums` lists."""
    if size == 2:
        first, second = _pairs(count)
        return [int(first[index]), int(second[index])]
    return [index] if size else []
