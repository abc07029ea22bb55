"""The README is short, and what it shows is what rampup prints. Its commands and snippets run in test_docs.py."""

import re

from helpers.snippets import ROOT, python_blocks

from rampup.cli import main

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short():
    """The README has at most 170 lines and 1,800 words."""
    assert len(README.splitlines()) <= 170
    assert len(README.split()) <= 1_800


def test_readme_snippet_compiles_once_and_learns(capsys):
    """The complete example prints its loss, its steps and one compilation."""
    namespace = {}
    for block in python_blocks(ROOT / "README.md"):
        exec(compile(block, "README.md", "exec"), namespace)
    loss, steps, compilations = capsys.readouterr().out.split()[-3:]
    assert (int(steps), int(compilations)) == (40, 1)
    assert float(loss) < 5


def test_readme_plan_is_what_is_printed(capsys, monkeypatch):
    """The plan in the README is what the command above it prints."""
    monkeypatch.chdir(ROOT)
    assert main(["plan", "configs/base.yml", "--devices", "4"]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.strip("\n") in README


def test_readme_picture_is_there_and_small():
    """The README shows one picture, of at most 150 kB."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert len(pictures) == 1
    assert 0 < (ROOT / pictures[0]).stat().st_size < 150_000


def test_readme_leaves_generated_tables_to_the_site():
    """The README links to the reference and repeats none of its tables."""
    assert "| `steps` |" not in README
    assert all(page in README for page in ("docs/reference/configuration.md", "docs/reference/command_line.md"))
