"""Tests of rampup.config.notes: what a plan says about the run that was asked for."""

import json
import math
import re
from types import SimpleNamespace

import pytest

from rampup import Config, TrainProgress, build_plan, load_config
from rampup.cli import main
from rampup.config.notes import hyperparameter_notes, plan_notes
from rampup.errors import BatchDivisibilityError
from rampup.loop import events
from rampup.plan.describe import advice
from rampup.plan.hyperparameters import moment_lag_steps, warmup_steps

SCHEDULE = {"batch_scaling": "sqrt", "batch_size_schedule": "0:16 1600:64"}


def notes_of(devices=4, **keys):
    """Return what is said about a configuration, as one text."""
    config = Config(**keys)
    return "\n".join(plan_notes(config, build_plan(config, devices)))


LOADED = {
    "-1": None,
    "1": "= 8 rows per step",
    "2": "8 * 2 = 16 rows per step, if all hosts loaded; 1 of 2 does",
    "1/4": (
        "8 * 0.25 = 2 rows per step: MaxText's loaders of 4 times as many hosts take"
        " turns"
    ),
}


@pytest.mark.parametrize(("factor", "said"), LOADED.items())
def test_notes_say_what_is_loaded(factor, said):
    """The rows of a step for every kind of expansion factor; one that gives no whole
    number is refused.
    """
    keys = {"expansion_factor_real_data": factor}
    notes = notes_of(devices=1, per_device_batch_size=8, **keys)
    assert ("global_batch_to_load" in notes) == (said is not None)
    if said is not None:
        assert said in notes
        with pytest.raises(BatchDivisibilityError, match="-1 loads the batch itself"):
            notes_of(devices=1, per_device_batch_size=8, expansion_factor_real_data=1.1)


def test_notes_say_that_a_schedule_replaces_the_batch_per_device():
    """Only of one that was given, and that nothing uses."""
    both = {"batch_size_schedule": "0:16 64:32", "per_device_batch_size": 4}
    said = "per_device_batch_size=4 is not used: batch_size_schedule has the sizes"
    assert said in notes_of(**both)
    for key in both:
        assert said not in notes_of(**{key: both[key]})


def test_notes_say_that_no_rule_uses_the_reference_batch():
    """Without a rule, the rate is the same for every batch, whatever it is given for."""
    said = "batch_scaling_reference=64 is not used"
    ramp = SCHEDULE | {"batch_scaling": "none"}
    reference = ramp | {"batch_scaling_reference": 64}
    assert said in notes_of(**reference)
    assert said not in notes_of(**ramp)
    for rule in (
        {"batch_scaling": "half_life"},
        {"learning_rate_batch_scaling": "sqrt"},
        {"batch_scaling": "linear", "opt_type": "sgd"},
    ):
        assert said not in notes_of(**reference | rule)


def test_notes_say_that_a_batch_follows_the_devices():
    """Published ramps whose keys are per device have other sizes on other devices."""
    config = load_config("gpt3_175b")
    said = "\n".join(plan_notes(config, build_plan(config, 64)))
    assert (
        "the batch is per device: 64 to 6,144 samples on 64 devices, and 16 to 1,536 on"
        " num_devices=16 of the configuration"
    ) in said
    assert "per device" not in "\n".join(plan_notes(config, build_plan(config, 16)))
    # A run that goes on keeps its batches: nothing follows the devices.
    kept = build_plan(config, 8, ramp=build_plan(config, 16).ramp)
    assert "per device" not in "\n".join(plan_notes(config, kept))
    constant = {"per_device_batch_size": 4, "num_devices": 8}
    assert "16 samples on 4 devices, and 32 on" in notes_of(devices=4, **constant)
    assert "per device" not in notes_of(devices=4, num_devices=8, **SCHEDULE)


def test_notes_say_that_devices_are_taken_as_slices():
    """A closed slice on more devices is several slices, unless the keys name them."""
    keys = {"per_device_batch_size": 4, "ici_data_parallelism": 4}
    said = notes_of(devices=8, **keys)
    assert "8 devices are taken as 2 slices of 4, as the ici axes say" in said
    assert "slices" not in notes_of(devices=8, num_slices=2, **keys)
    assert "slices" not in notes_of(devices=8, dcn_data_parallelism=2, **keys)
    assert "slices" not in notes_of(devices=4, **keys)
    assert "slices" not in notes_of(devices=8, per_device_batch_size=4)


