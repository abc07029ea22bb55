"""Tests of run folders in a bucket: a real server, reached by what reaches it in
production, through a proxy that fails.
"""

import json
import shutil
import socket
import subprocess
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from helpers import bucket, toy
from helpers.processes import wait_until
from helpers.tiny import TINY_MODEL, command_line

import rampup
from rampup import load_config
from rampup.cli import main
from rampup.cli.draw import parse_inputs
from rampup.contrib.lab.prediction import compare_prediction, write_prediction
from rampup.errors import ConfigError, DataError, StorageError
from rampup.lm.start import run_folder
from rampup.lm.train import train
from rampup.loop import lock as run_lock
from rampup.loop import run_folder as folders
from rampup.loop.checkpoint import Checkpoints, find_checkpoint
from rampup.loop.lock import LOCK_FILE, own_run
from rampup.loop.metrics import TensorBoardWriter


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Serve the bucket; return the proxy in front of it, and the folder with its
    objects.
    """
    root = tmp_path_factory.mktemp("buckets")
    with bucket.serve(root) as proxy:
        yield proxy, root / bucket.BUCKET


@pytest.fixture
def proxy(server):
    """Return the proxy, which passes everything on."""
    return server[0]


@pytest.fixture
def objects(server):
    """Return the folder with the objects of the bucket, which is empty."""
    for path in server[1].iterdir():
        shutil.rmtree(path)
    # Its client remembers listings of what it has not deleted itself.
    backend.fsspec_backend.fs("gs://bucket").invalidate_cache()
    return server[1]


@pytest.fixture
def folder(objects, monkeypatch):
    """Return an empty folder in the bucket."""
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 1.0)
    return folders.as_path("gs://bucket/runs/demo")


@pytest.fixture
def impatient(monkeypatch):
    """Let gcsfs try again at once, and rampup soon."""

    async def no_pause(seconds):
        pass

    monkeypatch.setattr("gcsfs.retry.asyncio", types.SimpleNamespace(sleep=no_pause))
    monkeypatch.setattr(folders, "RETRY_SECONDS", 0.05)


def test_an_absent_bucket_is_a_storage_error(folder, proxy, impatient):
    """What every method raises, whatever the bucket answers, is a StorageError; a
    missing object is none.
    """
    path = folder / "a.txt"
    path.write_text("hello")
    cases = {
        "write": lambda: path.write_bytes(b"x"),
        "read": path.read_text,
        "open": lambda: path.open("rb"),
        "exists": path.exists,
        "iterdir": lambda: list(folder.iterdir()),
        "glob": lambda: list(folder.glob("*")),
        "unlink": path.unlink,
    }
    for status in (503, 429, "cut"):
        with proxy.failing(status):
            for name, case in cases.items():
                with pytest.raises(StorageError, match="gs://bucket cannot be used"):
                    case()
                assert proxy.num_failed, name
    with pytest.raises(FileNotFoundError):
        (folder / "b.txt").read_text()
    assert path.read_text() == "hello"


def test_metrics_of_an_outage_are_uploaded_after_it(
    folder, proxy, impatient, monkeypatch
):
    """While the bucket is away, `write` returns and `sync` waits; then every line is
    there. Longer is one sentence.
    """
    log = folders.StepLog(folder / "metrics.jsonl", keep_below=0)
    log.write({"step": 0})
    log.sync()
    with proxy.failing(503):
        for step in range(1, 20):
            log.write({"step": step})
        threading.Timer(
            1.0, lambda: setattr(proxy, "fails", lambda *request: False)
        ).start()
        log.sync()
    assert [
        line["step"] for line in folders.read_lines(folder / "metrics.jsonl")
    ] == list(range(20))
    monkeypatch.setattr(folders, "PATIENCE_SECONDS", 0.2)
    with proxy.failing(503):
        log.write({"step": 20})
        with pytest.raises(
            StorageError,
            match=(
                r"metrics.jsonl cannot be written: gs://bucket cannot be used:"
                r" HttpError"
            ),
        ):
            log.sync()
    log.sync()
    log.close()
    assert [
        line["step"] for line in folders.read_lines(folder / "metrics.jsonl")
    ] == list(range(21))


@pytest.mark.slow
def test_a_checkpoint_in_an_outage_is_one_sentence(folder, proxy, impatient):
    """A checkpoint that cannot be written is a StorageError that says what is left, and
    the next start writes it.
    """
    state = toy.Arrays(jnp.arange(3.0))

    def save(checkpoints, step):
        checkpoints.save(step, state, {})
        checkpoints.wait()

    words = "the checkpoint of step {} could not be written"
    with Checkpoints(folder / "checkpoints") as checkpoints:
        save(checkpoints, 1)
        with (
            proxy.failing(503, lambda method, path: method != "GET"),
            pytest.raises(
                StorageError, match=f"{words.format(2)}: gs://bucket cannot be used"
            ),
        ):
            save(checkpoints, 2)
    with (
        Checkpoints(folder / "checkpoints") as checkpoints,
        proxy.failing(503),
        pytest.raises(StorageError, match=words.format(3)),
    ):
        save(checkpoints, 3)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        save(checkpoints, 4)
    assert find_checkpoint(folder / "checkpoints").step == 4


@pytest.mark.slow
def test_a_lease_outlives_an_outage(folder, proxy, impatient):
    """An owner that cannot renew its lease for a while renews it afterwards, and
    releases it at the end.
    """
    with own_run(folder):
        with proxy.failing(503):
            before = proxy.num_failed
            wait_until(lambda: proxy.num_failed >= before + 10)
        first = (folder / LOCK_FILE).read_text()
        wait_until(lambda: (folder / LOCK_FILE).read_text() != first)
    assert not (folder / LOCK_FILE).exists()


def contents(objects):
    """Return the objects of the bucket: name -> content."""
    return {
        str(path.relative_to(objects)): path.read_bytes()
        for path in objects.rglob("*")
        if path.is_file()
    }


def test_step_log_in_a_bucket(folder, objects):
    """Lines are there after `sync`, readers see one file, a resume removes lines and
    reports damaged ones.
    """
    path, events = folder / "metrics.jsonl", []
    log = folders.StepLog(path, keep_below=0)
    for step in range(4):
        log.write({"step": step})
        # A line is not uploaded at once.
        assert len(list(folders.read_lines(path))) == step
        log.sync()
        assert [line["step"] for line in folders.read_lines(path)] == list(
            range(step + 1)
        )
    log.close()
    assert list(folders.read_lines(folder / "eval.jsonl")) == []
    path.write_bytes(b"x" + path.read_bytes())
    folders.StepLog(path, keep_below=10, on_event=events.append).close()
    assert "metrics.jsonl is damaged: line 1" in events[0].problem
    log = folders.StepLog(path, keep_below=3)
    log.write({"step": 3})
    log.sync()
    log.close()
    assert [line["step"] for line in folders.read_lines(path)] == [1, 2, 3]
    assert sorted(contents(objects)) == ["runs/demo/metrics.jsonl"]


def test_lines_that_explain_an_error_are_uploaded_at_the_end(folder, monkeypatch):
    """`close` writes what no `sync` wrote, unless the bucket is away, or another process
    owns the run.
    """
    path = folder / "metrics.jsonl"
    with own_run(folder):
        log = folders.StepLog(path, keep_below=0)
        log.write({"step": 0})
        log.close()
        assert list(folders.read_lines(path)) == [{"step": 0}]
        log = folders.StepLog(path, keep_below=1)
        log.write({"step": 1})
        # Not by the lock file, which a renewal of this process may write meanwhile.
        other = {"host": "other", "pid": 1, "since": "2026-01-01"}
        held = {folders.absolute_path(folder): (0, lambda: other)}
        monkeypatch.setattr(run_lock, "_held", held)
        log.close()
        monkeypatch.undo()
        assert list(folders.read_lines(path)) == [{"step": 0}]


def test_close_does_not_wait_for_a_bucket(folder, proxy, impatient):
    """The error that ends the run stays the one that is told."""
    log = folders.StepLog(folder / "metrics.jsonl", keep_below=0)
    log.write({"step": 0})
    with proxy.failing(503):
        log.close()
        assert proxy.num_failed


def test_config_and_tensorboard_are_written_to_a_bucket(folder, objects):
    """config.yml and the event files arrive, after `flush`, with their content; other
    URLs are refused.
    """
    assert str(folder / "metrics.jsonl") == "gs://bucket/runs/demo/metrics.jsonl"
    assert folders.absolute_path(folder) == folder
    for url in ("ftp://host/runs", "s3://bucket/runs"):
        with pytest.raises(ConfigError, match="nor a bucket; buckets begin with gs://"):
            folders.as_path(url)
    made = run_folder("gs://bucket/runs", "demo")
    assert str(made) == str(folder)
    assert str(run_folder("gs://bucket/runs", "")).startswith("gs://bucket/runs/run-")
    folders.write_whole(made / "config.yml", b"steps: 3\n")
    assert contents(objects)["runs/demo/config.yml"] == b"steps: 3\n"
    writer = TensorBoardWriter(made / "tensorboard")
    writer.write_scalars(1, {"loss": 2.0})
    writer.flush()
    (events,) = (
        value
        for name, value in contents(objects).items()
        if "/tensorboard/events" in name
    )
    assert b"loss" in events
    writer.close()


def test_a_missing_package_for_buckets_is_named():
    """In a process that has not opened a bucket before."""
    program = (
        "import sys; sys.modules['gcsfs'] = None\n"
        "from rampup.loop.run_folder import as_path; as_path('gs://bucket/runs')"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "MissingDependencyError" in found.stderr
    assert "pip install 'rampup[gcs]'" in found.stderr


@pytest.mark.slow
def test_one_process_owns_a_run_in_a_bucket(folder, monkeypatch):
    """A second owner is refused with the first one's host while that lives; the object
    of a dead one is taken over.
    """
    lock = folder / LOCK_FILE
    with own_run(folder):
        first = json.loads(lock.read_text())
        assert first["host"] == socket.gethostname()
        monkeypatch.setattr(run_lock, "_held", {})  # as in another process
        with (
            pytest.raises(
                ConfigError, match="another process trains in gs://bucket/runs/demo"
            ),
            own_run(folder),
        ):
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
    """What reads the folder of a run takes a URL: configuration, metrics, throughput,
    measurements, checkpoints.
    """
    folders.write_whole(folder / "config.yml", b"steps: 3\n")
    line = {"loss": 1.0, "global_batch_size": 2, "phase": 0, "tokens_per_second": 8.0}
    lines = [
        {"step": step, "consumed_samples": 2 * step + 2, **line} for step in range(3)
    ]
    folders.write_whole(
        folder / "metrics.jsonl",
        "".join(json.dumps(line) + "\n" for line in lines).encode(),
    )
    inputs = parse_inputs([f"{folder}/"])
    config, _ = inputs.read_plan(types.SimpleNamespace(devices=None))
    assert config.steps == 3
    assert [run.name for run in inputs.read_runs()] == ["demo"]
    assert list(folders.read_lines(folder / "metrics.jsonl")) == lines
    one = {"name": "one", "settings": {}, "start_tokens": [0], "sizes": [2]}
    design = {"tokens_per_sample": 1, "candidates": [one | {"course": []}]}
    write_prediction(folder, config, design)
    found = compare_prediction(inputs.runs[0], config, inputs.read_runs()[0])
    assert (found.schedule, found.other_settings) == ("one", ())
    setting = f"base_output_directory={folder.parent}"
    assert parse_inputs(["base.yml", setting]).overrides == (setting,)
    with pytest.raises(DataError, match=f"no noise scale .* in {folder}"):
        rampup.contrib.lab.design_ramp(
            load_config(folder / "config.yml"),
            str(folder),
            num_devices=2,
            train_tokens=1000,
        )
    with pytest.raises(ConfigError, match=f"no checkpoint in {folder}"):
        rampup.load(str(folder))


@pytest.mark.slow
def test_a_run_in_a_bucket_resumes_exactly(folder, objects, tmp_path):
    """A run in a bucket, stopped and resumed, has the losses of a local run; a
    checkpoint that is not complete is not used.
    """

    def run(base, steps):
        keys = {
            "per_device_batch_size": 1,
            "enable_rampup_batch_size": False,
            "dataset_type": "synthetic",
            "steps": steps,
        }
        keys |= {
            "base_output_directory": base,
            "run_name": "demo",
            "checkpoint_period": 2,
            "learning_rate_schedule_steps": 5,
        }
        return train(load_config("base", command_line(TINY_MODEL | keys)))

    summary = run("gs://bucket/runs", 3)
    assert summary.checkpoint == "gs://bucket/runs/demo/checkpoints/3"
    (folder / "checkpoints/3/commit_success.txt").unlink()
    assert find_checkpoint(folder / "checkpoints").step == 2
    assert main(["train", str(folder), "steps=5"]) == 0
    assert len(list(folders.read_lines(folder / "metrics.jsonl"))) == 5
    run(tmp_path, 5)
    found, expected = (
        [line["loss"] for line in folders.read_lines(base / "metrics.jsonl")]
        for base in (folder, tmp_path / "demo")
    )
    np.testing.assert_array_equal(found, expected)
    assert "runs/demo/config.yml" in contents(objects)
    assert not [name for name in contents(objects) if name.endswith(LOCK_FILE)]
    assert rampup.load(str(folder)).step == 5
    measured = rampup.contrib.lab.find_critical_batch_size(
        str(folder), batches=(8, 16), tokens=1024
    )
    assert str(measured.file) == "gs://bucket/runs/demo.critical/step-5/result.json"
    assert measured.file.exists()
