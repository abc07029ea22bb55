"""Pipeline stages: their layers, a cost model that chooses the number of microbatches,
and schedules as timetables.

layers = stages * repeats * layers per chunk. A tick is the time of one chunk of one
microbatch. More microbatches make the bubble smaller, but each one is smaller, and
every tick has a fixed cost.

A `Timetable` simulates a schedule: every operation of every stage, with its start and
end. Makespan, bubble and memory are counted from that list. `bubble_fraction` is a
closed form of the bubble. A cost is that of a whole stage: with v repeats, one chunk of
a stage costs 1/v of it.

    1F1B, p = 3 stages, m = 4 microbatches, forward and backward of one tick each (F2 =
    forward of microbatch 2):

    tick     0    1    2    3    4    5    6    7    8    9   10   11
    stage 0  F0   F1   F2   .    .    B0   F3   B1   .    B2   .    B3
    stage 1  .    F0   F1   .    B0   F2   B1   F3   B2   .    B3   .
    stage 2  .    .    F0   B0   F1   B1   F2   B2   F3   B3   .    .
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from rampup.errors import PipelineShapeError
from rampup.plan.numbers import (
    AUTO,
    divisors,
    format_product,
    nearest_multiples,
    plain_number,
)

# The assumed fixed cost of a tick, if it has not been measured. Moving weights and
# gradients takes as long as the arithmetic of several hundred tokens on accelerators
# with about 200 floating-point operations per byte of memory traffic.
DEFAULT_OVERHEAD_TOKENS = 512

Schedule = Literal["gpipe", "1f1b", "interleaved", "circular"]
SCHEDULES = get_args(Schedule)
Kind = Literal["F", "B"]  # F forward, B backward
Order = list[tuple[Kind, int, int]]  # (kind, microbatch, repeat)

MAX_OPERATIONS = 2_000_000


def pipeline_repeats(
    *, num_layers: int, num_stages: int, num_repeats: int = AUTO
) -> int:
    """Return a stage's layer chunks, after checking that they share the layers.

    Args:
        num_layers: decoder layers of the model.
        num_stages: pipeline stages; with 1 there is one chunk.
        num_repeats: chunks of a stage; -1 = as many as give one layer to each.

    Raises:
        PipelineShapeError: a size below 1, or layers that are no multiple of stages *
            chunks.

    Source: MaxText `configs/types.py`.

    Example:
        >>> pipeline_repeats(num_layers=8, num_stages=4)
        2
    """
    if num_layers < 1:
        key = "base_num_decoder_layers"
        raise PipelineShapeError(
            f"{key}={num_layers} must be at least 1", key=key, nearest=(1,)
        )
    key = "num_pipeline_repeats"
    if num_repeats < 1 and num_repeats != AUTO:
        raise PipelineShapeError(
            f"{key}={num_repeats} must be -1 (automatic) or at least 1",
            key=key,
            nearest=(AUTO, 1),
        )
    if num_stages == 1:
        if num_repeats not in (AUTO, 1):
            raise PipelineShapeError(
                f"{key}={num_repeats} needs a pipeline, but there is one stage",
                fix="set it to -1",
                key=key,
                nearest=(AUTO, 1),
            )
        return 1
    factors = {"num_stages": num_stages, key: max(num_repeats, 1)}
    product = math.prod(factors.values())
    if num_layers % product:
        nearest = nearest_multiples(num_layers, product)
        raise PipelineShapeError(
            f"base_num_decoder_layers={num_layers} must be a multiple of"
            f" {format_product(factors)}",
            fix=f"nearest: {', '.join(map(str, nearest))}",
            key="base_num_decoder_layers",
            nearest=nearest,
        )
    return num_layers // num_stages if num_repeats == AUTO else num_repeats


def stage_layer_order(
    num_layers: int, num_stages: int, num_repeats: int = 1
) -> list[int]:
    """Return the layers in stage order: first those of stage 0, which has the chunks 0,
    p, 2p, and so on. For 8 layers and p = v = 2, it is 0, 1, 4, 5, 2, 3, 6, 7.
    """
    size = num_layers // (num_stages * num_repeats)
    if num_stages > 1:
        pipeline_repeats(
            num_layers=num_layers, num_stages=num_stages, num_repeats=num_repeats
        )
    chunks = [r * num_stages + s for s in range(num_stages) for r in range(num_repeats)]
    return [chunk * size + layer for chunk in chunks for layer in range(size)]


def pass_ticks(num_stages: int, num_microbatches: Any, num_repeats: int = 1) -> Any:
    """Return the ticks of one pass of the program in which a stage has a forward; as
    many have a backward.

    Microbatches go through all repeats in groups of p, and the last group may have
    fewer: see `rampup.engine.pipeline`, which gives an array for the number of
    microbatches. If p divides m, these are v * m + p - 1 ticks.
    """
    p, m = num_stages, num_microbatches
    groups = (m + p - 1) // p
    # The last microbatch in its last turn, on stage 0. The last stage runs it p - 1
    # ticks later.
    last_unit = (groups * num_repeats - 1) * p + (m - 1) % p
    return last_unit + p


def pass_bubble(
    num_stages: int, num_microbatches: int, num_repeats: int = 1
) -> Fraction:
    """Return the idle time of one pass of the program as a fraction of its time."""
    ticks = pass_ticks(num_stages, num_microbatches, num_repeats)
    return Fraction(ticks - num_repeats * num_microbatches, ticks)


def predicted_time(
    num_microbatches: int,
    microbatch_size: int,
    *,
    num_stages: int,
    num_repeats: int,
    overhead: Fraction,
) -> Fraction:
    """Return T = ticks * (b / v + h), in samples' worth of a stage's arithmetic; h, a
    tick's fixed cost, is in samples too.
    """
    ticks: int = pass_ticks(num_stages, num_microbatches, num_repeats)
    return ticks * (Fraction(microbatch_size, num_repeats) + overhead)


def fastest_microbatches(
    samples: int,
    *,
    num_stages: int,
    overhead: Fraction,
    num_repeats: int = 1,
    multiple: int = 1,
    minimum: int = 1,
) -> int | None:
    """Return the number of microbatches m with the lowest predicted time, and the fewest
    of several: of the splits m * b of the samples of a row shard, with m >= `minimum`
    and a multiple of `multiple`. None if there is no such split.
    """

    def time(m: int) -> Fraction:
        return predicted_time(
            m,
            samples // m,
            num_stages=num_stages,
            num_repeats=num_repeats,
            overhead=overhead,
        )

    legal = [m for m in divisors(samples) if m % multiple == 0 and m >= minimum]
    return min(legal, key=time, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One unit of work of one stage."""

    stage: int
    kind: Kind
    microbatch: int
    repeat: int  # the layer chunk of the stage
    # Times, in units of the costs.
    start: Fraction
    end: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """All operations of one pipeline pass, sorted by stage, then by start. Stages,
    microbatches and repeats are p, m and v.

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
        forward_cost: Fraction | float = 1,
        backward_cost: Fraction | float = 2,
    ) -> Timetable:
        """Simulate a schedule: every operation starts as early as its order and its
        inputs allow.

        A schedule that is not defined for the numbers raises a PipelineShapeError with
        numbers for which it is.

        Args:
            schedule: `gpipe` (Huang et al. 2018, arXiv 1811.06965); `1f1b` (Narayanan
                et al. 2021, arXiv 2104.04473); `interleaved`, the same with repeats;
                `circular`, breadth first with repeats (Lamy-Poirier 2022, arXiv
                2211.05953; MaxText, praxis).
            num_stages, num_microbatches: p and m.
            num_repeats: v, the number of layer chunks per stage, for `interleaved` and
                `circular`.
            forward_cost, backward_cost: the costs of one microbatch in a whole stage.
        """
        if schedule not in SCHEDULES:
            raise PipelineShapeError(
                f"schedule={schedule!r} must be one of {', '.join(SCHEDULES)}",
                key="schedule",
                nearest=SCHEDULES,
            )
        for key, value in (
            ("stages", num_stages),
            ("microbatches", num_microbatches),
            ("repeats", num_repeats),
        ):
            if value < 1:
                raise PipelineShapeError(
                    f"{key}={value} must be at least 1", key=key, nearest=(1,)
                )
        if num_repeats > 1 and schedule not in ("interleaved", "circular"):
            raise PipelineShapeError(
                f"repeats={num_repeats} needs the schedule interleaved or circular, not"
                f" {schedule}",
                key="repeats",
                nearest=(1,),
            )
        operations = 2 * num_stages * num_microbatches * num_repeats
        if operations > MAX_OPERATIONS:
            largest = MAX_OPERATIONS // (2 * num_stages * num_repeats)
            raise PipelineShapeError(
                f"microbatches={num_microbatches} gives {operations:,}"
                f" operations; the limit is {MAX_OPERATIONS:,}",
                key="microbatches",
                nearest=(largest,) if largest else (),
            )
        forward, backward = (
            x if isinstance(x, Fraction) else Fraction(str(x))
            for x in (forward_cost, backward_cost)
        )
        for name, cost in (("forward-cost", forward), ("backward-cost", backward)):
            if cost <= 0:
                raise PipelineShapeError(
                    f"{name}={float(cost):g} must be greater than 0",
                    key=name,
                    nearest=(1,),
                )
        costs: dict[Kind, Fraction] = {
            "F": forward / num_repeats,
            "B": backward / num_repeats,
        }
        if schedule in ("gpipe", "circular"):
            stages = [_gpipe_order(num_microbatches, num_repeats)] * num_stages
        else:
            stages = [
                _one_f_one_b_order(s, num_stages, num_microbatches, num_repeats)
                for s in range(num_stages)
            ]
        return cls(
            schedule=schedule,
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_repeats=num_repeats,
            operations=tuple(_simulate(stages, costs, num_repeats)),
        )

    @property
    def makespan(self) -> Fraction:
        """Time from the first start to the last end."""
        return max(operation.end for operation in self.operations)

    @property
    def bubble_fraction(self) -> Fraction:
        """Idle time as a fraction of all stages' time, counted."""
        busy = sum(
            (operation.end - operation.start for operation in self.operations),
            Fraction(0),
        )
        return 1 - busy / (self.num_stages * self.makespan)

    @property
    def tick(self) -> Fraction:
        """The width of one column of the table: the greatest common divisor of all
        starts and ends.
        """
        numbers = [
            n for operation in self.operations for n in (operation.start, operation.end)
        ]
        denominator = math.lcm(*(n.denominator for n in numbers))
        return Fraction(math.gcd(*(int(n * denominator) for n in numbers)), denominator)

    @property
    def num_ticks(self) -> int:
        """The number of columns of the table, each as long as `tick`."""
        return int(self.makespan / self.tick)

    @property
    def peak_live_microbatches(self) -> tuple[Fraction, ...]:
        """For each stage, the most microbatches with activations in memory, in units of
        a whole stage.

        They are live from the start of a forward pass to the end of its backward pass.
        """
        peaks = []
        for stage in range(self.num_stages):
            events = sorted(
                (o.start, 1) if o.kind == "F" else (o.end, -1)
                for o in self.of_stage(stage)
            )
            live = itertools.accumulate(change for _, change in events)
            peaks.append(Fraction(max(live), self.num_repeats))
        return tuple(peaks)

    def of_stage(self, stage: int) -> tuple[Operation, ...]:
        """Return the operations of one stage, in order."""
        return tuple(
            operation for operation in self.operations if operation.stage == stage
        )

    def to_dict(self) -> dict[str, object]:
        """Return the timetable as `rampup plan --timetable --json` prints it."""
        return {
            "schedule": self.schedule,
            "num_ticks": self.num_ticks,
            "makespan": plain_number(self.makespan),
            "bubble_fraction": float(self.bubble_fraction),
            "peak_live_microbatches": [
                plain_number(peak) for peak in self.peak_live_microbatches
            ],
            "table": [
                asdict(operation)
                | {
                    "start": plain_number(operation.start),
                    "end": plain_number(operation.end),
                }
                for operation in self.operations
            ],
        }


