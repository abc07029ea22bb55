"""Reference pages that are written from the code: a line `<!-- generated: NAME -->`
becomes the Markdown of GENERATED[NAME].
"""

from __future__ import annotations

import argparse
import ast
import difflib
import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rampup.cli import ALL, make_parser
from rampup.config.files import BASE_FILE, ConfigFile, describe, yaml_value
from rampup.contrib.rl.config import ROLLOUT_FILE

ROOT = Path(__file__).resolve().parents[2]
CONFIGS, EXAMPLES = ROOT / "configs", ROOT / "docs" / "examples"
NOT_PRESETS = ("base", "rl")
# Programs of the gallery: beside NAME.py there is NAME_ramp.py.
PAIRS = {
    "flax/mnist": "MNIST",
    "flax/resnet": "Residual network in linen",
    "flax/minigpt": "MiniGPT with a sharded embedding",
    "flax/vit": "Vision transformer",
    "flax/lora": "LoRA",
    "flax/grpo": "GRPO",
    "ports/nanodo": "A transformer in the style of nanodo",
    "ports/batch_norm": "Batch normalization in NNX",
    "ports/equinox_mlp": "An Equinox model",
    "ports/contrastive": "A contrastive loss",
    "systems/maxtext_train": "MaxText",
    "systems/ray_train": "Ray Train",
}

# The keys that the tutorials and most runs set, in the order in which one meets them.
COMMON = (
    "run_name",
    "steps",
    "batch_size_schedule",
    "enable_rampup_batch_size",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
    "per_device_batch_size",
    "global_rampup_samples",
    "gradient_accumulation_steps",
    "learning_rate",
    "batch_scaling",
    "ici_data_parallelism",
    "ici_fsdp_parallelism",
    "num_pipeline_microbatches",
    "dataset_type",
    "eval_interval",
    "checkpoint_period",
    "measure_gradient_noise",
)


def configuration_keys() -> str:
    """Return every key of base.yml: first the common ones, then the others, folded by
    section.
    """
    common = [line for name in COMMON for line in _key(BASE_FILE, name)]
    return "\n".join(
        [
            "## Keys that most runs set",
            "",
            *common,
            "## All other keys",
            "",
            *_keys(BASE_FILE, COMMON),
        ]
    )


def rollout_keys() -> str:
    """Return every key of rl.yml, folded by section."""
    return "\n".join(_keys(ROLLOUT_FILE, ()))


def _keys(file: ConfigFile, without: tuple[str, ...]) -> list[str]:
    """Return the keys of a file as a list of definitions, in its sections, each of
    which unfolds.
    """
    lines: list[str] = []
    for section in dict.fromkeys(key.section for key in file.keys.values()):
        names = [
            name
            for name, key in file.keys.items()
            if key.section == section and name not in without
        ]
        lines += (
            ["<details>", f"<summary><b>{section}</b>: {len(names)} keys</summary>", ""]
            if names
            else []
        )
        lines += [line for name in names for line in _key(file, name)]
        lines += ["</details>", ""] if names else []
    return lines


def _key(file: ConfigFile, name: str) -> list[str]:
    """Return a key as a definition."""
    key, value, default = file.keys[name], file.values[name], file.defaults[name]
    shown = f"`{yaml_value(default)}`" + (
        f"; `{yaml_value(value)}` in `{file.name}`" if value != default else ""
    )
    # "Text that is not empty" would say nothing.
    values = (
        ""
        if key.kind == "text" and not key.choices
        else f"*Values:* {_escape(key.expected)}. "
    )
    return [
        f"`{name}`",
        f": {_escape(describe(key))}",
        "",
        f"  {values}*Default:* {shown}.",
        "",
    ]


def presets() -> str:
    """Return the published ramps that come with rampup, with the comment at the head of
    each file.
    """
    lines = []
    for path in sorted(CONFIGS.glob("*.yml")):
        if path.stem not in NOT_PRESETS:
            lines += [f"`{path.stem}`", f": {_escape(_head(path))}", ""]
    return "\n".join(lines)


