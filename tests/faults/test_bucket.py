"""Runs in a bucket that fails: the losses of a run on a disk, or one sentence at the
end.
"""

import os
import re
import subprocess
import sys
import time

import pytest
from helpers import bucket
from helpers.processes import free_port, wait_until
from helpers.tiny import TINY_MODEL, command_line

from rampup.cli import main
from rampup.loop.run_folder import as_path, read_lines

SETTINGS = TINY_MODEL | {
    "per_device_batch_size": 1,
    "enable_rampup_batch_size": False,
    "dataset_type": "synthetic",
}
SETTINGS |= {
    "run_name": "run",
    "checkpoint_period": 500,
    "steps": 4000,
    "max_num_checkpoints_to_keep": 2,
}
# A run that is stopped by a signal, after as many steps as it has done until then.
LONG = {"steps": 10_000_000, "learning_rate_schedule_steps": 10_000_000}


class Run:
    """A run of `rampup train` in one or more processes, whose output goes to files in a
    folder.
    """

    def __init__(self, base, folder, name="log", number=1, **settings):
        self.logs = [folder / f"{name}{process}" for process in range(number)]
        self.processes, port = [], free_port()
        for process, log in enumerate(self.logs):
            keys = SETTINGS | {"base_output_directory": base} | settings
            if number > 1:
                keys |= {
                    "num_processes": number,
                    "process_id": process,
                    "coordinator_address": f"127.0.0.1:{port}",
                }
            command = [
                sys.executable,
                "-m",
                "rampup",
                "train",
                "base.yml",
                *command_line(keys),
                "--fake-devices=1",
            ]
            with open(log, "a") as file:
                self.processes.append(
                    subprocess.Popen(command, stdout=file, stderr=file)
                )

    @property
    def printed(self):
        """What the processes have printed."""
        return "\n".join(log.read_text() for log in self.logs)

    @property
    def num_steps(self):
        """The newest step that was printed, which is one of 20; -1 before the first."""
        return max(
            map(
                int,
                re.findall(r"^step (\d+)", self.printed.replace(",", ""), re.MULTILINE),
            ),
            default=-1,
        )

    def wait_for(self, condition):
        """Wait until something is seen of a run that goes on."""
        wait_until(condition, lambda: self.printed, running=self.processes, seconds=200)

    def end(self, code=0, *, seconds=200):
        """Wait for the end with an exit code, and assert that rampup's words come last,
        such as a `StorageError` and its sentence.

        The client of the bucket logs a traceback of its own when it gives up.
        """
        assert [process.wait(seconds) for process in self.processes] == [code] * len(
            self.processes
        ), self.printed
        for log in self.logs:
            *_, last = ["", *log.read_text().splitlines()]
            others = r"\s|Traceback|(?!StorageError: )[\w.]+(Error|Exception)\b"
            assert not re.match(others, last), last
        assert "Exception ignored" not in self.printed

    def stop(self):
        """Stop the run after the steps in flight."""
        self.processes[0].terminate()
        self.end(130)


def losses(base):
    """Return step and loss of every line of a run's metrics."""
    return [
        (line["step"], line["loss"])
        for line in read_lines(as_path(f"{base}/run/metrics.jsonl"))
    ]


def assert_losses_of_a_disk(tmp_path, **settings):
    """Assert that the run in the bucket has each step once, with the loss of a run on a
    disk; return their number.
    """
    found = losses("gs://bucket/runs")
    Run(
        tmp_path,
        tmp_path,
        "local",
        **settings | {"steps": len(found), "checkpoint_period": len(found)},
    ).end(seconds=900)
    assert found == losses(tmp_path)
    return len(found)


@pytest.fixture
def proxy(tmp_path):
    """Serve an empty bucket; its objects are in `tmp_path`/objects."""
    (tmp_path / "objects").mkdir()
    with bucket.serve(tmp_path / "objects") as proxy:
        yield proxy


