"""Tests of rampup.cli, as a person types it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rampup.cli import main
from rampup.config.schema import KEYS

ROOT = Path(__file__).parent.parent
BASE = str(ROOT / "configs" / "base.yml")
TINY = [
    "per_device_batch_size_start=1",
    "per_device_batch_size_increment=1",
    "per_device_batch_size=3",
    "global_rampup_samples=20",
    "steps=40",
    "checkpoint_period=4",
    "eval_interval=-1",
    "max_target_length=16",
    "base_emb_dim=32",
    "base_num_decoder_layers=1",
    "base_mlp_dim=64",
]


def run_json(capsys, *arguments):
    """Run a command with --json in this process; return its exit code and its one object."""
    code = main([*arguments, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return code, json.loads(lines[0])


def test_plan_json(capsys):
    """The plan is printed in the names of the contract."""
    settings = ["per_device_batch_size=12", "per_device_batch_size_increment=2", "global_rampup_samples=500"]
    code, plan = run_json(capsys, "plan", BASE, *settings, "--devices", "4")
    assert code == 0
    assert (plan["num_devices"], plan["num_increments"], plan["samples_per_increment"]) == (4, 4, 125)
    assert [phase["global_batch_size"] for phase in plan["phases"]] == [16, 24, 32, 40, 48]
    assert plan["phases"][-1]["num_steps"] is None
    assert plan["eval"]["microbatch_size"] == 12


def test_settings_and_options_may_stand_in_any_order(capsys):
    """key=value before and after options is the same."""
    _, one = run_json(capsys, "plan", "--devices", "4", BASE, "steps=9", "log_period=3")
    _, two = run_json(capsys, "plan", BASE, "steps=9", "--devices=4", "log_period=3")
    assert one == two
    assert one["total_steps"] == 9


def test_plan_is_a_table(capsys):
    """Without --json the plan is a table for people."""
    assert main(["plan", BASE, "--devices", "4"]) == 0
    text = capsys.readouterr().out
    assert "4 devices, data parallel 4" in text
    assert "passes" in text


def test_a_machine_that_is_not_this_one_needs_no_jax():
    """Planning for 4,096 devices imports no jax."""
    code = f"import sys, rampup.cli as cli; cli.main(['plan', {BASE!r}, '--devices', '4096']); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_without_devices_the_plan_is_for_this_machine(capsys):
    """The devices that JAX sees here are counted."""
    _, plan = run_json(capsys, "plan", BASE)
    assert plan["num_devices"] == 8


BAD = {
    "bool": ["maybe", "2", "", "[true]"],
    "int": ["1.5", "x", "", "-7", "1e400", "[1]"],
    "float": ["x", "", "-1", "nan", "inf"],
    "size": ["x", "", "-2", "1/0", "nan", "inf"],
    "text": ["", " "],
    "name": ["a/b", "..", "a b", "\u00e9"],
}


@pytest.mark.parametrize("name", KEYS)
def test_a_bad_value_for_each_key_is_refused(name, capsys, tmp_path):
    """Whatever is wrong with any key: exit code 2, an error that names the key, no plan and no traceback."""
    key = KEYS[name]
    for value in ["no such choice", ""] if key.choices else BAD[key.kind]:
        assert main(["plan", BASE, f"{name}={value}", "--devices", "4", "--json"]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["error"]["key"] == name
        assert "Traceback" not in err
    (tmp_path / "bad.yml").write_text(f"base_config: {BASE}\n{name}: [1, 2]\n")
    assert main(["plan", str(tmp_path / "bad.yml"), "--devices", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "bad.yml:2: " in err
    assert name in err


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["plan", BASE, "stepz=3"], "stepz"),
        (["plan", BASE, "--devices", "0"], "num_devices"),
        (["plan", BASE, "--devices", "-3"], "num_devices"),
        (["plan", BASE, "--devices", "2.5"], None),
        (["plan", BASE, "--devices", "many"], None),
        (["plan", BASE, "--wrong"], None),
        (["plan", BASE, "steps"], None),
        (["plan"], None),
        (["plan", "nowhere.yml"], None),
        (["plam", BASE], None),
        (["rows", BASE], None),
        (["rows", BASE, "--step", "-1"], "step"),
        (["rows", BASE, "--step", "1000000"], "step"),
        (["train", BASE, "--fake-devices", "0"], "fake-devices"),
    ],
)
def test_wrong_usage_is_an_error_like_any_other(arguments, key, capsys):
    """Exit code 2, one JSON object with type, message, key and nearest, and a line on standard error."""
    assert main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert set(error) == {"type", "message", "key", "nearest"}
    assert error["key"] == key
    assert error["message"] in err


def test_help_and_version(capsys):
    """Help names every command, and each command's help its options."""
    assert main(["--version"]) == main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rampup ")
    assert all(name in text for name in ("plan", "train", "rows"))
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    assert "--fake-devices" in capsys.readouterr().out


