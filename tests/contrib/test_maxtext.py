"""MaxText's pre-training through a ramp: its rules and its loader here, and whole runs
of MaxText where it is installed.
"""

import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import grain
import jax
import numpy as np
import pytest
from helpers.processes import free_port
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rampup.contrib import maxtext
from rampup.contrib.maxtext import (
    ACCUMULATED,
    NEEDED,
    RampLoader,
    check_record,
    choose_design,
    problems,
)
from rampup.errors import ConfigError, MissingDependencyError, ResumeMismatchError
from rampup.plan.ramp_keys import RampupBatchManager

HAS_MAXTEXT = importlib.util.find_spec("maxtext") is not None


def sizes(start, increment, end):
    """Return the keys of a linear ramp, in samples per device."""
    keys = (
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "per_device_batch_size",
    )
    return dict(zip(keys, (start, increment, end), strict=True))


RAMP = {
    "gradient_accumulation_steps": 4,
    "global_rampup_samples": 72,
    **sizes(0.5, 0.5, 2),
}
OWN = RAMP | {
    "gradient_accumulation_steps": 1,
    **sizes(2, 2, 8),
}  # in MaxText's own keys
BATCHES = [2] * 12 + [4] * 6 + [6] * 4 + [8] * 4


def config_of(**keys):
    """Return what the adapter reads of MaxText's configuration, for a ramp of 2, 4, 6
    and 8 samples on one device.
    """
    needed = {key: value for key, (value, _) in NEEDED.items()}
    others = {
        "num_target_devices": 1,
        "global_batch_size_to_load": 8,
        "global_batch_size_to_train_on": 8,
    }
    others |= {
        "enable_rampup_batch_size": True,
        "enable_checkpointing": True,
        "steps": 26,
    }
    return SimpleNamespace(**{**needed, **ACCUMULATED, **RAMP, **others, **keys})


@pytest.mark.skipif(HAS_MAXTEXT, reason="MaxText is installed")
def test_a_missing_package_is_named():
    """Without MaxText, the adapter names the package and its version."""
    with pytest.raises(
        MissingDependencyError,
        match=r"the package maxtext is not installed; install maxtext==0\.2\.5",
    ):
        maxtext.main(["train.py", "base.yml"])


