"""The README tells the truth."""

import re
import shlex
from pathlib import Path

import pytest

from rampup.cli import COMMANDS, main
from rampup.config.files import keys_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PLANS = sorted(set(re.findall(r"`(rampup (?:plan|rows|timetable) [^`]*)`", README)))


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippets_run(number, capsys):
    """Every Python snippet runs as it stands, and those that train compile once and learn."""
    exec(compile(SNIPPETS[number], f"README.md snippet {number}", "exec"), {})
    printed = capsys.readouterr().out.split()
    if "batch in" in SNIPPETS[number]:
        loss, steps, compilations = printed
        assert (int(steps), int(compilations)) == (40, 1)
        assert float(loss) < 5


def test_there_is_a_snippet_for_each_depth():
    """Three depths of wrapping and the pipeline train, each in a snippet, and packing has one."""
    assert len(SNIPPETS) == 5
    assert sum("batch in" in snippet for snippet in SNIPPETS) == 3


@pytest.mark.parametrize("command", PLANS)
def test_commands_run(command, capsys, monkeypatch):
    """Every command that plans or looks up runs as it stands, from the repository's root."""
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_the_picture_is_what_is_printed(capsys, monkeypatch):
    """The plan in the README is what the command prints."""
    monkeypatch.chdir(ROOT)
    main(["plan", "configs/base.yml", "--devices", "4"])
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert f"```text\n{printed}\n```" in README


def test_the_timetable_is_what_is_printed(capsys):
    """The timetable in the README is what the command above it prints."""
    command, wanted = re.search(r"```text\n\$ rampup ([^\n]*)\n(.*?)```", README, re.DOTALL).groups()
    main(shlex.split(command))
    assert "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n" == wanted


def test_every_command_and_key_is_documented():
    """The tables of commands and keys are complete and current."""
    assert all(f"`rampup {name} " in README for name in COMMANDS)
    assert keys_table() in README


def test_all_presets_are_named():
    """Every configuration that comes with rampup is in the README."""
    assert all(path.stem in README for path in (ROOT / "configs").glob("*.yml"))


def test_what_it_points_to_is_there():
    """Every relative link leads to a file or folder of the project, and every line of the two tables of claims has one."""
    links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", README)
    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).exists()] == []
    claims = re.findall(r"^\| .* shown by \|\n\|[-|]+\|\n((?:\|.*\n)+)", README, re.MULTILINE)
    assert len(claims) >= 2
    for line in "".join(claims).splitlines():
        assert re.search(r"\]\((tests|rampup)/", line), line
