"""Tests of rampup.run.distributed, with real processes on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rampup import Config
from rampup.errors import ConfigError
from rampup.lm.train import train
from rampup.run.distributed import _differences, _problem, join

ROOT = Path(__file__).parent.parent.parent
TINY = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size_start": 1,
    "per_device_batch_size_increment": 1,
    "per_device_batch_size": 3,
    "global_rampup_samples": 80,
    "max_target_length": 16,
    "base_emb_dim": 32,
    "base_num_decoder_layers": 2,
    "base_mlp_dim": 64,
    "eval_interval": -1,
    "checkpoint_period": 4,
    "learning_rate": 0.01,
    "steps": 12,
}


def free_port():
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(folder, *, processes, devices=8, each=(), python=None, **keys):
    """Start a run in several processes; `each` gives settings of single ones, `python` how they run the command line."""
    port = free_port()
    settings = TINY | {"run_name": "run", "base_output_directory": folder} | keys
    settings |= {"coordinator_address": f"localhost:{port}", "num_processes": processes}
    run = python or [["-m", "rampup"]] * processes
    command = ["train", str(ROOT / "configs" / "base.yml")]
    command += [f"--fake-devices={devices // processes}", *(f"{key}={value}" for key, value in settings.items())]
    own = [*each, *[[]] * (processes - len(each))]
    return [
        subprocess.Popen(
            [sys.executable, *run[n], *command, f"process_id={n}", *own[n]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(processes)
    ]


def finished(processes, timeout=240):
    """Return (exit code, standard error) of every process."""
    errors = [process.communicate(timeout=timeout)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def losses(folder):
    """Return the losses by step, each of which must stand there once."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


@pytest.mark.slow
def test_processes_train_what_one_would(tmp_path):
    """Two processes, then four with two stages, then one: the same losses as one process all the way, to 1e-5."""
    train(Config(base_output_directory=str(tmp_path / "one"), run_name="run", **TINY))
    keys = {"learning_rate_schedule_steps": 12}
    assert [code for code, _ in finished(start(tmp_path / "many", processes=2, steps=4, **keys))] == [0, 0]
    stages = {"ici_pipeline_parallelism": 2}
    assert {code for code, _ in finished(start(tmp_path / "many", processes=4, steps=8, **stages, **keys))} == {0}
    train(Config(base_output_directory=str(tmp_path / "many"), run_name="run", **(TINY | keys)))
    np.testing.assert_allclose(losses(tmp_path / "many"), losses(tmp_path / "one"), rtol=1e-5)


