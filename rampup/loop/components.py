"""What a loop is made of: the plan and the step that it needs, and the components that
have state of their own.
"""

from __future__ import annotations

from typing import Any, Protocol

from rampup.loop.run_folder import Record
from rampup.plan.noise_scale import NoiseScale
from rampup.plan.numbers import finite_or_none

# Entries of a checkpoint's record.
GRADIENT_NOISE = "gradient_noise"  # its averages


class LoopPlan(Protocol):
    """The part of a `RampPlan` that a loop reads, or of another plan of optimizer steps
    such as that of rollouts. With an attribute `num_devices`, checkpoints record it.
    """

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""

    @property
    def ramp(self) -> Any:
        """What a loop reads of a `BatchRamp`: `ramp_steps`, `samples_before`,
        `fingerprint`, `to_rows` and `differences`, and `first_step` if it has one.
        """


class LoopStep(Protocol):
    """The part of a `TrainStep` that a loop calls, or of another step from state and
    batch to the next state and metrics. With the attribute `measures_noise` of a
    `TrainStep`, a loop averages the noise, and with its method `jaxprs` it compares the
    programs at a resume. If it has a `plan`, that has the ramp of the loop's.
    """

    @property
    def num_compilations(self) -> int:
        """Executables built so far."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that the calls have waited for compilations."""

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run one optimizer step; return the state and the metrics.

        Of these the loop knows `loss`, and if they are there `grad_norm`, `skipped`,
        `aux` (sums), `weight` (of their means), `gradient_noise` and `facts` (numbers
        of the host, for the line of the step).
        """


class Component:
    """A part of a run with state of its own; by default it has none. All processes call
    theirs alike: the states stay equal.

    Example:
        A count of rows that a checkpoint has, and that is in every line.

        >>> class Rows(Component):
        ...     number = 0
        ...
        ...     def state(self):
        ...         return {"my_rows": self.number}
        ...
        ...     def load(self, record):
        ...         self.number = record["my_rows"]
        ...
        ...     def after_step(self, line, values):
        ...         self.number += line["global_batch_size"]
        ...         return {"my_rows": self.number}
        >>> rows = Rows()
        >>> rows.load({"my_rows": 100})
        >>> rows.after_step({"global_batch_size": 8}, {}), rows.state()
        ({'my_rows': 108}, {'my_rows': 108})
    """

    def state(self) -> Record:
        """Return the entries of a checkpoint's record, as JSON values."""
        return {}

    def load(self, record: Record) -> None:
        """Continue from a checkpoint's record.

        Args:
            record: the entries of all components, and `step`: optimizer steps done.
        """

    def after_step(
        self,
        line: Record,  # noqa: ARG002
        values: Record,  # noqa: ARG002
    ) -> Record:
        """Process the metrics of one finished step. Called once per step, in order.

        Args:
            line: the step's line of metrics.jsonl so far, with what the components
                before this one have added.
            values: the step's metrics, on the host.

        Returns:
            What to add to the line, as JSON values.
        """
        return {}

    def may_change_plan(self, done: int) -> bool:  # noqa: ARG002
        """Return whether `next_plan` is to be asked, when the lines of all steps are
        written.

        Args:
            done: optimizer steps done.
        """
        return False

    def next_plan(self, plan: Any) -> Any:
        """Return the plan from here on: `plan` itself if it stays.

        Args:
            plan: what the loop was given, such as a `RampPlan`.
        """
        return plan


class NoiseAverages(Component):
    """The noise scale of a run whose step measures it."""

    def __init__(self, half_life_samples: float) -> None:
        self.half_life_samples = half_life_samples
        self.scale = NoiseScale(half_life_samples=half_life_samples)

    def state(self) -> Record:
        """See `Component`."""
        return {GRADIENT_NOISE: {"": self.scale.state}}

    def load(self, record: Record) -> None:
        """Continue from the averages in a checkpoint, with the half-life of this
        run.
        """
        if found := record.get(GRADIENT_NOISE):
            self.scale = NoiseScale.from_state(
                {**found[""], "half_life_samples": self.half_life_samples}
            )

    def after_step(self, line: Record, values: Record) -> Record:
        """Add the `gradient_noise` of a step. A skipped step stays out of the
        averages.
        """
        if "gradient_noise" not in values:
            return {}
        noise = values["gradient_noise"]
        trace, squared_norm = float(noise["trace"]), float(noise["squared_norm"])
        if not values.get("skipped", False):
            self.scale.update(
                samples=line["global_batch_size"],
                weight=float(values["weight"]),
                trace=trace,
                squared_norm=squared_norm,
            )
        return {
            "gradient_noise_trace": finite_or_none(trace),
            "gradient_squared_norm": finite_or_none(squared_norm),
            **self.scale.metrics(),
        }
