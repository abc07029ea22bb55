"""The pages of docs/ and the README: what they show runs, what they list is complete,
and their links lead somewhere.
"""

import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from helpers.snippets import PAGES, ROOT, blocks, generator, run_page
from helpers.tiny import TINY, command_line

import rampup
import rampup.errors
from rampup.cli import ALL, main
from rampup.config.schema import KEYS
from rampup.contrib.rl.config import (
    ROLLOUT_KEYS,
    build_rollout_schedule,
    load_rollout_config,
)

DOCS = ROOT / "docs"
TRAINED = command_line(
    TINY
    | {
        "global_rampup_samples": 20,
        "steps": 60,  # so that the noise scale is known
        "checkpoint_period": 20,
        "measure_gradient_noise": True,
    }
)
TRAINED_RL = (
    "num_batches=1 batch_size=8 rl.num_generations=4 mini_batch_size=8"
    " warm_start_steps=0 num_test_batches=0"
)
# The README runs by default.
WITH_BLOCKS = [
    PAGES[0],
    *(
        pytest.param(page, marks=pytest.mark.notebooks)
        for page in PAGES[1:]
        if blocks(page)
    ),
]


def page_id(page):
    """Return the path of a page in the repository."""
    return str(page.relative_to(ROOT))


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """Work in a folder that has the configurations of the repository and the files that
    pages call yours.
    """
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my.yml").write_text(
        "base_config: configs/base.yml\nper_device_batch_size_increment: 5\n"
    )
    (tmp_path / "my_skyrl.yml").write_text(
        "trainer: {train_batch_size: 64, policy_mini_batch_size: 16}\n"
    )
    keys = (
        "enable_rampup_batch_size: true\nper_device_batch_size:"
        " 8\nper_device_batch_size_start: 2\n"
    )
    (tmp_path / "my_maxtext.yml").write_text(
        f"{keys}per_device_batch_size_increment: 2\nglobal_rampup_samples: 3000\n"
    )
    sizes = "mini_batch_size=4, train_micro_batch_size=1"
    cell = {
        "cell_type": "code",
        "source": "from tunix.rl.grpo.grpo_learner import GRPOConfig\n"
        f"grpo = GRPOConfig(num_generations=2)\nrl = RLTrainingConfig({sizes})\n"
        "mesh = jax.make_mesh((1, 4), ('fsdp', 'tp'))\ndata = source.batch(4)",
    }
    (tmp_path / "grpo_gemma.ipynb").write_text(json.dumps({"cells": [cell]}))
    (tmp_path / "my_config.yaml").write_text(
        "grpo_config: {num_generations: 2}\nrl_training_config: {mini_batch_size: 4}\n"
    )
    (tmp_path / "run_gemma2_2b.sh").write_text(
        "python3 -m tunix.cli.grpo_main my_config.yaml batch_size=8\n"
    )
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=page_id)
def test_page_runs(page, workplace, capsys):
    """The Python blocks and the commands of a page run in their order, and the commands
    print what the page shows.
    """
    run_page(page, lambda: capsys.readouterr().out)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_fits_a_narrow_window(page):
    """What a reader copies from a page has at most 80 columns."""
    wide = []
    for language, text in re.findall(
        r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        if language == "console":  # without what commands print
            text = "".join(re.findall(r"^\$ (?:.*\\\n)*.*\n", text, re.MULTILINE))
        if language != "text":
            wide += [line for line in text.splitlines() if len(line) > 80]
    assert wide == []


def documented_names():
    """Return the names in the autosummary tables of the API reference, with their
    module.
    """
    text, names = (DOCS / "reference" / "api.md").read_text(), set()
    for block in re.findall(r"```\{eval-rst\}\n(.*?)```", text, re.DOTALL):
        module = re.search(r"\.\. currentmodule:: (\S+)", block)[1]
        names |= {
            f"{module}.{name}"
            for name in re.findall(r"^   ([A-Za-z_]\w*)$", block, re.MULTILINE)
        }
    return names


def test_settings_of_the_guide_on_rollouts_are_legal():
    """Each setting in the guide's list plans the shipped configuration."""
    rows = re.findall(
        r"^`([^`]+=[^`]+)`$",
        (DOCS / "guides" / "reinforcement_learning.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) >= 5
    for row in rows:
        build_rollout_schedule(
            load_rollout_config(ROOT / "configs" / "rl.yml", shlex.split(row)), 1
        )


def test_sizes_of_the_guide_are_those_of_the_laws(capsys):
    """What the guide says about a model of 7B parameters and 300B tokens is what the
    command prints.
    """
    page = " ".join((DOCS / "guides" / "how_large_a_batch.md").read_text().split())
    command = ["suggest", "--train-tokens", "300B", "--params", "7B"]
    assert main(command) == 0
    assert (
        re.search(
            r"^.* for 20% more tokens; optimal .*$",
            capsys.readouterr().out,
            re.MULTILINE,
        )[0]
        in page
    )
    assert main([*command, "--json"]) == 0
    laws = json.loads(capsys.readouterr().out)["laws"]
    (pair,) = (law for law in laws if law["name"] == "Step Law")
    assert f"Step Law has {pair['batch_tokens'] / 1e6:.1f}M tokens a step" in page
    assert pair["outside"].split(" and ")[0] in page
    costs = [
        pair["batch_tokens"] / law["batch_tokens_at_overhead"]["100%"]
        for law in laws
        if law["kind"] == "critical"
    ]
    low, high = min(costs), max(costs)
    assert f"costs {low:.0%} to {high:.0%} more tokens" in page
    assert f"{300 * (1 + low):.0f}B to {300 * (1 + high):.0f}B instead of 300B" in page


def test_every_public_name_is_documented():
    """The API reference has every name of `rampup`, every error, and no name that does
    not exist.
    """
    errors = {
        name
        for name, value in vars(rampup.errors).items()
        if inspect.isclass(value) and value.__module__ == "rampup.errors"
    }
    assert {f"rampup.{name}" for name in rampup.__all__} - documented_names() == set()
    assert {
        f"rampup.errors.{name}" for name in errors if name not in rampup.__all__
    } - documented_names() == set()
    for name in documented_names():
        module, _, own = name.rpartition(".")
        assert getattr(importlib.import_module(module), own).__doc__, name


def test_generated_pages_are_complete():
    """The generated pages name every key, command and published ramp. Every generator
    has a page, every mark a generator.
    """
    marks = [
        mark for page in PAGES for mark in generator.MARK.findall(page.read_text())
    ]
    assert sorted(marks) == sorted(generator.GENERATED)
    keys, commands = generator.configuration_keys(), generator.command_line()
    assert [name for name in KEYS if f"`{name}`\n: " not in keys] == []
    assert [
        name for name in ROLLOUT_KEYS if f"`{name}`\n: " not in generator.rollout_keys()
    ] == []
    assert [name for name in ALL if f"## rampup {name}\n" not in commands] == []
    presets = {path.stem for path in (ROOT / "configs").glob("*.yml")} - {"base", "rl"}
    assert [name for name in presets if f"`{name}`\n" not in generator.presets()] == []


def test_the_readme_is_short():
    """The README is short, links to the reference and repeats none of its tables."""
    readme = PAGES[0].read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 170
    assert len(readme.split()) <= 1_800
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)
    assert 0 < (ROOT / picture).stat().st_size < 150_000
    assert "| `steps` |" not in readme
    assert all(
        page in readme
        for page in (
            "docs/reference/configuration.md",
            "docs/reference/command_line.md",
        )
    )


def test_readme_snippet_compiles_once_and_learns(capsys):
    """The complete example prints its loss, its steps and one compilation."""
    namespace = {}
    for language, text in blocks(PAGES[0]):
        if language == "python":
            exec(compile(text, "README.md", "exec"), namespace)
    loss, steps, compilations = capsys.readouterr().out.split()[-3:]
    assert (int(steps), int(compilations)) == (40, 1)
    assert float(loss) < 5


@pytest.mark.parametrize(
    "command",
    [
        "plan configs/base.yml --devices 4",
        "plan configs/base.yml --devices 4 --hyperparameters",
        "plan configs/base.yml --devices 4 --other-devices",
        "plan configs/base.yml --devices 4 --export megatron",
        "plan configs/rl.yml --devices 4",
        "check --from skyrl my_skyrl.yml",
        "check my_skyrl.yml my_config.yaml",
        "check run_gemma2_2b.sh --against grpo_gemma.ipynb",
        "check --from maxtext configs/base.yml",
        "plan configs/base.yml --devices 8 ici_pipeline_parallelism=4 --timetable",
        "suggest --train-tokens 300B --params 7B",
        "explain steps",
        "plan my.yml --devices 4 --fix",
        "plot configs/base.yml -o ramp.png",
        "report configs/base.yml -o ramp.html",
        "plan configs/base.yml steps=0",
    ],
)
def test_json_output_is_documented(command, workplace, capsys):
    """The page on the JSON output names every key that a command prints."""
    main([*shlex.split(command), "--json"])
    assert undocumented(capsys.readouterr().out) == set()


@pytest.mark.slow
def test_json_output_of_runs_is_documented(workplace, capsys):
    """The page on the JSON output names every key that training and the commands on its
    run print.
    """
    train = (
        "train configs/base.yml run_name=run base_output_directory=runs"
        f" {' '.join(TRAINED)}"
    )
    commands = [
        "plan configs/base.yml --rows 3",
        "generate runs/run --prompt a",
        "report runs/run -o run.html",
    ]
    commands += [
        "critical runs/run",
        "design runs/run --train-tokens 1M --assume-growth 0",
        f"train configs/rl.yml {TRAINED_RL}",
    ]
    for command in [train, *commands]:
        assert main([*shlex.split(command), "--json"]) == 0, command
        assert undocumented(capsys.readouterr().out) == set(), command


def undocumented(printed):
    """Return the keys of one JSON object that the page does not name."""
    page = (DOCS / "reference" / "json_output.md").read_text()
    (line,) = printed.splitlines()
    return {
        ".".join(path)
        for path in key_paths(json.loads(line))
        if f"`{path[-1]}`" not in page
    }


# What is under these keys is named by the user, or belongs to one system or one
# benchmark.
FREE = {
    "derived",
    "different",
    "changed_keys",
    "fields",
    "bytes_per_parameter",
    "published",
    "repository",
    "steps_by_global_batch_size",
}
FREE |= {"settings", "rate_rule", "a", "b", "sizes", "step_seconds", "values", "facts"}


def key_paths(value, above=()):
    """Yield the path of every key in a JSON value."""
    if isinstance(value, list):
        for part in value[:1]:
            yield from key_paths(part, above)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield (*above, key)
            if key not in FREE:
                yield from key_paths(part, (*above, key))


def test_summary_is_documented():
    """The page on the run folder names every field of the summary."""
    page = (DOCS / "reference" / "json_output.md").read_text()
    shown = {field.name for field in dataclasses.fields(rampup.loop.Summary)} - {
        "metrics",
        "interrupted",
        "resumed_from",
        "state",
    }
    assert [name for name in sorted(shown) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_named_files_exist(page):
    """Every relative link of a page leads to a file of the repository, as does every
    source file that it names.
    """
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(((?!https?:|#|mailto:)[^)#\s]+)(?:#[^)]*)?\)", text)
    copied = {
        DOCS / "tutorials" / path.name for path in (ROOT / "notebooks").glob("*.ipynb")
    }
    targets = {link: Path(os.path.normpath(page.parent / link)) for link in links}
    assert [
        link
        for link, target in targets.items()
        if not target.exists() and target not in copied
    ] == []
    files = re.findall(
        r"`((?:tests|rampup|configs|launch|notebooks|docs)/[\w./]+\.\w+)`",
        page.read_text(),
    )
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_every_page_is_in_a_table_of_contents():
    """Every page of docs/ can be reached from a table of contents."""
    entries = set()
    for page in PAGES[1:]:
        for block in re.findall(
            r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL
        ):
            entries |= {
                (page.parent / line).resolve()
                for line in block.split("\n")
                if line and not line.startswith(":")
            }
    assert [
        page_id(page)
        for page in PAGES[2:]
        if page.with_suffix("") not in entries and page.stem != "index"
    ] == []
