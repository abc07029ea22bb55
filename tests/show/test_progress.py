"""Tests of rampup.show.progress."""

import io
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from rampup import Config, build_plan
from rampup.loop import events
from rampup.show.progress import TerminalBar, TrainProgress, make_bar

# 4, 8, 12 and 16 samples.
RAMP = {
    "per_device_batch_size_start": 4,
    "per_device_batch_size_increment": 4,
    "per_device_batch_size": 16,
}
PLAN = build_plan(
    Config(enable_rampup_batch_size=True, steps=60, global_rampup_samples=100, **RAMP),
    1,
)


def run_events():
    """Yield the events of a run, as the loop reports them."""
    devices = [SimpleNamespace(device_kind="cpu")]
    yield events.RunPlanned(
        plan=PLAN, folder=Path("runs/x"), devices=devices, num_parameters=1234
    )
    yield events.RunStarted(step=0, folder=Path("runs/x"), plan=PLAN)
    phase = None
    for step in range(60):
        position = PLAN.position(step)
        size, loss = (
            position.split.global_batch_size,
            None if step == 20 else 5.0 - step / 100,
        )
        metrics = {
            "step": step,
            "consumed_samples": position.consumed_samples + size,
            "phase": position.phase.index,
        }
        metrics |= {
            "global_batch_size": size,
            "loss": loss,
            "tokens_per_second": 1000.0,
        }
        if phase != position.phase.index:
            phase = position.phase.index
            yield events.PhaseStarted(step=step, phase=phase)
        yield events.StepDone(step=step, metrics=metrics)
    yield events.Evaluated(step=59, metrics={"step": 59, "eval_loss": 4.5})
    yield events.CheckpointSaved(steps=60)
    yield events.RunStopped(
        steps=60, interrupted=True, folder=Path("runs/x"), is_saved=True
    )


def shown(*happened, console=None, **options):
    """Return what is printed of events, or of those above."""
    console = Console(file=io.StringIO(), width=300, highlight=False, **console or {})
    progress = TrainProgress(console, **options)
    for event in happened or run_events():
        progress(event)
    progress.close()
    return console.file.getvalue()


def test_progress_prints_lines_without_a_terminal():
    """Piped output has the plan, a line per phase, one every log_period steps,
    evaluation and the stop.
    """
    text = shown()
    assert "the batch goes from 4 to 16 samples" in text
    for phase in range(4):
        assert f"phase {phase} from step {PLAN.ramp.phases[phase].start_step}" in text
    assert [f"step {step} of 60, " in text for step in (0, 1, 20, 40)] == [
        True,
        False,
        True,
        True,
    ]
    assert "loss not finite" in text
    assert "evaluation after step 59: loss 4.500" in text
    assert "stopped after 60 steps; resume with: rampup train runs/x" in text
    assert "0:00 left" in text
    # A bar in a terminal shows step, phase, batch, loss, rate and time left; each phase
    # still has a line.
    bar = shown(console={"force_terminal": True, "color_system": None})
    assert all(
        part in bar
        for part in (
            "step 59 of 60, phase 3, batch 16, loss 4.410",
            "tokens/s",
            "left",
            "phase 2 from step",
        )
    )


def test_progress_prints_decisions_that_change_the_batch_and_sometimes_the_others():
    """Of the decisions of `auto`, the first, every change, and one in five log_period
    steps of the rest is printed.
    """
    decided = (
        events.BatchSizeDecided(
            step=n, changed=n == 39, outlook="8 samples; 16 need more"
        )
        for n in range(9, 400, 10)
    )
    assert shown(*decided).splitlines() == [
        f"auto after step {step}: 8 samples; 16 need more"
        for step in (9, 39, 139, 239, 339)
    ]


def test_progress_says_how_to_keep_the_learning_rate():
    """The keys are printed with both values, and that which keeps a schedule's
    length.
    """
    keys = ("learning_rate: 0.001 -> 0.002", "steps: 9 -> 10")
    assert shown(events.LearningRateChanged(step=9, keys=keys)) == (
        "note: keys that the learning rate follows have changed since step 9:"
        " learning_rate: 0.001 -> 0.002, steps: 9 -> 10; without reinforcement"
        " learning, learning_rate_schedule_steps keeps the steps of a schedule, and"
        " train_samples its samples to within the last batch\n"
    )


