"""Tests of rampup.cli.report: the content of a report."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rampup import Config
from rampup.cli.report import gather_report
from rampup.config.files import run_yaml
from rampup.show.report import report_html

CONFIGS = Path(__file__).parent.parent.parent / "configs"
MAXTEXT = {"enable_rampup_batch_size": True, "global_rampup_samples": 500, "steps": 100}
MAXTEXT |= {"per_device_batch_size_start": 4.0, "per_device_batch_size": 12.0}


def gathered(*words, devices=4, **options):
    """Return a report for a number of devices."""
    return gather_report(SimpleNamespace(**{"sources": words, "devices": devices, "system": None} | options))


NAMES = sorted(path.stem for path in CONFIGS.glob("*.yml"))
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name not in ("base", "rl", "deepseek_v3")]


@pytest.mark.parametrize("name", ["base", "rl", "deepseek_v3", *SLOW])
def test_gather_report_of_every_preset(name):
    """Every configuration that comes with rampup becomes a page of less than a megabyte."""
    report = gathered(str(CONFIGS / f"{name}.yml"), devices={"base": 4, "rl": 8}.get(name))
    page = report_html(report)
    assert report.title == name
    assert len(page) < 1_000_000
    assert all(name in page for name in report.config.to_dict())


def test_gather_report_draws_the_learning_rate_that_the_run_had(tmp_path):
    """The steps that are done have their own rate, which a resume may have changed, and the others the configured one."""
    (tmp_path / "config.yml").write_text(run_yaml(Config(steps=7, num_devices=2)))
    line = {"step": 0, "consumed_samples": 8, "global_batch_size": 8, "phase": 0, "loss": 1.5, "learning_rate": 0.125}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    report = gathered(str(tmp_path), devices=2)
    rate, planned = report.rates["samples"], gathered(str(tmp_path / "config.yml"), devices=2).rates["samples"]
    assert [rate(step) for step in range(7)] == [0.125, *map(planned, range(1, 7))]


@pytest.mark.parametrize(("increment", "good"), [(2.0, True), (3.0, False)])
def test_gather_report_of_another_system(tmp_path, increment, good):
    """With --from the page has the verdict, whether the file is usable or not."""
    file = tmp_path / "theirs.yml"
    file.write_text(json.dumps(MAXTEXT | {"per_device_batch_size_increment": increment}))
    report = gathered(str(file), "num_target_devices=4", system="maxtext")
    assert report.verdict.ok == good
    page = report_html(report)
    assert ("accepts" if good else "rejects") in page
    assert "Verdict" in page
