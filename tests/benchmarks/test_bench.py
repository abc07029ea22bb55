"""Every benchmark runs at its smallest size; what those of data, pages, plan, scale and
topology count.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import topology
from data import BATCH, fixed_plan, read_grain, read_rampup
from maxtext_baselines import ReplayManager
from measure import BenchResult, Seconds, print_result, take_turns
from rich.console import Console
from scale import FAKE_DEVICES, planning_rows, run_processes

from rampup.data.sources import as_source

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.bench
def test_bench_has_a_complete_table(bench_run):
    """All rows have the same columns, the result is JSON, and every measurement was
    reported when it was made.
    """
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
    """It prints the table in Markdown, and names its benchmarks if asked for another
    one.
    """
    command = [sys.executable, str(FOLDER / "plan.py"), "--quick"]
    assert (
        "| step -> batch size |"
        in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    refused = subprocess.run(
        [*command, "speed"], check=False, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "unknown benchmark 'speed'; choose from plan" in refused.stderr


RESULT = BenchResult(
    name="demo",
    title="a < b",
    rows=[{"system": "x|y", "ms": 1.23456, "n": 12345, "ok": True, "none": None}],
    notes=["n & m"],
)


def test_take_turns_rotates_and_drops_the_warm_up():
    """Each candidate runs once a round, the order rotates, and the warm-up is not
    counted.
    """
    order = []
    times = take_turns(
        {name: lambda name=name: order.append(name) for name in "abc"},
        rounds=2,
        warm_up=1,
    )
    assert "".join(order) == "abcbcacab"
    assert [len(times[name].all) for name in "abc"] == [2, 2, 2]
    seconds = Seconds(all=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert (seconds.median, seconds.spread) == (3, pytest.approx(2 / 3))


def test_result_is_a_table_in_each_format():
    """Terminal, Markdown and JSON have the same cells."""
    assert RESULT.cells == [["x|y", "1.23", "12,345", "yes", "-"]]
    out = io.StringIO()
    print_result(RESULT, Console(file=out, force_terminal=True, width=120))
    assert "12,345" in out.getvalue()
    assert RESULT.to_markdown().count("| x|y | 1.23 | 12,345 | yes | - |") == 1
    assert RESULT.to_dict()["rows"] == list(RESULT.rows)


@pytest.mark.parametrize("seed", [None, 3])
def test_readers_return_the_number_of_rows(seed):
    """Both readers read past the end of the source."""
    items = [{"tokens": np.zeros(3, np.uint8)}] * 100
    assert read_rampup(as_source(items), fixed_plan(3), seed, 2) == 3 * BATCH
    assert read_grain(items, 3, seed, 2) == 3 * BATCH


@pytest.mark.bench
def test_buffer_bench_moves_only_the_rows_of_the_phase(quick):
    """In chunks, a step moves those that its rows fill. A small batch is moved in a
    buffer for the largest one.
    """
    rows = quick("buffer").rows
    assert len(rows) == 8
    per_microbatch = rows[0]["rows_bytes"]
    for number, row in enumerate(rows, start=1):
        assert row["rows_bytes"] == number * per_microbatch
        assert (
            row["rows_bytes"]
            <= row["chunks_bytes"]
            < row["rows_bytes"] + per_microbatch
        )
        assert row["ours_bytes"] == row["padded_bytes"] == 8 * per_microbatch
    assert len({row["program_bytes"] for row in rows}) == 1
    assert all(
        row["ours_ms"] > 0 and row["padded_ms"] > 0 and row["rows_ms"] > 0
        for row in rows
    )


@pytest.mark.bench
def test_two_processes_train_as_one():
    """Two processes of four devices have the losses of one of eight, one program each,
    and half the rows.
    """
    one, two = (run_processes(number, 1, quick=True) for number in (1, 2))
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert (one["compilations"], two["compilations"]) == (1, 1)
    assert one["rows"] == 2 * two["rows"] == 4 * 2 * FAKE_DEVICES


@pytest.mark.bench
def test_run_processes_reports_a_failure():
    """The error of a process is in the message."""
    with pytest.raises(
        RuntimeError,
        match=r"(?s)process 0 of 3 failed:.*8 devices cannot be shared by 3 processes",
    ):
        run_processes(3, 1, quick=True)


def test_planning_rows_have_one_shape_or_one_per_phase():
    """Plans for thousands of devices have a phase per size and little memory for
    each.
    """
    fixed, per_phase = planning_rows(65_536, 50, ReplayManager, 1)
    assert (fixed["phases"], fixed["compilations"]) == (50, 1)
    assert (per_phase["phases"], per_phase["compilations"]) == (50, 50)
    assert 0 < fixed["peak_bytes"] < 50 * 5_000
    assert fixed["ratio"] == pytest.approx(fixed["ms"] / fixed["peer_ms"])


@pytest.mark.slow
def test_a_ramp_saves_hours_only_where_a_larger_batch_is_faster():
    """Steps in proportion to the batch leave nothing to a ramp; a constant part of them
    makes larger batches and a ramp pay.
    """
    same = topology.hours_row(
        "1B", 64, {rows: 0.1 * rows for rows in topology.CHIP_ROWS}
    )
    # 20 billion tokens at 655,360 tokens a second are 8.48 hours, and some percent more
    # for the noise.
    assert (same["small"], same["fastest"]) == ("65,536: 8.71", "65,536: 8.71")
    # 1.17 * 20% more at the end, as the batch is the next doubling of 896,000 tokens,
    # and 1 / (1 - 0.47) times that on average.
    assert same["large"] == "1,048,576: 12.2"
    assert (same["ramp"], same["saved"]) == ("65,536 to 65,536: 8.71", "0.0% to 0.0%")
    found = topology.hours_row(
        "1B", 64, {rows: 0.1 * (rows + 1) for rows in topology.CHIP_ROWS}
    )
    hours = {
        name: float(found[name].split()[-1])
        for name in ("small", "large", "fastest", "ramp")
    }
    assert found["ramp"].startswith("65,536 to 5")
    assert hours["ramp"] < hours["fastest"] < min(hours["large"], hours["small"])
