"""The progress of a training run: the plan, a bar over samples (rich in a terminal,
HTML in a notebook), a line per phase.
"""

from __future__ import annotations

import html
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from rampup.loop import events
from rampup.plan.describe import describe_split
from rampup.plan.noise_scale import NoiseEstimate
from rampup.plan.numbers import check_whole
from rampup.show.console import PLAIN, is_for_a_log, print_plan
from rampup.show.format import format_count

RECENT_STEPS = 20
REDRAW_SECONDS = 0.2  # a notebook is sent the bar at most this often
# With `batch_size_schedule: auto`, a decision that changes nothing is printed at most
# every this many `log_period` steps.
DECISION_LINES = 5


class TerminalBar(Progress):
    """A bar drawn by rich, and below it a line about the newest step, which a narrow
    terminal wraps instead of truncating.
    """

    line = ""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
        )
        self._task = self.add_task("train", total=0, left="?", visible=False)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what is drawn."""
        return self.make_tasks_table(self.tasks), Text(self.line)

    def begin(self, total: int, done: int) -> None:
        """Show the bar, with the samples of the run and those consumed so far."""
        self.update(self._task, total=total, completed=done, visible=True)
        self.start()

    def move(self, done: int, left: str, line: str) -> None:
        """Update the samples consumed, the time left, and the line about the newest
        step.
        """
        self.line = line
        self.update(self._task, completed=done, left=left)


class NotebookBar:
    """A bar as HTML, which IPython replaces in place: rich would need widgets for that,
    which a notebook may not have.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._total, self._page, self._drawn = 0, "", 0.0

    def begin(self, total: int, done: int) -> None:
        """Show the bar; see `TerminalBar`."""
        from IPython.display import HTML, display

        self._total = total
        if self._handle is None:
            self._handle = display(HTML(""), display_id=True)
        self._drawn = 0.0
        self.move(done, "?", "")

    def move(self, done: int, left: str, line: str) -> None:
        """Update the bar; see `TerminalBar`."""
        self._page = (
            f'<progress value="{done}" max="{self._total}" style="width:40%">'
            f"</progress> {done:,}/{self._total:,} samples, {left}"
            f" left<br>{html.escape(line)}"
        )
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._draw()

    def stop(self) -> None:
        """Stop updating. What the bar shows stays."""
        self._draw()
        self._handle = None

    def _draw(self) -> None:
        if self._handle is not None:
            from IPython.display import HTML

            self._handle.update(HTML(self._page))
            self._drawn = time.monotonic()


