"""What the TPU compiler makes of the language model's step. Compiled for these chips,
not run on them.
"""

import dataclasses
import math
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from rampup import build_plan, load_config
from rampup.contrib.lab.collectives import collectives_of
from rampup.contrib.lab.hlo import Program
from rampup.contrib.lab.memory import program_memory
from rampup.contrib.lab.topology import compile_for, topology_devices
from rampup.data.sources import SyntheticRows
from rampup.engine.mesh import make_mesh
from rampup.lm.train import TrainSetup
from rampup.plan.topology import Topology

pytest.importorskip("libtpu")
pytestmark = [pytest.mark.tpu_compile, pytest.mark.slow]
MIB = 2**20
CONFIGS = Path(__file__).parent.parent.parent / "configs"
SMALL = [
    *(
        "base_emb_dim=512",
        "base_num_decoder_layers=2",
        "base_num_query_heads=4",
        "base_num_kv_heads=2",
        "base_mlp_dim=1024",
    ),
    *(
        "max_target_length=512",
        "dtype=bfloat16",
        "remat_policy=full",
        "eval_interval=-1",
    ),
    *(
        "per_device_batch_size=2",
        "enable_rampup_batch_size=false",
        "microbatch_size=1",
        "dataset_type=synthetic",
    ),
]


def compile_step(config, topology):
    """Compile the step of the first phase as `rampup train` would, and return the
    program and its setup.
    """
    topology = Topology.parse(topology)
    config = dataclasses.replace(config, num_slices=topology.num_slices)
    plan = build_plan(config, topology.num_devices)
    setup = TrainSetup.from_config(
        config, plan, make_mesh(plan.axes, topology_devices(topology))
    )
    source = SyntheticRows(
        1, sequence_length=config.max_target_length, vocab_size=config.vocab_size
    )
    row = jax.tree.map(lambda x: x[0], source.read(np.arange(1)))
    return (
        compile_for(setup.step.lower(setup.state_shapes(), row, plan.splits[0])),
        setup,
    )


def collectives(compiled, setup):
    """Return the collectives of the program."""
    mesh = tuple((str(name), size) for name, size in setup.mesh.shape.items())
    return collectives_of(Program(compiled.as_text()), mesh)


def products(compiled):
    """Return the matrix products of the program with how often they run."""
    return Counter(
        (made.arrays[0], visit.runs, visit.open_loops)
        for visit in Program(compiled.as_text()).visits()
        if (made := visit.instruction).opcode in ("dot", "convolution")
    )


def small(*keys):
    """Return a small configuration with these settings."""
    names = {key.partition("=")[0] for key in keys}
    return load_config(
        CONFIGS / "base.yml",
        [*keys, *(key for key in SMALL if key.partition("=")[0] not in names)],
    )


@pytest.mark.parametrize(
    ("name", "topology", "rows"),
    [("llama_1b_v5e", "v5e:4x4", 2), ("llama_8b_v5p", "v5p:4x4x4", 4)],
)
def test_llama_configurations_fit_their_topology(name, topology, rows):
    """Each compiles, with the microbatch that its comment promises, within the memory
    of a chip and in under five minutes.
    """
    config = load_config(CONFIGS / f"{name}.yml")
    start = time.process_time()
    compiled, setup = compile_step(config, topology)
    assert {split.microbatch_size for split in setup.plan.splits} == {rows}
    assert setup.plan.num_compiled_shapes == 1
    memory = program_memory(compiled)
    assert memory.total < Topology.parse(topology).hbm_bytes
    # Processor time, not time: another process may have the cores.
    assert time.process_time() - start < 600


def test_fsdp_exchanges_weights_and_rows_of_the_embedding():
    """In the loop, rows of the embedding travel and not the table, and attention is a
    kernel.
    """
    compiled, setup = compile_step(
        small("ici_data_parallelism=1", "ici_fsdp_parallelism=4", "vocab_size=4096"),
        "v6e:2x2",
    )
    inside = [
        c for c in collectives(compiled, setup) if c.in_loop and not c.has_numbers_only
    ]
    assert {c.kind for c in inside} >= {"all-gather", "all-to-all"}
    gathered = [
        math.prod(dims)
        for c in inside
        if c.kind == "all-gather"
        for _, dims in c.shapes
    ]
    # The output matrix, in the forward and in the backward pass, is as large as the
    # embedding.
    assert gathered.count(4096 * 512) <= 2
    assert "tpu_custom_call" in compiled.as_text()


def test_gradient_noise_needs_no_more_memory_products_or_collectives():
    """Squares are added up where a gradient is added to its sum, and Adam's second
    moments are not copied for the loop.
    """
    sizes = [
        "base_emb_dim=1024",
        "base_mlp_dim=4096",
        "base_num_query_heads=8",
        "base_num_kv_heads=8",
        "vocab_size=4096",
    ]
    sizes += [
        "base_num_decoder_layers=4",
        "max_target_length=256",
        "per_device_batch_size=64",
        "microbatch_size=4",
    ]
    found = []
    for measures in ("false", "true"):
        config = small(*sizes, f"measure_gradient_noise={measures}")
        compiled, setup = compile_step(config, "v5e:2x2")
        kinds = sorted((c.kind, c.in_loop) for c in collectives(compiled, setup))
        memory = program_memory(compiled)
        found.append(
            (
                kinds,
                products(compiled),
                memory.temporary,
                memory.total,
            )
        )
    (*off, temporary, total), (*on, more, all_more) = found
    assert on == off
    assert more <= 1.01 * temporary
    assert all_more <= 1.01 * total
