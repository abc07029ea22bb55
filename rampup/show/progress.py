"""What a training run prints while it runs: the plan, a progress bar, a line at each phase change."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rampup.plan.plan import RampPlan
from rampup.show.bars import make_bar
from rampup.show.tables import cut, print_plan

RECENT_STEPS = 20


class TrainProgress:
    """A `progress` callback for the training loop: a bar in a terminal or a notebook, a line now and then elsewhere.

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

    def __call__(self, event: str, values: Mapping[str, Any]) -> None:
        """Show one event; see `rampup.run.loop.Loop.progress`."""
        if not self._quiet:
            getattr(self, f"_on_{event}")(values)

    def close(self) -> None:
        """Stop drawing."""
        self._bar.stop()

    def _on_plan(self, values: Mapping[str, Any]) -> None:
        self._plan = values["plan"]
        print_plan(values["plan"], self._console)
        devices = values["devices"]
        self._console.print(
            f"{values['num_parameters']:,} parameters on {len(devices)} {devices[0].device_kind}; run folder {values['folder']}"
        )

    def _on_start(self, values: Mapping[str, Any]) -> None:
        plan = self._plan
        assert plan
        if values["step"] >= plan.total_steps:
            self._console.print(f"the run in {values['folder']} is finished: nothing to do")
            return
        if values["step"]:
            self._console.print(f"resumed after step {values['step'] - 1:,} from a checkpoint")
        self._console.print("compiling the training step", style="dim")
        self._recent.append((time.monotonic(), plan.ramp.samples_before(values["step"])))
        self._bar.start(plan.consumed_samples, plan.ramp.samples_before(values["step"]))

    def _on_phase(self, values: Mapping[str, Any]) -> None:
        plan = self._plan
        assert plan
        split = plan.splits[values["phase"]]
        self._console.print(
            f"phase {values['phase']} from step {values['step']:,}: {split.global_batch_size:,} samples a step = {cut(split)}"
        )

    def _on_step(self, values: Mapping[str, Any]) -> None:
        plan = self._plan
        assert plan
        self._recent.append((time.monotonic(), values["consumed_samples"]))
        line = (
            f"step {values['step']:,}, phase {values['phase']}, batch {values['global_batch_size']:,}, "
            f"loss {_number(values['loss'])}, {values['tokens_per_second']:,.0f} tokens/s"
        )
        left = _duration(self._seconds_left(plan))
        self._bar.update(values["consumed_samples"], left, line)
        if not self._bar.visible and values["step"] % self._log_period == 0:
            self._console.print(f"{line}, {values['consumed_samples']:,} samples, {left} left")

    def _on_eval(self, values: Mapping[str, Any]) -> None:
        self._console.print(f"evaluation after step {values['step']:,}: loss {_number(values['eval_loss'])}")

    def _on_checkpoint(self, values: Mapping[str, Any]) -> None: ...

    def _on_damaged_checkpoint(self, values: Mapping[str, Any]) -> None:
        self._console.print(
            f"the checkpoint of step {values['step']:,} is damaged: {values['problem']}; it is now {values['moved_to']}, "
            f"and that of step {values['used']:,} is used"
        )

    def _on_storage(self, values: Mapping[str, Any]) -> None:
        self._console.print(f"{values['problem']}; the run goes on")

    def _on_skip(self, values: Mapping[str, Any]) -> None:
        self._console.print(
            f"step {values['step']:,} is skipped: its loss or gradient is not finite ({values['in_a_row']} in a row)"
        )

    def _on_stop(self, values: Mapping[str, Any]) -> None:
        self._bar.stop()
        if values["interrupted"]:
            self._console.print(f"stopped after {values['step']:,} steps; the same command goes on from there")

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