def make_bar(console: Console) -> TerminalBar | NotebookBar | None:
    """Return the bar that fits the output of a console, or None if it is piped. A
    notebook's process has a kernel.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        return NotebookBar()
    return TerminalBar(console) if console.is_terminal else None


def _standard_output() -> Console:
    """Return the console of a run: in a file, an event is one line of any length."""
    console = Console(**PLAIN, force_terminal=False if is_for_a_log() else None)
    console.soft_wrap = not (console.is_terminal or console.is_jupyter)
    return console


class TrainProgress:
    """Shows the events of a run: a bar in a terminal or a notebook, elsewhere a line
    every `log_period` steps.

    Args:
        console: prints; None = standard output.
        log_period: steps between two lines, where there is no bar.
        quiet: print nothing.
        resume_options: those of the command that resumes a run of `rampup train`.

    >>> import rampup
    >>> show = rampup.TrainProgress(log_period=10)  # MetricOptions(on_event=show)
    >>> show(rampup.loop.events.RunStopping(step=40))
    stops at step 40
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        log_period: int = 20,
        quiet: bool = False,
        resume_options: str = "",
    ) -> None:
        check_whole(1, log_period=log_period)
        self._console = console or _standard_output()
        self._plan: Any = None  # that of the run, with which every loop starts
        self._log_period = log_period
        self._quiet = quiet
        self._resume_options = resume_options
        self._has_command = False
        self._unit = "tokens"
        # What the time left does not count: compilations, those of the first evaluation
        # among them.
        self._compile_seconds, self._has_evaluated = 0.0, False
        # the step of the last decision that was printed
        self._decided: int | None = None
        # Time and consumed samples of the newest steps, for the time left.
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._bar = None if quiet else make_bar(self._console)

    def __call__(self, event: events.Event) -> None:
        """Show one event.

        Args:
            event: an event of the run, see `rampup.loop.events`.
        """
        if self._quiet:
            return
        match event:
            case events.RunPlanned():
                self._plan, self._has_command = event.plan, True
                self.show_plan(event.plan, event.notes)
                parameters = format_count(event.num_parameters, "parameter")
                devices = f"{len(event.devices)} {event.devices[0].device_kind}"
                self._console.print(
                    f"{parameters} on {devices}; run folder {event.folder}"
                )
            case events.RunStarted() if event.step >= event.plan.total_steps:
                self._plan = event.plan
                self._console.print(
                    f"the run in {event.folder} is finished: nothing to do; a larger"
                    f" {self.length_key()} trains longer"
                )
            case events.RunStarted():
                self._unit = "samples" if event.tokens_per_sample == 1 else "tokens"
                if event.step:
                    self._console.print(
                        f"resumed after step {event.step - 1:,} from a checkpoint"
                    )
                self._console.print("compiling the training step", style="dim")
                self._begin(event)
            case events.BatchSizeChanged():
                self._begin(event)
            case events.BatchSizeDecided():
                if (
                    event.changed
                    or self._decided is None
                    or event.step - self._decided >= DECISION_LINES * self._log_period
                ):
                    self._decided = event.step
                    self._console.print(
                        f"auto after step {event.step:,}: {event.outlook}"
                    )
            case events.PhaseStarted():
                split = self._plan.splits[event.phase]
                line = (
                    f"{format_count(split.global_batch_size, 'sample')} per step ="
                    f" {describe_split(split)}"
                )
                if self._has_phases:
                    line = f"phase {event.phase} from step {event.step:,}: {line}"
                self._console.print(line)
            case events.StepDone(metrics=metrics):
                if self._recent:  # The first step is left out, with its compilation.
                    self._compile_seconds += metrics.get("compile_seconds", 0.0)
                self._recent.append(
                    (
                        time.monotonic() - self._compile_seconds,
                        metrics["consumed_samples"],
                    )
                )
                line = self.describe_step(metrics)
                if self._bar is not None:
                    self._bar.move(metrics["consumed_samples"], self._time_left(), line)
                elif metrics["step"] % self._log_period == 0:
                    self._console.print(
                        f"{line},"
                        f" {format_count(metrics['consumed_samples'], 'sample')},"
                        f" {self._time_left()} left"
                    )
            case events.Evaluated():
                if self._recent and not self._has_evaluated:
                    self._compile_seconds = time.monotonic() - self._recent[-1][0]
                self._has_evaluated = True
                when = (
                    f"after step {event.step:,}"
                    if event.step >= 0
                    else "before training"
                )
                self._console.print(f"evaluation {when}: {self.describe_result(event)}")
            case events.CheckpointDamaged():
                self._console.print(
                    f"the checkpoint of step {event.steps:,} is corrupt:"
                    f" {event.problem}; it was moved to {event.moved_to}, and the run"
                    f" resumes from step {event.used:,}"
                )
            case events.StorageFailed():
                self._console.print(f"{event.problem}; the run continues")
            case events.StepSkipped():
                self._console.print(
                    f"step {event.step:,} is skipped: its loss or gradient is not"
                    f" finite ({event.in_a_row} in a row)"
                )
            case events.RunStopped():
                self.close()
                if event.interrupted:
                    unsaved = (
                        "no checkpoint has its last state"
                        if event.steps
                        else "there is nothing to save"
                    )
                    after = self._resume(event.folder) if event.is_saved else unsaved
                    self._console.print(
                        f"stopped after {format_count(event.steps, 'step')}; {after}"
                    )
            case events.RunStopping():
                self._console.print(f"stops at step {event.step:,}")
            case events.LearningRateChanged():
                self._console.print(
                    "note: keys that the learning rate follows have changed since step"
                    f" {event.step:,}: {', '.join(event.keys)};"
                    " without reinforcement learning, learning_rate_schedule_steps"
                    " keeps the steps of a schedule, and train_samples its samples to"
                    " within the last batch",
                    style="yellow",
                )

    def show_plan(self, plan: Any, notes: Sequence[str]) -> None:
        """Print the plan of a run that begins.

        Args:
            plan: the `RampPlan` of the run.
            notes: what is said about it.
        """
        print_plan(plan, self._console, notes=notes)

    def length_key(self) -> str:
        """Return the key that makes a run longer."""
        return (
            "train_samples" if getattr(self._plan, "budget_samples", None) else "steps"
        )

    def describe_step(self, metrics: Mapping[str, Any]) -> str:
        """Return the line about a step that is done.

        Args:
            metrics: its line of metrics.jsonl.
        """
        parts = [f"step {metrics['step']:,} of {self._plan.total_steps:,}"]
        if self._has_phases:
            parts.append(f"phase {metrics['phase']}")
        parts += [
            f"batch {metrics['global_batch_size']:,}",
            f"loss {_format_loss(metrics['loss'])}",
            f"{metrics['tokens_per_second']:,.0f} {self._unit}/s",
        ]
        if metrics.get("noise_scale_samples_low") is not None:
            found = NoiseEstimate(
                value=metrics["noise_scale_samples"],
                low=metrics["noise_scale_samples_low"],
                high=metrics["noise_scale_samples_high"],
            )
            parts.append(f"noise scale {found} samples")
        return ", ".join(parts)

    def describe_result(self, event: events.Evaluated) -> str:
        """Return what an evaluation has found.

        Args:
            event: the evaluation, with its metrics.
        """
        return f"loss {_format_loss(event.metrics['eval_loss'])}"

    def close(self) -> None:
        """Stop drawing."""
        if self._bar is not None:
            self._bar.stop()

    def _begin(self, event: events.RunStarted | events.BatchSizeChanged) -> None:
        self._plan = event.plan
        if self._bar is not None:
            self._bar.begin(
                event.plan.consumed_samples, event.plan.ramp.samples_before(event.step)
            )

    def _resume(self, folder: Path) -> str:
        if not self._has_command:
            return f"the same loop resumes the run in {folder}"
        return (
            "resume with: rampup train"
            f" {shlex.quote(str(folder))}{self._resume_options}"
        )

    @property
    def _has_phases(self) -> bool:
        """Whether the run has a ramp, or may get one."""
        return len(self._plan.splits) > 1 or getattr(self._plan, "follows", False)

    def _time_left(self) -> str:
        """Return the time for the remaining samples at the recent rate, without
        compilations; "?" until two steps are done.
        """
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        if s1 == s0:
            return "?"
        minutes, seconds = divmod(
            round((self._plan.consumed_samples - s1) * (t1 - t0) / (s1 - s0)), 60
        )
        hours, minutes = divmod(minutes, 60)
        return (
            f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        )


def _format_loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
