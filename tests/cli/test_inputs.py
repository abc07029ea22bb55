"""Tests of rampup.cli.inputs: what is meant by what is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rampup import Config, build_plan
from rampup.cli.inputs import learning_rates, parse_inputs
from rampup.config.files import run_yaml
from rampup.errors import ConfigError, DataError

BASE = str(Path(__file__).parent.parent.parent / "configs" / "base.yml")
LINE = {"step": 0, "consumed_samples": 8, "global_batch_size": 8, "phase": 0, "loss": 1.5, "tokens_per_second": 10.0}


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of one step."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    return run


def test_settings_configurations_and_folders_are_told_apart(folder):
    """A folder is a run, a word with '=' a setting, and anything else a configuration; a file may have '=' in its name."""
    assert parse_inputs([BASE, "steps=3"]).overrides == ("steps=3",)
    assert parse_inputs([str(folder)]).runs == (folder,)
    odd = folder / "a=b.yml"
    odd.write_text("steps: 3\n")
    assert parse_inputs([str(odd)]).config == str(odd)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name a configuration"),
        (["steps=3"], "name a configuration"),
        (["a.yml", "b.yml"], "one configuration at a time"),
        (["RUN", "a.yml"], "not both"),
        (["RUN", "steps=3"], "settings of a run folder are fixed"),
    ],
)
def test_names_that_do_not_go_together(folder, words, message):
    """Nothing, two configurations, both kinds at once, settings for a run."""
    with pytest.raises(ConfigError, match=message):
        parse_inputs([str(folder) if word == "RUN" else word for word in words])


def test_a_run_keeps_its_configuration(folder):
    """What a run's folder says it was started with is read back exactly; without it, what can be drawn is said."""
    config = Config(steps=7, learning_rate=1e-5, batch_size_schedule="0:8 80:16", run_name="a", num_devices=2)
    inputs = parse_inputs([str(folder)])
    with pytest.raises(ConfigError, match=r"has no config\.yml.*metrics alone can be drawn"):
        inputs.read_config({})
    (folder / "config.yml").write_text(run_yaml(config))
    assert inputs.read_config({"RAMPUP_STEPS": "9"}) == config
    with pytest.raises(ConfigError, match="2 runs are named"):
        parse_inputs([str(folder), str(folder)]).read_config({})


def test_runs_of_one_name_are_told_apart_by_their_folders(folder, tmp_path):
    """Runs are called by their folder's name, or by its path where two have the same."""
    other = tmp_path / "more" / "a"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text(json.dumps(LINE))
    assert [run.name for run in parse_inputs([str(folder)]).read_runs()] == ["a"]
    assert [run.name for run in parse_inputs([str(folder), str(other)]).read_runs()] == [str(folder), str(other)]


def test_metrics_that_are_not_there(folder):
    """An empty folder, a torn file and a configuration have no metrics."""
    (folder / "metrics.jsonl").write_text('{"step": 0, "consu')
    with pytest.raises(DataError, match="no steps"):
        parse_inputs([str(folder)]).read_runs()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="no steps"):
        parse_inputs([str(folder)]).read_runs()
    with pytest.raises(ConfigError, match="folder of a run"):
        parse_inputs([BASE]).read_runs()


def test_rollouts_have_no_ramp_to_draw():
    """A reinforcement-learning configuration says which commands show it."""
    with pytest.raises(ConfigError, match="rampup report"):
        parse_inputs([BASE.replace("base", "rl")]).read_config({})


def test_the_plan_s_own_clock_comes_first():
    """Both clocks have the configured schedule, each on its own count."""
    config = Config(batch_size_schedule="0:8 80:16", steps=20, learning_rate_clock="steps")
    plan = build_plan(config, 1)
    rates = learning_rates(config, plan)
    assert list(rates) == ["steps", "samples"]
    assert list(learning_rates(config, replace(plan, learning_rate_clock="samples"))) == ["samples", "steps"]
    assert rates["steps"](10) != rates["samples"](10)
