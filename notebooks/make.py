"""Make the notebooks: each .ipynb from its .py, and in both the badge and the install
cell.

Edit the .py, then run this. The badge and the install cell follow `Repository` in
`[project.urls]` of pyproject.toml. Without it there is no badge, and the notebooks
install rampup from the clone that contains them.
"""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import jupytext
from nbformat.v4 import new_markdown_cell, new_notebook

FOLDER = Path(__file__).resolve().parent
NAMES = (
    "quickstart",
    "pipeline",
    "batch_sizes_explained",
    "rl",
    "fine_tuning",
    "minigpt",
)
BADGE, INSTALL = "badge", "install"
EXTRAS = "plot"
METADATA = {
    "jupytext": {"formats": "ipynb,py:percent"},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
}
GITHUB = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")
INSTALL_CELL = """# @title Install
import importlib.metadata
import tempfile
from pathlib import Path

packages = {{
    package.name: package.version for package in importlib.metadata.distributions()
}}
if "rampup" not in packages:
{source}
    # Keep the versions of JAX and of the accelerator's driver that this machine has.
    kept = [
        f"{{name}}=={{version}}"
        for name, version in packages.items()
        if name.startswith("jax") or name == "libtpu"
    ]
    constraints = Path(tempfile.mkdtemp()) / "constraints.txt"
    constraints.write_text("\\n".join(kept))
    %pip install -q -c {{constraints}} "{{source}}\""""
FROM_CLONE = """    # The repository: here, in a folder above, or in one folder below; or its wheel.
    here = Path.cwd()
    folders = [here, *here.parents, *sorted(path for path in here.iterdir())]
    found = [folder for folder in folders if (folder / "rampup" / "plan").is_dir()]
    found += sorted(here.glob("rampup-*.whl"), reverse=True)
    if not found:
        raise RuntimeError(
            f"rampup is not installed; copy its repository or its wheel into {{here}},"
            " and run this cell again"
        )
    source = f"{{found[0]}}[{extras}]\""""
FROM_URL = '    source = "rampup[{extras}] @ git+{url}"'


def repository(pyproject: str) -> str | None:
    """Return the public address of the project, or None if it has none.

    Args:
        pyproject: the text of pyproject.toml.
    """
    url = tomllib.loads(pyproject)["project"].get("urls", {}).get("Repository")
    return None if url is None else str(url)


def badge_cell(url: str | None, name: str, *, branch: str = "main") -> str | None:
    """Return the badge that opens a notebook in Colab, or None if the address is not on
    GitHub, from which Colab reads.

    Args:
        url: the address of the project.
        name: the name of the notebook.
        branch: the branch that contains it.
    """
    match = GITHUB.fullmatch(url or "")
    if match is None:
        return None
    target = f"https://colab.research.google.com/github/{match[1]}/blob/{branch}/notebooks/{name}.ipynb"
    return (
        "[![Open in"
        f" Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target})"
    )


def install_cell(url: str | None) -> str:
    """Return the cell that installs rampup if it is missing.

    Args:
        url: the address of the project; None = install from the clone.
    """
    source = FROM_CLONE if url is None else FROM_URL
    return INSTALL_CELL.format(source=source.format(extras=EXTRAS, url=url))


def make_notebook(source: str, name: str, url: str | None) -> tuple[str, str]:
    """Return a notebook as .py and as .ipynb, both with the current badge and install
    cell.

    Args:
        source: the notebook as .py.
        name: its name.
        url: the address of the project.
    """
    notebook = jupytext.reads(source, fmt="py:percent")
    cells = [cell for cell in notebook.cells if BADGE not in _tags(cell)]
    for cell in cells:
        if INSTALL in _tags(cell):
            cell.source = install_cell(url)
    badge = badge_cell(url, name)
    if badge is not None:
        cells.insert(0, new_markdown_cell(badge, metadata={"tags": [BADGE]}))
    for number, cell in enumerate(cells):
        cell.id = f"{name}-{number:02}"
    notebook = new_notebook(cells=cells, metadata=METADATA)
    return _to_text(notebook, "py:percent"), _to_text(notebook, "ipynb")


def _tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def _to_text(notebook: Any, form: str) -> str:
    """Return the text of a notebook without the version of jupytext, which differs from
    machine to machine.
    """
    text = jupytext.writes(copy.deepcopy(notebook), fmt=form)
    text = re.sub(
        r"^#\s+(?:format_version|jupytext_version): .*\n", "", text, flags=re.MULTILINE
    )
    return text.rstrip("\n") + "\n"


def main() -> None:
    """Write all notebooks."""
    url = repository((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    for name in NAMES:
        source = FOLDER / f"{name}.py"
        py, ipynb = make_notebook(source.read_text(encoding="utf-8"), name, url)
        source.write_text(py, encoding="utf-8")
        source.with_suffix(".ipynb").write_text(ipynb, encoding="utf-8")


if __name__ == "__main__":
    main()
