"""What is wrong with a configuration that has no plan: every broken rule, each with its
place and the nearest legal values.

`build_plan` calls `all_problems` after a rule was broken. It runs each of
`rampup.config.draft.FINDERS` again, also those after a broken one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rampup.config.draft import (
    FINDERS,
    Draft,
    budget_samples,
    find_eval_size,
    find_ramp,
    plan_of,
    ramp_of_keys,
    set_ramp,
)
from rampup.config.schema import KEYS, Config
from rampup.errors import (
    BatchDivisibilityError,
    RampDefinitionError,
    RampupError,
    combine,
    raise_together,
)
from rampup.plan.nearest import batch_error
from rampup.plan.numbers import AUTO, nearest_in
from rampup.plan.ramp import BatchRamp, parse_schedule
from rampup.plan.split import ANY_BATCH, BatchSplitter


def all_problems(draft: Draft, first: RampupError) -> RampupError:
    """Return one error with every rule that a configuration breaks.

    Args:
        draft: the configuration, the devices, and what a resumed run has; changed.
        first: the error about the first of them, if no other look finds more.
    """
    config = draft.config
    problems: list[RampupError] = []
    eval_problems: list[RampupError] = []
    # The mesh, the pipeline and the ramp break different rules, so each is checked even
    # if another one is refused. A mesh that is refused has no known number of row
    # shards: the ramp is then checked without its splitter, and evaluation not at all.
    for find in FINDERS:
        if find is find_eval_size:
            if (
                draft.axes
                and draft.splitter
                and (config.eval_per_device_batch_size > 0 or not problems)
            ):
                with _collected(eval_problems, config):
                    find(draft)
            continue
        with _collected(problems, config):
            (check_ramp if find is find_ramp else find)(draft)
    if problems:
        closing = "the batch sizes are checked again once the mesh is legal"
        return combine([*problems, *eval_problems], "" if draft.axes else closing)
    assert draft.splitter is not None
    if eval_problems:
        # A legal one: only the other rules are left to check.
        draft.eval_size = draft.splitter.for_eval().smallest
    with _collected(eval_problems, config):
        plan_of(draft)
    return combine(eval_problems or [first])


def check_ramp(draft: Draft) -> None:
    """Find the ramp, or raise the errors about its order and all its sizes, also those
    that no step reaches.
    """
    if draft.ramp is None and not (draft.follows and draft.reserved_sizes is None):
        known = draft.splitter if draft.axes else None
        set_ramp(draft, _checked_ramp(draft, known or ANY_BATCH))


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


def _checked_ramp(draft: Draft, splitter: BatchSplitter) -> BatchRamp:
    config = draft.config
    schedule = None if draft.follows else config.batch_size_schedule
    ramp: BatchRamp | None = None
    problems: list[RampupError] = []
    # Sizes to check, each with where the run has it.
    sizes: list[tuple[int, str]] = []
    try:
        ramp = ramp_of_keys(draft, splitter)
        sizes = [
            (phase.global_batch_size, str(phase))
            for phase in ramp.phases
            if not ramp.is_over(phase)
        ]
        if draft.follows:
            reserved = draft.reserved_sizes or ()
            sizes = [(size, "batch_size_schedule: auto") for size in reserved]
    except RampDefinitionError as error:
        if schedule is None or config.enable_rampup_batch_size:
            raise
        problems.append(error)
    if schedule is not None and not (
        ramp and all(map(splitter.allows, ramp.sizes_to_come))
    ):
        # A schedule in the wrong order still has sizes to check. No step reaches a size
        # that is jumped over; once the other sizes are fixed, a step may.
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
            budget=budget_samples(config),
        )
        return [(at, size) for at, size in entries if size > 0 and size not in used]
    return []


def _size_errors(
    splitter: BatchSplitter, sizes: Sequence[tuple[int, str]], *, is_schedule: bool
) -> list[RampupError]:
    """Return the errors about global batches that a splitter refuses, each with its
    place; or, if a smaller microbatch alone makes them legal, that about the given one.
    """
    fixed = splitter.microbatch_size
    unfixed = replace(splitter, microbatch_size=AUTO)
    key = "batch_size_schedule" if is_schedule else None
    refused = [(size, where) for size, where in sizes if not unfixed.allows(size)]
    if refused:
        return [batch_error(unfixed, size, where, key=key) for size, where in refused]
    numbers = [size for size, _ in sizes]
    wrong = [(size, where) for size, where in sizes if not splitter.allows(size)]
    if not wrong:
        return []
    legal = unfixed.legal_microbatches(numbers)
    nearest = nearest_in(fixed, legal)
    return [
        BatchDivisibilityError(
            f"microbatch_size={fixed} must divide global_batch_size /"
            " data_parallel_size in every phase",
            fix=(
                f"nearest: {', '.join(map(str, nearest))}"
                f" ({batch_error(splitter, *wrong[0], key=key)})"
            ),
            value=fixed,
            divisor=max(legal),
            key="microbatch_size",
            nearest=nearest,
        )
    ]
