"""Baselines from MaxText: its ramp-up manager, and its pipeline module around other
layers.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.engine.mesh import STAGE
from rampup.errors import MissingDependencyError
from rampup.plan.ramp import BatchRamp

MANAGER_FILE, MANAGER_CLASS = ("utils", "rampup_batch.py"), "RampupBatchManager"
# (config, step_num) -> a manager that has replayed `step_num` steps, with `update()`
# and `global_batch_size_current`.
MakeManager = Callable[[Any, int], Any]

# The dependencies of its pipeline module; MaxText's own list is for all of MaxText.
INSTALL = (
    "pip install --no-deps maxtext==0.2.5 && pip install aqtp qwix omegaconf pydantic"
    " jinja2 psutil pathwaysutils"
)
AXIS_RULES = (("activation_stage", STAGE), ("layers", STAGE))
Layers = Mapping[str, jax.Array]
# stage(layers, x) -> x: consecutive layers, stacked.
StageFn = Callable[[Layers, jax.Array], jax.Array]


class ReplayManager:
    """Counts batches as MaxText's manager does: a phase ends when it has used its
    share; a resume replays every step.
    """

    def __init__(self, config: Any, step_num: int) -> None:
        devices = int(config.num_target_devices)
        growth = config.per_device_batch_size - config.per_device_batch_size_start
        self.global_batch_size_end = int(devices * config.per_device_batch_size)
        self.increment = int(devices * config.per_device_batch_size_increment)
        self.samples_per_increment = config.global_rampup_samples / (
            growth // config.per_device_batch_size_increment
        )
        self.global_batch_size_current = int(
            devices * config.per_device_batch_size_start
        )
        self.total_used_samples = self.num_accum_samples = 0
        for _ in range(step_num):
            self.update()

    def update(self) -> bool:
        """Count one batch; return whether the ramp is still active."""
        size = self.global_batch_size_current
        self.total_used_samples += size
        self.num_accum_samples += size
        if self.num_accum_samples >= self.samples_per_increment:
            self.global_batch_size_current = min(
                size + self.increment, self.global_batch_size_end
            )
            self.num_accum_samples = 0
        return self.global_batch_size_current < self.global_batch_size_end


def maxtext_manager() -> tuple[MakeManager, str]:
    """Return MaxText's manager and its origin: the installed package's class, or
    `ReplayManager`.
    """
    spec = importlib.util.find_spec("maxtext")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder).joinpath(*MANAGER_FILE)
        if path.is_file():
            manager: MakeManager = definitions_in(path, MANAGER_CLASS, math=math)[
                MANAGER_CLASS
            ]
            return manager, "the installed MaxText's utils/rampup_batch.py"
    return (
        ReplayManager,
        "a reimplementation of MaxText's replay, since MaxText is not installed",
    )


def manager_ramp(config: Any) -> BatchRamp:
    """Return the ramp that MaxText's manager follows for a configuration."""
    devices = config.num_target_devices
    return BatchRamp.linear(
        start=devices * config.per_device_batch_size_start,
        increment=devices * config.per_device_batch_size_increment,
        end=devices * config.per_device_batch_size,
        samples=config.global_rampup_samples,
    )


def definitions_in(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """Execute only these classes and functions of a file, so that what the file imports
    is not needed.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    namespace: dict[str, Any] = dict(given)
    exec(compile(tree, str(path), "exec"), namespace)
    return namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextPipeline:
    """The pipeline of the installed MaxText."""

    version: str  # the version of MaxText
    module: ModuleType  # its pipeline module
    shard_mode: Any  # its constant for shardings that the compiler chooses

    @classmethod
    def load(cls) -> MaxTextPipeline:
        """Import the pipeline of the installed MaxText. A MissingDependencyError names
        the command that installs it.
        """
        try:
            version = importlib.metadata.version("maxtext")
            # It prints on import, and standard output is for results.
            with contextlib.redirect_stdout(sys.stderr):
                module = importlib.import_module("maxtext.layers.pipeline")
                types = importlib.import_module("maxtext.common.common_types")
        except importlib.metadata.PackageNotFoundError:
            raise MissingDependencyError(
                f"MaxText is not installed; to compare with it: {INSTALL}",
                key="maxtext",
            ) from None
        except ImportError as error:
            raise MissingDependencyError(
                f"MaxText {version} is installed, but its pipeline cannot be imported:"
                f" {error}; it needs: {INSTALL}",
                key=error.name or "maxtext",
            ) from error
        return cls(version=version, module=module, shard_mode=types.ShardMode.AUTO)

    def forward(
        self,
        stage: StageFn,
        layers: Layers,
        x_BTE: jax.Array,
        *,
        mesh: Mesh,
        num_microbatches: int,
        num_repeats: int,
    ) -> Callable[[Layers, jax.Array], jax.Array]:
        """Return a function (layers, x_BTE) -> y_BTE that applies all layers in
        MaxText's pipeline.

        The backward recomputes a chunk's forward from its input, which is MaxText's
        default. Its loop is a scan.
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
        chunk = {
            name: jax.ShapeDtypeStruct(layer.shape[leading:], layer.dtype)
            for name, layer in layers.items()
        }
        with nn.logical_axis_rules(AXIS_RULES):
            pipeline = self.module.create_nnx_pipeline(
                config, lambda rngs: _Chunk(stage, chunk), mesh, rngs=nnx.Rngs(0)
            )
        graph, variables, rest = nnx.split(pipeline, nnx.Param, ...)
        structure = jax.tree.structure(variables)

        def forward(layers: Layers, x_BTE: jax.Array) -> jax.Array:
            params = jax.tree.unflatten(
                structure, jax.tree.leaves({"layers": dict(layers)})
            )
            with nn.logical_axis_rules(AXIS_RULES):
                y_BTE: jax.Array = nnx.merge(graph, params, rest)(
                    x_BTE, None, None, True
                )
            return y_BTE

        return forward


class _Chunk(nnx.Module):
    """Consecutive layers, with the interface of a decoder layer in MaxText's
    pipeline.
    """

    def __init__(
        self, stage: StageFn, shapes: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        self.stage, self.names = stage, tuple(shapes)
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape.shape, shape.dtype)))

    def __call__(self, x: jax.Array, *_: Any) -> jax.Array:
        return self.stage({name: getattr(self, name)[...] for name in self.names}, x)


def arrange_layers(
    layers: Layers, mesh: Mesh, num_repeats: int
) -> dict[str, jax.Array]:
    """Return stacked layers with MaxText's leading axes: repeat (if there are several),
    stage, layer of the chunk.
    """
    leading = (
        (num_repeats, mesh.shape[STAGE]) if num_repeats > 1 else (mesh.shape[STAGE],)
    )
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * (len(leading) - 1), STAGE))
    return {
        name: jax.device_put(layer.reshape(*leading, -1, *layer.shape[1:]), sharding)
        for name, layer in layers.items()
    }
