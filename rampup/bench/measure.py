"""Fair timing on a noisy machine: the candidates take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The times of one candidate.

    Attributes:
        all: seconds of every round, in order.
    """

    all: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle time."""
        return statistics.median(self.all)

    @property
    def spread(self) -> float:
        """How far the slowest and the fastest quarter are apart, as a fraction of the median."""
        if len(self.all) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.all, n=4, method="inclusive")
        return (high - low) / self.median


def take_turns(candidates: Mapping[str, Callable[[], Any]], *, rounds: int = ROUNDS, warm_up: int = 1) -> dict[str, Seconds]:
    """Time every candidate once a round, in an order that changes from round to round.

    Args:
        candidates: name -> what to time; it must wait for its own results.
        rounds: times that each is timed.
        warm_up: rounds before those, not counted.

    Returns:
        The times by name.

    Example:
        >>> times = take_turns({"a": lambda: None, "b": lambda: None}, rounds=3)
        >>> len(times["a"].all)
        3
    """
    names, times = list(candidates), {name: [] for name in candidates}  # type: dict[str, list[float]]
    for number in range(warm_up + rounds):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            start = time.perf_counter()
            candidates[name]()
            if number >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: Seconds(all=tuple(seconds)) for name, seconds in times.items()}