def test_a_moved_name_is_an_error(tmp_path, monkeypatch):
    """A MaxText without a name that the adapter replaces is refused with that name and
    the version that has it.
    """
    for module in ("maxtext", "maxtext/trainers", "maxtext/trainers/pre_train"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("__version__ = '0.9'\n")
    (tmp_path / "maxtext/trainers/pre_train/train.py").write_text(
        "def main(argv): print('trained')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "maxtext.trainers.pre_train.train.gradient_accumulation_loss_and_grad"
    with (
        mock.patch.dict(sys.modules),
        pytest.raises(
            ConfigError, match=rf"^{name}\(.*0\.9, or has changed.* maxtext==0\.2\.5$"
        ),
    ):
        maxtext.install()


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        (
            {"gradient_accumulation_steps": 1, **sizes(2, 2, 8)},
            ["gradient_accumulation_steps=1", "2 or more"],
        ),
        (
            sizes(0.5, 1.25, 1.75),
            [
                "gradient_accumulation_steps=4",
                "batch of 7 samples",
                "set gradient_accumulation_steps=7",
            ],
        ),
        ({"enable_diloco": True}, ["enable_diloco=True", "set enable_diloco=false"]),
        (
            {"ici_pipeline_parallelism": 4},
            ["ici_pipeline_parallelism=4", "microbatches of its own"],
        ),
        ({"te_moe_block": True}, ["te_moe_block=True"]),
        ({"num_experts": 8}, []),
        ({"num_experts": 8, **sizes(0.75, 1.25, 2)}, ["the ramp has 3"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_ramp_excludes(keys, parts):
    """Keys that exclude a ramp in one executable are refused with their value; experts
    only with incomplete microbatches.
    """
    config = config_of(**keys)
    found = [
        str(problem) for problem in problems(config, RampupBatchManager(config).ramp)
    ]
    assert len(found) == bool(parts)
    assert all(part in found[0] for part in parts)


def test_the_design_follows_mesh_and_keys():
    """One reduction where the data axis has several devices and no key needs MaxText's
    accumulation, else its own loop.
    """
    two, one = (
        SimpleNamespace(shape={"data": size, "fsdp": 2, "tensor": 1}) for size in (2, 1)
    )
    assert choose_design(config_of(), two)[0] == "accumulate"
    assert choose_design(config_of(), one)[0] == "loop"
    assert (
        choose_design(config_of(), SimpleNamespace(shape={"data": 2, "tensor": 2}))[0]
        == "loop"
    )
    assert choose_design(config_of(attention="flash"), two) == (
        "loop",
        "attention=flash needs MaxText's own accumulation",
    )


def test_checkpoints_of_another_ramp_are_refused(tmp_path):
    """A run resumes with its own ramp only, because the rows that it used follow from
    it.
    """
    config = config_of(checkpoint_dir=f"{tmp_path}/checkpoints")
    with pytest.raises(ResumeMismatchError, match="no ramp of rampup beside them"):
        check_record(config, RampupBatchManager(config, 3))
    check_record(config, RampupBatchManager(config))
    check_record(config, RampupBatchManager(config, 3))
    other = config_of(checkpoint_dir=config.checkpoint_dir, global_rampup_samples=36)
    with pytest.raises(
        ResumeMismatchError,
        match="up to step 3, of a run that loads 8 rows at once with another ramp",
    ):
        check_record(other, RampupBatchManager(other, 3))


def loaded_batches(config, step=0, state=None):
    """Yield the numbers of the rows in each microbatch of each batch, with the Grain
    state that a checkpoint then has.
    """
    sharding = NamedSharding(Mesh(jax.devices()[:1], "x"), PartitionSpec())
    rows = grain.MapDataset.range(1, 400).map(
        lambda n: {"targets_segmentation": np.full(3, n, np.int32)}
    )
    source = iter(rows.to_iter_dataset().batch(config.global_batch_size_to_load))
    if state is not None:
        source.set_state(state)
    iterator = SimpleNamespace(local_iterator=source)
    own = SimpleNamespace(
        load_next_batch_pre_sharding=functools.partial(next, source),
        data_iterator=iterator,
        input_data_shardings=sharding,
    )
    loader = RampLoader(own, config, RampupBatchManager(config, step))
    K = config.gradient_accumulation_steps
    while True:
        numbers = np.asarray(loader.load_next_batch()["targets_segmentation"])[
            :, 0
        ].reshape(-1, K)
        yield [numbers[:, j].tolist() for j in range(K)], source.get_state()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {**sizes(0.75, 0.25, 2), "global_rampup_samples": 61},
        {"global_batch_size_to_load": 12},
    ],
    ids=["aligned", "odd", "more rows loaded than trained on"],
)
def test_every_row_once_also_after_a_resume(keys):
    """Batches have the plan's rows in order, in microbatches filled one after the
    other, and go on from any saved state.
    """
    config = config_of(**keys)
    manager = RampupBatchManager(config)
    loaded = config.global_batch_size_to_load
    numbers = (
        n for n in range(1, 400) if (n - 1) % loaded < 8
    )  # the first 8 of the rows loaded at once
    batches = [
        batch for batch, _ in zip(loaded_batches(config), range(30), strict=False)
    ]
    for batch, _ in batches:
        rows = [next(numbers) for _ in range(manager.global_batch_size_current)]
        manager.update()
        # Beyond the rows to train on, a loaded batch may have others, which MaxText
        # cuts off.
        found = [microbatch[:2] for microbatch in batch]
        if len(rows) < 8:
            assert found == [[*rows, *[0] * 8][i : i + 2] for i in range(0, 8, 2)]
        assert sorted(n for microbatch in found for n in microbatch if n) == rows
    for step in (1, 5, 13, 20, 25):
        resumed = loaded_batches(config, step, batches[step - 1][1])
        assert [next(resumed)[0] for _ in range(4)] == [
            batch for batch, _ in batches[step : step + 4]
        ]


# ---- whole runs of MaxText, each in a process of its own
needs_maxtext = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_MAXTEXT, reason="needs the package maxtext"),
]
MODEL = shlex.split("""
    run_name=run hardware=cpu skip_jax_distributed_system=true enable_goodput_recording=false monitor_goodput=false
    enable_checkpoint_cloud_logger=false jax_cache_dir= log_period=1 base_emb_dim=8 base_num_query_heads=4 base_num_kv_heads=4
    base_mlp_dim=32 base_num_decoder_layers=2 head_dim=16 vocab_size=256 max_target_length=32 attention=dot_product
    dtype=float32 weight_dtype=float32 steps=26 learning_rate_schedule_steps=26 enable_rampup_batch_size=true
    tokenize_train_data=false packing=false num_epoch=10 grain_worker_count=0 enable_checkpointing=false
""")
CHECKPOINTS = {
    "enable_checkpointing": "true",
    "checkpoint_period": 5,
    "async_checkpointing": "false",
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "megablox": "false",
}
EXPERTS |= {
    "sparse_matmul": "false",
    "capacity_factor": -1,
    "load_balance_loss_weight": 0.01,
}
# Runs MaxText, with the adapter or without, as one of several processes or alone, and
# dies before a step.
PROGRAM = """
import os, signal, sys
import jax
if address := os.environ.get("TEST_ADDRESS"):
    jax.distributed.initialize(address, 2, int(os.environ["TEST_PROCESS"]))
from maxtext.trainers.pre_train import train
main = train.main
if os.environ["TEST_OWN"] == "False":
    from rampup.contrib.maxtext import main
iteration = train.training_loop_iteration
def dies(state, variables, constants):
    if variables["step"] == int(os.environ["TEST_DIES_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return iteration(state, variables, constants)
train.training_loop_iteration = dies
main(sys.argv)
"""
ROWS = """
import sys
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from maxtext.input_pipeline.protos import example_pb2
writer, rng = ArrayRecordWriter(sys.argv[1], "group_size:1"), np.random.default_rng(0)
for length in rng.integers(4, 33, 400):
    example = example_pb2.Example()
    example.features.feature["text"].int64_list.value.extend(rng.integers(1, 255, length).tolist())
    writer.write(example.SerializeToString())
writer.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with an ArrayRecord file of rows with 4 to 32 tokens."""
    folder = tmp_path_factory.mktemp("maxtext")
    environ = os.environ | {"DECOUPLE_GCLOUD": "TRUE"}
    subprocess.run(
        [sys.executable, "-c", ROWS, folder / "rows.array_record"],
        env=environ,
        check=True,
        capture_output=True,
    )
    return folder


