"""Tests of rampup.show.notebook: the HTML of objects."""

from html.parser import HTMLParser

import pytest

from rampup.dialects.verdict import Advice, Verdict
from rampup.notebook_repr import NotebookRepr
from rampup.plan import BatchRamp, BatchSplitter, RampPlan, RampupBatchManager
from rampup.plan.timetable import SCHEDULES, Timetable
from rampup.show.format import format_value
from rampup.show.notebook import html_facts, html_list, html_table, to_html

EVIL = "<script>&\"'"
PLAN = RampPlan(
    ramp=BatchRamp.from_schedule("0:8 240:16"), splitter=BatchSplitter(data_parallel_size=2), num_devices=2, total_steps=20
)


class Elements(HTMLParser):
    """Checks that elements close in order, and keeps their names and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.open, self.names, self.styles, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        """Note an element."""
        self.open.append(tag)
        self.names.append(tag)
        self.styles.append(dict(attrs).get("style") or "")

    def handle_endtag(self, tag):
        """Close the newest element, which must be this one."""
        assert self.open.pop() == tag

    def handle_data(self, data):
        """Keep the text."""
        self.text += data


@pytest.mark.parametrize(
    "page",
    [html_facts({EVIL: EVIL}), html_table([{EVIL: EVIL}], caption=EVIL), html_list([EVIL])],
    ids=["facts", "rows", "list"],
)
def test_html_escapes_text(page):
    """Names, values and captions cannot become elements."""
    found = Elements(page)
    assert EVIL in found.text
    assert "script" not in found.names


def test_html_of_nothing_is_empty():
    """No rows and no lines give no element."""
    assert html_table([]) == html_list([]) == ""


@pytest.mark.parametrize("number", [1, 200, 201, 5000])
def test_html_table_counts_what_it_leaves_out(number):
    """Up to 200 rows are all shown; of more, the first and the last hundred, and the number of the others."""
    found = Elements(html_table([{"n": n} for n in range(number)]))
    assert found.names.count("tr") == 1 + min(number, 201)
    assert (f"{number - 200:,} more rows" in found.text) == (number > 200)
    assert f"{number - 1:,}" in found.text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (-1234, "-1,234"), (0.5, "0.5"), (1e6, "1,000,000"), (False, "False"), (10**18, f"{10**18:,}")],
)
def test_format_value_separates_thousands(value, text):
    """Integers have separators, other numbers four digits."""
    assert format_value(value) == text


def test_plan_html_has_summary_phases_and_notes():
    """The same facts as in a terminal: summary, phases and notes."""
    found = Elements(PLAN._repr_html_())
    assert all(sentence in found.text for sentence in PLAN.summary)
    assert found.names.count("tr") == 1 + len(PLAN.ramp.phases)
    assert all(note in found.text for note in PLAN.advice)
    assert PLAN.advice


def test_phase_html_has_start_and_length():
    """A phase shows where it starts and how long it lasts; the last one has no end."""
    first, last = PLAN.ramp.phases
    assert "num_steps30" in Elements(first._repr_html_()).text
    assert "num_stepsthe rest of the run" in Elements(last._repr_html_()).text


def test_manager_html_has_its_position():
    """Step, samples, phase and batch, and where the ramp ends."""
    text = Elements(RampupBatchManager.from_plan(PLAN, 5)._repr_html_()).text
    assert "consumed samples40" in text
    assert "0 of 2, counted from 0" in text
    assert "16 from step 30" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_timetable_html_has_a_colour_per_kind(schedule):
    """Each kind of operation has its own background and text colour, and every operation is shown."""
    v = 2 if schedule in ("interleaved", "circular") else 1
    table = Timetable.build(schedule, num_stages=3, num_microbatches=4, num_repeats=v)
    found = Elements(table._repr_html_())
    kinds = {operation.kind for operation in table.operations}
    coloured = {style.partition("background:")[2] for style in found.styles if "background:" in style}
    assert len(coloured) == len(kinds)
    assert all("color:" in style for style in coloured)
    assert all(operation.label in found.text for operation in table.operations)


def test_timetable_html_counts_too_many_operations():
    """Thousands of operations are counted and not shown."""
    page = Timetable.build("1f1b", num_stages=4, num_microbatches=700)._repr_html_()
    assert "5,600 operations are too many to show" in page
    assert len(page) < 200


def test_to_html_covers_every_class():
    """Each subclass of the mixin is registered, and anything else is refused."""
    # By name, because a dataclass with slots is a second class of the same name.
    registered = {cls.__qualname__ for cls in to_html.registry}
    assert {cls.__qualname__ for cls in NotebookRepr.__subclasses__()} <= registered
    with pytest.raises(TypeError, match="int has no HTML form"):
        to_html(3)


def test_ramp_html_has_a_row_per_phase():
    """A ramp is a table of its phases."""
    found = Elements(PLAN.ramp._repr_html_())
    assert found.names.count("tr") == 1 + len(PLAN.ramp.phases)


@pytest.mark.parametrize(("holds", "word"), [(True, "true"), (False, "not here"), (None, "wrong")])
def test_verdict_html_judges_advice_in_words(holds, word):
    """Advice is true, not for this case, or wrong."""
    verdict = Verdict(system="trlx", advice=(Advice(rule="r", source="a guide", holds=holds, because="b"),))
    assert f"a guide{word}b" in Elements(verdict._repr_html_()).text


def test_html_table_marks_rows():
    """A row gets its CSS class, also after rows that are left out."""
    page = html_table([{"n": n} for n in range(9)], max_rows=4, row_classes={8: "unreached", 4: "x"})
    assert page.count("<tr class=") == 1
    assert '<tr class="unreached"><td style="text-align:right;padding:2px 8px">8</td>' in page
