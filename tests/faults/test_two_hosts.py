"""Two hosts: network namespaces with addresses of their own, a link that can be taken
down, and a shared folder.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.processes import wait_until
from helpers.runs import metrics_of
from helpers.tiny import TINY_MODEL, command_line

HOSTS = {"rampup-a": "10.77.0.1", "rampup-b": "10.77.0.2"}
SETTINGS = TINY_MODEL | {
    "per_device_batch_size": 1,
    "enable_rampup_batch_size": False,
    "dataset_type": "synthetic",
}
SETTINGS |= {
    "run_name": "run",
    "checkpoint_period": 20,
    "steps": 100_000,
    "learning_rate_schedule_steps": 100_000,
}
SETTINGS |= {
    "num_processes": 2,
    "coordinator_address": "10.77.0.1:1234",
    "jax_distributed_heartbeat_timeout_seconds": 10,
}


def ip(words, check=True):
    """Run `ip`."""
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True)


@pytest.fixture
def hosts():
    """Make two hosts, each of which knows this machine's name by an address of its
    own.
    """
    one, other = HOSTS
    try:
        ip(f"netns add {one}")
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("network namespaces are not allowed here, or iproute2 is missing")
    with contextlib.ExitStack() as made:
        made.callback(ip, f"netns del {one}", check=False)
        ip(f"netns add {other}")
        made.callback(ip, f"netns del {other}", check=False)
        ip(f"link add veth0 netns {one} type veth peer name veth0 netns {other}")
        for name, address in HOSTS.items():
            ip(f"-n {name} address add {address}/24 dev veth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set veth0 up")
            known = Path("/etc/netns") / name / "hosts"
            known.parent.mkdir(parents=True, exist_ok=True)
            names = "".join(f"{each} {name}\n" for name, each in HOSTS.items())
            known.write_text(
                f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n{names}"
            )
            made.callback(known.parent.rmdir)
            made.callback(known.unlink)
        yield


def start(folder, **settings):
    """Start a process on each host; return them, whose output goes to files."""
    started = []
    for number, name in enumerate(HOSTS):
        words = command_line(
            SETTINGS
            | {"base_output_directory": folder, "process_id": number}
            | settings
        )
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "rampup",
            "train",
            "base.yml",
            *words,
        ]
        with open(folder / f"{number}.log", "w") as log:
            started.append(
                subprocess.Popen([*command, "--fake-devices=1"], stdout=log, stderr=log)
            )
    return started


def wait_for_steps(folder, count, started):
    """Wait until so many lines of metrics are there."""
    file = folder / "run" / "metrics.jsonl"
    wait_until(
        lambda: file.exists() and num_steps(folder) >= count,
        lambda: outputs(folder),
        running=started,
        seconds=200,
    )


def outputs(folder):
    """Return what the processes printed."""
    return [(folder / f"{number}.log").read_text()[-3000:] for number in range(2)]


def num_steps(folder):
    """Return the number of lines of metrics."""
    return (folder / "run" / "metrics.jsonl").read_text().count("\n")


def saved(folder):
    """Return the steps of the finished checkpoints."""
    return [
        int(path.name)
        for path in (folder / "run" / "checkpoints").iterdir()
        if path.name.isdecimal()
    ]


@contextlib.contextmanager
def running(folder, **settings):
    """Run a process on each host within a context, from the 30th step and a checkpoint
    on; then the link is up again.
    """
    started = start(folder, **settings)
    try:
        wait_for_steps(folder, 30, started)
        while not saved(folder):
            wait_for_steps(folder, num_steps(folder) + 1, started)
        yield started
    finally:
        for process in started:
            process.kill()
        ip("-n rampup-a link set veth0 up")


def cut(seconds, folder, started):
    """Take the link down for a while, and wait for more steps."""
    ip("-n rampup-a link set veth0 down")
    time.sleep(seconds)
    ip("-n rampup-a link set veth0 up")
    wait_for_steps(folder, num_steps(folder) + 20, started)


def assert_ended(started, folder, seconds):
    """Assert that JAX ends both processes a little after so many seconds without the
    other.
    """
    codes = [process.wait(seconds + 60) for process in started]
    assert 0 not in codes, outputs(folder)


def assert_resumes(folder, **settings):
    """Assert that the run goes on from its newest checkpoint with the same losses, each
    step once.
    """
    steps = max(saved(folder)) + 5
    before = {line["step"]: line["loss"] for line in metrics_of(folder / "run")}
    assert [
        process.wait(200) for process in start(folder, steps=steps, **settings)
    ] == [0, 0], outputs(folder)
    lines = metrics_of(folder / "run")
    assert [line["step"] for line in lines] == list(range(steps))
    assert all(
        line["loss"] == before.get(line["step"], line["loss"]) for line in lines
    ), before


@pytest.mark.faults
def test_a_link_that_is_down_is_waited_for_or_ends_both(hosts, tmp_path):
    """Down or stopped for less than the heartbeat's timeout, nothing is lost; for
    longer, both end, and the run resumes.
    """
    with running(tmp_path) as started:
        cut(4, tmp_path, started)
        os.kill(started[1].pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(started[1].pid, signal.SIGCONT)
        wait_for_steps(tmp_path, num_steps(tmp_path) + 20, started)
        ip("-n rampup-a link set veth0 down")
        assert_ended(started, tmp_path, 10)
    assert_resumes(tmp_path)


@pytest.mark.faults
def test_partitions_of_5_and_30_s_with_the_default_timeouts(hosts, tmp_path):
    """Hosts that join by name go on after the first. The second is longer than gRPC
    waits for an answer, 20 s: JAX ends both processes, and the run resumes.
    """
    keys = {
        "coordinator_address": "rampup-a:1234",
        "jax_distributed_heartbeat_timeout_seconds": 60,
    }
    with running(tmp_path, **keys) as started:
        cut(5, tmp_path, started)
        ip("-n rampup-a link set veth0 down")
        time.sleep(30)
        ip("-n rampup-a link set veth0 up")
        assert_ended(started, tmp_path, 60)
    assert_resumes(tmp_path, **keys)


@pytest.mark.faults
def test_a_link_that_is_cut_in_a_save(hosts, tmp_path):
    """For a while, or for good: the checkpoint waits, or both processes end; the newest
    one is intact.
    """
    checkpoints = tmp_path / "run" / "checkpoints"

    def wait_for_save(started):
        while not any("tmp" in path.name for path in checkpoints.iterdir()):
            assert all(process.poll() is None for process in started), outputs(tmp_path)
            time.sleep(0.001)

    with running(tmp_path) as started:
        for _ in range(3):
            wait_for_save(started)
            cut(4, tmp_path, started)
        wait_for_save(started)
        ip("-n rampup-a link set veth0 down")
        assert_ended(started, tmp_path, 10)
    assert_resumes(tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("gone", [0, 1])
def test_a_host_that_is_gone(hosts, tmp_path, gone):
    """Without power, a host says nothing more. JAX ends the other one, and the run
    resumes.
    """
    with running(tmp_path) as started:
        ip("-n rampup-a link set veth0 down")
        started[gone].kill()
        assert started[1 - gone].wait(70) != 0, outputs(tmp_path)
    assert_resumes(tmp_path)
