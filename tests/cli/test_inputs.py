"""Tests of rampup.cli.plot: configurations and run folders named on a command line."""

import json
from pathlib import Path

import pytest

from rampup import Config
from rampup.cli import main
from rampup.cli.plot import parse_inputs
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


def test_a_picture_is_named_after_what_it_shows(folder, tmp_path, monkeypatch, capsys):
    """A file may have '=' in its name. `plot` without -o writes NAME.png of a run or configuration here, and says so."""
    odd = folder / "a=b.yml"
    odd.write_text("steps: 3\n")
    assert parse_inputs([str(odd)]).config == str(odd)
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(folder)]) == 0
    assert capsys.readouterr().out == "wrote a.png\n"
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert parse_inputs([BASE]).name == "base"
    assert parse_inputs([str(folder), str(tmp_path)]).name == "runs"


def test_read_config_of_a_run(folder, monkeypatch):
    """The configuration in a run folder is read exactly; without it, the error says what can be drawn."""
    config = Config(steps=7, learning_rate=1e-5, batch_size_schedule="0:8 80:16", run_name="a", num_devices=2)
    inputs = parse_inputs([str(folder)])
    with pytest.raises(ConfigError, match=r"has no config\.yml.*metrics alone can be drawn"):
        inputs.read_config()
    (folder / "config.yml").write_text(run_yaml(config))
    monkeypatch.setenv("RAMPUP_STEPS", "9")
    assert inputs.read_config() == config
    with pytest.raises(ConfigError, match="2 runs are named"):
        parse_inputs([str(folder), str(folder)]).read_config()


def test_read_runs_refuses_missing_metrics(folder):
    """A torn file and a configuration have no metrics."""
    (folder / "metrics.jsonl").write_text('{"step": 0, "consu')
    with pytest.raises(DataError, match="no steps"):
        parse_inputs([str(folder)]).read_runs()
    with pytest.raises(ConfigError, match="folder of a run"):
        parse_inputs([BASE]).read_runs()
