"""In which order each pipeline stage does its work: the schedules.

A unit of work is (kind, microbatch, repeat). Arguments are named as in the papers: stage s of p stages, m microbatches and v
repeats.
"""

from __future__ import annotations

from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "circular", "zb-h1"]
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "circular", "zb-h1")
Kind = Literal["F", "B", "I", "W"]
Order = list[tuple[Kind, int, int]]


def order_of_stage(schedule: Schedule, s: int, p: int, m: int, v: int, groups: list[int]) -> Order:
    """Return the order of the work of one stage.

    Args:
        schedule: which one; see `Timetable.build` for their sources.
        s, p, m, v: the stage, and the numbers of stages, microbatches and repeats.
        groups: from `group_sizes`, for `interleaved`.

    Example:
        >>> order_of_stage("1f1b", 0, 2, 2, 1, [2])
        [('F', 0, 0), ('F', 1, 0), ('B', 0, 0), ('B', 1, 0)]
    """
    return _ORDERS[schedule](s, p, m, v, groups)


def group_sizes(num_microbatches: int, num_stages: int, group_size: int | None) -> list[int]:
    """Return the sizes of the groups in which microbatches pass through all repeats.

    Args:
        num_microbatches: m.
        num_stages: p.
        group_size: contiguous groups of this size, the last one smaller (Megatron-LM); None = balanced groups of at least p.

    Example:
        >>> group_sizes(10, 4, None), group_sizes(10, 4, 4)
        ([5, 5], [4, 4, 2])
    """
    if group_size is None:
        number = max(num_microbatches // num_stages, 1)
        size, larger = divmod(num_microbatches, number)
        return [size + 1] * larger + [size] * (number - larger)
    whole, rest = divmod(num_microbatches, group_size)
    return [group_size] * whole + [rest] * (rest > 0)


def _gpipe(s: int, p: int, m: int, v: int, groups: list[int]) -> Order:
    forward: Order = [("F", k, r) for r in range(v) for k in range(m)]
    return forward + [("B", k, r) for _, k, r in reversed(forward)]


def _one_f_one_b(s: int, p: int, m: int, v: int, groups: list[int]) -> Order:
    forward: Order = []
    backward: Order = []
    start = 0
    for size in groups:
        for r in range(v):
            forward += [("F", k, r) for k in range(start, start + size)]
            backward += [("B", k, v - 1 - r) for k in range(start, start + size)]
        start += size
    warm_up = p - 1 - s if v == 1 else 2 * (p - 1 - s) + (v - 1) * groups[0]
    return _alternate(forward, backward, min(warm_up, len(forward)))


def _alternate(forward: Order, backward: Order, warm_up: int) -> Order:
    order = forward[:warm_up]
    for number, operation in enumerate(backward):
        order += forward[warm_up + number : warm_up + number + 1]
        order.append(operation)
    return order


def _zero_bubble(s: int, p: int, m: int, v: int, groups: list[int]) -> Order:
    """1F1B with the backward in two parts; stage s holds s weight gradients back to fill its waiting at the end."""
    order: Order = [("F", k, 0) for k in range(min(p - 1 - s, m))]
    for k in range(m):
        if k + p - 1 - s < m:
            order.append(("F", k + p - 1 - s, 0))
        order.append(("I", k, 0))
        if k >= s:
            order.append(("W", k - s, 0))
    return order + [("W", k, 0) for k in range(max(m - s, 0), m)]


_ORDERS = {"gpipe": _gpipe, "1f1b": _one_f_one_b, "interleaved": _one_f_one_b, "circular": _gpipe, "zb-h1": _zero_bubble}
