"""The programs that `rampup bench pipeline` times: pipelines around the same two-matmul layers.

Shape suffixes: K microbatches, R rows of one microbatch; B rows of the batch, T tokens, E width.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.bench.gpipe import gpipe_sums
from rampup.bench.maxtext_pipeline import Layers, MaxTextPipeline, arranged
from rampup.plan.pipeline import stage_layer_order
from rampup.run.mesh import STAGE
from rampup.run.pipeline import PipelinedLoss, permute_layers, pipeline_sums

# As instructions of a compiled program. Matrix products may be calls of a library.
PERMUTE = re.compile(r" collective-permute(?:-start)?\(")
MATMUL = re.compile(r" dot\(| custom-call\(.*custom_call_target=\"[^\"]*(?:matmul|gemm)")
CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%[\w.\-]+(?:, )?)+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all pipelines train on.

    Attributes:
        layers: stacked in the model's own order: `up` (L, E, F) and `down` (L, F, E).
        x: the batch (B, T, E).
    """

    layers: Layers
    x: jax.Array

    @classmethod
    def make(cls, *, num_layers: int, batch: int, tokens: int, width: int, hidden: int) -> Model:
        """Return random layers and a random batch in float32.

        Args:
            num_layers: L.
            batch, tokens, width, hidden: B, T, E and F.
        """
        rng = np.random.default_rng(0)

        def normal(*shape: int, scale: float) -> jax.Array:
            return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

        up = normal(num_layers, width, hidden, scale=width**-0.5)
        down = normal(num_layers, hidden, width, scale=hidden**-0.5)
        return cls(layers={"up": up, "down": down}, x=normal(batch, tokens, width, scale=1.0))

    def gradients(self) -> Layers:
        """Return the gradients of the loss over the batch, without a pipeline."""
        return jax.jit(jax.grad(lambda layers, x_BTE: squares(two_matmuls(layers, x_BTE))))(self.layers, self.x)


def two_matmuls(layers: Layers, x: jax.Array) -> jax.Array:
    """Apply some stacked layers: x + relu(x @ up) @ down, one after the other without a loop, as MaxText's stages do."""
    for up, down in zip(layers["up"], layers["down"], strict=True):
        x = x + jax.nn.relu(x @ up) @ down
    return x


