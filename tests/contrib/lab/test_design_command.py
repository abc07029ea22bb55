"""Tests of `rampup design`: from files with measurements to schedules that can be
planned.
"""

import json
import math
import re
import shlex
from pathlib import Path

import pytest
from helpers.commands import run_json
from helpers.tiny import TINY_MODEL, command_line

import rampup
from rampup.cli import main
from rampup.config.files import run_yaml
from rampup.contrib.lab.prediction import compare_prediction
from rampup.contrib.rl.config import RolloutConfig
from rampup.show.series import RunMetrics

BASE = str(Path(__file__).parents[3] / "configs" / "base.yml")
LENGTH = 128
KEYS = {
    "train_tokens",
    "train_samples",
    "tokens_per_sample",
    "noise_source",
    "noise_scale_last_measured",
    "noise_growth",
    "noise_growth_is_capped",
}
KEYS |= {
    f"noise_scale_{place}{end}"
    for place in ("start", "end")
    for end in ("", "_low", "_high")
}
KEYS |= {
    "step_seconds",
    "loss_slope",
    "candidates",
    "fastest",
    "hours_saved",
    "most_hours_saved",
    "assumptions",
    "notes",
}
NAMES = {"constant 4", "fastest ramp"}
# Of a design of the run below.
LONG = ["--train-tokens", "20M", "--assume-growth", "0.47", "--devices", "1"]


def noise_at(samples):
    """Return S over G2, in samples, of the run below; their averages are 1.1 and 1.05
    times those of the first of six steps.
    """
    return 2.0 * samples**0.5 * 1.05 / 1.1


