"""Tests of compiling for absent TPU slices: the ramp as their compiler compiles it, and
the report of `tune`.
"""

import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rampup
from rampup.contrib.lab.programs import Programs
from rampup.contrib.lab.search import tune
from rampup.contrib.lab.topology import (
    Target,
    compile_for,
    refused_bytes,
    topology_devices,
)
from rampup.engine.offload import bytes_per_device, is_out_of_memory, program_memory
from rampup.plan.topology import NOT_RUN_ON, Topology

pytestmark = pytest.mark.tpu_compile
BASE = "configs/base.yml"
MIB = 2**20
# A ramp of larger batches than base.yml's, which small chips are not filled by.
RAMP = (
    "per_device_batch_size=16",
    "per_device_batch_size_start=4",
    "per_device_batch_size_increment=4",
)
RAMP += ("enable_rampup_batch_size=true",)


def compile_base(name, *settings, microbatch_size=4):
    """Return the programs of base.yml for a slice, with its own ramp, and the answer
    about one microbatch size.
    """
    topology = Topology.parse(name)
    given = {setting.partition("=")[0] for setting in settings}
    config = rampup.load_config(
        BASE,
        [*settings, *(keys for keys in RAMP if keys.partition("=")[0] not in given)],
    )
    programs = Programs(
        config, topology_devices(topology), target=Target(topology=topology)
    )
    return programs, programs.answer(programs.size(microbatch_size))


def gradients(account):
    """Return the collectives of whole arrays, without those of single numbers."""
    return [c for c in account.collectives if not c.has_numbers_only]


def test_the_ramp_reduces_once_on_16_chips():
    """base.yml on v5e:4x4: one executable, one all-reduce of all gradients after the
    loop, and none inside.
    """
    programs, answer = compile_base("v5e:4x4")
    assert programs.mesh.shape["data"] == 16
    assert rampup.build_plan(rampup.load_config(BASE), 16).num_compiled_shapes == 1
    (reduction,) = gradients(answer.account)
    assert (reduction.kind, reduction.axes, reduction.in_loop, reduction.runs) == (
        "all-reduce",
        ("data",),
        False,
        1,
    )
    params = bytes_per_device(programs.state_shapes.params)
    assert params <= reduction.num_bytes <= params + 64
    assert not any(c.in_loop for c in answer.account.collectives)
    assert len(answer.account.flops) == 2


SMALL = ("base_num_decoder_layers=1", "base_emb_dim=64", "base_mlp_dim=128")


