"""Tests of rampup.tune.search, tune_programs and levers, on one pretended device and a very small model."""

import json
import math
from types import SimpleNamespace

import jax
import pytest

from rampup import Config, build_plan
from rampup.config.build import mesh_axes
from rampup.errors import BatchDivisibilityError, ConfigError
from rampup.lm.train import initial_state, state_shapes, training_step
from rampup.run.mesh import make_mesh
from rampup.tune import search as tuning
from rampup.tune.memory_options import find_levers
from rampup.tune.programs import Programs, Size, take_turns
from rampup.tune.result import GIB, MARGIN, usable_of
from rampup.tune.search import find_largest, memory_limit, tune

TINY = {
    "batch_size_schedule": "0:2 4:4",
    "dataset_type": "synthetic",
    "vocab_size": 16,
    "max_target_length": 8,
    "base_emb_dim": 8,
    "base_num_decoder_layers": 1,
    "base_mlp_dim": 8,
    "base_num_query_heads": 1,
    "steps": 6,
    "eval_interval": -1,
}


def config(**changes):
    """Return a very small configuration."""
    return Config(**(TINY | changes))


@pytest.fixture(scope="module")
def programs():
    """The programs of the small configuration on one device."""
    return Programs(config(), jax.devices()[:1])


def gib_for(usable):
    """Return the memory, in GiB, of which so many bytes are usable after the margin."""
    limit = math.ceil(usable / (1 - MARGIN))
    return f"{limit}/{GIB}"


def test_memory_grows_with_the_microbatch(programs):
    """Each sample takes as much as the one before it, about, and far more than the rows of a waiting batch."""
    taken = {b: programs.bytes(Size(microbatch_size=b, num_microbatches=2)) for b in (1, 2, 4)}
    assert taken[1] < taken[2] < taken[4]
    assert (taken[4] - taken[2]) / (taken[2] - taken[1]) == pytest.approx(2, rel=0.5)


def test_the_boundary_is_exact_on_both_sides(programs):
    """With just the bytes that a size needs it fits and the next does not; with one byte less the size below is found."""
    needs = {b: programs.bytes(programs.size(b)) for b in (1, 2, 4)}
    at = find_largest(programs, needs[2])
    assert (at.largest, at.next_larger) == (2, 4)
    below = find_largest(programs, needs[2] - 1)
    assert (below.largest, below.next_larger) == (1, 2)
    assert find_largest(programs, needs[1] - 1).largest is None
    assert find_largest(programs, math.inf).largest == tuning.BEYOND * 4


def test_a_recommendation_fits_and_is_timed(programs):
    """The settings are a plan whose microbatches fit, every phase has its memory and tokens/s; the next size does not fit."""
    needs = programs.bytes(programs.size(2))
    found = tune(config(), memory_gib=gib_for(needs), num_devices=1)
    facts = json.loads(json.dumps(found.to_dict()))
    assert found.problem is None
    assert (facts["largest_microbatch"], facts["next_larger"]) == (2, 4)
    assert needs <= facts["usable_bytes"] <= needs + 1
    fits = {row["microbatch_size"]: row["fits"] for row in facts["candidates"]}
    assert (fits[2], fits[4]) == (True, False)
    assert facts["next_larger_run"].startswith("not run")
    plan = build_plan(config(**facts["settings"]), 1)
    assert [row["microbatch_size"] for row in facts["phases"]] == [split.microbatch_size for split in plan.splits]
    assert all(row["bytes"] <= facts["usable_bytes"] and row["tokens_per_second"] > 0 for row in facts["phases"])
    assert facts["run_seconds"] > 0
    assert facts["levers"] == []


def test_where_nothing_fits_levers_are_ranked(programs):
    """The smallest size is compared with every lever: those that are enough come first, then by what they save."""
    needs = programs.bytes(programs.size(1))
    found = tune(config(), memory_gib=gib_for(needs - 1), num_devices=1)
    assert found.largest is None
    assert found.chosen is None
    assert f"microbatch_size=1 needs {needs:,} bytes" in str(found.problem)
    assert found.problem.key == "microbatch_size"
    assert [lever.fits for lever in found.levers] == sorted((lever.fits for lever in found.levers), reverse=True)
    assert "optimizer_memory_host_offload" in str(found.problem)
    for lever in found.levers:
        assert lever.saved_bytes > 0
        assert lever.bytes == needs - lever.saved_bytes
        assert lever.fits == (lever.bytes <= found.usable_bytes)