def test_a_last_batch_beyond_the_samples_asked_for_is_said():
    """100 samples in batches of 16 are 112, and their epochs need as many rows; a
    smaller last phase takes exactly the samples, and nothing is said.
    """
    keys = {"per_device_batch_size": 4, "train_samples": 100}
    said = notes_of(**keys, num_epoch=1)
    assert "takes 112 samples, 12 more than train_samples=100" in said
    assert "at least 112 training rows" in said
    assert "at least 56 training rows" in notes_of(**keys, num_epoch=2)
    assert "100:" not in said
    exact = {"batch_size_schedule": "0:16 96:4", "train_samples": 100, "num_epoch": 1}
    assert "more than" not in notes_of(**exact)
    tokens = {"per_device_batch_size": 4, "train_tokens": 12_800}
    assert "12 more than train_tokens=12,800, which are 100" in notes_of(**tokens)
    for quiet in ({"train_samples": 96}, {"steps": 7}):
        said = notes_of(per_device_batch_size=4, **quiet)
        assert "more than" not in said
        assert "rows" not in said


@pytest.mark.parametrize("schedule", ["0:16", "0:8 40:16", "0:16 90:32"])
def test_the_schedule_with_a_smaller_last_batch_is_named(schedule):
    """It has the batches of the run up to the last one, which takes the samples that
    are left; what cannot be split over the replicas is not named.
    """
    keys = {"batch_size_schedule": schedule, "train_samples": 100}
    said = notes_of(**keys)
    (exact,) = re.findall(r"batch_size_schedule='([^']*)'", said)
    whole = build_plan(Config(**keys), 4)
    ended = build_plan(Config(batch_size_schedule=exact, train_samples=100), 4)
    assert (ended.total_steps, ended.consumed_samples) == (whole.total_steps, 100)
    sizes = [
        [plan.position(step).split.global_batch_size for step in range(6)]
        for plan in (whole, ended)
    ]
    assert sizes[0][: whole.total_steps - 1] == sizes[1][: whole.total_steps - 1]
    assert "batch_size_schedule=" not in notes_of(8, **keys)


def test_a_run_that_ends_before_its_ramp_names_the_batches_it_never_has():
    """The advice has the last batch of the run and the one that it never reaches."""
    plan = build_plan(Config(batch_size_schedule="0:2 1000:16", steps=50), 2)
    (said,) = [note for note in advice(plan) if "ends before" in note]
    assert said.startswith("steps=50 ends before phase 1 and those after it")
    assert "2 samples" in said
    assert "16 are never reached" in said


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"per_device_batch_size": 64, "steps": 50, "warmup_steps_fraction": 0.1}, 5),
        ({"per_device_batch_size": 64, "steps": 20, "warmup_steps_fraction": 0.08}, 2),
        ({**SCHEDULE, "steps": 120, "warmup_steps_fraction": 0.05}, 9),
    ],
)
def test_a_warm_up_of_a_few_steps_is_said(keys, steps):
    """It is counted on the run's own clock; below 1 / (1 - adam_b1) steps it is said."""
    config = Config(**keys)
    plan = build_plan(config, 4)
    assert warmup_steps(plan, config.warmup_steps_fraction) == steps
    assert f"the warm-up takes {steps} of {keys['steps']} steps" in notes_of(**keys)
    assert "warmup_steps=10 has them" in notes_of(**keys)
    assert "fewer than 1 / (1 - adam_b1) = 10" in notes_of(**keys)
    for enough in ({"warmup_steps": 10}, {"warmup_steps_fraction": 0.9}):
        assert "the warm-up takes" in notes_of(**(keys | enough))
        assert "fewer than" not in notes_of(**(keys | enough))
    assert "warm-up" not in notes_of(**(keys | {"warmup_steps_fraction": 0}))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"warmup_steps_fraction": 0.1}, "100 of 1,000 steps (1,600 samples)"),
        ({"warmup_steps": 40}, "40 of 1,000 steps (640 samples)"),
        ({"warmup_steps": 40, "opt_type": "sgd"}, "40 of 1,000 steps (640 samples)"),
        (
            {"warmup_steps": 110, "batch_size_schedule": "0:16 1600:64"},
            "110 of 1,000 steps (2,240 samples)",
        ),
        (
            {"batch_size_schedule": "auto", "per_device_batch_size_start": 2},
            "at most 100 of 1,000 steps",
        ),
        ({"warmup_steps": 0}, None),
        ({"warmup_steps_fraction": 0}, None),
    ],
)
def test_the_warm_up_of_a_plan_is_one_line(keys, line):
    """It has its steps and their samples; the samples of `auto` are not known before,
    and without a warm-up there is no line.
    """
    keys = {"per_device_batch_size": 4, "eval_interval": -1} | keys
    lines = [note for note in notes_of(**keys).split("\n") if "warm-up" in note]
    assert lines == ([] if line is None else [f"the warm-up takes {line}"])