def test_rows(capsys):
    """The rows of a step are named, as many as its batch, each with its source."""
    code, result = run_json(capsys, "rows", BASE, "--step", "140", "--devices", "2")
    assert code == 0
    assert result["global_batch_size"] == len(result["rows"])
    assert set(result["rows"][0]) == {"sample", "row", "source"}
    assert main(["rows", BASE, "--step", "140", "--devices", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(result["rows"])


def command(*arguments):
    """Return the command line of `rampup` on two fake devices, in a process of its own."""
    return [sys.executable, "-m", "rampup", "train", BASE, *TINY, "--fake-devices", "2", "--json", *arguments]


def finished(*arguments):
    """Run to the end; return the summary and what was on standard error."""
    result = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def losses(folder):
    """Return (step, samples, loss) of every line of metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["consumed_samples"], line["loss"]) for line in lines]


def start_and_see_alive(folder, *arguments, after_step):
    """Start a run and return its process once its metrics show the step."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > after_step):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.poll() is None
    return process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The summary and the losses of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    summary, log = finished(f"base_output_directory={folder}", "run_name=whole")
    return summary, losses(folder / "whole"), log


def test_train_json(uninterrupted):
    """Standard output is one object in the contract's names; the plan and the phases are on standard error."""
    summary, lines, log = uninterrupted
    names = [
        "steps",
        "consumed_samples",
        "first_loss",
        "final_loss",
        "num_compilations",
        "ramp_steps",
        "tokens_per_second",
        "checkpoint",
    ]
    assert list(summary) == names
    assert (summary["steps"], summary["num_compilations"]) == (40, 1)
    assert summary["final_loss"] == lines[-1][2]
    assert summary["consumed_samples"] == lines[-1][1]
    assert Path(summary["checkpoint"]).is_dir()
    assert "phase 2 from step" in log


def test_killed_and_started_again(uninterrupted, tmp_path):
    """SIGKILL to a process that is seen training; started again, losses and samples are those of the undisturbed run."""
    where = [f"base_output_directory={tmp_path}", "run_name=killed"]
    for after_step in (6, 17):
        process = start_and_see_alive(tmp_path / "killed", *where, after_step=after_step)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    summary, log = finished(*where)
    assert "resumed after step" in log
    assert losses(tmp_path / "killed") == uninterrupted[1]
    assert summary["final_loss"] == uninterrupted[0]["final_loss"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_a_signal(uninterrupted, tmp_path, number):
    """Ctrl-C and SIGTERM: exit code 130, a checkpoint of that very step, and the rest as if nothing had happened."""
    where = [f"base_output_directory={tmp_path}", "run_name=stopped"]
    process = start_and_see_alive(tmp_path / "stopped", *where, after_step=5)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    stopped = json.loads(out)
    assert Path(stopped["checkpoint"]).name == str(stopped["steps"])
    finished(*where)
    assert losses(tmp_path / "stopped") == uninterrupted[1]


def test_a_finished_run_says_so(uninterrupted):
    """Started again, a finished run exits 0 at once and prints its summary."""
    folder = Path(uninterrupted[0]["checkpoint"]).parent.parent
    summary, log = finished(f"base_output_directory={folder.parent}", f"run_name={folder.name}")
    assert "is finished: nothing to do" in log
    assert summary == uninterrupted[0] | {"num_compilations": 0, "tokens_per_second": None}


def test_a_failed_run_exits_1_with_the_traceback(tmp_path):
    """An error that is not the user's: exit code 1, the traceback on standard error, the error as JSON."""
    code = (
        "import sys, rampup.cli as cli\n"
        "def fail(*_): raise RuntimeError('boom')\n"
        "cli.COMMANDS['plan'] = cli.Command(fail, 'x', cli._plan_options)\n"
        f"sys.exit(cli.main(['plan', {BASE!r}, '--json']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert json.loads(result.stdout)["error"]["type"] == "RuntimeError"


def test_a_closed_pipe_is_no_traceback():
    """`rampup plan ... | head -1` ends quietly."""
    result = subprocess.run(
        f"{sys.executable} -m rampup plan {ROOT}/configs/bloom_176b.yml | head -1", shell=True, capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr
