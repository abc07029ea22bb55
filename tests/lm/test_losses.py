"""Tests of rampup.lm.losses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rampup.lm.losses import cross_entropy, tiled_cross_entropy


@pytest.mark.parametrize(("num_tiles", "num_parts"), [(1, 1), (3, 1), (2, 4), (24, 1)])
def test_tiled_cross_entropy_is_cross_entropy(num_tiles, num_parts):
    """Loss, weight and the gradients of input and matrix are those of all logits at once, to 1e-5, for extreme logits too."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 5, 8), (8, 24)))
    x = x.at[0, 0].multiply(30)
    targets, length = jnp.asarray(rng.integers(0, 24, (2, 5))), jnp.array([5, 2])

    @jax.jit
    def tiled(x, kernel):
        return tiled_cross_entropy(
            x, kernel, targets, length, num_tiles=num_tiles, num_parts=num_parts, prepare=lambda kernel: kernel
        )

    plain = jax.jit(lambda x, kernel: cross_entropy(x @ kernel, targets, length))
    found, expected = (jax.value_and_grad(f, (0, 1), has_aux=True)(x, kernel) for f in (tiled, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_tiled_cross_entropy_needs_no_memory_for_all_logits():
    """The temporary memory of the gradient falls below the size of the logits."""
    B, T, E, V = 4, 64, 16, 4096
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, E), (E, V))]
    targets, length = jnp.zeros((B, T), jnp.int32), jnp.full(B, T)

    def temporary(loss):
        compiled = jax.jit(jax.grad(lambda x, kernel: loss(x, kernel)[0], (0, 1))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    options = {"num_tiles": 16, "prepare": lambda kernel: kernel}
    tiled = temporary(lambda x, kernel: tiled_cross_entropy(x, kernel, targets, length, **options))
    whole = temporary(lambda x, kernel: cross_entropy(x @ kernel, targets, length))
    assert tiled < 4 * B * T * V < whole
