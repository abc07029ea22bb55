"""A plan in words: its summary, its table of phases, advice, and what a token budget
means for its ramp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rampup.errors import RampDefinitionError
from rampup.plan.numbers import MAX_COUNT, plain_number
from rampup.plan.ramp import BatchRamp

if TYPE_CHECKING:
    from rampup.plan.plan import RampPlan
    from rampup.plan.split import BatchSplit

SECONDS_PER_HOUR = 3600
# `str(plan)` leaves out the middle of longer tables.
MAX_PRINTED_PHASES = 40
# The factor on a tuned learning rate above which the plan warns.
MOST_RATE_SCALE = 2.0
# Column titles of the printed table, by the keys of `RampPlan.phase_rows`.
PHASE_TITLES = {
    "phase": "phase",
    "start_step": "from step",
    "start_sample": "from sample",
    "num_steps": "steps",
    "global_batch_size": "global batch",
    "per_device_batch_size": "per device",
    "accumulation_steps": "passes",
    "num_pipeline_microbatches": "pipeline microbatches",
    "microbatch_size": "microbatch",
    "bubble_fraction": "bubble",
    "learning_rate_scale": "rate scale",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A plan as it is shown: text, a terminal, a notebook and a report have the same
    sentences, rows and remarks.

    Attributes:
        summary: the run, and its ramp.
        titles: the columns that say something about this plan: the name in a row -> its
            title.
        rows: one for each phase: `RampPlan.phase_rows` with the number of the phase.
        unreached: the phases that the run does not reach.
        remarks: what belongs to the whole plan: evaluation, loading.
        notes: what is legal, but costs something.
    """

    summary: tuple[str, str]
    titles: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    unreached: Collection[int]
    remarks: Sequence[str]
    notes: Sequence[str]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows by the titles of their columns."""
        return [
            {title: row[name] for name, title in self.titles.items()}
            for row in self.rows
        ]


def describe(plan: RampPlan) -> Description:
    """Return what is shown of a plan."""
    left_out = set()
    if plan.splitter.num_stages == 1:
        left_out |= {"num_pipeline_microbatches", "bubble_fraction"}
    if not plan.scales_learning_rate:
        left_out.add("learning_rate_scale")
    rows: list[dict[str, Any]] = [
        {"phase": number, **row} for number, row in enumerate(plan.phase_rows())
    ]
    rows[-1]["num_steps"] = last_steps(plan)
    remarks = []
    if (split := plan.eval_split) is not None:
        size = f"{split.global_batch_size:,} samples per batch"
        remarks.append(f"evaluation: {size} = {describe_split(split)}")
    if (rows_to_load := loading(plan)) is not None:
        remarks.append(f"loading: {rows_to_load}")
    return Description(
        summary=summary(plan),
        titles={
            name: title for name, title in PHASE_TITLES.items() if name not in left_out
        },
        rows=rows,
        unreached={
            phase.index
            for phase in plan.ramp.phases
            if phase.start_step >= plan.total_steps
        },
        remarks=remarks,
        notes=advice(plan),
    )


def describe_plan(plan: RampPlan) -> str:
    """Return the summary, the table of phases and the remarks as lines, with the middle
    of a long table left out.
    """

    def cell(value: object) -> str:
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:,.4g}" if isinstance(value, float) else str(value)

    shown = describe(plan)
    half = MAX_PRINTED_PHASES // 2
    cells = [list(shown.titles.values())]
    cells += [[cell(row[name]) for name in shown.titles] for row in shown.rows]
    if len(shown.rows) > 2 * half:
        cells[half + 1 : -half] = [["..."] * len(cells[0])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    notes = [f"note: {note}" for note in shown.notes]
    return "\n".join([*shown.summary, *table, *shown.remarks, *notes])


def format_count(number: int, noun: str) -> str:
    """Format a number of things; the noun is in the singular.

    >>> (
    ...     format_count(1, "step"),
    ...     format_count(2000, "step"),
    ...     format_count(2, "batch"),
    ... )
    ('1 step', '2,000 steps', '2 batches')
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def describe_split(split: BatchSplit) -> str:
    """Return how a batch is split, in words, such as '4 replicas * 6 microbatches * 2
    samples'.
    """
    counts = {
        "replica": split.data_parallel_size,
        "microbatch": split.num_microbatches,
        "sample": split.microbatch_size,
    }
    return " * ".join(format_count(number, noun) for noun, number in counts.items())


def summary(plan: RampPlan) -> tuple[str, str]:
    """Return two lines: the run, and its ramp."""
    replicas = plan.splitter.data_parallel_size
    devices = format_count(plan.num_devices, "device")
    length = (
        f"{plan.total_steps:,} steps"
        if plan.budget_samples is None
        else f"{plan.budget_samples:,} samples"
    )
    run = f"{devices}, data parallel {replicas:,}, {length}"
    if not plan.follows:
        run += f", {plan.consumed_samples:,} samples"
    shapes = format_count(plan.num_compiled_shapes, "compiled shape")
    return run, f"{_ramp_summary(plan)}; {shapes}"


