"""Tests of rampup.loop.distributed, with real processes on this machine."""

import asyncio
import functools
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from helpers import processes, toy
from helpers.processes import free_port
from helpers.runs import metrics_of
from helpers.tiny import AUTO, TINY, command_line

from rampup import Config, make_mesh
from rampup.engine import processes as engine_processes
from rampup.engine.processes import check_joined, wait_for_all
from rampup.errors import ConfigError, DataError
from rampup.lm.train import train
from rampup.loop import distributed
from rampup.loop.distributed import StopConsensus, join, leaving_on_error

BASE = Path(__file__).parent.parent.parent / "configs" / "base.yml"
SETTINGS = TINY | {
    "base_num_decoder_layers": 2,
    "checkpoint_period": 4,
    "run_name": "run",
    "learning_rate_schedule_steps": 12,
}


def run_command(words, folder, opened):
    """Run `rampup` in a folder, and write the names of the text files that it opens
    into the file `opened`.
    """
    from rampup.cli import main

    os.chdir(folder)
    file = open(opened, "w")  # noqa: SIM115 - open until the process ends

    def note(event, arguments):
        if event == "open" and str(arguments[0]).endswith(".txt"):
            print(arguments[0], file=file, flush=True)

    sys.addaudithook(note)
    return main(words)


def start(folder, *, number, devices, each=(), folders=None, runs=None, **keys):
    """Start `rampup train` in processes, each with settings of `each`, in one of
    `folders`, and called by one of `runs`.
    """
    settings = (
        SETTINGS | {"base_output_directory": folder, "num_processes": number} | keys
    )
    words = [
        "train",
        str(BASE),
        f"--fake-devices={devices // number}",
        *command_line(settings),
    ]
    words.append(f"coordinator_address=localhost:{free_port()}")
    logs = folder.parent / f"{folder.name}-logs"
    return [
        processes.start(
            runs[n] if runs else run_command,
            [*words, f"process_id={n}", *(each[n] if each else ())],
            str(folders[n] if folders else logs.parent),
            str(logs / f"opened{n}"),
            log=logs / f"{time.monotonic_ns()}-{n}.log",
        )
        for n in range(number)
    ]


def finish(started, folder, timeout=240):
    """Wait for processes; return the output of each."""
    deadline = time.monotonic() + timeout
    for process in started:
        process.join(max(deadline - time.monotonic(), 0))
        assert process.exitcode is not None, "a process hangs"
    return [
        log.read_text()
        for log in sorted((folder.parent / f"{folder.name}-logs").glob("*.log"))[
            -len(started) :
        ]
    ]


def run(folder, code=0, **options):
    """Run processes, each of which ends with the same exit code; return the output of
    each.
    """
    started = start(folder, **options)
    printed = finish(started, folder)
    assert [process.exitcode for process in started] == [code] * len(started), printed
    return printed


