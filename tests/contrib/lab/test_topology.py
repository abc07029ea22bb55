"""Tests of compiling for absent TPU slices: the ramp as their compiler compiles it, and
the report of `tune`.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy import bytes_per_device
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rampup
from rampup.contrib.lab.collectives import collectives_of
from rampup.contrib.lab.hlo import Program
from rampup.contrib.lab.memory import is_out_of_memory, program_memory
from rampup.contrib.lab.programs import Trial
from rampup.contrib.lab.search import tune
from rampup.contrib.lab.topology import compile_for, topology_devices
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
    """Return the trial of base.yml for a slice, with its own ramp, and the
    collectives and the memory of one microbatch size.
    """
    topology = Topology.parse(name)
    given = {setting.partition("=")[0] for setting in settings}
    config = rampup.load_config(
        BASE,
        [*settings, *(keys for keys in RAMP if keys.partition("=")[0] not in given)],
    )
    config = dataclasses.replace(config, microbatch_size=microbatch_size)
    if microbatch_size > 4:  # than the first batch of the ramp
        config = dataclasses.replace(
            config,
            enable_rampup_batch_size=False,
            per_device_batch_size=Fraction(microbatch_size),
        )
    plan = rampup.build_plan(config, topology.num_devices)
    trial = Trial(config, plan, topology_devices(topology), topology=topology)
    compiled = trial.program
    mesh = tuple((str(name), size) for name, size in trial.setup.mesh.shape.items())
    collectives = collectives_of(Program(compiled.as_text()), mesh)
    memory = program_memory(compiled)
    return trial, SimpleNamespace(collectives=collectives, memory=memory)


def gradients(answer):
    """Return the collectives of whole arrays, without those of single numbers."""
    return [c for c in answer.collectives if not c.has_numbers_only]


def test_the_ramp_reduces_once_on_16_chips():
    """base.yml on v5e:4x4: one executable, one all-reduce of all gradients after the
    loop, and none inside.
    """
    programs, answer = compile_base("v5e:4x4")
    assert programs.setup.mesh.shape["data"] == 16
    assert rampup.build_plan(rampup.load_config(BASE), 16).num_compiled_shapes == 1
    (reduction,) = gradients(answer)
    assert (reduction.kind, reduction.axes, reduction.in_loop, reduction.runs) == (
        "all-reduce",
        ("data",),
        False,
        1,
    )
    params = bytes_per_device(programs.setup.state_shapes().params)
    assert params <= reduction.num_bytes <= params + 64
    assert not any(c.in_loop for c in answer.collectives)


SMALL = ("base_num_decoder_layers=1", "base_emb_dim=64", "base_mlp_dim=128")


@pytest.mark.parametrize(
    ("name", "settings", "share"),
    [
        ("v5e:2x4", (), 0.7),
        pytest.param("v5e:4x8", SMALL, 0, marks=pytest.mark.slow),
    ],
)
def test_zero_reduces_and_gathers_once(name, settings, share):
    """ZeRO-1: each gradient is reduced and each parameter gathered once, outside the
    loop. Those whose parts are whole tiles are reduce-scattered.
    """
    programs, answer = compile_base(name, "shard_optimizer_over_data=true", *settings)
    found, num_bytes = gradients(answer), {}
    for c in found:
        num_bytes[c.kind] = num_bytes.get(c.kind, 0) + c.num_bytes
    assert {c.axes for c in found} == {("data",)}
    assert not any(c.in_loop for c in answer.collectives)
    params = bytes_per_device(programs.setup.state_shapes().params)
    scattered = num_bytes.get("reduce-scatter", 0)
    reduced = scattered + num_bytes.get("all-reduce", 0)
    assert params <= reduced < 1.1 * params
    assert 0.99 * params <= num_bytes["all-gather"] < 1.1 * params
    assert scattered >= share * params
    whole = compile_base(name, *settings)[1].memory
    assert answer.memory.arguments < 0.6 * whole.arguments


def test_gradients_cross_slices_once_a_step():
    """Two slices: what goes over the data-center network is the sum of all
    microbatches, a part of it for each chip.
    """
    programs, answer = compile_base("2*v5e:2x2", *SMALL, "num_slices=2")
    assert programs.setup.mesh.shape["data"] == 8
    crossing = [c for c in answer.collectives if c.between_slices]
    assert {(c.kind, c.runs, c.open_loops) for c in crossing} == {("all-reduce", 1, 0)}
    assert not any(c.in_loop for c in answer.collectives)
    params = bytes_per_device(programs.setup.state_shapes().params)
    assert params / 4 <= sum(c.num_bytes for c in crossing) < params


def test_a_pipeline_sends_twice_a_tick_and_needs_no_more_memory_for_more_microbatches():
    """Four stages: two collective-permutes in the loop over ticks, and memory that does
    not grow with their number, but for the rows.
    """
    totals, permutes = [], []
    for batch in (16, 64):
        sizes = (
            f"per_device_batch_size={batch}",
            "per_device_batch_size_start=4",
            "enable_rampup_batch_size=false",
        )
        programs, answer = compile_base("v5e:4x4", "ici_pipeline_parallelism=4", *sizes)
        assert programs.plan.max_microbatches[4] == batch
        permutes.append(
            [c for c in answer.collectives if c.kind == "collective-permute"]
        )
        rows = sum(leaf.nbytes for leaf in jax.tree.leaves(programs._row)) * 4 * batch
        # The compiler pads 129 tokens to 256, and has them two and a half times.
        totals.append(answer.memory.total - 5 * rows)
        assert [c.in_loop for c in gradients(answer) if c.kind == "all-reduce"] == [
            False,
            False,
        ]
    for found in permutes:
        assert [(c.axes, c.open_loops, c.runs) for c in found] == [
            (("stage",), 2, 1)
        ] * 2
    assert totals[1] <= totals[0] + MIB // 4


@pytest.mark.parametrize("name", ["v5e:1x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_small_slices_compile(name):
    """The ramp compiles for the smallest slices of three chips; the total of their
    memory is not above the compiler's own peak and the code.
    """
    programs, answer = compile_base(name)
    memory = answer.memory
    assert len(gradients(answer)) == (programs.plan.num_devices > 1)
    assert memory.total <= memory.peak + memory.code
    assert 0 < memory.total < memory.arguments + memory.temporary + 64 * MIB


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
    setup, plan = programs.setup, programs.plan
    lowered = setup.step.lower(setup.state_shapes(), programs._row, plan.splits[0])
    topology, verdicts = Topology.parse(name), []
    # The compiler needs some percent more or less if memory is short: it recomputes
    # values, and places others apart.
    for limit in (
        answer.memory.total * 7 // 10,
        answer.memory.total * 21 // 20 + 8 * MIB,
    ):
        tight = Trial(
            programs.config,
            plan,
            topology_devices(topology),
            topology=topology,
            limit=limit,
        )
        try:
            compile_for(lowered, hbm_bytes=limit)
        except RuntimeError as error:
            assert is_out_of_memory(error), error
            verdicts.append(False)
        else:
            verdicts.append(True)
        assert (tight.bytes <= limit) == verdicts[-1]
    assert verdicts[-1]


def test_a_program_that_does_not_fit_is_refused():
    """The compiler's refusal is the answer: more bytes than can be counted."""
    topology = Topology.parse("v5e:1x1")
    keys = ["base_num_decoder_layers=1", f"per_device_batch_size={2**17}"]
    keys += ["enable_rampup_batch_size=false", f"microbatch_size={2**17}"]
    config = rampup.load_config(BASE, keys)
    plan = rampup.build_plan(config, 1)
    trial = Trial(config, plan, topology_devices(topology), topology=topology)
    assert trial.bytes == math.inf


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inspect_sees_reductions_of_every_microbatch_in_a_tpu_program(dtype):
    """A scan over microbatches and layers, whose iterations are named: the compiler for
    TPUs states none.
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
        loop_trips=(8, 3),
    )
    assert not found.reduces_once
    size = 3 * 256 * 256 * jnp.dtype(dtype).itemsize
    assert found.to_dict()["gradient_bytes_in_loops"] == 8 * size
    assert (
        f"are reduced over data inside of a loop, {8 * size:,} bytes in a run"
        in found.findings[0]
    )


def test_tune_finds_the_largest_microbatch():
    """The size that fits is the compiler's, and no time is claimed."""
    config = rampup.load_config(BASE, SMALL)
    found = tune(config, topology="v5e:1x1", memory_gib="0.004")
    assert (found["topology"], found["usable_bytes"]) == ("v5e:1x1", int(0.004 * 2**30))
    assert NOT_RUN_ON in found["compiled_for"]
    assert found["largest_microbatch"] < found["next_larger"]
    sizes = {row["microbatch_size"]: row["fits"] for row in found["candidates"]}
    assert (sizes[found["largest_microbatch"]], sizes[found["next_larger"]]) == (
        True,
        False,
    )
    assert all(row["step_seconds"] is None for row in found["phases"])
    assert all(row["bytes"] <= found["usable_bytes"] for row in found["phases"])


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
        assert found["largest_microbatch"] is not None
        assert all(line.startswith("microbatch of ") for line in err.splitlines())