def _ramp_summary(plan: RampPlan) -> str:
    sizes = plan.ramp.sizes
    constant = f"the batch stays at {sizes[-1]:,} samples"
    if (auto := plan.auto) is not None:
        possible = [f"{size:,}" for size in auto["sizes"]]
        listed = " or ".join(filter(None, [", ".join(possible[:-1]), possible[-1]]))
        steps, samples = (
            f"{least:,}" if least == most else f"{least:,} to {most:,}"
            for least, most in (
                (auto["min_steps"], auto["max_steps"]),
                (auto["min_samples"], auto["max_samples"]),
            )
        )
        return (
            f"auto: {listed} samples, by the measured noise scale; {steps} steps and"
            f" {samples} samples"
        )
    if len(sizes) == 1:
        return constant
    peak = f" (at most {max(sizes):,})" if max(sizes) > max(sizes[0], sizes[-1]) else ""
    last = (
        f"the last from step {plan.ramp.ramp_steps:,}, sample"
        f" {plan.ramp.ramp_samples:,}"
    )
    return (
        f"the batch goes from {sizes[0]:,} to {sizes[-1]:,} samples{peak} in"
        f" {len(sizes)} phases, {last}"
    )


def last_steps(plan: RampPlan) -> str:
    """Return the last phase's cell in the column of steps: "auto" if the measured noise
    scale may end it, else "rest".
    """
    can_grow = any(size > plan.ramp.sizes[-1] for size in plan.reserved_sizes)
    return "auto" if plan.follows and can_grow else "rest"


def loading(plan: RampPlan) -> str | None:
    """Return in words which hosts load data by `expansion_factor_real_data`; None if
    every host loads its own.
    """
    factor = plan.expansion_factor_real_data
    if factor <= 0:
        return None
    shown = plain_number(factor)
    product = (
        f"global_batch_size * expansion_factor_real_data = {plan.ramp.sizes[-1]:,} *"
        f" {shown}"
    )
    rows = (
        f"global_batch_to_load = {product} = {plan.global_batch_to_load:,} rows per"
        " step"
    )
    if factor < 1:
        hosts = plain_number(1 / factor)
        turns = f"MaxText's loaders of {hosts} times as many hosts take turns"
        return f"{rows}: {turns}; rampup trains only with -1 or from 1 on"
    return (
        f"{rows}, if all hosts loaded; 1 of {shown} does, for itself and the others"
        if factor > 1
        else rows
    )


