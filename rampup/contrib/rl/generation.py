"""Generation: one compiled scan of static length over the mesh.

Shape suffixes: B rows, P tokens of a padded prompt, R tokens of the longest response, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rampup.contrib.rl.plan import count_problems
from rampup.contrib.rl.policy import (
    Policy,
    as_policy,
    over_rows,
    token_log_probabilities,
)
from rampup.errors import ConfigError, DataError, raise_together

PAD = 0


class Samples(NamedTuple):
    """Prompts with their responses, as NumPy or JAX arrays.

    Attributes:
        tokens: int32 (B, P + R). A prompt and its response without a gap, then padding.
        prompt_length: int32 (B,).
        response_length: int32 (B,). The end token counts, so an empty response has
            length 1. R if no end token came.
        log_probabilities: float32 (B, R), of every token of the response under the
            policy at the sampling temperature; None in a rollout.
    """

    tokens: Any
    prompt_length: Any
    response_length: Any
    log_probabilities: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample from this many most probable tokens; 0 = from all.
        top_p: sample from the most probable tokens whose probabilities add up to at
            least this (nucleus sampling); 1 = all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        for name, value, holds, legal, nearest in (
            (
                "temperature",
                self.temperature,
                0 <= self.temperature < float("inf"),
                "at least 0",
                (0.0, 1.0),
            ),
            (
                "top_k",
                self.top_k,
                isinstance(self.top_k, int) and self.top_k >= 0,
                "0 or more",
                (0,),
            ),
            (
                "nucleus_p",
                self.top_p,
                0 < self.top_p <= 1,
                "above 0 and at most 1",
                (1.0,),
            ),
        ):
            if not holds:
                key = f"decode_sampling_{name}"
                problems.append(
                    ConfigError(
                        f"{key}={value} must be {legal}", key=key, nearest=nearest
                    )
                )
        raise_together(problems)

    @property
    def values(self) -> tuple[np.float32, np.int32, np.float32]:
        """The numbers as arguments of a compiled program, which serves any of them."""
        return (
            np.float32(self.temperature),
            np.int32(self.top_k),
            np.float32(self.top_p),
        )


def pad_prompts(
    prompts: Sequence[Sequence[int]], max_prompt_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as an array (B, P), padded after their ends, and their lengths
    (B,).
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for number, length in enumerate(lengths.tolist()):
        if not 1 <= length <= max_prompt_length:
            fix, nearest = "leave it out", ()
            if length:
                nearest = (int(lengths.max()),)
                fix += f" or set max_prompt_length={nearest[0]}"
            raise DataError(
                f"prompt {number} has {length} tokens, but a prompt has from 1 to"
                f" max_prompt_length={max_prompt_length}",
                fix=fix,
                key="max_prompt_length",
                nearest=nearest,
            )
    tokens = np.full((len(prompts), max_prompt_length), PAD, np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def generate(
    model: Any,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_response_length: int,
    end_token: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Samples:
    """Sample one response to each prompt, with the log-probabilities of its tokens.
    Every call with new sizes compiles; `rollout_step` compiles once.

    Args:
        model: see `as_policy`; a language model of rampup decodes with a cache, others
            run the whole row for every token.
        max_response_length: R, the length at which a response is cut off.
        end_token: ends a response and is its last token; None = every response has R
            tokens.
        sampling: temperature and the like; None = the policy's own probabilities.
        seed: of the random numbers, which depend on it and on the row alone.
        mesh: the devices of `params`; None = one device.

    Example:
        >>> def logits(params, tokens):
        ...     return jax.nn.one_hot((tokens + 1) % 10, 10) * params
        >>> found = generate(
        ...     logits, 100.0, [[3], [6, 7]], max_response_length=3, end_token=9
        ... )
        >>> found.tokens.tolist(), found.response_length.tolist()
        ([[3, 4, 5, 6, 0], [6, 7, 8, 9, 0]], [3, 2])
    """
    raise_together(count_problems({"max_response_length": max_response_length}))
    tokens_BP, length_B = pad_prompts(
        prompts, max(max(map(len, prompts), default=1), 1)
    )
    rows_B = np.arange(len(tokens_BP), dtype=np.int32)
    policy = as_policy(model) if mesh is None else over_rows(model, mesh)
    run = make_generate(policy, max_response_length, end_token, log_probabilities=True)
    key, values = jax.random.key(seed), (sampling or Sampling()).values
    found = jax.jit(run)(params, tokens_BP, length_B, rows_B, key, *values)
    return Samples(*jax.device_get(found))


def make_generate(
    policy: Policy,
    max_response_length: int,
    end_token: int | None,
    *,
    log_probabilities: bool = False,
) -> Any:
    """Return the function to compile: a scan of R iterations, in which a row that has
    ended writes padding.
    """
    R = max_response_length

    def run(
        params: Any,
        tokens_BP: Any,
        length_B: Any,
        rows_B: Any,
        key: Any,
        *sampling: Any,
    ) -> Samples:
        temperature, top_k, top_p = sampling
        B, P = tokens_BP.shape
        tokens_BT = jnp.concatenate(
            [tokens_BP, jnp.full((B, R), PAD, tokens_BP.dtype)], axis=1
        )
        keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
        own = jnp.where(
            temperature > 0, temperature, 1
        )  # the temperature of the log-probabilities
        if policy.prefill is None or policy.decode is None:
            logits_BV = _logits_at(policy, params, tokens_BT, length_B - 1)
            cache = None
        else:
            logits_BV, cache = policy.prefill(params, tokens_BP, length_B, P + R)

        def step(carry: Any, number: jax.Array) -> tuple[Any, Any]:
            tokens_BT, logits_BV, cache, ended_B = carry
            chosen_B = _sample(logits_BV, keys_B, number, temperature, top_k, top_p)
            log_p_B = None
            if log_probabilities:
                log_p_B = token_log_probabilities(
                    logits_BV[:, None], chosen_B[:, None], own
                )[:, 0]
                log_p_B = jnp.where(ended_B, 0, log_p_B).astype(jnp.float32)
            token_B = jnp.where(ended_B, PAD, chosen_B).astype(tokens_BT.dtype)
            is_here_BT = jnp.arange(P + R) == (length_B + number)[:, None]
            tokens_BT = jnp.where(
                is_here_BT & ~ended_B[:, None], token_B[:, None], tokens_BT
            )
            counts_B = ~ended_B
            if end_token is not None:
                ended_B = ended_B | (chosen_B == end_token)
            if cache is None:
                logits_BV = _logits_at(policy, params, tokens_BT, length_B + number)
            else:
                logits_BV, cache = policy.decode(
                    params, cache, token_B, length_B + number
                )
            return (tokens_BT, logits_BV, cache, ended_B), (log_p_B, counts_B)

        ended_B = jnp.zeros((B,), bool)
        (tokens_BT, *_), (log_p_RB, counts_RB) = jax.lax.scan(
            step, (tokens_BT, logits_BV, cache, ended_B), jnp.arange(R)
        )
        lengths_B = jnp.sum(counts_RB, axis=0, dtype=jnp.int32)
        return Samples(
            tokens_BT, length_B, lengths_B, None if log_p_RB is None else log_p_RB.T
        )

    return run


def _logits_at(
    policy: Policy, params: Any, tokens_BT: jax.Array, place_B: jax.Array
) -> jax.Array:
    """Return the logits (B, V) at one place of each row, from a whole forward pass."""
    return jnp.take_along_axis(
        policy.logits(params, tokens_BT), place_B[:, None, None], axis=1
    )[:, 0]


def _sample(
    logits_BV: jax.Array,
    keys_B: jax.Array,
    number: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
) -> jax.Array:
    """Return one token per row. The row's key and the number of the token decide,
    whatever the other rows are.
    """
    logits_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
    scaled_BV = logits_BV / jnp.where(temperature > 0, temperature, 1)
    is_cut = (top_k > 0) | (top_p < 1)
    kept_BV = jax.lax.cond(
        is_cut,
        lambda x_BV: _most_probable(x_BV, top_k, top_p),
        lambda x_BV: x_BV,
        scaled_BV,
    )
    keys_B = jax.vmap(jax.random.fold_in, (0, None))(keys_B, number)
    noise_BV = jax.vmap(
        lambda key: jax.random.gumbel(key, logits_BV.shape[1:], logits_BV.dtype)
    )(keys_B)
    return jnp.argmax(
        jnp.where(temperature > 0, kept_BV + noise_BV, logits_BV), axis=-1
    )


def _most_probable(scaled_BV: jax.Array, top_k: Any, top_p: Any) -> jax.Array:
    """Return logits with -inf for the tokens that top_k or top_p leave out."""
    V = scaled_BV.shape[-1]
    sorted_BV = -jnp.sort(-scaled_BV, axis=-1)
    smallest_B1 = jax.lax.dynamic_slice_in_dim(
        sorted_BV, jnp.where(top_k > 0, jnp.minimum(top_k, V), V) - 1, 1, axis=-1
    )
    # A token is in the nucleus if the more probable ones have less than top_p.
    probability_BV = jax.nn.softmax(sorted_BV, axis=-1)
    is_in_BV = (jnp.cumsum(probability_BV, axis=-1) - probability_BV < top_p) | (
        top_p >= 1
    )
    least_B1 = jnp.min(jnp.where(is_in_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(
        scaled_BV >= jnp.maximum(smallest_B1, least_B1), scaled_BV, -jnp.inf
    )