def lines_of(folder):
    """Return the lines of metrics of a run."""
    return [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def write_lines(folder, lines):
    """Write the lines of metrics of a run."""
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def tuned_in(run, factor=1):
    """Write an output of tune by which larger batches save no time, beside a run."""
    phases = [
        {"global_batch_size": size, "step_seconds": size / 8 / factor}
        for size in (4, 8, 16)
    ]
    run.with_name("tune.json").write_text(json.dumps({"phases": phases}))
    return run.with_name("tune.json")


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
        line = {
            "step": step,
            "consumed_samples": consumed,
            "phase": int(size > 4),
            "global_batch_size": size,
        }
        line |= {
            "loss": 6 - 0.4 * math.log(consumed),
            "tokens_per_second": size * LENGTH / seconds,
        }
        line |= {"gradient_noise_trace": noise * LENGTH * (1 + 0.1 * (step % 3))}
        line |= {"gradient_squared_norm": 1.0 + 0.1 * (step % 2)}
        # The running estimate, which a design does not use: it has the samples of a
        # unit of weight.
        line |= {"noise_scale_samples": 1.0, "noise_scale_tokens": float(LENGTH)}
        lines.append(
            line
            if step > 5
            else line | {"noise_scale_samples": None, "noise_scale_tokens": None}
        )
    write_lines(folder, lines)
    config = rampup.Config(batch_size_schedule="0:4 800:16", steps=600)
    (folder / "config.yml").write_text(run_yaml(config, num_devices=1, run_name="demo"))
    return folder


def test_the_run_of_a_loop_of_ones_own_is_a_measurement(run, capsys):
    """Its folder has no configuration, so that one is named; its step times do not
    depend on what it counts as tokens.
    """
    (run / "config.yml").unlink()
    lines = lines_of(run)
    for line in lines:
        line |= {
            "step_seconds": (
                line["global_batch_size"] * LENGTH / line["tokens_per_second"]
            )
        }
        line["tokens_per_second"] /= LENGTH
    write_lines(run, lines)
    assert main(["design", str(run), *LONG]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "has no config.yml" in message
    code, found = run_json(capsys, "design", BASE, "--measured", str(run), *LONG)
    assert (code, found["step_seconds"]) == (
        0,
        {"4": pytest.approx(1.08), "16": pytest.approx(1.32)},
    )


def test_design_json(run, capsys):
    """Every candidate has its predictions, and a schedule that `rampup plan` accepts
    for this configuration.
    """
    code, found = run_json(capsys, "design", str(run), *LONG)
    assert (code, set(found)) == (0, KEYS)
    assert {candidate["name"] for candidate in found["candidates"]} >= NAMES
    assert found["step_seconds"] == {
        "4": pytest.approx(1.08),
        "16": pytest.approx(1.32),
    }
    assert found["loss_slope"] == pytest.approx(0.4)
    for candidate in found["candidates"]:
        settings = [
            f"batch_size_schedule={candidate['batch_size_schedule']}",
            "enable_rampup_batch_size=false",
        ]
        settings += [
            "train_tokens=20M",
            "steps=-1",
            *(f"{key}={value}" for key, value in candidate["rate_rule"].items()),
        ]
        code, plan = run_json(
            capsys, "plan", str(run / "config.yml"), *settings, "--devices", "1"
        )
        assert code == 0
        assert [phase["global_batch_size"] for phase in plan["phases"]] == candidate[
            "sizes"
        ]
        # The steps are those of the plan, up to the rounding of a phase.
        assert plan["total_steps"] == pytest.approx(
            candidate["steps"], abs=len(candidate["sizes"]) + 1
        )
        assert (
            candidate["loss_penalty_low"]
            <= candidate["loss_penalty"]
            <= candidate["loss_penalty_high"]
        )
    smallest = found["candidates"][0]
    assert (
        smallest["loss_penalty"],
        smallest["loss_penalty_high"],
        smallest["wasted_samples"],
    ) == (0, 0, 0)
    assert smallest["hours_to_same_loss"] == pytest.approx(smallest["hours"], rel=1e-3)
    fastest = min(
        found["candidates"], key=lambda candidate: candidate["hours_to_same_loss"]
    )
    assert found["fastest"] == fastest["name"]
    assert fastest["hours_to_same_loss"] < 0.5 * smallest["hours"]
    config = rampup.load_config(run / "config.yml")
    assert (
        rampup.contrib.lab.design_ramp(
            config, run, num_devices=1, train_tokens=20_000_000, assume_growth=0.47
        )
        == found
    )


def test_the_printed_keys_run(run, capsys, monkeypatch):
    """What stands behind a candidate's name is legal for base.yml as it is."""
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["design", str(run), *LONG]) == 0
    (line,) = re.findall(r"^fastest ramp: (enable.*)$", capsys.readouterr().out, re.M)
    settings = ["train_tokens=20M", "steps=-1", *shlex.split(line), "--devices", "1"]
    code, plan = run_json(capsys, "plan", BASE, *settings)
    assert (code, len(plan["phases"]) > 1) == (0, True)


def test_design_does_not_extrapolate_without_limit(run, capsys):
    """A run far longer than the measured one needs a named growth; the last measured
    value is printed beside the last used.
    """
    assert main(["design", str(run), "--train-tokens", "10B", "--devices", "1"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "more than 4 times" in message
    assert "--assume-growth" in message
    code, short = run_json(
        capsys, "design", str(run), "--train-tokens", "5M", "--devices", "1"
    )
    assert (code, short["noise_growth"]) == (0, 0.47)  # the run follows a power of 0.5
    assert short["noise_scale_end"] <= 4 * short["noise_scale_last_measured"]
    arguments = [
        "design",
        str(run),
        "--train-tokens",
        "10B",
        "--devices",
        "1",
        "--assume-growth",
        "0",
    ]
    _, found = run_json(capsys, *arguments)
    assert found["noise_scale_end"] == found["noise_scale_last_measured"]
    assert found["noise_scale_end_high"] > 50 * found["noise_scale_end"]
    assert main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"last measured: {found['noise_scale_last_measured']:.4g}" in text
    assert "The ramp saves" in text
    assert "no ramp saves more than 0.0%" in text
    assert "batch_scaling=sqrt batch_scaling_reference=16" in text


def test_costs_are_those_of_the_hyperbola(run, capsys):
    """Of a constant noise scale: overhead is B / N; hours of untimed batches have an
    interval.
    """
    write_lines(
        run,
        [
            line | {"gradient_noise_trace": 40.0 * LENGTH, "gradient_squared_norm": 1.0}
            for line in lines_of(run)
        ],
    )
    _, found = run_json(
        capsys,
        "design",
        str(run),
        "--train-tokens",
        "20M",
        "--assume-growth",
        "0",
        "--devices",
        "1",
    )
    # The slope of the loss is that in the middle of the line through it, in logarithms.
    late = [n for n in range(816, 7201, 16) if n >= 3600]
    middle = math.exp(sum(map(math.log, late)) / len(late))
    slope_at = 800 / 1.1 + (middle - 800) / 1.4
    for candidate in found["candidates"]:
        if len(candidate["sizes"]) == 1:
            (batch,) = candidate["sizes"]
            overhead = batch / 40
            assert candidate["token_overhead"] == pytest.approx(overhead, rel=0.01)
            # Of the loss that the smallest batch has, whose own overhead is 10%.
            assert candidate["tokens_to_same_loss"] == pytest.approx(
                20e6 / 1.1 * (1 + overhead), rel=0.01
            )
            reached = [20e6 / LENGTH / (1 + x) / slope_at for x in (overhead, 0.1)]
            penalty = 0.4 / 0.28 * (reached[0] ** -0.28 - reached[1] ** -0.28)
            assert candidate["loss_penalty"] == pytest.approx(
                penalty, rel=0.02, abs=1e-6
            )
            assert candidate["wasted_samples"] == pytest.approx(
                1 - 1.1 / (1 + overhead), rel=0.02, abs=1e-6
            )
            assert candidate["hours"] == pytest.approx(
                found["train_samples"] / batch * (1 + 0.02 * batch) / 3600, rel=0.01
            )
            hours = [candidate[f"hours{end}"] for end in ("_low", "", "_high")]
            assert hours == sorted(hours)
            # Between the time of the largest timed step, of 16, and one in proportion
            # to the batch.
            assert hours[2] / hours[0] == pytest.approx(max(batch / 16, 1))


def write_critical(run, *results):
    """Write results of `rampup critical` next to a run: step, samples, batch and the
    critical batch, which needs twice the tokens.
    """
    for step, samples, batch, size in results:
        folder = run.with_name("demo.critical") / f"step-{step}-abc"
        folder.mkdir(parents=True)
        result = {
            "step": step,
            "critical_batch_size": size,
            "bound": "at_least" if size == 8 * batch else "exact",
            "tokens": 1000,
            "decisive": True,
            "tolerance": 0.05,
            "gain": 0.1,
            "consumed_samples": samples,
            "global_batch_size": batch,
        }
        (folder / "result.json").write_text(json.dumps(result))


def test_the_smaller_noise_scale_counts(run, capsys):
    """Critical batches below the noise scale scale it down, critical batches above it
    do not scale it up; tune's output replaces the times.
    """
    tuned = tuned_in(run)
    arguments = ["design", str(run), *LONG, "--measured", str(tuned)]
    _, plain = run_json(capsys, *arguments)
    write_critical(run, (100, 400, 4, 8), (600, 7200, 16, 32))
    code, found = run_json(capsys, *arguments)
    assert (code, found["noise_source"]) == (0, "critical")
    last = found["noise_scale_last_measured"] / plain["noise_scale_last_measured"]
    assert last == pytest.approx(32 / noise_at(7200), rel=0.05)
    assert any("as low as" in note for note in found["notes"])
    assert found["step_seconds"]["16"] == 2.0
    # Larger batches save no time on this machine, so the fastest is the smallest.
    assert found["fastest"] == "constant 4"
    assert "no ramp is faster than the best constant batch" in found["notes"]
    assert found["hours_saved"] == 0
    write_critical(run, (500, 5600, 16, 128))
    (run.with_name("demo.critical") / "step-100-abc" / "result.json").unlink()
    (run.with_name("demo.critical") / "step-600-abc" / "result.json").unlink()
    _, found = run_json(capsys, *arguments)
    assert found["noise_source"] == "noise_scale"
    assert found["noise_scale_end"] == plain["noise_scale_end"]


def test_a_ramp_is_compared_with_the_best_constant_batch(run, capsys):
    """Its gain is printed with the bound, and a growth that is capped is called so."""
    code, found = run_json(capsys, "design", str(run), *LONG[:2], "--devices", "1")
    assert code == 2
    _, found = run_json(capsys, "design", str(run), *LONG)
    hours = {each["name"]: each["hours_to_same_loss"] for each in found["candidates"]}
    best = min(hours[name] for name in hours if name.startswith("constant"))
    assert found["hours_saved"] == pytest.approx(1 - hours["fastest ramp"] / best)
    assert 0 < found["hours_saved"] < 0.06
    assert found["most_hours_saved"] == pytest.approx(0.0242, abs=1e-4)
    assert not found["noise_growth_is_capped"]
    short = ["design", str(run), "--train-tokens", "5M", "--devices", "1"]
    assert run_json(capsys, *short)[1]["noise_growth_is_capped"]
    assert main(short) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "0.47, capped: it was measured to grow faster" in text
    assert "of the hours of the best constant batch" in text
    assert "no ramp saves more than 2.4%" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-tokens", "20M"], "--measured RUN_DIR"),
        (["--train-tokens", "20M", "--measured", "nowhere"], "has no metrics.jsonl"),
        (["--measured", "RUN"], "--train-tokens"),
        (["--measured", "RUN", "-o", "x.png"], "design draws no picture; `rampup plot"),
        (["--measured", "RUN", "--train-tokens", "0"], "--train-tokens"),
        (["--measured", "RUN", "--train-tokens", "1.5"], "whole number"),
        (
            ["--measured", "RUN", "--train-tokens", "20M", "--max-batch", "2"],
            "up to 2 is legal; raise max_batch",
        ),
        (["--measured", "RUN", "--train-tokens", "2K"], "or train_tokens"),
        (
            ["--measured", "RUN", "--train-tokens", "20M", "max_target_length=256"],
            "max_target_length",
        ),
        (
            ["--measured", "PLAIN", "--train-tokens", "20M"],
            "measure_gradient_noise=true",
        ),
        (
            ["--measured", "JSON", "--train-tokens", "20M"],
            "not the output of `rampup tune",
        ),
    ],
)
def test_bad_input_is_refused(arguments, message, run, capsys):
    """Each error names the rule or the remedy."""
    plain, other = run.with_name("plain"), run.with_name("other.json")
    plain.mkdir()
    write_lines(
        plain,
        [
            {key: value for key, value in line.items() if "noise" not in key}
            for line in lines_of(run)
        ],
    )
    other.write_text("{}")
    names = {"RUN": str(run), "PLAIN": str(plain), "JSON": str(other)}
    assert (
        main(
            [
                "design",
                BASE,
                "--devices",
                "1",
                *(names.get(word, word) for word in arguments),
            ]
        )
        == 2
    )
    assert message in capsys.readouterr().err


OPTIONS = [
    "--train-tokens",
    "2M",
    "--assume-growth",
    "0.47",
    "--devices",
    "1",
    "--max-batch",
    "64",
]


@pytest.fixture
def follower(run, capsys):
    """The folder of a run that was started from a design of the run above, and has
    followed the same formulas to its end.
    """
    folder = run.with_name("next")
    assert main(["design", str(run), *OPTIONS, "--write", str(folder)]) == 0
    assert f"`rampup train {folder}` starts fastest ramp" in " ".join(
        capsys.readouterr().out.split()
    )
    plan, lines = rampup.build_plan(rampup.load_config(folder / "config.yml"), 1), []
    for step in range(plan.total_steps):
        position = plan.position(step)
        size = position.split.global_batch_size
        consumed = position.consumed_samples + size
        line = {
            "step": step,
            "consumed_samples": consumed,
            "phase": position.phase.index,
            "global_batch_size": size,
        }
        line |= {
            "loss": 6 - 0.4 * math.log(consumed),
            "step_seconds": 1.0 + 0.02 * size + 100 * (step == 0),
        }
        line |= (
            {"compile_seconds": 100.0}
            if step == 0
            else {"noise_scale_samples": 1e3, "noise_scale_samples_low": 900.0}
        )
        lines.append(line)
    write_lines(folder, lines)
    return folder


def report_of(capsys, folder, *options):
    """Return what a report of a run says about its prediction."""
    pytest.importorskip("matplotlib")
    capsys.readouterr()
    code, found = run_json(
        capsys, "report", str(folder), "-o", str(folder / "report.html"), *options
    )
    assert code == 0
    return found["prediction"]


def test_a_report_compares_a_run_with_its_prediction(run, follower, capsys):
    """After every tenth of the tokens, and only of those that it has passed; the folder
    of a run is not overwritten.
    """
    found = report_of(capsys, follower)
    assert (found["schedule"], found["other_settings"]) == ("fastest ramp", [])
    lines = lines_of(follower)
    assert len({line["global_batch_size"] for line in lines}) > 1
    loss, hours = found["rows"][-2:]
    assert {row["tokens"] for row in found["rows"][-2:]} == {2_000_000}
    late = [
        line["loss"]
        for line in lines
        if line["consumed_samples"] > 0.95 * lines[-1]["consumed_samples"]
    ]
    assert loss["measured"] == pytest.approx(sum(late) / len(late))
    assert loss["off"] == pytest.approx(loss["measured"] - loss["predicted"])
    # The run that was measured had this line until sample 4,000; from there, the loss
    # follows a power law.
    assert 6 - 0.4 * math.log(15_625) < loss["predicted"] < 6 - 0.4 * math.log(4_000)
    assert hours["off"] / hours["predicted"] == pytest.approx(0, abs=0.01)
    assert hours["inside"]
    write_lines(follower, lines[: len(lines) // 2])
    half = report_of(capsys, follower)
    assert half["rows"] == found["rows"][: len(half["rows"])]
    assert 0 < len(half["rows"]) < len(found["rows"])
    page = (follower / "report.html").read_text()
    assert "loss after" in page
    assert "-100%" not in page
    write_lines(follower, [line | {"loss": line["loss"] + 3} for line in lines])
    assert not report_of(capsys, follower)["rows"][-2]["inside"]
    assert "outside of the interval" in (follower / "report.html").read_text()
    assert main(["design", str(run), *OPTIONS, "--write", str(follower)]) == 2
    assert "exists; name the folder of a new run" in " ".join(
        capsys.readouterr().err.split()
    )


def test_only_a_prediction_for_the_same_settings_is_compared(follower):
    """Other tokens, another model, rate or batch, also of a step before a resume, are
    named; not a seed.
    """
    config, metrics = (follower / name for name in ("config.yml", "metrics.jsonl"))
    settings, lines = (path.read_text() for path in (config, metrics))

    def compare():
        return compare_prediction(
            follower,
            rampup.load_config(config),
            RunMetrics.from_folder(follower, name="next"),
        )

    assert compare().rows
    for before, after, told in (
        (
            "train_tokens: 2000000",
            "train_tokens: 4000000",
            "train_tokens=4000000, predicted for 2000000",
        ),
        ("base_emb_dim: 128", "base_emb_dim: 64", "base_emb_dim=64, predicted for 128"),
        (
            "learning_rate: 0.003",
            "learning_rate: 0.001",
            "learning_rate=0.001, predicted for 0.003",
        ),
        (
            "batch_size_schedule: ",
            'batch_size_schedule: "0:8" # ',
            "batch_size_schedule=0:8, predicted for ",
        ),
    ):
        assert f"\n{before}" in settings
        config.write_text(settings.replace(f"\n{before}", f"\n{after}"))
        (change,) = compare().other_settings
        assert change.startswith(told)
        assert compare().rows == ()
    config.write_text(
        settings.replace("\ninit_weights_seed: 0", "\ninit_weights_seed: 1")
    )
    assert compare().other_settings == ()
    metrics.write_text(re.sub(r'_size": \d+', '_size": 5', lines, count=1))
    assert compare().other_settings[0].startswith("step 0 had a batch of 5, predicted ")


@pytest.mark.slow
def test_a_run_is_started_from_its_design_and_keeps_it(tmp_path, capsys):
    """A real run, designed, trained, resumed from its folder and reported, and another
    candidate started by its keys.
    """
    base = [
        BASE,
        *command_line(TINY_MODEL),
        f"base_output_directory={tmp_path}",
        "num_devices=8",
    ]
    ramp = [
        "measure_gradient_noise=true",
        "enable_rampup_batch_size=false",
        "batch_size_schedule=0:16 480:32",
        "steps=60",
    ]
    assert main(["train", *base, *ramp, "run_name=pilot"]) == 0
    options = ["--train-tokens", "40K", "--assume-growth", "0", "--max-batch", "64"]
    for name in ("next", "other"):
        assert (
            main(
                [
                    "design",
                    str(tmp_path / "pilot"),
                    *options,
                    "--write",
                    str(tmp_path / name),
                ]
            )
            == 0
        )
    written = (tmp_path / "next" / "prediction.json").read_bytes()
    assert main(["train", str(tmp_path / "next"), "steps=20"]) == 0
    told = report_of(capsys, tmp_path / "next")["other_settings"]
    assert any("steps=20, predicted for -1" in change for change in told)
    assert main(["train", str(tmp_path / "next"), "train_tokens=40_000"]) == 0
    assert (tmp_path / "next" / "prediction.json").read_bytes() == written
    found = report_of(capsys, tmp_path / "next")
    assert (found["other_settings"], found["rows"][-1]["tokens"]) == ([], 40_000)
    smallest = json.loads(written)["candidates"][0]
    settings = {
        "batch_size_schedule": smallest["batch_size_schedule"],
        **smallest["rate_rule"],
    }
    assert main(["train", str(tmp_path / "other"), *command_line(settings)]) == 0
    assert (
        report_of(capsys, tmp_path / "other")["schedule"]
        == smallest["name"]
        == "constant 16"
    )


def test_a_run_of_rollouts_is_refused(tmp_path, capsys):
    """Its keys are not those of pre-training; the option that there was names what says
    how many prompts and responses its noise is worth.
    """
    folder = tmp_path / "rl"
    folder.mkdir()
    config = RolloutConfig(batch_size=8, num_generations=4)
    (folder / "config.yml").write_text(run_yaml(config, num_devices=1, run_name="rl"))
    write_lines(folder, [{"step": 0}])
    for arguments, said in (
        ([str(folder)], "the configuration of a rollout"),
        ([BASE, "--cost-per-prompt", "1"], "reinforcement_learning.md"),
    ):
        assert main(["design", *arguments]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