def test_progress_names_phases_only_with_a_ramp():
    """Without a ramp no line has a phase. Finished and resumed runs say so."""
    plan = build_plan(Config(per_device_batch_size=16), 1)
    started = (
        events.RunStarted(step=step, folder=Path("runs/x"), plan=plan)
        for step in (plan.total_steps, 30)
    )
    metrics = {
        "step": 0,
        "consumed_samples": 16,
        "phase": 0,
        "global_batch_size": 16,
        "loss": 5.0,
        "tokens_per_second": 9.0,
    }
    step = events.StepDone(step=0, metrics=metrics)
    assert shown(*started, events.PhaseStarted(step=0, phase=0), step).splitlines() == [
        "the run in runs/x is finished: nothing to do; a larger steps trains longer",
        "resumed after step 29 from a checkpoint",
        "compiling the training step",
        "16 samples per step = 1 replica * 1 microbatch * 16 samples",
        ("step 0 of 1,000, batch 16, loss 5.000, 9 tokens/s, 16 samples, ? left"),
    ]
    follows = build_plan(Config(batch_size_schedule="auto", train_samples=160), 1)
    done = shown(
        events.RunStarted(step=follows.total_steps, folder=Path("runs/x"), plan=follows)
    )
    assert done.endswith("a larger train_samples trains longer\n")


def test_progress_time_left_counts_samples(monkeypatch):
    """If later steps are larger, the time left is longer. The first evaluation, which
    compiles, is left out of the rate.
    """
    # One second between two events, and 1,000 for the evaluation after step 7.
    clock, happened = (
        itertools.chain(range(8), itertools.count(1008)),
        list(run_events()),
    )
    index = next(
        index
        for index, event in enumerate(happened)
        if isinstance(event, events.StepDone) and event.step == 8
    )
    happened.insert(index, events.Evaluated(step=7, metrics={"eval_loss": 4.5}))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    lines = {
        line.partition(",")[0]: line
        for line in shown(*happened, log_period=1).splitlines()
    }
    # 764 samples at 4 a second, and not 51 steps at one a second.
    assert lines["step 8 of 60"].endswith("36 samples, 3:11 left")
    assert lines["step 39 of 60"].endswith("480 samples, 0:20 left")


def test_make_bar_fits_the_output(monkeypatch):
    """Rich in a terminal, nothing if the output is piped or unwanted."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert isinstance(
        make_bar(Console(file=io.StringIO(), force_terminal=True)), TerminalBar
    )
    assert make_bar(Console(file=io.StringIO())) is None
    assert shown(quiet=True, console={"force_terminal": True}) == ""
    assert shown(quiet=True) == ""


def show_in_a_notebook():
    """Print what a shell of IPython with a kernel gets to show, as lines of JSON."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    shell.kernel = object()
    with capture_output() as captured:
        text = shown()
        bar = make_bar(Console(file=io.StringIO()))
        bar.move(3, "0:01", "before its start")
        bar.stop()
        bar.begin(29_632, 1_000)
        bar.begin(29_632, 2_000)
        bar.move(12_345, "3:21", "<step 7>")
        bar.stop()
        bar.stop()
    pages = [
        (output["data"]["text/html"], output["update"]) for output in captured._outputs
    ]
    print(
        json.dumps(
            {"text": text, "pages": pages, "out": captured.stdout + captured.stderr}
        )
    )


def test_progress_in_a_notebook():
    """Steps are in one HTML bar for each run, which is replaced in place; the plan and
    the phases are still printed.
    """
    pytest.importorskip("IPython")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import"
        " test_progress as t; t.show_in_a_notebook()"
    )
    found = json.loads(
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
    )
    assert "phase 2 from step" in found["text"]
    assert "step 20 of 60, phase" not in found["text"]
    assert not found["out"]
    assert not any("\x1b" in page for page, _ in found["pages"])
    pages = [page for page, _ in found["pages"]]
    new = [
        number for number, (_, replaced) in enumerate(found["pages"]) if not replaced
    ]
    assert len(new) == 2
    assert ">800/800 samples" in pages[new[1] - 1].replace("</progress> ", ">")
    assert "step 59 of 60, phase 3" in pages[new[1] - 1]
    assert [page.partition("</progress> ")[2] for page in pages[new[1] + 1 :]] == [
        "1,000/29,632 samples, ? left<br>",
        "2,000/29,632 samples, ? left<br>",
        "12,345/29,632 samples, 3:21 left<br>&lt;step 7&gt;",
    ]


def test_an_event_in_a_file_is_one_line(capsys):
    """As `rampup train > FILE` writes it; otherwise a search finds half of a step."""
    problem = " ".join(["the bucket did not answer"] * 6)
    TrainProgress()(events.StorageFailed(problem=problem))
    assert capsys.readouterr().out == f"{problem}; the run continues\n"
