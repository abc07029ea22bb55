"""What every output says of a plan, as text: its summary, its table of phases, remarks
and advice. It is here and not in `show`, because `str(plan)` prints it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rampup.plan.plan import RampPlan
    from rampup.plan.split import BatchSplit

SECONDS_PER_HOUR = 3600
MAX_PHASES = 20  # of more phases, only the first and the last are printed
# The factor on a tuned learning rate above which the plan warns.
MOST_RATE_SCALE = 2.0
# Column titles of the printed table, by the keys of `RampPlan.phase_rows`.
PHASE_TITLES = {
    "phase": "phase",
    "start_step": "from\nstep",
    "start_sample": "from\nsample",
    "num_steps": "steps",
    "global_batch_size": "global\nbatch",
    "per_device_batch_size": "per\ndevice",
    "accumulation_steps": "passes",
    "num_pipeline_microbatches": "pipeline\nmicro",
    "microbatch_size": "micro-\nbatch",
    "bubble_fraction": "bubble",
    "learning_rate_scale": "rate\nscale",
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
        remarks: what belongs to the whole plan: its evaluation batch.
        notes: what is legal, but costs something, and what else the configuration asks
            for.
    """

    summary: tuple[str, str]
    titles: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    unreached: Collection[int]
    remarks: Sequence[str]
    notes: Sequence[str]

    def table(self) -> list[dict[str, Any]]:
        """Return the rows by the titles of their columns, each in one line."""
        titles = {
            name: title.replace("-\n", "").replace("\n", " ")
            for name, title in self.titles.items()
        }
        return [
            {title: row[name] for name, title in titles.items()} for row in self.rows
        ]


def describe(plan: RampPlan, notes: Sequence[str] | None = None) -> Description:
    """Return what is shown of a plan; with notes that come from its configuration, or
    those that follow from the plan alone.
    """
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
        remarks.append(
            f"evaluation: {format_count(split.global_batch_size, 'sample')} per batch ="
            f" {describe_split(split)}"
        )
    return Description(
        summary=summary(plan),
        titles={
            name: title for name, title in PHASE_TITLES.items() if name not in left_out
        },
        rows=rows,
        unreached=_unreached(plan),
        remarks=remarks,
        notes=advice(plan) if notes is None else notes,
    )


def describe_plan(
    plan: RampPlan,
    notes: Sequence[str] | None = None,
    *,
    max_phases: int | None = MAX_PHASES,
    width: int | None = None,
) -> str:
    """Return the summary, the table of phases, the remarks and the notes as lines.

    Of more phases than `max_phases`, the middle is left out; a phase that the run does
    not reach is in brackets. For `width` see `text_table`.
    """
    shown = describe(plan, notes)
    rows = [[format_value(row[name]) for name in shown.titles] for row in shown.rows]
    for index in shown.unreached:
        rows[index][0] = f"({index})"
    table = phase_table([*shown.titles.values()], rows, max_phases, width)
    lines = [f"note: {note}" for note in shown.notes]
    return "\n".join([*shown.summary, *table, *shown.remarks, *lines])


def phase_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    max_phases: int | None = MAX_PHASES,
    width: int | None = None,
) -> list[str]:
    """Return the lines of a table with a row for each phase; of more than `max_phases`,
    the middle ones are counted.
    """
    if max_phases is None or len(rows) <= max_phases:
        return text_table(titles, rows, width)
    half = max_phases // 2
    kept = [*rows[:half], ["..."] * len(titles), *rows[-half:]]
    left_out = format_count(len(rows) - 2 * half, "phase")
    return [
        *text_table(titles, kept, width),
        f"{left_out} left out; the command's --all shows them",
    ]


def text_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Return the lines of a table, aligned right. One that is wider than `width` becomes
    several, each with the first column.

    >>> text_table(["phase", "batch"], [["0", "8"], ["1", "1,024"]])
    ['phase  batch', '    0      8', '    1  1,024']
    """
    heads = [title.split("\n") for title in titles]
    height = max(map(len, heads))
    columns = [
        [*[""] * (height - len(head)), *head, *(row[number] for row in rows)]
        for number, head in enumerate(heads)
    ]
    widths = [max(map(len, column)) for column in columns]
    tables = [[0]]
    for number in range(1, len(columns)):
        needed = sum(widths[other] + 2 for other in tables[-1]) + widths[number]
        if width is not None and needed > width and len(tables[-1]) > 1:
            tables.append([0])
        tables[-1].append(number)
    return [
        "  ".join(columns[number][line].rjust(widths[number]) for number in table)
        for table in tables
        for line in range(height + len(rows))
    ]


def format_value(value: object) -> str:
    """Format a value: thousands separators for integers, four significant digits for
    other numbers.

    >>> [format_value(value) for value in (1234567, 0.123456, 11060.4, True, "x")]
    ['1,234,567', '0.1235', '11,060', 'True', 'x']
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if is_number else str(value)


def format_count(number: int, noun: str) -> str:
    """Format a number of things; the noun is in the singular.

    >>> (
    ...     format_count(1, "step"),
    ...     format_count(2000, "step"),
    ...     format_count(2, "batch"),
    ...     format_count(0, "pass"),
    ... )
    ('1 step', '2,000 steps', '2 batches', '0 passes')
    """
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun}{ending}"


