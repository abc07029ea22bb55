"""Tests of rampup.contrib.rl.generation, rampup.contrib.rl.policy and the decoding of
rampup.lm.transformer.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers import toy

from rampup.contrib.rl.generation import Sampling, generate, pad_prompts
from rampup.contrib.rl.policy import as_policy, split_policy, token_log_probabilities
from rampup.errors import ConfigError, DataError
from rampup.lm.transformer import LanguageModel, packed_hidden

MODEL = LanguageModel(
    num_layers=2, width=16, mlp_dim=32, num_heads=4, num_kv_heads=2, vocab_size=16
)


@functools.cache
def params_of_model():
    """Return parameters that are larger than at the start of training, so that the
    probabilities are less even.
    """
    return jax.tree.map(lambda x: 1.5 * x, jax.jit(MODEL.init)(jax.random.key(0)))


PROMPTS = [
    [5, 6, 7],
    [8],
    [9, 10, 11, 12, 13],
    [1, 2],
    [3, 3, 3, 3],
    [4],
    [7, 8],
    [15, 14, 13],
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["one", "data_fsdp_tensor"])
def test_log_probabilities_with_the_cache_are_those_of_a_full_pass(mesh):
    """To 1e-5, for rows of all lengths; the tokens do not depend on the devices, and
    the end token is the last and counts.
    """
    options, devices = (
        {"max_response_length": 9, "end_token": 2, "seed": 3},
        toy.mesh_of(mesh),
    )
    placed = jax.device_put(params_of_model(), MODEL.shardings(devices))
    found = generate(MODEL, placed, PROMPTS, mesh=devices, **options)
    log_p = np.asarray(
        token_log_probabilities(
            MODEL.logits(params_of_model(), found.tokens[:, :-1]), found.tokens[:, 1:]
        )
    )
    assert len(set(found.response_length.tolist())) > 1
    if mesh != "one":
        alone = generate(MODEL, params_of_model(), PROMPTS, **options)
        np.testing.assert_array_equal(found.tokens, alone.tokens)
    for row, (prompt, start, length) in enumerate(
        zip(PROMPTS, found.prompt_length, found.response_length, strict=True)
    ):
        tokens, whole = found.tokens[row], np.zeros(9)
        whole[:length] = log_p[row, start - 1 : start - 1 + length]
        np.testing.assert_allclose(found.log_probabilities[row], whole, atol=1e-5)
        response = tokens[start : start + length].tolist()
        assert tokens[:start].tolist() == prompt
        assert 2 not in response[:-1]
        assert length == 9 or response[-1] == 2
        assert not tokens[start + length :].any()


@pytest.mark.slow
def test_a_model_without_a_cache_samples_the_same():
    """A function of tokens runs whole rows for every token, with the same numbers."""
    options = {"max_response_length": 6, "seed": 1}
    cached, whole = (
        generate(model, params_of_model(), PROMPTS, **options)
        for model in (MODEL, MODEL.logits)
    )
    np.testing.assert_array_equal(cached.tokens, whole.tokens)
    np.testing.assert_allclose(
        cached.log_probabilities, whole.log_probabilities, atol=1e-5
    )


def test_linen_and_nnx_models_generate():
    """Flax modules of both kinds are policies."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(8)(nn.Embed(8, 4)(tokens))

    class Nnx(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.out = (
                nnx.Embed(8, 4, rngs=rngs),
                nnx.Linear(4, 8, rngs=rngs),
            )

        def __call__(self, tokens):
            return self.out(self.embed(tokens))

    linen = Linen()
    params = linen.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    for model, values in ((linen, params), split_policy(Nnx(nnx.Rngs(0)))):
        found = generate(model, values, [[1, 2], [3]], max_response_length=4)
        assert found.tokens.shape == (2, 6)
        assert (found.response_length == 4).all()
    with pytest.raises(ConfigError, match="split_policy"):
        as_policy(Nnx(nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("sampling", "probabilities"),
    [
        (Sampling(), [0.1, 0.2, 0.3, 0.4]),
        (Sampling(temperature=0.5), [0.01 / 0.3, 0.04 / 0.3, 0.09 / 0.3, 0.16 / 0.3]),
        (Sampling(top_k=2), [0, 0, 3 / 7, 4 / 7]),
        (Sampling(top_p=0.8), [0, 2 / 9, 3 / 9, 4 / 9]),
        (Sampling(temperature=0), [0, 0, 0, 1]),
        (Sampling(top_k=1), [0, 0, 0, 1]),
    ],
    ids=str,
)
def test_samples_have_the_probabilities_of_the_softmax(sampling, probabilities):
    """Chi-squared over 20,000 tokens, at a level that a right sampler misses once in a
    million runs.
    """

    def logits(params, tokens):
        return jnp.broadcast_to(params, (*tokens.shape, 4))

    params = jnp.log(jnp.array([0.1, 0.2, 0.3, 0.4]))
    found = generate(
        logits, params, [[1]] * 2000, max_response_length=10, sampling=sampling
    )
    counts = np.bincount(found.tokens[:, 1:].ravel(), minlength=4)
    likely = np.array(probabilities) > 0
    from scipy import stats  # takes a second

    assert counts[~likely].sum() == 0
    if likely.sum() > 1:
        expected = np.array(probabilities)[likely] * counts.sum()
        assert stats.chisquare(counts[likely], expected).pvalue > 1e-6


@pytest.mark.slow
def test_packed_rows_are_computed_like_single_ones():
    """Three sequences in one row have the hidden states that each has alone, whatever
    the padding contains.
    """
    sequences = [[5, 6, 7, 1], [8, 2], [9, 10, 11]]
    tokens = np.array([[*sequences[0], *sequences[1], *sequences[2], 4, 4]])
    positions, segments = (
        np.array([[0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 0]]),
        np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0]]),
    )

    @jax.jit
    def packed_logits(params):
        hidden = packed_hidden(MODEL, params, tokens, positions, segments)
        return MODEL.head(params, hidden)[0]

    packed = packed_logits(params_of_model())
    single = np.concatenate(
        [
            jax.jit(MODEL.logits)(params_of_model(), np.array([sequence]))[0]
            for sequence in sequences
        ]
    )
    np.testing.assert_allclose(packed[:9], single, atol=2e-5)


