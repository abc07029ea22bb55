"""The optimizer steps of an RL run in their order, over rollouts whose batch may grow.

One executable serves all stages: a pass has as many samples in each of them
(the greatest common divisor of the planned ones), and the buffer has room for the
largest number of passes of any stage. The number of passes of a step is data.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rampup.contrib.rl.plan import RolloutPlan
from rampup.errors import ResumeMismatchError
from rampup.plan.plan import PlanPosition, RampPlan
from rampup.plan.ramp import BatchRamp, Phase
from rampup.plan.split import BatchSplit, BatchSplitter

# What `RolloutSchedule.to_rows` has of a stage, with the keys that set it.
_ROW = (
    "first rollout",
    "rl.num_generations",
    "batch_size (prompts)",
    "mini_batch_size (in samples)",
    "rl.num_iterations",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePosition(PlanPosition):
    """An optimizer step of an RL run, numbered over the run.

    `consumed_samples` are generated in the rollouts before its own, and `phase` is the
    interval of rollouts of constant size. `split` is that of its mini batch with its
    padding, or with a token budget one pass of one row per replica.
    """

    rollout: int  # counted from 0
    update: int  # its number among the optimizer steps on the rollout
    plan: RolloutPlan  # the sizes of the rollout

    @property
    def is_first(self) -> bool:
        """Whether its rollout is generated just before it."""
        return self.update == 0

    @property
    def is_last(self) -> bool:
        """Whether its rollout ends with it."""
        return self.update == self.plan.policy_updates.optimizer_steps - 1


class _Totals(NamedTuple):
    """What a number of rollouts add up to: optimizer steps and samples."""

    rollouts: int = 0
    steps: int = 0
    samples: int = 0

    def after(self, rollouts: int, plan: RolloutPlan) -> _Totals:
        """Return the totals with more rollouts of one plan."""
        return _Totals(
            rollouts=self.rollouts + rollouts,
            steps=self.steps + rollouts * plan.policy_updates.optimizer_steps,
            samples=self.samples + rollouts * plan.samples_per_step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSchedule:
    """The rollouts of a run and their optimizer steps, as
    `rampup.loop.components.LoopPlan` and its ramp.
    """

    # The first rollout of each stage, from 0 on, and its plan; later plans have other
    # sizes of the batch. Stages from `num_rollouts` on are not reached.
    stages: tuple[tuple[int, RolloutPlan], ...]
    num_rollouts: int
    # Before each stage, and at the end of the run. A stage that the run does not reach
    # starts there.
    _starts: tuple[_Totals, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = tuple(
            (first, replace(plan, num_steps=self.num_rollouts))
            for first, plan in self.stages
        )
        object.__setattr__(self, "stages", stages)
        starts = [_Totals()]
        ends = [*(first for first, _ in stages[1:]), self.num_rollouts]
        for (first, plan), end in zip(stages, ends, strict=True):
            starts.append(
                starts[-1].after(max(min(end, self.num_rollouts) - first, 0), plan)
            )
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self._starts[-1].steps

    @property
    def consumed_samples(self) -> int:
        """Samples that the run generates."""
        return self._starts[-1].samples

    def at(self, step: int) -> UpdatePosition:
        """Return the position of an optimizer step."""
        if not 0 <= step < self.total_steps:
            raise ResumeMismatchError(
                f"step={step} must be from 0 to {self.total_steps - 1}", key="step"
            )
        index = bisect_right(self._starts[:-1], step, key=lambda start: start.steps) - 1
        first, plan = self.stages[index]
        start = self._starts[index]
        updates = plan.policy_updates
        rollouts, update = divmod(step - start.steps, updates.optimizer_steps)
        is_last_stage = index == len(self.stages) - 1
        passes = 1
        if updates.token_budget is None:
            samples = len(updates.mini_batch_range(update % updates.num_mini_batches))
            passes = -(-samples // self.pass_samples)
        return UpdatePosition(
            step=step,
            consumed_samples=start.after(rollouts, plan).samples,
            phase=Phase(
                index=index,
                start_step=start.steps,
                start_sample=start.samples,
                num_steps=(
                    None
                    if is_last_stage
                    else self._starts[index + 1].steps - start.steps
                ),
                global_batch_size=updates.mini_batch_samples,
            ),
            split=split_of(passes, self.pass_samples, updates.data_parallel_size),
            rollout=first + rollouts,
            update=update,
            plan=plan,
        )

    @property
    def pass_samples(self) -> int:
        """Samples of one pass over all replicas, the same in all stages; with a token
        budget its rows, one per replica.
        """
        found = [plan.policy_updates for _, plan in self.stages]
        if found[0].token_budget is not None:
            return found[0].data_parallel_size
        return math.gcd(*(updates.microbatch_samples or 0 for updates in found))

    @property
    def sequences_per_call(self) -> int:
        """Sequences per call of the generator: the same in all stages."""
        return math.gcd(*(plan.sequences_per_call for _, plan in self.stages))

    @property
    def max_samples(self) -> int:
        """Samples of the largest rollout."""
        return max(plan.samples_per_step for _, plan in self.stages)

    def ramp_plan(self) -> RampPlan:
        """Return the plan of the optimizer steps: that of the largest mini batch; an
        update may use less of it.
        """
        updates = [plan.policy_updates for _, plan in self.stages]
        rows = self.pass_samples
        replicas = updates[0].data_parallel_size
        passes = max(
            -(-each.mini_batch_samples // rows)
            if each.token_budget is None
            else each.max_passes or 1
            for each in updates
        )
        return RampPlan(
            ramp=BatchRamp.constant(passes * rows),
            splitter=BatchSplitter(
                data_parallel_size=replicas, microbatch_size=rows // replicas
            ),
            num_devices=replicas,
            total_steps=self.total_steps,
        )

    @property
    def ramp(self) -> RolloutSchedule:
        """The samples of the optimizer steps."""
        return self

    @property
    def splits(self) -> tuple[BatchSplit, ...]:
        """The split of the first mini batch of each stage."""
        return tuple(
            self.at(min(start.steps, self.total_steps - 1)).split
            for start in self._starts[:-1]
        )

    def stage_rows(self) -> list[dict[str, int]]:
        """Return the sizes of every stage that the run reaches, as `rampup plan --json`
        prints them.
        """
        return [
            {
                "start_step": first,
                "num_steps": end.rollouts - start.rollouts,
                "prompts_per_step": plan.prompts_per_step,
                "samples_per_prompt": plan.samples_per_prompt,
                "samples_per_step": plan.samples_per_step,
                "mini_batch_samples": plan.policy_updates.mini_batch_samples,
                "optimizer_steps": plan.policy_updates.optimizer_steps,
                "start_optimizer_step": start.steps,
            }
            for (first, plan), (start, end) in zip(
                self.stages, itertools.pairwise(self._starts), strict=True
            )
            if first < self.num_rollouts
        ]

    @property
    def ramp_steps(self) -> int:
        """Optimizer steps before the last stage."""
        return self._starts[-2].steps

    def samples_before(self, step: int) -> int:
        """Return the samples of the rollouts that are generated before the end of step
        `step - 1`.
        """
        if step <= 0:
            return 0
        position = self.at(min(step, self.total_steps) - 1)
        return position.consumed_samples + position.plan.samples_per_step

    @property
    def fingerprint(self) -> str:
        """A digest of the sizes that decide which samples an optimizer step uses."""
        return hashlib.sha256(json.dumps(self.to_rows()).encode()).hexdigest()

    def differences(self, rows: list[list[int]]) -> str:
        """Return a line for each size that is another than in the rows of a checkpoint,
        with the keys that set it.
        """
        now = self.to_rows()
        if len(rows) != len(now):
            return (
                f"  stages of rl.batch_size_schedule: {len(rows)} in the checkpoint,"
                f" {len(now)} here"
            )
        return "\n".join(
            f"  {name}, from rollout {new[0]}: {before} in the checkpoint, {here} here"
            for old, new in zip(rows, now, strict=True)
            for name, before, here in zip(_ROW, old, new, strict=True)
            if before != here
        )

    def to_rows(self) -> list[list[int]]:
        """Return the sizes of every stage that the run reaches, as JSON."""
        return [
            [
                first,
                plan.samples_per_prompt,
                plan.prompts_per_step,
                plan.policy_updates.mini_batch_samples,
                plan.policy_updates.num_epochs,
            ]
            for first, plan in self.stages
            if first < self.num_rollouts
        ]


def split_of(passes: int, rows: int, replicas: int) -> BatchSplit:
    """Return the split of a mini batch, padding included, into passes of `rows` rows
    over all replicas.
    """
    return BatchSplit(
        global_batch_size=passes * rows,
        data_parallel_size=replicas,
        accumulation_steps=passes,
        num_pipeline_microbatches=1,
        microbatch_size=rows // replicas,
    )