def test_what_process_0_said_before_is_no_answer(monkeypatch):
    """A second training in the same processes waits for what process 0 says then."""
    said, number = {}, itertools.count
    store = mock.Mock()
    store.key_value_set = lambda key, value, **_: said.update({key: value})
    store.blocking_key_value_get = lambda key, _: said[key]
    monkeypatch.setattr(engine_processes, "kv_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def ask(process, numbers, folder):
        monkeypatch.setattr(jax, "process_index", lambda: process)
        monkeypatch.setattr(engine_processes, "_numbers", numbers)
        return engine_processes.broadcast_from_process0("folder", lambda: folder)

    first, other = defaultdict(number), defaultdict(number)
    assert ask(0, first, "a") == ask(1, other, "unused") == "a"
    with pytest.raises(KeyError):
        ask(1, other, "unused")
    assert ask(0, first, "b") == "b"


def metrics(folder, *names):
    """Return values of metrics.jsonl by step, each of which must be there once."""
    lines = metrics_of(folder / "run")
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [[line.get(name) for name in names] for line in lines]


@pytest.mark.slow
def test_several_processes_train_what_one_would(tmp_path):
    """Two, of which one reads for both and the other opens no data, four with two
    stages, then one: as one with eight devices.

    Sizes, samples and learning rates of all steps are equal, and the losses to 1e-5.
    """
    for file in range(20):
        lines = (
            f"line {number} of file {file}, the square of which is {number * number}\n"
            for number in range(400)
        )
        (tmp_path / f"data{file}.txt").write_text("".join(lines))
    keys = {
        "grain_train_files": str(tmp_path / "*.txt"),
        "eval_interval": 4,
        "eval_per_device_batch_size": 8,
        "eval_steps": 2,
    }
    keys |= {
        "enable_rampup_batch_size": False,
        "batch_size_schedule": "0:8 40:16 104:32",
    }
    one, many = tmp_path / "one", tmp_path / "many"
    train(
        Config(
            base_output_directory=str(one),
            **(SETTINGS | keys | {"eval_per_device_batch_size": 1}),
        )
    )
    printed = run(
        many, number=2, devices=2, steps=4, expansion_factor_real_data=2, **keys
    )
    assert ["final_loss" in output for output in printed] == [True, False]
    opened = [
        str(tmp_path / "data7.txt")
        in (tmp_path / "many-logs" / f"opened{n}").read_text()
        for n in range(2)
    ]
    assert opened == [True, False]
    run(many, number=4, devices=4, steps=8, ici_pipeline_parallelism=2, **keys)
    run(many, number=1, devices=1, **keys)
    np.testing.assert_allclose(metrics(many, "loss"), metrics(one, "loss"), rtol=1e-5)
    names = ("phase", "global_batch_size", "consumed_samples", "learning_rate")
    assert metrics(many, *names) == metrics(one, *names)


def fail_in_process_1(words, folder, opened):
    """Run `rampup` in a folder; process 1 meets an error before the tenth step."""
    agreed = StopConsensus.agreed

    def meet(self, wants_to_stop, step):
        if step == 9 and "process_id=1" in words:
            raise DataError("7")
        return agreed(self, wants_to_stop, step)

    StopConsensus.agreed = meet
    return run_command(words, folder, opened)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "fails"),
    [
        (0, False),
        toy.campaign(1, False),
        (1, True),
    ],
)
def test_the_others_end_when_a_process_is_killed_or_fails(tmp_path, victim, fails):
    """JAX ends them soon, in its own words, which name a process that is silent.
    Started again, the run resumes.
    """
    folder, other = tmp_path / "out", 1 - victim
    keys = {"steps": 100_000, "jax_distributed_heartbeat_timeout_seconds": 5}
    started = start(
        folder,
        number=2,
        devices=2,
        runs=[fail_in_process_1 if fails else run_command] * 2,
        **keys,
    )
    if not fails:
        processes.wait_until(lambda: [*folder.glob("run/checkpoints/[1-9]")])
        os.kill(started[victim].pid, signal.SIGKILL)
    printed = finish(started, folder, timeout=60)
    assert started[victim].exitcode == (2 if fails else -signal.SIGKILL)
    assert ("DataError: 7" in printed[victim]) == fails
    assert started[other].exitcode not in (None, 0), printed[other]
    done = max(
        int(path.name)
        for path in (folder / "run" / "checkpoints").iterdir()
        if path.name.isdecimal()
    )
    run(folder, number=2, devices=2, steps=done + 2)
    assert len(metrics(folder)) == done + 2


class LateRows:
    """Rows that come after a random delay of up to 200 ms, another one in every
    process.
    """

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        # One row in eight is late, so that 2,000 steps take minutes and not hours.
        if self._rng.random() < 1 / 8:
            time.sleep(self._rng.uniform(0, 0.2))
        return {"x": np.full(4, index, np.float32)}


def call_in_each(function, number, folder, *arguments, timeout=300):
    """Call a function in several processes that can join; return what each wrote as
    JSON.
    """
    port, files = free_port(), [folder / f"{n}.json" for n in range(number)]
    processes.run_all(
        function,
        [(n, port, files[n], *arguments) for n in range(number)],
        folder,
        timeout,
    )
    return [json.loads(file.read_text()) for file in files]


def train_rows(
    number, port, path, count, schedule, rows, num_steps, late=0, each=1, **splitter
):
    """Train with `each` device of processes, two of which may be late; write microbatch
    sizes, last loss and noise.
    """
    import jax
    import optax

    import rampup

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", each)
    join(
        coordinator_address=f"localhost:{port}", num_processes=count, process_id=number
    )
    mesh = rampup.make_mesh(rampup.MeshAxes(data=count * each))
    plan = toy.plan_for(mesh, schedule, steps=num_steps, **splitter)
    tx, sizes, options = optax.adam(0.001), [], {"measure_gradient_noise": True}
    time.sleep(late * (number == 1))
    step = rampup.train_step(
        lambda p, b, keys: (((p - b["x"]) ** 2).sum(), b["x"].size, {}),
        tx,
        plan,
        mesh,
        **options,
    )
    state = rampup.create_state(jax.numpy.zeros(4), tx, mesh)
    time.sleep(late * (number == 2))
    # No metric is read in the loop, so that it runs ahead.
    for batch in step.batches(rows(number)):
        sizes.append(batch.position.split.microbatch_size)
        state, metrics = step(state, batch)
    assert jax.device_get(state.step) == num_steps
    noise = {name: float(x) for name, x in metrics["gradient_noise"].items()}
    path.write_text(json.dumps([sizes, float(metrics["loss"]), noise]))


