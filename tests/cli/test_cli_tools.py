"""Tests of rampup.cli, as a person types it: plan --diff, plan --budget, fix and explain."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import run_json

from rampup.cli import main

ROOT = Path(__file__).parent.parent.parent
BASE = str(ROOT / "configs" / "base.yml")
GPT3 = str(ROOT / "configs" / "gpt3_175b.yml")
PALM = str(ROOT / "configs" / "palm_540b.yml")
ROLLOUT = str(ROOT / "configs" / "rl.yml")


def run_text(capsys, monkeypatch, *arguments, width=80):
    """Run a command at a terminal's width; return what it prints."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 200])
def test_diff_marks_differences_and_truncates_nothing(capsys, monkeypatch, width):
    """Every phase of both plans with complete numbers, and a mark on the phases that differ."""
    text = run_text(capsys, monkeypatch, "plan", GPT3, "--diff", PALM, "--all", width=width)
    _, both = run_json(capsys, "plan", GPT3, "--diff", PALM)
    for plan in (both["a"], both["b"]):
        for phase in plan["phases"]:
            assert all(f"{phase[name]:,}" in text for name in ("start_step", "start_sample", "global_batch_size"))
    assert max(map(len, text.splitlines())) <= width
    # Settings apply to the first plan, and devices to both.
    command = ["plan", BASE, "steps=7", "--diff", BASE, "--devices", "2"]
    _, both = run_json(capsys, *command)
    assert both["changed_keys"] == {"steps": {"a": 7, "b": 1000}}
    assert both["a"] == run_json(capsys, "plan", BASE, "steps=7", "--devices", "2")[1]
    assert both["b"] == run_json(capsys, "plan", BASE, "--devices", "2")[1]
    same = run_text(capsys, monkeypatch, *command, width=width)
    marked = [line.split()[0] for line in same.splitlines() if line.rstrip().endswith("*")]
    assert marked == ["total_steps", "consumed_samples"]
    assert "all keys are the same" in run_text(capsys, monkeypatch, "plan", BASE, "--diff", BASE, "--devices", "2")


def test_budget_compares_with_constant_batches(capsys, monkeypatch):
    """The plan, and with it the meaning of the budget: exact integers, and hours from a throughput."""
    _, plan = run_json(capsys, "plan", GPT3)
    code, result = run_json(capsys, "plan", GPT3, "--budget", "300B", "--tokens-per-second", "1.5M")
    budget = result.pop("budget")
    assert code == 0
    assert result == plan
    assert (budget["steps"], budget["fewer_steps_than_first"], budget["more_steps_than_final"]) == (111_355, 9_043_919, 15_987)
    assert budget["tokens_per_second"] == 1_500_000
    assert budget["hours"] == pytest.approx(300_000_935_936 / 1.5e6 / 3600)
    assert "hours" not in run_json(capsys, "plan", GPT3, "--budget", "300B")[1]["budget"]
    # In words, it says which constant batch is meant: fewer steps than the first, more than the last.
    text = " ".join(run_text(capsys, monkeypatch, "plan", GPT3, "--budget", "300B", "--tokens-per-second", "1e6").split())
    assert "at 16 throughout 9,155,274 steps, the first batch kept constant; the ramp takes 9,043,919 fewer (98.8%)" in text
    assert "at 1,536 throughout 95,368 steps, the last batch kept constant; the ramp takes 15,987 more (16.8%)" in text
    assert "83.33 hours = 3.5 days at 1,000,000 tokens/s on average" in text
    assert "this configuration" not in text
    constant = [BASE, "enable_rampup_batch_size=false", "--devices", "4", "--budget", "10M"]
    text = " ".join(run_text(capsys, monkeypatch, "plan", *constant).split())
    assert "the batch is the same throughout" in text
    assert "steps=1,000 consumes 4,096,000 tokens; for the budget set steps=2442" in text


