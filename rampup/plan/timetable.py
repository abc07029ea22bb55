"""When each pipeline stage works on which microbatch, and what the waiting costs.

A timetable is data: every operation of every stage with its start and end. Everything else (makespan, bubble, memory, volume)
is counted from it, and the closed forms stand beside it. Costs are of a whole stage; a chunk of one with v repeats costs 1/v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from rampup.errors import PipelineShapeError
from rampup.notebook_repr import NotebookRepr
from rampup.plan.numbers import plain_number
from rampup.plan.schedules import SCHEDULES, Kind, Order, Schedule, group_sizes, order_of_stage

MAX_OPERATIONS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One piece of work of one stage.

    Attributes:
        stage: which stage works.
        kind: F forward, B backward; with zero bubble I the input's gradient and W the weights'.
        microbatch, repeat: what it works on.
        start, end: when, in units of the costs.
    """

    stage: int
    kind: Kind
    microbatch: int
    repeat: int
    start: Fraction
    end: Fraction

    @property
    def label(self) -> str:
        """Kind, microbatch and, from the second on, repeat."""
        return _label_of(self.kind, self.microbatch, self.repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable(NotebookRepr):
    """All operations of one pipeline pass.

    Attributes:
        schedule: how the operations are ordered.
        num_stages, num_microbatches, num_repeats: p, m and v.
        operations: by stage, then by start.

    Example:
        >>> table = Timetable.build("1f1b", num_stages=4, num_microbatches=8)
        >>> table.makespan, table.bubble_fraction, table.peak_live_microbatches
        (Fraction(33, 1), Fraction(3, 11), (Fraction(4, 1), Fraction(3, 1), Fraction(2, 1), Fraction(1, 1)))
    """

    schedule: Schedule
    num_stages: int
    num_microbatches: int
    num_repeats: int
    operations: tuple[Operation, ...]

    @classmethod
    def build(
        cls,
        schedule: Schedule,
        *,
        num_stages: int,
        num_microbatches: int,
        num_repeats: int = 1,
        group_size: int | None = None,
        forward_cost: Fraction | float = 1,
        backward_cost: Fraction | float = 2,
        weight_cost: Fraction | float | None = None,
    ) -> Timetable:
        """Return the timetable of a schedule, every operation as early as its order and its inputs allow.

        Args:
            schedule: `gpipe` (Huang et al. 2018, arXiv 1811.06965); `1f1b` (Narayanan et al. 2021, arXiv 2104.04473);
                `interleaved`, the same with repeats; `circular`, breadth first with repeats (Lamy-Poirier 2022, arXiv
                2211.05953; MaxText, praxis); `zb-h1` (Qi et al. 2023, arXiv 2401.10241).
            num_stages: p.
            num_microbatches: m.
            num_repeats: v, layer chunks per stage, for `interleaved` and `circular`.
            group_size: for `interleaved`, Megatron-LM's contiguous groups of this size, the last one smaller; None cuts
                the microbatches into balanced groups of at least p.
            forward_cost: of a whole stage and one microbatch.
            backward_cost: the same; with zero bubble the input's and the weights' gradient together.
            weight_cost: with zero bubble, the part of it that is the weights'; None = half.

        Raises:
            PipelineShapeError: numbers for which the schedule is not defined, with those for which it is.
        """
        check_shape(schedule, num_stages, num_microbatches, num_repeats, group_size)
        costs = _costs(forward_cost, backward_cost, weight_cost, num_repeats)
        groups = group_sizes(num_microbatches, num_stages, group_size)
        orders = [order_of_stage(schedule, s, num_stages, num_microbatches, num_repeats, groups) for s in range(num_stages)]
        return cls(
            schedule=schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_repeats=num_repeats,
            operations=tuple(_simulate(orders, costs, num_repeats)),
        )

    @property
    def makespan(self) -> Fraction:
        """Time from the first start to the last end."""
        return max(operation.end for operation in self.operations)

    @property
    def bubble_fraction(self) -> Fraction:
        """Idle time over all stages' time, counted."""
        busy = sum((operation.end - operation.start for operation in self.operations), Fraction(0))
        return 1 - busy / (self.num_stages * self.makespan)

    @property
    def tick(self) -> Fraction:
        """The longest time of which every start and end is a multiple: one column of the picture."""
        numbers = [n for operation in self.operations for n in (operation.start, operation.end)]
        denominator = math.lcm(*(n.denominator for n in numbers))
        return Fraction(math.gcd(*(int(n * denominator) for n in numbers)), denominator)

    @property
    def num_ticks(self) -> int:
        """Columns of the picture."""
        return int(self.makespan / self.tick)

    @property
    def peak_live_microbatches(self) -> tuple[Fraction, ...]:
        """The most microbatches whose activations a stage holds at once, in whole stages' worth.

        An activation lives from the start of its forward to the end of its backward, of its weight gradient with zero bubble.
        """
        return tuple(self._peak(stage) for stage in range(self.num_stages))

    @property
    def sends_per_stage(self) -> tuple[int, ...]:
        """Point-to-point volume: activations and gradients that each stage sends, in microbatches at one boundary."""
        last = self.num_stages - 1
        counts = [0] * self.num_stages
        for operation in self.operations:
            forward = operation.kind == "F"
            edge_stage, edge_repeat = (last, self.num_repeats - 1) if forward else (0, 0)
            at_the_end = operation.stage == edge_stage and operation.repeat == edge_repeat
            if operation.kind != "W" and not at_the_end and last > 0:
                counts[operation.stage] += 1
        return tuple(counts)

    def of_stage(self, stage: int) -> tuple[Operation, ...]:
        """Return the operations of one stage, in order."""
        return tuple(operation for operation in self.operations if operation.stage == stage)

    def to_dict(self) -> dict[str, object]:
        """Return the timetable as `rampup timetable --json` prints it."""
        return {
            "schedule": self.schedule,
            "num_ticks": self.num_ticks,
            "makespan": plain_number(self.makespan),
            "bubble_fraction": float(self.bubble_fraction),
            "peak_live_microbatches": [plain_number(peak) for peak in self.peak_live_microbatches],
            "sends_per_stage": list(self.sends_per_stage),
            "table": [
                {
                    "stage": operation.stage,
                    "kind": operation.kind,
                    "microbatch": operation.microbatch,
                    "repeat": operation.repeat,
                    "start": plain_number(operation.start),
                    "end": plain_number(operation.end),
                }
                for operation in self.operations
            ],
        }

    def _peak(self, stage: int) -> Fraction:
        frees = "W" if self.schedule == "zb-h1" else "B"
        events = [(operation.start, 1) for operation in self.of_stage(stage) if operation.kind == "F"]
        events += [(operation.end, -1) for operation in self.of_stage(stage) if operation.kind == frees]
        live = peak = 0
        for _, change in sorted(events):
            live += change
            peak = max(peak, live)
        return Fraction(peak, self.num_repeats)


def bubble_fraction(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Fraction:
    """Return idle time over total time of one pipeline pass (GPipe, 1F1B; circular and interleaved with repeats).

    Args:
        num_stages: pipeline stages p.
        num_microbatches: microbatches m of the pass; below p, repeats stall.
        num_repeats: layer chunks v per stage.

    Returns:
        (p - 1) / (v*m + p - 1) for m >= p or v = 1, exactly.

    Example:
        >>> bubble_fraction(4, 8), bubble_fraction(4, 8, 2)
        (Fraction(3, 11), Fraction(3, 19))

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; for m < p the ticks of the circular pipeline.
    """
    ticks = num_ticks(num_stages, num_microbatches, num_repeats)
    return Fraction(ticks - num_repeats * num_microbatches, ticks)


def num_ticks(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> int:
    """Return the forward ticks of one pass: max(m, p) (v - 1) + m + p - 1.

    Example:
        >>> num_ticks(4, 8, 2)
        19
    """
    return max(num_microbatches, num_stages) * (num_repeats - 1) + num_microbatches + num_stages - 1


def peak_live_microbatches(
    schedule: Schedule, *, num_stages: int, num_microbatches: int, num_repeats: int = 1, stage: int = 0
) -> Fraction:
    """Return the closed form of `Timetable.peak_live_microbatches` for one stage; interleaved in balanced groups.

    Example:
        >>> peak_live_microbatches("interleaved", num_stages=4, num_microbatches=8, num_repeats=2)
        Fraction(11, 2)
    """
    m, after = num_microbatches, num_stages - 1 - stage
    if schedule in ("gpipe", "circular"):
        return Fraction(m)
    if schedule == "1f1b":
        return Fraction(min(m, after + 1))
    if schedule == "zb-h1":
        return Fraction(min(m, num_stages))
    first = group_sizes(m, num_stages, None)[0]
    return Fraction(min(num_repeats * m, 2 * after + (num_repeats - 1) * first + 1), num_repeats)


def check_shape(schedule: str, num_stages: int, num_microbatches: int, num_repeats: int, group_size: int | None) -> None:
    """Refuse numbers for which a schedule is not defined.

    Raises:
        PipelineShapeError: with the nearest numbers for which it is.
    """
    if schedule not in SCHEDULES:
        raise PipelineShapeError(
            f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}", key="schedule", nearest=SCHEDULES
        )
    for key, value in (("stages", num_stages), ("microbatches", num_microbatches), ("repeats", num_repeats)):
        if value < 1:
            raise PipelineShapeError(f"{key}={value} must be at least 1", key=key, nearest=(1,))
    if num_repeats > 1 and schedule not in ("interleaved", "circular"):
        raise PipelineShapeError(
            f"repeats={num_repeats} needs the schedule interleaved or circular, not {schedule}", key="repeats", nearest=(1,)
        )
    if schedule == "zb-h1" and num_microbatches < num_stages:
        raise PipelineShapeError(
            f"microbatches={num_microbatches} must be at least stages={num_stages} for zb-h1",
            key="microbatches",
            nearest=(num_stages,),
        )
    if group_size is not None and (schedule != "interleaved" or not num_stages <= group_size <= num_microbatches):
        raise PipelineShapeError(
            f"group-size={group_size} is for the schedule interleaved and must be from stages={num_stages} to "
            f"microbatches={num_microbatches}",
            key="group-size",
            nearest=(num_stages, num_microbatches) if num_stages <= num_microbatches else (),
        )
    operations = 3 * num_stages * num_microbatches * num_repeats
    if operations > MAX_OPERATIONS:
        most = MAX_OPERATIONS // (3 * num_stages * num_repeats)
        raise PipelineShapeError(
            f"microbatches={num_microbatches} make up to {operations:,} operations, too many to list; the most is "
            f"{MAX_OPERATIONS:,}",
            key="microbatches",
            nearest=(most,) if most else (),
        )


def _costs(
    forward: Fraction | float, backward: Fraction | float, weight: Fraction | float | None, num_repeats: int
) -> Mapping[Kind, Fraction]:
    values = {"forward-cost": forward, "backward-cost": backward} | ({} if weight is None else {"weight-cost": weight})
    exact = {name: value if isinstance(value, Fraction) else Fraction(str(value)) for name, value in values.items()}
    for name, value in exact.items():
        if value <= 0:
            raise PipelineShapeError(f"{name}={float(value):g} must be greater than 0", key=name, nearest=(1,))
    whole = exact["backward-cost"]
    weights = exact.get("weight-cost", whole / 2)
    if weights >= whole:
        raise PipelineShapeError(
            f"weight-cost={float(weights):g} must be below backward-cost={float(whole):g}, of which it is a part",
            key="weight-cost",
        )
    costs: dict[Kind, Fraction] = {"F": exact["forward-cost"], "B": whole, "I": whole - weights, "W": weights}
    return {kind: cost / num_repeats for kind, cost in costs.items()}


def _simulate(orders: list[Order], costs: Mapping[Kind, Fraction], num_repeats: int) -> Iterator[Operation]:
    """Run every stage's order, each operation as soon as the stage is free and the operation's input is there."""
    last, top = len(orders) - 1, num_repeats - 1
    ends: dict[tuple[int, Kind, int, int], Fraction] = {}
    free = [Fraction(0)] * len(orders)
    done = [0] * len(orders)
    found: list[list[Operation]] = [[] for _ in orders]

    def inputs(stage: int, kind: Kind, k: int, r: int) -> tuple[int, Kind, int, int] | None:
        if kind == "W":
            return stage, "I", k, r
        if kind == "F":
            return (stage - 1, "F", k, r) if stage else (last, "F", k, r - 1) if r else None
        if stage == last and r == top:
            return stage, "F", k, r
        return (stage + 1, kind, k, r) if stage < last else (0, kind, k, r + 1)

    waiting = list(range(len(orders)))
    while waiting:
        progressed = False
        for stage in waiting:
            while done[stage] < len(orders[stage]):
                kind, k, r = orders[stage][done[stage]]
                needed = inputs(stage, kind, k, r)
                if needed is not None and needed not in ends:
                    break
                start = max(free[stage], ends[needed] if needed else Fraction(0))
                end = free[stage] = ends[stage, kind, k, r] = start + costs[kind]
                found[stage].append(Operation(stage=stage, kind=kind, microbatch=k, repeat=r, start=start, end=end))
                done[stage] += 1
                progressed = True
        waiting = [stage for stage in waiting if done[stage] < len(orders[stage])]
        if waiting and not progressed:
            stage = waiting[0]
            raise PipelineShapeError(
                f"the schedule cannot run: stage {stage} waits for ever for {_label_of(*orders[stage][done[stage]])}"
            )
    for operations in found:
        yield from operations


def _label_of(kind: Kind, microbatch: int, repeat: int) -> str:
    return f"{kind}{microbatch}" + (f".{repeat}" if repeat else "")
