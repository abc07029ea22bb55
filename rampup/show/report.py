"""A plan, and a run if there is one, as one HTML page, whose content security policy
forbids it to load anything.
"""

from __future__ import annotations

import base64
import html
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import rampup
from rampup.config.files import describe as describe_key
from rampup.config.files import yaml_value
from rampup.config.key import Settings
from rampup.errors import ConfigError
from rampup.plan.describe import describe, summary
from rampup.plan.learning_rate import Clock
from rampup.plan.plan import RampPlan
from rampup.show.figures import (
    draw_batch,
    draw_rate,
    draw_runs,
    draw_timetable,
    svg_text,
)
from rampup.show.format import format_value
from rampup.show.notebook import html_list, html_table
from rampup.show.series import RunMetrics

MAX_ROWS = 60  # of longer tables, only the first and the last rows are in the page
MAX_OPERATIONS = 1_500
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src"
    " data:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The content of a report."""

    title: str  # the name of a file or a run
    plan: RampPlan | None = None
    sentences: Sequence[str] = ()  # below the title, where there is no plan
    notes: Sequence[str] = ()  # remarks about what is legal but costs something
    config: Settings | None = None  # the configuration, whose keys are listed
    rates: Mapping[Clock, Callable[[int], float]] = field(
        default_factory=dict
    )  # of an optimizer step, by clock
    run: RunMetrics | None = None  # the metrics of the run, if there is one
    # What the design of the run had predicted, if it had one: a
    # `rampup.contrib.lab.prediction.Comparison`.
    prediction: Any = None
    # Sections of what is no ramp: title -> tables in HTML, each by its name.
    others: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def write_report(report: Report, path: str | Path) -> int:
    """Write the page and return its size in bytes."""
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path} must end in .html", key="output", nearest=(".html",))
    data = report_html(report).encode()
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", key="output"
        ) from None
    return len(data)


def report_html(report: Report) -> str:
    """Return the page."""
    plan = report.plan
    sentences = report.sentences if plan is None else summary(plan)
    sections = {"Notes": "<p>No warnings.</p>" if sentences else ""}
    if report.notes:
        sections["Notes"] = f'<div class="notes">{html_list(report.notes)}</div>'
    if report.run is not None:
        sections["Run"] = _run(report.run)
    if report.prediction is not None:
        sections["Prediction"] = html_list(report.prediction.sentences())
        if report.prediction.rows:
            table = html_table(report.prediction.table(), max_rows=MAX_ROWS)
            sections["Prediction"] += _scroll(table, "prediction")
    for title, tables in report.others.items():
        sections[title] = "".join(_scroll(body, name) for name, body in tables.items())
    if plan is not None:
        sections["Ramp"] = _picture(draw_batch(plan), "batch, passes and bubble")
        sections["Phases"] = _phases(plan)
        if report.rates:
            figure = draw_rate(plan, report.rates)
            sections["Learning rate"] = _picture(figure, "learning rate")
        if plan.splitter.num_stages > 1:
            sections["Pipeline"] = _pipeline(plan)
    if report.config is not None:
        sections["Keys"] = _keys(report.config)
    sections = {name: body for name, body in sections.items() if body}
    links = "".join(
        f'<li><a href="#{_anchor(name)}">{name}</a></li>' for name in sections
    )
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{name}</h2>{text}</section>'
        for name, text in sections.items()
    )
    title = html.escape(report.title)
    header = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link'
        ' rel="icon" href="data:,">'
        f"<title>{title} - rampup"
        f" report</title><style>{_asset('report.css')}</style></head><body>"
        '<a class="skip" href="#main">skip to the content</a>'
        f'<header><div><h1>{title}</h1>{header}</div><button id="theme" type="button"'
        " hidden>Theme</button></header>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav><main'
        f' id="main">{body}</main>'
        f'<footer class="dim"><p>Written by rampup {rampup.__version__}.</p></footer>'
        f"<script>{_asset('report.js')}</script></body></html>"
    )


def _phases(plan: RampPlan) -> str:
    """Return the table of phases, with those that the run does not reach in italics."""
    shown = describe(plan)
    classes = dict.fromkeys(shown.unreached, "unreached")
    table = html_table(shown.table(), max_rows=MAX_ROWS, row_classes=classes)
    text = _scroll(table, "phases")
    if shown.unreached:
        text += '<p class="dim">The run ends before the phases in italics.</p>'
    return text + "".join(f"<p>{html.escape(line)}</p>" for line in shown.remarks)


def _pipeline(plan: RampPlan) -> str:
    """Return a picture of one pass, if it is not too large to be read."""
    stages = plan.splitter.num_stages
    number = plan.splits[-1].num_pipeline_microbatches
    if 2 * stages * number * plan.splitter.num_repeats > MAX_OPERATIONS:
        return f"<p>{stages} stages and {number:,} microbatches: too many to draw.</p>"
    figure = draw_timetable(plan.timetable())
    return f"<p>One pass of the last phase:</p>{_picture(figure, 'timetable')}"


def _run(run: RunMetrics) -> str:
    last = run.losses[-1]
    facts = {
        "steps done": run.steps[-1] + 1,
        "samples consumed": run.samples[-1],
        f"last {run.quantity}": last if last == last else "not finite",
    }
    if run.noise_scales:
        facts["noise scale (samples)"] = run.noise_at(-1)
    if run.eval_losses:
        facts[f"last evaluation {'loss' if run.quantity == 'loss' else 'accuracy'}"] = (
            run.eval_losses[-1]
        )
    items = "".join(
        f"<div><dt>{name}</dt><dd>{html.escape(format_value(value))}</dd></div>"
        for name, value in facts.items()
    )
    table = html_table(run.by_phase(), max_rows=MAX_ROWS)
    return (
        f'<dl class="facts">{items}</dl>{_picture(draw_runs([run]), "metrics")}<h3>By'
        f" phase</h3>{_scroll(table, 'the run by phase')}"
    )


def _keys(config: Settings) -> str:
    values, defaults = config.to_dict(), type(config)().to_dict()
    sections = defaultdict(list)
    for name, key in config.keys().items():
        row = {
            "key": name,
            "value": yaml_value(values[name]),
            # Only the name of a file is shown: the page may be sent to somebody, and
            # the folders are nobody's business.
            "set by": Path(config.where(name)).name,
            "meaning": describe_key(key),
        }
        sections[key.section].append(row)
    parts = [
        '<p><label for="filter">Filter keys:</label> <input id="filter" type="search"'
        " hidden></p>",
        '<p class="dim">Values in bold are not the default.</p>',
    ]
    for section, rows in sections.items():
        changed = {
            number: "changed"
            for number, row in enumerate(rows)
            if values[row["key"]] != defaults[row["key"]]
        }
        table = html_table(rows, max_rows=len(rows), row_classes=changed)
        parts.append(
            f"<details open><summary>{html.escape(section)}</summary>{table}</details>"
        )
    return "".join(parts)


def _picture(figure: Any, name: str) -> str:
    """Return a figure as an element of the page, which scrolls where it is too wide."""
    data = base64.b64encode(svg_text(figure).encode()).decode()
    image = f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'
    return _scroll(f"<figure>{image}</figure>", name)


def _scroll(table: str, name: str) -> str:
    return (
        '<div class="scroll" tabindex="0" role="region"'
        f' aria-label="{name}">{table}</div>'
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _asset(name: str) -> str:
    return (resources.files("rampup.show") / "assets" / name).read_text(
        encoding="utf-8"
    )
