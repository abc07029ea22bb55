"""Tests of rampup.show.progress."""

import io
import itertools
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rampup import Config, build_plan
from rampup.run import events
from rampup.show.progress import TrainProgress

PLAN = build_plan(Config(enable_rampup_batch_size=True, steps=60, global_rampup_samples=100), 1)


def run_events():
    """Yield the events of a run, as the loop reports them."""
    devices = [SimpleNamespace(device_kind="cpu")]
    yield events.RunPlanned(plan=PLAN, folder=Path("runs/x"), devices=devices, num_parameters=1234)
    yield events.RunStarted(step=0, folder=Path("runs/x"))
    phase = None
    for step in range(60):
        position = PLAN.position(step)
        metrics = {
            "step": step,
            "consumed_samples": position.consumed_samples + position.split.global_batch_size,
            "phase": position.phase.index,
            "global_batch_size": position.split.global_batch_size,
            "loss": None if step == 20 else 5.0 - step / 100,
            "tokens_per_second": 1000.0,
        }
        if phase != position.phase.index:
            phase = position.phase.index
            yield events.PhaseStarted(step=step, phase=phase)
        yield events.StepDone(step=step, metrics=metrics)
    yield events.Evaluated(step=59, metrics={"step": 59, "eval_loss": 4.5})
    yield events.CheckpointSaved(steps=60)
    yield events.RunStopped(steps=60, interrupted=True)


def shown(**options):
    """Return what is printed of the events above."""
    console = Console(file=io.StringIO(), width=120, highlight=False, **options.pop("console", {}))
    progress = TrainProgress(console, log_period=20, **options)
    for event in run_events():
        progress(event)
    progress.close()
    return console.file.getvalue()


def test_lines_without_a_terminal():
    """Piped, there is the plan, a line at each phase change, one every log_period steps, evaluation and the stop."""
    text = shown()
    assert "the batch goes from 4 to 16 samples" in text
    for phase in range(4):
        assert f"phase {phase} from step {PLAN.ramp.phases[phase].start_step}" in text
    assert [f"step {step}, " in text for step in (0, 1, 20, 40)] == [True, False, True, True]
    assert "loss not finite" in text
    assert "evaluation after step 59: loss 4.500" in text
    assert "stopped after 60 steps; the same command resumes from there" in text
    assert "0:00 left" in text


def test_a_bar_in_a_terminal():
    """In a terminal there is a bar with step, phase, batch, loss, rate and time left, and still a line per phase."""
    text = shown(console={"force_terminal": True, "color_system": None})
    for part in ("step 59, phase 3, batch 16, loss 4.410", "tokens/s", "left", "phase 2 from step"):
        assert part in text


def test_quiet_prints_nothing():
    """`--quiet` leaves only the summary to the caller."""
    assert shown(quiet=True) == ""


def test_resumed_and_finished_runs_say_so():
    """A resumed run says where it goes on; a finished one that there is nothing to do."""
    console = Console(file=io.StringIO(), width=120)
    progress = TrainProgress(console)
    progress(next(run_events()))
    progress(events.RunStarted(step=30, folder=Path("runs/x")))
    progress(events.RunStarted(step=60, folder=Path("runs/x")))
    progress.close()
    assert "resumed after step 29" in console.file.getvalue()
    assert "the run in runs/x is finished: nothing to do" in console.file.getvalue()


def test_time_left_counts_samples_and_not_steps(monkeypatch):
    """Where later steps are larger, the time left is longer than the steps that are left."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=120, highlight=False)
    progress = TrainProgress(console, log_period=1)
    for event in run_events():
        progress(event)
    lines = {line.partition(",")[0]: line for line in console.file.getvalue().splitlines()}
    assert lines["step 8"].endswith("36 samples, 3:11 left")  # 764 samples at 4 a second, and not 51 steps at one a second
    assert lines["step 39"].endswith("480 samples, 0:20 left")


def test_in_a_notebook_the_bar_replaces_the_lines(monkeypatch, capsys):
    """With the kernel of a notebook, steps are in tqdm's bar; the plan and the phases are still printed."""
    pytest.importorskip("tqdm")
    shell = SimpleNamespace(kernel=object(), config={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    text = shown()
    assert "phase 2 from step" in text
    assert "step 20, phase" not in text
    assert "800/800 samples" in capsys.readouterr().err
