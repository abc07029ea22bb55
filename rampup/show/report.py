"""A plan, and a run if there is one, as one page that needs no network: pictures with hover values, tables, every key.

The page stands alone: its style and its script are in it, and its policy forbids it to load anything.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from rampup.config.files import describe, yaml_value
from rampup.config.key import Key
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError
from rampup.plan.learning_rate import Clock
from rampup.plan.plan import RampPlan
from rampup.rl.plan import RolloutPlan
from rampup.show.format import format_value
from rampup.show.notebook import html_list
from rampup.show.report_charts import plan_charts, rate_charts, run_charts
from rampup.show.series import RunMetrics
from rampup.show.svg import Chart, chart_figure, timetable_figure
from rampup.show.tables import cut

MAX_ROWS = 400
MAX_OPERATIONS = 1_500
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key of a configuration as the report lists it.

    Attributes:
        name: the key.
        key: what it is.
        value: its value.
        where: where the value came from.
        changed: whether it is another than the default.
    """

    name: str
    key: Key
    value: Any
    where: str
    changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a report is made of.

    Attributes:
        title: what it is about: a file's or a run's name.
        plan: the plan of a ramp or of a rollout; None where there is only a verdict.
        notes: what is legal but should be known.
        keys: every key of the configuration.
        rates: from a clock to the learning rate of an optimizer step on it; empty for none.
        run: the metrics of the run; None for none.
        verdict: what another system's file does; None for none.
        version: of the program, for the last line.
    """

    title: str
    plan: RampPlan | RolloutPlan | None
    notes: Sequence[str] = ()
    keys: Sequence[KeyValue] = ()
    rates: Mapping[Clock, Callable[[int], float]] = field(default_factory=dict)
    run: RunMetrics | None = None
    verdict: Verdict | None = None
    version: str = ""


def key_values(
    keys: Mapping[str, Key], values: Mapping[str, Any], defaults: Mapping[str, Any], where: Callable[[str], str]
) -> tuple[KeyValue, ...]:
    """Return every key of a configuration with its value and where that came from."""
    return tuple(
        KeyValue(name=name, key=key, value=values[name], where=where(name), changed=values[name] != defaults[name])
        for name, key in keys.items()
    )


def write_report(report: Report, path: str | Path) -> int:
    """Write the page and return its size in bytes.

    Raises:
        ConfigError: another ending than .html, or the file cannot be written.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path} must end in .html", key="output", nearest=(".html",))
    data = report_html(report).encode()
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", key="output") from None
    return len(data)


def report_html(report: Report) -> str:
    """Return the page.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> ramp, splitter = BatchRamp.from_schedule("0:8 240:16"), BatchSplitter(data_parallel_size=2)
        >>> plan = RampPlan(ramp=ramp, splitter=splitter, num_devices=2, total_steps=99)
        >>> page = report_html(Report(title="<my run>", plan=plan))
        >>> "&lt;my run&gt;" in page, "<my run>" in page, "://" in page
        (True, False, False)
    """
    sections = {name: body for name, body in _sections(report).items() if body}
    links = "".join(f'<li><a href="#{_anchor(name)}">{name}</a></li>' for name in sections)
    body = "".join(f'<section id="{_anchor(name)}"><h2>{name}</h2>{text}</section>' for name, text in sections.items())
    title = html.escape(report.title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
        f"<title>{title} - rampup report</title><style>{_asset('report.css')}</style></head><body>"
        '<a class="skip" href="#main">to the content</a>'
        f'<header><div><h1>{title}</h1>{_summary(report)}</div><button id="theme" type="button" hidden>Theme</button></header>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav><main id="main">{body}</main>'
        f'<footer class="dim"><p>Written by rampup {html.escape(report.version)}.</p></footer>'
        f'<div id="tip" role="status" hidden></div><script>{_asset("report.js")}</script></body></html>'
    )


def _sections(report: Report) -> dict[str, str]:
    plan, ramp = report.plan, report.plan if isinstance(report.plan, RampPlan) else None
    return {
        "What to know": _notes(report),
        "Verdict": report.verdict._repr_html_() if report.verdict else "",
        "The run": _run(report.run),
        "The ramp": _charts(plan_charts(ramp)) if ramp else "",
        "Phases": _phases(ramp) if ramp else "",
        "A step": _scrolled(plan._repr_html_(), "a step") if isinstance(plan, RolloutPlan) else "",
        "Learning rate": _charts(rate_charts(ramp, report.rates)) if ramp and report.rates else "",
        "Pipeline": _pipeline(ramp) if ramp else "",
        "Keys": _keys(report.keys),
    }


def _summary(report: Report) -> str:
    plan = report.plan
    if isinstance(plan, RampPlan):
        return "".join(f"<p>{html.escape(sentence)}</p>" for sentence in plan.summary)
    if isinstance(plan, RolloutPlan):
        return (
            f"<p>{plan.num_steps:,} steps of {plan.prompts_per_step:,} prompts * {plan.samples_per_prompt:,} responses, "
            f"{plan.total_optimizer_steps:,} optimizer steps</p>"
        )
    return ""