def train(folder, name, keys, *, own=False, devices=1, dies_at=-1, processes=1):
    """Run MaxText, and return the metrics of each step, the number of compilations of
    its step, and what it printed.
    """
    package = importlib.util.find_spec("maxtext").submodule_search_locations[0]
    address = f"127.0.0.1:{free_port()}"
    files = {
        "base_output_directory": folder / name,
        "metrics_file": folder / f"{name}.jsonl",
        "grain_train_files": folder / "rows.array_record",
        "tokenizer_path": f"{package}/assets/tokenizers/tokenizer.llama2",
    }
    settings = [
        f"{key}={value}"
        for key, value in {"dataset_type": "grain", **files, **keys}.items()
    ]
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        f"{package}/configs/base.yml",
        *MODEL,
        *settings,
    ]
    environ = os.environ | {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "JAX_LOG_COMPILES": "1",
    }
    environ |= {
        "JAX_NUM_CPU_DEVICES": str(devices),
        "TEST_OWN": str(own),
        "TEST_DIES_AT": str(dies_at),
    }
    outputs = [folder / f"{name}.{process}.log" for process in range(processes)]
    files["metrics_file"].unlink(missing_ok=True)
    started = []
    for process, output in enumerate(outputs):
        if processes > 1:
            environ |= {"TEST_ADDRESS": address, "TEST_PROCESS": str(process)}
        with output.open("w") as log:
            started.append(
                subprocess.Popen(
                    command, env=environ, stdout=log, stderr=subprocess.STDOUT
                )
            )
    codes = [process.wait(timeout=900) for process in started]
    printed = outputs[0].read_text()
    assert codes == [0 if dies_at < 0 else -signal.SIGKILL] * processes, printed[-3000:]
    metrics = {
        int(line["step"]): line
        for line in map(json.loads, files["metrics_file"].read_text().splitlines())
    }
    return (
        metrics,
        printed.count("Finished XLA compilation of jit(train_step)"),
        printed,
    )


def losses(metrics):
    """Return the loss of each step."""
    return {step: line["learning/loss"] for step, line in metrics.items()}


def check_equal(
    metrics, expected, tolerance=1e-6, names=("learning/loss", "learning/raw_grad_norm")
):
    """Compare the tokens of every step, and its loss and gradient norm."""
    assert set(metrics) == set(expected)
    for step, line in metrics.items():
        assert (
            line["learning/total_weights"] == expected[step]["learning/total_weights"]
        )
        for name in names:
            assert line[name] == pytest.approx(expected[step][name], rel=tolerance), (
                step,
                name,
            )


@pytest.fixture(scope="module")
def maxtexts(folder):
    """Return the metrics of MaxText's own ramp, without accumulation, which ends with
    whole loaded batches.
    """
    metrics, compilations, _ = train(folder, "maxtexts", OWN, own=True)
    assert compilations == 4
    return metrics


@pytest.fixture(scope="module")
def ramp(folder):
    """Return the metrics of the same ramp in one executable."""
    metrics, compilations, printed = train(folder, "ramp", RAMP)
    assert compilations == 1
    assert "design loop: the data axis has one device" in printed
    return metrics