@pytest.mark.parametrize(
    ("call", "key", "rule"),
    [
        (
            lambda: generate(MODEL, None, [[]], max_response_length=3),
            "max_prompt_length",
            "0 has 0 tokens.*leave it out$",
        ),
        (
            lambda: pad_prompts([[1, 2], [1, 2, 3]], 2),
            "max_prompt_length",
            "prompt 1 has 3 tokens.* set max_prompt_length=3",
        ),
        (
            lambda: generate(MODEL, None, [[1]], max_response_length=0),
            "max_response_length",
            "at least 1",
        ),
        (
            lambda: generate(MODEL, None, [[1]], max_response_length=1.5),
            "max_response_length",
            "whole number",
        ),
        (lambda: Sampling(temperature=-1), "decode_sampling_temperature", "at least 0"),
        (
            lambda: Sampling(temperature=float("nan")),
            "decode_sampling_temperature",
            "at least 0",
        ),
        (lambda: Sampling(top_k=1.5), "decode_sampling_top_k", "0 or more"),
        (lambda: Sampling(top_p=0), "decode_sampling_nucleus_p", "above 0"),
        (lambda: Sampling(top_p=2), "decode_sampling_nucleus_p", "at most 1"),
    ],
)
def test_bad_input_is_refused(call, key, rule):
    """Empty and long prompts, lengths below 1, and every number of the sampling outside
    its range.
    """
    with pytest.raises((ConfigError, DataError), match=rule) as caught:
        call()
    assert caught.value.key == key