def checkpoint_of(tmp_path, step):
    """Return the file that is there when a checkpoint is complete."""
    return (
        tmp_path
        / "objects"
        / bucket.BUCKET
        / "runs"
        / "run"
        / "checkpoints"
        / str(step)
        / "commit_success.txt"
    )


@pytest.mark.faults
def test_a_killed_run_in_a_bucket_that_was_away(tmp_path, proxy):
    """SIGKILL after a checkpoint, another start, a third one beside it, and 503 for 40
    s: every step once, with its loss.
    """
    run = Run("gs://bucket/runs", tmp_path)
    run.wait_for(checkpoint_of(tmp_path, 500).exists)
    run.processes[0].kill()
    run.processes[0].wait()
    run = Run("gs://bucket/runs", tmp_path)
    run.wait_for(lambda: "resumed after step" in run.printed)
    other = Run("gs://bucket/runs", tmp_path, "other")
    with proxy.failing(503):
        before = proxy.num_failed
        time.sleep(40)
        assert proxy.num_failed > before
    run.end()
    assert other.processes[0].wait(150) in (0, 1, 2)
    # Those of the bucket's client are that there are no credentials.
    warnings = [
        line
        for line in other.printed.splitlines()
        if line.startswith("WARNING")
        and not line.startswith(("WARNING:gcsfs:", "WARNING:google.auth"))
    ]
    assert warnings == []
    assert assert_losses_of_a_disk(tmp_path) == SETTINGS["steps"]


@pytest.mark.faults
@pytest.mark.parametrize("status", [503, "stall"])
def test_metrics_and_lease_wait_for_150_s(tmp_path, proxy, status):
    """Training goes on without the bucket, and all lines are there in the end."""
    run = Run("gs://bucket/runs", tmp_path, checkpoint_period=10_000_000, **LONG)
    run.wait_for(lambda: run.num_steps >= 100)
    with proxy.failing(status):
        time.sleep(75)
        half = run.num_steps
        time.sleep(75)
        assert run.num_steps >= half + 100, run.printed
        assert proxy.num_failed > 0
    run.stop()
    assert assert_losses_of_a_disk(tmp_path, **LONG) > half + 100


@pytest.mark.faults
def test_a_bucket_that_stays_away_ends_the_run(tmp_path, proxy):
    """A checkpoint waits for 300 s. Then the run ends with one sentence; with the
    bucket it resumes.
    """
    run = Run("gs://bucket/runs", tmp_path)
    run.wait_for(checkpoint_of(tmp_path, 500).exists)
    with proxy.failing(503):
        run.end(1, seconds=500)
    assert re.search(
        r"gs://bucket\S* (cannot be used|could not be written|cannot be written): .*$",
        run.printed.splitlines()[-1],
    )
    run = Run("gs://bucket/runs", tmp_path)
    run.end()
    assert "resumed after step" in run.printed
    assert assert_losses_of_a_disk(tmp_path) == SETTINGS["steps"]


@pytest.mark.faults
def test_two_processes_in_a_bucket_that_fails_in_every_way(tmp_path, proxy):
    """20 s of each failure with checkpoints cost nothing. The run resumes, and is
    plotted and reported from there.
    """
    keys = LONG | {"checkpoint_period": 100}
    run = Run("gs://bucket/runs", tmp_path, number=2, **keys)
    run.wait_for(checkpoint_of(tmp_path, 100).exists)
    for status in (429, 503, "cut", "stall"):
        with proxy.failing(status):
            time.sleep(20)
            assert proxy.num_failed > 0
        before = run.num_steps
        run.wait_for(lambda before=before: run.num_steps >= before + 120)
    run.stop()
    run = Run("gs://bucket/runs", tmp_path, number=2, **keys)
    run.wait_for(
        lambda: "resumed after step" in run.printed and "\nstep " in run.printed
    )
    run.stop()
    for command, file in (("plot", "run.png"), ("report", "run.html")):
        assert main([command, "gs://bucket/runs/run", "-o", str(tmp_path / file)]) == 0
        assert os.path.getsize(tmp_path / file) > 1000
    assert_losses_of_a_disk(tmp_path, number=2, **LONG)
