"""Finds what the README and the pages of docs/ ask a reader to run, and runs it.

- All ``python`` blocks of a page run in one namespace, from top to bottom.
- A ``console`` block has lines `$ COMMAND`, each followed by what the command prints. `rampup` commands run; others, such as
  `pip install`, do not. If the page shows no output, any output will do.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from rampup.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# Commands that compute get settings that make them small; the page shows what a reader would type.
SMALL = {
    "train": (
        "steps=6",
        "per_device_batch_size_start=1",
        "per_device_batch_size_increment=1",
        "per_device_batch_size=2",
        "global_rampup_samples=20",
        "max_target_length=16",
        "base_emb_dim=16",
        "base_mlp_dim=32",
        "base_num_query_heads=2",
        "eval_steps=1",
        "log_period=2",
        "jax_cache_dir=null",
    ),
    "tune": (
        "steps=4",
        "max_target_length=16",
        "base_emb_dim=16",
        "base_mlp_dim=32",
        "base_num_query_heads=2",
        "dataset_type=synthetic",
        "jax_cache_dir=null",
    ),
}
# The tests have eight devices already.
NOT_HERE = re.compile(r"--fake-devices \d+")


def page_id(page: Path) -> str:
    """Return a page's path in the repository."""
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def console_commands(page: Path) -> list[tuple[str, str]]:
    """Return the `rampup` commands in the console blocks of a page, each with the output that the page shows."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = []
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            if command.startswith("rampup "):
                commands.append((command, output))
    return commands


def run_page(page: Path) -> None:
    """Run the Python blocks of a page in one namespace."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for number, block in enumerate(python_blocks(page)):
        exec(compile(block, f"{page_id(page)}, block {number}", "exec"), namespace)


def run_command(command: str, read_output: Callable[[], str]) -> tuple[int, str]:
    """Run a `rampup` command made small, and return its exit code and what it printed.

    Args:
        command: the command line.
        read_output: returns what has been printed since it was last called.
    """
    name, *words = shlex.split(NOT_HERE.sub("", command))[1:]
    given = {word.partition("=")[0] for word in words}
    small = [setting for setting in SMALL.get(name, ()) if setting.partition("=")[0] not in given]
    read_output()
    code = main([name, *words, *small])
    return code, "\n".join(line.rstrip() for line in read_output().splitlines())
