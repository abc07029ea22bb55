"""Tests of rampup.lm.transformer."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rampup.engine.keys import per_row_keys
from rampup.engine.mesh import make_mesh
from rampup.errors import ConfigError
from rampup.lm.transformer import (
    REMAT_POLICIES,
    Block,
    LanguageModel,
    attend,
    causal_attention,
    cross_entropy,
    splash_attention,
    tiled_cross_entropy,
)
from rampup.plan import MeshAxes

SMALL = LanguageModel(
    num_layers=1, width=16, mlp_dim=32, num_heads=4, num_kv_heads=2, vocab_size=32
)
DEEP = dataclasses.replace(
    SMALL, num_layers=2
)  # where the scan over the layers matters
# Compiled as one program each: run operation by operation, every test would compile a
# hundred small ones.
init = jax.jit(lambda model: model.init(jax.random.key(0)), static_argnums=0)
logits_of = jax.jit(LanguageModel.logits, static_argnums=0)
loss_of = jax.jit(lambda model, *args: model.loss(*args)[0], static_argnums=0)
loss_and_grads = jax.jit(
    lambda model, params, rows: jax.value_and_grad(lambda p: model.loss(p, rows)[0])(
        params
    ),
    static_argnums=0,
)


def batch(rows=8, length=12):
    """Return rows of random tokens, of unequal length."""
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 32, (rows, length + 1)).astype(np.uint8),
        "length": rng.integers(1, length + 1, rows).astype(np.int32),
    }


def test_logits_depend_on_the_past_and_its_order():
    """Changing a token changes no logits before it; the same tokens in another order
    give other logits.
    """
    params = init(SMALL)
    tokens = jnp.asarray(batch()["tokens"][:, :-1], jnp.int32)
    changed = tokens.at[:, 6].set((tokens[:, 6] + 1) % 32)
    before, after = logits_of(SMALL, params, tokens), logits_of(SMALL, params, changed)
    np.testing.assert_allclose(before[:, :6], after[:, :6], atol=1e-5)
    assert not np.allclose(before[:, 6:], after[:, 6:], atol=1e-5)
    swapped = logits_of(SMALL, params, tokens.at[:, :2].set(tokens[:, 1::-1]))
    assert not np.allclose(before[:, 2:], swapped[:, 2:], atol=1e-5)


def test_cross_entropy_counts_only_real_targets():
    """Targets beyond a row's length do not count, in loss and in weight."""
    logits, targets = jnp.zeros((2, 5, 7)), jnp.zeros((2, 5), jnp.int32)
    loss, weight = cross_entropy(logits, targets, jnp.array([5, 2]))
    assert float(weight) == 7
    np.testing.assert_allclose(loss, 7 * np.log(7), rtol=1e-6)


