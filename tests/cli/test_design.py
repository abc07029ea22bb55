"""Tests of `rampup design`: from files with measurements to schedules that can be planned."""

import json
import math
from pathlib import Path

import pytest
from helpers.commands import run_json

import rampup
from rampup.batch_size.design_model import DesignModel, NoisePoint, StepTimes, noise_curves
from rampup.cli import main
from rampup.config.files import run_yaml
from rampup.rl.config import RolloutConfig

BASE = str(Path(__file__).parents[2] / "configs" / "base.yml")
LENGTH = 128
KEYS = {"train_tokens", "train_samples", "tokens_per_sample", "noise_source", "noise_scale_start", "noise_scale_end"}
KEYS |= {f"noise_scale_{place}_{end}" for place in ("start", "end") for end in ("low", "high")}
KEYS |= {
    "noise_scale_last_measured",
    "noise_growth",
    "step_seconds",
    "loss_slope",
    "candidates",
    "fastest",
    "assumptions",
    "notes",
}
NAMES = ["constant 4", "early growth, fastest", "seesaw", "one late switch"]


def noise_at(samples):
    """Return S over G2, in samples, of the run below; their averages are 1.1 and 1.05 times those of the first of six steps."""
    return 2.0 * samples**0.5 * 1.05 / 1.1


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
        line |= {"gradient_noise_trace": noise * LENGTH * (1 + 0.1 * (step % 3))}
        line |= {"gradient_squared_norm": 1.0 + 0.1 * (step % 2)}
        # The running estimate, which a design does not use: it has the samples of a unit of weight.
        line |= {"noise_scale_samples": 1.0, "noise_scale_tokens": float(LENGTH)}
        lines.append(line if step > 5 else line | {"noise_scale_samples": None, "noise_scale_tokens": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = rampup.Config(batch_size_schedule="0:4 800:16", steps=600)
    (folder / "config.yml").write_text(run_yaml(config, num_devices=1, run_name="demo"))
    return folder


def test_the_run_of_a_loop_of_ones_own_is_a_measurement(run, capsys):
    """Its folder has no configuration, which the error asks for; its step times do not depend on what it counts as tokens."""
    (run / "config.yml").unlink()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"step_seconds": line["global_batch_size"] * LENGTH / line["tokens_per_second"]}
        line["tokens_per_second"] /= LENGTH
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--train-tokens", "20M", "--assume-growth", "0.47", "--devices", "1"]
    assert main(["design", str(run), *options]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "has no config.yml" in message
    assert f"CONFIG.yml --measured {run}" in message
    code, found = run_json(capsys, "design", BASE, "--measured", str(run), *options)
    assert (code, found["step_seconds"]) == (0, {"4": pytest.approx(1.08), "16": pytest.approx(1.32)})


def test_design_json(run, capsys):
    """Every candidate has its predictions, and a schedule that `rampup plan` accepts for this configuration."""
    code, found = run_json(capsys, "design", str(run), "--train-tokens", "20M", "--assume-growth", "0.47", "--devices", "1")
    assert (code, set(found)) == (0, KEYS)
    names = [candidate["name"] for candidate in found["candidates"]]
    assert [name for name in NAMES if name not in names] == []
    assert found["step_seconds"] == {"4": pytest.approx(1.08), "16": pytest.approx(1.32)}
    assert found["loss_slope"] == pytest.approx(0.4)
    for candidate in found["candidates"]:
        settings = [f"batch_size_schedule={candidate['batch_size_schedule']}", "enable_rampup_batch_size=false"]
        settings += ["train_tokens=20M", "steps=-1", *(f"{key}={value}" for key, value in candidate["rate_rule"].items())]
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
    assert rampup.design_ramp(config, run, num_devices=1, train_tokens=20_000_000, assume_growth=0.47) == found


def test_design_uses_the_measurements(run, capsys):
    """Hours and waste are those of the model with the formulas that the run follows."""
    _, found = run_json(capsys, "design", str(run), "--train-tokens", "20M", "--assume-growth", "0.47", "--devices", "1")
    points = []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        noise = 2.0 * line["consumed_samples"] ** 0.5
        points.append(NoisePoint(line["consumed_samples"], line["global_batch_size"], noise, noise, noise))
    model = DesignModel(noise=noise_curves(points, 0.47)[0], times=StepTimes.fit({4: 1.08, 16: 1.32}))
    by_name = {candidate["name"]: candidate for candidate in found["candidates"]}
    large = next(candidate for name, candidate in by_name.items() if candidate["sizes"] == [64])
    samples = found["train_samples"]
    assert large["hours"] == pytest.approx(samples / 64 * (1.32 + 48 * 0.02) / 3600, rel=1e-6)
    small, big = (model.run(((0, size),), samples=samples).progress for size in (4, 64))
    assert large["wasted_samples"] == pytest.approx(1 - big / small, rel=0.02)


def test_design_does_not_extrapolate_without_limit(run, capsys):
    """A run far longer than the measured one needs a named growth; the last measured value is printed beside the last used."""
    assert main(["design", str(run), "--train-tokens", "10B", "--devices", "1"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "more than 4 times" in message
    assert "--assume-growth" in message
    code, short = run_json(capsys, "design", str(run), "--train-tokens", "5M", "--devices", "1")
    assert (code, short["noise_growth"]) == (0, 0.47)  # the run follows a power of 0.5
    assert short["noise_scale_end"] <= 4 * short["noise_scale_last_measured"]
    arguments = ["design", str(run), "--train-tokens", "10B", "--devices", "1", "--assume-growth", "0"]
    _, found = run_json(capsys, *arguments)
    assert found["noise_scale_end"] == found["noise_scale_last_measured"]
    assert found["noise_scale_end_high"] > 50 * found["noise_scale_end"]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"last measured: {found['noise_scale_last_measured']:.4g}" in text
    assert text.count("if the noise scale is half of this, it costs") == len(found["candidates"])
    assert "batch_scaling=sqrt batch_scaling_reference=16" in text


def test_costs_are_those_of_the_hyperbola(run, capsys):
    """Of a constant noise scale: overhead is B / N, double that for half of it; hours of untimed batches have an interval."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"gradient_noise_trace": 40.0 * LENGTH, "gradient_squared_norm": 1.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, found = run_json(capsys, "design", str(run), "--train-tokens", "20M", "--assume-growth", "0", "--devices", "1")
    for candidate in found["candidates"]:
        if len(candidate["sizes"]) == 1:
            (batch,) = candidate["sizes"]
            overhead = batch / 40
            assert candidate["token_overhead"] == pytest.approx(overhead, rel=0.01)
            assert candidate["more_tokens_if_noise_is_half"] == pytest.approx((1 + 2 * overhead) / (1 + overhead) - 1, rel=0.01)
            hours = [candidate[f"hours{end}"] for end in ("_low", "", "_high")]
            assert hours == sorted(hours)
            # Between the time of the largest timed step, of 16, and one in proportion to the batch.
            assert hours[2] / hours[0] == pytest.approx(max(batch / 16, 1))


def test_critical_batches_are_preferred(run, capsys):
    """Results of `rampup critical` next to the run replace the noise scale; tune's output replaces the times."""
    for step, samples, batch, size in ((100, 400, 4, 8), (600, 7200, 16, 64)):
        folder = run.with_name("demo.critical") / f"step-{step}-abc"
        folder.mkdir(parents=True)
        branches = [{"global_batch_size": batch * multiple} for multiple in (1, 2, 4, 8)]
        result = {"step": step, "branches": branches, "critical_batch_size": size, "tokens": 1000}
        result |= {"decisive": True, "tolerance": 0.05, "gain": 0.1}
        (folder / "result.json").write_text(json.dumps(result | {"consumed_samples": samples, "global_batch_size": batch}))
    tuned = run.with_name("tune.json")
    tuned.write_text(json.dumps({"phases": [{"global_batch_size": size, "step_seconds": size / 8} for size in (4, 8, 16)]}))
    arguments = ["design", str(run), "--train-tokens", "20M", "--assume-growth", "0.47", "--devices", "1"]
    code, found = run_json(capsys, *arguments, "--measured", str(tuned))
    assert (code, found["noise_source"]) == (0, "critical")
    # Before the first of them, the noise scale of the run counts, in proportion: it grows from 2 * sqrt(4) to 40 and meets 8.
    assert 0.2 * 4 <= found["noise_scale_start"] < 8
    assert found["step_seconds"]["16"] == 2.0
    # Larger batches save no time on this machine, so the fastest is the smallest.
    assert found["fastest"] == "constant 4"


def test_design_of_a_file_draws_and_prints(run, tmp_path, capsys):
    """A configuration with a measured run works as the run itself; the picture is written, the model is called one."""
    pytest.importorskip("matplotlib")
    picture = tmp_path / "design.png"
    arguments = [
        "design",
        BASE,
        "--measured",
        str(run),
        "--train-tokens",
        "20M",
        "--assume-growth",
        "0.47",
        "--devices",
        "1",
        "-o",
        str(picture),
    ]
    assert main([*arguments, "lr_schedule_type=constant"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "This is a model, not a measurement" in text
    assert "no Seesaw candidate" in text
    assert "those that a tiny batch needs to get as far" in text
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


def test_a_run_of_rollouts_gets_prompts_and_responses(tmp_path, capsys):
    """From the last estimates of its metrics; without any, and with the options of ramps, an error."""
    folder = tmp_path / "rl"
    folder.mkdir()
    config = RolloutConfig(batch_size=8, num_generations=4, num_iterations=2, train_micro_batch_size=2)
    (folder / "config.yml").write_text(run_yaml(config, num_devices=1, run_name="rl"))
    parts = {"between_prompts": (2.0, 1.0, 3.0), "within_prompts": (24.0, 20.0, 28.0), "scale_prompts": (16.0, 12.0, 20.0)}
    ends = ("", "_low", "_high")
    line = {f"noise_{name}{end}": x for name, values in parts.items() for end, x in zip(ends, values, strict=True)}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n")
    assert main(["design", str(folder)]) == 2
    assert "measured no noise between prompts" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 0} | line) + "\n" + json.dumps({"step": 1}) + "\n")
    assert main(["design", str(folder), "--json", "--cost-per-prompt", "3"]) == 0
    facts = json.loads(capsys.readouterr().out)
    # Two updates on the same samples take twice the prompts; n^2 = 3 * 24 / 2; (2 + 24 / 8) / (2 + 24 / 4) of the prompts.
    assert facts["noise_scale_prompts"] == {"value": 32.0, "low": 24.0, "high": 40.0}
    assert (facts["best_num_generations"], facts["mini_batch_prompts"], facts["reuse"]) == (6.0, 8, 2)
    (row,) = (row for row in facts["choices"] if row["num_generations"] == 8)
    assert (row["prompts"], row["relative_cost"]) == (20.0, 0.625 * 11 / 7)
    assert main(["design", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "noise scale: 32 (24 to 40) prompts, with 4 responses each and 2 updates on each at the same learning rate" in text
    assert "with the mean gradient taken as fixed" in text
    assert [row["num_generations"] for row in facts["choices"]] == [4, 8, 16, 32, 64]
    # Other passes over the samples are a question; other responses would be taken for those of the noise scale.
    assert main(["design", str(folder), "--json", "rl.num_iterations=1"]) == 0
    assert json.loads(capsys.readouterr().out)["noise_scale_prompts"]["value"] == 16.0
    assert main(["design", str(folder), "--json", "rl.num_generations=16"]) == 2
    assert "rl.num_generations=16 is not that of the run" in capsys.readouterr().err
    assert main(["design", str(folder), "--train-tokens", "1B"]) == 2
    assert "is for ramps of pre-training" in capsys.readouterr().err
    assert main(["design", BASE, "--cost-per-prompt", "1"]) == 2
    assert "is for the folder of a run of reinforcement learning" in capsys.readouterr().err
