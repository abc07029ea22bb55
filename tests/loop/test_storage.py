"""Tests of run folders in a bucket: real Orbax and tensorstore, and an in-memory bucket that they reach by HTTP."""

import json
import socket
import threading

import numpy as np
import pytest
from helpers import fake_bucket
from helpers.tiny import TINY_MODEL, command_line

import rampup
from rampup import load_config
from rampup.cli import main
from rampup.cli.plot import parse_inputs
from rampup.errors import ConfigError, DataError, MissingDependencyError
from rampup.lm.train import train
from rampup.loop import lock as run_lock
from rampup.loop import run_folder as run_folder_module
from rampup.loop.checkpoint import find_checkpoint
from rampup.loop.lock import LOCK_FILE, own_run
from rampup.loop.run_folder import StepLog, absolute_path, as_path, read_lines, read_lines_backwards, run_folder, write_whole
from rampup.loop.writers import TensorBoardWriter
from rampup.show.series import measured_throughput


@pytest.fixture(scope="module")
def bucket():
    """Serve the bucket, and return its objects."""
    with fake_bucket.serve() as objects:
        yield objects


@pytest.fixture
def folder(bucket, monkeypatch):
    """Return an empty folder in the bucket."""
    bucket.clear()
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.0)
    return as_path("gs://bucket/runs/demo")


def test_step_log_in_a_bucket_writes_only_its_last_part_again(folder, bucket, monkeypatch):
    """Lines are there after `sync`, complete parts stay as they are, readers see one file, a resume deletes later parts."""
    monkeypatch.setattr(run_folder_module, "TAIL_BYTES", 100)
    path, written = folder / "metrics.jsonl", []
    log = StepLog(path, keep_below=0)
    for step in range(60):
        before = dict(bucket)
        log.write({"step": step})
        assert len(list(read_lines(path))) == step  # a line is not uploaded at once
        log.sync() if step < 59 else log.close()
        assert len(list(read_lines(path))) == step + 1
        written += [name for name, value in bucket.items() if before.get(name) is not value]
    assert list(read_lines(folder / "eval.jsonl")) == []
    assert sorted(bucket)[:3] == [f"/bucket/runs/demo/metrics{part}.jsonl" for part in ("-001", "-002", "-003")]
    assert written == sorted(written, key=lambda name: (len(name), name))
    assert max(len(value.getvalue()) for value in bucket.values()) < 130
    assert [line["step"] for line in read_lines(path)] == list(range(60))
    assert [line["step"] for line in read_lines_backwards(path)] == list(range(60))[::-1]
    name = "/bucket/runs/demo/metrics-002.jsonl"
    (folder / "metrics-002.jsonl").write_bytes(b"x" + bucket[name].getvalue())
    events = []
    StepLog(path, keep_below=20, on_event=events.append).close()
    assert "metrics.jsonl is damaged: line 1" in events[0].problem
    assert len(list(read_lines(path))) == 19
    log = StepLog(path, keep_below=4)
    log.write({"step": 4})
    log.close()
    assert [line["step"] for line in read_lines(path)] == list(range(5))
    assert sorted(bucket) == ["/bucket/runs/demo/damaged_metrics.jsonl", "/bucket/runs/demo/metrics.jsonl"]


def test_config_and_tensorboard_are_written_to_a_bucket(folder, bucket):
    """config.yml and the event files arrive, after `flush`, with their content; other URLs and missing packages are refused."""
    assert str(folder / "metrics.jsonl") == "gs://bucket/runs/demo/metrics.jsonl"
    assert absolute_path(folder) == folder
    with pytest.raises(ConfigError, match="neither a folder nor a bucket"):
        as_path("ftp://host/runs")
    with pytest.raises(MissingDependencyError, match="pip install s3fs"):
        as_path("s3://bucket/runs")
    made = run_folder("gs://bucket/runs", "demo")
    assert str(made) == str(folder)
    assert str(run_folder("gs://bucket/runs", "")).startswith("gs://bucket/runs/run-")
    write_whole(made / "config.yml", b"steps: 3\n")
    assert bucket["/bucket/runs/demo/config.yml"].getvalue() == b"steps: 3\n"
    writer = TensorBoardWriter(made / "tensorboard")
    writer.write_scalars(1, {"loss": 2.0})
    writer.flush()
    (events,) = (value.getvalue() for name, value in bucket.items() if "/tensorboard/events" in name)
    assert b"loss" in events
    writer.close()


