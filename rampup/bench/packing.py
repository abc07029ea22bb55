"""Balancing and packing compared with veRL's published algorithm, on the same lengths in the same run."""

from __future__ import annotations

import heapq
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rampup.bench.maxtext import definitions_in
from rampup.bench.measure import ROUNDS, BenchResult, Measurements, OnRow, ignore_row, take_turns
from rampup.packing import balance, imbalance, make_ladder, pack

# veRL's estimate of the work of a 7B transformer on a sequence of L tokens: 24576 * L + L**2 (verl/utils/seqlen_balancing.py).
VERL_WORKLOAD = (24576, 1)
VERL_FUNCTIONS = ("karmarkar_karp", "get_seqlen_balanced_partitions")
TOKEN_BUDGET = 16_384
RUNGS = 4
# Sequences at most, seeds, rounds of rampup, rounds of veRL, which takes up to 20 seconds on the largest.
EFFORTS = ((5_000, 10, ROUNDS, ROUNDS), (20_000, 2, 3, 3), (10**9, 1, ROUNDS, 1))
BALANCE_SIZES = ((512, 32), (1024, 64), *((n, k) for n in (10_000, 100_000) for k in (8, 32, 64)))
PACK_SIZES = (64, 256, 1024)
QUICK_BALANCE_SIZES, QUICK_PACK_SIZES = ((96, 8), (256, 16)), (64, 256)

Parts = Sequence[Sequence[int]]
Partition = Callable[[list[int], int, bool], Parts]
# Cost, number of items, and (index, cost) of the items that share a part; groups are ordered as these tuples are.
_Group = tuple[int, int, list[tuple[int, int]]]


def run(*, quick: bool = False, on_row: OnRow = ignore_row) -> BenchResult:
    """Measure imbalance, padding and time. The rows compare means over several samples and median times."""
    partition, origin = verl_partition()
    sizes, pack_sizes = (QUICK_BALANCE_SIZES, QUICK_PACK_SIZES) if quick else (BALANCE_SIZES, PACK_SIZES)
    contests = [_balancing(n, k, equal_count, partition) for n, k in sizes for equal_count in (False, True)]
    contests += [_packing(n, partition) for n in pack_sizes]
    found = Measurements(len(contests), on_row)
    found.add(contest.row(quick) for contest in contests)
    return BenchResult(
        name="packing",
        title=f"parts of equal work, and {TOKEN_BUDGET:,}-token microbatches on a ladder of {RUNGS} shapes, compared with veRL",
        rows=found.rows,
        notes=(
            f"The baseline (peer) is {origin}. If peer_rounds is less than rounds, it was timed last and not warmed up.",
            "Lengths are lognormal(7.3, 0.9), clipped to 16..16,384. L tokens cost 24576 * L + L**2, veRL's estimate.",
            "Values are means over the seeds. no_worse: rampup's value is not greater with any of them.",
            "With equal counts, veRL refuses sequences beyond a multiple of the parts: they are left out. It makes "
            "ceil(tokens / budget) microbatches, which may exceed the budget; those count without padding.",
        ),
    )


def sample_lengths(n: int, seed: int) -> list[int]:
    """Return lengths like those in reinforcement learning of language models: many short ones and a long tail."""
    lognormal = np.random.default_rng(seed).lognormal(7.3, 0.9, n)
    return [int(length) for length in np.clip(lognormal, 16, TOKEN_BUDGET)]


def verl_partition() -> tuple[Partition, str]:
    """Return veRL's partition function and its origin: the installed package's file, or `karmarkar_karp`."""
    spec = importlib.util.find_spec("verl")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "utils" / "seqlen_balancing.py"
        if path.is_file():
            partition: Partition = definitions_in(path, *VERL_FUNCTIONS, heapq=heapq)[VERL_FUNCTIONS[1]]
            return partition, "the installed verl package's seqlen_balancing.py"
    return karmarkar_karp, "a reimplementation of veRL's method, since the verl package is not installed"