def test_dropout_depends_only_on_the_row():
    """A row's loss with dropout is the same in every microbatch, and differs from its
    loss without.
    """
    model = dataclasses.replace(SMALL, dropout_rate=0.3)
    params, rows = init(model), batch()
    keys = per_row_keys(jax.random.key(1), jnp.int32(0), jnp.arange(8).reshape(1, 8))[0]
    whole = float(loss_of(model, params, rows, keys))
    halves = [
        float(loss_of(model, params, {n: x[part] for n, x in rows.items()}, keys[part]))
        for part in (slice(0, 4), slice(4, 8))
    ]
    assert whole == pytest.approx(sum(halves), rel=1e-5)
    assert whole != pytest.approx(float(loss_of(SMALL, params, rows)), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "param_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def test_bfloat16_loss_is_close_to_float32(param_dtype):
    """With activations in bfloat16, the loss is nearly that of float32, and gradients
    have the type of the parameters.
    """
    model = dataclasses.replace(SMALL, dtype="bfloat16", param_dtype=param_dtype)
    params = init(model)
    loss, grads = loss_and_grads(model, params, batch())
    expected = loss_and_grads(
        SMALL, jax.tree.map(lambda x: x.astype(jnp.float32), params), batch()
    )[0]
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {
        jnp.dtype(param_dtype)
    }


@pytest.mark.parametrize(
    ("change", "axes", "key"),
    [
        ({"num_kv_heads": 1}, MeshAxes(data=4, tensor=2), "base_num_kv_heads"),
        ({"mlp_dim": 33}, MeshAxes(data=4, tensor=2), "base_mlp_dim"),
        ({"vocab_size": 31}, MeshAxes(data=4, tensor=2), "vocab_size"),
        (
            {"width": 12, "num_heads": 2, "num_kv_heads": 2},
            MeshAxes(fsdp=8),
            "base_emb_dim",
        ),
    ],
)
def test_shardings_refuse_sizes_that_do_not_divide(change, axes, key):
    """A size that the mesh does not divide is refused by key."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(SMALL, **change).shardings(make_mesh(axes))
    assert caught.value.key == key


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_flops_per_sample_are_those_of_the_compiled_gradient(tied):
    """The formula agrees with the compiler's own count, for one layer, whose loop body
    is counted once.
    """
    model = LanguageModel(
        num_layers=1,
        width=64,
        mlp_dim=256,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=128,
        tied=tied,
    )
    rows = {"tokens": jnp.zeros((4, 33), jnp.int32), "length": jnp.full(4, 32)}
    grad = jax.jit(
        jax.grad(
            lambda params: model.loss(
                params, rows, jax.random.split(jax.random.key(0), 4)
            )[0]
        )
    )
    params = jax.eval_shape(model.init, jax.random.key(0))
    assert ("head" in params) != tied
    counted = grad.lower(params).compile().cost_analysis()["flops"]
    assert 4 * model.flops_per_sample(32) == pytest.approx(counted, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        *({"remat_policy": policy} for policy in ("minimal", "full")),
        {"attention": "flash"},
        *({"num_vocab_tiling": 4}, {"num_vocab_tiling": 8, "tied": True}),
        {"remat_policy": "save_dot_except_mlp", "num_vocab_tiling": 2},
    ],
)
def test_options_of_memory_change_no_gradient(changes):
    """Each option gives loss and gradients of the plain model, to 1e-5."""
    plain = dataclasses.replace(DEEP, tied=changes.get("tied", False))
    params = init(plain)
    expected = loss_and_grads(plain, params, batch())
    found = loss_and_grads(dataclasses.replace(plain, **changes), params, batch())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        found,
        expected,
    )


QKV, OUT = [(2, 8, 4, 4), (2, 8, 2, 4), (2, 8, 2, 4)], [(2, 8, 16)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    {
        "save_dot_except_mlp": QKV + OUT,
        "full": [],
    }.items(),
)
def test_remat_policies_save_what_they_name(policy, expected, capsys):
    """Beside its arguments, a layer's forward pass keeps for its backward pass what the
    policy names.
    """
    block, x = Block(SMALL), jnp.zeros((2, 8, 16))
    params = jax.eval_shape(block.init, jax.random.key(0), x)
    apply = jax.checkpoint(
        lambda params, x: jnp.sum(block.apply(params, x)), policy=REMAT_POLICIES[policy]
    )
    jax.ad_checkpoint.print_saved_residuals(apply, params, x)
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if " argument" not in line and "constant" not in line
    ]
    shapes = [
        tuple(map(int, re.findall(r"\d+", line.split("[")[1].split("]")[0])))
        for line in lines
    ]
    assert sorted(shapes) == sorted(expected)


@pytest.mark.parametrize(("num_tiles", "num_parts"), [(1, 1), (3, 1), (2, 4), (24, 1)])
def test_tiled_cross_entropy_is_cross_entropy(num_tiles, num_parts):
    """Loss, weight and the gradients of input and matrix are those of all logits at
    once, to 1e-5, for extreme logits too.
    """
    rng = np.random.default_rng(0)
    x, kernel = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 5, 8), (8, 24))
    )
    x = x.at[0, 0].multiply(30)
    targets, length = jnp.asarray(rng.integers(0, 24, (2, 5))), jnp.array([5, 2])

    options = {
        "num_tiles": num_tiles,
        "num_parts": num_parts,
        "prepare": lambda kernel: kernel,
    }
    tiled = jax.jit(
        lambda x, kernel: tiled_cross_entropy(x, kernel, targets, length, **options)
    )
    plain = jax.jit(lambda x, kernel: cross_entropy(x @ kernel, targets, length))
    found, expected = (
        jax.value_and_grad(f, (0, 1), has_aux=True)(x, kernel) for f in (tiled, plain)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


def test_tiled_cross_entropy_needs_no_memory_for_all_logits():
    """The temporary memory of the gradient falls below the size of the logits."""
    B, T, E, V = 4, 64, 16, 4096
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, E), (E, V))]
    targets, length = jnp.zeros((B, T), jnp.int32), jnp.full(B, T)

    def temporary(loss):
        compiled = (
            jax.jit(jax.grad(lambda x, kernel: loss(x, kernel)[0], (0, 1)))
            .lower(*shapes)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    options = {"num_tiles": 16, "prepare": lambda kernel: kernel}
    tiled = temporary(
        lambda x, kernel: tiled_cross_entropy(x, kernel, targets, length, **options)
    )
    whole = temporary(lambda x, kernel: cross_entropy(x @ kernel, targets, length))
    assert tiled < 4 * B * T * V < whole


def arrays(T, H=2, G=1, D=128):
    """Return queries, keys and values."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(2, T, heads, D)), jnp.float32)
        for heads in (H, G, G)
    ]


def test_attend_falls_back_without_a_tpu():
    """Every kind gives the plain result, bit for bit, if the devices are no TPUs or
    unknown, for any length.
    """
    q, k, v = arrays(128, D=16)
    expected = causal_attention(q, k, v)
    for kind in ("autoselected", "dot_product", "flash"):
        for mesh in (None, make_mesh(devices=jax.devices()[:1])):
            np.testing.assert_array_equal(
                attend(q, k, v, kind=kind, mesh=mesh), expected
            )
    short = [x[:, :5] for x in (q, k, v)]
    np.testing.assert_array_equal(
        attend(*short, kind="flash", mesh=None), causal_attention(*short)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("T", "H", "G"), [(128, 2, 1), (384, 4, 2)])
def test_splash_attention_is_causal_attention(T, H, G):
    """The kernel, interpreted on a CPU, gives output and gradients of plain attention,
    to 1e-4; heads share keys and values.
    """
    q, k, v = arrays(T, H, G)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=q.shape), jnp.float32)

    def loss(attention):
        return jax.jit(
            jax.value_and_grad(lambda qkv: jnp.sum(attention(*qkv) * weights))
        )((q, k, v))

    expected = loss(causal_attention)
    found = loss(lambda *qkv: splash_attention(*qkv, interpret=True))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        found,
        expected,
    )
