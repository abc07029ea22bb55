"""Tests of rampup.rl.policy in several processes: the rows of a step of any number of prompts."""

import json
import socket
from dataclasses import replace

import numpy as np
import pytest
from helpers import processes

SIZES, G, WIDTH, RATE = (1, 7, 24, 12), 2, 4, 0.5


def train_rows(process, number, port, path):
    """Write loss and gradient of steps of several numbers of prompts, compared with one batch, in one of several processes."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 // number)
    jax.config.update("jax_enable_x64", True)
    import optax

    from rampup.engine.batch import put_batch
    from rampup.engine.mesh import make_mesh, process_rows
    from rampup.engine.state import create_state
    from rampup.engine.step import train_step
    from rampup.loop.distributed import join
    from rampup.plan import BatchRamp, BatchSplitter, MeshAxes, RampPlan
    from rampup.rl.experience import loss_rows, padded_rows
    from rampup.rl.plan import AGGREGATIONS
    from rampup.rl.policy import grpo_loss
    from rampup.rl.schedule import split_of

    if number > 1:
        join(coordinator_address=f"localhost:{port}", num_processes=number, process_id=process)
    mesh = make_mesh(MeshAxes(data=2))
    splitter = BatchSplitter(data_parallel_size=2, microbatch_size=WIDTH // 2)
    plan = RampPlan(ramp=BatchRamp.constant(24 * G), splitter=splitter, num_devices=2, total_steps=16)
    loss_fn = grpo_loss(lambda params, tokens: params[tokens])
    step = train_step(loss_fn, optax.sgd(RATE), plan, mesh)
    state, found = create_state(np.random.default_rng(0).normal(size=(8, 8)), step.tx, mesh), []
    local = process_rows(mesh, WIDTH)
    for place, (mode, size) in enumerate((mode, size) for mode in AGGREGATIONS for size in SIZES):
        rng = np.random.default_rng(place)
        lengths = rng.integers(1, 4, size * G)
        samples = {"tokens": rng.integers(0, 8, (size * G, 5)), "prompt_length": np.full(size * G, 2)}
        samples |= {"response_length": lengths, "group": np.arange(size * G) // G}
        samples |= {name: rng.normal(size=(size * G, 3)) - 2 for name in ("log_probabilities", "advantages")}
        passes = padded_rows(loss_rows(samples, loss_agg_mode=mode), WIDTH)
        split = split_of(len(passes["tokens"]), WIDTH, 2)
        own = {name: x[:, local] for name, x in passes.items()}
        before = np.asarray(state.params.addressable_data(0))
        state, metrics = step(state, put_batch(own, replace(plan.position(place), split=split), plan, mesh))
        moved = (before - np.asarray(state.params.addressable_data(0))) / RATE
        # All samples in one batch, on one device.
        rows = loss_rows(samples, loss_agg_mode=mode)
        with jax.default_device(jax.local_devices()[0]):
            grads = jax.grad(lambda params, rows=rows: loss_fn(params, rows, None)[0] / rows["weights"].sum())(before)
        np.testing.assert_allclose(moved, grads, rtol=1e-6, atol=1e-6)
        found.append([float(metrics["loss"]), *moved.ravel().tolist()])
    assert step.num_compilations == 1
    path.write_text(json.dumps(found))


@pytest.mark.slow
def test_gradient_of_any_number_of_prompts_is_that_of_one_batch_in_1_and_2_processes(tmp_path):
    """By all aggregations, in one program, to 1e-6 on two devices; all processes have the same."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    jobs = [(0, 1), (0, 2), (1, 2)]
    files = [tmp_path / f"{number}-{process}.json" for process, number in jobs]
    logs = [file.with_suffix(".log") for file in files]
    started = [
        processes.start(train_rows, *job, port, *place, log=log) for job, *place, log in zip(jobs, files, logs, strict=True)
    ]
    for process, log in zip(started, logs, strict=True):
        process.join(300)
        assert process.exitcode == 0, log.read_text()[-3000:]
    one, *two = (np.array(json.loads(file.read_text())) for file in files)
    assert len(one) == 16
    for other in two:
        np.testing.assert_allclose(other, one, rtol=1e-6, atol=1e-6)