def describe_change(
    one: Any, other: Any, places: tuple[str, str], *, most: int
) -> list[str]:
    """Return how two values of a fact about a run differ; of the fingerprints of its
    data, the first files that do.
    """
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return [f"{one!r} {places[0]}, {other!r} {places[1]}"]
    found = []
    for name in dict.fromkeys([*one, *other]):
        before, now = (files.get(name, "no such file") for files in (one, other))
        if before != now:
            found.append(f"{name}: {before} {places[0]}, {now} {places[1]}")
    more = len(found) - most
    rest = [f"and {format_count(more, 'more file')}"] if more > 0 else []
    return found[:most] + rest


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
    shards = plan.splitter.data_parallel_size
    devices = format_count(plan.num_devices, "device")
    length = (
        format_count(plan.total_steps, "step")
        if plan.budget_samples is None
        else format_count(plan.budget_samples, "sample")
    )
    run = f"{devices}, data parallel {shards:,}, {length}"
    if not plan.follows:
        run += f", {format_count(plan.consumed_samples, 'sample')}"
    shapes = format_count(plan.num_compiled_shapes, "compiled shape")
    return run, f"{_ramp_summary(plan)}; {shapes}"


def _ramp_summary(plan: RampPlan) -> str:
    sizes = plan.ramp.sizes
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
        return f"the batch stays at {format_count(sizes[-1], 'sample')}"
    peak = f" (at most {max(sizes):,})" if max(sizes) > max(sizes[0], sizes[-1]) else ""
    return (
        f"the batch goes from {sizes[0]:,} to {format_count(sizes[-1], 'sample')}{peak}"
        f" in {len(sizes)} phases, the last from step {plan.ramp.ramp_steps:,}, sample"
        f" {plan.ramp.ramp_samples:,}"
    )


def last_steps(plan: RampPlan) -> str:
    """Return the last phase's cell in the column of steps: "auto" if the measured noise
    scale may end it, else "rest".
    """
    can_grow = any(size > plan.ramp.sizes[-1] for size in plan.reserved_sizes)
    return "auto" if can_grow else "rest"


def _unreached(plan: RampPlan) -> list[int]:
    """Return the phases that the run does not reach."""
    return [
        phase.index
        for phase in plan.ramp.phases
        if phase.start_step >= max(plan.total_steps, plan.ramp.first_step)
    ]


def advice(plan: RampPlan) -> tuple[str, ...]:
    """Return sentences about legal settings that cost time or loss, and about phases
    that the run does not reach.
    """
    notes = []
    most = max(plan.of_all_sizes.clock, key=lambda segment: segment.scale)
    if most.scale > MOST_RATE_SCALE and plan.seesaw is None:
        notes.append(
            f"a batch of {most.global_batch_size:,} has {most.scale:.3g} times the"
            f" learning rate that was tuned; beyond {MOST_RATE_SCALE:g} times, runs"
            " that follow such a rule became unstable (marin issue 6044)"
        )
    if plan.follows and not plan.scales_learning_rate:
        notes.append(
            "learning_rate_batch_scaling=none keeps the learning rate as it is while"
            " the batch grows, which can take more steps than a batch that does not"
            " grow"
        )
    final = plan.splits[-1]
    size = plan.ramp.sizes[-1]
    largest = plan.splitter.largest_microbatch(size)
    if (
        plan.splitter.rampup_microbatch == "fixed"
        and largest >= 8 * final.microbatch_size
    ):
        passes = size // (final.data_parallel_size * largest)
        notes.append(
            f"with a fixed microbatch size of {final.microbatch_size}, every step after"
            f" the ramp runs {final.num_microbatches} microbatches;"
            f" rampup_microbatch=auto would run {passes} of {largest} there, at the"
            " cost of a second compilation"
        )
    if (
        final.num_microbatches > 1
        and plan.splitter.data_parallel_size == plan.splitter.num_stages == 1
    ):
        notes.append(
            f"one replica accumulates {final.num_microbatches} microbatches, which"
            " saves no communication; a smaller batch with its own adam_b2 learns more"
            " per sample (Marek et al. 2025, arXiv 2507.07101)"
        )
    if plan.splitter.whole_batch:
        sizes = {split.microbatch_size for split in plan.splits}
        notes.append(
            "with rampup_microbatch=whole, each batch size compiles its own program,"
            f" {len(sizes)} in all, and the run waits for each; a replica holds the"
            f" activations of up to {format_count(max(sizes), 'sample')}, as nothing is"
            " accumulated"
        )
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
    if unreached := _unreached(plan):
        last = max(plan.total_steps - 1, plan.ramp.first_step)
        notes.append(
            f"steps={plan.total_steps:,} ends before phase {unreached[0]} and those"
            " after it: the run ends with batches of"
            f" {format_count(plan.ramp.global_batch_size_at(last), 'sample')}, and"
            f" {plan.ramp.sizes[-1]:,} are never reached"
        )
    if plan.total_steps > plan.schedule_steps:
        notes.append(
            "the learning rate's schedule ends after"
            f" {format_count(plan.schedule_steps, 'step')} of {plan.total_steps:,}: the"
            " rest has the rate of its end, which is 0 after a whole decay"
        )
    return tuple(notes)
