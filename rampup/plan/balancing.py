"""Number partitioning in plain integers: starts for `rampup.plan.packing.balance`, and the exact answer for tiny inputs.

Every function takes costs in descending order and returns, for each of them, the number of its part.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any


def largest_first(costs: Sequence[int], num_parts: int, *, equal_count: bool) -> list[int]:
    """Give every item, the largest first, to the part with the least cost that may still take one.

    Args:
        costs: in descending order, at least `num_parts` of them.
        num_parts: parts to fill; none stays empty.
        equal_count: whether the parts' counts may differ by at most one.

    Returns:
        The part of each item. Without `equal_count`, no part costs more than 4/3 - 1/(3 * num_parts) of the optimum
        (Graham 1969).

    Example:
        >>> largest_first([8, 7, 6, 5, 4], 2, equal_count=False)
        [0, 1, 1, 0, 0]
        >>> largest_first([10, 1, 1, 1], 2, equal_count=True)
        [0, 1, 1, 0]
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


def differencing(costs: Sequence[int], num_parts: int, *, equal_count: bool) -> list[int]:
    """Combine the two partial partitions of the largest spread, the heavy parts of one with the light ones of the other.

    A partial partition is a list of (cost, items) in descending order of cost, its empty parts left out; items are a tree,
    so that combining two of them copies nothing.

    Args:
        costs: in descending order, at least `num_parts` of them.
        num_parts: parts to fill; none stays empty.
        equal_count: whether the parts' counts may differ by at most one: then the first partial partitions are rows of
            `num_parts` neighbours instead of single items.

    Returns:
        The part of each item (the largest differencing method of Karmarkar and Karp 1982; balanced: Michiels et al. 2003).

    Example:
        >>> differencing([8, 7, 6, 5, 4], 2, equal_count=False)
        [1, 0, 1, 0, 0]
    """
    width = num_parts if equal_count else 1
    leaves: list[tuple[int, Any]] = [(cost, item) for item, cost in enumerate(costs)]
    states = [leaves[start : start + width] for start in range(0, len(leaves), width)]
    heap = [(-_spread(state, num_parts), number, state) for number, state in enumerate(states)]
    heapq.heapify(heap)
    for number in range(len(states), 2 * len(states) - 1):
        first = heapq.heappop(heap)[2]
        state = _combined(first, heap[0][2], num_parts)
        heapq.heapreplace(heap, (-_spread(state, num_parts), number, state))
    labels = [0] * len(costs)
    for part, (_, tree) in enumerate(heap[0][2]):
        pending = [tree]
        while pending:
            node = pending.pop()
            if isinstance(node, tuple):
                pending.extend(node)
            else:
                labels[node] = part
    return labels


def smallest_maximum(
    costs: Sequence[int], num_parts: int, *, below: int, enough: int = 0, least: int = 0, most: int | None = None
) -> list[int] | None:
    """Search all partitions for the one with the smallest largest cost.

    Args:
        costs: in descending order; few, since the time grows exponentially.
        num_parts: parts that may be used.
        below: only partitions with a largest cost below this count.
        enough: the search ends at the first partition with this largest cost or less.
        least: items that a part must hold.
        most: items that a part may hold; None = any number.

    Returns:
        The part of each item, or None if there is no such partition.

    Example:
        >>> smallest_maximum([5, 5, 4, 3, 3], 2, below=100)
        [0, 0, 1, 1, 1]
        >>> smallest_maximum([5, 5, 4], 2, below=9) is None
        True
    """
    loads, counts, labels = [0] * num_parts, [0] * num_parts, [0] * len(costs)
    best: list[int] | None = None
    limit = below
    most = len(costs) if most is None else most

    def place(item: int, missing: int) -> bool:
        """Place this item and those after it; true once a partition is good enough."""
        nonlocal best, limit
        if item == len(costs):
            best, limit = labels.copy(), max(loads)
            return limit <= enough
        tried = set()
        for part, (load, count) in enumerate(zip(loads, counts, strict=True)):
            still_missing = missing - (count < least)
            if load + costs[item] >= limit or count == most or still_missing >= len(costs) - item or (load, count) in tried:
                continue
            tried.add((load, count))
            loads[part], counts[part], labels[item] = load + costs[item], count + 1, part
            done = place(item + 1, still_missing)
            loads[part], counts[part] = load, count
            if done:
                return True
        return False

    place(0, num_parts * least)
    return best


def common_divisor(costs: Iterable[int]) -> int:
    """Return the greatest common divisor, without looking at more numbers than it takes to see that it is 1.

    Example:
        >>> common_divisor([12, 18, 30]), common_divisor(range(8, 10**18))
        (6, 1)
    """
    divisor = 0
    for cost in costs:
        divisor = math.gcd(divisor, cost)
        if divisor == 1:
            break
    return divisor


def _spread(state: list[tuple[int, Any]], num_parts: int) -> int:
    return state[0][0] - (state[-1][0] if len(state) == num_parts else 0)


def _combined(first: list[tuple[int, Any]], second: list[tuple[int, Any]], num_parts: int) -> list[tuple[int, Any]]:
    shared = max(len(first) + len(second) - num_parts, 0)
    alone = len(first) - shared
    pairs = zip(first[alone:], reversed(second[len(second) - shared :]), strict=True)
    parts = first[:alone] + second[: len(second) - shared]
    parts += [(a + b, (tree, other)) for (a, tree), (b, other) in pairs]
    return sorted(parts, key=itemgetter(0), reverse=True)