def test_a_lever_says_what_its_own_program_takes(programs):
    """The bytes with `remat_policy=full` are those of the configuration that has it, timed against the one without."""
    lines = []
    size = programs.size(4)
    levers = find_levers(programs, size, math.inf, lines.append)
    by_name = {lever.name: lever for lever in levers}
    remat = by_name["remat_policy=full"]
    other = Programs(config(remat_policy="full"), jax.devices()[:1])
    assert remat.bytes == other.bytes(other.size(4)) < programs.bytes(size)
    assert remat.slowdown > 0
    assert remat.compiled
    assert by_name["a smaller microbatch, 2"].settings == {"microbatch_size": 2}
    offloaded = by_name["optimizer_memory_host_offload"]
    # Adam's two moments are each as large as the parameters, and its counters are two int32.
    assert offloaded.saved_bytes == 2 * by_name["parameter_memory_host_offload"].saved_bytes + 8
    assert "trying remat_policy=full" in lines


@pytest.mark.parametrize("memory_gib", ["0", "-1", "1e-10", "1e7", "much", "nan", "inf", "", "1/0"])
def test_a_memory_that_is_none_is_refused(memory_gib):
    """Zero, negative, beyond any device and no numbers: one error that names the option."""
    with pytest.raises((ConfigError, ValueError)) as caught:
        memory_limit(memory_gib, jax.devices()[:1])
    assert caught.value.key == "memory-gib"


def test_devices_without_memory_need_it_named():
    """On CPU there is no limit to find."""
    with pytest.raises(ConfigError, match=r"no memory limit of its own.*--memory-gib 16"):
        tune(config(), num_devices=1)
    with pytest.raises(ConfigError, match="between 1 and the 8"):
        tune(config(), memory_gib=1, num_devices=9)
    with pytest.raises(ConfigError, match="multi_steps is not tuned"):
        tune(config(gradient_accumulation="multi_steps"), memory_gib=1, num_devices=1)
    with pytest.raises(BatchDivisibilityError):
        tune(config(), memory_gib=1, num_devices=8)


def test_a_limit_leaves_a_margin():
    """A twentieth is left free, of a stated limit and of the devices' own, the least of them."""
    assert usable_of(1000) == 950
    assert memory_limit("0.5", jax.devices()) == (GIB // 2, True)
    small, large = (type("Device", (), {"memory_stats": lambda self, n=n: {"bytes_limit": n}})() for n in (5, 7))
    assert memory_limit(None, [large, small]) == (5, False)


@pytest.mark.parametrize(
    "axes", [{}, {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}, {"ici_pipeline_parallelism": 2}]
)
@pytest.mark.parametrize("opt_type", ["adamw", "sgd"])
def test_shapes_without_arrays_are_those_of_the_state(axes, opt_type):
    """What is compiled for is what training starts from: shapes, types and shardings."""
    settings = config(**axes, opt_type=opt_type, batch_size_schedule="0:16", base_num_query_heads=2, base_num_decoder_layers=2)
    plan, mesh = build_plan(settings, 8), make_mesh(mesh_axes(settings, 8))
    tx = training_step(settings, plan, mesh).tx
    state, shapes = initial_state(settings, plan, mesh, tx), state_shapes(settings, mesh, tx)

    def same(real, shape):
        placed = real.sharding.is_equivalent_to(shape.sharding, real.ndim)
        return (real.shape, real.dtype) == (shape.shape, shape.dtype) and placed

    assert jax.tree.all(jax.tree.map(same, state, shapes))


def full_device(message=None, memory=1):
    """Return programs of which a size is too large for the device, for the compiler, or for neither."""

    def step():
        if message:
            raise RuntimeError(message)

    return SimpleNamespace(
        devices=[object()],
        size=lambda microbatch_size: Size(microbatch_size=microbatch_size, num_microbatches=1),
        memory=lambda size: memory,
        step_of=lambda size, num_microbatches: step,
        forget_state=lambda: None,
    )


@pytest.mark.parametrize(
    ("pretended", "seen"),
    [
        (full_device("RESOURCE_EXHAUSTED: Out of memory"), "failed: the device"),
        (full_device(memory=None), "failed: the compiler"),
        (full_device(), "ran"),
    ],
)
def test_the_next_size_is_run_where_devices_refuse_it(pretended, seen, monkeypatch):
    """On a device with a limit of its own it is seen to fail; other errors are not taken for that."""
    monkeypatch.setattr(tuning, "device_limit", lambda device: 100)
    boundary = tuning.Boundary(largest=2, next_larger=4, costs={})
    assert tuning._run_next(pretended, boundary, named=False).startswith(seen)
    assert tuning._run_next(pretended, boundary, named=True).startswith("not run")
    with pytest.raises(RuntimeError, match="INTERNAL"):
        tuning._run_next(full_device("INTERNAL: no"), boundary, named=False)


def test_steps_take_turns():
    """Each is run as often as the others, the first runs uncounted, and long ones fewer times."""
    ran = {"a": 0, "b": 0}

    def step(name):
        def run():
            ran[name] += 1

        return run

    times = take_turns({name: step(name) for name in ran})
    assert ran["a"] == ran["b"] > times["a"].rounds == 5
    assert take_turns({"a": step("a")}, seconds=0)["a"].rounds == 1
