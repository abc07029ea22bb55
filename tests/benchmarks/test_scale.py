"""Tests of benchmarks/scale.py: real processes, and the arithmetic of large plans."""

import pytest
from maxtext_baselines import ReplayManager
from scale import FAKE_DEVICES, planning_rows, run_processes


@pytest.mark.bench
def test_two_processes_train_as_one():
    """Two processes of four devices have the losses of one of eight, one program each, and half the rows."""
    one, two = (run_processes(number, 1, quick=True) for number in (1, 2))
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-5)
    assert (one["compilations"], two["compilations"]) == (1, 1)
    assert one["rows"] == 2 * two["rows"] == 4 * 2 * FAKE_DEVICES


@pytest.mark.bench
def test_run_processes_reports_a_failure():
    """The error of a process is in the message."""
    with pytest.raises(RuntimeError, match=r"(?s)process 0 of 3 failed:.*8 devices cannot be shared by 3 processes"):
        run_processes(3, 1, quick=True)


def test_planning_rows_have_one_shape_or_one_per_phase():
    """Plans for thousands of devices have a phase per size and little memory for each."""
    fixed, per_phase = planning_rows(65_536, 50, ReplayManager, 1)
    assert (fixed["phases"], fixed["compilations"]) == (50, 1)
    assert (per_phase["phases"], per_phase["compilations"]) == (50, 50)
    assert 0 < fixed["peak_bytes"] < 50 * 5_000
    assert fixed["ratio"] == pytest.approx(fixed["ms"] / fixed["peer_ms"])