def squares(y: jax.Array) -> jax.Array:
    """Return the loss, summed over rows: half the square of every output."""
    return jnp.sum(y * y) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A compiled pipeline that returns the loss and its gradients.

    Attributes:
        system: what it is, for the table.
        num_repeats: v.
        executable: the compiled program.
        arguments: what it is called with.
        gradients: of what the program returns, the layers' gradients in the model's own order.
        is_peer: whether it is not ours.
    """

    system: str
    num_repeats: int
    executable: Any
    arguments: tuple[Any, ...]
    gradients: Callable[[Any], Layers]
    is_peer: bool = False

    @property
    def temp_bytes(self) -> int:
        """Memory of one device beside arguments and results."""
        return int(self.executable.memory_analysis().temp_size_in_bytes)

    def run(self) -> Any:
        """Run it and wait for the result."""
        return jax.block_until_ready(self.executable(*self.arguments))

    def gradient_error(self, wanted: Layers) -> float:
        """Return the largest difference from other gradients, relative to the largest value of each array."""
        found = self.gradients(self.run())
        differences = (np.max(np.abs(np.asarray(found[name]) - wanted[name])) / np.max(np.abs(wanted[name])) for name in wanted)
        return float(max(differences))


def our_program(
    system: str,
    model: Model,
    mesh: Mesh,
    num_microbatches: int,
    *,
    num_repeats: int = 1,
    skip_idle: bool = True,
    is_gpipe: bool = False,
) -> Program:
    """Compile one of our own pipelines.

    Args:
        system: what it is, for the table.
        model: layers and batch.
        mesh: the mesh, whose `stage` axis is the pipeline.
        num_microbatches: m.
        num_repeats: v.
        skip_idle: whether stages skip the ticks that they have no microbatch for.
        is_gpipe: differentiate through the forward ticks; each chunk is computed again in the backward, as in the others.
    """
    chunk = jax.checkpoint(two_matmuls) if is_gpipe else two_matmuls
    loss = PipelinedLoss(
        first=lambda params, x_RTE, keys: x_RTE,
        stage=lambda layers, x_RTE, batch, keys, first_layer: chunk(layers, x_RTE),
        last=lambda params, y_RTE, batch, keys: (squares(y_RTE), jnp.float32(y_RTE.shape[0]), {}),
        num_repeats=num_repeats,
        skip_idle=skip_idle,
    )
    order = stage_layer_order(len(model.layers["up"]), mesh.shape[STAGE], num_repeats)
    shardings = {"layers": {name: NamedSharding(mesh, PartitionSpec(STAGE)) for name in model.layers}}
    params = jax.device_put(permute_layers({"layers": dict(model.layers)}, order), shardings)
    cut = (num_microbatches, len(model.x) // num_microbatches)
    x_KRTE, keys_KR = model.x.reshape(*cut, *model.x.shape[1:]), jax.random.split(jax.random.key(0), cut)
    arguments = (params, *jax.device_put((x_KRTE, keys_KR), NamedSharding(mesh, PartitionSpec())))

    def step(params: Any, x_KRTE: jax.Array, keys_KR: jax.Array) -> tuple[jax.Array, Layers]:
        if is_gpipe:
            sums = gpipe_sums(loss, params, x_KRTE, keys_KR, mesh=mesh, param_shardings=shardings)
        else:
            sums = pipeline_sums(loss, params, x_KRTE, num_microbatches, keys_KR, mesh=mesh, param_shardings=shardings)
        return sums.loss, sums.grads

    return Program(
        system=system,
        num_repeats=num_repeats,
        executable=jax.jit(step).lower(*arguments).compile(),
        arguments=arguments,
        gradients=lambda result: permute_layers(result[1], np.argsort(order).tolist())["layers"],
    )


def maxtext_program(peer: MaxTextPipeline, model: Model, mesh: Mesh, num_microbatches: int, num_repeats: int) -> Program:
    """Compile MaxText's pipeline.

    Args:
        peer: the installed MaxText.
        model: layers and batch.
        mesh: the mesh, whose `stage` axis is the pipeline.
        num_microbatches: m, a multiple of the stages.
        num_repeats: v.
    """
    layers = arranged(model.layers, mesh, num_repeats)
    x_BTE = jax.device_put(model.x, NamedSharding(mesh, PartitionSpec(STAGE)))
    forward = peer.forward(two_matmuls, layers, x_BTE, mesh=mesh, num_microbatches=num_microbatches, num_repeats=num_repeats)

    def loss(layers: Layers, x_BTE: jax.Array) -> jax.Array:
        return squares(forward(layers, x_BTE))

    return Program(
        system=f"maxtext {peer.version}",
        num_repeats=num_repeats,
        executable=jax.jit(jax.value_and_grad(loss)).lower(layers, x_BTE).compile(),
        arguments=(layers, x_BTE),
        gradients=lambda result: {name: g.reshape(model.layers[name].shape) for name, g in result[1].items()},
        is_peer=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """The loops of a program that pass activations on, added up: one for both ways, or a forward and a backward one.

    Attributes:
        iterations: how often they run in one step; None if the compiler does not know.
        permutes: collective permutes in their bodies.
        matmuls: matrix products in their bodies; of a branch they count whether it is taken or not.
    """

    iterations: int | None
    permutes: int
    matmuls: int


def pipeline_loops(hlo: str) -> Loops:
    """Find the loops whose bodies permute, and count.

    Args:
        hlo: a compiled program as text.

    Example:
        >>> pipeline_loops('''
        ... %body (x: f32[]) -> f32[] {
        ...   %a = f32[] collective-permute(%x), source_target_pairs={{0,1}}
        ... }
        ... ENTRY %main (x: f32[]) -> f32[] {
        ...   %b = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"11"}}
        ... }
        ... ''')
        Loops(iterations=11, permutes=1, matmuls=0)
    """
    texts = dict(re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL))

    @functools.cache
    def inside(name: str) -> tuple[int, int]:
        """Count permutes and matmuls in a computation and in those that it calls, except in loops inside it."""
        permutes = matmuls = 0
        for line in texts.get(name, "").splitlines():
            permutes += bool(PERMUTE.search(line))
            matmuls += bool(MATMUL.search(line))
            if " while(" not in line:
                for other in re.findall(r"%([\w.\-]+)", " ".join(CALLED.findall(line))):
                    permutes, matmuls = permutes + inside(other)[0], matmuls + inside(other)[1]
        return permutes, matmuls

    whiles = [line for text in texts.values() for line in text.splitlines() if " while(" in line]
    found = [(line, *inside(re.findall(r"body=%([\w.\-]+)", line)[0])) for line in whiles]
    loops = [(line, permutes, matmuls) for line, permutes, matmuls in found if permutes]
    trips = [re.findall(r'known_trip_count":\{"n":"(\d+)"', line) for line, _, _ in loops]
    return Loops(
        iterations=sum(int(trip[0]) for trip in trips) if all(trips) else None,
        permutes=sum(permutes for _, permutes, _ in loops),
        matmuls=sum(matmuls for _, _, matmuls in loops),
    )
