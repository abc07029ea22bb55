"""A verdict on another system's file, as HTML."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rampup.show.format import format_value
from rampup.show.notebook import html_facts, html_list, html_table

if TYPE_CHECKING:
    from rampup.contrib.check.verdict import Verdict


def verdict_html(verdict: Verdict) -> str:
    """Return what is wrong with the file, what it means, and what follows."""
    facts = {
        "system": verdict.system,
        "validator": verdict.validator,
        "run": verdict.run,
    }
    derived = {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in verdict.derived.items()
    }
    names = ("rule", "keys", "what is wrong", "nearest", "found by")
    broken = (
        (
            v.rule,
            ", ".join(v.keys),
            v.message,
            ", ".join(map(format_value, v.nearest)),
            v.found_by,
        )
        for v in verdict.violations
    )
    tables = {
        "what is wrong": html_table(
            [dict(zip(names, values, strict=True)) for values in broken]
        ),
        "what the file means": html_table(
            [asdict(meaning) for meaning in verdict.meanings]
        ),
        "what follows": html_facts(derived) if derived else "",
        "phases": html_table(verdict.phases or ()),
        "notes": html_list(verdict.notes),
    }
    return html_facts(facts) + "".join(
        f"<h4>{title}</h4>{table}" for title, table in tables.items() if table
    )
