"""A GPipe pipeline: the reference that `rampup bench pipeline` and the tests compare 1F1B with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from rampup.run.accumulate import Sums, accumulator
from rampup.run.pipeline import PipelinedLoss, Stage, run_on_stages


def gpipe_sums(
    loss: PipelinedLoss, params: Mapping[str, Any], batch_KR: Any, keys_KR: jax.Array, *, mesh: Mesh, param_shardings: Any
) -> Sums:
    """Sum loss and gradients by differentiating through the forward ticks, as GPipe, praxis and MaxText do.

    All K microbatches are used, their number is part of the program, and the activations of all of them are kept for the
    backward.
    """

    def stage_sums(layers: Any, shared: Any, batch_KR: Any, keys_KR: Any) -> Sums:
        def forward(layers: Any, shared: Any) -> tuple[jax.Array, Sums]:
            stage = Stage(loss, layers, shared, batch_KR, keys_KR, mesh, with_grads=False)
            sums = stage.run_pass(0, keys_KR.shape[0], stage.zeros())
            return sums.loss, sums

        grads, sums = jax.grad(forward, argnums=(0, 1), has_aux=True)(layers, shared)
        return sums._replace(grads=jax.tree.map(accumulator, grads))

    return run_on_stages(stage_sums, loss, params, batch_KR, keys_KR, (), mesh, param_shardings)
