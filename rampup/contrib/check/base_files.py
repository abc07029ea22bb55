"""The base files from which a source starts: beside it, in its repository, or those that
the system ships; and how Hydra reads them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, read_text
from rampup.contrib.check.known import with_lines
from rampup.contrib.check.launch import Launch, Reading, known_end, program_of
from rampup.contrib.check.launchers import option
from rampup.contrib.check.reading import Source, read_leaves, read_source
from rampup.contrib.check.settings import Settings, rename, type_settings
from rampup.contrib.check.shell.script import Command
from rampup.contrib.check.shell.values import (
    explain_unknown,
    show_unknown,
    unknown_names,
)
from rampup.errors import ConfigError

# Of a command: where Hydra looks for further base files.
SEARCH_PATH = "hydra.searchpath"

_MAX_FILES = 40

_MAX_FOLDERS = 8


class BaseFiles:
    """The base files from which a source starts."""

    def __init__(self, launch: Launch, source: Reading) -> None:
        self.launch = launch
        self.source = source
        # The keys of files that are there, which count as given; an upper file wins.
        self.beside: dict[str, Located] = {}
        self.files: list[Path] = []  # those files
        self.shipped: dict[str, Any] = {}  # the keys of files that the system ships
        self.named: list[str] = []  # those files
        self.missing: list[str] = []

    def follow(self, parents: Located, package: str = "") -> None:
        """Read what the key of a file that names its base files says: one that must be
        there, or a list, in its order. Their keys go below the package.
        """
        folder = Path(parents.path).parent
        if isinstance(parents.value, list):
            for name, below in self._choices(parents.value, package):
                if not self.add(name, [folder / f"{name}.yaml"], parents.path, below):
                    self.missing.append(name)
        elif isinstance(parents.value, str) and parents.value.strip():
            name = parents.value
            files = [folder / name]
            if parents.path != COMMAND_LINE:
                files += _find_end(parents.path, name)
            if not self.add(name, files, parents.path):
                raise self.unknown(show_unknown(name), parents)

    def _choices(
        self, defaults: Sequence[Any], package: str
    ) -> Iterator[tuple[str, str]]:
        """Yield the files of a `defaults` list and the packages of their keys; the
        choice of a known key is its value.
        """
        for item in defaults:
            if isinstance(item, Mapping):
                for group, choice in item.items():
                    name = group.removeprefix("override ").removeprefix("optional ")
                    if name in self.launch.entries and choice is not None:
                        self.shipped[name] = choice
                    elif isinstance(choice, str):
                        place, _, below = name.partition("@")
                        below = below or place.rpartition("../")[2]
                        below = below.replace("_global_", "").replace("/", ".")
                        yield (
                            f"{place}/{choice}",
                            ".".join(filter(None, (package, below))),
                        )
            elif isinstance(item, str) and item != "_self_":
                yield item, package

    def add(
        self, name: str, files: Iterable[Path], path: str, package: str = ""
    ) -> bool:
        """Read the first of some files that is there and is not `path`, or else take the
        shipped one of that name; return whether there is one.
        """
        last = PurePosixPath(name).name
        if unknown := unknown_names(last):
            raise ConfigError(
                f"{explain_unknown(last)}, its base file; add {unknown[0]}=...",
                path=path,
            )
        for file in files:
            if file.is_file() and str(file) != path:
                text = read_text(file)
                # a key of rampup's own base.yml, within a copy of rampup
                if "\nlearning_rate_clock:" not in text:
                    self._read(file, text, package)
                    return True
        for shipped, keys in self.launch.bases.items():
            # MaxText's have a suffix, and other folders in other versions.
            path_of = PurePosixPath(shipped)
            if name == shipped or (path_of.suffix and path_of.name == last):
                self.named.append(shipped)
                self.shipped |= keys
                return True
        return False

    def _read(self, file: Path, text: str, package: str) -> None:
        if len(self.files) == _MAX_FILES:
            raise ConfigError(
                f"more than {_MAX_FILES} base files; do they name each other?",
                key=self.launch.parent,
                path=self.source.path,
            )
        self.files.append(file)
        leaves = read_leaves(text, str(file))
        if self.launch.parent in leaves:
            self.follow(leaves.pop(self.launch.parent), package)
        prefix = package and f"{package}."
        below = {f"{prefix}{key}": value for key, value in leaves.items()}
        found = dataclasses.replace(self.source, path=str(file), leaves=below)
        self.beside |= rename(found, self.launch).leaves

    def unknown(self, name: str, place: Located) -> ConfigError:
        """Return the refusal of a base file that is nowhere."""
        fix = "put it there"
        if self.launch.bases:
            first = next(iter(self.launch.bases))
            fix += f", or add {self.launch.parent}={first} for its defaults"
        return ConfigError(
            f"the base file {name} is neither beside this file nor one that"
            f" {self.launch.system} ships",
            fix=fix,
            key=self.launch.parent,
            path=place.path,
            line=place.line,
        )


def read_bases(
    source: Source,
    overrides: Sequence[str],
    launch: Launch,
    start: Callable[[BaseFiles, Command, str], None],
) -> BaseFiles:
    """Read a YAML file, a script or a command, and return it with the base files that
    it names; the keys of those that are there count as its own.

    `start` reads the base file of a command; it is given that which the user chooses,
    or an empty text.
    """
    sign = f"{launch.parent}="
    chosen = [text.removeprefix(sign) for text in overrides if text.startswith(sign)]
    others = [text for text in overrides if not text.startswith(sign)]
    reading = rename(read_source(source, others, launch), launch)
    bases = BaseFiles(launch, reading)
    own = dict(reading.leaves)
    parents = own.pop(launch.parent, None)
    if reading.command is not None:
        start(bases, reading.command, "".join(chosen[-1:]))
    elif chosen:
        bases.follow(Located(value=chosen[-1], path=reading.path))
    elif parents is not None:
        bases.follow(parents)
    reading.leaves = bases.beside | own
    reading.recognized |= bool(bases.named)
    return bases


def start_hydra(bases: BaseFiles, command: Command, chosen: str) -> None:
    """Read the base file that the user or a command names, or else that of its
    program.
    """
    launch, path = bases.launch, bases.source.path
    name = chosen or option(command.words, "--config-name", "-cn")
    folder = PurePosixPath(program_of(command).lstrip("/")).parent
    if name is not None:
        name = name.removesuffix(".yaml").removesuffix(".yml")
        file = f"{name}.yaml"
        place = option(command.words, "--config-path", "-cp") or "config"
        here = Path(path).parent
        files = [here / file, here / place / file, *_find_end(path, f"{place}/{file}")]
        files += find_in_repository(path, f"{folder}/{known_end(place)}/{file}")
        if not bases.add(name, files, path):
            raise bases.unknown(file, Located(value=name, path=path))
        return
    text = " ".join(command.words)
    part = next((part for part in launch.programs if part in text), "")
    default = launch.programs.get(part, "")
    files = []
    if folder.name:  # they are in `config` beside the program
        files = find_in_repository(path, f"{folder}/config/{default}.yaml")
    if part or files:
        bases.add(default, files, path)
    else:
        bases.shipped |= launch.bases.get(default, {})


def read_hydra(source: Source, overrides: Sequence[str], launch: Launch) -> Settings:
    """Read a source above its base files; the arguments are those of `read_source`."""
    bases = read_bases(source, overrides, launch, start_hydra)
    return type_above(bases, looked_up(bases))


def type_above(
    bases: BaseFiles,
    looked: Mapping[str, Located],
    defaults: Mapping[str, Any] = MappingProxyType({}),
    notes: Sequence[str] = (),
) -> Settings:
    """Return the typed values of a source above its base files, and those above the
    defaults of its version, of which the notes tell. `looked` are the keys that the
    system looks up in its base file.
    """
    reading, launch = bases.source, bases.launch
    known_keys = launch.known_keys
    settings = type_settings(reading, launch, {**defaults, **bases.shipped})
    said = [*settings.notes, *notes, *_notes_of(bases, looked)]
    own_answers = [
        name
        for name in reading.answered - launch.entries.keys()
        if known_keys.life(name) is None
    ]
    if launch.keys and (reading.is_fork or own_answers):
        foreign = [name for name in looked if known_keys.life(name) is None]
        if foreign:
            said.append(
                f"a fork: {', '.join(foreign)} are taken as keys of its own that change"
                " no size."
            )
        looked = {}
    return dataclasses.replace(settings, looked_up=looked, notes=tuple(said))


def _notes_of(bases: BaseFiles, looked: Mapping[str, Located]) -> Iterator[str]:
    """Yield which keys no version has, if no rule looks them up, and which base files
    were read or not.
    """
    reading, launch = bases.source, bases.launch
    if reading.command is None:
        known = launch.known_keys
        groups = tuple({f"{name.partition('.')[0]}." for name in known.lives})
        own = {
            name: at
            for name, at in reading.leaves.items()
            if name.startswith(groups)
            and known.life(name) is None
            and name not in launch.entries
            and name not in looked
        }
        if named := ", ".join(with_lines(own)[:4]):
            yield (
                f"no version of {launch.system} has {named}: a fork's, or another"
                " trainer's, whose rules may differ."
            )
    if bases.files and reading.command is not None:
        yield f"{bases.files[0].resolve()}: its base file, which is read."
    if bases.named:
        yield (
            f"{', '.join(bases.named)}: the sizes of"
            f" {launch.system}{launch.version and f' of {launch.version}'}."
        )
    if bases.missing and (reading.command is None or bases.beside):
        yield (
            f"defaults: {', '.join(bases.missing)} not found beside this file; what it"
            " sets is not read."
        )
    if SEARCH_PATH in reading.leaves:
        yield (
            f"{SEARCH_PATH} adds base files, which are not read: keys that only they"
            " have are not checked."
        )


def looked_up(bases: BaseFiles) -> dict[str, Located]:
    """Return the keys of a command that Hydra looks up in its base file: without `+`,
    and not answered for by the user.
    """
    reading = bases.source
    if reading.command is None or SEARCH_PATH in reading.leaves:
        return {}
    others = reading.written("+", "++", "~") | reading.answered | bases.beside.keys()
    is_key = re.compile(r"(?!hydra\.)[^@/]*\.[^@/]*")
    return {
        name: value
        for name, value in reading.leaves.items()
        if name not in others and is_key.fullmatch(name)
    }


def find_in_repository(path: str, place: str) -> list[Path]:
    """Return what is at a place in the folders above a file, up to the root of its
    repository, or in a copy of the system within that.
    """
    folders = list(Path(path).absolute().parents)[:_MAX_FOLDERS]
    copies: list[Path] = []
    for number, folder in enumerate(folders, start=1):
        if (folder / ".git").exists():
            folders = folders[:number]
            copies = [file for up in folders for file in sorted(up.glob(f"*/{place}"))]
            break
    beside = [up / place for up in folders]
    return [file for file in (*beside, *copies) if file.exists()]


def _find_end(path: str, place: str) -> list[Path]:
    """Return what is in the repository of a file at a place, or at the end of it: the
    folders before may be those of another machine.
    """
    parts = known_end(place).strip("/").split("/")
    ends = ["/".join(parts[first:]) for first in range(max(len(parts) - 1, 1))]
    return [file for end in ends for file in find_in_repository(path, end)]
