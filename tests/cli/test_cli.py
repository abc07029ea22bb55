"""Tests of rampup.cli, as a person types it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_json
from helpers.runs import metrics_of
from helpers.tiny import TINY, command_line

import rampup
from rampup.cli import ALL, COMMANDS, GONE, OPTIONAL, main
from rampup.cli.run import JSON_KEYS, read_run_config

ROOT = Path(__file__).parent.parent.parent
BASE = str(ROOT / "configs" / "base.yml")
RL = str(ROOT / "configs" / "rl.yml")
GPT3 = str(ROOT / "configs" / "gpt3_175b.yml")
PALM = str(ROOT / "configs" / "palm_540b.yml")
TRAINED = command_line(
    TINY | {"global_rampup_samples": 20, "steps": 40, "checkpoint_period": 8}
)

# Commands, each with the key that its error names.
REFUSED = {
    "plan BASE stepz=3": "stepz",
    "plan BASE --devices 0": "num_devices",
    "plan BASE --wrong": None,
    "plan": None,
    "plan BASE --budget 1B": None,
    "plan BASE --diff BASE": None,
    "plan RL --devices 7": "batch_size",
    "plan BASE --topology v5e:4x4 --devices 16": "devices",
    "plan BASE --topology v5e:4x4 num_devices=3": "num_devices",
    "plan BASE --rows": None,
    "plan BASE --rows 1000000": "step",
    "plan BASE --timetable": "ici_pipeline_parallelism",
    "plan BASE --timetable nice ici_pipeline_parallelism=4 per_device_batch_size=8 --devices 8": (
        "schedule"
    ),
    "plan BASE --timetable --rows 0": "timetable",
    "plan RL --rows 0": "rows",
    "plan RL --timetable": "timetable",
    "timetable --stages=2 --microbatches=8": None,
    "rows BASE --step 3": None,
    "fix BASE": None,
    "train BASE --fake-devices 0": "fake-devices",
    "train BASE base_output_directory=out ici_pipeline_parallelism=4 num_pipeline_microbatches=6": (
        "num_pipeline_microbatches"
    ),
    "train FOLDER": None,
    "train runs/none": None,
    "design FOLDER": None,
    "explain stepz": "stepz",
    "suggest --params 6B": None,
    "suggest --params 6B --system trlx": None,
    "suggest --params 7B --train-tokens 1B --memory-gib 8": None,
    "plot": None,
    "plot steps=3": None,
    "plot a.yml b.yml": None,
    "plot FOLDER a.yml": None,
    "plot FOLDER steps=3": "steps",
    "plot FOLDER": "run",
    "plot FOLDER FOLDER --kind batch": None,
    "plot RL": None,
    "plot BASE -o x.gif": "output",
    "plot BASE --kind nice": None,
    "plot BASE --kind timetable": "ici_pipeline_parallelism",
    "report FOLDER -o x.html": None,
    "report BASE --from maxtext -o x.html": None,
    "tune BASE": "memory-gib",  # a CPU has no limit of its own
    "tune BASE --memory-gib 0": "memory-gib",
    "tune BASE --memory-gib 1 --devices 99": "devices",
    "tune BASE --memory-gib 1 gradient_accumulation=multi_steps": (
        "gradient_accumulation"
    ),
    "tune BASE --memory-gib 1 --devices 1 ici_context_parallelism=2": "num_devices",
    "plan RL --fix": None,
    "plan BASE banana=1 --fix": "banana",
}


@pytest.mark.parametrize(("words", "key"), REFUSED.items())
def test_wrong_usage_is_a_json_error(words, key, capsys, tmp_path, monkeypatch):
    """Exit code 2, one JSON object with type, message, key and nearest, a line on
    standard error, and no file.
    """
    monkeypatch.chdir(tmp_path)
    names = {"BASE": BASE, "RL": RL, "FOLDER": str(ROOT / "tests")}
    assert main([*(names.get(word, word) for word in words.split()), "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert set(error) == {"type", "message", "key", "nearest"}
    assert error["key"] == key
    assert error["message"] in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["", "6B 300B", "--train_tokens 300B", "a.yml"])
def test_suggest_names_what_is_missing(words, capsys):
    """Without arguments, and with wrong ones."""
    assert main(["suggest", *words.split()]) == 2
    assert "arguments are required: --train-tokens" in capsys.readouterr().err


@pytest.mark.core
def test_help_and_version(capsys):
    """Help names every command once, what is optional apart, and each command's help its
    options.
    """
    assert main(["--version"]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("rampup ")
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines if re.match(r"  \w|\w+:$", line)]
    assert listed == ["commands:", *COMMANDS, "optional:", *OPTIONAL]
    assert len(ALL) == 12
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == lines[1:]
    for name in ALL:
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_a_command_that_went_names_what_is_there_instead(capsys):
    """The error says with which option `plan` does it."""
    for name, instead in GONE.items():
        assert main([name, BASE]) == 2
        assert f"rampup {name} is now `{instead}`" in capsys.readouterr().err


def test_rows_names_every_row(capsys):
    """The output has one row per sample of the batch, each with its source, of step 0
    as well.
    """
    for step in ("0", "140"):
        arguments = ["plan", BASE, "--rows", step, "--devices", "2"]
        code, result = run_json(capsys, *arguments)
        assert (code, result["step"]) == (0, int(step))
        assert result["global_batch_size"] == len(result["rows"])
        assert set(result["rows"][0]) == {"sample", "row", "source"}
        assert main(arguments) == 0
        assert len(capsys.readouterr().out.splitlines()) == len(result["rows"])


# On two fake devices, in a process of its own.
TRAIN = [
    sys.executable,
    "-m",
    "rampup",
    "train",
    BASE,
    *TRAINED,
    "--fake-devices",
    "2",
    "--json",
]


def finished(*arguments):
    """Run to the end; return the summary and what was on standard error."""
    result = subprocess.run(
        [*TRAIN, *arguments], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The summary, the metrics and the messages of a run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("runs")
    summary, log = finished(f"base_output_directory={folder}", "run_name=whole")
    return summary, metrics_of(folder / "whole"), log


def test_train_json(uninterrupted):
    """Standard output is one object in the contract's names; the plan and the phases
    are on standard error.
    """
    summary, lines, log = uninterrupted
    assert tuple(summary) == JSON_KEYS
    assert (summary["steps"], summary["num_compilations"]) == (40, 1)
    assert (summary["final_loss"], summary["consumed_samples"]) == (
        lines[-1]["loss"],
        lines[-1]["consumed_samples"],
    )
    assert Path(summary["checkpoint"]).is_dir()
    assert "phase 2 from step" in log


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_train_stops_on_a_signal(uninterrupted, tmp_path, number):
    """Ctrl-C and SIGTERM: exit code 130, a checkpoint of that very step, and an exact
    resume.
    """
    where = [f"base_output_directory={tmp_path}", "run_name=stopped"]
    process = subprocess.Popen(
        [*TRAIN, *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = tmp_path / "stopped" / "metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    stopped = json.loads(out)
    assert Path(stopped["checkpoint"]).name == str(stopped["steps"])
    assert f"stops at step {stopped['steps']}\n" in err
    finished(*where)
    assert metrics_of(tmp_path / "stopped") == uninterrupted[1]


def test_a_run_folder_keeps_the_folder_that_it_names_or_gets_an_absolute_one(
    tmp_path, monkeypatch
):
    """From where `base_output_directory` finds the run it stays as it is; from
    elsewhere it is not relative to that place.
    """
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "runs" / "a" / "config.yml").write_text(
        "base_config: base.yml\nbase_output_directory: runs\nrun_name: old\n"
    )
    absolute = str(tmp_path / "runs")
    for start, folder, wanted in (
        (".", "runs/a", "runs"),
        ("other", "../runs/a", absolute),
        ("runs/a", ".", absolute),
    ):
        monkeypatch.chdir(tmp_path / start)
        config = read_run_config(
            SimpleNamespace(config=folder, overrides=[]), rampup.load_config
        )
        assert (config.base_output_directory, config.run_name) == (wanted, "a")


def test_train_on_a_finished_run_does_nothing(uninterrupted):
    """Started again, a finished run exits 0 at once and prints its summary."""
    folder = Path(uninterrupted[0]["checkpoint"]).parent.parent
    settings = (folder / "config.yml").read_bytes()
    summary, log = finished(
        f"base_output_directory={folder.parent}",
        f"run_name={folder.name}",
        "log_period=7",
    )
    assert "is finished: nothing to do; a larger steps trains longer" in log
    assert (folder / "config.yml").read_bytes() == settings
    changed = {
        "num_compilations": 0,
        "tokens_per_second": None,
        "seconds": summary["seconds"],
    }
    assert summary == uninterrupted[0] | changed


def test_failure_exits_1_with_the_traceback(capsys, monkeypatch):
    """An unexpected error: exit code 1, the traceback on standard error, the error as
    JSON.
    """
    monkeypatch.setattr("rampup.cli.plan.plan", lambda *_: 1 / 0)
    assert main(["plan", BASE, "--json"]) == 1
    out, err = capsys.readouterr()
    assert "Traceback" in err
    assert json.loads(out)["error"]["type"] == "ZeroDivisionError"


def test_closed_pipe_exits_141():
    """`rampup plan ... | head -1` ends without a message, like a program that SIGPIPE
    stops: 128 + 13.
    """
    script = (
        f"{sys.executable} -m rampup plan {ROOT}/configs/bloom_176b.yml --all | head"
        " -1; echo ${PIPESTATUS[0]}"
    )
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.splitlines()[1] in (
        "141",
        "0",
    )  # 0 if everything fit into the pipe before it was closed


def test_timetable(capsys):
    """The object is the contract's of the last phase's pipeline, with the bubble of
    every phase; another schedule has the same shape.
    """
    plan = ["plan", BASE, "--devices", "8"]
    plan += ["ici_pipeline_parallelism=4", "per_device_batch_size=8"]
    _, phases = run_json(capsys, *plan)
    code, table = run_json(capsys, *plan, "--timetable")
    last = phases["phases"][-1]
    number = 4 * last["num_pipeline_microbatches"] * 2
    assert (code, table["schedule"], len(table["table"])) == (0, "1f1b", number)
    assert table["bubble_fraction"] == pytest.approx(last["bubble_fraction"])
    rows = [
        (row["start_step"], row["num_pipeline_microbatches"])
        for row in phases["phases"]
    ]
    assert rows == [
        (row["start_step"], row["num_pipeline_microbatches"]) for row in table["phases"]
    ]
    _, other = run_json(capsys, *plan, "--timetable", "gpipe")
    assert (other["schedule"], len(other["table"])) == ("gpipe", number)
    assert other["peak_live_microbatches"] > table["peak_live_microbatches"]
    _, error = run_json(capsys, "plan", BASE, "--timetable", "steps=9")
    assert "give settings before --timetable" in error["error"]["message"]
    assert main([*plan, "--timetable"]) == 0
    printed = capsys.readouterr().out
    assert "stage 3 .. .. .. F0 B0 == F1 B1 ==" in " ".join(printed.split())
    assert "one pass of every phase:" in printed


def test_plan_of_a_rollout(capsys, monkeypatch):
    """A rollout is planned like a ramp: a table for people, one object for programs,
    settings from everywhere.
    """
    monkeypatch.setenv("RAMPUP_RL_NUM_ITERATIONS", "3")
    code, plan = run_json(capsys, "plan", RL, "num_prompts=100", "--devices", "4")
    assert code == 0
    names = (
        "samples_per_step",
        "optimizer_steps",
        "weight_syncs",
        "accumulation_steps",
    )
    assert [plan[name] for name in names] == [256, 6, 3, 2]
    assert any("4 prompts" in note for note in plan["notes"])
    assert main(["plan", RL, "num_devices=4"]) == 0
    assert "32 prompts * 8 responses = 256 samples" in capsys.readouterr().out


def test_check_takes_devices(capsys, tmp_path):
    """`--devices N` is the setting of the system for them, with a note on what keeps
    the update; a system without such a setting refuses it.
    """
    file = tmp_path / "a.yml"
    file.write_text(
        "per_device_batch_size: 3\nici_fsdp_parallelism: 4\nici_tensor_parallelism: 3\n"
        "dcn_data_parallelism: 1\n"
    )
    found = run_json(capsys, "check", "--from", "maxtext", str(file), "--devices", "8")
    note = found[1]["notes"].pop(0)
    assert note.startswith("on 8 devices no legal sizes keep the update of 12")
    assert found == run_json(
        capsys, "check", "--from", "maxtext", str(file), "num_devices=8"
    )
    assert "num_devices=8" in found[1]["violations"][0]["message"]
    code, error = run_json(
        capsys, "check", "--from", "verl", str(file), "--devices", "8"
    )
    assert (code, error["error"]["key"]) == (2, "devices")


def test_check_says_that_it_wrote_nothing(capsys, tmp_path, monkeypatch):
    """A file that breaks a rule is not converted, and standard error says so."""
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text("per_device_batch_size: 3\nici_fsdp_parallelism: 3\n")
    check = ["check", "a.yml", "--from", "maxtext", "--devices", "8", "--to", "rampup"]
    assert main([*check, "-o", "b.yml"]) == 2
    assert "b.yml is not written: the file breaks rules" in capsys.readouterr().err
    assert not Path("b.yml").exists()


@pytest.mark.slow
def test_train_restart_compiles_nothing(tmp_path):
    """A second process finds every program of the first in the compilation cache."""
    cache, found = tmp_path / "cache", []
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("JAX_")
    }
    settings = [
        f"base_output_directory={tmp_path}",
        f"jax_cache_dir={cache}",
        "learning_rate_schedule_steps=6",
    ]
    train = [text for text in TRAIN if not text.startswith("steps=")]
    for steps in (3, 6):
        command = [*train, "run_name=run", f"steps={steps}", *settings]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        found.append(
            {path.name for path in cache.iterdir() if path.name.endswith("-cache")}
        )
    assert any("jit_fused" in name for name in found[0])
    assert not [name for name in found[1] - found[0] if "jit_fused" in name]


def test_plot_draws_each_kind(capsys, tmp_path):
    """Each kind of picture of a configuration is written and reported."""
    settings = ["ici_pipeline_parallelism=4", "per_device_batch_size=8", "--devices=8"]
    for kind in ("batch", "rate", "timetable"):
        file = tmp_path / f"{kind}.svg"
        found = run_json(
            capsys, "plot", BASE, *settings, "--kind", kind, "-o", str(file)
        )
        assert found == (0, {"kind": kind, "output": str(file)})
        assert "<svg" in file.read_text()


def test_plot_and_report_read_a_run_folder(capsys, tmp_path, uninterrupted):
    """From a run folder alone: its metrics as a picture, and with its plan as a
    page.
    """
    folder = Path(uninterrupted[0]["checkpoint"]).parent.parent
    picture, page = tmp_path / "picture.png", tmp_path / "page.html"
    assert main(["plot", str(folder), str(folder), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in capsys.readouterr().out
    assert main(["plot", str(folder), "--kind", "batch", "-o", str(picture)]) == 0
    capsys.readouterr()
    code, result = run_json(capsys, "report", str(folder), "-o", str(page))
    assert code == 0
    assert (result["title"], result["bytes"]) == (folder.name, page.stat().st_size)
    assert "last loss" in page.read_text()


def run_text(capsys, monkeypatch, *arguments, width=80):
    """Run a command at a terminal's width; return what it prints."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_fix_prints_a_patch_that_patch_applies(capsys, tmp_path, monkeypatch):
    """The patch has remarks, and is empty where nothing is wrong. A misspelled base is
    fixed, too.
    """
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yml"
    file.write_text(
        before := "base_config: base.yml\nsteps: 0  # few\nper_device_batch_size: 15\n"
    )
    fix = ["plan", "run.yml", "--devices", "4", "--fix"]
    assert main(fix) == 0
    out = capsys.readouterr().out
    assert "# steps: 0 -> 1 " in out
    assert file.read_text() == before
    code, result = run_json(capsys, *fix)
    assert (code, result["legal"], len(result["changes"])) == (0, False, 2)
    if shutil.which("patch"):
        subprocess.run(["patch", "-p0"], input=out, text=True, check=True)
        assert (
            file.read_text()
            == "base_config: base.yml\nsteps: 1  # few\nper_device_batch_size: 16\n"
        )
    file.write_text("base_config: base.yml\n")
    code, result = run_json(capsys, *fix)
    assert (code, result) == (
        0,
        {"legal": True, "problems": [], "changes": [], "patch": ""},
    )
    assert main(fix) == 0
    assert "is legal: nothing to fix" in capsys.readouterr().out
    file.write_text("base_config: bas.yml\nlog_period: 3\n")
    code, result = run_json(capsys, *fix)
    assert [change["after"] for change in result["changes"]] == ["base.yml"]


