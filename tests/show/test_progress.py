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
from rampup.show.progress import Bar, TrainProgress, _NotebookBar, _TerminalBar, in_notebook, make_bar

PLAN = build_plan(Config(enable_rampup_batch_size=True, steps=60, global_rampup_samples=100), 1)


def run_events():
    """Yield the events of a run, as the loop reports them."""
    devices = [SimpleNamespace(device_kind="cpu")]
    yield events.RunPlanned(plan=PLAN, folder=Path("runs/x"), devices=devices, num_parameters=1234)
    yield events.RunStarted(step=0, folder=Path("runs/x"), plan=PLAN)
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
    yield events.RunStopped(steps=60, interrupted=True, folder=Path("runs/x"), is_saved=True)


def shown(**options):
    """Return what is printed of the events above."""
    console = Console(file=io.StringIO(), width=120, highlight=False, **options.pop("console", {}))
    progress = TrainProgress(console, log_period=20, **options)
    for event in run_events():
        progress(event)
    progress.close()
    return console.file.getvalue()


def test_progress_prints_lines_without_a_terminal():
    """Piped output has the plan, a line per phase, one every log_period steps, evaluation and the stop."""
    text = shown()
    assert "the batch goes from 4 to 16 samples" in text
    for phase in range(4):
        assert f"phase {phase} from step {PLAN.ramp.phases[phase].start_step}" in text
    assert [f"step {step}, " in text for step in (0, 1, 20, 40)] == [True, False, True, True]
    assert "loss not finite" in text
    assert "evaluation after step 59: loss 4.500" in text
    assert "stopped after 60 steps; resume with: rampup train runs/x" in text
    assert "0:00 left" in text


def test_progress_draws_a_bar_in_a_terminal():
    """The bar shows step, phase, batch, loss, rate and time left; each phase still has a line."""
    text = shown(console={"force_terminal": True, "color_system": None})
    for part in ("step 59, phase 3, batch 16, loss 4.410", "tokens/s", "left", "phase 2 from step"):
        assert part in text


def test_progress_prints_nothing_if_quiet():
    """`--quiet` leaves only the summary to the caller."""
    assert shown(quiet=True) == ""


def test_progress_reports_resumed_and_finished_runs():
    """A resumed run names its step; for a finished one there is nothing to do."""
    console = Console(file=io.StringIO(), width=120)
    progress = TrainProgress(console)
    progress(next(run_events()))
    progress(events.RunStarted(step=30, folder=Path("runs/x"), plan=PLAN))
    progress(events.RunStarted(step=60, folder=Path("runs/x"), plan=PLAN))
    progress.close()
    assert "resumed after step 29" in console.file.getvalue()
    assert "the run in runs/x is finished: nothing to do" in console.file.getvalue()


def test_progress_time_left_counts_samples(monkeypatch):
    """If later steps are larger, the time left is longer than the remaining steps suggest."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=120, highlight=False)
    progress = TrainProgress(console, log_period=1)
    for event in run_events():
        progress(event)
    lines = {line.partition(",")[0]: line for line in console.file.getvalue().splitlines()}
    assert lines["step 8"].endswith("36 samples, 3:11 left")  # 764 samples at 4 a second, and not 51 steps at one a second
    assert lines["step 39"].endswith("480 samples, 0:20 left")


def test_progress_uses_tqdm_in_a_notebook(monkeypatch, capsys):
    """Steps are in tqdm's bar; the plan and the phases are still printed."""
    pytest.importorskip("tqdm")
    shell = SimpleNamespace(kernel=object(), config={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    text = shown()
    assert "phase 2 from step" in text
    assert "step 20, phase" not in text
    assert "800/800 samples" in capsys.readouterr().err


@pytest.fixture
def notebook(monkeypatch):
    """Make this process look like the kernel of a notebook."""
    shell = SimpleNamespace(kernel=object(), config={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def console(**options):
    """Return a console that writes into memory."""
    return Console(file=io.StringIO(), width=80, **options)


def test_make_bar_fits_the_output(monkeypatch):
    """Rich in a terminal, nothing if the output is piped or unwanted."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    assert isinstance(make_bar(console(force_terminal=True)), _TerminalBar)
    assert type(make_bar(console())) is Bar
    assert not make_bar(console(force_terminal=True), quiet=True).visible


def test_make_bar_takes_ipython_in_a_terminal_for_a_terminal(monkeypatch):
    """IPython's own terminal has no kernel and gets the terminal's bar."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert isinstance(make_bar(console(force_terminal=True)), _TerminalBar)


def test_notebook_bar_shows_samples_and_time_left(notebook, capsys):
    """The bar counts the plan's samples, with the caller's time left and newest step."""
    pytest.importorskip("tqdm")
    bar = make_bar(console())
    assert isinstance(bar, _NotebookBar)
    bar.start(29_632, 1_000)
    bar.update(12_345, "3:21", "step 7, phase 2, 900 tokens/s")
    bar.stop()
    shown = capsys.readouterr().err
    assert "1,000/29,632 samples" in shown
    assert "12,345/29,632 samples" in shown
    assert "3:21 left, step 7, phase 2, 900 tokens/s" in shown


def test_notebook_bar_stops_at_any_time(notebook):
    """Stopped before its start, twice, and started again: no error."""
    pytest.importorskip("tqdm")
    bar = make_bar(console())
    bar.update(3, "0:01", "early")
    bar.stop()
    bar.start(10, 0)
    bar.start(10, 5)
    bar.stop()
    bar.stop()


def test_make_bar_without_tqdm_is_invisible(notebook, monkeypatch):
    """If tqdm is not installed, nothing is drawn and the caller prints lines."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert not make_bar(console()).visible
