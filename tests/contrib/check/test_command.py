"""Tests of rampup.contrib.check.command: everything a verdict holds is shown, at any width."""

import io
import re

import pytest
from rich.console import Console

from rampup.contrib.check.command import print_verdict
from rampup.contrib.check.verdict import Verdict, Violation

LONG = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
FULL = Verdict(
    system="verl",
    violations=(
        Violation(
            rule="verl.some_rule",
            keys=(LONG, "data.size"),
            message="7 must be a multiple of [red]2[/red]; nearest: 6, 8",
        ),
        Violation(
            rule="verl.other", keys=("k",), message="the run stops", found_by="run"
        ),
    ),
    notes=("a note with [brackets]", "very " * 40 + "long"),
    meanings=(
        (
            f"{LONG} = 1,024 (default)",
            "samples per replica: 32 passes over 1,024 samples",
        ),
    ),
    phases=(
        {
            "start_step": 0,
            "start_sample": 0,
            "num_steps": 1234,
            "global_batch_size": 16,
            "accumulation_steps": 2,
        },
        {
            "start_step": 1234,
            "start_sample": 19744,
            "num_steps": None,
            "global_batch_size": 32,
            "accumulation_steps": 4,
        },
    ),
)


def shown(verdict, *, width=200, force_terminal=False, **options):
    """Return what is printed."""
    plain = {
        "no_color": True,
        "highlight": False,
        "markup": False,
        "soft_wrap": not force_terminal,
    }
    console = Console(
        file=io.StringIO(), width=width, force_terminal=force_terminal, **plain
    )
    print_verdict(verdict, console, **options)
    return console.file.getvalue()


def squeezed(text):
    """Return text without the spaces and line breaks that folding puts in."""
    return re.sub(r"\s|\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("terminal", [False, True])
def test_print_verdict_is_complete(width, terminal):
    """Every character is there; tables fit, and piped output is plain."""
    printed = shown(FULL, width=width, force_terminal=terminal)
    lines, text = re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines(), squeezed(printed)
    for part in (*FULL.notes, *(violation.message for violation in FULL.violations)):
        assert squeezed(part) in text, part
    for word in (
        "verl.some_rule",
        "rulesbroken",
        "rejects",
        "fails",
        "1,234",
        "19,744",
        "rest",
    ):
        assert word in text, word
    assert text.count("very") == 40
    assert "…" not in text
    # Outside of a terminal a sentence is one line of any length.
    table = lines if terminal else lines[lines.index("phases") : lines.index("notes")]
    assert max(map(len, table)) <= width
    if terminal:
        left = "".join(line[: width // 2] for line in lines)
        assert squeezed(LONG[-12:]) in squeezed(left)
    else:
        assert not set(printed) & set("\x1b─")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("runs", "uses the sizes below"),
        ("pads", "pads its batches"),
        ("drops", "drops samples"),
    ],
)
def test_print_verdict_starts_with_the_result(run, said):
    """The result of the check and of the run, a summary, the rules, and notes in their
    order: what is true of every file of the system comes last.
    """
    verdict = Verdict(
        system="trlx",
        run=run,
        summary="1 prompt; 1 step",
        version="of some month",
        notes=("4 devices stay idle", "prompts are counted"),
    )
    first, *rest = shown(verdict).splitlines()
    assert first.startswith("trlx: its own check accepts the file")
    assert said in first
    assert rest[:2] == ["1 prompt; 1 step", "rules: of some month"]
    assert rest[-2:] == ["- 4 devices stay idle", "- prompts are counted"]


@pytest.mark.parametrize(("count", "folded"), [(20, 0), (22, 2), (117, 97)])
def test_print_verdict_folds_long_tables_of_phases(count, folded):
    """The first and the last 10 phases are shown; --all shows all of them."""
    rows = [
        {
            "start_step": 1000 + i,
            "start_sample": 0,
            "num_steps": 1,
            "global_batch_size": 16 * i,
        }
        for i in range(count)
    ]
    verdict = Verdict(system="megatron", phases=tuple(rows))
    short, long = shown(verdict), shown(verdict, all_phases=True)
    assert sum(f"{1000 + i:,}" in long for i in range(count)) == count
    assert sum(f"{1000 + i:,}" in short for i in range(count)) == count - folded
    assert f"{1000 + count - 1:,}" in short
    assert (f"{folded:,} phases left out" in short) == bool(folded)
    assert "left out" not in long