@pytest.mark.parametrize("where", ["plan", "json", "report", "train"])
def test_every_command_has_the_same_notes(where, tmp_path, capsys, monkeypatch):
    """Those of the plan alone and those of its configuration, in one order."""
    settings = ["batch_size_schedule=0:16 1600:64 99999:128", "steps=120"]
    settings += ["enable_rampup_batch_size=false", "warmup_steps_fraction=0.05"]
    config = load_config("base.yml", settings)
    plan = build_plan(config, 4)
    notes = plan_notes(config, plan)
    parts = ("warm-up", "rampup_microbatch=auto", "ends before", "batch_scaling=sqrt")
    assert all(part in note for note, part in zip(notes, parts, strict=True))
    if where == "train":
        event = events.RunPlanned(
            plan=plan,
            folder=tmp_path,
            devices=[SimpleNamespace(device_kind="cpu")],
            num_parameters=1,
            notes=notes,
        )
        TrainProgress()(event)
        printed = " ".join(capsys.readouterr().out.split())  # wrapped at 80 columns
        assert [n for n in notes if f"note: {n}" in printed] == list(notes)
        return
    monkeypatch.chdir(tmp_path)
    options = {"plan": [], "json": ["--json"], "report": ["-o", "a.html", "--json"]}
    name = "report" if where == "report" else "plan"
    command = [name, "base.yml", *settings, "--devices", "4", *options[where]]
    assert main(command) == 0
    printed = capsys.readouterr().out
    if where == "plan":
        assert [n for n in notes if f"note: {n}\n" in printed] == list(notes)
        assert printed.count("note: ") == len(notes)
    else:
        assert json.loads(printed)["notes"] == list(notes)


@pytest.mark.parametrize(
    ("keys", "is_said"),
    [
        ({"batch_size_schedule": "0:16 1600:64"}, True),
        ({"batch_size_schedule": "0:16 1600:32"}, False),
        ({"batch_size_schedule": "0:64 1600:16"}, False),
        (SCHEDULE, False),
        (SCHEDULE | {"batch_scaling": "half_life"}, False),
        ({"per_device_batch_size": 4}, False),
        ({"batch_size_schedule": "auto", "per_device_batch_size_start": 2}, False),
    ],
)
def test_a_rate_that_stays_while_the_batch_grows_is_asked_about(keys, is_said):
    """From more than a factor of two on, one line names the rule that follows."""
    said = notes_of(**keys, eval_interval=-1)
    assert ("batch_scaling=sqrt" in said) == is_said


@pytest.mark.parametrize(
    ("growth", "b2", "steps"),
    [(2, 0.95, 7.5), (8, 0.95, 26), (2, 0.99, 38), (8, 0.99, 130), (2, 0.999, 376)],
)
def test_the_lag_of_the_second_moment_is_the_loss_of_its_steps(growth, b2, steps):
    """The closed form is the sum of the steps that are lost while the second moment
    falls from k times its new value to it.
    """
    closed = moment_lag_steps(growth, b2)
    assert closed == pytest.approx(steps, rel=0.02)
    moment, lost = float(growth), 0.0
    for _ in range(int(60 / (1 - b2))):
        lost += 1 - 1 / math.sqrt(moment)
        moment = b2 * moment + (1 - b2)
    assert closed == pytest.approx(lost, rel=0.03, abs=0.5)
    assert moment_lag_steps(1, b2) == moment_lag_steps(0.5, b2) == 0


def test_the_steps_that_a_growth_costs_are_listed_and_compared_with_the_phase():
    """One line has each growth, another the phases that are shorter than their lag."""
    keys = SCHEDULE | {"batch_size_schedule": "0:16 1600:64 2000:128"}
    config = Config(**keys, steps=400, adam_b2=0.99)
    plan = build_plan(config, 4)
    listed, short = hyperparameter_notes(config, plan)
    assert "16 -> 64 samples 81" in listed
    assert "64 -> 128 samples 38" in listed
    assert "phase 1 has 7 steps" in short
    (one,) = hyperparameter_notes(Config(**keys, steps=4000, adam_b2=0.6), plan)
    assert "16 -> 64 samples 2" in one
    sgd = Config(**keys | {"batch_scaling": "linear"}, opt_type="sgd")
    assert hyperparameter_notes(sgd, plan) == ()
    constant = Config(per_device_batch_size=4, warmup_steps_fraction=0)
    assert hyperparameter_notes(constant, build_plan(constant, 4)) == ()