@pytest.mark.parametrize("num_steps", [toy.slow(40), toy.campaign(2000)])
@pytest.mark.parametrize("microbatch", ["auto", "per_phase"])
def test_processes_use_the_same_shapes_however_late_their_rows(
    tmp_path, microbatch, num_steps
):
    """With readers that are late by up to 200 ms and a loop that runs ahead, every step
    has one shape in both processes.
    """
    schedule = f"0:2 {num_steps // 2}:4 {3 * num_steps // 2}:8"
    train = functools.partial(train_rows, rampup_microbatch=microbatch)
    (one, *_), (other, *_) = call_in_each(
        train, 2, tmp_path, 2, schedule, LateRows, num_steps, timeout=600
    )
    assert one == other
    assert set(one) == ({1, 2, 4} if microbatch == "per_phase" else {1, 4})


def train_own_state(number, port, path):
    """Train a state with a moving average, batch statistics and a random key on a mesh
    with one axis; write what comes out.
    """
    import jax
    import optax
    from flax.training import train_state
    from helpers import toy

    import rampup

    if port:
        join(
            coordinator_address=f"localhost:{port}", num_processes=2, process_id=number
        )
    devices = (
        [next(d for d in jax.devices() if d.process_index == n) for n in range(2)]
        if port
        else jax.devices()[:2]
    )
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))

    class State(train_state.TrainState):
        ema: dict
        batch_stats: jax.Array
        key: jax.Array

        def apply_gradients(self, *, grads, **changes):
            new = super().apply_gradients(grads=grads, **changes)
            return new.replace(
                ema=optax.incremental_update(new.params, self.ema, 0.5),
                key=jax.random.split(self.key)[0],
            )

    def loss_fn(params, batch, keys, mean):
        return *toy.loss_fn(params, batch, keys), 0.9 * mean + 0.1 * batch["x"].mean(0)

    tx = optax.adam(0.1)
    plan = toy.plan_for(
        rampup.make_mesh(rampup.MeshAxes(data=2), devices), "0:4 8:8", steps=4
    )
    params = {
        "in": np.full((8, 4), 0.1, np.float32),
        "out": np.full((4, 8), 0.2, np.float32),
    }
    own = {"ema": params, "batch_stats": jax.numpy.zeros(8), "key": jax.random.key(1)}
    state = rampup.prepare_state(
        State.create(apply_fn=None, params=params, tx=tx, **own), mesh
    )
    step = rampup.train_step(loss_fn, tx, plan, mesh)
    for batch in step.batches(toy.rows(40)):
        state, _ = step(state, batch)
    found = state.params, state.ema, state.batch_stats, jax.random.key_data(state.key)
    path.write_text(
        json.dumps(
            [
                np.asarray(leaf.addressable_data(0)).tolist()
                for leaf in jax.tree.leaves(found)
            ]
        )
    )


def test_processes_train_a_state_of_ones_own(tmp_path):
    """On a mesh whose only axis is data, two processes train every field of a Flax
    state as one does, a random key too.
    """
    one, other = call_in_each(train_own_state, 2, tmp_path)
    assert one == other
    train_own_state(0, None, tmp_path / "alone")
    for x, expected in zip(
        one, json.loads((tmp_path / "alone").read_text()), strict=True
    ):
        np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-6)


def run_without_noise(words, folder, opened):
    """Run `rampup` in a process that takes the noise scale to be 0, and so would never
    grow the batch.
    """
    from rampup.plan.auto import AutoSchedule

    decide = AutoSchedule.decide
    AutoSchedule.decide = lambda self, noise_scale, **where: decide(
        self, noise_scale=0.0, **where
    )
    return run_command(words, folder, opened)