def test_explain_prints_defaults_and_topologies(capsys, monkeypatch):
    """Default, and MaxText's name and default, or that it has none; names of slices can
    be copied from lines of 80 columns.
    """
    _, explained = run_json(capsys, "explain", "enable_rampup_batch_size")
    text = run_text(capsys, monkeypatch, "explain", "enable_rampup_batch_size")
    assert all(name in text for name in explained["interacts"])
    assert "default true MaxText enable_rampup_batch_size, default false" in " ".join(
        text.split()
    )
    assert "has no such key; it does steps" in run_text(
        capsys, monkeypatch, "explain", "learning_rate_clock"
    )
    assert "unit" not in run_text(capsys, monkeypatch, "explain", "run_name")
    text = run_text(capsys, monkeypatch, "explain", "topology")
    assert {"v5litepod-256", "tpu7x:8x8x16", "tpu7x-2048"} <= set(text.split())


def test_tools_import_no_jax():
    """Commands that only read configurations import no jax."""
    calls = [
        ["plan", BASE, "--devices", "8"],
        ["plan", BASE, "steps=0", "--devices", "8", "--fix"],
        ["explain", "steps"],
        ["plan", "--devices", "4096", PALM, "steps=9"],
        ["plan", RL, "--devices", "8"],
        ["suggest", "--params", "6B", "--train-tokens", "1B"],
    ]
    code = (
        f"import sys, rampup.cli as cli; [cli.main(call) for call in {calls!r}]; assert"
        " 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--budget", "train_tokens"),
        ("--diff", "both plans"),
        ("--steps", "steps="),
        ("--fake-devices", "`rampup plan --devices N`"),
    ],
)
def test_an_option_that_there_was_names_what_is_there_instead(capsys, option, instead):
    """Options that went, a key that was written with dashes, and the option of another
    command.
    """
    assert main(["plan", BASE, option, "7"]) == 2
    assert instead in capsys.readouterr().err
    assert main(["train", BASE, "--devices", "8"]) == 2
    assert "`rampup train --fake-devices N`" in capsys.readouterr().err