def karmarkar_karp(costs: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """Partition as veRL does: merge the two partial partitions of the largest spread, copying items, until one is left."""
    width = k if equal_size else 1
    assert len(costs) % width == 0, f"{len(costs)} % {width} != 0"
    ascending = sorted((cost, index) for index, cost in enumerate(costs))
    heap: list[_Partial] = []
    for start in range(0, len(ascending), width):
        groups: list[_Group] = [(cost, 1, [(index, cost)]) for cost, index in ascending[start : start + width]]
        heapq.heappush(heap, _Partial(groups + [(0, 0, [])] * (k - width)))
    while len(heap) > 1:
        first, second = heapq.heappop(heap).groups, heapq.heappop(heap).groups
        pairs = zip(first, reversed(second), strict=True)
        heapq.heappush(heap, _Partial([(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]))
    return [sorted(index for index, _ in items) for _, _, items in heap[0].groups]


class _Partial:
    """A partial partition, its groups in descending order; the one of the largest spread comes first."""

    __slots__ = ("groups",)

    def __init__(self, groups: list[_Group]) -> None:
        self.groups = sorted(groups, reverse=True)

    def __lt__(self, other: _Partial) -> bool:
        spread, other_spread = (groups[0][0] - groups[-1][0] for groups in (self.groups, other.groups))
        return spread > other_spread if spread != other_spread else self.groups[0] > other.groups[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contest:
    """One comparison."""

    case: str  # what is measured
    num_sequences: int  # sequences per sample
    num_parts: int | None  # parts to make; None if their number is part of the answer
    equal_count: bool  # whether all parts have the same number of sequences
    rampup: Callable[[list[int]], Parts]  # lengths -> parts
    verl: Callable[[list[int]], Parts]  # the same
    judge: Callable[[list[int], Parts], float]  # lengths and parts -> the imbalance or the padding

    def row(self, quick: bool) -> dict[str, Any]:
        """Time both on the first sample, and judge both on all samples."""
        n = self.num_sequences
        seeds, rounds, verl_rounds = (2, 3, 3) if quick else next(effort for size, *effort in EFFORTS if n <= size)
        samples = [sample_lengths(n, seed) for seed in range(seeds)]
        parts: dict[str, Parts] = {}
        rampup = {"rampup": lambda: parts.update(rampup=self.rampup(samples[0]))}
        verl = {"verl": lambda: parts.update(verl=self.verl(samples[0]))}
        if rounds == verl_rounds:
            times = take_turns(rampup | verl, rounds=rounds)
        else:
            times = take_turns(rampup, rounds=rounds) | take_turns(verl, rounds=verl_rounds, warm_up=0)
        values = [(self.judge(samples[0], parts["rampup"]), self.judge(samples[0], parts["verl"]))]
        values += [(self.judge(s, self.rampup(s)), self.judge(s, self.verl(s))) for s in samples[1:]]
        return {
            "case": self.case,
            "sequences": n,
            "parts": self.num_parts,
            "equal_count": self.equal_count,
            "rampup": statistics.fmean(value for value, _ in values),
            "peer": statistics.fmean(value for _, value in values),
            "no_worse": all(value <= other for value, other in values),
            "rampup_seconds": times["rampup"].median,
            "peer_seconds": times["verl"].median,
            "times_faster": times["verl"].median / times["rampup"].median,
            "seeds": seeds,
            "rounds": rounds,
            "peer_rounds": verl_rounds,
        }


def _balancing(n: int, k: int, equal_count: bool, partition: Partition) -> _Contest:
    return _Contest(
        case="balance: largest / mean - 1",
        num_sequences=n - n % k if equal_count else n,
        num_parts=k,
        equal_count=equal_count,
        rampup=lambda lengths: balance(lengths, k, VERL_WORKLOAD, equal_count),
        verl=lambda lengths: partition(_workloads(lengths), k, equal_count),
        judge=lambda lengths, parts: imbalance(lengths, parts, VERL_WORKLOAD),
    )


def _packing(n: int, partition: Partition) -> _Contest:
    ladder = make_ladder(TOKEN_BUDGET, RUNGS)

    def padding(lengths: list[int], parts: Parts) -> float:
        loads = [sum(lengths[index] for index in part) for part in parts]
        shapes = [next((shape for shape in ladder if shape >= load), load) for load in loads]
        return 1 - sum(loads) / sum(shapes)

    return _Contest(
        case="pack: fraction of padding",
        num_sequences=n,
        num_parts=None,
        equal_count=False,
        rampup=lambda lengths: pack(lengths, TOKEN_BUDGET, ladder).replicas[0],
        verl=lambda lengths: partition(_workloads(lengths), -(-sum(lengths) // TOKEN_BUDGET), False),
        judge=padding,
    )


def _workloads(lengths: list[int]) -> list[int]:
    linear, square = VERL_WORKLOAD
    return [linear * length + square * length**2 for length in lengths]
