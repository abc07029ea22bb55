"""Files and commands of systems that use Hydra: `defaults:`, `--config-name`, and the base files that a system ships."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rampup.config.yaml import Located, parse_mapping, read_text
from rampup.dialects.commands import Launch, Source, option, read_source
from rampup.dialects.reading import Settings, read_leaves, type_settings
from rampup.dialects.script import show_unknown, unknown_names
from rampup.errors import ConfigError

# In a table of base files: the name of the file that another one starts from.
PARENT = "defaults"
_MAX_FILES = 20


def read_hydra(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a YAML file, a script or a command, above the base files that it names; the arguments are those of `read_source`.

    Raises:
        ConfigError: see `type_settings`; or the source names a base file that is neither beside it nor in `launch.bases`.
    """
    reading = read_source(source, overrides, launch).rename(launch.canonical)
    files = _Bases(launch)
    leaves, path = dict(reading.leaves), reading.path
    if reading.command is not None:
        name = option(reading.command, "--config-name", "-cn")
        if name is not None and not isinstance(source, tuple):
            folder = option(reading.command, "--config-path", "-cp") or "config"
            if unknown_names(folder):  # such as the folder of the script; the path within it counts
                folder = show_unknown(folder).rpartition("$")[2].partition("/")[2]
            files.add(name, [Path(source).parent, *(up / folder for up in Path(source).absolute().parents)], path)
        elif name is not None:
            files.add(name, [Path(), Path(option(reading.command, "--config-path", "-cp") or "config")], path)
        elif part := next((part for part in launch.programs if any(part in word for word in reading.command.words)), ""):
            files.add(launch.programs[part], [], path)
        else:
            files.shipped |= launch.bases.get(launch.programs.get("", ""), {})
    elif "defaults" in leaves and not isinstance(source, tuple):
        files.follow(leaves.pop("defaults"), Path(source).parent)
    reading = dataclasses.replace(
        reading, leaves={**files.beside, **leaves}, recognized=reading.recognized or bool(files.named)
    )
    settings = type_settings(reading, launch.entries, system=launch.system, defaults=files.shipped, groups=launch.groups)
    notes = [*settings.notes]
    if files.named:
        notes.append(f"{', '.join(files.named)}: the sizes of {launch.system}{launch.version and f' of {launch.version}'}.")
    if files.missing and reading.command is None:
        notes.append(f"defaults: {', '.join(files.missing)} not found beside this file; what it sets is not read.")
    return dataclasses.replace(settings, notes=tuple(notes))


class _Bases:
    """The base files of a source: those beside it, which count as given, and those that the system ships."""

    def __init__(self, launch: Launch) -> None:
        self.bases, self.entries, self.canonical = launch.bases, launch.entries, launch.canonical
        self.beside: dict[str, Located] = {}
        self.shipped: dict[str, Any] = {}
        self.named: list[str] = []  # the shipped ones
        self.missing: list[str] = []
        self.left = _MAX_FILES

    def follow(self, defaults: Located, folder: Path) -> None:
        """Read what a `defaults` list names, in order."""
        for item in defaults.value if isinstance(defaults.value, list) else []:
            if isinstance(item, Mapping):
                for group, choice in item.items():
                    name = group.removeprefix("override ").removeprefix("optional ")
                    if name in self.entries and choice is not None:
                        self.shipped[name] = choice
                    elif isinstance(choice, str):
                        place, _, package = name.partition("@")
                        self.add(f"{place}/{choice}", [folder], defaults.path, package=package or place, required=False)
            elif isinstance(item, str) and item != "_self_":
                self.add(item, [folder], defaults.path, required=False)

    def add(self, name: str, folders: Sequence[Path], path: str, *, package: str = "", required: bool = True) -> None:
        """Read a base file in one of the folders, or else take the shipped one.

        Raises:
            ConfigError: there is neither.
        """
        name = name.strip("'\"").removesuffix(".yaml").removesuffix(".yml")
        if unknown := unknown_names(name):
            raise ConfigError(f"the script does not say what ${unknown[0]} is, its base file; add {unknown[0]}=...", path=path)
        self.left -= 1
        if self.left < 0:
            raise ConfigError(f"more than {_MAX_FILES} base files; do they name each other?", key=PARENT, path=path)
        for folder in folders:
            file = folder / f"{name}.yaml"
            if file.is_file() and str(file) != path:
                repeated: dict[str, int] = {}
                leaves = read_leaves(parse_mapping(read_text(file), str(file), repeated=repeated), repeated)
                if PARENT in leaves:
                    self.follow(leaves.pop(PARENT), file.parent)
                prefix = f"{package.replace('/', '.')}." if package and package != "_global_" else ""
                self.beside |= {self.canonical(prefix + key): value for key, value in leaves.items()}
                return
        if name in self.bases:
            own = dict(self.bases[name])
            if (parent := own.pop(PARENT, None)) is not None:
                self.add(parent, [], path)
            self.named.append(name)
            self.shipped |= own
        elif not required:
            self.missing.append(name)
        else:
            raise ConfigError(
                f"the base file {name}.yaml is neither beside this file nor one that is known; put it into this folder",
                key=PARENT,
                path=path,
            )
