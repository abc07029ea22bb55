"""Tests of rampup.bench.packing."""

import heapq
import random

import pytest

from rampup.bench.maxtext import definitions_in
from rampup.bench.packing import VERL_FUNCTIONS, karmarkar_karp, run, sample_lengths, verl_partition

FILE = """
import package_that_nobody_has
from verl.protocol import DataProto


def karmarkar_karp(seqlen_list, k_partitions, equal_size):
    heap = [1]
    heapq.heapify(heap)
    return [seqlen_list, k_partitions, equal_size]


def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return karmarkar_karp(seqlen_list, k_partitions, equal_size)


def unwanted(x: package_that_nobody_has.Tensor):
    raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("costs", "k", "equal_size", "expected"),
    [
        ([5, 5, 4, 3, 3], 2, False, [[0, 3, 4], [1, 2]]),
        ([8, 7, 6, 5, 4], 3, False, [[1, 4], [2, 3], [0]]),
        ([10, 1, 1, 1, 1, 1], 2, True, [[0, 1, 3], [2, 4, 5]]),
    ],
)
def test_our_writing_of_the_peer_gives_its_partitions(costs, k, equal_size, expected):
    """These partitions were obtained from veRL's own function."""
    assert karmarkar_karp(costs, k, equal_size) == expected


def test_our_writing_of_the_peer_partitions():
    """Every item is in one part, and equal sizes are equal."""
    rng = random.Random(0)
    for _ in range(100):
        k = rng.randint(1, 6)
        costs = [rng.randint(1, 99) for _ in range(k * rng.randint(1, 8))]
        for equal_size in (False, True):
            parts = karmarkar_karp(costs, k, equal_size)
            assert sorted(index for part in parts for index in part) == list(range(len(costs)))
            assert not equal_size or {len(part) for part in parts} == {len(costs) // k}


def test_the_installed_file_is_used_without_its_dependencies(monkeypatch, tmp_path):
    """An installed verl gives the peer, though neither the package nor what the file imports can be imported."""
    folder = tmp_path / "verl" / "utils"
    folder.mkdir(parents=True)
    (folder / "seqlen_balancing.py").write_text(FILE)
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    partition, origin = verl_partition()
    assert partition([3], 1, True) == [[3], 1, True]
    assert "installed" in origin
    assert "unwanted" not in definitions_in(folder / "seqlen_balancing.py", *VERL_FUNCTIONS, heapq=heapq)


def test_without_verl_the_peer_is_ours(monkeypatch):
    """Where the package is absent, the same method is timed, and the result says so."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    partition, origin = verl_partition()
    assert partition is karmarkar_karp
    assert "not installed" in origin


def test_samples_are_skewed_and_repeatable():
    """The same seed gives the same lengths, of the right range, with a mean well above the median."""
    lengths = sample_lengths(5_000, 1)
    assert lengths == sample_lengths(5_000, 1) != sample_lengths(5_000, 2)
    assert 16 <= min(lengths) < max(lengths) <= 16_384
    assert sum(lengths) / len(lengths) > 1.2 * sorted(lengths)[2_500]


def test_the_benchmark_is_won():
    """In a quick run rampup's imbalance and padding are no worse than the peer's in any row, and every row is complete."""
    result = run(quick=True)
    assert result.name == "packing"
    assert len(result.rows) == 6
    for row in result.rows:
        assert set(row) == set(result.columns)
        assert row["no_worse"]
        assert 0 <= row["rampup"] <= row["peer"]
        assert row["times_faster"] > 0
    assert "(peer) is" in result.notes[0]
    assert "packing" in result.to_markdown()
