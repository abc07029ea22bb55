"""Plans, comparisons, budgets, timetables, rollouts and configuration keys as text for a terminal; plain if it is piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rampup.plan.numbers import GIB
from rampup.show.format import describe_split, format_bytes, format_count, format_si, format_value

if TYPE_CHECKING:
    from rampup.config.files import Explanation
    from rampup.config.fix import Fix
    from rampup.plan.budget import TokenBudget
    from rampup.plan.plan import RampPlan
    from rampup.plan.scaling_laws import BatchRange
    from rampup.plan.timetable import Operation, Timetable
    from rampup.rl.plan import RolloutPlan
    from rampup.rl.schedule import RolloutSchedule
    from rampup.rl.starting_sizes import Suggestion
    from rampup.rl.updates import Updates


# Of more phases, only the first and the last are printed.
MAX_PHASES = 20
MAX_CHOICES = 6
MAX_TICKS = 2_000
BAR_WIDTH = 12
MARK = "*"
ELLIPSIS = "..."

# Columns of phase tables: title -> name in `RampPlan.phase_rows`.
WHEN = {"from\nstep": "start_step", "from\nsample": "start_sample", "steps": "num_steps"}
_BATCH = {"batch": "global_batch_size"}
SPLIT = {"passes": "accumulation_steps", "pipeline\nmicro": "num_pipeline_microbatches", "micro-\nbatch": "microbatch_size"}
_HYPERPARAMETERS = {
    "learning_rate_scale": "rate\nscale",
    "learning_rate": "learning\nrate",
    "peak_learning_rate": "peak\nrate",
    "adam_b1": "b1",
    "adam_b2": "b2",
    "adam_b2_half_life_tokens": "half life\ntokens",
    "adam_eps": "eps",
    "adam_weight_decay": "weight\ndecay",
}
_COMPARED = ("num_devices", "total_steps", "ramp_steps", "ramp_samples", "num_compiled_shapes", "global_batch_to_load")
_KIND_STYLES = {"F": "black on green", "B": "white on blue", "I": "white on blue", "W": "black on cyan"}


def make_table(console: Console, titles: Iterable[str], rows: Iterable[Iterable[str]] = (), *, left: int = 0) -> Table:
    """Return a table. In a terminal it has a line below the titles.

    The first `left` columns are text, aligned left and folded if need be. The others are numbers.
    """
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < left else "right", overflow="fold", no_wrap=number >= left)
    for row in rows:
        table.add_row(*row)
    return table


def print_facts(facts: Mapping[str, Any], console: Console) -> None:
    """Print names and values, one per line."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(format_value(value)))
    console.print(table)


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print notes, each as a paragraph."""
    for note in notes:
        console.print(f"note: {note}", style="yellow")


def print_plan(plan: RampPlan, console: Console, *, max_phases: int | None = MAX_PHASES) -> None:
    """Print a plan: a summary, its phases, evaluation and notes.

    If there are more phases than `max_phases`, the middle ones are left out and counted. None prints all.
    """
    for sentence in plan.summary:
        console.print(sentence)
    pipeline, scaled = plan.splitter.num_stages > 1, plan.scales_learning_rate
    sizes = {"global\nbatch": "global_batch_size", "per\ndevice": "per_device_batch_size"} | _split_columns(pipeline)
    sizes |= {"bubble": "bubble_fraction"} if pipeline else {}
    sizes |= {"rate\nscale": "learning_rate_scale"} if scaled else {}
    layouts: list[tuple[list[Mapping[str, str]], bool]] = [([WHEN | sizes], True), ([WHEN | sizes], False)]
    layouts.append(([WHEN, sizes], False))
    # The first layout that fits; the last one is printed whether it does or not.
    for columns, bars in layouts:
        tables = [_phase_table(plan, chosen, console, max_phases=max_phases, bars=bars) for chosen in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)
    if plan.eval_split:
        split = plan.eval_split
        console.print(f"evaluation: {split.global_batch_size:,} samples per batch = {describe_split(split)}")
    if plan.loading is not None:
        console.print(f"loading: {plan.loading}")
    if len(plan.pipeline_candidates) > 1:
        console.print("pipeline microbatches of the last phase, by predicted step time:")
        console.print(_choices_table(plan, console))
    print_notes(plan.advice, console)


def print_hyperparameters(
    plan: RampPlan, rows: Sequence[Mapping[str, float]], console: Console, *, max_phases: int | None = MAX_PHASES
) -> None:
    """Print the hyperparameters of every phase; `rows` has them by key. See `print_plan` for the other arguments."""
    names = [name for name in _HYPERPARAMETERS if name in rows[0]]
    tables = [_hyperparameter_table(plan, rows, names, console, max_phases=max_phases)]
    if _width(tables[0], console) > console.width:
        rates = [name for name in names if "rate" in name]
        parts = (rates, [name for name in names if name not in rates])
        tables = [_hyperparameter_table(plan, rows, part, console, max_phases=max_phases) for part in parts if part]
    console.print(*tables)
    console.print("learning rate: of the first step; peak rate: without warm-up and decay; half life: of b2, in tokens")


def print_comparison(
    plans: Sequence[RampPlan],
    names: Sequence[str],
    changed: Mapping[str, Mapping[str, object]],
    console: Console,
    *,
    max_phases: int | None = MAX_PHASES,
) -> None:
    """Print two plans side by side: the keys that differ, the totals, and the phases.

    Args:
        plans, names: the two plans and their names.
        changed: the keys that differ, each with its value in `a` and in `b`.
        console, max_phases: see `print_plan`.
    """
    console.print(f"a: {names[0]}\nb: {names[1]}\n{MARK} differs\n", highlight=False)
    settings = [(name, *(Text(_format_setting(values[which])) for which in "ab")) for name, values in changed.items()]
    console.print(make_table(console, ["key", "a", "b"], settings, left=1) if changed else "all keys are the same")
    facts = [{**plan.to_dict(), "consumed_samples": plan.consumed_samples} for plan in plans]
    pairs = {name: [fact[name] for fact in facts] for name in (*_COMPARED, "consumed_samples")}
    totals = [(name, *map(_format_setting, pair), MARK if pair[0] != pair[1] else "") for name, pair in pairs.items()]
    console.print("", make_table(console, ["plan", "a", "b", ""], totals, left=1), "")
    split = _split_columns(any(plan.splitter.num_stages > 1 for plan in plans))
    when, steps = WHEN | _BATCH, {title: name for title, name in WHEN.items() if name != "start_sample"}
    samples = {"from\nsample": "start_sample"} | _BATCH
    for columns in ([when | _BATCH | split], [when, _BATCH | split], [steps | _BATCH, samples, _BATCH | split]):
        tables = [_comparison_table(plans, chosen, console, max_phases=max_phases) for chosen in columns]
        if all(_width(table, console) <= console.width for table in tables):
            break
    console.print(*tables)


def print_budget(
    budget: TokenBudget, console: Console, *, configured_steps: int, throughput: Mapping[int, Fraction] | None = None
) -> None:
    """Print a token budget: steps of the ramp, steps of its first and last batch kept constant, and time.

    `configured_steps` are those of the configuration, and `throughput` has tokens per second by global batch size, if known.
    """
    first, final, by_size = budget.ramp.sizes[0], budget.ramp.sizes[-1], budget.steps_by_size
    beyond = budget.consumed_tokens - budget.tokens
    rows = {
        "budget": f"{budget.tokens:,} tokens = {budget.num_samples:,} samples of {budget.tokens_per_sample:,} tokens",
        "optimizer steps": f"{budget.steps:,}; the last batch goes {beyond:,} tokens beyond the budget",
    }
    if first == final == max(budget.ramp.sizes):
        rows["a ramp"] = "none: the batch is the same throughout"
    else:
        rows[f"at {first:,} throughout"] = _compare_steps(budget.steps_at_first, budget.steps, "the first batch kept constant")
        rows[f"at {final:,} throughout"] = _compare_steps(budget.steps_at_final, budget.steps, "the last batch kept constant")
    if throughput:
        seconds = budget.seconds(throughput)
        hours, rate = float(seconds) / 3600, float(budget.consumed_tokens / seconds)
        days = f" = {hours / 24:,.1f} days" if hours >= 48 else ""
        rows["time"] = f"{hours:,.2f} hours{days} at {format_value(rate)} tokens/s on average"
        unknown = [size for size in by_size if size not in throughput]
        if unknown and len(throughput) > 1:
            rows["not measured"] = (
                f"{len(unknown):,} of {len(by_size):,} batch sizes; each uses the throughput of the nearest one"
            )
    if configured_steps != budget.steps:
        tokens = budget.ramp.samples_before(configured_steps) * budget.tokens_per_sample
        rows["this configuration"] = (
            f"steps={configured_steps:,} consumes {tokens:,} tokens; for the budget set steps={budget.steps}"
        )
    print_facts(rows, console)


def print_batch_range(found: BatchRange, console: Console) -> None:
    """Print the batch that each scaling law gives, with its source, and the ranges."""
    from rampup.plan.scaling_laws import LAWS

    console.print(f"{found.tokens:,} tokens, {found.params:,} parameters: batch size in tokens")
    rows = [
        (law.kind, f"{law.name}: {law.formula} ({law.source})", format_si(found.batch_tokens(law)), f"{found.steps(law):,}")
        for law in LAWS
    ]
    console.print(make_table(console, ["", "law", "batch", "steps"], rows, left=2))
    ranges = (f"{kind} {' to '.join(map(format_si, found.range_of(kind)))}" for kind in ("optimal", "critical"))
    console.print("; ".join(ranges))
    for note in found.notes:
        console.print(f"- {note}")


def print_timetable(table: Timetable, console: Console) -> None:
    """Print a pipeline timetable: a row per stage, a column per tick, and the totals."""
    if table.num_ticks > MAX_TICKS:
        console.print(f"{table.num_ticks:,} ticks are too many to draw; the most is {MAX_TICKS:,}")
    else:
        _print_ticks(table, console)
    peaks = ", ".join(f"{float(peak):g}" for peak in table.peak_live_microbatches)
    facts = {
        "schedule": table.schedule,
        "makespan": float(table.makespan),
        "bubble": f"{float(table.bubble_fraction):.4f} = {table.bubble_fraction}",
        "live microbatches": f"{peaks}  (maximum of each stage)",
        "sends": f"{', '.join(map(str, table.sends_per_stage))}  (activations and gradients of each stage)",
    }
    print_facts(facts, console)


def print_explanation(explained: Explanation, console: Console) -> None:
    """Print the explanation of a key."""
    from rampup.config.files import yaml_value

    default = yaml_value(explained.default)
    if explained.value_in_file != explained.default:
        default += f"; {explained.file} sets {yaml_value(explained.value_in_file)}"
    maxtext = "has no such key" + (f"; it does {explained.maxtext_default}" if explained.maxtext_default else "")
    if explained.maxtext_name:
        maxtext = f"{explained.maxtext_name}, default {explained.maxtext_default}"
    facts = {
        explained.key: explained.meaning,
        "legal": explained.legal,
        "unit": explained.unit or "none",
        "default": default,
        "MaxText": maxtext,
        "file": f"{explained.file}, section {explained.section}",
    }
    if explained.default is None:  # a number that follows from the keys
        del facts["default"], facts["MaxText"]
    print_facts(facts | {"interacts with": ", ".join(explained.interacts) or "no other key"}, console)


def print_fix(fix: Fix, console: Console) -> None:
    """Print each change of a fix as a comment, then the patch of the file, ready for `patch -p0`."""
    if not fix.changes:
        console.print(f"{fix.file} is legal: nothing to fix")
        return
    for change in fix.changes:
        if change.renamed:
            text = f"{change.renamed} is spelled {change.key}"
        elif change.before is None:
            text = f"set {change.key}={change.after}"
        else:
            text = f"{change.key}: {change.before} -> {change.after}"
        console.print(f"# {text} ({change.where})")
    sys.stdout.write(fix.patch)


def _split_columns(pipeline: bool) -> dict[str, str]:
    return {title: name for title, name in SPLIT.items() if pipeline or name != "num_pipeline_microbatches"}


def _phase_table(plan: RampPlan, columns: Mapping[str, str], console: Console, *, max_phases: int | None, bars: bool) -> Table:
    table = make_table(console, ["phase", *columns, *([""] if bars else [])])
    if bars:
        table.columns[-1].justify = "left"
    mark, largest, rows = "\u2588" if console.is_terminal else "#", max(plan.ramp.sizes), plan.phase_rows()

    def add_phase(index: int) -> None:
        phase = plan.ramp.phases[index]
        reached = phase.start_step < plan.total_steps
        cells = [phase_cell(rows[index], name) for name in columns.values()]
        cells += [mark * max(round(BAR_WIDTH * phase.global_batch_size / largest), 1)] if bars else []
        table.add_row(str(index) if reached else f"({index})", *cells, style=None if reached else "dim")

    return _add_phases(table, len(rows), max_phases, add_phase)


def _hyperparameter_table(
    plan: RampPlan, rows: Sequence[Mapping[str, float]], names: Sequence[str], console: Console, *, max_phases: int | None
) -> Table:
    table = make_table(console, ["phase", "global\nbatch", *(_HYPERPARAMETERS[name] for name in names)])

    def add_phase(index: int) -> None:
        row, size = rows[index], plan.ramp.phases[index].global_batch_size
        digits = {name: 6 if name in ("adam_b1", "adam_b2") else 4 for name in names}
        cells = [f"{row[name]:,.0f}" if row[name] >= 1000 else f"{row[name]:.{digits[name]}g}" for name in names]
        table.add_row(str(index), f"{size:,}", *cells)

    return _add_phases(table, len(rows), max_phases, add_phase)


def _comparison_table(
    plans: Sequence[RampPlan], columns: Mapping[str, str], console: Console, *, max_phases: int | None
) -> Table:
    titles = [f"{title}\n{which}" if "\n" not in title else f"{title} {which}" for which in "ab" for title in columns]
    table = make_table(console, ["phase", *titles, ""])
    pairs = list(zip_longest(*(plan.phase_rows() for plan in plans)))

    def add_phase(index: int) -> None:
        cells = [phase_cell(row, name) for row in pairs[index] for name in columns.values()]
        table.add_row(str(index), *cells, MARK if pairs[index][0] != pairs[index][1] else "")

    return _add_phases(table, len(pairs), max_phases, add_phase)


def _add_phases(table: Table, number: int, most: int | None, add_phase: Callable[[int], None]) -> Table:
    """Add a row for each phase. If there are more than `most`, leave out the middle ones and count them below the table."""
    hidden = range(0) if most is None or number <= most else range(most // 2, number - most // 2)
    for index in range(number):
        if index not in hidden:
            add_phase(index)
        elif index == hidden.start:
            table.add_row(*[ELLIPSIS] * sum(column.header != "" for column in table.columns))
    if hidden:
        table.caption = f"{format_count(len(hidden), 'phase')} left out; rampup plan --all shows them"
        table.caption_justify = "left"
    return table


def phase_cell(row: Mapping[str, object] | None, name: str) -> str:
    """Return a size of a phase as text. `row` is None for a phase that a plan does not have."""
    if row is None:
        return "-"
    if row.get(name) is None:
        return "rest" if name == "num_steps" else ""
    return format_value(row[name])


def _choices_table(plan: RampPlan, console: Console) -> Table:
    choices, used = plan.pipeline_candidates, plan.splits[-1]
    rows = [
        (
            format_value(choice.num_microbatches),
            format_value(choice.microbatch_size),
            f"{float(choice.bubble):.3f}",
            f"{float(choice.predicted_time / choices[0].predicted_time):.2f}",
            "used" * (choice.microbatch_size == used.microbatch_size),
        )
        for choice in choices[:MAX_CHOICES]
    ]
    return make_table(console, ["micro-\nbatches", "micro-\nbatch", "bubble", "predicted\ntime", ""], rows)


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=1000), table).maximum


def _format_setting(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return '""' if value == "" else format_value(value)


def _compare_steps(constant: int, steps: int, what: str) -> str:
    difference = steps - constant
    compared = "the ramp takes as many"
    if difference:
        word = "fewer" if difference < 0 else "more"
        compared = f"the ramp takes {abs(difference):,} {word} ({abs(difference) / constant:.1%})"
    return f"{format_count(constant, 'step')}, {what}; {compared}"


def operation_label(operation: Operation, num_repeats: int) -> str:
    """Return an operation's label in a picture: kind, microbatch and, with repeats, a letter for the repeat."""
    letter = "abcdefghijklmnopqrstuvwxyz"[operation.repeat % 26] if num_repeats > 1 else ""
    return f"{operation.kind}{operation.microbatch}{letter}"


