"""A key of the configuration, and a fix of one, for a terminal."""

from __future__ import annotations

import sys

from rich.console import Console

from rampup.config.explain import Explanation
from rampup.config.files import yaml_value
from rampup.config.fix import Fix
from rampup.show.tables import print_facts


def print_explanation(explained: Explanation, console: Console) -> None:
    """Print what there is to say about a key."""
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
    print_facts(facts | {"interacts with": ", ".join(explained.interacts) or "no other key"}, console)


def print_fix(fix: Fix, console: Console) -> None:
    """Print a fix: each change as a remark, then the file's change as a patch, ready for `patch -p0`."""
    if not fix.changes:
        console.print(f"{fix.file} is legal: nothing to fix")
        return
    for change in fix.changes:
        said = (
            f"set {change.key}={change.after}" if change.before is None else f"{change.key}: {change.before} -> {change.after}"
        )
        if change.renamed:
            said = f"{change.renamed} is spelt {change.key}"
        console.print(f"# {said} ({change.where})")
    sys.stdout.write(fix.patch)
