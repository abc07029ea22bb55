"""What the benchmarks of training steps train: language models of several sizes, and rows made up for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from rampup.lm.transformer import LanguageModel

# Bytes that a parameter needs in training: itself, its gradient and Adam's two moments, in float32.
BYTES_PER_PARAMETER = 16
# The share of a device's memory that they may take; the rest is for activations and for the peers' states.
MEMORY_SHARE = 8


class ArrayRows:
    """Rows of arrays in memory: a RowSource that reads by indexing.

    Args:
        arrays: name -> array, rows in front.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return these rows of every array."""
        return {name: array[rows] for name, array in self.arrays.items()}

    def describe(self, row: int) -> str:
        """Return the row's number."""
        return f"row {row:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model and the shape of its microbatch.

    Attributes:
        name: for the tables.
        model: the model.
        tokens: T, tokens per row.
        rows: rows of one microbatch on one device.
    """

    name: str
    model: LanguageModel
    tokens: int
    rows: int

    def source(self, num_rows: int) -> ArrayRows:
        """Return random rows of T + 1 tokens, all of which count."""
        tokens = np.random.default_rng(0).integers(self.model.vocab_size, size=(num_rows, self.tokens + 1), dtype=np.int32)
        return ArrayRows({"tokens": tokens, "length": np.full(num_rows, self.tokens, np.int32)})

    def params(self) -> Any:
        """Return new parameters, made on the host so that nothing is compiled for them: small random numbers."""
        rng = np.random.default_rng(1)
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        return jax.tree.map(lambda s: (0.02 * rng.standard_normal(s.shape, np.float32)).astype(s.dtype), shapes)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.model.num_parameters / 1e6:.1f} M parameters, {self.rows} rows of {self.tokens} tokens in a "
            f"microbatch, {self.model.dtype}"
        )


def _model(num_layers: int, width: int, mlp_dim: int, num_heads: int, num_kv_heads: int, **more: Any) -> LanguageModel:
    sizes: dict[str, Any] = {
        "num_layers": num_layers,
        "width": width,
        "mlp_dim": mlp_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
    }
    return LanguageModel(**sizes, **{"vocab_size": 256, **more})


QUICK = Problem(name="quick", model=_model(1, 16, 32, 2, 1), tokens=8, rows=2)
SMALL = Problem(name="1M", model=_model(4, 128, 512, 4, 2), tokens=64, rows=8)
MEDIUM = Problem(name="10M", model=_model(6, 384, 1024, 6, 3), tokens=32, rows=4)
_LARGE = {"vocab_size": 32_768, "tied": True, "dtype": "bfloat16", "remat_policy": "minimal"}
# For accelerators, the smallest first.
LARGE = (
    Problem(name="138M", model=_model(12, 768, 3072, 12, 12, **_LARGE), tokens=1024, rows=8),
    Problem(name="1.3B", model=_model(24, 2048, 5632, 16, 16, **_LARGE), tokens=1024, rows=4),
)


def problems(device: jax.Device, *, quick: bool = False) -> list[Problem]:
    """Return what to measure on a device: on a CPU two small models; elsewhere also the largest that it holds.

    Args:
        device: where it will run.
        quick: a tiny one only.
    """
    if quick:
        return [QUICK]
    if device.platform == "cpu":
        return [SMALL, MEDIUM]
    memory = (device.memory_stats() or {}).get("bytes_limit", 0) // MEMORY_SHARE
    fitting = [large for large in LARGE if large.model.num_parameters * BYTES_PER_PARAMETER <= memory]
    return [SMALL, MEDIUM, fitting[-1] if fitting else LARGE[0]]


def main_problem(device: jax.Device, *, quick: bool = False) -> Problem:
    """Return what a whole ramp is measured with: on a CPU the 1 M model, elsewhere one of more than 100 M.

    A microbatch of 1,024 tokens and more, so that a step's work is in its rows and not in the optimizer, as in real training.

    Args:
        device: where it will run.
        quick: a tiny one instead.
    """
    if quick:
        return QUICK
    return replace(SMALL, rows=16) if device.platform == "cpu" else LARGE[0]


def bench_optimizer() -> optax.GradientTransformation:
    """Return the optimizer of the default recipe at a constant rate: AdamW behind clipping by the global norm."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def optimizer_state(tx: optax.GradientTransformation | optax.MultiSteps, params: Any) -> Any:
    """Return the optimizer's first state, made on the host: AdamW and MultiSteps begin with zeros."""
    return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), jax.eval_shape(tx.init, params))


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compile everything anew inside: nothing is taken from, or put into, the cache that outlives a process."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    # Whether there is a cache is looked up once a process.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
