"""What is wrong with a configuration that has no plan: every broken rule, each with its
place and the nearest legal values.

`build_plan` calls `all_problems` after a rule was broken. It runs each stage of the
build again, also those after a broken one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rampup.config import build
from rampup.config.resume import list_devices, numbers_that_can
from rampup.config.schema import KEYS, Config
from rampup.errors import (
    BatchDivisibilityError,
    RampDefinitionError,
    RampupError,
    combine,
    raise_together,
)
from rampup.plan.mesh_axes import MeshAxes
from rampup.plan.numbers import AUTO, nearest_in
from rampup.plan.ramp import BatchRamp, parse_schedule
from rampup.plan.ramp_keys import AUTO_SCHEDULE, ramp_from_config
from rampup.plan.refusal import batch_error, nearest_batches
from rampup.plan.split import BatchSplitter


def all_problems(
    config: Config, num_devices: int, resumed: Mapping[str, Any]
) -> RampupError:
    """Return one error with every rule that a configuration breaks. `resumed` are the
    other arguments of `build_plan`.
    """
    ramp, seesaw, eval_size, reserved_sizes, consumed_samples = resumed.values()
    problems: list[RampupError] = []
    axes = splitter = None
    # Neither has an effect on what is legal.
    overhead = Fraction(0)
    repeats = 1
    # The mesh, the pipeline and the ramp break different rules, so each is checked even
    # if another one is refused. A mesh that is refused has no known number of replicas:
    # the ramp is then checked without its splitter.
    with _collected(problems, config):
        axes = build.mesh_axes(config, num_devices)
    with _collected(problems, config):
        overhead = build.tick_overhead(config)
    known = axes or MeshAxes()
    with _collected(problems, config):
        repeats = build.num_repeats(config, known.pipeline)
    with _collected(problems, config):
        splitter = build.make_splitter(config, known, repeats, overhead)
    with _collected(problems, config):
        is_auto = config.batch_size_schedule == AUTO_SCHEDULE
        if is_auto and reserved_sizes is None and splitter:
            reserved_sizes = build.sizes_to_reserve(config, num_devices, splitter)
        if ramp is None and not (is_auto and reserved_sizes is None):
            ramp = _checked_ramp(
                config,
                num_devices,
                splitter if axes else None,
                reserved_sizes,
                consumed_samples,
            )
            if config.seesaw_factor is not None and splitter is not None:
                seesaw = build.make_seesaw(config, ramp, splitter)
                ramp = seesaw.ramp
    eval_problems: list[RampupError] = []
    if (
        eval_size is None
        and axes
        and splitter
        and (config.eval_per_device_batch_size > 0 or not problems)
    ):
        with _collected(eval_problems, config):
            eval_size = build.eval_batch(
                config, num_devices, seesaw.base if seesaw else ramp, splitter
            )
    if problems:
        closing = (
            "" if axes else "the batch sizes are checked again once the mesh is legal"
        )
        refused = any(
            isinstance(problem, BatchDivisibilityError)
            for problem in [*problems, *eval_problems]
        )
        if axes and splitter and ramp is None and refused:
            closing = _devices_of_schedule(config, num_devices)
        return combine([*problems, *eval_problems], closing)

    assert splitter is not None
    if eval_problems:
        eval_size = (
            splitter.for_eval().smallest
        )  # a legal one: only the other rules are left to check
    resumed = {
        "ramp": ramp,
        "seesaw": seesaw,
        "eval_size": eval_size,
        "reserved_sizes": reserved_sizes,
    }
    with _collected(eval_problems, config):
        build.plan_or_first_error(config, num_devices, **resumed)
    return combine(eval_problems)


@contextlib.contextmanager
def _collected(problems: list[RampupError], config: Config) -> Iterator[None]:
    """Append the errors of a block to a list, each with the place its key was set and
    with only the values a file can have.
    """
    try:
        yield
    except RampupError as error:
        problems += [_placed(problem, config) for problem in error.problems or (error,)]


def _placed(problem: RampupError, config: Config) -> RampupError:
    placed = copy.copy(problem)
    keys = [problem.key or ""]
    if keys == ["num_devices"] and config.num_devices == AUTO:
        # The number of devices is that of the caller or of the machine; what was
        # written are the axes.
        keys = [
            name
            for name in KEYS
            if name.endswith("_parallelism") and name in str(problem)
        ]
    if places := [
        f"{key}: {place}" for key in keys if (place := config.where(key)) != "default"
    ]:
        placed.args = (f"{problem} [{', '.join(places)}]",)
    # The values offered for a schedule are sizes, not schedules.
    if problem.key in KEYS and problem.key != "batch_size_schedule":
        placed.nearest = tuple(filter(KEYS[problem.key].allows, problem.nearest))
    return placed


def _checked_ramp(
    config: Config,
    num_devices: int,
    splitter: BatchSplitter | None,
    reserved_sizes: Sequence[int] | None,
    consumed_samples: int,
) -> BatchRamp:
    """Return the ramp, or raise the errors about its order and all its sizes, also
    those that no step reaches.
    """
    schedule = (
        None
        if config.batch_size_schedule == AUTO_SCHEDULE
        else config.batch_size_schedule
    )
    ramp: BatchRamp | None = None
    problems: list[RampupError] = []
    # Sizes to check, each with where the run has it.
    sizes: list[tuple[int, str]] = []
    try:
        ramp = build.make_ramp(config, num_devices, splitter, reserved_sizes)
        ramp = ramp.resumed_at(ramp.phase_of_sample(consumed_samples).start_step)
        sizes = [
            (phase.global_batch_size, str(phase))
            for phase in ramp.phases
            if not ramp.is_over(phase)
        ]
        if config.batch_size_schedule == AUTO_SCHEDULE:
            sizes = [
                (size, "batch_size_schedule: auto") for size in reserved_sizes or ()
            ]
    except RampDefinitionError as error:
        if splitter is None or schedule is None or config.enable_rampup_batch_size:
            raise
        problems.append(error)
    if splitter is not None:
        if schedule is not None and not (
            ramp and all(map(splitter.allows, ramp.sizes_to_come))
        ):
            # A schedule in the wrong order still has sizes to check. No step reaches a
            # size that is jumped over; once the other sizes are fixed, a step may.
            state = ", jumped over" if ramp else ""
            sizes += [
                (size, f"from sample {at:,}{state}")
                for at, size in _unused_entries(config, {size for size, _ in sizes})
            ]
        problems += _size_errors(splitter, sizes, is_schedule=schedule is not None)
    raise_together(problems)
    assert ramp is not None
    return ramp


def _unused_entries(config: Config, used: set[int]) -> list[tuple[int, int]]:
    """Return the entries of a schedule, threshold and size, with other sizes than
    these; none if it cannot be parsed.
    """
    assert config.batch_size_schedule is not None
    length = (
        config.max_target_length
        if config.batch_size_schedule_unit == "tokens"
        else None
    )
    with contextlib.suppress(RampDefinitionError):
        entries = parse_schedule(
            config.batch_size_schedule,
            sequence_length=length,
            budget=build.budget_samples(config),
        )
        return [(at, size) for at, size in entries if size > 0 and size not in used]
    return []


def _size_errors(
    splitter: BatchSplitter, sizes: Sequence[tuple[int, str]], *, is_schedule: bool
) -> list[RampupError]:
    """Return the errors about global batches that a splitter refuses, each with its
    place, or that about a given microbatch.
    """
    refused = [(size, where) for size, where in sizes if not splitter.allows(size)]
    fixed = splitter.microbatch_size
    unfixed = replace(splitter, microbatch_size=AUTO)
    numbers = [size for size, _ in sizes]
    key = "batch_size_schedule" if is_schedule else None
    smaller: list[int] = []
    if refused and fixed != AUTO and is_schedule:
        # A smaller microbatch changes the batches least.
        near = [
            min((abs(legal - size), legal) for legal in nearest_batches(unfixed, size))[
                1
            ]
            for size in numbers
        ]
        if not all(map(splitter.allows, near)):
            smaller = [n for n in unfixed.legal_microbatches(near) if n < fixed][-1:]
    fix = "".join(f"; or microbatch_size={size}" for size in smaller)
    problems = [
        batch_error(splitter, size, where, key=key, fix=fix) for size, where in refused
    ]
    if smaller:
        for problem in problems:
            problem.alternatives = {"microbatch_size": tuple(smaller)}
    if (
        problems
        and fixed != AUTO
        and not is_schedule
        and all(map(unfixed.allows, numbers))
    ):
        legal = unfixed.legal_microbatches(numbers)
        nearest = nearest_in(fixed, legal)
        rule = (
            f"microbatch_size={fixed} must divide global_batch_size /"
            " data_parallel_size in every phase"
        )
        text = f"{rule}; nearest: {', '.join(map(str, nearest))} ({problems[0]})"
        return [
            BatchDivisibilityError(
                text,
                value=fixed,
                divisor=max(legal),
                key="microbatch_size",
                nearest=nearest,
            )
        ]
    return list(problems)


def _devices_of_schedule(config: Config, num_devices: int) -> str:
    """Return on which other numbers of devices the batches of a schedule run, as text;
    the other ramps follow the devices.
    """
    if (
        config.batch_size_schedule in (None, AUTO_SCHEDULE)
        or config.seesaw_factor is not None
    ):
        return ""
    with contextlib.suppress(RampupError):
        ramp = ramp_from_config(
            config, num_devices, budget=build.budget_samples(config)
        )
        numbers = numbers_that_can(config, num_devices, {"ramp": ramp})
        return (
            f"numbers of devices that can run these batches: {list_devices(numbers)}"
            if numbers
            else ""
        )
    return ""
