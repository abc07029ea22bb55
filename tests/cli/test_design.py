"""Tests of `rampup design`: from files with measurements to schedules that can be planned."""

import json
import math
from pathlib import Path

import pytest

import rampup
from rampup.cli import main
from rampup.config.files import run_yaml
from rampup.plan.design import DesignModel, NoiseCurve, StepTimes

BASE = str(Path(__file__).parents[2] / "configs" / "base.yml")
LENGTH = 128
KEYS = {"train_tokens", "train_samples", "tokens_per_sample", "noise_source", "noise_scale_start", "noise_scale_end"}
KEYS |= {"noise_growth", "step_seconds", "loss_slope", "candidates", "fastest", "assumptions", "notes"}
NAMES = ["constant 4", "early growth, fastest", "seesaw", "one late switch"]


def noise_at(samples):
    """Return the noise scale of the run below."""
    return 2.0 * samples**0.5


@pytest.fixture
def run(tmp_path):
    """The folder of a run whose step times, noise scale and loss follow formulas."""
    folder, consumed = tmp_path / "demo", 0
    folder.mkdir()
    lines = []
    for step in range(600):
        size = 4 if step < 200 else 16
        consumed += size
        seconds, noise = 1.0 + 0.02 * size, noise_at(consumed)
        line = {"step": step, "consumed_samples": consumed, "phase": int(size > 4), "global_batch_size": size}
        line |= {"loss": 6 - 0.4 * math.log(consumed), "tokens_per_second": size * LENGTH / seconds}
        line |= {"noise_scale_samples": noise, "noise_scale_samples_low": noise / 2, "noise_scale_samples_high": 2 * noise}
        lines.append(line if step > 5 else line | {"noise_scale_samples": None, "noise_scale_samples_low": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = rampup.Config(batch_size_schedule="0:4 800:16", steps=600)
    (folder / "config.yml").write_text(run_yaml(config, num_devices=1, run_name="demo"))
    return folder


def run_json(capsys, *arguments):
    """Run a command with --json in this process; return its exit code and its object."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_design_json(run, capsys):
    """Every candidate has its predictions, and a schedule that `rampup plan` accepts for this configuration."""
    code, found = run_json(capsys, "design", str(run), "--train-tokens", "20M", "--devices", "1")
    assert (code, set(found)) == (0, KEYS)
    names = [candidate["name"] for candidate in found["candidates"]]
    assert [name for name in NAMES if name not in names] == []
    assert found["step_seconds"] == {"4": pytest.approx(1.08), "16": pytest.approx(1.32)}
    assert found["loss_slope"] == pytest.approx(0.4)
    for candidate in found["candidates"]:
        settings = [f"batch_size_schedule={candidate['batch_size_schedule']}", "enable_rampup_batch_size=false"]
        settings += ["train_tokens=20M", "steps=-1"]
        code, plan = run_json(capsys, "plan", str(run / "config.yml"), *settings, "--devices", "1")
        assert code == 0
        assert [phase["global_batch_size"] for phase in plan["phases"]] == candidate["sizes"]
        # The steps are those of the plan, up to the rounding of a phase.
        assert plan["total_steps"] == pytest.approx(candidate["steps"], abs=len(candidate["sizes"]) + 1)
        assert candidate["loss_penalty_low"] <= candidate["loss_penalty"] <= candidate["loss_penalty_high"]
    smallest = found["candidates"][0]
    assert (smallest["loss_penalty"], smallest["loss_penalty_high"], smallest["wasted_samples"]) == (0, 0, 0)
    assert smallest["hours_to_same_loss"] == pytest.approx(smallest["hours"], rel=1e-3)
    fastest = min(found["candidates"], key=lambda candidate: candidate["hours_to_same_loss"])
    assert found["fastest"] == fastest["name"]
    assert fastest["hours_to_same_loss"] < 0.5 * smallest["hours"]
    config = rampup.load_config(run / "config.yml")
    assert rampup.design_ramp(config, run, num_devices=1, train_tokens=20_000_000) == found


def test_design_uses_the_measurements(run, capsys):
    """Hours and waste are those of the model with the formulas that the run follows."""
    _, found = run_json(capsys, "design", str(run), "--train-tokens", "20M", "--devices", "1")
    points, batch = [], 4
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        batch = line["global_batch_size"]
        points.append((line["consumed_samples"], batch, noise_at(line["consumed_samples"])))
    model = DesignModel(noise=NoiseCurve.measured(points), times=StepTimes.fit({4: 1.08, 16: 1.32}))
    by_name = {candidate["name"]: candidate for candidate in found["candidates"]}
    large = next(candidate for name, candidate in by_name.items() if candidate["sizes"] == [64])
    samples = found["train_samples"]
    assert large["hours"] == pytest.approx(samples / 64 * (1.32 + 48 * 0.02) / 3600, rel=1e-6)
    small, big = (model.run(((0, size),), samples=samples).progress for size in (4, 64))
    assert large["wasted_samples"] == pytest.approx(1 - big / small, rel=0.02)


def test_critical_batches_are_preferred(run, capsys):
    """Results of `rampup critical` next to the run replace the noise scale; tune's output replaces the times."""
    for step, samples, batch, size in ((100, 400, 4, 8), (600, 7200, 16, 64)):
        folder = run.with_name("demo.critical") / f"step-{step}-abc"
        folder.mkdir(parents=True)
        branches = [{"global_batch_size": batch * multiple} for multiple in (1, 2, 4, 8)]
        result = {"step": step, "branches": branches, "critical_batch_size": size}
        (folder / "result.json").write_text(json.dumps(result | {"consumed_samples": samples, "global_batch_size": batch}))
    tuned = run.with_name("tune.json")
    tuned.write_text(json.dumps({"phases": [{"global_batch_size": size, "step_seconds": size / 8} for size in (4, 8, 16)]}))
    arguments = ["design", str(run), "--train-tokens", "20M", "--devices", "1"]
    code, found = run_json(capsys, *arguments, "--measured", str(tuned))
    assert (code, found["noise_source"]) == (0, "critical")
    assert found["noise_scale_start"] == pytest.approx(8)
    assert found["step_seconds"]["16"] == 2.0
    # Larger batches save no time on this machine, so the fastest is the smallest.
    assert found["fastest"] == "constant 4"


def test_design_of_a_file_draws_and_prints(run, tmp_path, capsys):
    """A configuration with a measured run works as the run itself; the picture is written, the model is called one."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "design.png"
    arguments = ["design", BASE, "--measured", str(run), "--train-tokens", "20M", "--devices", "1", "-o", str(picture)]
    assert main([*arguments, "lr_schedule_type=constant"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "This is a model, not a measurement" in text
    assert "no Seesaw candidate" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-tokens", "20M"], "--measured RUN_DIR"),
        (["--train-tokens", "20M", "--measured", "nowhere"], "has no metrics.jsonl"),
        (["--measured", "RUN"], "--train-tokens"),
        (["--measured", "RUN", "--train-tokens", "0"], "--train-tokens"),
        (["--measured", "RUN", "--train-tokens", "1.5"], "whole number"),
        (["--measured", "RUN", "--train-tokens", "20M", "--max-batch", "4"], "up to 4 is legal; raise max_batch"),
        (["--measured", "RUN", "--train-tokens", "2K"], "raise train_tokens"),
        (["--measured", "RUN", "--train-tokens", "20M", "max_target_length=256"], "max_target_length"),
        (["--measured", "PLAIN", "--train-tokens", "20M"], "measure_gradient_noise=true"),
        (["--measured", "RUN", "--train-tokens", "20M", "-o", "x.txt"], "must end in"),
        (["--measured", "JSON", "--train-tokens", "20M"], "not the output of `rampup tune"),
    ],
)
def test_bad_input_is_refused(arguments, message, run, capsys):
    """Each error names the rule or the remedy."""
    plain, other = run.with_name("plain"), run.with_name("other.json")
    plain.mkdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if "noise" not in key} for line in lines]
    (plain / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    other.write_text("{}")
    names = {"RUN": str(run), "PLAIN": str(plain), "JSON": str(other)}
    assert main(["design", BASE, "--devices", "1", *(names.get(word, word) for word in arguments)]) == 2
    assert message in capsys.readouterr().err
