"""Tests of launch/ray_train.py on a real Ray, with workers that have a CPU each."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import free_port, wait_until
from helpers.snippets import ROOT
from helpers.tiny import TINY_MODEL, command_line

from rampup.loop.run_folder import read_lines

pytestmark = pytest.mark.slow
ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install 'ray[train]'"
)

RAY = str(Path(sys.executable).with_name("ray"))
SETTINGS = TINY_MODEL | {
    "run_name": "run",
    "dataset_type": "synthetic",
    "enable_rampup_batch_size": False,
}
SETTINGS |= {
    "learning_rate_schedule_steps": 1000,
    "jax_cache_dir": None,
    "jax_distributed_heartbeat_timeout_seconds": 10,
}


class Ray:
    """Nodes and a driver, each in a process group of its own, with a log each."""

    def __init__(self, folder, temporary):
        self.folder, self.running, self.runs = folder, {}, folder / "runs"
        # One device for a worker, whatever the machine has.
        self.variables = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.variables |= {
            "RAY_TMPDIR": temporary,
            "RAY_DEDUP_LOGS": "0",
            "RAY_AUTH_MODE": "disabled",
        }

    def start(self, name, *command, **variables):
        """Start a process, and return it."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                command,
                env=self.variables | variables,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self.running[name]

    def train(self, *workers, address, **keys):
        """Start launch/ray_train.py."""
        words = command_line(SETTINGS | {"base_output_directory": self.runs} | keys)
        file = str(ROOT / "launch" / "ray_train.py")
        command = [
            sys.executable,
            file,
            "base",
            *words,
            "--device",
            "cpu",
            "--workers",
            *workers,
        ]
        return self.start("driver", *command, RAY_ADDRESS=address)

    def kill(self, name):
        """Kill a process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def log(self, *names):
        """Return what processes have printed; without names, the driver."""
        return "".join(
            (self.folder / f"{name}.log").read_text() for name in names or ["driver"]
        )

    def wait_until(self, what, seconds=500):
        """Wait until a function returns something, and return it."""
        return wait_until(
            what,
            lambda: self.log(*self.running)[-5000:],
            running=self.running.values(),
            seconds=seconds,
        )

    def workers(self):
        """Return the process ids of the workers of every start, by rank."""
        starts = re.split(r"Started training worker group of size \d+:", self.log())[1:]
        found = [
            tuple(
                int(pid) for pid in re.findall(r"pid=(\d+)\) world_rank=\d+, ", start)
            )
            for start in starts
        ]
        return list(
            dict.fromkeys(found)
        )  # two nodes on one machine read the same logs, and print them twice

    def lines(self):
        """Return the steps of metrics.jsonl, each of which must be there once."""
        found = list(read_lines(self.runs / "run" / "metrics.jsonl"))
        assert [line["step"] for line in found] == list(range(len(found)))
        return found

    def compare_with_one_process(self, lines, rtol, **keys):
        """Train as many steps in one process without Ray, and compare."""
        words = command_line(
            SETTINGS
            | {"base_output_directory": self.folder / "one", "steps": len(lines)}
            | keys
        )
        command = [
            sys.executable,
            "-m",
            "rampup",
            "train",
            "base",
            *words,
            "--fake-devices=1",
            "--quiet",
        ]
        subprocess.run(command, check=True, env=self.variables, timeout=500)
        one = list(read_lines(self.folder / "one" / "run" / "metrics.jsonl"))
        for key in ("global_batch_size", "consumed_samples", "learning_rate", "phase"):
            assert [line[key] for line in lines] == [line[key] for line in one]
        np.testing.assert_allclose(
            [line["loss"] for line in lines], [line["loss"] for line in one], rtol=rtol
        )


@pytest.fixture
def cluster(tmp_path):
    """Return a `Ray` whose processes end with the test. Its folder has a short name, as
    that of a socket must.
    """
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as temporary:
        found = Ray(tmp_path, temporary)
        yield found
        for name in list(found.running):
            found.kill(name)


def test_a_killed_worker_of_ray_leaves_no_trace(cluster):
    """Of two workers one gets SIGKILL. Ray starts both again, and every step is there
    once with the losses of one process.
    """
    keys = {
        "batch_size_schedule": "0:8 400:16",
        "microbatch_size": 4,
        "steps": 120,
        "checkpoint_period": 10,
    }
    driver = cluster.train("2", address="local", **keys)
    cluster.wait_until(lambda: len(cluster.lines()) > 30)
    os.kill(cluster.workers()[0][1], signal.SIGKILL)
    assert driver.wait(500) == 0, cluster.log()[-5000:]
    assert [len(pids) for pids in cluster.workers()] == [2, 2]
    assert "2 devices, data parallel 2" in cluster.log()
    lines = cluster.lines()
    assert len(lines) == 120
    last = cluster.log().splitlines()[-1]
    assert "'steps': 120" in last
    assert str(cluster.runs / "run" / "checkpoints" / "120") in last
    del keys["steps"]
    cluster.compare_with_one_process(lines, 1e-6, **keys)


def test_the_driver_of_ray_refuses_what_some_workers_cannot_run(cluster):
    """A batch of 6 runs on 1, 2 and 3 workers and not on 4, which is said before Ray
    starts.
    """
    driver = cluster.train(
        "1", "4", address="local", batch_size_schedule="0:6", steps=5
    )
    assert driver.wait(200) != 0
    assert "4 workers cannot run this: global_batch_size=6 " in cluster.log()
    assert not cluster.runs.exists()


def test_ray_changes_the_number_of_workers_and_not_the_run(cluster):
    """One worker, two when a node comes, one when it goes: a checkpoint at the notice,
    and the steps of one process.
    """
    address = f"127.0.0.1:{free_port()}"
    options = ("--num-cpus=1", "--block", "--disable-usage-stats")
    head = (
        "--head",
        f"--port={address.rpartition(':')[2]}",
        "--include-dashboard=false",
    )
    cluster.start("head", RAY, "start", *head, *options)
    cluster.wait_until(lambda: "Ray runtime started" in cluster.log("head"))
    # A batch of 256 rows in microbatches of one is a step that takes a while. The only
    # checkpoint is that of the notice.
    keys = {
        "batch_size_schedule": "0:128 2560:256",
        "microbatch_size": 1,
        "checkpoint_period": 1_000_000,
    }
    cluster.train("1", "2", address=address, steps=1_000_000, **keys)
    cluster.wait_until(lambda: len(cluster.lines()) > 5)
    cluster.start("node", RAY, "start", f"--address={address}", *options)
    cluster.wait_until(lambda: len(cluster.workers()) == 2)
    # A cluster that grows gives no notice, so the run goes back to its last checkpoint:
    # here, to the beginning.
    before = len(cluster.lines())
    cluster.wait_until(lambda: len(cluster.lines()) < before)
    cluster.wait_until(lambda: len(cluster.lines()) > 25)
    assert "2 cpu" in cluster.log()
    (node,) = [
        part["NodeID"]
        for part in nodes(cluster, address)
        if "node:__internal_head__" not in part["Resources"]
    ]
    drain = (
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "spot",
        "--deadline-remaining-seconds",
        "20",
    )
    command = [RAY, "drain-node", f"--address={address}", f"--node-id={node}", *drain]
    subprocess.run(command, check=True, env=cluster.variables, timeout=120)
    checkpoints = cluster.runs / "run" / "checkpoints"
    saved = cluster.wait_until(
        lambda: [
            int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()
        ]
    )[0]
    assert 25 < saved < 1_000_000
    cluster.wait_until(lambda: len(cluster.workers()) == 3)
    cluster.kill("node")
    cluster.wait_until(lambda: len(cluster.lines()) > saved + 5)
    cluster.kill("driver")
    assert [len(pids) for pids in cluster.workers()] == [1, 2, 1]
    assert f"resumed after step {saved - 1}" in cluster.log()
    cluster.compare_with_one_process(
        cluster.lines(), 1e-5, **keys | {"microbatch_size": 128}
    )


def nodes(cluster, address):
    """Return what Ray knows about its nodes, asked by a process of its own."""
    code = (
        f"import json, ray; ray.init({address!r}, log_to_driver=False); print('nodes',"
        " json.dumps(ray.nodes()))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        check=True,
        env=cluster.variables,
        timeout=200,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.rpartition("nodes ")[2])
