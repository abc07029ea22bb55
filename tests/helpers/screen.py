"""What is printed at the width of a terminal."""

import io

from rich.console import Console

TERMINALS = [{}, {"force_terminal": True, "color_system": None}]


def printed(show, shown, *, terminal=TERMINALS[0], **options):
    """Return what is printed at 80 columns, none of whose lines may be longer."""
    console = Console(file=io.StringIO(), width=80, highlight=False, **terminal)
    show(shown, console, **options)
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    return console.file.getvalue()
