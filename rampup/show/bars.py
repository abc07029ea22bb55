"""A progress bar over samples: rich in a terminal, tqdm in a notebook, none where there is neither."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text


class Bar:
    """What shows how far a run is; this one shows nothing, for output that is piped.

    Attributes:
        visible: whether it shows anything; where it does not, lines have to.
    """

    visible = False

    def start(self, total: int, done: int) -> None:
        """Show it, with so many samples in all and done."""

    def update(self, done: int, left: str, line: str) -> None:
        """Show the samples done, the time left, and a line on the newest step."""

    def stop(self) -> None:
        """End it; what it shows stays."""


class _Lines(Progress):
    """A bar, and under it a line with the newest step, which a narrow terminal wraps and never cuts."""

    line = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.line)


class TerminalBar(Bar):
    """A bar of rich."""

    visible = True

    def __init__(self, console: Console) -> None:
        self._progress = _Lines(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} samples"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=0, left="?", visible=False)

    def start(self, total: int, done: int) -> None:
        """Show it."""
        self._progress.update(self._task, total=total, completed=done, visible=True)
        self._progress.start()

    def update(self, done: int, left: str, line: str) -> None:
        """Show the newest step."""
        self._progress.line = line
        self._progress.update(self._task, completed=done, left=left)

    def stop(self) -> None:
        """End it."""
        self._progress.stop()


class NotebookBar(Bar):
    """A bar of tqdm; its time left is ours, since tqdm's would count from its own start."""

    visible = True

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None

    def start(self, total: int, done: int) -> None:
        """Show it."""
        self.stop()
        form = "{n:,}/{total:,} samples {bar} {desc}"
        self._bar = self._tqdm(total=total, initial=done, bar_format=form, dynamic_ncols=True)

    def update(self, done: int, left: str, line: str) -> None:
        """Show the newest step."""
        if self._bar is not None:
            self._bar.set_description_str(f"{left} left, {line}", refresh=False)
            self._bar.update(done - self._bar.n)

    def stop(self) -> None:
        """End it."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None


def make_bar(console: Console, *, quiet: bool = False) -> Bar:
    """Return the bar for where the output goes.

    Args:
        console: where it goes.
        quiet: show nothing.
    """
    if quiet:
        return Bar()
    if in_notebook() and (tqdm := _notebook_tqdm()) is not None:
        return NotebookBar(tqdm)
    return TerminalBar(console) if console.is_terminal else Bar()


def in_notebook() -> bool:
    """Say whether this process is the kernel of a notebook (Jupyter, Colab)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _notebook_tqdm() -> Any:
    """Return tqdm for this notebook, as widgets or else as text; None where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's remark that widgets are not installed
        try:
            return importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            return None