def _notes(report: Report) -> str:
    if not report.notes:
        return "<p>Nothing that costs more than it must was found in this plan.</p>" if report.plan else ""
    return html_list(report.notes).replace("<ul>", '<ul class="notes">', 1)


def _run(run: RunMetrics | None) -> str:
    if run is None:
        return ""
    last = run.losses[-1]
    facts: dict[str, object] = {
        "steps done": run.steps[-1] + 1,
        "samples consumed": run.samples[-1],
        "last loss": last if last == last else "not finite",
    }
    if run.eval_losses:
        facts["last evaluation loss"] = run.eval_losses[-1]
    by_phase = run.by_phase()
    return _facts(facts) + _charts(run_charts(run)) + "<h3>By phase</h3>" + _table(by_phase, "the run by phase")


def _phases(plan: RampPlan) -> str:
    unreached = {phase.index for phase in plan.ramp.phases if phase.start_step >= plan.total_steps}
    text = _table(plan.phase_table(), "phases", unreached=unreached)
    if plan.eval_split:
        size = plan.eval_split.global_batch_size
        text += f"<p>Evaluation: {size:,} samples a batch = {html.escape(cut(plan.eval_split))}.</p>"
    return text


def _pipeline(plan: RampPlan) -> str:
    splitter, split = plan.splitter, plan.splits[-1]
    if splitter.num_stages == 1:
        return ""
    m, v = split.num_pipeline_microbatches, splitter.num_repeats
    if 2 * splitter.num_stages * m * v > MAX_OPERATIONS:
        return f"<p>{splitter.num_stages} stages and {m:,} microbatches: too many operations to draw.</p>"
    table = plan.timetable()
    title = f"One pass of the last phase: {table.schedule}, {float(table.bubble_fraction):.1%} idle"
    return timetable_figure(table, title)


def _keys(keys: Sequence[KeyValue]) -> str:
    sections: dict[str, list[KeyValue]] = {}
    for entry in keys:
        sections.setdefault(entry.key.section, []).append(entry)
    parts = []
    for section, entries in sections.items():
        rows = "".join(map(_key_row, entries))
        head = "".join(f'<th class="text" scope="col">{name}</th>' for name in ("key", "value", "set by", "meaning"))
        parts.append(
            f"<details open><summary>{html.escape(section)}</summary>"
            f'<table class="keys"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details>'
        )
    search = '<p><label for="filter">Show keys with:</label> <input id="filter" type="search" hidden></p>'
    return f"{search}<p class=dim>Values in bold are not the default.</p>{''.join(parts)}" if parts else ""


def _key_row(entry: KeyValue) -> str:
    """Return a key's line; of the file that set it only the name, since a page that is sent tells nothing of folders."""
    name, value, where, meaning = map(
        html.escape, (entry.name, yaml_value(entry.value), Path(entry.where).name, describe(entry.key))
    )
    return (
        f'<tr{" class=changed" if entry.changed else ""}><td class="text"><code>{name}</code></td>'
        f'<td class="text"><code>{value}</code></td><td class="text dim">{where}</td><td class="text">{meaning}</td></tr>'
    )


def _charts(charts: Sequence[Chart]) -> str:
    return f'<div class="charts">{"".join(map(chart_figure, charts))}</div>'


def _facts(facts: Mapping[str, object]) -> str:
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(format_value(value))}</dd></div>" for name, value in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _table(rows: Sequence[Mapping[str, object]], name: str, *, unreached: frozenset[int] | set[int] = frozenset()) -> str:
    """Return a table that can be scrolled; of very many rows the first and the last."""
    hidden = max(len(rows) - MAX_ROWS, 0)
    numbered = list(enumerate(rows))
    kept = numbered[: MAX_ROWS // 2] + numbered[-MAX_ROWS // 2 :] if hidden else numbered
    lines = []
    for place, (number, row) in enumerate(kept):
        if hidden and place == MAX_ROWS // 2:
            lines.append(f'<tr><td class="text" colspan="{len(row)}">{hidden:,} more rows</td></tr>')
        cells = "".join(f"<td>{'' if value is None else html.escape(format_value(value))}</td>" for value in row.values())
        lines.append(f"<tr{' class=unreached' if number in unreached else ''}>{cells}</tr>")
    head = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in rows[0])
    note = "<p class=dim>The run ends before the phases in italics.</p>" if unreached else ""
    return _scrolled(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>", name) + note


def _scrolled(table: str, name: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="table: {html.escape(name)}">{table}</div>'


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _asset(name: str) -> str:
    return (resources.files("rampup.show") / "assets" / name).read_text(encoding="utf-8")
