"""Tests of rampup.lm.attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rampup.engine.mesh import make_mesh
from rampup.lm.attention import attend, causal_attention, splash_attention


def arrays(T, H=2, G=1, D=128):
    """Return queries, keys and values."""
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(2, T, heads, D)), jnp.float32) for heads in (H, G, G)]


def test_attend_falls_back_without_a_tpu():
    """Every kind gives the plain result, bit for bit, if the devices are no TPUs or unknown, for any length."""
    q, k, v = arrays(128, D=16)
    expected = causal_attention(q, k, v)
    for kind in ("autoselected", "dot_product", "flash"):
        for mesh in (None, make_mesh(devices=jax.devices()[:1])):
            np.testing.assert_array_equal(attend(q, k, v, kind=kind, mesh=mesh), expected)
    short = [x[:, :5] for x in (q, k, v)]
    np.testing.assert_array_equal(attend(*short, kind="flash", mesh=None), causal_attention(*short))


@pytest.mark.slow
@pytest.mark.parametrize(("T", "H", "G"), [(128, 2, 1), (384, 4, 2)])
def test_splash_attention_is_causal_attention(T, H, G):
    """The kernel, interpreted on a CPU, gives output and gradients of plain attention, to 1e-4; heads share keys and values."""
    q, k, v = arrays(T, H, G)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def loss(attention):
        return jax.jit(jax.value_and_grad(lambda qkv: jnp.sum(attention(*qkv) * weights)))((q, k, v))

    expected = loss(causal_attention)
    found = loss(lambda *qkv: splash_attention(*qkv, interpret=True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