def bubble_fraction(
    num_stages: int, num_microbatches: int, num_repeats: int = 1
) -> Fraction:
    """Return the idle time of a pass as a fraction of its time; for m >= p or v = 1, it
    is (p - 1) / (v*m + p - 1).

    It is the same for GPipe, 1F1B, interleaved and circular (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2). For m < p, repeats stall, as in a circular pipeline.
    `rampup.PipelinedLoss` has the bubble of `pass_bubble`.
    """
    ticks = (
        max(num_microbatches, num_stages) * (num_repeats - 1)
        + num_microbatches
        + num_stages
        - 1
    )
    return Fraction(ticks - num_repeats * num_microbatches, ticks)


def group_sizes(num_microbatches: int, num_stages: int) -> list[int]:
    """Return the sizes of the groups of microbatches that pass all repeats together:
    balanced, at least p each if m >= p.
    """
    number = max(num_microbatches // num_stages, 1)
    size, larger = divmod(num_microbatches, number)
    return [size + 1] * larger + [size] * (number - larger)


# The orders of the schedules, for stage s of p stages, m microbatches and v repeats.


def _gpipe_order(m: int, v: int) -> Order:
    """All forward passes, then all backward passes in reverse, for every stage. With
    repeats this is the circular schedule.
    """
    forward: Order = [("F", k, r) for r in range(v) for k in range(m)]
    return forward + [("B", k, r) for _, k, r in reversed(forward)]


def _one_f_one_b_order(s: int, p: int, m: int, v: int) -> Order:
    """A warm-up of forward passes, then backward and forward in turn. With repeats this
    is the interleaved schedule.
    """
    forward: Order = []
    backward: Order = []
    groups, start = group_sizes(m, p), 0
    for size in groups:
        for r in range(v):
            forward += [("F", k, r) for k in range(start, start + size)]
            backward += [("B", k, v - 1 - r) for k in range(start, start + size)]
        start += size
    # The warm-up fills the p - 1 - s stages behind this one. With repeats, the first
    # group goes through all chunks but the last before its first gradient can come
    # back, and Megatron-LM warms up by two forward passes per stage.
    warm_up = min(
        p - 1 - s if v == 1 else 2 * (p - 1 - s) + (v - 1) * groups[0], len(forward)
    )
    order = forward[:warm_up]
    for number, operation in enumerate(backward):
        order += forward[warm_up + number : warm_up + number + 1]
        order.append(operation)
    return order


def _simulate(
    orders: list[Order], costs: Mapping[Kind, Fraction], num_repeats: int
) -> Iterator[Operation]:
    """Run every stage's order. An operation starts as soon as its stage is free and its
    input is ready.
    """
    p = len(orders)
    ends: dict[tuple[int, Kind, int, int], Fraction] = {}
    free = [Fraction(0)] * p
    left = [order[::-1] for order in orders]  # the next one is the last
    operations: list[list[Operation]] = [[] for _ in orders]

    def input_of(
        stage: int, kind: Kind, k: int, r: int
    ) -> tuple[int, Kind, int, int] | None:
        # A microbatch goes through the chunks of all stages, and back the same way.
        chunk = r * p + stage
        if kind == "B" and chunk == p * num_repeats - 1:
            return stage, "F", k, r
        r, stage = divmod(chunk - 1 if kind == "F" else chunk + 1, p)
        return (stage, kind, k, r) if r >= 0 else None

    waiting = list(range(p))
    while waiting:
        progressed = False
        for stage in waiting:
            while left[stage]:
                kind, k, r = left[stage][-1]
                needed = input_of(stage, kind, k, r)
                if needed is not None and needed not in ends:
                    break
                start = max(free[stage], ends[needed] if needed else Fraction(0))
                end = free[stage] = ends[stage, kind, k, r] = start + costs[kind]
                operations[stage].append(
                    Operation(
                        stage=stage,
                        kind=kind,
                        microbatch=k,
                        repeat=r,
                        start=start,
                        end=end,
                    )
                )
                left[stage].pop()
                progressed = True
        waiting = [stage for stage in waiting if left[stage]]
        assert progressed or not waiting, (
            f"deadlock: stage {waiting[0]} waits for {left[waiting[0]][-1]}"
        )
    for of_stage in operations:
        yield from of_stage
