"""Tests of rampup.show.notebook: the HTML of objects."""

import subprocess
import sys

import pytest
from helpers.html import Page

import rampup
from rampup.plan import BatchRamp, BatchSplitter, RampPlan, describe
from rampup.show.notebook import html_list, html_table, to_html

EVIL = "<script>&\"'"
PLAN = RampPlan(
    ramp=BatchRamp.from_schedule("0:8 240:16"),
    splitter=BatchSplitter(data_parallel_size=2),
    num_devices=2,
    total_steps=20,
)


@pytest.mark.parametrize(
    "page",
    [
        html_table([{EVIL: EVIL}], caption=EVIL),
        html_list([EVIL]),
    ],
    ids=["rows", "list"],
)
def test_html_escapes_text(page):
    """Names, values and captions cannot become elements."""
    found = Page(page)
    assert EVIL in "".join(found.text)
    assert "script" not in found.names


@pytest.mark.parametrize("number", [200, 201])
def test_html_table_counts_what_it_leaves_out(number):
    """Up to 200 rows are all shown; of more, the first and the last hundred, and the
    number of the others.
    """
    found = Page(html_table([{"n": n} for n in range(number)]))
    assert found.names.count("tr") == 1 + min(number, 201)
    assert ("1 more row" in "".join(found.text)) == (number > 200)
    assert f"{number - 1:,}" in "".join(found.text)


def test_to_html_covers_every_class():
    """What IPython is told to show is what `to_html` knows; a plan has its summary,
    phases and notes as in a terminal.
    """
    found = Page(to_html(PLAN))
    assert all(
        sentence in "".join(found.text)
        for sentence in (*describe.summary(PLAN), *describe.advice(PLAN))
    )
    assert found.names.count("tr") == 1 + len(PLAN.ramp.phases)
    known = {
        cls.__qualname__: cls.__module__
        for cls in to_html.registry
        if cls is not object
    }
    assert known == rampup._SHOWN
    with pytest.raises(TypeError, match="int has no HTML form"):
        to_html(3)


CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_cell("import rampup.plan; split = rampup.plan.BatchSplitter(data_parallel_size=1)").raise_error()
shell.run_cell(
    "plan = rampup.plan.RampPlan(ramp=rampup.plan.BatchRamp.constant(8), splitter=split, num_devices=1, total_steps=9);"
    "text = repr(plan), str(plan), plan.to_dict()"
).raise_error()
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("rampup.")}))
shell.run_cell("plan").raise_error()
for name in ("plan", "plan.ramp", "7"):
    data, _ = shell.display_formatter.format(shell.ev(name))
    print(name, "text/html" in data and data["text/html"][:6])
"""


def test_ipython_shows_html():
    """A cell shows a plan as HTML; `import rampup.plan` and a plan as text load no
    other room.
    """
    pytest.importorskip("IPython")
    result = subprocess.run(
        [sys.executable, "-c", CELLS], capture_output=True, text=True, check=True
    )
    lines = result.stdout.splitlines()
    assert lines[0] == "['errors', 'plan']"
    assert lines[-3:] == ["plan <table", "plan.ramp <table", "7 False"]
