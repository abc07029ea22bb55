"""What `rampup.plan.packing` takes and gives: checked lengths and costs, ladders of shapes, packed microbatches."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rampup.errors import ConfigError
from rampup.notebook_repr import NotebookRepr
from rampup.plan.numbers import MAX_COUNT, exact_fraction

MAX_EMPTY = 10**6

Cost = Literal["tokens"] | tuple[object, object]


Bins = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMicrobatches(NotebookRepr):
    """Sequences in microbatches of a few static shapes, as many on every replica.

    Attributes:
        lengths: tokens of each sequence.
        token_budget: tokens that a microbatch may hold.
        ladder: the token shapes allowed, ascending.
        microbatch_shapes: tokens that the arrays of microbatch j hold, on every replica, since one program runs on all.
        replicas: `replicas[r][j]` are the indices of the sequences in microbatch j of replica r. It is empty where there are
            fewer sequences than microbatches: then it consists of padding.
    """

    lengths: tuple[int, ...]
    token_budget: int
    ladder: tuple[int, ...]
    microbatch_shapes: tuple[int, ...]
    replicas: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas."""
        return len(self.replicas)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one replica."""
        return len(self.microbatch_shapes)

    @property
    def num_empty(self) -> int:
        """Microbatches of all replicas that hold no sequence."""
        return sum(not members for replica in self.replicas for members in replica)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that are computed on all replicas, padding included."""
        return self.num_replicas * sum(self.microbatch_shapes)

    @property
    def padding_fraction(self) -> float:
        """The part of the computed tokens that is padding."""
        return 1 - self.num_tokens / self.padded_tokens

    @property
    def shapes(self) -> tuple[int, ...]:
        """The different shapes, ascending, each of which is compiled once."""
        return tuple(sorted(set(self.microbatch_shapes)))