def _print_ticks(table: Timetable, console: Console) -> None:
    """Print the picture, in blocks that fit the width of the console."""
    rows: list[list[tuple[str, str]]] = []
    for stage in range(table.num_stages):
        cells = [("..", "dim")] * table.num_ticks
        for operation in table.of_stage(stage):
            start, stop = int(operation.start / table.tick), int(operation.end / table.tick)
            style = _KIND_STYLES[operation.kind]
            cells[start:stop] = [(operation_label(operation, table.num_repeats), style)] + [("==", style)] * (stop - start - 1)
        rows.append(cells)
    width = max(len(text) for row in rows for text, _ in row) + 1
    head = len(f"stage {table.num_stages - 1} ")
    per_block = max((console.width - head) // width, 1)
    for start in range(0, table.num_ticks, per_block):
        stop = min(start + per_block, table.num_ticks)
        console.print(Text(" " * head + "".join(f"{tick:<{width}}" for tick in range(start, stop)).rstrip(), style="dim"))
        for stage, row in enumerate(rows):
            line = Text(f"stage {stage} ".rjust(head))
            for text, style in row[start:stop]:
                line.append(text.ljust(width - 1), style=style)
                line.append(" ")
            line.rstrip()
            console.print(line)
        console.print()
    names = "I input gradient, W weight gradient" if table.schedule == "zb-h1" else "B backward"
    letter = ", the letter the repeat" if table.num_repeats > 1 else ""
    console.print(f"F forward, {names}, == continued\nthe number is the microbatch{letter}")


def print_rollout(schedule: RolloutSchedule, console: Console, *, notes: Iterable[str] = ()) -> None:
    """Print a step of reinforcement learning in its order, of the last stage: generate, train, sync, evaluate and store.

    If the batch grows, print the sizes of every stage before it.
    """
    plan, stages = schedule.stages[-1][1], schedule.stage_rows()
    sizes = f"{plan.prompts_per_step:,} prompts * {plan.samples_per_prompt:,} responses = {plan.samples_per_step:,} samples"
    steps, total = format_count(plan.num_steps, "step"), format_count(schedule.optimizer_steps("policy"), "optimizer step")
    if len(stages) > 1:
        titles = ("from\nstep", "steps", "prompts", "responses\neach", "samples", "samples per\nmini batch", "optimizer\nsteps")
        names = ("start_step", "num_steps", "prompts_per_step", "samples_per_prompt", "samples_per_step")
        names += ("mini_batch_samples", "optimizer_steps")
        console.print(f"{steps} of a batch that grows; {total} of the policy")
        console.print(make_table(console, titles, [[_cell(row[name]) for name in names] for row in stages]))
        console.print(f"in the last stage, a step of {sizes}:")
    else:
        console.print(f"{steps} of {sizes}; {total} of the policy")
    calls = format_count(plan.generate_calls, "call")
    console.print(f"a step generates in {calls} of {plan.sequences_per_call:,} sequences, trains, then syncs weights:")
    console.print(_training_table(plan.order, console))
    if plan.eval_prompts:
        console.print(f"evaluation: {plan.eval_prompts:,} prompts, {plan.eval_samples:,} samples")
    for remark in _remarks(plan):
        console.print(remark)
    print_notes(notes, console)


def print_suggestion(suggestion: Suggestion, console: Console) -> None:
    """Print starting sizes: the published ones and those of the repository, the memory behind them, and notes."""
    console.print(f"{suggestion.params:,} parameters, {suggestion.system}: a starting point")
    if suggestion.row is not None:
        columns = {f"published for {suggestion.row.label}": suggestion.row.published.to_dict()}
        if suggestion.used is not None:
            columns["the repository uses"] = suggestion.used.to_dict()
        rows = [(name, *(_cell(sizes[name]) for sizes in columns.values())) for name in suggestion.row.published.to_dict()]
        console.print(make_table(console, ("key", *columns), rows, left=1))
    if suggestion.memory is not None:
        memory = suggestion.memory
        console.print(
            f"training state: {memory.state_bytes / GIB:,.1f} GiB, at least {format_count(memory.least_devices, 'device')} of "
            f"{memory.device_bytes / GIB:,g} GiB, which leaves {memory.free_bytes / GIB:,.1f} GiB on each for activations and "
            "generation"
        )
    for note in suggestion.notes:
        console.print(f"- {note}")


def _training_table(order: Iterable[Updates], console: Console) -> Table:
    titles = ("model", "replicas", "epochs", "mini\nbatches", "optimizer\nsteps", "samples\neach", "passes\neach")
    table = make_table(console, (*titles, "per replica\nand pass"), left=1)
    table.collapse_padding = console.is_terminal
    for updates in order:
        passes, per_pass = _cell(updates.accumulation_steps), f"{_cell(updates.microbatch_size)} samples"
        if updates.token_budget is not None:
            passes = f"<= {passes}" if passes else "?"
            per_pass = f"{updates.token_budget:,} tokens"
        counts = (updates.data_parallel_size, updates.num_epochs, updates.num_mini_batches, updates.optimizer_steps)
        table.add_row(updates.model, *map(_cell, counts), _cell(updates.mini_batch_samples), passes, per_pass)
    return table


def _remarks(plan: RolloutPlan) -> list[str]:
    lag = plan.policy_updates.optimizer_steps - 1
    remarks = [
        "on-policy: each sample is trained on by the weights that generated it"
        if lag == 0
        else f"policy lag: the last optimizer step trains on samples of weights {format_count(lag, 'update')} older"
    ]
    first = plan.order[0]
    if plan.overlapping_microbatches and first.microbatches_per_epoch:
        remarks.append(
            f"overlap: {plan.overlapping_microbatches:,} of {first.microbatches_per_epoch:,} microbatches of the first epoch "
            f"can train ({first.model}) while later calls generate, if samples keep the order of generation"
        )
    padded = {updates.model: updates.padded_samples for updates in plan.order if updates.padded_samples}
    remarks += [f"padding: {format_count(rows, 'row')} of weight 0 per epoch ({model})" for model, rows in padded.items()]
    stored: Mapping[str, Any] | None = plan.to_dict()["experience"]
    if stored is not None:
        remarks.append(
            f"stored experience: {stored['bytes_per_sample']:,} bytes per sample at full length, "
            f"{format_bytes(stored['bytes_per_step'])} per step, {format_bytes(stored['bytes_per_replica'])} per replica"
        )
    return remarks


def _cell(value: int | None) -> str:
    return "" if value is None else format_value(value)
