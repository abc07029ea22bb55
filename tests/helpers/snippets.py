"""Finds what the README and the pages of docs/ ask a reader to run, and runs it.

The ``python`` blocks of a page run in one namespace. A ``console`` block has lines `$
COMMAND`, each followed by what the command prints, or by nothing; those of `rampup`
run. `train` and `tune` run on one device, and `train ... --fake-devices N` is only
planned for N devices, as a mesh takes seconds to compile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import jax

from helpers.tiny import TINY, TINY_MODEL, command_line
from rampup.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# Commands that compute get settings that make them small; the page shows what a reader
# would type.
SMALL = {
    # Two rows or more on one device, so that a page may measure the gradient noise.
    "train": command_line(
        {
            **TINY,
            "per_device_batch_size_start": 2,
            "steps": 6,
            "dataset_type": "synthetic",
        }
    ),
    "tune": command_line(
        {
            **TINY_MODEL,
            "enable_rampup_batch_size": False,
            "per_device_batch_size": 2,
            "steps": 3,
            "dataset_type": "synthetic",
        }
    ),
}
SIMULATED = re.compile(r"rampup train (.*) --fake-devices (\d+)")


def load_file(path: str) -> ModuleType:
    """Import a Python file of the repository that is in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The Sphinx extension that writes the reference pages.
generator = load_file("docs/_ext/generated_reference.py")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of the blocks of a page that can run."""
    text = page.read_text(encoding="utf-8")
    return re.findall(
        r"^```(python|console)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )


def console_commands(block: str) -> list[tuple[str, str]]:
    """Return the `rampup` commands of a console block, each with the output that the
    block shows. A line that ends with a backslash goes on in the next one.
    """
    lines = block.replace("\\\n", " ")
    parts = (
        part.partition("\n")
        for part in re.split(r"^\$ ", lines, flags=re.MULTILINE)[1:]
    )
    return [
        (command, output)
        for command, _, output in parts
        if command.startswith("rampup ")
    ]


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Run on the first of the simulated devices, for which programs compile faster than
    for eight.
    """
    devices = jax.devices()[:1]
    with (
        mock.patch.object(jax, "device_count", return_value=1),
        mock.patch.object(jax, "devices", return_value=devices),
    ):
        yield


def run_page(page: Path, read_output: Callable[[], str]) -> None:
    """Run the blocks of a page, and compare what the commands print: `read_output`
    returns what is new since its last call.
    """
    warnings.filterwarnings("error", message=".*rampup", category=DeprecationWarning)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, (language, text) in enumerate(blocks(page)):
        if language == "python":
            exec(
                compile(
                    text,
                    f"{page.relative_to(ROOT)}, block {number}",
                    "exec",
                    dont_inherit=True,
                ),
                namespace,
            )
            continue
        for command, expected in console_commands(text):
            name, *words = shlex.split(
                SIMULATED.sub(r"rampup plan \1 --devices \2", command)
            )[1:]
            given = {word.partition("=")[0] for word in words}
            small = [
                setting
                for setting in SMALL.get(name, ())
                if setting.partition("=")[0] not in given
            ]
            read_output()
            with one_device() if name in SMALL else contextlib.nullcontext():
                code = main([name, *words, *small])
            printed = "\n".join(line.rstrip() for line in read_output().splitlines())
            assert code == 0, f"{command}: exit code {code}"
            assert not expected or printed.strip("\n") == expected.strip("\n"), command
