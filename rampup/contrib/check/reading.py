"""What a source sets: a YAML file, or the words of a system's command in a script, in a
manifest or on the command line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_mapping, read_text
from rampup.contrib.check.choice import ask_of_forks, choose
from rampup.contrib.check.launch import PARENT, Launch, Reading
from rampup.contrib.check.launchers import Script, find_scripts
from rampup.contrib.check.shell.script import SCRIPTS, read_commands
from rampup.errors import ConfigError

MIN_MATCHES = 2  # keys that tell whose file it is


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `dotted.key, value` for every leaf of nested mappings."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_leaves(text: str, path: str) -> dict[str, Located]:
    """Return the leaves of a YAML file by dotted key; one that is given twice is
    refused.
    """
    result: dict[str, Located] = {}
    for top, entry in parse_mapping(text, path).items():
        for name, value in flatten({top: entry.value}):
            if name in result:
                raise ConfigError(
                    f"{name} is given twice, first in line {result[name].line}",
                    key=name,
                    path=path,
                    line=entry.line,
                )
            result[name] = Located(value=value, path=path, line=entry.line)
    return result


# A file, or the words of a command.
Source = str | Path | tuple[str, ...]

_YAML_KEY = re.compile(r"^\s*(?:-+)?[A-Za-z_][\w.\-]*\s*:(?:\s|$)", re.MULTILINE)

_COMMAND_WORD = re.compile(r"(?:^|\s)(?:--[A-Za-z]|[A-Za-z_][\w.]*=\S)")

_SHOWN = 60

_UNREAD = dict.fromkeys((".py", ".ipynb"), "a Python program") | dict.fromkeys(
    (".md", ".rst", ".mdx"), "a text with commands in it"
)


def read_source(
    source: Source, overrides: Sequence[str], launch: Launch, *, strict: bool = True
) -> Reading:
    """Read a YAML file, a shell script with those that it starts, or the words of a
    command.

    A name in `overrides` that only the scripts have is one of their variables, and wins
    there. A script without a command that starts the system is an error if `strict`, or
    else sets nothing.
    """
    if isinstance(source, tuple):
        command = Script(shlex.join(source), 0)
        return _read_commands([command], COMMAND_LINE, overrides, launch, strict)
    path, suffix = str(source), Path(source).suffix
    if launch.python is not None and suffix in (".py", ".ipynb"):
        leaves = launch.python(path, overrides)
        recognized = len(leaves) >= MIN_MATCHES
        return Reading(
            path=path, leaves=leaves, overrides=overrides, recognized=recognized
        )
    text = read_text(source)
    if kind := _UNREAD.get(suffix):
        raise ConfigError(
            f"this is {kind}, which is not read",
            fix="paste its command: `rampup check -- COMMAND ...`",
            path=path,
        )
    is_script = text.startswith("#!") or path.endswith(SCRIPTS)
    is_yaml = not is_script and (
        text.lstrip().startswith("{")
        or _YAML_KEY.search(text)
        or not _COMMAND_WORD.search(text)
    )
    scripts = [Script(text)]
    if is_yaml:
        scripts = find_scripts(text, path)
    if scripts:
        return _read_commands(scripts, path, overrides, launch, strict)
    leaves = read_leaves(text, path)
    parents = leaves[PARENT].value if PARENT in leaves else None
    recognized = isinstance(parents, list) and any(
        isinstance(name, str) and name in launch.bases for name in parents
    )
    return Reading(path=path, leaves=leaves, overrides=overrides, recognized=recognized)


def _read_commands(
    scripts: Sequence[Script],
    path: str,
    overrides: Sequence[str],
    launch: Launch,
    strict: bool,
) -> Reading:
    """Read the commands of scripts."""
    settings = [setting.partition("=") for setting in overrides]
    given = {
        name: value
        for name, equals, value in settings
        if equals and name.isidentifier() and not launch.known(name)
    }
    commands = [
        command._replace(devices=script.devices)
        for script in scripts
        for command in read_commands(
            script.text,
            path,
            given,
            launch.program,
            launch.relevant,
            script.line,
            launch.environment,
        )
    ]
    started = {row.script for row in commands if row.script and not row.unread}
    own = [script.text for script in scripts if script.line != 0]
    whole = "\n".join([*own, *map(read_text, started)])
    reading = choose(commands, overrides, launch, path, strict)
    ask_of_forks(reading, launch)
    # A name that the scripts use or set is a variable; the end of a key is none. Those
    # of Slurm count where the script does not name them.
    reading.overrides = [
        setting
        for setting in reading.overrides
        if (name := setting.partition("=")[0]) in reading.leaves
        or name not in given
        or not (name.startswith("SLURM_") or _uses(name, whole))
    ]
    seen = [
        f"{name}={value[:_SHOWN]}"
        for name, value in launch.environment.items()
        if name not in given and re.search(rf"\$\{{?{re.escape(name)}\b", whole)
    ]
    if seen:
        reading.notes.append(f"of this shell's environment: {', '.join(seen)}.")
    return reading


def _uses(name: str, script: str) -> bool:
    """Return whether a script uses a variable, also in arithmetic, or sets it."""
    used = rf"(?:\$\{{?[#!]?|\(\([^)]*(?<![\w.])|\b(?:for|read|export)\s+){name}\b"
    return re.search(rf"{used}|(?<![\w.+/-]){name}\+?=", script) is not None