def changed_lines(name: str) -> tuple[int, int]:
    """Return how many lines of a program a ramp adds or changes, and how many it
    removes, without docstring, comments and blanks. A statement or a docstring is one
    line, however it is wrapped.
    """
    trees = (
        ast.parse((EXAMPLES / f"{name}{end}.py").read_text(encoding="utf-8"))
        for end in ("", "_ramp")
    )
    before, after = (
        re.sub(
            r'""".*?"""',
            lambda docstring: " ".join(docstring[0].split()),
            "\n".join(ast.unparse(node) for node in tree.body[1:]),
            flags=re.DOTALL,
        ).splitlines()
        for tree in trees
    )
    signs = [line[0] for line in list(difflib.unified_diff(before, after, n=0))[2:]]
    return signs.count("+"), signs.count("-")


def examples() -> str:
    """Return the difference that a ramp makes to every program of the gallery."""
    lines = []
    for name, title in PAIRS.items():
        files = [EXAMPLES / f"{name}{end}.py" for end in ("", "_ramp")]
        texts = [file.read_text(encoding="utf-8").splitlines() for file in files]
        new, gone = changed_lines(name)
        lines += [
            f"## {title}",
            "",
            f"{new} lines are new or changed, {gone} are gone.",
            "",
            "```diff",
        ]
        lines += [
            *difflib.unified_diff(*texts, *(file.name for file in files), lineterm=""),
            "```",
            "",
        ]
    return "\n".join(lines)


def _head(path: Path) -> str:
    """Return the comment at the head of a file, without the line that every file begins
    with.
    """
    head = re.match(r"(?:#.*\n)+", path.read_text(encoding="utf-8"))
    assert head is not None
    lines = [line.removeprefix("#").strip() for line in head[0].splitlines()]
    return " ".join(line for line in lines if path.name not in line)


def command_line() -> str:
    """Return every command with its usage and options."""
    return "\n".join(line for name in ALL for line in _command(name, make_parser(name)))


def _command(name: str, parser: argparse.ArgumentParser) -> list[str]:
    description = str(parser.description)
    lines = [
        "",
        f"## rampup {name}",
        "",
        description[0].upper() + description[1:].rstrip(".") + ".",
        "",
    ]
    lines += [
        "```text",
        parser.format_usage().rstrip(),
        "```",
        "",
        "| Argument | Meaning |",
        "|---|---|",
    ]
    for action in parser._actions:
        if action.dest in ("help", "json") or action.help == argparse.SUPPRESS:
            continue
        # A column separator ends a cell, also within code.
        name = _argument(action).replace("|", "\\|")
        lines.append(f"| {name} | {_escape(str(action.help))} |")
    return lines


def _argument(action: argparse.Action) -> str:
    """Return an argument as one writes it: `CONFIG.yml`, or `-o FILE, --output
    FILE`.
    """
    value = (
        action.metavar
        if isinstance(action.metavar, str)
        else "|".join(map(str, action.choices or ()))
    )
    if not action.option_strings:
        return f"`{value}`"
    takes_value = action.nargs != 0
    return ", ".join(
        f"`{option} {value}`" if takes_value else f"`{option}`"
        for option in action.option_strings
    )


def _escape(text: str) -> str:
    """Return text in which Markdown sees no column separators, no tags and no
    emphasis.
    """
    return (
        html.escape(text, quote=False)
        .replace("|", "\\|")
        .replace("*", "\\*")
        .replace("$", "\\$")
        .replace("~", "\\~")
    )


GENERATED: dict[str, Callable[[], str]] = {
    "configuration-keys": configuration_keys,
    "rollout-keys": rollout_keys,
    "presets": presets,
    "command-line": command_line,
    "examples": examples,
}
MARK = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)


def fill_in(text: str) -> str:
    """Return a page with its generated parts."""
    return MARK.sub(lambda match: GENERATED[match[1]](), text)


def _on_source_read(app: Any, name: str, source: list[str]) -> None:
    source[0] = fill_in(source[0])


def _skip_field_aliases(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out the fields of a NamedTuple, whose class docstring describes them."""
    return (
        True
        if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
        else None
    )


def setup(app: Any) -> dict[str, Any]:
    """Connect the extension to Sphinx."""
    app.connect("source-read", _on_source_read)
    app.connect("autodoc-skip-member", _skip_field_aliases)
    return {"parallel_read_safe": True}