def test_one_process_owns_a_run_in_a_bucket(folder, monkeypatch):
    """A second owner is refused with the first one's host while that lives; the object of a dead one is taken over."""
    lock = folder / LOCK_FILE
    with own_run(folder):
        first = json.loads(lock.read_text())
        assert first["host"] == socket.gethostname()
        monkeypatch.setattr(run_lock, "_held", {})  # as in another process
        with pytest.raises(ConfigError, match="another process trains in gs://bucket/runs/demo"), own_run(folder):
            pass
    assert not lock.exists()
    # An owner on another host: alive while it writes, dead when it does not.
    foreign, stop = {**first, "host": "far", "token": "t"}, threading.Event()

    def live():
        for beat in range(10_000):
            lock.write_text(json.dumps({**foreign, "beat": beat}))
            if stop.wait(0.05):
                return

    thread = threading.Thread(target=live)
    thread.start()
    with pytest.raises(ConfigError, match="far, process"), own_run(folder):
        pass
    stop.set()
    thread.join()
    with own_run(folder):
        assert json.loads(lock.read_text())["host"] == socket.gethostname()
    assert not lock.exists()


def test_a_run_in_a_bucket_is_read_by_its_url(folder):
    """What reads the folder of a run takes a URL: configuration, metrics, throughput, measurements, checkpoints."""
    write_whole(folder / "config.yml", b"steps: 3\n")
    line = {"loss": 1.0, "global_batch_size": 2, "phase": 0, "tokens_per_second": 8.0}
    lines = [{"step": step, "consumed_samples": 2 * step + 2, **line} for step in range(3)]
    write_whole(folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode())
    inputs = parse_inputs([f"{folder}/"])
    assert inputs.read_config().steps == 3
    assert [run.name for run in inputs.read_runs()] == ["demo"]
    assert measured_throughput(str(folder)) == {2: 8}
    setting = f"base_output_directory={folder.parent}"
    assert parse_inputs(["base.yml", setting]).overrides == (setting,)
    with pytest.raises(DataError, match=f"no noise scale .* in {folder}"):
        rampup.design_ramp(load_config(folder / "config.yml"), str(folder), num_devices=2, train_tokens=1000)
    with pytest.raises(ConfigError, match=f"no checkpoint in {folder}"):
        rampup.load(str(folder))


@pytest.mark.slow
def test_a_run_in_a_bucket_resumes_exactly(folder, bucket, tmp_path):
    """A run in a bucket, stopped and resumed, has the losses of a local run; a checkpoint that is not complete is not used."""

    def run(base, steps):
        keys = {"per_device_batch_size": 1, "enable_rampup_batch_size": False, "dataset_type": "synthetic", "steps": steps}
        keys |= {"base_output_directory": base, "run_name": "demo", "checkpoint_period": 2, "learning_rate_schedule_steps": 5}
        return train(load_config("base", command_line(TINY_MODEL | keys)))

    summary = run("gs://bucket/runs", 3)
    assert summary.checkpoint == "gs://bucket/runs/demo/checkpoints/3"
    del bucket["/bucket/runs/demo/checkpoints/3/commit_success.txt"]
    assert find_checkpoint(folder / "checkpoints").step == 2
    assert main(["train", str(folder), "steps=5"]) == 0
    assert len(list(read_lines(folder / "metrics.jsonl"))) == 5
    run(tmp_path, 5)
    found, expected = ([line["loss"] for line in read_lines(base / "metrics.jsonl")] for base in (folder, tmp_path / "demo"))
    np.testing.assert_array_equal(found, expected)
    assert "/bucket/runs/demo/config.yml" in bucket
    assert not [name for name in bucket if name.endswith(LOCK_FILE)]
    assert rampup.load(str(folder)).step == 5
    measured = rampup.find_critical_batch_size(str(folder), multiples=(1, 2), tokens=1024)
    assert str(measured.folder).startswith("gs://bucket/runs/demo.critical/step-5-")
    assert "/bucket/runs/demo.critical" + str(measured.folder).rpartition(".critical")[2] + "/result.json" in bucket
