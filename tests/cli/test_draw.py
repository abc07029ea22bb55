"""Tests of rampup.cli.draw: configurations and run folders named on a command line, and
the content of a report.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rampup import Config, build_plan
from rampup.cli import main
from rampup.cli.draw import gather_report, parse_inputs
from rampup.config.files import run_yaml
from rampup.errors import ConfigError, DataError
from rampup.show.report import report_html

CONFIGS = Path(__file__).parent.parent.parent / "configs"
BASE = str(CONFIGS / "base.yml")
LINE = {
    "step": 0,
    "consumed_samples": 8,
    "global_batch_size": 8,
    "phase": 0,
    "loss": 1.5,
    "tokens_per_second": 10.0,
}


@pytest.fixture
def folder(tmp_path):
    """The folder of a run of one step."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    return run


def test_a_picture_is_named_after_what_it_shows(folder, tmp_path, monkeypatch, capsys):
    """A file may have '=' in its name. `plot` without -o writes NAME.png of a run or
    configuration here, and says so.
    """
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
    """The configuration in a run folder is read exactly; without it, the error says
    what can be drawn.
    """
    config = Config(
        steps=7,
        learning_rate=1e-5,
        batch_size_schedule="0:8 80:16",
        run_name="a",
        num_devices=2,
    )
    inputs, args = parse_inputs([str(folder)]), SimpleNamespace(devices=None)
    with pytest.raises(
        ConfigError, match=r"has no config\.yml.*metrics alone can be drawn"
    ):
        inputs.read_plan(args)
    (folder / "config.yml").write_text(run_yaml(config))
    monkeypatch.setenv("RAMPUP_STEPS", "9")
    assert inputs.read_plan(args) == (config, build_plan(config, 2))
    with pytest.raises(ConfigError, match="2 runs are named"):
        parse_inputs([str(folder), str(folder)]).read_plan(args)


def test_a_name_without_a_file_or_folder_is_said_first(folder, tmp_path):
    """Beside a run, and beside another such name: they are no configurations."""
    missing = str(tmp_path / "missing")
    for words in ([missing], [str(folder), missing], [missing, f"{missing}2"]):
        with pytest.raises(ConfigError, match="missing: no such file or folder"):
            parse_inputs(words)
    assert parse_inputs(["base"]).name == "base"


def test_a_report_is_named_after_what_it_shows(tmp_path, monkeypatch, capsys):
    """As `plot` does, `report` without -o writes NAME.html here, and says so."""
    monkeypatch.chdir(tmp_path)
    assert main(["report", BASE, "--devices", "4"]) == 0
    assert capsys.readouterr().out == "wrote base.html\n"
    assert (tmp_path / "base.html").stat().st_size > 1000


def test_read_runs_refuses_missing_metrics(folder):
    """A torn file and a configuration have no metrics."""
    (folder / "metrics.jsonl").write_text('{"step": 0, "consu')
    with pytest.raises(DataError, match="no steps"):
        parse_inputs([str(folder)]).read_runs()
    with pytest.raises(ConfigError, match="folder of a run"):
        parse_inputs([BASE]).read_runs()


MAXTEXT = {"enable_rampup_batch_size": True, "global_rampup_samples": 500, "steps": 100}
MAXTEXT |= {"per_device_batch_size_start": 4.0, "per_device_batch_size": 12.0}


def gathered(*words, devices=4, **options):
    """Return a report for a number of devices."""
    return gather_report(
        SimpleNamespace(
            **{"sources": words, "devices": devices, "system": None} | options
        )
    )


NAMES = sorted(path.stem for path in CONFIGS.glob("*.yml"))
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in NAMES
    if name not in ("base", "rl", "deepseek_v3")
]


@pytest.mark.parametrize("name", ["base", "rl", "deepseek_v3", *SLOW])
def test_gather_report_of_every_preset(name):
    """Every configuration that comes with rampup becomes a page of less than a
    megabyte.
    """
    report = gathered(
        str(CONFIGS / f"{name}.yml"), devices={"base": 4, "rl": 8}.get(name)
    )
    page = report_html(report)
    assert report.title == name
    assert len(page) < 1_000_000
    assert all(name in page for name in report.config.to_dict())


def test_gather_report_draws_the_learning_rate_that_the_run_had(tmp_path):
    """The steps that are done have their own rate, which a resume may have changed, and
    the others the configured one.
    """
    (tmp_path / "config.yml").write_text(run_yaml(Config(steps=7, num_devices=2)))
    line = {
        "step": 0,
        "consumed_samples": 8,
        "global_batch_size": 8,
        "phase": 0,
        "loss": 1.5,
        "learning_rate": 0.125,
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    report = gathered(str(tmp_path), devices=2)
    rate, planned = (
        report.rates["samples"],
        gathered(str(tmp_path / "config.yml"), devices=2).rates["samples"],
    )
    assert [rate(step) for step in range(7)] == [0.125, *map(planned, range(1, 7))]
