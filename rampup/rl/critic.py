"""The critic of PPO: rampup's language model with a value in place of the logits.

Shape suffixes: B rows, T tokens of a row, E width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.lm.decode import packed_hidden
from rampup.lm.transformer import LanguageModel
from rampup.run.mesh import BatchAxes, auto_view, replicated

ValuesFn = Callable[[Any, Mapping[str, jax.Array]], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """A value function: `(params, rows) -> values_BT`, the value before the token after each token of `rows["tokens"]`.

    Attributes:
        spread: for programs whose rows the compiler spreads over the mesh.
        in_replica: for the training step, in which a replica sees its own rows.
    """

    spread: ValuesFn
    in_replica: ValuesFn


def critic_of(model: LanguageModel, mesh: Mesh) -> Critic:
    """Return the critic with the layers of a language model."""
    rows = NamedSharding(auto_view(mesh), PartitionSpec(BatchAxes.of(mesh).rows))
    return Critic(spread=_values_of(replace(model, activations=rows)), in_replica=_values_of(model.on(auto_view(mesh))))


def critic_params(model: LanguageModel, params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Return the critic's parameters before training: a policy's layers, and a value of 0 everywhere."""
    kept = {name: params[name] for name in ("embedding", "layers", "final_norm")}
    value = jnp.zeros((model.width,), jnp.dtype(model.param_dtype))
    return kept | {"value": jax.device_put(value, replicated(mesh))}


def _values_of(model: LanguageModel) -> ValuesFn:
    def values(params: Any, rows: Mapping[str, jax.Array]) -> jax.Array:
        if "segments" in rows:
            x_BTE = packed_hidden(model, params, rows["tokens"], rows["positions"], rows["segments"])
        else:
            x_BTE = model.apply_layers(params["layers"], model.embed(params, rows["tokens"]))
        x_BTE = nn.RMSNorm(dtype=jnp.dtype(model.dtype)).apply({"params": {"scale": params["final_norm"]}}, x_BTE)
        values_BT = x_BTE @ params["value"].astype(model.dtype)
        return values_BT.astype(jnp.promote_types(values_BT.dtype, jnp.float32))

    return values
