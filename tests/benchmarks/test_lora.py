"""Tests of benchmarks/lora.py: the batch for fine-tuning with adapters."""

import json
import subprocess
import sys
from pathlib import Path

import lora
import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_numbers_of_the_results():
    """The table of the guide is the report of the committed results."""
    page = (ROOT / "docs/guides/fine_tuning.md").read_text()
    assert lora.report(json.loads(lora.RESULTS.read_text())) in page


@pytest.mark.bench
def test_a_toy_sweep_has_every_column(tmp_path):
    """Shorter runs of the smallest batch give the others a measured cost."""
    command = [sys.executable, ROOT / "benchmarks/lora.py", "--quick"]
    command += ["-o", tmp_path / "lora.json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split("|") for line in printed.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in rows[1:]] == ["4", "8"]
    assert all("%" in row[5] and "%" in row[6] for row in rows[1:])