class TestRuns:
    """Runs of MaxText."""

    pytestmark = needs_maxtext

    def test_losses_are_maxtexts(self, maxtexts, ramp):
        """A ramp of four sizes, the first of half a sample per device, has MaxText's
        losses with one compilation.
        """
        check_equal(ramp, maxtexts)

    def test_killed_and_resumed(self, folder, ramp):
        """A run killed in the middle of the ramp and of a loaded batch goes on with the
        same losses, bit for bit.
        """
        keys = RAMP | CHECKPOINTS | {"grain_worker_count": 1}
        before, _, _ = train(folder, "killed", keys, dies_at=13)
        after, compilations, _ = train(folder, "killed", keys)
        assert compilations == 1
        assert min(after) == 11
        assert {**losses(before), **losses(after)} == losses(ramp)

    @pytest.mark.parametrize("design", ["loop", "accumulate"])
    def test_both_designs_on_a_mesh(self, folder, maxtexts, design):
        """On data 2 and fsdp 2, with batches that do not fill their microbatches, both
        designs have MaxText's losses.
        """
        mesh = {
            "ici_data_parallelism": 2,
            "ici_fsdp_parallelism": 2,
            "gradient_accumulation_steps": 2,
        }
        mesh |= sizes(0.25, 0.25, 1) | {
            "shard_mode": "explicit" if design == "loop" else "auto"
        }
        metrics, compilations, printed = train(folder, design, RAMP | mesh, devices=4)
        assert compilations == 1
        assert f"design {design}: " in printed
        check_equal(metrics, maxtexts)

    def test_experts(self, folder):
        """With experts, losses are MaxText's, although each microbatch has a load
        balance of its own.
        """
        expected, _, _ = train(folder, "experts-own", OWN | EXPERTS, own=True)
        metrics, compilations, _ = train(folder, "experts", RAMP | EXPERTS)
        assert compilations == 1
        check_equal(metrics, expected, 1e-5, ("learning/loss", "learning/moe_lb_loss"))

    def test_two_processes(self, folder):
        """Two processes, each with its part of the rows, have MaxText's losses, also
        killed and resumed.
        """
        mesh = {"ici_data_parallelism": 2}
        own = OWN | mesh | sizes(1, 1, 4)
        expected, _, _ = train(folder, "two-own", own, own=True, processes=2)
        keys = RAMP | mesh | sizes(0.25, 0.25, 1) | CHECKPOINTS
        before, compilations, printed = train(
            folder, "two", keys, processes=2, dies_at=13
        )
        assert compilations == 1
        assert "design accumulate: " in printed
        after, _, _ = train(folder, "two", keys, processes=2)
        check_equal({**before, **after}, expected)

    def test_the_guides_command(self, folder):
        """The command of the guide runs, and prints the plan that the guide shows."""
        page = (
            Path(__file__).parents[2] / "docs" / "guides" / "in_maxtext.md"
        ).read_text()
        (command,) = re.findall(r"^```bash\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        environ = os.environ | {
            "PATH": os.pathsep.join(
                [os.path.dirname(sys.executable), os.environ["PATH"]]
            )
        }
        result = subprocess.run(
            ["bash", "-ec", command],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        (plan,) = re.findall(
            r"^from step.*?reduction to save\n", page, re.DOTALL | re.MULTILINE
        )
        assert plan in result.stdout
        assert "completed step: 25" in result.stderr


class TestMaxTextsOwnRamp:
    """What the page that compares systems says of MaxText's own ramp."""

    pytestmark = needs_maxtext

    def test_other_sizes_than_configured(self, folder, maxtexts):
        """With accumulation, batches lack its factor: 16 samples are 4, and half a
        sample per device is none.
        """
        metrics, _, _ = train(
            folder, "few", RAMP | sizes(4, 4, 8) | {"steps": 1}, own=True
        )
        assert metrics[0]["learning/total_weights"] == sum(
            maxtexts[step]["learning/total_weights"] for step in (0, 1)
        )
        metrics, _, _ = train(folder, "none", RAMP | {"steps": 4}, own=True)
        assert [line["learning/total_weights"] for line in metrics.values()] == [0] * 4
        assert set(losses(metrics).values()) == {0}

    def test_other_rows_after_a_resume(self, folder, maxtexts):
        """A run of MaxText's own ramp that is killed and resumed has other losses than
        one that is not.
        """
        keys = OWN | CHECKPOINTS
        train(folder, "own-killed", keys, own=True, dies_at=13)
        after, _, _ = train(folder, "own-killed", keys, own=True)
        expected = losses(maxtexts)
        assert any(
            abs(loss - expected[step]) > 1e-3 for step, loss in losses(after).items()
        )