def advice(plan: RampPlan) -> tuple[str, ...]:
    """Return sentences about legal settings that cost time or loss, and about phases
    that the run does not reach.
    """
    notes = []
    most = max(plan.of_all_sizes.clock, key=lambda segment: segment.scale)
    if most.scale > MOST_RATE_SCALE and plan.seesaw is None:
        rate = (
            f"a batch of {most.global_batch_size:,} has {most.scale:.3g} times the"
            " learning rate that was tuned"
        )
        notes.append(
            f"{rate}; beyond {MOST_RATE_SCALE:g} times, runs that follow such a rule"
            " became unstable (marin issue 6044)"
        )
    if plan.follows and not plan.scales_learning_rate:
        kept = (
            "learning_rate_batch_scaling=none keeps the learning rate as it is while"
            " the batch grows"
        )
        notes.append(
            f"{kept}, which can take more steps than a batch that does not grow"
        )
    final = plan.splits[-1]
    size = plan.ramp.sizes[-1]
    largest = plan.splitter.largest_microbatch(size)
    if (
        plan.splitter.rampup_microbatch == "fixed"
        and largest >= 8 * final.microbatch_size
    ):
        passes = size // (final.data_parallel_size * largest)
        fixed = (
            f"with a fixed microbatch size of {final.microbatch_size}, every step after"
            " the ramp runs"
        )
        other = (
            f"rampup_microbatch=auto would run {passes} of {largest} there, at the cost"
            " of a second compilation"
        )
        notes.append(f"{fixed} {final.num_microbatches} microbatches; {other}")
    candidates = plan.pipeline_candidates
    used = next(
        (
            candidate
            for candidate in candidates
            if candidate.microbatch_size == final.microbatch_size
        ),
        None,
    )
    if (
        used is not None
        and (best := candidates[0]).predicted_time
        <= Fraction(19, 20) * used.predicted_time
    ):
        gain = float(1 - best.predicted_time / used.predicted_time)
        faster = (
            f"microbatch_size={best.microbatch_size} is predicted to be {gain:.0%}"
            " faster in the last phase"
        )
        cost = (
            "if a pipeline tick has a fixed cost of"
            f" {float(plan.assumed_tick_overhead):g} samples"
        )
        notes.append(f"{faster}, {cost}; set pipeline_tick_overhead to choose it")
    if (
        final.num_microbatches > 1
        and plan.splitter.data_parallel_size == plan.splitter.num_stages == 1
    ):
        fewer = (
            "a smaller batch with its own adam_b2 learns more per sample (Marek et al."
            " 2025, arXiv 2507.07101)"
        )
        notes.append(
            f"one replica accumulates {final.num_microbatches} microbatches, which"
            f" saves no communication; {fewer}"
        )
    if plan.splitter.whole_batch:
        sizes = {split.microbatch_size for split in plan.splits}
        programs = (
            f"{len(sizes)} batch size{'s' * (len(sizes) > 1)} compile as many programs,"
            " and the run waits for each"
        )
        memory = (
            f"a replica holds the activations of up to {max(sizes):,} samples, as"
            " nothing is accumulated"
        )
        notes.append(f"with rampup_microbatch=whole, {programs}; {memory}")
    past = [
        str(phase.index)
        for phase in plan.ramp.phases
        if not plan.splitter.allows(phase.global_batch_size)
    ]
    if past:
        notes.append(
            f"phase {', '.join(past)} is over: these devices cannot split its batch,"
            " and need not"
        )
    unreached = [
        phase.index
        for phase in plan.ramp.phases
        if phase.start_step >= plan.total_steps
    ]
    if unreached:
        last = max(plan.total_steps - 1, plan.ramp.first_step)
        notes.append(
            f"steps={plan.total_steps:,} ends before phase {unreached[0]} and those"
            " after it: the run ends with batches of"
            f" {plan.ramp.global_batch_size_at(last):,} samples, and"
            f" {plan.ramp.sizes[-1]:,} are never reached"
        )
    after = plan.total_steps - plan.schedule_steps
    if after > 0:
        ends = f"the learning rate's schedule ends after {plan.schedule_steps:,} steps"
        notes.append(
            f"{ends}: the other {after:,} have the rate of its end, which is 0 after a"
            " whole decay"
        )
    return tuple(notes)


def token_budget(
    ramp: BatchRamp,
    *,
    tokens: int,
    tokens_per_sample: int,
    tokens_per_second: Mapping[int, Fraction] | None = None,
) -> dict[str, Any]:
    """Return what a number of tokens means for a ramp, as `rampup plan --budget --json`
    prints it.

    `fewer_steps_than_first` are saved compared with the first batch size,
    `more_steps_than_final` added compared with the last. A size without throughput uses
    the nearest one, by ratio.
    """
    for key, value in (("budget", tokens), ("max_target_length", tokens_per_sample)):
        if not 1 <= value <= MAX_COUNT:
            raise RampDefinitionError(
                f"{key}={value} must be between 1 and 10**18 tokens",
                key=key,
                nearest=(1 if value < 1 else MAX_COUNT,),
            )
    first = ramp.sizes[0]
    final = ramp.sizes[-1]
    samples = -(-tokens // tokens_per_sample)
    steps = ramp.step_of_sample(samples - 1) + 1
    at_first = -(-samples // first)
    at_final = -(-samples // final)
    by_size: dict[int, int] = {}
    for phase in ramp.phases:
        end = (
            steps
            if phase.num_steps is None
            else min(phase.start_step + phase.num_steps, steps)
        )
        if end > phase.start_step:
            by_size[phase.global_batch_size] = (
                by_size.get(phase.global_batch_size, 0) + end - phase.start_step
            )
    facts: dict[str, Any] = {
        "tokens": tokens,
        "tokens_per_sample": tokens_per_sample,
        "num_samples": samples,
        "steps": steps,
        "consumed_tokens": (
            ramp.samples_before(steps) * tokens_per_sample
        ),  # with the excess of the last batch
        "first_global_batch_size": first,
        "steps_at_first": at_first,
        "fewer_steps_than_first": at_first - steps,
        "final_global_batch_size": final,
        "steps_at_final": at_final,
        "more_steps_than_final": steps - at_final,
        "steps_by_global_batch_size": {
            str(size): number for size, number in by_size.items()
        },
    }
    if tokens_per_second:
        seconds = Fraction(0)
        for size, number in by_size.items():
            nearest = min(
                tokens_per_second,
                key=lambda known: Fraction(max(known, size), min(known, size)),
            )
            seconds += (
                Fraction(number * size * tokens_per_sample) / tokens_per_second[nearest]
            )
        facts["hours"] = float(seconds / SECONDS_PER_HOUR)
        facts["tokens_per_second"] = float(facts["consumed_tokens"] / seconds)
    return facts
