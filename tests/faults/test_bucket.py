"""A run in a bucket that is killed, and whose bucket is away for a while: the losses of a run on a disk, and no traceback."""

import subprocess
import sys
import time

import pytest
from helpers import bucket
from helpers.tiny import TINY_MODEL, command_line

from rampup.loop.run_folder import as_path, read_lines

SETTINGS = TINY_MODEL | {"per_device_batch_size": 1, "enable_rampup_batch_size": False, "dataset_type": "synthetic"}
SETTINGS |= {"run_name": "run", "checkpoint_period": 500, "steps": 4000, "max_num_checkpoints_to_keep": 2}


def start(base, log):
    """Start `rampup train`."""
    words = command_line(SETTINGS | {"base_output_directory": base})
    command = [sys.executable, "-m", "rampup", "train", "base.yml", *words, "--fake-devices=1"]
    with open(log, "a") as file:
        return subprocess.Popen(command, stdout=file, stderr=file)


@pytest.mark.faults
def test_a_killed_run_in_a_bucket_that_was_away(tmp_path):
    """SIGKILL after a checkpoint, another start, a third one beside it, and 503 for 40 s: every step once, with its loss."""
    log, second = tmp_path / "log", tmp_path / "second"
    (tmp_path / "objects").mkdir()
    with bucket.serve(tmp_path / "objects") as proxy:
        saved = tmp_path / "objects" / bucket.BUCKET / "runs" / "run" / "checkpoints" / "500" / "commit_success.txt"

        def wait_for(condition):
            end = time.monotonic() + 150
            while not condition():
                assert time.monotonic() < end, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)

        process = start("gs://bucket/runs", log)
        wait_for(saved.exists)
        process.kill()
        process.wait()
        process = start("gs://bucket/runs", log)
        wait_for(lambda: "resumed after step" in log.read_text())
        other = start("gs://bucket/runs", second)
        with proxy.failing(503):
            before = proxy.num_failed
            time.sleep(40)
            assert proxy.num_failed > before
        assert process.wait(150) == 0, log.read_text()
        assert other.wait(150) in (0, 1, 2)
        warnings = [line for line in second.read_text().splitlines() if line.startswith("WARNING")]
        assert len(set(warnings)) == len(warnings) <= 2  # that there are no credentials
        assert "Traceback" not in log.read_text() + second.read_text()
        found = [(line["step"], line["loss"]) for line in read_lines(as_path("gs://bucket/runs/run/metrics.jsonl"))]
    process = start(tmp_path, log)
    assert process.wait(150) == 0, log.read_text()
    assert found == [(line["step"], line["loss"]) for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
