"""MaxText's own pipeline module around layers that it does not know, where MaxText is installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.errors import MissingDependencyError
from rampup.run.mesh import STAGE

# Its own list of dependencies is for training with all of MaxText; these are what the pipeline module imports.
INSTALL = "pip install --no-deps maxtext==0.2.5 && pip install aqtp qwix omegaconf pydantic jinja2 psutil pathwaysutils"
AXIS_RULES = (("activation_stage", STAGE), ("layers", STAGE))

Layers = Mapping[str, jax.Array]
# stage(layers, x) -> x: some consecutive layers, stacked.
StageFn = Callable[[Layers, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextPipeline:
    """The pipeline of the installed MaxText.

    Attributes:
        version: of MaxText.
        module: its pipeline module.
        shard_mode: its word for shardings that are left to the compiler.
    """

    version: str
    module: ModuleType
    shard_mode: Any

    @classmethod
    def load(cls) -> MaxTextPipeline:
        """Import what is needed of an installed MaxText.

        Raises:
            MissingDependencyError: it is not installed, or something that it imports is not; with what to install.
        """
        try:
            version = importlib.metadata.version("maxtext")
            # On import it prints, and standard output belongs to the results.
            with contextlib.redirect_stdout(sys.stderr):
                module = importlib.import_module("maxtext.layers.pipeline")
                types = importlib.import_module("maxtext.common.common_types")
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependencyError(f"MaxText is not installed; to compare with it: {INSTALL}", key="maxtext") from None
        except ImportError as error:
            raise MissingDependencyError(
                f"MaxText {version} is installed, but its pipeline cannot be imported: {error}; it needs: {INSTALL}",
                key=error.name or "maxtext",
            ) from error
        return cls(version=version, module=module, shard_mode=types.ShardMode.AUTO)

    def forward(
        self, stage: StageFn, layers: Layers, x_BTE: jax.Array, *, mesh: Mesh, num_microbatches: int, num_repeats: int
    ) -> Callable[[Layers, jax.Array], jax.Array]:
        """Return a function (layers, x_BTE) -> y_BTE that applies all layers in MaxText's pipeline.

        It recomputes a chunk's forward in the backward from the chunk's input, MaxText's default, and its loop is a scan.

        Args:
            stage: some consecutive layers.
            layers: the layers as `arranged`; only shapes and types matter.
            x_BTE: the batch; only its shape matters.
            mesh: the mesh, whose `stage` axis is the pipeline.
            num_microbatches: m, a multiple of the stages.
            num_repeats: v.
        """
        batch, length, width = x_BTE.shape
        config = SimpleNamespace(
            ici_pipeline_parallelism=mesh.shape[STAGE],
            dcn_pipeline_parallelism=1,
            num_pipeline_microbatches=num_microbatches,
            num_pipeline_repeats=num_repeats,
            micro_batch_size_to_train_on=batch,
            max_target_length=length,
            emb_dim=width,
            pipeline_delay_activation_forwarding=False,
            pipeline_fsdp_ag_once=False,
            pipeline_fsdp_ag_per_repeat=False,
            remat_policy="full",
            set_remat_policy_on_pipeline_iterations=True,
            scan_pipeline_iterations=True,
            scan_layers=False,
            shard_mode=self.shard_mode,
            debug_sharding=False,
            logical_axis_rules=AXIS_RULES,
        )
        leading = 2 if num_repeats > 1 else 1
        chunk = {name: jax.ShapeDtypeStruct(layer.shape[leading:], layer.dtype) for name, layer in layers.items()}
        with nn.logical_axis_rules(AXIS_RULES):
            pipeline = self.module.create_nnx_pipeline(config, lambda rngs: _Chunk(stage, chunk), mesh, rngs=nnx.Rngs(0))
        graph, variables, rest = nnx.split(pipeline, nnx.Param, ...)
        structure = jax.tree.structure(variables)

        def forward(layers: Layers, x_BTE: jax.Array) -> jax.Array:
            given = jax.tree.unflatten(structure, jax.tree.leaves({"layers": dict(layers)}))
            with nn.logical_axis_rules(AXIS_RULES):
                y_BTE: jax.Array = nnx.merge(graph, given, rest)(x_BTE, None, None, True)
            return y_BTE

        return forward


class _Chunk(nnx.Module):
    """Some consecutive layers, called as MaxText's pipeline calls a decoder layer."""

    def __init__(self, stage: StageFn, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        self.stage, self.names = stage, tuple(shapes)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape.shape, shape.dtype)))

    def __call__(self, x: jax.Array, *_: Any) -> jax.Array:
        return self.stage({name: getattr(self, name)[...] for name in self.names}, x)


def arranged(layers: Layers, mesh: Mesh, num_repeats: int) -> dict[str, jax.Array]:
    """Return stacked layers as MaxText's pipeline holds them: repeat (where there are several), stage, layer of the chunk.

    Args:
        layers: stacked in the model's own order.
        mesh: the mesh, whose `stage` axis they are cut over.
        num_repeats: v.
    """
    leading = (num_repeats, mesh.shape[STAGE]) if num_repeats > 1 else (mesh.shape[STAGE],)
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * (len(leading) - 1), STAGE))
    return {name: jax.device_put(layer.reshape(*leading, -1, *layer.shape[1:]), sharding) for name, layer in layers.items()}