def make_ladder(token_budget: int, rungs: int = 4) -> tuple[int, ...]:
    """Return a few shapes at equal distances, up to the token budget.

    All microbatches but the last are nearly full, and the last may hold any number of tokens: equal distances lose the
    fewest on average there, and never more than token_budget / rungs.

    Args:
        token_budget: tokens that a microbatch may hold; the top of the ladder.
        rungs: number of shapes, each of which is compiled once.

    Raises:
        ConfigError: either is not a whole number of at least 1, or there are more rungs than tokens.

    Example:
        >>> make_ladder(16384, 4)
        (4096, 8192, 12288, 16384)
    """
    check_count(token_budget, "token_budget")
    check_count(rungs, "rungs", most=token_budget, limit="token_budget")
    return tuple(-(-token_budget * rung // rungs) for rung in range(1, rungs + 1))


def check_ladder(ladder: Sequence[int], token_budget: int) -> tuple[int, ...]:
    """Return a ladder of shapes that ascends to the token budget.

    Raises:
        ConfigError: it is empty, does not ascend, or ends below or above the token budget.
    """
    rungs = tuple(integers(ladder, "ladder"))
    nearest = [make_ladder(token_budget, min(len(rungs), token_budget))]
    if rungs[0] < 1 or any(high <= low for low, high in itertools.pairwise(rungs)):
        raise ConfigError(
            f"ladder={rungs} must be shapes of at least 1 token in ascending order", key="ladder", nearest=nearest
        )
    if rungs[-1] != token_budget:
        fault = "a full microbatch would not fit" if rungs[-1] < token_budget else "a microbatch would exceed it"
        raise ConfigError(
            f"ladder={rungs} must end at token_budget={token_budget:,}, not at {rungs[-1]:,}: {fault}",
            key="ladder",
            nearest=nearest,
        )
    return rungs


def check_budget(lengths: Sequence[int], token_budget: int) -> None:
    """Raise a ConfigError that names the first sequence longer than the budget, if there is one."""
    longest = max(lengths)
    if longest <= token_budget:
        return
    long = [index for index, length in enumerate(lengths) if length > token_budget]
    others = f" (and {len(long) - 1:,} more)" if len(long) > 1 else ""
    raise ConfigError(
        f"lengths[{long[0]}]={lengths[long[0]]:,} tokens{others} exceeds token_budget={token_budget:,}, and a sequence "
        f"is never cut; nearest token_budget: {longest:,}, or leave the sequence out",
        key="token_budget",
        nearest=[longest],
    )


def check_places(num_places: int, num_sequences: int, unit: int) -> None:
    """Raise a ConfigError if there are absurdly many more microbatches than sequences."""
    if num_places - num_sequences > MAX_EMPTY:
        raise ConfigError(
            f"num_replicas * multiple_of = {unit:,} makes {num_places:,} microbatches of {num_sequences:,} sequences; at most "
            f"{MAX_EMPTY:,} may be empty",
            key="num_replicas",
        )


def best_fit(lengths: Sequence[int], order: Sequence[int], capacities: Sequence[int]) -> list[list[int]] | None:
    """Put each sequence, in the given order, into the bin that it fills best; None if one fits nowhere.

    In descending order of length and with bins of one size this is best-fit decreasing, which needs at most 11/9 of the
    fewest bins and a constant (Johnson 1974).

    Example:
        >>> best_fit([6, 5, 4, 2], range(4), [10, 8])
        [[1, 2], [0, 3]]
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


def fitting_first(lengths: Sequence[int], order: Sequence[int], ladder: Sequence[int], rows: int, width: int) -> Bins | None:
    """Pack into rows of bins of one shape: full rows first, then a row of a middle shape, the rest of the smallest.

    Takes the fewest tokens for which best-fit finds a place for everything; None if it does not even with full rows only.

    Args:
        lengths: tokens of each sequence.
        order: the sequences in descending order of length.
        ladder: shapes, ascending.
        rows: rows to fill, some bins of which may stay empty.
        width: bins of a row.
    """
    steps = len(ladder) - 1
    last = rows * steps

    def shapes(number: int) -> list[int]:
        full, rung = divmod(number, steps) if steps else (rows, 0)
        return ([ladder[-1]] * full + [ladder[rung]] + [ladder[0]] * rows)[:rows]

    def packed(number: int) -> Bins | None:
        return best_fit(lengths, order, [shape for shape in shapes(number) for _ in range(width)])

    total = sum(lengths)
    first = bisect_left(range(last), total, key=lambda number: width * sum(shapes(number)))
    failed, number, step = first - 1, first, 1
    while (found := packed(number)) is None:
        if number == last:
            return None
        failed, number, step = number, min(number + step, last), 2 * step
    while failed + 1 < number:
        middle = (failed + number) // 2
        if (smaller := packed(middle)) is None:
            failed = middle
        else:
            found, number = smaller, middle
    return found


def arrange(
    lengths: Sequence[int], bins: Bins, ladder: tuple[int, ...], num_microbatches: int, num_replicas: int
) -> PackedMicrobatches:
    """Return bins as microbatches: the fullest first, neighbours side by side on the replicas, each row on its lowest rung.

    Where there are fewer bins than places, the fullest bins give their shortest sequences to new ones as long as they can.

    Example:
        >>> arrange([6, 5, 4, 3], [[0, 2], [1, 3]], (5, 10), 1, 3).replicas
        (((1, 3),), ((0,),), ((2,),))
    """
    filled = [sorted(members, key=lambda index: (-lengths[index], index)) for members in bins if members]
    num_places = num_microbatches * num_replicas
    splittable = [(-sum(lengths[i] for i in m), m) for m in filled if len(m) > 1] if len(filled) < num_places else []
    heapq.heapify(splittable)
    while splittable and len(filled) < num_places:
        tokens, members = splittable[0]
        shortest = members.pop()
        filled.append([shortest])
        if len(members) > 1:
            heapq.heapreplace(splittable, (tokens + lengths[shortest], members))
        else:
            heapq.heappop(splittable)
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


def integers(values: Any, name: str = "lengths") -> list[int]:
    """Return what a sequence or an array holds as Python integers, their range not checked yet.

    Raises:
        ConfigError: nothing at all, or something that is no integer; names its index.
    """
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, str | bytes) or not isinstance(items, Sequence):
        shown = f"{items!r}"[:80]
        raise ConfigError(f"{name}={shown} must be a sequence of token counts, for instance [512, 96]", key=name)
    if not items:
        raise ConfigError(f"{name} is empty; it must hold at least 1 token count", key=name)
    if set(map(type, items)) == {int}:
        return list(items)
    return [_integer(item, f"{name}[{index}]", name) for index, item in enumerate(items)]


def whole_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths as Python integers, each between 1 and 10**18.

    Raises:
        ConfigError: none at all, or one that is no such integer; names its index.

    Example:
        >>> whole_lengths(range(1, 4))
        [1, 2, 3]
    """
    values = integers(lengths)
    for limit, worst in ((1, min(values)), (MAX_COUNT, max(values))):
        if worst != sorted((1, worst, MAX_COUNT))[1]:
            raise ConfigError(
                f"lengths[{values.index(worst)}]={worst:,} tokens must be between 1 and 10**18", key="lengths", nearest=[limit]
            )
    return values


def check_count(value: object, name: str, *, most: int = MAX_COUNT, limit: str = "the largest count") -> None:
    """Raise a ConfigError unless a value is a whole number between 1 and a limit, which has a name."""
    if type(value) is int and 1 <= value <= most:
        return
    nearest = [min(max(value, 1), most)] if type(value) is int else []
    raise ConfigError(f"{name}={value!r} must be a whole number between 1 and {limit} {most:,}", key=name, nearest=nearest)


def cost_coefficients(cost: Cost) -> tuple[int, int]:
    """Return a cost per length as whole coefficients (a, b) of a * L + b * L**2, scaled if they were fractions.

    Example:
        >>> cost_coefficients("tokens"), cost_coefficients((1, "1/3")), cost_coefficients((0.5, 0))
        ((1, 0), (3, 1), (1, 0))
    """
    if isinstance(cost, str) and cost == "tokens":
        return 1, 0
    if not (isinstance(cost, tuple | list) and len(cost) == 2):
        raise ConfigError(f"cost={cost!r} must be 'tokens' or two coefficients (a, b) of a*L + b*L**2", key="cost")
    linear, square = (exact_fraction(value, what="cost", key="cost") for value in cost)
    if linear < 0 or square < 0 or not linear + square:
        raise ConfigError(f"cost={cost!r} must be two coefficients of at least 0, one of them above 0", key="cost")
    scale = math.lcm(linear.denominator, square.denominator)
    return int(linear * scale), int(square * scale)


def imbalance(lengths: Sequence[int], parts: Sequence[Sequence[int]], cost: Cost = "tokens") -> float:
    """Return by how much the most expensive part exceeds the mean, as a fraction of the mean.

    Example:
        >>> imbalance([5, 5, 4, 3, 3], [(0, 1), (2, 3, 4)]), imbalance([3, 1], [(0,), (1,)])
        (0.0, 0.5)
    """
    values = whole_lengths(lengths)
    linear, square = cost_coefficients(cost)
    costs = [sum((linear + square * values[index]) * values[index] for index in part) for part in parts]
    return float(Fraction(max(costs) * len(costs), sum(costs)) - 1)


def _integer(value: Any, place: str, name: str) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{place}={str(value)[:80]!r} must be a whole number of tokens", key=name)
