"""Tests of rampup.dialects.verdict: how a verdict shows itself in a notebook."""

from rampup.dialects.verdict import Advice, Meaning, Verdict, Violation

EVIL = "<script>&"


def test_repr_html_shows_and_escapes_everything():
    """All parts of a verdict are shown, and text cannot become an element."""
    verdict = Verdict(
        system="skyrl",
        violations=(Violation(rule="a.rule", keys=("k1", "k2"), message=EVIL, nearest=(8, 1600)),),
        notes=("a note",),
        derived={"samples_per_step": 1280, "sizes": [1, 2]},
        phases=({"start_step": 7, "num_steps": None},),
        meanings=(Meaning(says="x = 1", means="one x"),),
        flow=("first this",),
        advice=(Advice(rule="be good", source="a guide", holds=True, because="it is"),),
    )
    page = verdict._repr_html_()
    for part in (
        "skyrl",
        "rejects",
        "fails",
        "a.rule",
        "k1, k2",
        "8, 1,600",
        "a note",
        "1,280",
        "[1, 2]",
        "one x",
        "first this",
    ):
        assert part in page
    for part in ("be good", "a guide", "it is", "start_step", "&lt;script&gt;&amp;"):
        assert part in page
    assert "<script>" not in page


def test_repr_html_has_no_empty_sections():
    """A verdict of a valid file has no headings without content."""
    page = Verdict(system="verl")._repr_html_()
    assert "accepts" in page
    assert "runs" in page
    assert "<h4>" not in page