@pytest.mark.slow
def test_processes_decide_alike_about_the_batch(tmp_path):
    """Process 1 would not grow the batch, but both use what process 0 has decided and
    saved; one process resumes alike.
    """
    keys = {
        name: value
        for name, value in SETTINGS.items()
        if "per_device" not in name and "rampup" not in name
    }
    keys |= AUTO | {
        "enable_rampup_batch_size": False,
        "learning_rate_schedule_steps": 24,
        "auto_max_waste": 0.5,
    }
    one, many = tmp_path / "one", tmp_path / "many"
    run(
        many,
        number=2,
        devices=8,
        runs=[run_command, run_without_noise],
        **keys | {"steps": 12},
    )
    for folder in (one, many):
        train(Config(base_output_directory=str(folder), **keys | {"steps": 24}))
    sizes = metrics(many, "global_batch_size", "next_global_batch_size")
    assert sizes[0][0] < sizes[11][0] < sizes[23][0]
    for (size, decided), (after, _) in itertools.pairwise(sizes):
        assert after == (size if decided is None else decided)
    np.testing.assert_allclose(metrics(many, "loss"), metrics(one, "loss"), rtol=1e-5)
    names = ("gradient_noise_trace", "gradient_squared_norm")
    np.testing.assert_allclose(
        metrics(many, *names), metrics(one, *names), rtol=1e-3, atol=1e-4
    )


@pytest.mark.slow
def test_check_consistent_refuses_processes_with_other_settings(tmp_path):
    """Every process names the keys that differ, also of one by which a process waits
    for others, and nothing is written.
    """
    folder = tmp_path / "out"
    for output in run(
        folder,
        code=2,
        number=2,
        devices=2,
        each=[[], ["adam_b1=0.8", "expansion_factor_real_data=2"]],
    ):
        assert "adam_b1: 0.9 in process 0, 0.8 in process 1" in output
        assert "expansion_factor_real_data: " in output
    assert not folder.exists()


@pytest.mark.slow
def test_check_consistent_refuses_processes_with_other_data(tmp_path):
    """Files of the same names and lengths with other content are named, in every
    process, before anything is written.
    """
    folder, folders = (
        tmp_path / "out",
        [tmp_path / f"data{number}" for number in range(2)],
    )
    for number, own in enumerate(folders):
        own.mkdir()
        (own / "a.txt").write_text("".join(f"line {line}\n" for line in range(3000)))
        (own / "b.txt").write_text(
            "".join(f"line {line} of {number}\n" for line in range(3000))
        )
    for output in run(
        folder, code=2, number=2, devices=2, folders=folders, grain_train_files="*.txt"
    ):
        assert "data: b.txt: " in output
        assert "a.txt" not in output
    assert not folder.exists()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"coordinator_address": "localhost:1"}, "num_processes"),
        ({"num_processes": 2, "process_id": 0}, "coordinator_address"),
        *(
            (
                {
                    "coordinator_address": "localhost:1",
                    "num_processes": 2,
                    "process_id": n,
                },
                "process_id",
            )
            for n in (2, -1)
        ),
    ],
)
def test_join_needs_all_of_its_arguments(given, key, monkeypatch):
    """Address, number of processes and own number come together, or an error names what
    is missing; JAX's variables count.
    """
    with pytest.raises(ConfigError) as caught:
        join(**given)
    assert caught.value.key == key
    for value, words in (
        ("first", "'first' must be a whole number"),
        ("3", " is given without coordinator_address and num_"),
    ):
        monkeypatch.setenv("JAX_PROCESS_ID", value)
        with pytest.raises(
            ConfigError,
            match=(
                f"JAX_PROCESS_ID={words}" if value == "first" else f"process_id{words}"
            ),
        ):
            join()
    # Without joining, JAX's backend may have devices of other processes.
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(
        ConfigError,
        match="sees the devices of 2 processes, but this one has not joined them",
    ):
        check_joined()


@pytest.mark.parametrize(
    ("address", "number", "words"),
    [
        (
            "no.such.host.invalid:1",
            1,
            "waits for no.such.host.invalid:1: no answer",
        ),
        ("localhost:{free}", 1, "waits for localhost:{free}: no answer"),
        ("localhost:{used}", 0, "waits for localhost:{used}: it cannot listen"),
        ("localhost:ssh", 1, "localhost:ssh: the port must be a number"),
    ],
)
def test_join_says_for_whom_it_waits(address, number, words, monkeypatch, capsys):
    """A process that cannot reach process 0 says so while it waits and at the end; a
    process 0 that cannot listen says so at once.
    """
    monkeypatch.setattr(engine_processes, "_QUIET_SECONDS", 0.2)
    with socket.create_server(("", 0)) as used:
        ports = {"free": free_port(), "used": used.getsockname()[1]}
        with pytest.raises(ConfigError) as caught:
            join(
                coordinator_address=address.format(**ports),
                num_processes=2,
                process_id=number,
                initialization_timeout=1,
            )
    assert words.format(**ports) in str(caught.value)
    if number == 1 and "waits" in words:
        assert (
            f"rampup: process {number} of 2 {words.format(**ports)}"
            in capsys.readouterr().err
        )


