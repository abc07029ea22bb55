"""Every benchmark runs at its smallest size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.bench
def test_bench_has_a_complete_table(bench_run):
    """All rows have the same columns, the result is JSON, and every measurement was reported when it was made."""
    name, result, reported = bench_run
    assert result.name == name
    assert result.rows
    assert result.notes
    assert {tuple(row) for row in result.rows} == {result.columns}
    assert json.loads(json.dumps(result.to_dict()))["rows"]
    done = [(number, total) for _, number, total in reported]
    assert done == [(number + 1, len(done)) for number in range(len(done))]


@pytest.mark.bench
def test_a_file_of_benchmarks_is_a_program():
    """It prints the table in Markdown, and names its benchmarks if asked for another one."""
    command = [sys.executable, str(FOLDER / "plan.py"), "--quick"]
    assert "| step -> batch size |" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    refused = subprocess.run([*command, "speed"], check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "unknown benchmark 'speed'; choose from plan" in refused.stderr
