"""The optimizer steps of an RL run in their order, over rollouts whose batch may grow."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rampup.errors import ResumeMismatchError
from rampup.plan.ramp import Phase
from rampup.plan.split import BatchSplit
from rampup.rl.plan import RolloutPlan


class UpdatePosition(NamedTuple):
    """An optimizer step of an RL run.

    Attributes:
        step: its number over the run, of all models together.
        consumed_samples: samples generated in the rollouts before its own.
        phase: the interval of rollouts of constant size that it is in.
        split: the split of its mini batch, with its padding. With a token budget, one pass of one row per replica.
        rollout: the rollout, counted from 0.
        model: `policy` or `critic`.
        update: its number among the model's optimizer steps on the rollout.
        model_step: its number among the model's optimizer steps of the run.
        plan: the sizes of the rollout.
    """

    step: int
    consumed_samples: int
    phase: Phase
    split: BatchSplit
    rollout: int
    model: str
    update: int
    model_step: int
    plan: RolloutPlan

    @property
    def is_first(self) -> bool:
        """Whether its rollout is generated just before it."""
        return self.update == 0 and self.model == self.plan.order[0].model

    @property
    def is_last(self) -> bool:
        """Whether its rollout ends with it."""
        return self.model == "policy" and self.update == self.plan.policy_updates.optimizer_steps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSchedule:
    """The rollouts of a run and their optimizer steps. Each rollout has the sizes of the newest stage.

    It has the attributes that `rampup.run.loop.Loop` reads of a plan, and it is its own `ramp`.

    Attributes:
        stages: the first rollout of each stage, from 0 on, and its plan. Later plans have other sizes of the batch.
        num_rollouts: rollouts of the run.

    Example:
        >>> from rampup.rl.sizes import Size
        >>> from rampup.rl.updates import Training
        >>> def plan(count):
        ...     policy = Training(mini_batch=Size(count=2, unit="prompts"))
        ...     return RolloutPlan(rollout_batch=Size(count=count, unit="prompts"), samples_per_prompt=2, policy=policy)
        >>> schedule = RolloutSchedule(stages=((0, plan(2)), (3, plan(4))), num_rollouts=5)
        >>> schedule.total_steps, schedule.consumed_samples, schedule.at(4).rollout, schedule.at(4).update
        (7, 28, 3, 1)
    """

    stages: tuple[tuple[int, RolloutPlan], ...]
    num_rollouts: int
    # Optimizer steps of all models, samples, and optimizer steps by model, before each stage and at the end of the run.
    _starts: tuple[tuple[int, int, dict[str, int]], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stages = tuple((first, replace(plan, num_steps=self.num_rollouts)) for first, plan in self.stages)
        object.__setattr__(self, "stages", stages)
        steps, samples, by_model = 0, 0, {"policy": 0, "critic": 0}
        starts = [(steps, samples, dict(by_model))]
        for (first, plan), end in zip(self.stages, [*(first for first, _ in self.stages[1:]), self.num_rollouts], strict=True):
            rollouts = max(min(end, self.num_rollouts) - first, 0)
            for updates in plan.order:
                steps += rollouts * updates.optimizer_steps
                by_model[updates.model] += rollouts * updates.optimizer_steps
            samples += rollouts * plan.samples_per_step
            starts.append((steps, samples, dict(by_model)))
        object.__setattr__(self, "_starts", tuple(starts))

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, of all models together."""
        return self._starts[-1][0]

    @property
    def consumed_samples(self) -> int:
        """Samples that the run generates."""
        return self._starts[-1][1]

    def optimizer_steps(self, model: str) -> int:
        """Optimizer steps of one model over the run."""
        return self._starts[-1][2][model]

    def plan_of(self, rollout: int) -> RolloutPlan:
        """Return the sizes of a rollout."""
        return self.stages[bisect_right([first for first, _ in self.stages], rollout) - 1][1]

    def prompts_before(self, rollout: int) -> int:
        """Return the prompts of the rollouts before one."""
        ends = [*(first for first, _ in self.stages[1:]), self.num_rollouts]
        return sum(
            max(min(end, rollout) - first, 0) * plan.prompts_per_step
            for (first, plan), end in zip(self.stages, ends, strict=True)
        )

    def rollouts_before(self, step: int) -> int:
        """Return the rollouts whose optimizer steps are all before a step."""
        return self.num_rollouts if step >= self.total_steps else self.at(step).rollout

    def at(self, step: int) -> UpdatePosition:
        """Return the position of an optimizer step.

        Raises:
            ResumeMismatchError: the run has no such step.
        """
        if not 0 <= step < self.total_steps:
            raise ResumeMismatchError(f"step={step} must be from 0 to {self.total_steps - 1}", key="step")
        index = bisect_right([steps for steps, _, _ in self._starts[:-1]], step) - 1
        (first, plan), (steps, samples, by_model) = self.stages[index], self._starts[index]
        per_rollout = sum(updates.optimizer_steps for updates in plan.order)
        rollouts, update = divmod(step - steps, per_rollout)
        updates = plan.order[0]
        if update >= updates.optimizer_steps:
            update, updates = update - updates.optimizer_steps, plan.order[1]
        phase = Phase(
            index=index,
            start_step=steps,
            start_sample=samples,
            num_steps=None if index == len(self.stages) - 1 else self._starts[index + 1][0] - steps,
            global_batch_size=updates.mini_batch_samples,
        )
        return UpdatePosition(
            step=step,
            consumed_samples=samples + rollouts * plan.samples_per_step,
            phase=phase,
            split=self._split(updates, update),
            rollout=first + rollouts,
            model=updates.model,
            update=update,
            model_step=by_model[updates.model] + rollouts * updates.optimizer_steps + update,
            plan=plan,
        )

    def pass_samples(self, model: str) -> int:
        """Samples of one pass over all replicas: the same in all stages, so that one program serves them.

        With a token budget, the rows of a pass: one per replica.
        """
        found = [plan.updates(model) for _, plan in self.stages]
        if found[0].token_budget is not None:
            return found[0].data_parallel_size
        return math.gcd(*(updates.microbatch_samples or 0 for updates in found))

    def max_passes(self, model: str) -> int:
        """The largest number of passes of an optimizer step."""
        updates = [plan.updates(model) for _, plan in self.stages]
        if updates[0].token_budget is not None:
            return max(found.max_passes or 1 for found in updates)
        return max(-(-found.mini_batch_samples // self.pass_samples(model)) for found in updates)

    @property
    def sequences_per_call(self) -> int:
        """Sequences per call of the generator: the same in all stages."""
        return math.gcd(*(plan.sequences_per_call for _, plan in self.stages))

    @property
    def max_samples(self) -> int:
        """Samples of the largest rollout."""
        return max(plan.samples_per_step for _, plan in self.stages)

    def _split(self, updates: Any, update: int) -> BatchSplit:
        rows, replicas = self.pass_samples(updates.model), updates.data_parallel_size
        samples = len(updates.mini_batch_range(update % updates.num_mini_batches))
        # With a token budget, the number of passes depends on the lengths.
        return split_of(-(-samples // rows) if updates.token_budget is None else 1, rows, replicas)

    # What the training loop reads of a plan's ramp.

    @property
    def ramp(self) -> RolloutSchedule:
        """The schedule itself."""
        return self

    @property
    def ramp_steps(self) -> int:
        """Optimizer steps before the last stage."""
        return self._starts[-2][0]

    @property
    def splits(self) -> tuple[BatchSplit, ...]:
        """The split of the first mini batch of each stage."""
        return tuple(self.at(min(start, self.total_steps - 1)).split for start, _, _ in self._starts[:-1])

    def samples_before(self, step: int) -> int:
        """Return the samples of the rollouts that are generated before the end of step `step - 1`."""
        if step <= 0:
            return 0
        position = self.at(min(step, self.total_steps) - 1)
        return position.consumed_samples + position.plan.samples_per_step

    def stage_rows(self) -> list[dict[str, int]]:
        """Return the sizes of every stage that the run reaches, as `rampup plan --json` prints them.

        Example:
            >>> from rampup.rl.config import RolloutConfig, build_rollout_schedule
            >>> config = RolloutConfig(batch_size=16, batch_size_schedule="0:8 5:16", num_batches=9)
            >>> [(row["start_step"], row["num_steps"], row["samples_per_step"])
            ...     for row in build_rollout_schedule(config, 1).stage_rows()]
            [(0, 5, 64), (5, 4, 128)]
        """
        reached = [(first, plan) for first, plan in self.stages if first < self.num_rollouts]
        ends = [*(first for first, _ in reached[1:]), self.num_rollouts]
        return [
            {
                "start_step": first,
                "num_steps": end - first,
                "prompts_per_step": plan.prompts_per_step,
                "samples_per_prompt": plan.samples_per_prompt,
                "samples_per_step": plan.samples_per_step,
                "mini_batch_samples": plan.policy_updates.mini_batch_samples,
                "optimizer_steps": plan.policy_updates.optimizer_steps,
                "start_optimizer_step": self._starts[index][2]["policy"],
            }
            for index, ((first, plan), end) in enumerate(zip(reached, ends, strict=True))
        ]

    @property
    def fingerprint(self) -> str:
        """A digest of the sizes that decide which samples an optimizer step uses."""
        return hashlib.sha256(json.dumps(self.to_rows()).encode()).hexdigest()

    def to_rows(self) -> list[list[Any]]:
        """Return the sizes of every stage, as JSON."""
        return [
            [
                *(first, plan.samples_per_step, plan.samples_per_prompt),
                *([updates.model, updates.mini_batch_samples, updates.num_epochs] for updates in plan.order),
            ]
            for first, plan in itertools.takewhile(lambda stage: stage[0] < self.num_rollouts, self.stages)
        ]


def split_of(passes: int, rows: int, replicas: int) -> BatchSplit:
    """Return the split of a mini batch, padding included, into passes of `rows` rows over all replicas."""
    return BatchSplit(
        global_batch_size=passes * rows,
        data_parallel_size=replicas,
        accumulation_steps=passes,
        num_pipeline_microbatches=1,
        microbatch_size=rows // replicas,
    )