def test_what_jax_refuses_is_one_sentence(monkeypatch):
    """Here that JAX has made its devices before: with the address and the key."""
    monkeypatch.setattr(distributed, "meet", lambda *args: None)
    jax.devices()
    with pytest.raises(
        ConfigError, match=r"process 0 of 2 could not join .* localhost:1: .*before"
    ) as caught:
        join(coordinator_address="localhost:1", num_processes=2, process_id=0)
    assert caught.value.key == "coordinator_address"


def wait_with_others(number, port, delay, seen):
    """Wait for the other process, which comes later, and note which have come when the
    wait ends; a run before has failed.
    """

    async def cell():
        join(
            coordinator_address=f"localhost:{port}", num_processes=2, process_id=number
        )

    asyncio.run(cell())  # as in a notebook
    engine_processes._QUIET_SECONDS = 0.2
    mesh = make_mesh()
    with pytest.raises(ValueError, match="in both"), leaving_on_error():
        raise ValueError("in both")
    with leaving_on_error():
        time.sleep(2 + number * delay)
        (seen / f"{number}").touch()
        wait_for_all(mesh)
    (seen / f"after{number}").write_text(
        " ".join(sorted(path.name for path in seen.glob("?")))
    )


@pytest.mark.slow
def test_wait_for_all_waits_for_the_last(tmp_path):
    """No process goes on before all are there, and process 0 names the one that is
    missing.
    """
    printed = processes.run_all(
        wait_with_others,
        [(n, p, 4, tmp_path) for p in [free_port()] for n in range(2)],
        tmp_path,
    )
    assert [(tmp_path / f"after{n}").read_text() for n in range(2)] == ["0 1", "0 1"]
    assert "rampup: process 0 of 2 waits for process 1" in printed[0]


def rows_of_numbers(number):
    """Return the same rows in every process."""
    return [{"x": np.full(4, row, np.float32)} for row in range(12)]


@pytest.mark.slow
def test_processes_start_however_late_one_is(tmp_path):
    """Four processes, of which one is 40 s late to its state and another to its first
    step, train: JAX gives up after 30 s.
    """
    losses = {
        loss
        for _, loss, _ in call_in_each(
            train_rows, 4, tmp_path, 4, "0:4", rows_of_numbers, 3, 40
        )
    }
    assert len(losses) == 1


@pytest.mark.slow
def test_gradient_noise_is_the_same_in_1_2_and_4_processes(tmp_path):
    """The same blocks on four devices have the same S and G2 to 1e-6, in float64."""
    trained = functools.partial(train_rows, microbatch_size=2)
    each = [
        call_in_each(trained, n, tmp_path, n, "0:64", rows_of_numbers, 2, 0, 4 // n)
        for n in (1, 2, 4)
    ]
    one, *others = (noise for found in each for *_, noise in found)
    assert (one["blocks"], len(others)) == (32, 6)
    assert all(noise == pytest.approx(one, rel=1e-6) for noise in others)


def run_impatiently(first, words, folder, opened):
    """Run `rampup` as a process whose number is higher by `first`, and which waits for
    the others for four seconds.
    """
    join.__kwdefaults__["initialization_timeout"] = 4
    *words, number = words
    name, _, number = number.partition("=")
    return run_command([*words, f"{name}={int(number) + first}"], folder, opened)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words"),
    [(0, "process 2 of 3 did not come to localhost:"), (1, ": no answer")],
)
def test_the_command_ends_in_words_if_a_process_never_comes(tmp_path, first, words):
    """Whichever it is: the others end with code 2, in time and without a stack trace,
    and write nothing.
    """
    runs = [functools.partial(run_impatiently, first)] * 2
    folder = tmp_path / "runs"
    for output in run(folder, code=2, number=2, devices=2, runs=runs, num_processes=3):
        assert words in output
        assert "stack trace" not in output
        assert "Traceback" not in output
    assert not folder.exists()
