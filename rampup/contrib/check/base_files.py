"""The base files from which a source starts (Hydra): beside it, beside its program, or
those that the system ships.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.known import with_lines
from rampup.contrib.check.launch import (
    PARENT,
    Launch,
    Reading,
    known_end,
    program_of,
)
from rampup.contrib.check.launchers import option
from rampup.contrib.check.reading import Source, read_leaves, read_source
from rampup.contrib.check.settings import Settings, type_settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import (
    explain_unknown,
    unknown_names,
)
from rampup.errors import ConfigError

SEARCH_PATH = (  # of a command: where Hydra looks for further base files
    "hydra.searchpath"
)

_MAX_FILES = 40

_MAX_FOLDERS = 8


def _base_folders(command: Command, path: str) -> list[Path]:
    """Return where the base file of a command may be: its `--config-path` in a folder
    above, or above its program's folder.
    """
    written = option(command.words, "--config-path", "-cp") or "config"
    folder = Path(known_end(written))
    ends = [folder]
    if folder.is_absolute():  # it may be one of another machine
        ends += [Path(*folder.parts[first:]) for first in range(1, len(folder.parts))]
    ends.append(Path(program_of(command)).parent / folder)
    return [up / end for end in ends for up in Path(path).absolute().parents]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The version of a system that a source is for."""

    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # where they differ from those of its entries
    notes: Sequence[str] = ()  # which it is, and why
    others: tuple[str, ...] = ()  # versions that are possible as well
    is_fork: bool = False  # whether the user has said so
    questions: tuple[ConfigError, ...] = ()  # what must be answered to know it


# From what a source sets, and its keys in base files beside it.
ChooseVersion = Callable[[Reading, Mapping[str, Located]], Version]


def read_hydra(
    source: Source,
    overrides: Sequence[str],
    launch: Launch,
    choose_version: ChooseVersion = lambda *_: Version(),
) -> Settings:
    """Read a YAML file, a script or a command, above the base files that it names; the
    arguments are those of `read_source`.
    """
    chosen: str | None = None
    others: list[str] = []
    for setting in overrides:
        if setting.startswith(f"{PARENT}="):
            chosen = setting.partition("=")[2]
        else:
            others.append(setting)
    reading = read_source(source, others, launch)
    bases = _BaseFiles(launch, reading.path)
    if reading.command is not None:
        bases.start(reading.command, chosen)
    elif PARENT in reading.leaves:
        bases.follow(reading.leaves[PARENT], Path(reading.path).parent)
    own = {name: value for name, value in reading.leaves.items() if name != PARENT}
    reading.leaves = bases.beside | own
    reading.recognized |= bool(bases.named)
    version = choose_version(reading, bases.beside)
    reading.questions += version.questions
    known_keys = launch.known_keys
    settings = type_settings(reading, launch, {**version.defaults, **bases.shipped})
    notes = [*settings.notes, *version.notes]
    if reading.command is None:
        groups = tuple({f"{name.partition('.')[0]}." for name in known_keys.lives})
        own = {
            name: at
            for name, at in reading.leaves.items()
            if name.startswith(groups)
            and known_keys.life(name) is None
            and name not in launch.entries
        }
        if named := ", ".join(with_lines(own)[:4]):
            notes.append(
                f"no version of {launch.system} has {named}: a fork's, or another"
                " trainer's, whose rules may differ."
            )
    if bases.named:
        notes.append(
            f"{', '.join(bases.named)}: the sizes of"
            f" {launch.system}{launch.version and f' of {launch.version}'}."
        )
    if bases.missing and (reading.command is None or bases.beside):
        notes.append(
            f"defaults: {', '.join(bases.missing)} not found beside this file; what it"
            " sets is not read."
        )
    if SEARCH_PATH in reading.leaves:
        notes.append(
            f"{SEARCH_PATH} adds base files, which are not read: keys that only they"
            " have are not checked."
        )
    looked = looked_up(reading, bases.beside)
    own_answers = [
        name
        for name in reading.answered - launch.entries.keys()
        if known_keys.life(name) is None
    ]
    if launch.keys and (version.is_fork or own_answers):
        foreign = [name for name in looked if known_keys.life(name) is None]
        if foreign:
            notes.append(
                f"a fork: {', '.join(foreign)} are taken as keys of its own that change"
                " no size."
            )
        looked = {}
    return dataclasses.replace(
        settings, looked_up=looked, other_versions=version.others, notes=tuple(notes)
    )


def looked_up(
    reading: Reading, beside: Mapping[str, Located] = MappingProxyType({})
) -> dict[str, Located]:
    """Return the keys of a command that Hydra looks up in its base file: without `+`,
    and not answered for by the user.
    """
    if reading.command is None or SEARCH_PATH in reading.leaves:
        return {}
    others = reading.written("+", "++", "~") | reading.answered | beside.keys()
    is_key = re.compile(r"(?!hydra\.)[^@/]*\.[^@/]*")
    return {
        name: value
        for name, value in reading.leaves.items()
        if name not in others and is_key.fullmatch(name)
    }


