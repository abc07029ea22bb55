"""HTML for notebooks and reports: the one writer of tables, and the HTML form of each class.

A class takes part by inheriting `rampup.notebook_repr.NotebookRepr` and registering a function with `to_html`.
"""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from rampup.dialects.verdict import Verdict
from rampup.packing import PackedMicrobatches
from rampup.plan.maxtext_manager import RampupBatchManager
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, Phase
from rampup.plan.timetable import Timetable
from rampup.rl.plan import RolloutPlan
from rampup.show.format import KIND_NAMES, format_value

MAX_ROWS = 200
MAX_OPERATIONS = 5_000

_NUMBER = "text-align:right;padding:2px 8px"
_TEXT = "text-align:left;padding:2px 8px"
_KIND_STYLES = {"F": "background:#cfe8cf;color:#000", "B": "background:#33578f;color:#fff"}
_KIND_STYLES |= {"I": _KIND_STYLES["B"], "W": "background:#a9c4e4;color:#000"}
# What the advice of a guide is worth for one configuration: `Advice.holds`.
ADVICE = {True: "true", False: "not here", None: "wrong"}


def html_table(
    rows: Sequence[Mapping[str, object]],
    *,
    caption: str = "",
    max_rows: int = MAX_ROWS,
    row_classes: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return an HTML table with a column for each key of the first row. None becomes an empty cell.

    Args:
        rows: the rows, all with the same keys.
        caption: a line above the table.
        max_rows: if there are more rows, the middle ones are left out and counted.
        row_classes: CSS classes by row number.

    Example:
        >>> html_table([{"a": 1, "b": None}]).count("<td")
        2
    """
    if not rows:
        return ""
    styles = {name: _TEXT if isinstance(value, str) else _NUMBER for name, value in rows[0].items()}
    head = "".join(f'<th scope="col" style="{style}">{html.escape(name)}</th>' for name, style in styles.items())
    hidden = max(len(rows) - max_rows, 0)
    lines = []
    for number, row in enumerate(rows):
        if hidden and number == max_rows // 2:
            lines.append(f'<tr><td colspan="{len(row)}" style="{_TEXT}">{hidden:,} more rows</td></tr>')
        if hidden and max_rows // 2 <= number < len(rows) - max_rows // 2:
            continue
        cells = "".join(_cell(value, style) for value, style in zip(row.values(), styles.values(), strict=True))
        lines.append(f'<tr class="{row_classes[number]}">{cells}</tr>' if number in row_classes else f"<tr>{cells}</tr>")
    title = f'<caption style="{_TEXT}">{html.escape(caption)}</caption>' if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def html_facts(facts: Mapping[str, object]) -> str:
    """Return names and values as an HTML table with one row for each.

    Example:
        >>> "1,000" in html_facts({"steps": 1000})
        True
    """
    rows = "".join(
        f'<tr><th scope="row" style="{_TEXT}">{html.escape(name)}</th>{_cell(value, _TEXT)}</tr>'
        for name, value in facts.items()
    )
    return f"<table>{rows}</table>"


def html_list(lines: Iterable[str]) -> str:
    """Return lines of text as an HTML list, or nothing if there are none.

    Example:
        >>> html_list(["a < b"])
        '<ul><li>a &lt; b</li></ul>'
    """
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _cell(value: object, style: str) -> str:
    return f'<td style="{style}">{"" if value is None else html.escape(format_value(value))}</td>'


@functools.singledispatch
def to_html(value: object) -> str:
    """Return the HTML form of an object.

    Raises:
        TypeError: the class of the object has none.
    """
    raise TypeError(f"{type(value).__name__} has no HTML form")


def _phase_facts(phase: Phase) -> dict[str, object]:
    names = ("start_step", "start_sample", "num_steps", "global_batch_size")
    return {"phase": phase.index, **{name: getattr(phase, name) for name in names}}


@to_html.register
def _(phase: Phase) -> str:
    return html_facts(_phase_facts(phase) | {"num_steps": phase.num_steps or "the rest of the run"})


@to_html.register
def _(ramp: BatchRamp) -> str:
    return html_table(list(map(_phase_facts, ramp.phases)))


@to_html.register
def _(plan: RampPlan) -> str:
    remarks = [f"note: {note}" for note in plan.advice]
    if plan.eval_split is not None:
        remarks.insert(0, f"evaluation: {plan.eval_split.global_batch_size:,} samples a batch")
    if plan.loading is not None:
        remarks.insert(0, f"loading: {plan.loading}")
    return html_table(plan.phase_table(), caption="; ".join(plan.summary)) + html_list(remarks)


@to_html.register
def _(manager: RampupBatchManager) -> str:
    return html_facts(
        {
            "step": manager.step,
            "consumed samples": manager.total_used_samples,
            "phase": f"{manager.phase.index} of {len(manager.ramp.phases)}, counted from 0",
            "global batch size": manager.global_batch_size_current,
            "its end": f"{manager.global_batch_size_end:,} from step {manager.total_rampup_steps:,}",
            "ramp active": manager.rampup_active,
        }
    )


@to_html.register
def _(table: Timetable) -> str:
    """Return a table with a row for each stage, in which an operation spans as many columns as it takes ticks."""
    facts = f"{table.schedule}: makespan {float(table.makespan):g}, bubble {float(table.bubble_fraction):.1%}"
    if len(table.operations) > MAX_OPERATIONS:
        return f"<p>{facts}; {len(table.operations):,} operations are too many to show</p>"
    rows = []
    for stage in range(table.num_stages):
        cells, column = [f'<th scope="row" style="{_TEXT};white-space:nowrap">stage {stage}</th>'], 0
        for operation in table.of_stage(stage):
            start, stop = int(operation.start / table.tick), int(operation.end / table.tick)
            hint = f"{KIND_NAMES[operation.kind]}, from {float(operation.start):g} to {float(operation.end):g}"
            style = f"text-align:center;padding:2px 3px;border:1px solid #fff;{_KIND_STYLES[operation.kind]}"
            if start > column:
                cells.append(f'<td colspan="{start - column}"></td>')
            cells.append(f'<td colspan="{stop - start}" title="{hint}" style="{style}">{operation.label}</td>')
            column = stop
        if column < table.num_ticks:
            cells.append(f'<td colspan="{table.num_ticks - column}"></td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    caption = f'<caption style="{_TEXT}">{html.escape(facts)}</caption>'
    return f'<table style="border-collapse:collapse">{caption}{"".join(rows)}</table>'


@to_html.register
def _(packed: PackedMicrobatches) -> str:
    rows = []
    for number, shape in enumerate(packed.microbatch_shapes):
        members = [replica[number] for replica in packed.replicas]
        texts = [f"{len(m):,} sequence{'s' * (len(m) != 1)}, {sum(packed.lengths[i] for i in m):,} tokens" for m in members]
        replicas = {f"replica {replica}": text for replica, text in enumerate(texts)}
        rows.append({"microbatch": number, "shape": shape, **replicas})
    return html_table(rows)


@to_html.register
def _(plan: RolloutPlan) -> str:
    return html_facts({name: value for name, value in plan.to_dict().items() if isinstance(value, int)})


@to_html.register
def _(verdict: Verdict) -> str:
    facts = {"system": verdict.system, "validator": verdict.validator, "run": verdict.run}
    derived = {name: value if isinstance(value, int | float) else str(value) for name, value in verdict.derived.items()}
    violations = [
        {
            "rule": v.rule,
            "keys": ", ".join(v.keys),
            "what is wrong": v.message,
            "nearest": ", ".join(map(format_value, v.nearest)),
            "found by": v.found_by,
        }
        for v in verdict.violations
    ]
    advice = [{**asdict(advice), "holds": ADVICE[advice.holds]} for advice in verdict.advice]
    tables = {
        "what is wrong": html_table(violations),
        "what the file means": html_table([asdict(meaning) for meaning in verdict.meanings]),
        "what follows": html_facts(derived) if derived else "",
        "phases": html_table(verdict.phases or ()),
        "a step": html_list(verdict.flow),
        "advice": html_table(advice),
        "notes": html_list(verdict.notes),
    }
    parts = [f"<h4>{title}</h4>{table}" for title, table in tables.items() if table]
    return html_facts(facts) + "".join(parts)
