"""What the compiled step of the language model sends between devices, read from the
program.
"""

import re

import jax
import numpy as np
import optax
import pytest
from helpers import toy

from rampup import create_state, make_mesh, train_step
from rampup.lm.transformer import LanguageModel
from rampup.plan import MeshAxes

pytestmark = pytest.mark.slow
OPERATIONS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
)
ROWS_OF_A_REPLICA = 4
NUM_GRADIENTS = 12  # embedding, head, final norm and the nine arrays of a layer


def communication(axes, *, sharded_loss=False):
    """Return (operation, shapes) of every communication inside and outside the loop
    over microbatches, and the parameters.
    """
    mesh, replicas = make_mesh(axes), axes.data * axes.fsdp
    model = LanguageModel(
        num_layers=2, width=32, mlp_dim=48, num_heads=2, num_kv_heads=2, vocab_size=64
    ).on(mesh)
    plan = toy.plan_for(
        mesh,
        f"0:{ROWS_OF_A_REPLICA * replicas} 999:{4 * ROWS_OF_A_REPLICA * replicas}",
        steps=100,
    )
    step = train_step(
        model.sharded_loss(mesh) if sharded_loss else model.loss,
        optax.adamw(1e-3),
        plan,
        mesh,
    )
    params = jax.jit(model.init, out_shardings=model.shardings(mesh))(jax.random.key(0))
    row = {"tokens": np.zeros(17, np.uint8), "length": np.int32(16)}
    hlo = (
        step.lower(create_state(params, step.tx, mesh), row, plan.splits[0])
        .compile()
        .as_text()
    )
    bodies = set(re.findall(r"body=%?([\w.\-]+)", hlo))
    found = {True: [], False: []}
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = header[1]
        elif match := re.search(
            rf"= (.*?) ({'|'.join(OPERATIONS)})(?:-start)?\(", line
        ):
            shapes = [
                tuple(map(int, filter(None, text.split(","))))
                for text in re.findall(r"\w+\[([\d,]*)\]", match[1])
            ]
            found[computation in bodies].append((match[2], shapes))
    local = {leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(params)}
    return found[True], found[False], local


def test_data_parallel_steps_reduce_once():
    """With replicas alone, the loop is silent, and one all-reduce of all gradients and
    sums follows it.
    """
    inside, outside, local = communication(MeshAxes(data=8))
    assert inside == []
    (operation, shapes), *others = outside
    assert (operation, others) == ("all-reduce", [])
    assert local <= set(shapes)


def test_tensor_parallel_steps_reduce_gradients_once():
    """Beside a tensor axis the loop reduces activations, which have a replica's rows in
    front, and no gradients.
    """
    inside, outside, local = communication(MeshAxes(data=4, tensor=2))
    assert {operation for operation, _ in inside} == {"all-reduce"}
    assert {operation for operation, _ in outside} <= {"all-reduce", "all-gather"}
    assert {shape[0] for _, shapes in inside for shape in shapes} == {ROWS_OF_A_REPLICA}
    gradients = [
        shapes
        for operation, shapes in outside
        if operation == "all-reduce" and local <= set(shapes)
    ]
    assert len(gradients) == 1


def test_fsdp_reduces_what_memory_requires():
    """With fsdp each gradient is reduced in the loop; else only weights that are
    gathered for use, and numbers, move.
    """
    inside, _, _ = communication(MeshAxes(fsdp=8))
    assert {operation for operation, _ in inside} <= {
        "all-reduce",
        "reduce-scatter",
        "all-gather",
    }
    reduced = [
        shape
        for operation, shapes in inside
        if operation != "all-gather"
        for shape in shapes
        if shape
    ]
    assert len(reduced) == NUM_GRADIENTS


@pytest.mark.parametrize("axes", [MeshAxes(fsdp=8), MeshAxes(data=2, fsdp=4)])
def test_sharded_loss_scatters_gradients_and_moves_no_table(axes):
    """No device receives a whole gradient, the embedding or the activations of all
    rows; norms are reduced after the loop.
    """
    inside, outside, _ = communication(axes, sharded_loss=True)
    assert {operation for operation, _ in inside} == {
        "all-gather",
        "reduce-scatter",
        "all-to-all",
    }
    embedding, tokens = (64, 32), (axes.fsdp * ROWS_OF_A_REPLICA, 16)
    gathered = [
        shape
        for operation, shapes in inside
        if operation == "all-gather"
        for shape in shapes
    ]
    assert embedding not in gathered
    # Weights of a layer and the head, and the tokens, which are numbers of four bytes.
    weights = {(32, 2, 16), (2, 16, 32), (32, 48), (48, 32), (32, 64)}
    assert set(gathered) <= {
        *weights,
        *((1, *shape) for shape in weights),
        tokens,
        (1, *tokens),
    }
    scattered = [
        shape
        for operation, shapes in inside
        if operation == "reduce-scatter"
        for shape in shapes
    ]
    assert all(
        np.prod(shape) * axes.fsdp in {np.prod(weight) for weight in weights}
        for shape in scattered
    )
    # The compiler may gather the output matrix before the loop, where it is the same
    # for every microbatch.
    assert {
        shape
        for operation, shapes in outside
        if operation != "all-reduce"
        for shape in shapes
    } <= weights
    reduced = {
        shape
        for operation, shapes in outside
        if operation == "all-reduce"
        for shape in shapes
    }
    assert ((64, 32 // axes.fsdp) in reduced) == (axes.data > 1)
    assert (32,) in reduced
