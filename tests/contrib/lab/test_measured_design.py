"""Tests of rampup.contrib.lab.measured_design: what is read from the folder of a run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from helpers.toy import campaign

import rampup
from rampup.cli import main
from rampup.config.files import run_yaml
from rampup.contrib.lab.design_model import (
    DesignModel,
    NoiseCurve,
    StepTimes,
    noise_curves,
)
from rampup.contrib.lab.measured_design import Forecast
from rampup.contrib.lab.measurements import Measurements
from rampup.errors import DataError, RampupError
from rampup.plan.noise_scale import NoiseScale

LENGTH = 128
DIMS, BLOCKS, ROWS = 200, 4, 4
BATCH = BLOCKS * ROWS
CONFIG = rampup.Config(batch_size_schedule="0:16", steps=1000)


def measured_steps(rng, truth, steps):
    """Return S and G2 of steps with Gaussian gradients and a known noise scale in
    samples; tr(Sigma) is DIMS.
    """
    truth = np.broadcast_to(truth, steps)
    traces = rng.chisquare((BLOCKS - 1) * DIMS, steps) / (BLOCKS - 1)
    along = np.sqrt(DIMS * BATCH / truth) + rng.standard_normal(steps)
    norms = (along**2 + rng.chisquare(DIMS - 1, steps)) / BATCH
    return [
        (float(trace), float(norm - trace / BATCH))
        for trace, norm in zip(traces, norms, strict=True)
    ]


def write_run(folder, steps, *, change=lambda number: {}):
    """Write the metrics of a run whose S and G2 are given; a sample has a weight of 128
    tokens, as in `rampup train`.
    """
    noise, lines = NoiseScale(half_life_samples=30 * BATCH), []
    for number, (trace, squared_norm) in enumerate(steps):
        noise.update(
            samples=BATCH,
            weight=BATCH * LENGTH,
            trace=trace * LENGTH,
            squared_norm=squared_norm,
        )
        line = {
            "step": number,
            "consumed_samples": (number + 1) * BATCH,
            "phase": 0,
            "global_batch_size": BATCH,
            "loss": 2.0,
        }
        line |= {
            "tokens_per_second": 1e4,
            "gradient_noise_trace": trace * LENGTH,
            "gradient_squared_norm": squared_norm,
        }
        # The averages of the last lines are enough to know the samples of a token.
        line |= noise.metrics() if number > len(steps) - 3 else {}
        lines.append(line | change(number))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return folder


def test_interval_of_a_design_contains_a_noise_scale_far_above_the_batch(tmp_path):
    """Of 50 runs with 100 times the batch, at least 85% contain it at every place, and
    the middle of them is near the truth.
    """
    truth, rng, covered, ends = 100 * BATCH, np.random.default_rng(0), [], []
    for _ in range(50):
        folder = write_run(tmp_path / "run", measured_steps(rng, truth, 400))
        noise, low, high = noise_curves(
            Measurements.read([folder], rampup.Config()).noise
        )
        covered.append(
            [
                low.at(place) <= truth <= high.at(place)
                for place in np.geomspace(1, 50_000, 8)
            ]
        )
        ends.append(noise.knots[-1][1])
    assert min(np.mean(covered, axis=0)) >= 0.85
    # The running estimates that have a value have a median of a third of the truth.
    assert 0.65 * truth <= np.median(ends) <= 1.5 * truth


# The noise scale over the samples: constant, growing as published and faster, far above
# the batch, and late.
TRUTHS = [
    lambda samples: 60.0 + 0 * samples,
    lambda samples: 20 * (1 + samples / 400) ** 0.5,
    lambda samples: 40 * (1 + samples / 200) ** 0.3,
    lambda samples: 10 * (1 + samples / 800),
    lambda samples: 200 * (1 + samples / 1000) ** 0.5,
    lambda samples: 80 * (1 + samples / 1600) ** 0.7,
    lambda samples: 20 + 80 * (samples / 6400) ** 3,
    lambda samples: 30 * (1 + samples / 100) ** 0.45,
]


@pytest.mark.parametrize("runs", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_intervals_at_the_start_and_the_end_cover_the_truth(runs, tmp_path):
    """In 87% to 93% of runs the interval has the noise scale of the first step, and in
    as many that of the last one.
    """
    steps, covered = 400, []
    samples = BATCH * np.arange(steps)
    for number, truth in enumerate(TRUTHS):
        rng = np.random.default_rng(number + 100)
        for _ in range(runs):
            folder = write_run(
                tmp_path / "run", measured_steps(rng, truth(samples), steps)
            )
            _, low, high = noise_curves(Measurements.read([folder], CONFIG).noise)
            ends = [
                [curve.knots[place][1] for curve in (low, high)] for place in (0, -1)
            ]
            covered.append(
                [
                    low <= truth(place) <= high
                    for (low, high), place in zip(ends, samples[[0, -1]], strict=True)
                ]
            )
    assert all(0.87 <= share <= 0.93 for share in np.mean(covered, axis=0))


@pytest.mark.parametrize(
    ("truths", "runs"),
    [(TRUTHS[1::4], 1), campaign(TRUTHS, 13)],
    ids=(2, 104),
)
def test_a_recommended_schedule_costs_what_is_printed(truths, runs, tmp_path):
    """In 90% of runs of known truth, the fastest schedule needs between half and twice
    the printed additional tokens.
    """
    steps, ratios = 400, []
    tuned = tmp_path / "tune.json"
    phases = [
        {"global_batch_size": size, "step_seconds": 0.5 + size / 32}
        for size in (16, 32, 64)
    ]
    tuned.write_text(json.dumps({"phases": phases}))
    samples = BATCH * np.arange(2 * steps)
    for number, truth in enumerate(truths):
        rng, noise = np.random.default_rng(number), truth(samples)
        progress = np.cumsum(BATCH / (1 + BATCH / noise))
        knots = tuple(zip(progress.tolist(), noise.tolist(), strict=True))
        model = DesignModel(
            noise=NoiseCurve(knots=knots, growth=0.0), times=StepTimes.fit({1: 1.0})
        )
        for _ in range(runs):
            folder = write_run(
                tmp_path / "run", measured_steps(rng, noise[:steps], steps)
            )
            tokens = 2 * steps * BATCH * LENGTH
            found = rampup.contrib.lab.design_ramp(
                CONFIG,
                [folder, tuned],
                num_devices=1,
                train_tokens=tokens,
                max_batch=256,
            )
            best = next(
                each for each in found["candidates"] if each["name"] == found["fastest"]
            )
            assert best["rate_rule"]
            assert (
                best["token_overhead_low"]
                <= best["token_overhead"]
                <= best["token_overhead_high"]
            )
            starts = [start // LENGTH for start in best["start_tokens"]]
            true = model.run(
                tuple(zip(starts, best["sizes"], strict=True)),
                progress=float(progress[-1]),
            )
            ratios.append((true.samples / true.progress - 1) / best["token_overhead"])
    assert np.mean([0.5 <= ratio <= 2 for ratio in ratios]) >= 0.9


def test_a_pilot_whose_last_octave_is_not_precise_is_refused(tmp_path):
    """After a noise scale of 20 samples, the gradient cannot be told from zero: the
    noise scale at the end, from which a design goes on, is not known.
    """
    rng = np.random.default_rng(1)
    steps = [*measured_steps(rng, 20.0, 100), *measured_steps(rng, 1e9, 900)]
    folder = write_run(tmp_path / "run", steps)
    with pytest.raises(DataError, match=r"at least .* not precise enough to design"):
        rampup.contrib.lab.design_ramp(
            CONFIG, folder, num_devices=1, train_tokens=10**7, max_batch=256
        )
    noise = Measurements.read([folder], CONFIG).noise
    assert noise[0].noise == pytest.approx(20, rel=0.3)
    assert noise[0].high < 40
    assert noise[-1].low > 1000
    assert noise[-1].high == math.inf


@pytest.mark.parametrize(("clock", "share"), [("samples", 0.25), ("steps", 1 / 3)])
def test_predicted_loss_has_the_configured_warm_up(clock, share, tmp_path):
    """A warm-up in steps ends where a ramp has consumed their samples, or on a clock of
    steps after their share of the steps; the decay of a cosine begins there.
    """
    folder = write_run(
        tmp_path / "run",
        measured_steps(np.random.default_rng(0), 100.0, 200),
        change=lambda number: {"loss": 6 - 0.5 * math.log(number + 1)},
    )

    def losses(**warmup):
        config = rampup.Config(
            max_target_length=LENGTH,
            learning_rate_clock=clock,
            train_samples=6400,
            steps=-1,
            **warmup,
        )
        measured = Measurements.read([folder], config)
        forecast = Forecast.from_measurements(measured, config, 6400, 16, None)
        # 200 steps, and then 100.
        course = forecast.course(((0, 16), (3200, 32)))
        return [row["loss"] for row in course if row["loss"] is not None]

    in_steps = losses(warmup_steps=100)
    assert len(in_steps) > 3
    assert in_steps == pytest.approx(losses(warmup_steps_fraction=share), abs=1e-9)
    assert in_steps != pytest.approx(losses(), abs=1e-3)


STUDY = json.loads(Path(__file__).with_name("study.json").read_text())


def study_pilot(name, folder):
    """Write the metrics of a pilot with batches of 8 of the model of
    benchmarks/ramp_controls.py, on another text.
    """
    rows = STUDY["pilots"][name]
    folder.mkdir()
    lines = [
        {
            "step": number,
            "consumed_samples": 8 * (number + 1),
            "phase": 0,
            "global_batch_size": 8,
            "loss": loss,
            "tokens_per_second": 512 / (1 + 8 / 64),
            "gradient_noise_trace": trace,
            "gradient_squared_norm": norm,
            "noise_scale_samples": 1.0,
            "noise_scale_tokens": 64.0,
        }
        for number, (loss, trace, norm) in enumerate(
            zip(rows["loss"], rows["S"], rows["G2"], strict=True)
        )
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_predicted_losses_contain_those_of_whole_runs(tmp_path):
    """Of 41 whole runs of an earlier study, with constant batches and with ramps, 85% to
    95% of the places are in the interval that follows from a pilot; of pilots with half
    and double the rate among them. Vague pilots are refused.
    """
    config = rampup.Config(
        max_target_length=64,
        learning_rate_clock="samples",
        train_samples=8192,
        steps=-1,
    )
    inside, refused = [], []
    for name in STUDY["pilots"]:
        measured = Measurements.read([study_pilot(name, tmp_path / name)], config)
        try:
            measured.refuse_vague_end()
        except DataError:
            refused.append(name)
            continue
        forecast = Forecast.from_measurements(measured, config, 8192, 8, None)
        for schedule, runs in STUDY["runs"].items():
            pairs = [tuple(map(int, part.split(":"))) for part in schedule.split()]
            for place, row in enumerate(forecast.course(pairs)):
                if row["loss"] is not None:
                    losses = [run[place] for run in runs if run[place] is not None]
                    inside += [
                        row["loss_low"] <= loss <= row["loss_high"] for loss in losses
                    ]
    assert refused == ["seed2", "share16"]
    assert len(inside) > 2000
    assert 0.85 <= np.mean(inside) <= 0.95


def write_critical(run, name, **values):
    """Write a result of `rampup critical` next to a run."""
    found = {
        "step": 100,
        "consumed_samples": 6400,
        "global_batch_size": 64,
        "critical_batch_size": 64,
        "tokens": 1000,
    }
    # A batch that needs twice the tokens is the noise scale.
    found |= {"decisive": True, "tolerance": 0.05, "gain": 0.1}
    found |= {"bound": "exact"} | values
    folder = run.with_name("run.critical") / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(found))
    return folder / "result.json"


def test_critical_batches_count_by_the_tokens_that_they_need(tmp_path):
    """A batch that needs 20% more tokens is a fifth of the noise scale; the smallest
    of several counts, and neither a lower bound nor what decided nothing.
    """
    run = write_run(
        tmp_path / "run", measured_steps(np.random.default_rng(0), 1000, 400)
    )
    noise = Measurements.read([run], rampup.Config()).noise
    sizes = {"tolerance": 0.02, "gain": 0.12, "consumed_samples": 400 * BATCH}
    write_critical(run, "step-100", critical_batch_size=2, bound="at_least")
    write_critical(
        run, "step-200", decisive=False, critical_batch_size=None, bound=None
    )
    assert Measurements.read([run], rampup.Config()).noise == noise
    write_critical(run, "step-300", **sizes, critical_batch_size=16)
    write_critical(run, "step-400", **sizes, critical_batch_size=8, bound="at_most")
    found = Measurements.read([run], rampup.Config())
    assert found.source == "critical"
    assert found.noise[-1].noise == pytest.approx(5 * 8)
    assert found.noise[-1].low == pytest.approx(40 * noise[-1].low / noise[-1].noise)


@pytest.mark.parametrize(("size", "source"), [(8, "critical"), (64, "noise_scale")])
def test_the_smaller_of_two_noise_scales_counts(size, source, tmp_path):
    """A critical batch below the noise scale scales that down in proportion, so that
    the measured growth stays; one above it changes nothing.
    """
    run = write_run(
        tmp_path / "run", measured_steps(np.random.default_rng(0), BATCH, 400)
    )
    noise = Measurements.read([run], rampup.Config()).noise
    write_critical(
        run,
        "step-400-a",
        step=400,
        consumed_samples=400 * BATCH,
        critical_batch_size=size,
    )
    measured = Measurements.read([run], rampup.Config())
    assert measured.source == source
    ratio = min(size / noise[-1].noise, 1.0)
    assert [point.noise for point in measured.noise] == pytest.approx(
        [point.noise * ratio for point in noise]
    )
    noted = any("the smaller one" in note for note in measured.notes)
    assert noted == (source == "critical")


@pytest.mark.parametrize(
    "text",
    [
        '{"bound": "exact"',
        '{"critical_batch_size": 8}',
        "null",
        '{"bound": "exact", "critical_batch_size": 8, "tolerance": 0, "gain": 1}',
    ],
)
def test_damaged_critical_result_is_refused_in_words(text, tmp_path):
    """The error names the file, and what to do with it."""
    run = write_run(
        tmp_path / "run", measured_steps(np.random.default_rng(0), 20.0, 40)
    )
    write_critical(run, "step-20").write_text(text)
    with pytest.raises(
        DataError, match=r"step-20/result.json is damaged.*delete its folder"
    ):
        Measurements.read([run], rampup.Config())


HUGE = 10**400


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("consumed_samples", value) for value in ("many", None, HUGE, 1.5)),
        *(("global_batch_size", value) for value in ("many", None, HUGE, True)),
        ("consumed_samples", 30 * BATCH),
        ("global_batch_size", 0),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_damaged_metrics_are_refused_in_words(key, value, tmp_path, capsys):
    """The error names the run, the step, the key and the value, which is shortened."""
    rng = np.random.default_rng(0)
    run = write_run(
        tmp_path / "run",
        measured_steps(rng, 20.0, 40),
        change=lambda number: {key: value} if number == 30 else {},
    )
    with pytest.raises(
        RampupError, match=f"run, step 30 of its metrics.jsonl: .*{key}="
    ) as caught:
        rampup.contrib.lab.design_ramp(CONFIG, run, num_devices=1, train_tokens=10**7)
    assert len(str(caught.value)) < 300
    if value is HUGE and key == "global_batch_size":
        (run / "config.yml").write_text(run_yaml(CONFIG, num_devices=1, run_name="run"))
        assert main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 2
        assert f"{key}=1000" in capsys.readouterr().err
