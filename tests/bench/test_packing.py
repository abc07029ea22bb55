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
def test_karmarkar_karp_has_the_partitions_of_verl(costs, k, equal_size, expected):
    """These partitions were obtained from veRL's own function."""
    assert karmarkar_karp(costs, k, equal_size) == expected


def test_karmarkar_karp_partitions():
    """Every item is in one part, and equal sizes are equal."""
    rng = random.Random(0)
    for _ in range(100):
        k = rng.randint(1, 6)
        costs = [rng.randint(1, 99) for _ in range(k * rng.randint(1, 8))]
        for equal_size in (False, True):
            parts = karmarkar_karp(costs, k, equal_size)
            assert sorted(index for part in parts for index in part) == list(range(len(costs)))
            assert not equal_size or {len(part) for part in parts} == {len(costs) // k}


def test_verl_partition_uses_the_installed_file(monkeypatch, tmp_path):
    """The functions of an installed verl are used although the package cannot be imported."""
    folder = tmp_path / "verl" / "utils"
    folder.mkdir(parents=True)
    (folder / "seqlen_balancing.py").write_text(FILE)
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    partition, origin = verl_partition()
    assert partition([3], 1, True) == [[3], 1, True]
    assert "installed" in origin
    assert "unwanted" not in definitions_in(folder / "seqlen_balancing.py", *VERL_FUNCTIONS, heapq=heapq)


def test_verl_partition_falls_back_to_the_reimplementation(monkeypatch):
    """Without the package the same method is timed, and the origin says so."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    partition, origin = verl_partition()
    assert partition is karmarkar_karp
    assert "not installed" in origin


def test_sample_lengths_are_skewed_and_reproducible():
    """The same seed gives the same lengths, of the right range, with a mean well above the median."""
    lengths = sample_lengths(5_000, 1)
    assert lengths == sample_lengths(5_000, 1) != sample_lengths(5_000, 2)
    assert 16 <= min(lengths) < max(lengths) <= 16_384
    assert sum(lengths) / len(lengths) > 1.2 * sorted(lengths)[2_500]


def test_packing_bench_is_no_worse_than_verl():
    """In a quick run rampup's imbalance and padding are no worse than veRL's in any row."""
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