class _BaseFiles:
    """The base files from which a source starts."""

    def __init__(self, launch: Launch, path: str) -> None:
        self.launch = launch
        self.path = path  # the source
        self.beside: dict[
            str, Located
        ] = {}  # the keys of files beside the source or the program, which count as given
        self.shipped: dict[str, Any] = {}  # those of files that the system ships
        self.named: list[str] = []  # the shipped files
        self.missing: list[str] = []
        self.count = 0  # of files

    def start(self, command: Command, chosen: str | None) -> None:
        """Read the base file that the user or a command names, or else that of its
        program.
        """
        launch, path = self.launch, self.path
        name = (
            option(command.words, "--config-name", "-cn") if chosen is None else chosen
        )
        beside = _program_folders(command, path)
        if name is not None:
            folders = [*_base_folders(command, path), *beside]
            self.add(name, [Path(path).parent, *folders], path)
            return
        text = " ".join(command.words)
        part = next((part for part in launch.programs if part and part in text), "")
        default = launch.programs.get(part, "")
        if part or any((folder / f"{default}.yaml").is_file() for folder in beside):
            self.add(default, beside, path)
        else:
            self.shipped |= launch.bases.get(default, {})

    def follow(self, defaults: Located, folder: Path, package: str = "") -> None:
        """Read what a `defaults` list names, in order; its keys go below the
        package.
        """
        for item in defaults.value if isinstance(defaults.value, list) else []:
            if isinstance(item, Mapping):
                for group, choice in item.items():
                    name = group.removeprefix("override ").removeprefix("optional ")
                    if name in self.launch.entries and choice is not None:
                        self.shipped[name] = choice
                    elif isinstance(choice, str):
                        place, _, below = name.partition("@")
                        below = (
                            (below or place.rpartition("../")[2])
                            .replace("_global_", "")
                            .replace("/", ".")
                        )
                        below = ".".join(filter(None, (package, below)))
                        self.add(
                            f"{place}/{choice}",
                            [folder],
                            defaults.path,
                            package=below,
                            required=False,
                        )
            elif isinstance(item, str) and item != "_self_":
                self.add(item, [folder], defaults.path, package=package, required=False)

    def add(
        self,
        name: str,
        folders: Sequence[Path],
        path: str,
        *,
        package: str = "",
        required: bool = True,
    ) -> None:
        """Read a base file in one of the folders, or else take the shipped one."""
        name = name.strip("'\"").removesuffix(".yaml").removesuffix(".yml")
        if unknown := unknown_names(name):
            raise ConfigError(
                f"{explain_unknown(name)}, its base file; add {unknown[0]}=...",
                path=path,
            )
        self.count += 1
        if self.count > _MAX_FILES:
            raise ConfigError(
                f"more than {_MAX_FILES} base files; do they name each other?",
                key=PARENT,
                path=path,
            )
        for folder in folders:
            file = folder / f"{name}.yaml"
            if file.is_file() and str(file) != path:
                found = read_leaves(read_text(file), str(file))
                if PARENT in found:
                    self.follow(found.pop(PARENT), file.parent, package)
                for key, value in found.items():
                    self.beside[f"{package}.{key}" if package else key] = value
                return
        if name in self.launch.bases:
            self.named.append(name)
            self.shipped.update(self.launch.bases[name])
        elif not required:
            self.missing.append(name)
        else:
            said = (
                f"the base file {name}.yaml is neither beside this file nor one that is"
                " known; put it into this folder"
            )
            if self.launch.programs:
                said += (
                    f", or start from a known one ({PARENT}={self.launch.programs['']})"
                    " and add its sizes as key=value"
                )
            raise ConfigError(said, key=PARENT, path=path)


def repository_folders(path: str) -> list[Path]:
    """Return the folders above a file, up to the root of its repository."""
    folders = list(Path(path).absolute().parents)[:_MAX_FOLDERS]
    for number, folder in enumerate(folders, start=1):
        if (folder / ".git").exists():
            return folders[:number]
    return folders


def find_in_repository(path: str, place: str) -> list[Path]:
    """Return what is at a place in the folders above a file, or in a copy of the system
    within its repository.
    """
    folders = repository_folders(path)
    is_repository = (folders[-1] / ".git").exists()
    found: list[Path] = []
    for up in folders:
        found.append(up / place)
        if is_repository or up == folders[0]:
            found += sorted(up.glob(f"*/{place}"))
    return [file for file in found if file.exists()]


def _program_folders(command: Command, path: str) -> list[Path]:
    """Return the folders of a program's base files that are there: `config` beside it,
    from the script upwards.
    """
    program = program_of(command)
    if "/" not in program.strip("/"):
        return []
    place = str(Path(program.lstrip("/")).parent / "config")
    return find_in_repository(path, place)
