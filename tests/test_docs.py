"""The pages of docs/ and the README: what they show runs, what they list is complete, and their links lead somewhere."""

import dataclasses
import gzip
import importlib.util
import inspect
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from helpers.snippets import PAGES, ROOT, blocks, run_page

import rampup
import rampup.errors
from rampup.cli import COMMANDS
from rampup.config.schema import KEYS
from rampup.rl.config import ROLLOUT_KEYS, build_rollout_schedule, load_rollout_config

DOCS = ROOT / "docs"
WITH_BLOCKS = [page for page in PAGES if blocks(page)]


def page_id(page):
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Work in a folder that has the configurations of the repository and the files that pages call yours."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yml").write_text("base_config: configs/base.yml\nper_device_batch_size_increment: 5\n")
    (tmp_path / "my_skyrl.yml").write_text("trainer: {train_batch_size: 64, policy_mini_batch_size: 16}\n")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.name == "README.md" else pytest.mark.notebooks) for page in WITH_BLOCKS],
    ids=page_id,
)
def test_page_runs(page, workplace, capsys):
    """The Python blocks and the commands of a page run in their order, and the commands print what the page shows."""
    run_page(page, lambda: capsys.readouterr().out)


def load_generator():
    """Import the Sphinx extension that writes the reference pages."""
    spec = importlib.util.spec_from_file_location("generated_reference", DOCS / "_ext" / "generated_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def documented_names():
    """Return the names in the autosummary tables of the API reference, with their module."""
    text, names = (DOCS / "reference" / "api.md").read_text(), set()
    for block in re.findall(r"```\{eval-rst\}\n(.*?)```", text, re.DOTALL):
        module = re.search(r"\.\. currentmodule:: (\S+)", block)[1]
        names |= {f"{module}.{name}" for name in re.findall(r"^   ([A-Za-z_]\w*)$", block, re.MULTILINE)}
    return names


def test_settings_of_the_guide_on_rollouts_are_legal():
    """Each setting in the guide's table plans the shipped configuration."""
    rows = re.findall(r"^\| `([^`]+=[^`]+)` \|", (DOCS / "guides" / "reinforcement_learning.md").read_text(), re.MULTILINE)
    assert len(rows) >= 6
    for row in rows:
        build_rollout_schedule(load_rollout_config(ROOT / "configs" / "rl.yml", shlex.split(row)), 1)


def test_every_public_name_is_documented():
    """The API reference has every name of `rampup`, every error, and no name that does not exist."""
    errors = {
        name for name, value in vars(rampup.errors).items() if inspect.isclass(value) and value.__module__ == "rampup.errors"
    }
    assert {f"rampup.{name}" for name in rampup.__all__} - documented_names() == set()
    assert {f"rampup.errors.{name}" for name in errors if name not in rampup.__all__} - documented_names() == set()
    for name in documented_names():
        module, _, own = name.rpartition(".")
        assert getattr(importlib.import_module(module), own).__doc__, name


def test_generated_pages_are_complete():
    """The generated pages name every key, command and published ramp."""
    keys, commands = generator.configuration_keys(), generator.command_line()
    assert [name for name in KEYS if f"`{name}`\n: " not in keys] == []
    assert [name for name in ROLLOUT_KEYS if f"`{name}`\n: " not in generator.rollout_keys()] == []
    assert [name for name in COMMANDS if f"## rampup {name}\n" not in commands] == []
    presets = {path.stem for path in (ROOT / "configs").glob("*.yml")} - {"base", "rl"}
    assert [name for name in presets if f"`{name}`\n" not in generator.presets()] == []


def test_every_generated_part_is_used():
    """Every generator has a page, and every mark on a page has a generator."""
    marks = [mark for page in PAGES for mark in generator.MARK.findall(page.read_text())]
    assert sorted(marks) == sorted(generator.GENERATED)


def test_json_output_is_documented():
    """The page on the JSON output names every key that a command prints."""
    page = (DOCS / "reference" / "json_output.md").read_text()
    recorded = json.loads(gzip.decompress((ROOT / "tests" / "data" / "snapshot.json.gz").read_bytes()))
    missing = set()
    for command in set(recorded) & (set(COMMANDS) | {"diff", "budget", "convert"}):
        for record in recorded[command].values():
            for path in key_paths(record.get("json") or {}):
                if f"`{path[-1]}`" not in page:
                    missing.add(f"{command}: {'.'.join(path)}")
    assert missing == set()


# What is under these keys is named by the user, or belongs to one system or one benchmark.
FREE = {"derived", "changed_keys", "fields", "bytes_per_parameter", "published", "repository", "steps_by_global_batch_size"}
FREE |= {"results", "settings", "a", "b", "sizes"}


def key_paths(value, above=()):
    """Yield the path of every key in a JSON value."""
    if isinstance(value, list):
        for part in value[:1]:
            yield from key_paths(part, above)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in ("not one object", "standard error"):
                yield (*above, key)
                if key not in FREE:
                    yield from key_paths(part, (*above, key))


def test_summary_is_documented():
    """The page on the run folder names every field of the summary."""
    page = (DOCS / "reference" / "json_output.md").read_text()
    printed = set(json.loads(json.dumps([f.name for f in dataclasses.fields(rampup.Summary)])))
    internal = {"metrics", "interrupted", "resumed_from", "state"}
    assert [name for name in sorted(printed - internal) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    """Every relative link of a page leads to a file of the repository."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(((?!https?:|#|mailto:)[^)#\s]+)(?:#[^)]*)?\)", text)
    copied = {DOCS / "tutorials" / path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    broken = [
        link for link in links if not (target := Path(os.path.normpath(page.parent / link))).exists() and target not in copied
    ]
    assert broken == []


def test_every_page_is_in_a_table_of_contents():
    """Every page of docs/ can be reached from a table of contents."""
    entries = set()
    for page in PAGES[1:]:
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            entries |= {(page.parent / line).resolve() for line in block.split("\n") if line and not line.startswith(":")}
    assert [page_id(page) for page in PAGES[2:] if page.with_suffix("") not in entries and page.stem != "index"] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_files_exist(page):
    """Every source file that a page names is in the repository."""
    files = re.findall(r"`((?:tests|rampup|configs|notebooks|docs)/[\w./]+\.\w+)`", page.read_text())
    assert [name for name in files if not (ROOT / name).exists()] == []
