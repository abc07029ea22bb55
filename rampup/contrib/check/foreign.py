"""Systems whose files are known and not checked: their names, and what an update is
there. They are listed in `foreign_systems.yml`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rampup.contrib.check.known import load_table


class Foreign(NamedTuple):
    """A system whose files are not checked."""

    name: str
    marks: tuple[re.Pattern[str], ...]  # texts that its files have: all of them
    update: str  # the samples of an update there


_TABLE = load_table("foreign", "systems")
# What no file of another system says.
COVERED = re.compile(_TABLE["covered"])
# Keys of many systems, which are no evidence of one.
SHARED = frozenset(_TABLE["shared"])
FOREIGN = tuple(
    Foreign(
        row["name"],
        tuple(re.compile(mark, re.MULTILINE) for mark in row["marks"]),
        row["update"],
    )
    for row in _TABLE["systems"]
)
