"""A tiny problem with unequal weights, shared by the tests of rampup.engine."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import rampup
from rampup.data.files import open_sources
from rampup.engine.mesh import make_mesh
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan

WIDTH = 8
MESHES = {
    "one": None,
    "data": MeshAxes(data=8),
    "data_tensor": MeshAxes(data=4, tensor=2),
    "fsdp": MeshAxes(fsdp=8),
    "data_fsdp_tensor": MeshAxes(data=2, fsdp=2, tensor=2),
}


def slow(*case, **options):
    """Return a case of a test that runs on request only."""
    return pytest.param(*case, marks=pytest.mark.slow, **options)


def campaign(*case):
    """Return a case of a test that runs with the whole campaign only."""
    return pytest.param(*case, marks=pytest.mark.faults)


def mesh_of(name):
    """Return one of the meshes above; `one` is a single device."""
    axes = MESHES[name]
    return make_mesh(axes, jax.devices()[:1] if axes is None else None)


def loss_fn(params, batch, rngs):
    """Weighted squared error of a two-layer network, with dropout by row."""
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (WIDTH,)))(rngs)
    hidden = jnp.tanh(jnp.where(kept, batch["x"], 0) @ params["in"])
    error = jnp.sum((hidden @ params["out"] - batch["x"]) ** 2, axis=-1)
    return (
        jnp.sum(error * batch["weight"]),
        jnp.sum(batch["weight"]),
        {"rows": batch["weight"].size},
    )


def plain_loss_fn(params, batch, rngs):
    """Weighted squared error of a two-layer network, without dropout."""
    error = jnp.sum(
        (jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["x"]) ** 2, axis=-1
    )
    return jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]), {}


def new_params(mesh, dtype=np.float32):
    """Return parameters cut over fsdp and tensor."""
    rng = np.random.default_rng(0)
    values = {
        "in": rng.normal(size=(WIDTH, 16)) * 0.3,
        "out": rng.normal(size=(16, WIDTH)) * 0.3,
    }
    specs = {
        "in": PartitionSpec("fsdp", "tensor"),
        "out": PartitionSpec("tensor", "fsdp"),
    }
    return {
        name: jax.device_put(
            values[name].astype(dtype), NamedSharding(mesh, specs[name])
        )
        for name in values
    }


def rows(number=400, dtype=np.float32):
    """Return rows with weights from 1 to 9, each knowing its number."""
    rng = np.random.default_rng(1)
    return [
        {
            "x": rng.normal(size=WIDTH).astype(dtype),
            "weight": dtype(rng.integers(1, 10)),
            "id": np.int32(n),
        }
        for n in range(number)
    ]


def stacked(items):
    """Return rows as arrays (rows, ...)."""
    return jax.tree.map(lambda *x: np.stack(x), *items)


def plan_for(mesh, schedule="0:16 64:32 200:48", *, steps=12, **splitter):
    """Return a plan of three phases whose batches divide over eight replicas."""
    d = mesh.shape["data"] * mesh.shape["fsdp"]
    return RampPlan(
        ramp=BatchRamp.from_schedule(schedule),
        splitter=BatchSplitter(data_parallel_size=d, **splitter),
        num_devices=mesh.size,
        total_steps=steps,
    )


def make_step(
    loss_fn,
    tx,
    plan,
    mesh,
    *,
    engine="fused",
    batch_axes=None,
    whole_batch=False,
    shard_optimizer_over_data=None,  # the step follows the state
    **options,
):
    """Return a training step; what plan, optimizer, loss or step say may be an
    option.
    """
    if whole_batch:
        plan = plan.with_whole_batches()
    if engine == "multi_steps":
        tx = rampup.multi_steps(tx, plan)
    if batch_axes is not None:
        loss_fn = rampup.AccumulatedLoss(loss_fn, batch_axes=batch_axes)
    return rampup.train_step(loss_fn, tx, plan, mesh, **options)


def start(
    mesh_name="one",
    loss=loss_fn,
    tx=None,
    schedule="0:16",
    *,
    steps=12,
    state=None,
    params=None,
    mutable=None,
    **options,
):
    """Return a training step of one phase by default, and its state: a new one, or what
    `state` makes of parameters and tx.
    """
    mesh = mesh_of(mesh_name)
    splitter = {
        name: options.pop(name)
        for name in ("microbatch_size", "rampup_microbatch")
        if name in options
    }
    plan = plan_for(mesh, schedule, steps=steps, **splitter)
    step = make_step(loss, tx or optax.sgd(0.1), plan, mesh, **options)
    params = new_params(mesh) if params is None else params
    if state is None:
        return step, rampup.create_state(params, step.tx, mesh, mutable=mutable)
    return step, rampup.prepare_state(state(params, step.tx), mesh)


def history(step, state, batches=None):
    """Return the state after some batches, by default those of `rows`, and the metrics
    of every step on the host.
    """
    found = []
    for batch in step.batches(rows()) if batches is None else batches:
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return state, found


def bytes_per_device(tree):
    """Return the bytes per device of arrays, or of their shapes and shardings."""
    shapes = [
        (leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(tree)
    ]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


class ScaledState(train_state.TrainState):
    """A TrainState of Flax that scales the loss."""

    dynamic_scale: Any = None


class Arrays(NamedTuple):
    """A state of arrays."""

    w: Any


def flax_state(kind=train_state.TrainState, **fields):
    """Return a function that makes a state of Flax from parameters and an optimizer."""
    return lambda params, tx: kind.create(apply_fn=None, params=params, tx=tx, **fields)


def train(step, state, steps=None, data=None):
    """Return the state and the metrics after some steps."""
    state, found = history(step, state, step.batches(data or rows(), stop=steps))
    return state, found[-1]


def open_rows(kind, train_files=None, *, length=4, eval_files=None):
    """Return the rows of `open_sources` for bytes or 16-bit tokens, a tenth of them
    held out.
    """
    names = {
        "dataset_type": kind,
        "grain_train_files": train_files,
        "grain_eval_files": eval_files,
    }
    names |= {"token_dtype": "uint16"}
    return open_sources(
        SimpleNamespace(**names, max_target_length=length, vocab_size=256)
    )


def all_tokens(source):
    """Return the tokens of all rows, each counted once, and the targets that count."""
    batch = source.read(np.arange(len(source)))
    inputs = [
        row[:length].tolist()
        for row, length in zip(batch["tokens"], batch["length"], strict=True)
    ]
    targets = [
        row[1 : length + 1].tolist()
        for row, length in zip(batch["tokens"], batch["length"], strict=True)
    ]
    return [*itertools.chain(*inputs)], [*itertools.chain(*targets)]


def tensorboard_events(folder):
    """Return (step, name, value) of everything in TensorBoard's event files that a
    viewer shows.
    """
    from tensorboardX.proto.event_pb2 import Event

    shown = []
    for path in sorted(
        folder.glob("events.*"), key=lambda path: path.stat().st_ctime_ns
    ):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            data = data[12 + size + 4 :]
            if event.HasField("session_log"):
                shown = [entry for entry in shown if entry[0] < event.step]
            shown += [
                (event.step, value.tag, value.simple_value)
                for value in event.summary.value
            ]
    return shown
