"""Tests of rampup.show.bars: which bar, and what it shows."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from rampup.show.bars import Bar, NotebookBar, TerminalBar, in_notebook, make_bar


@pytest.fixture
def notebook(monkeypatch):
    """Make this process look like the kernel of a notebook."""
    shell = SimpleNamespace(kernel=object(), config={})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def console(**options):
    """Return a console that writes into memory."""
    return Console(file=io.StringIO(), width=80, **options)


def test_which_bar(monkeypatch):
    """Rich in a terminal, nothing where output is piped or unwanted."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    assert isinstance(make_bar(console(force_terminal=True)), TerminalBar)
    assert type(make_bar(console())) is Bar
    assert not make_bar(console(force_terminal=True), quiet=True).visible


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    """IPython's own terminal has no kernel and gets the terminal's bar."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert isinstance(make_bar(console(force_terminal=True)), TerminalBar)


def test_in_a_notebook_tqdm_shows_samples_and_our_time_left(notebook, capsys):
    """The bar counts the plan's samples, and says the time left and the newest step in our words."""
    pytest.importorskip("tqdm")
    bar = make_bar(console())
    assert isinstance(bar, NotebookBar)
    bar.start(29_632, 1_000)
    bar.update(12_345, "3:21", "step 7, phase 2, 900 tokens/s")
    bar.stop()
    shown = capsys.readouterr().err
    assert "1,000/29,632 samples" in shown
    assert "12,345/29,632 samples" in shown
    assert "3:21 left, step 7, phase 2, 900 tokens/s" in shown


def test_a_notebook_bar_can_be_stopped_at_any_time(notebook):
    """Stopped before its start, twice, and started again: no error."""
    pytest.importorskip("tqdm")
    bar = make_bar(console())
    bar.update(3, "0:01", "early")
    bar.stop()
    bar.start(10, 0)
    bar.start(10, 5)
    bar.stop()
    bar.stop()


def test_a_notebook_without_tqdm_gets_lines(notebook, monkeypatch):
    """Where tqdm is not installed, nothing is drawn and the caller prints lines."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert not make_bar(console()).visible