WATCHED = """
import sys
opened = open(sys.argv.pop(1), "w")
def note(event, args):
    if event == "open" and str(args[0]).endswith(".txt"):
        print(args[0], file=opened, flush=True)
sys.addaudithook(note)
from rampup.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_one_process_may_read_for_another(tmp_path):
    """With expansion_factor_real_data=2 the second process opens no data, and the losses are those of one process."""
    for file in range(20):
        lines = (f"line {number} of file {file}, the square of which is {number * number}\n" for number in range(400))
        (tmp_path / f"data{file}.txt").write_text("".join(lines))
    keys = {"grain_train_files": str(tmp_path / "*.txt"), "expansion_factor_real_data": 2, "eval_interval": 6, "eval_steps": 2}
    train(Config(base_output_directory=str(tmp_path / "one"), run_name="run", **(TINY | keys)))
    logs = [tmp_path / f"opened{number}" for number in range(2)]
    processes = start(tmp_path / "two", processes=2, python=[["-c", WATCHED, str(log)] for log in logs], **keys)
    assert [code for code, _ in finished(processes)] == [0, 0]
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    opened = [str(tmp_path / "data7.txt") in log.read_text() for log in logs]
    assert opened == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "words"), [(1, "process 1 has been silent for 6 s"), (0, "process 0")])
def test_a_killed_process_ends_the_others_and_the_job_resumes(tmp_path, victim, words):
    """The survivor says which process is gone and ends soon; started again, the run goes on from its checkpoint."""
    processes = start(tmp_path, processes=2, devices=4, steps=100_000, jax_distributed_heartbeat_timeout_seconds=6)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 8):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.2)
    processes[victim].send_signal(signal.SIGKILL)
    found = finished(processes, timeout=60)
    code, error = found[1 - victim]
    assert code != 0
    assert words in error
    assert "Start the job again to resume." in error
    done = max(int(folder.name) for folder in (tmp_path / "run" / "checkpoints").iterdir() if folder.name.isdecimal())
    again = start(tmp_path, processes=2, devices=4, steps=done + 2, learning_rate_schedule_steps=100_000)
    assert [code for code, _ in finished(again)] == [0, 0]
    assert len(losses(tmp_path)) == done + 2


@pytest.mark.slow
def test_processes_that_are_not_started_alike_are_refused(tmp_path):
    """Every process names the key that differs, and nothing is written."""
    found = finished(start(tmp_path / "out", processes=2, devices=2, each=[[], ["adam_b1=0.8"]]))
    for code, error in found:
        assert code == 2
        assert "adam_b1: 0.9 in process 0, 0.8 in process 1" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_with_other_data_are_refused(tmp_path):
    """Files of the same names and lengths that hold something else are named, in every process, before anything is written."""
    for number in range(2):
        (tmp_path / f"data{number}").mkdir()
        for name in "ab":
            text = "".join(f"line {line} of {name}\n" for line in range(3000))
            (tmp_path / f"data{number}" / f"{name}.txt").write_text(
                text.replace("line 7", f"LINE {number}") if name == "b" else text
            )
    code = "import os, sys; os.chdir(sys.argv.pop(1)); from rampup.cli import main; sys.exit(main(sys.argv[1:]))"
    where = [["-c", code, str(tmp_path / f"data{number}")] for number in range(2)]
    processes = start(tmp_path / "out", processes=2, devices=2, python=where, grain_train_files="*.txt")
    for code, error in finished(processes):
        assert code == 2
        assert "data: b.txt: " in error
        assert "a.txt" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"coordinator_address": "localhost:1"}, "num_processes"),
        ({"num_processes": 2, "process_id": 0}, "coordinator_address"),
        ({"coordinator_address": "localhost:1", "num_processes": 2, "process_id": 2}, "process_id"),
        ({"coordinator_address": "localhost:1", "num_processes": 2, "process_id": -1}, "process_id"),
    ],
)
def test_who_joins_must_say_all_of_it(given, key):
    """Address, number of processes and own number come together, or an error names what is missing."""
    with pytest.raises(ConfigError) as caught:
        join(**given)
    assert caught.value.key == key


def test_the_environment_may_say_it(monkeypatch):
    """JAX's variables stand for the arguments, and a number must be one."""
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID='first' must be a whole number"):
        join()
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    with pytest.raises(ConfigError, match="process_id is given without coordinator_address and num_processes"):
        join()


def test_alone_there_is_nobody_to_join():
    """Without any of it nothing happens."""
    assert not {"JAX_COORDINATOR_ADDRESS", "SLURM_JOB_ID"} & set(os.environ)
    join()


def test_differences_are_named_by_key():
    """Values that differ from process 0's are told with the first process that has another one."""
    facts = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 4}]
    assert _differences(facts) == {"b": "b: 2 in process 0, 3 in process 1 (and in 1 more)"}


def test_files_that_differ_are_named_and_who_does_not_read_is_not_asked():
    """Of the data's files the first that differs is told; a process that leaves a fact out agrees."""
    facts = [{"data": {"a": "x", "b": "y", "c": "z"}}, {}, {"data": {"a": "x", "b": "Y"}}]
    assert _differences(facts) == {"data": "data: b: y in process 0, Y in process 2, and 1 more files"}
    assert _differences(facts[:2]) == {}


@pytest.mark.parametrize(
    ("state", "age", "answered", "words"),
    [
        ("7", 1, 1, None),
        ("7", 11, 1, "process 3 has been silent"),
        ("done", 99, 1, None),
        ("failed DataError: row 5", 0, 0, "process 3 failed with DataError: row 5"),
        ("7", 1, 11, "process 0 has not answered"),
    ],
)
def test_what_the_watchdog_makes_of_a_state(state, age, answered, words):
    """Silence beyond the timeout, a failure, and a store that does not answer are problems; having ended is none."""
    problem = _problem({"rampup/alive/3": (state, 100 - age)}, 100, 100 - answered, 10)
    assert (problem is None) if words is None else (words in problem)
