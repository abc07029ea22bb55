"""A pass of XLA that moves all-reduces out of loops has made wrong gradients of loops that
add up microbatches on TPUs: are ours touched by it? Compiled for these chips, not run.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rampup
from rampup.contrib.lab.topology import topology_devices
from rampup.lm.transformer import LanguageModel
from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan
from rampup.plan.topology import Topology

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile
PASS = "while-loop-all-reduce-code-motion"


def program(axes, dtype, disabled):
    """Return the operations of the step of a language model for four absent chips."""
    topology = Topology.parse("v5e:2x2")
    mesh = rampup.make_mesh(MeshAxes(**axes), topology_devices(topology))
    sizes = {"num_layers": 2, "width": 256, "mlp_dim": 512, "num_heads": 4}
    model = LanguageModel(
        **sizes, num_kv_heads=2, vocab_size=512, tied=True, dtype=dtype
    ).on(mesh)
    replicas = axes.get("data", 1) * axes.get("fsdp", 1)
    plan = RampPlan(
        ramp=BatchRamp.constant(8 * replicas),
        splitter=BatchSplitter(data_parallel_size=replicas, microbatch_size=2),
        num_devices=4,
        total_steps=2,
    )
    step = rampup.train_step(model.loss, optax.sgd(0.1), plan, mesh)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(model.init, jax.random.key(0)),
        model.shardings(mesh),
    )
    whole = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    opt_state = jax.eval_shape(step.tx.init, params)
    state = rampup.TrainState(step=number, params=params, opt_state=opt_state)
    row = {"tokens": np.zeros(129, np.int32), "length": np.int32(128)}
    lowered = step.lower(state, row, plan.splits[0])
    return operations_of(lowered, disabled)


def operations_of(lowered, disabled):
    """Return the operations of every computation of the compiled program, without their
    names, which differ from compilation to compilation.
    """
    options = {"xla_disable_hlo_passes": PASS} if disabled else None
    text = lowered.compile(compiler_options=options).as_text()
    found = (
        collections.Counter(re.findall(r" = (\S+) ([\w-]+)\(", block))
        for block in text.split("\n}\n")
    )
    return sorted(str(sorted(block.items())) for block in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_pass_changes_nothing_on_data(dtype):
    """With and without the pass, the compiler makes the same program of replicas. Of a
    loss that the compiler partitions over fsdp it does not: `check_step` says there
    whether the gradients are right.
    """
    axes = {"data": 4}
    assert program(axes, dtype, False) == program(axes, dtype, True)


def test_the_pass_is_seen_where_it_does_something():
    """A hand-written loop that reduces in every microbatch is changed by it."""
    mesh = rampup.make_mesh(
        MeshAxes(data=4), topology_devices(Topology.parse("v5e:2x2"))
    )
    split = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))

    def total(x):
        def add(sums, row):
            return sums + jax.lax.psum(jnp.tanh(row), "data"), None

        return jax.lax.scan(add, jnp.zeros(x.shape[2:]), x[:, 0])[0]

    reduced = jax.shard_map(
        total,
        mesh=mesh,
        in_specs=split.spec,
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    shape = jax.ShapeDtypeStruct((8, 4, 4096), jnp.float32, sharding=split)
    lowered = jax.jit(reduced).lower(shape)
    assert operations_of(lowered, False) != operations_of(lowered, True)
