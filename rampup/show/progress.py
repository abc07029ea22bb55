"""What a training run prints while it runs: the plan, a progress bar, a line at each phase change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rampup.plan.plan import RampPlan
from rampup.run import events
from rampup.show.bars import make_bar
from rampup.show.tables import cut, print_plan

RECENT_STEPS = 20


class TrainProgress:
    """Shows the events of a run: a bar in a terminal or a notebook, a line now and then elsewhere.

    Args:
        console: where to print.
        log_period: steps between lines where there is no terminal for a bar.
        quiet: print nothing.
    """

    def __init__(self, console: Console, *, log_period: int = 20, quiet: bool = False) -> None:
        self._console, self._log_period, self._quiet = console, log_period, quiet
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)
        self._plan: RampPlan | None = None
        self._bar = make_bar(console, quiet=quiet)

    def __call__(self, event: events.Event) -> None:
        """Show one event."""
        if self._quiet:
            return
        match event:
            case events.RunPlanned():
                self._show_plan(event)
            case events.RunStarted():
                self._show_start(event)
            case events.PhaseStarted():
                self._show_phase(event)
            case events.StepDone():
                self._show_step(event.metrics)
            case events.Evaluated():
                self._console.print(f"evaluation after step {event.step:,}: loss {_number(event.metrics['eval_loss'])}")
            case events.CheckpointDamaged():
                self._console.print(
                    f"the checkpoint of step {event.steps:,} is damaged: {event.problem}; it is now {event.moved_to}, "
                    f"and that of step {event.used:,} is used"
                )
            case events.StorageFailed():
                self._console.print(f"{event.problem}; the run continues")
            case events.StepSkipped():
                self._console.print(
                    f"step {event.step:,} is skipped: its loss or gradient is not finite ({event.in_a_row} in a row)"
                )
            case events.RunStopped():
                self._bar.stop()
                if event.interrupted:
                    self._console.print(f"stopped after {event.steps:,} steps; the same command resumes from there")

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()

    def _show_plan(self, event: events.RunPlanned) -> None:
        self._plan = event.plan
        print_plan(event.plan, self._console)
        self._console.print(
            f"{event.num_parameters:,} parameters on {len(event.devices)} {event.devices[0].device_kind}; "
            f"run folder {event.folder}"
        )

    def _show_start(self, event: events.RunStarted) -> None:
        plan = self._plan
        assert plan
        if event.step >= plan.total_steps:
            self._console.print(f"the run in {event.folder} is finished: nothing to do")
            return
        if event.step:
            self._console.print(f"resumed after step {event.step - 1:,} from a checkpoint")
        self._console.print("compiling the training step", style="dim")
        self._recent.append((time.monotonic(), plan.ramp.samples_before(event.step)))
        self._bar.start(plan.consumed_samples, plan.ramp.samples_before(event.step))

    def _show_phase(self, event: events.PhaseStarted) -> None:
        plan = self._plan
        assert plan
        split = plan.splits[event.phase]
        self._console.print(
            f"phase {event.phase} from step {event.step:,}: {split.global_batch_size:,} samples a step = {cut(split)}"
        )

    def _show_step(self, metrics: Mapping[str, Any]) -> None:
        plan = self._plan
        assert plan
        self._recent.append((time.monotonic(), metrics["consumed_samples"]))
        line = (
            f"step {metrics['step']:,}, phase {metrics['phase']}, batch {metrics['global_batch_size']:,}, "
            f"loss {_number(metrics['loss'])}, {metrics['tokens_per_second']:,.0f} tokens/s"
        )
        left = _duration(self._seconds_left(plan))
        self._bar.update(metrics["consumed_samples"], left, line)
        if not self._bar.visible and metrics["step"] % self._log_period == 0:
            self._console.print(f"{line}, {metrics['consumed_samples']:,} samples, {left} left")

    def _seconds_left(self, plan: RampPlan) -> float:
        """Time for the plan's remaining samples at the recent rate."""
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        return (plan.consumed_samples - s1) * (t1 - t0) / max(s1 - s0, 1)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