def test_budget_uses_a_measured_run(capsys, monkeypatch, tmp_path):
    """The throughput of each batch size comes from a run's metrics; sizes without any are counted."""
    lines = [{"step": n, "global_batch_size": 8 * (1 + n // 3), "tokens_per_second": 1000.0 * (1 + n // 3)} for n in range(6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["plan", BASE, "--devices", "4", "--budget", "10M", "--measured", str(tmp_path)]
    _, result = run_json(capsys, *arguments)
    spent = {int(size): steps * int(size) * 128 for size, steps in result["budget"]["steps_by_global_batch_size"].items()}
    seconds = spent[8] / 1000 + (spent[16] + spent[24] + spent[32]) / 2000
    assert result["budget"]["hours"] == pytest.approx(seconds / 3600)
    assert "2 of 4 batch sizes" in run_text(capsys, monkeypatch, *arguments)


def test_fix_prints_a_patch_and_writes_the_file(capsys, tmp_path):
    """Without --write the file stays, and a patch with remarks is printed; with it the file is legal, and nothing is left."""
    file = tmp_path / "run.yml"
    file.write_text(before := "base_config: base.yml\nsteps: 0  # few\nper_device_batch_size: 15\n")
    assert main(["fix", str(file), "--devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "# steps: 0 -> 1 " in out
    assert "\n-steps: 0  # few\n-per_device_batch_size: 15\n+steps: 1  # few\n+per_device_batch_size: 16\n" in out
    assert file.read_text() == before
    code, result = run_json(capsys, "fix", str(file), "--devices", "4", "--write")
    assert (code, result["written"], result["legal"], len(result["changes"])) == (0, True, False, 2)
    assert file.read_text() == "base_config: base.yml\nsteps: 1  # few\nper_device_batch_size: 16\n"
    code, result = run_json(capsys, "fix", str(file), "--devices", "4", "--write")
    assert (code, result) == (0, {"legal": True, "problems": [], "changes": [], "patch": "", "written": False})
    assert main(["fix", str(file), "--devices", "4"]) == 0
    assert "is legal: nothing to fix" in capsys.readouterr().out


def test_fix_writes_only_the_user_s_file(capsys, tmp_path, monkeypatch):
    """Neither a preset nor a rollout is written; a misspelled base is fixed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rampup.config.load._own_folders", lambda: [tmp_path / "own"])
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "base.yml").write_text("steps: 0\n")
    code, result = run_json(capsys, "fix", "base", "--devices", "4", "--write")
    assert (code, (tmp_path / "own" / "base.yml").read_text()) == (2, "steps: 0\n")
    assert "comes with rampup" in result["error"]["message"]
    (tmp_path / "run.yml").write_text("base_config: bas.yml\nlog_period: 3\n")
    (tmp_path / "own" / "base.yml").write_text("steps: 5\n")
    assert main(["fix", "run.yml", "--devices", "4", "--write"]) == 0
    assert (tmp_path / "run.yml").read_text() == "base_config: base.yml\nlog_period: 3\n"


def test_explain_prints_defaults_and_topologies(capsys, monkeypatch):
    """Default, and MaxText's name and default, or that it has none; names of slices can be copied from lines of 80 columns."""
    _, explained = run_json(capsys, "explain", "enable_rampup_batch_size")
    text = run_text(capsys, monkeypatch, "explain", "enable_rampup_batch_size")
    assert all(name in text for name in explained["interacts"])
    assert "default true MaxText enable_rampup_batch_size, default false" in " ".join(text.split())
    assert "has no such key; it does steps" in run_text(capsys, monkeypatch, "explain", "learning_rate_clock")
    assert "unit" not in run_text(capsys, monkeypatch, "explain", "run_name")
    text = run_text(capsys, monkeypatch, "explain", "topology")
    assert {"v5litepod-256", "tpu7x:8x8x16", "tpu7x-2048"} <= set(text.split())


def test_tools_import_no_jax():
    """Commands that only read configurations import no jax."""
    calls = [
        ["plan", BASE, "--diff", PALM, "--devices", "8"],
        ["plan", BASE, "--budget", "1B", "--devices", "8"],
        ["fix", BASE, "steps=0", "--devices", "8"],
        ["explain", "steps"],
        ["plan", "--devices", "4096", BASE, "steps=9"],
        ["plan", ROLLOUT, "--devices", "8"],
        ["suggest", "--params", "6B", "--system", "trlx"],
    ]
    code = f"import sys, rampup.cli as cli; [cli.main(call) for call in {calls!r}]; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