@pytest.mark.parametrize(
    ("name", "sides", "settings"),
    [
        ("v5e:2x4", (8,), ()),
        ("v5e:4x4", (4, 4), ()),
        pytest.param("v5e:4x8", (32,), SMALL, marks=pytest.mark.slow),
        pytest.param("v6e:4x4", (4, 4), SMALL, marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", (2, 2, 2), SMALL, marks=pytest.mark.slow),
    ],
)
def test_zero_scatters_and_gathers_once(name, sides, settings):
    """ZeRO-1: one reduce-scatter of the gradients, or one per side of the torus, and
    one all-gather, outside the loop.
    """
    programs, answer = compile_base(name, "shard_optimizer_over_data=true", *settings)
    *scattered, gathered = gradients(answer.account)
    assert [(c.kind, c.axes, c.group_size) for c in scattered] == [
        ("reduce-scatter", ("data",), size) for size in sides
    ]
    assert (gathered.kind, gathered.axes, gathered.group_size) == (
        "all-gather",
        ("data",),
        math.prod(sides),
    )
    assert not any(c.in_loop for c in answer.account.collectives)
    params = bytes_per_device(programs.state_shapes.params)
    first, d = scattered[0].num_bytes, math.prod(sides)
    assert params <= first <= gathered.num_bytes < params + d * 2**17
    assert sum(c.sent_bytes() for c in scattered) == pytest.approx(first * (d - 1) / d)
    # One row for each of them, also if the sides are equal.
    rows = [
        row
        for row in answer.account.collective_rows((1,))
        if row["kind"] == "reduce-scatter"
    ]
    assert [(row["count"], row["bytes"]) for row in rows] == [
        (1, c.num_bytes) for c in scattered
    ]
    whole = compile_base(name, *settings)[1].memory
    assert answer.memory.arguments < 0.6 * whole.arguments


def test_gradients_cross_slices_once_a_step():
    """Two slices: what goes over the data-center network is the sum of all
    microbatches, a part of it for each chip.
    """
    programs, answer = compile_base("2*v5e:2x2", *SMALL, "num_slices=2")
    assert programs.mesh.shape["data"] == 8
    crossing = [c for c in answer.account.collectives if c.between_slices]
    assert {(c.kind, c.runs, c.open_loops) for c in crossing} == {("all-reduce", 1, 0)}
    assert not any(c.in_loop for c in answer.account.collectives)
    params = bytes_per_device(programs.state_shapes.params)
    assert params / 4 <= sum(c.num_bytes for c in crossing) < params


def test_a_pipeline_sends_twice_a_tick_and_needs_no_more_memory_for_more_microbatches():
    """Four stages: two collective-permutes in the loop over ticks, and memory that does
    not grow with their number.
    """
    totals, permutes = [], []
    for batch in (16, 64):
        sizes = (
            f"per_device_batch_size={batch}",
            "per_device_batch_size_start=4",
            "enable_rampup_batch_size=false",
        )
        programs, answer = compile_base("v5e:4x4", "ici_pipeline_parallelism=4", *sizes)
        assert programs.size(4).num_microbatches == batch
        permutes.append(
            [c for c in answer.account.collectives if c.kind == "collective-permute"]
        )
        rows = sum(leaf.nbytes for leaf in jax.tree.leaves(programs._row)) * 4 * batch
        totals.append(answer.memory.total - rows)
        assert [
            c.in_loop for c in gradients(answer.account) if c.kind == "all-reduce"
        ] == [False, False]
    for found in permutes:
        assert [(c.axes, c.open_loops, c.runs) for c in found] == [
            (("stage",), 2, 1)
        ] * 2
    assert totals[1] <= totals[0] + MIB // 4


@pytest.mark.parametrize("name", ["v5e:1x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_small_slices_compile(name):
    """The ramp compiles for the smallest slices of three chips; their memory and FLOPs
    are counted.
    """
    programs, answer = compile_base(name)
    config, number = programs.config, programs.plan.num_devices
    assert len(gradients(answer.account)) == (number > 1)
    layers, width, mlp, T = (
        config.base_num_decoder_layers,
        config.base_emb_dim,
        config.base_mlp_dim,
        config.max_target_length,
    )
    weights = layers * (4 * width**2 + 3 * width * mlp) + width * config.vocab_size
    flops = sum(answer.account.total_flops((1,)).values())
    matrices, attention = 6 * weights * 4 * T, 12 * layers * 4 * T * T * width
    # The total is not above the compiler's own peak and the code.
    memory = program_memory(compile_for(programs._lower(programs.size(4))))
    assert memory.total <= memory.peak + memory.code
    # A kernel's own products, such as those of flash attention, are not counted.
    assert matrices <= flops + 1 <= matrices + attention + 2
    assert (
        0
        < answer.memory.total
        < answer.memory.arguments + answer.memory.temporary + 64 * MIB
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("settings", "microbatch_size"),
    [
        ((), 512),
        (("dtype=bfloat16", "max_target_length=256"), 256),
        (("ici_fsdp_parallelism=2", "base_emb_dim=256"), 256),
        (
            ("shard_optimizer_over_data=true", "remat_policy=full", "vocab_size=1024"),
            256,
        ),
    ],
)
def test_the_verdict_agrees_with_the_refusal_near_the_edge(
    name, settings, microbatch_size
):
    """With less memory than a program needs, and a little more, it fits if and only if
    the compiler accepts it.
    """
    settings = ("base_num_decoder_layers=1", *settings)
    programs, answer = compile_base(name, *settings, microbatch_size=microbatch_size)
    size, topology = programs.size(microbatch_size), programs.target.topology
    lowered, verdicts = programs._lower(size), []
    # The compiler needs some percent more or less if memory is short: it recomputes
    # values, and places others apart.
    for limit in (
        answer.memory.total * 7 // 10,
        answer.memory.total * 21 // 20 + 8 * MIB,
    ):
        tight = Programs(
            programs.config,
            programs.devices,
            target=Target(topology=topology, hbm_bytes=limit),
        )
        try:
            compile_for(lowered, hbm_bytes=limit)
        except RuntimeError as error:
            assert is_out_of_memory(error), error
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert (tight.bytes(size) <= limit) == verdicts[-1]
    assert verdicts[-1]


def test_a_program_that_does_not_fit_is_refused():
    """The compiler's refusal is the answer: no memory, no account, and the bytes that
    it names.
    """
    programs, answer = compile_base(
        "v5e:1x1", "base_num_decoder_layers=1", microbatch_size=2**17
    )
    assert answer.memory is answer.account is None
    assert programs.bytes(programs.size(2**17)) == math.inf
    assert refused_bytes(answer.refusal) > programs.target.limit


@pytest.mark.parametrize("name", ["v5e:2x2", "v5e:4x4"])
def test_the_optimizer_state_can_be_in_host_memory(name):
    """Adam's moments, also on slices of several hosts, whose devices say nothing about
    their memories here.
    """
    programs, answer = compile_base(name, "optimizer_memory_host_offload=true")
    _, without = compile_base(name)
    assert answer.memory.host >= 2 * bytes_per_device(programs.state_shapes.params)
    assert answer.memory.arguments < without.memory.arguments - answer.memory.host // 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inspect_sees_reductions_of_every_microbatch_in_a_tpu_program(dtype):
    """A scan over microbatches and layers: its sums start as empty buffers, into which
    the first iteration selects zeros.
    """
    mesh = Mesh(
        np.array(topology_devices("v5e:2x2")), ("data",), axis_types=(AxisType.Auto,)
    )

    def loss(weights, x):
        return jnp.sum(
            jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)[0] ** 2
        )

    def step(weights, batch):
        def add(total, x):
            return (
                total + jax.grad(loss)(weights, x).astype(total.dtype),
                None,
            )

        return weights - jax.lax.scan(add, jnp.zeros(weights.shape, dtype), batch)[
            0
        ].astype(weights.dtype)

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(
            shape, "float32", sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    found = rampup.contrib.lab.inspect(
        jax.jit(step, donate_argnums=0),
        place((3, 256, 256)),
        place((8, 64, 256), None, "data"),
    )
    narrow = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert {(a.dtype, a.dims) for a in found.accumulators} == {(narrow, (3, 256, 256))}
    assert not found.reduces_once
    size = 3 * 256 * 256 * jnp.dtype(dtype).itemsize
    assert found.to_dict()["gradient_bytes_in_loops"] == 8 * size
    assert (
        f"({size:,} bytes) are reduced over data in every microbatch"
        in found.findings[0]
    )


def test_tune_finds_the_largest_microbatch_and_remembers_it(tmp_path):
    """The size that fits is the compiler's; a second run compiles nothing; every time
    is labelled as an estimate.
    """
    config, lines = rampup.load_config(BASE, [*SMALL, f"jax_cache_dir={tmp_path}"]), []
    found = tune(config, topology="v5e:1x1", memory_gib="0.004", report=lines.append)
    assert (found["topology"], found["hbm_bytes"]) == ("v5e:1x1", int(0.004 * 2**30))
    assert NOT_RUN_ON in found["compiled_for"]
    assert found["largest_microbatch"] < found["next_larger"]
    sizes = {row["microbatch_size"]: row["fits"] for row in found["candidates"]}
    assert (sizes[found["largest_microbatch"]], sizes[found["next_larger"]]) == (
        True,
        False,
    )
    assert found["run_seconds"] is None
    assert all(
        row["step_seconds"] is None and row["roofline_seconds"] > 0
        for row in found["phases"]
    )
    assert found["roofline_seconds"] == found["phases"][-1]["roofline_seconds"]
    assert found["memory"]["total"] <= found["hbm_bytes"]
    assert all(("compiling, " in line) != ("compiled in" in line) for line in lines)
    assert len(found["candidates"]) == len(
        [line for line in lines if "compiled in" in line]
    )
    assert all(
        row["roofline_seconds"] > 0 for row in found["candidates"] if row["fits"]
    )
    again = []
    assert (
        tune(config, topology="v5e:1x1", memory_gib="0.004", report=again.append)
        == found
    )
    assert [line.endswith("(known)") for line in again] == [False, True] * (
        len(lines) // 2
    )


def test_tune_prints_its_contract_without_noise(tmp_path):
    """The command on a machine without a TPU: exit 0, one JSON object, and only
    progress on standard error.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TPU", "JAX", "LIBTPU"))
    }
    environ["RAMPUP_JAX_CACHE_DIR"] = str(tmp_path)
    slices = ["per_device_batch_size=8", "--topology", "v5litepod-4", "--json"]
    command = [sys.executable, "-m", "rampup", "tune", BASE, *SMALL, *slices]
    # Two at once: libtpu has a lock file.
    runs = [
        subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in "ab"
    ]
    for run in runs:
        out, err = run.communicate(timeout=900)
        assert run.returncode == 0, err
        found = json.loads(out)
        assert found["topology"] == "v5e:2x2"
        assert {
            "hbm_bytes",
            "largest_microbatch",
            "collectives_per_step",
            "roofline_seconds",
        } <= set(found)
        (row,) = [row for row in found["collectives_per_step"] if row["bytes"] > 1000]
        assert (row["kind"], row["axes"], row["count"], row["in_loop"]) == (
            "all-reduce",
            ["data"],
            1,
            False,
        )
        assert all(line.startswith("microbatch of ") for line in err.splitlines())
