"""What a source sets: a file, or the words of a system's command in a script or on the
command line, above its base files.

Keys are dotted and typed, with the system's defaults, and with an error for a key that
looks misspelt.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rampup.config.key import Key, Kind
from rampup.config.load import COMMAND_LINE
from rampup.config.yaml import Located, parse_mapping, parse_scalar, read_text
from rampup.contrib.check.known import (
    MULTIPLIES,
    Unread,
    find_questions,
    find_unread,
    load_known_keys,
    load_table,
    sections_of,
    with_lines,
)
from rampup.contrib.check.launchers import Container, find_containers
from rampup.contrib.check.shell.script import SCRIPTS, Command, read_commands
from rampup.contrib.check.shell.values import (
    ARGUMENT,
    MARKER,
    OPTIONS,
    explain_unknown,
    show_unknown,
    unknown_names,
)
from rampup.errors import ConfigError, RampupError, raise_together

_REFERENCE = re.compile(
    r"\$\{(?:oc\.select:|oc\.env:)?\s*(\.*[A-Za-z_][\w.]*)\s*(?:[,:]\s*([^{}]*))?\}"
)
_MAX_HOPS = 20
MIN_MATCHES = 2  # keys that tell whose file it is
# What users state of a run beside its file; it does not tell whose file it is.
FACTS = frozenset({
    "num_prompts", "num_processes", "num_devices", "world_size", "data_parallel_size", "at_step", "at_samples",
})  # fmt: skip
# A name at least this similar to a longer one is a misspelling of it.
_SIMILAR = 0.93
_MIN_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A key of another system that its batch arithmetic depends on."""

    key: Key
    default: Any  # that system's default
    unit: str = ""  # the unit of a count: prompts, samples, tokens, devices, ...
    # True if the numbers of a step are known without it, so that a script may leave it
    # open
    optional: bool = False


def entry(
    default: Any,
    doc: str,
    *,
    kind: Kind = "int",
    unit: str = "",
    optional: bool = False,
    **limits: Any,
) -> Entry:
    """Return an `Entry`; `limits` are those of `Key`."""
    nullable = limits.pop("nullable", default is None)
    limits |= {
        name: tuple(limits[name]) for name in {"choices", "also"} & limits.keys()
    }
    key = Key(kind=kind, doc=doc, section="", nullable=nullable, **limits)
    return Entry(key=key, default=default, unit=unit, optional=optional)


def load_entries(system: str) -> dict[str, Entry]:
    """Return the keys that the rules of a system read: the table `SYSTEM_sizes.yml`
    beside this module.
    """
    return {name: entry(**row) for name, row in load_table(system, "sizes").items()}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a source sets."""

    path: str  # the name of the source, for errors
    leaves: Mapping[
        str, Located
    ]  # the value of each dotted key; a text may contain markers of what a script does not say
    overrides: Sequence[
        str
    ] = ()  # `key=value` settings that are no variables of the script; they win over `leaves`
    command: Command | None = (
        None  # the command that was read, in a script or on the command line
    )
    repeated: Mapping[str, int] = field(
        default_factory=dict
    )  # keys that are set twice, with the line of the second
    notes: tuple[str, ...] = ()  # which command was read
    # whether its command starts the system, or it names one of its base files
    recognized: bool = False
    # what must be answered before the numbers are known; raised with all other problems
    questions: tuple[ConfigError, ...] = ()
    # whether its program is none of the system's own, and the user has said that it
    # follows the rules
    is_fork: bool = False
    # The files that were read for it: scripts that it starts, and base files.
    files: frozenset[str] = frozenset()

    def written(self, *signs: str) -> set[str]:
        """Return the keys that the command writes with one of Hydra's signs."""
        words = () if self.command is None else self.command.words
        return {
            match[2]
            for word in words
            if (match := _SETTING.fullmatch(word)) and match[1] in signs
        }

    def rename(self, canonical: Callable[[str], str]) -> Reading:
        """Return the same with the canonical names of keys; two names of one with
        different values are refused.
        """
        leaves: dict[str, Located] = {}
        for name, value in self.leaves.items():
            known = canonical(name)
            before = leaves.get(known, value).value
            if before != value.value:
                said = (
                    f"{known} is given twice, as {before!r} and as {value.value!r}"
                    f" ({name}); leave one out"
                )
                raise ConfigError(said, key=known, path=value.path, line=value.line)
            leaves[known] = value
        settings = [setting.partition("=") for setting in self.overrides]
        overrides = [
            f"{canonical(name)}{equals}{text}" for name, equals, text in settings
        ]
        return dataclasses.replace(self, leaves=leaves, overrides=overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a file, by dotted key."""

    values: Mapping[str, Any]  # the value of each known key, or its default
    given: frozenset[str] = (
        frozenset()
    )  # the known keys that the file or the command line sets
    others: Mapping[str, Located] = field(
        default_factory=dict
    )  # all other keys of the file
    # The keys that the system looks up in its base file, and refuses if they are not
    # there. Not those of `key=value` settings.
    looked_up: Mapping[str, Located] = field(default_factory=dict)
    other_versions: tuple[
        str, ...
    ] = ()  # versions of the system that are possible beside the one of the rules
    notes: tuple[str, ...] = ()  # remarks of the reader
    files: frozenset[str] = frozenset()  # as in `Reading`

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_value(self, name: str, value: Any) -> Settings:
        """Return the settings with one more key given."""
        return dataclasses.replace(
            self, values={**self.values, name: value}, given=self.given | {name}
        )

    def describe(self, name: str) -> str:
        """Return `key = value` for the table of meanings; a default is marked."""
        value = self.values[name]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        shown = f"{value:,}" if is_number else "null" if value is None else value
        return f"{name} = {shown}" + ("" if name in self.given else " (default)")


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `dotted.key, value` for every leaf of nested mappings."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_leaves(text: str, path: str) -> tuple[dict[str, Located], dict[str, int]]:
    """Return the leaves of a YAML file by dotted key, and those that it gives twice,
    with the line of the second.
    """
    result: dict[str, Located] = {}
    repeated: dict[str, int] = {}
    for top, entry in parse_mapping(text, path, repeated=repeated).items():
        for name, value in flatten({top: entry.value}):
            if name in result:
                repeated[name] = entry.line or 0
            result[name] = Located(value=value, path=entry.path, line=entry.line)
    return result, repeated


def type_settings(
    reading: Reading, launch: Launch, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Settings:
    """Return the typed values of a reading's keys, above those of a base file in
    `defaults`; references are resolved.

    Refused, all at once, are keys that are mistyped, misspelt, given twice, open, or
    unknown sizes; and a reading that sets no key of the system.
    """
    entries, system = launch.entries, launch.system
    chosen = _read_overrides(reading, launch)
    given = {**reading.leaves, **chosen}
    known = entries.keys() & given
    of_system = known & (reading.leaves.keys() | (chosen.keys() - FACTS))
    if not (reading.recognized or of_system or _find_mappings(reading.leaves, entries)):
        raise_together(list(_find_misspelt(reading.leaves, entries)))
        said = (
            f"not a file of {system}: it sets none of its batch keys, such as"
            f" {', '.join(list(entries)[:3])}"
        )
        raise ConfigError(said, key="from", path=reading.path)
    problems: list[RampupError] = [*reading.questions]
    problems += _find_doubles(reading, entries.keys() - chosen.keys())
    written = {key: at for key, at in reading.leaves.items() if key not in chosen}
    problems += _find_mappings(written, entries)
    problems += _find_misspelt(given, entries)
    if launch.keys:
        problems += find_questions(
            {name: value for name, value in given.items() if name not in entries},
            launch.unread,
            load_known_keys(launch.keys),
            system,
            launch.decides or _decides(entries),
            launch.repeats,
        )
    notes = [*reading.notes]
    notes += [
        f"{said}: the rules do not follow it."
        for _, said, _ in find_unread(given, launch.unread, asks=False)
    ]
    path = f"a base file of {system}"
    located = {name: Located(value=at, path=path) for name, at in defaults.items()}
    located |= given
    values = {name: entry.default for name, entry in entries.items()}
    for name in [name for name in entries if name in located]:
        place = located[name]
        try:
            value = resolve_reference(place.value, name, located, values)
            if isinstance(value, str) and unknown_names(value):
                question = _ask_for(name, value)
                if not entries[name].optional:
                    raise question
                notes.append(
                    f"{question}. The numbers of a step are the same without it."
                )
                known.discard(name)
            else:
                values[name] = entries[name].key.convert(name, value)
        except ConfigError as error:
            problems.append(
                ConfigError(
                    str(error),
                    key=name,
                    nearest=error.nearest,
                    path=place.path,
                    line=place.line,
                )
            )
    raise_together(problems)
    notes += _idle_devices(reading.command, launch, values)
    notes += [
        f"{name} is given twice, again in line {line}; the last one counts."
        for name, line in reading.repeated.items()
        if name not in entries
    ]
    others = {name: value for name, value in located.items() if name not in entries}
    return Settings(
        values=values,
        given=frozenset(known),
        others=others,
        notes=tuple(notes),
        files=reading.files | {place.path for place in reading.leaves.values()},
    )


def _find_doubles(reading: Reading, keys: Set[str]) -> Iterator[ConfigError]:
    """Yield an error for each of some keys that a file gives twice."""
    for name, line in reading.repeated.items():
        if name in keys:
            yield ConfigError(
                f"{name} is given twice",
                fix=f"choose one with {name}=...",
                key=name,
                path=reading.path,
                line=line,
            )


def _ask_for(name: str, value: str) -> ConfigError:
    """Return the question for a value with unknown parts, with the `key=value` that
    would settle it.
    """
    variables = [word for word in unknown_names(value) if word.isidentifier()]
    settle = f"{name}=..."
    if variables:
        settle = f"{variables[0]}=..., or {settle}"
    why = explain_unknown(value)
    if ARGUMENT in value or re.search(r"\$\{?\d", why):
        settle += (
            ", or the script's arguments: `rampup check ... -- bash FILE ARGUMENTS`"
        )
    return ConfigError(
        f"{name}={show_unknown(value)[:100]}: {why}", fix=f"add {settle}", key=name
    )


def _idle_devices(
    command: Command | None, launch: Launch, values: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a note on devices that a script makes visible and that the run leaves
    idle.
    """
    if command is None or not launch.per_host:
        return
    visible = command.environment.get("CUDA_VISIBLE_DEVICES", "")
    count, used = len(visible.split(",")), values[launch.per_host]
    if re.fullmatch(r"\d+(,\d+)+", visible) and used and used < count:
        yield (
            f"the script makes {count:,} devices visible and the run takes {used:,}"
            f" ({launch.per_host}): {count - used:,} stay idle."
        )


def _decides(entries: Mapping[str, Entry]) -> re.Pattern[str]:
    """Return what matches the last part of a fork's key that may be a size."""
    sizes = [
        re.escape(name.rpartition(".")[2])
        for name, entry in entries.items()
        if entry.unit in ("prompts", "samples", "devices", "nodes")
    ]
    return re.compile("|".join([*sizes, MULTIPLIES.pattern]))


def _read_overrides(reading: Reading, launch: Launch) -> dict[str, Located]:
    """Return `key=value` settings of any key of the source or the system: of its
    entries, or with the first part of one.
    """
    entries = launch.entries
    groups = {
        *launch.groups,
        *(name.partition(".")[0] for name in entries if "." in name),
    }
    is_flat = 2 * sum("." in name for name in entries) < len(entries)
    result = {}
    for setting in reading.overrides:
        name, equals, text = setting.partition("=")
        if not equals or name != name.strip() or name.startswith("-"):
            raise ConfigError(
                f"{setting!r} is not key=value (no spaces around '=', no dashes)",
                path=COMMAND_LINE,
            )
        name = name.lstrip("+")
        result[name] = Located(
            value=parse_scalar(text, COMMAND_LINE), path=COMMAND_LINE
        )
        if name in entries or name in reading.leaves or name in launch.unread:
            continue
        close = difflib.get_close_matches(
            name, entries, n=1, cutoff=0.8 if is_flat else 0.0
        )
        first, dot, _ = name.partition(".")
        is_foreign = not (dot and first in groups)
        if is_flat:
            is_known = launch.keys and load_known_keys(launch.keys).life(name)
            is_foreign = bool(close) or not is_known
        if is_foreign or any(
            True for _ in _find_misspelt({name: result[name]}, entries)
        ):
            close = close or difflib.get_close_matches(name, entries, n=1, cutoff=0.0)
            said = f"unknown key {name[:100]!r}; the closest is {close[0]}"
            raise ConfigError(said, key=name, nearest=close, path=COMMAND_LINE)
    return result


def _find_mappings(
    located: Mapping[str, Located], entries: Mapping[str, Entry]
) -> list[ConfigError]:
    """Return an error for each key that holds a mapping instead of a value."""
    within = {
        section: place
        for name, place in located.items()
        for section in sections_of(name)
    }
    found = {
        name: within[name] for name in entries if name in within and name not in located
    }
    said = {
        name: f"{name} is a mapping; it must be {entries[name].key.expected}"
        for name in found
    }
    return [
        ConfigError(said[name], key=name, path=place.path, line=place.line)
        for name, place in found.items()
    ]


def _find_misspelt(
    located: Mapping[str, Located], entries: Mapping[str, Entry]
) -> Iterator[ConfigError]:
    """Yield an error for each unknown key that differs from a known, unset one by very
    little.

    Its last part is compared with those beside it; the parts before the last, if no
    known key has them, with those of keys of the same name.
    """
    missing = [(*name.rpartition("."), name) for name in entries if name not in located]
    parents = {name.rpartition(".")[0] for name in entries}
    for name in sorted(located.keys() - entries.keys()):
        parent, _, last = name.rpartition(".")
        if parent in parents:
            alike = {
                other: key
                for above, _, other, key in missing
                if above == parent and len(key) > _MIN_LENGTH
            }
        else:
            alike = {above: key for above, _, other, key in missing if other == last}
        written = last if parent in parents else parent
        if close := [
            alike[found]
            for found in difflib.get_close_matches(written, alike, n=1, cutoff=_SIMILAR)
        ]:
            said = f"unknown key {name!r}; did you mean {close[0]}?"
            place = located[name]
            yield ConfigError(
                said, key=name, nearest=close, path=place.path, line=place.line
            )


def resolve_reference(
    value: Any, name: str, located: Mapping[str, Located], defaults: Mapping[str, Any]
) -> Any:
    """Return the value that an OmegaConf reference stands for, or another value as it
    is; `name` is its key.
    """
    for _ in range(_MAX_HOPS + 1):
        match = _REFERENCE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            return value
        target, default = match.groups()
        if dots := len(target) - len(target.lstrip(".")):
            target = ".".join([*name.split(".")[:-dots], target.lstrip(".")])
        if target not in located:
            if target in defaults:
                return defaults[target]
            if default is not None:
                return parse_scalar(default.strip(), name)
            raise ConfigError(
                f"{name}={value} refers to {target}, which the file does not set",
                key=name,
            )
        name, value = target, located[target].value
    raise ConfigError(f"{name}={value} is a circular reference", key=name)


# A file, or the words of a command.
Source = str | Path | tuple[str, ...]
_SETTING = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_YAML_KEY = re.compile(r"^\s*(?:-+)?[A-Za-z_][\w.\-]*\s*:(?:\s|$)", re.MULTILINE)
_COMMAND_WORD = re.compile(r"(?:^|\s)(?:--[A-Za-z]|[A-Za-z_][\w.]*=\S)")
_OPTIONS = re.compile(r"(?i)arg|opt|flag|extra|param|config|cmd")
_SHOWN = 60
_UNREAD = dict.fromkeys((".py", ".ipynb"), "a Python program") | dict.fromkeys(
    (".md", ".rst", ".mdx"), "a text with commands in it"
)
_NO_RUN = re.compile(
    r"(?i)decod|generat|inference|evaluat|predict|serve|convert|preprocess|export|merge|main_(?:gen|eval)"
)
_LAUNCHERS = (
    "torch.distributed",
    "deepspeed.",
    "accelerate.",
)  # modules that start a program
LINE = "line"  # the setting that chooses one of several commands
# In a table of base files: the name of the file that another one starts from.
PARENT = "defaults"
SEARCH_PATH = (  # of a command: where Hydra looks for further base files
    "hydra.searchpath"
)
_MAX_FILES = 40
_MAX_FOLDERS = 8
# The sizes and defaults that each shipped base file sets, by its name.
Bases = Mapping[str, Mapping[str, Any]]


def read_words(command: Command) -> dict[str, Located]:
    """Return what Hydra's words set: `key=value`, `+key=value`, `++key=value` and
    `~key`.
    """
    located = {}
    for word in command.words:
        match = _SETTING.fullmatch(word)
        if match is None or (match[3] is None and match[1] != "~"):
            continue
        value = None if match[1] == "~" else match[3].strip()
        if value and value[0] == value[-1] and value[0] in "\"'" and len(value) > 1:
            value = value[1:-1]
        elif value is not None:
            value = (
                parse_scalar(value, command.path) if not unknown_names(value) else value
            )
        located[match[2]] = command.locate(value, word)
    return located


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a system is started, and the keys and base files that it takes."""

    system: str  # its name in messages
    program: re.Pattern[str]  # matches a command that starts it
    example: str  # such a command, for errors
    entries: Mapping[str, Entry]  # the keys that the rules read
    canonical: Callable[[str], str] = (
        str  # from a key as written to its name in `entries`
    )
    groups: Sequence[str] = ()  # first parts of its keys that are not in `entries`
    others: re.Pattern[str] = re.compile(
        r"(?!)"
    )  # matches its programs that the rules do not cover
    read: Callable[[Command], dict[str, Located]] = (
        read_words  # the keys that a command sets; values may contain markers
    )
    bases: Bases = field(default_factory=dict)  # the base files that it ships
    version: str = ""  # that of `bases`, for notes
    # The base file that a program starts from if its command names none, by a part of
    # its name; that of all others by "".
    programs: Mapping[str, str] = field(default_factory=dict)
    keys: str = ""  # the name of the table of all its keys
    # Reads the keys that a Python program or a notebook sets, if the system has them.
    python: Callable[[str, Sequence[str]], dict[str, Located]] | None = None
    # The keys that can change sizes or devices and that no rule reads.
    unread: Mapping[str, Unread] = field(default_factory=dict)
    # Matches the last part of a key that no version has, but that may be a size.
    decides: re.Pattern[str] | None = None
    # Matches the system's own programs, as `program_of` gives them. Another one is a
    # fork's, which is asked about; `follows` is the setting that says that the rules
    # are true of it.
    own: re.Pattern[str] = re.compile(r"[\s\S]*")
    follows: str = ""
    # The key of the devices of one host that a run uses.
    per_host: str = ""
    # The variables that a script sees where it does not set them.
    environment: Mapping[str, str] = field(default_factory=dict)
    repeats: str = (
        ""  # what has the same effect as a fork's key that repeats each prompt
    )

    def known(self, name: str) -> bool:
        """Return whether a key as written is one that the rules read."""
        return self.canonical(name) in self.entries

    def relevant(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values of the known keys that some words set."""
        return {
            name: value.value
            for name, value in self.read(Command(tuple(words), 0)).items()
            if self.known(name)
        }


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
        return _read_commands(
            shlex.join(source), COMMAND_LINE, overrides, launch, strict, line=0
        )
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
    if not is_yaml:
        return _read_commands(text, path, overrides, launch, strict)
    if containers := find_containers(text):
        return _read_commands(text, path, overrides, launch, strict, containers)
    leaves, repeated = read_leaves(text, path)
    parents = leaves[PARENT].value if PARENT in leaves else None
    recognized = isinstance(parents, list) and any(
        isinstance(name, str) and name in launch.bases for name in parents
    )
    return Reading(
        path=path,
        leaves=leaves,
        overrides=overrides,
        repeated=repeated,
        recognized=recognized,
    )


def _read_commands(
    text: str,
    path: str,
    overrides: Sequence[str],
    launch: Launch,
    strict: bool,
    containers: Sequence[Container] = (),
    line: int | None = None,
) -> Reading:
    """Read a script, the commands of some containers, or a command, whose `line` is
    0.
    """
    settings = [setting.partition("=") for setting in overrides]
    given = {
        name: value
        for name, equals, value in settings
        if equals and name.isidentifier() and not launch.known(name)
    }
    scripts = containers or [Container(text, line)]
    commands = [
        command._replace(machine=row.machine)
        for row in scripts
        for command in read_commands(
            row.script,
            path,
            given,
            launch.program,
            launch.relevant,
            row.line,
            launch.environment,
        )
    ]
    started = {row.script for row in commands if row.script and not row.unread}
    whole = "\n".join(["" if line == 0 else text, *map(read_text, started)])
    reading = _ask_of_forks(_choose(commands, overrides, launch, path, strict), launch)
    # A name that only the scripts have is a variable. Those of Slurm count where the
    # script does not name them.
    kept = [
        setting
        for setting in reading.overrides
        if (name := setting.partition("=")[0]) in reading.leaves
        or name not in given
        or not (name.startswith("SLURM_") or re.search(rf"\b{name}\b", whole))
    ]
    seen = [
        f"{name}={value[:_SHOWN]}"
        for name, value in launch.environment.items()
        if name not in given and re.search(rf"\$\{{?{re.escape(name)}\b", whole)
    ]
    notes = [f"of this shell's environment: {', '.join(seen)}."] if seen else []
    return dataclasses.replace(
        reading,
        overrides=kept,
        notes=(*reading.notes, *notes),
        files=frozenset(started),
    )


def option(command: Command | None, *names: str) -> str | None:
    """Return the value of an option of a command: `--name value` or `--name=value`;
    None without it.
    """
    words = () if command is None else command.words
    pairs = (
        (*word.partition("="), following)
        for word, following in itertools.pairwise((*words, ""))
    )
    return next(
        (
            value if equals else following
            for name, equals, value, following in pairs
            if name in names
        ),
        None,
    )


class _Candidate(NamedTuple):
    """A command that starts the system or sets keys of it."""

    score: tuple[bool, int]  # whether it starts the system, and how many keys it sets
    command: Command
    leaves: Mapping[str, Located]


class _Commands:
    """The commands of a source, by what they may be for a system."""

    def __init__(self, commands: Sequence[Command], launch: Launch) -> None:
        self.all = commands
        self.launch = launch
        self.found: list[_Candidate] = []
        self.unread: list[Command] = []  # scripts that are started and not read
        # A program of the system that the rules do not cover, and its keys, which still
        # tell the system.
        self.other = ""
        self.outside: Mapping[str, Located] = {}
        for command in commands:
            self._sort(command)
        # What follows a command that was cut short is not a command of a trainer.
        if any(row.score[0] and program_of(row.command) for row in self.found):
            self.found = [row for row in self.found if not _is_rest(row.command)]

    def _sort(self, command: Command) -> None:
        launch = self.launch
        text = " ".join(command.words)
        # A script may be given the program that it starts, as in `/opt/launch.sh
        # torchrun pretrain_gpt.py`.
        after = text.partition(command.script)[2].split() if command.script else []
        programs = [
            word
            for word in after
            if "=" not in word and word[0] != "-" and launch.program.search(word)
        ]
        # What a program prints is an argument, and the program not the one that runs.
        match = launch.others.search(MARKER.sub("", text))
        if command.script and not (command.unread and programs):
            self.unread += [command] if command.unread else []
        elif match:
            self.other = self.other or show_unknown(match[0]).strip()
            self.outside = self.outside or launch.read(command)
        else:
            leaves = launch.read(command)
            starts = launch.program.search(text) is not None
            score = (starts, sum(map(launch.known, leaves)))
            self.found += [_Candidate(score, command, leaves)] if any(score) else []

    def in_line(self, line: str, path: str) -> None:
        """Keep the commands that begin in a line, which the user has chosen."""
        kept = [row for row in self.found if str(row.command.line) == line]
        if not kept:
            lines = ", ".join(str(row.command.line) for row in self.found) or "none"
            raise ConfigError(
                f"no command of {self.launch.system} begins in line {line}",
                fix=f"those that do begin in lines {lines}",
                key=LINE,
                path=path,
            )
        self.found = kept

    def unread_run(self) -> Command | None:
        """Return a script that is not read and may be the run, or may set its sizes."""

        def is_open(command: Command) -> bool:
            """Return whether it sources a file whose name is open."""
            return command.words[0] in ("source", ".") and bool(
                unknown_names(Path(command.words[1]).name)
            )

        def sets(command: Command) -> int:
            return len(self.launch.relevant(command.words))

        first = max(
            self.unread, key=lambda row: (is_open(row), sets(row)), default=None
        )
        if first is None:
            return None
        if is_open(first) if self.found else not self.other:
            return first
        is_launched = any(row.score[0] for row in self.found)
        return first if sets(first) and not is_launched else None

    def best(self) -> _Candidate:
        """Return the command that starts the system and sets most keys; the first of
        equals.
        """
        return max(self.found, key=lambda row: row.score)

    def similar(self, best: _Candidate) -> list[Command]:
        """Return the other commands that start the same system with keys."""
        return [
            row.command
            for row in self.found
            if row.score[0] == best.score[0]
            and row.score[1]
            and row.command[1:3] != best.command[1:3]
        ]


def _is_rest(command: Command) -> bool:
    """Return whether a command begins with a setting or an option."""
    return command.words[0].startswith("-") or "=" in command.words[0]


def _choose(
    commands: Sequence[Command],
    overrides: Sequence[str],
    launch: Launch,
    path: str,
    strict: bool,
) -> Reading:
    """Return what the command sets that starts the system and sets most of its keys, or
    that begins in the line that the user has chosen.
    """
    rows = _Commands(commands, launch)
    settings = [setting.partition("=") for setting in overrides]
    lines = [value for name, _, value in settings if name == LINE]
    overrides = [setting for setting in overrides if setting.partition("=")[0] != LINE]
    if strict and lines:
        rows.in_line(lines[-1], path)
    if not rows.found and not strict:
        return Reading(
            path=path,
            leaves=rows.outside,
            overrides=overrides,
            recognized=any(map(launch.known, rows.outside)),
        )
    if first := rows.unread_run():
        said = f"this starts or sources a script that is not read: {first.unread}"
        raise ConfigError(said, key="from", path=first.path, line=first.line or None)
    if not rows.found:
        raise _starts_nothing(rows.other, launch, path)
    best = rows.best()
    if strict:
        _refuse_open_words(best.command)
    return Reading(
        path=best.command.path,
        leaves=best.leaves,
        overrides=overrides,
        command=best.command,
        notes=tuple(_notes_of(best, rows, path)),
        recognized=best.score[0],
    )


def _refuse_open_words(command: Command) -> None:
    """Refuse a command whose words are not known to be those of the run."""
    path, line = command.path, command.line or None
    for word in command.words:
        if word[:1] == OPTIONS and MARKER.fullmatch(word):
            [name] = unknown_names(word)
            raise ConfigError(
                f"{explain_unknown(word)}, and sizes in this command depend on it",
                fix=f"add {name}=...",
                key=name,
                path=path,
                line=line,
            )
        if re.fullmatch(r"\s+#.*", word):
            raise ConfigError(
                "a backslash before a blank and a comment does not continue the line:"
                " the comment's words are arguments, and the next line is a command of"
                " its own",
                fix="move the comment",
                path=path,
                line=line,
            )


def _notes_of(best: _Candidate, rows: _Commands, path: str) -> Iterator[str]:
    """Yield which command was read, what it lost, and what beside it was not read."""
    command = best.command
    if command.line:
        shown = show_unknown(" ".join(command.words))
        here = f"line {command.line}" + (
            f" of {command.path}" if command.path != path else ""
        )
        places = sorted(
            {
                (other.path != command.path and other.path, other.line)
                for other in rows.similar(best)
            }
        )
        others = [f"{line} of {file}" if file else str(line) for file, line in places]
        also = ""
        if others:
            also = (
                f"; similar commands in {'lines' if len(others) > 1 else 'line'}"
                f" {', '.join(others)}: {LINE}={places[0][1]} chooses another"
            )
        yield (
            f"read from {here}:"
            f" {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}{also}"
        )
    if command.machine.devices:
        yield f"the manifest asks for {command.machine.devices:,} devices."
    yield from _command_notes(command)
    yield from dict.fromkeys(
        f"{row.unread}; what it sets or starts is not read." for row in rows.unread
    )


def _ask_of_forks(reading: Reading, launch: Launch) -> Reading:
    """Return the reading with a question, or with a note if it is answered, where its
    program is none of the system's own.
    """
    command = reading.command
    if command is None or launch.own.fullmatch(program := program_of(command)):
        return reading
    said = (
        f"this starts {program}, a program of a fork: its rules may differ from those"
        f" of {launch.system}"
    )
    answer = launch.follows.partition("=")[0]
    if any(setting.partition("=")[0] == answer for setting in reading.overrides):
        return dataclasses.replace(
            reading, is_fork=True, notes=(*reading.notes, f"{said}.")
        )
    question = ConfigError(
        f"unknown, a fork: {said}",
        fix=f"if it follows them, add {launch.follows}",
        key=answer,
        path=command.path,
        line=command.line or None,
    )
    return dataclasses.replace(reading, questions=(*reading.questions, question))


def _starts_nothing(other: str, launch: Launch, path: str) -> ConfigError:
    """Return why a script without a command of the system is refused; `other` is a
    program that the rules do not cover.
    """
    if other:
        why = ": it does not train" if _NO_RUN.search(other) else ""
        return ConfigError(
            f"this starts {other}, which the rules of {launch.system} do not"
            f" cover{why}",
            path=path,
        )
    said = (
        f"this script does not start {launch.system} itself: no command in it is like"
        f" `{launch.example}`"
    )
    return ConfigError(
        f"{said}. If another one starts the run, check that; if a condition decides,"
        " add VARIABLE=...",
        key="from",
        path=path,
    )


def _command_notes(command: Command) -> Iterator[str]:
    """Yield what is lost between a command and its system: words after its end, and
    words that are not known.
    """
    if command.cut:
        said = (
            f"the command ends in line {command.cut}, where a comment or a blank"
            " follows the backslash"
        )
        yield f"{said}; the lines below it are not part of it."
    # A word after an option is its value, unless its name is that of options.
    unknown: dict[str, None] = {}
    for before, word in itertools.pairwise(command.words):
        names, name = unknown_names(word), show_unknown(word)
        is_whole = len(names) == 1 and name.lstrip("$") == names[0].lstrip("$")
        if is_whole and (
            _OPTIONS.search(name) or not before.startswith("-") or "=" in before
        ):
            unknown[name] = None
    if unknown:
        yield (
            f"the script does not say what {', '.join(unknown)} adds to the command; it"
            " is left out."
        )


def _base_folders(command: Command, path: str) -> list[Path]:
    """Return where the base file of a command may be: its `--config-path` in a folder
    above, or above its program's folder.
    """
    folder = known_end(option(command, "--config-path", "-cp") or "config")
    parts = Path(folder).parts
    # An absolute path may be one of another machine.
    ends = [
        Path(*parts[first:])
        for first in range(len(parts) if folder.startswith("/") else 1)
    ]
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
    chosen = [
        setting.partition("=")[2]
        for setting in overrides
        if setting.startswith(f"{PARENT}=")
    ]
    others = [setting for setting in overrides if not setting.startswith(f"{PARENT}=")]
    reading = read_source(source, others, launch).rename(launch.canonical)
    bases = _BaseFiles(launch, reading.path)
    if reading.command is not None:
        bases.start(reading.command, chosen[-1] if chosen else None)
    elif not isinstance(source, tuple) and PARENT in reading.leaves:
        bases.follow(reading.leaves[PARENT], Path(source).parent)
    own = {name: value for name, value in reading.leaves.items() if name != PARENT}
    reading = dataclasses.replace(
        reading,
        leaves=bases.beside | own,
        files=reading.files | {place.path for place in bases.beside.values()},
        recognized=reading.recognized or bool(bases.named),
    )
    version = choose_version(reading, bases.beside)
    questions = (*reading.questions, *version.questions)
    reading = dataclasses.replace(reading, questions=questions)
    known_keys = load_known_keys(launch.keys) if launch.keys else None
    settings = type_settings(reading, launch, {**version.defaults, **bases.shipped})
    notes = [*settings.notes, *version.notes]
    if reading.command is None and known_keys is not None:
        groups = {name.partition(".")[0] for name in known_keys.lives}
        own = {
            name: at
            for name, at in reading.leaves.items()
            if "." in name and name.partition(".")[0] in groups
        }
        own = {
            name: at
            for name, at in own.items()
            if known_keys.life(name) is None and name not in launch.entries
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
    answered = {
        setting.partition("=")[0].lstrip("+") for setting in reading.overrides
    } - launch.entries.keys()
    if known_keys is not None and (
        version.is_fork or any(known_keys.life(name) is None for name in answered)
    ):
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
    answered = {setting.partition("=")[0].lstrip("+") for setting in reading.overrides}
    found = (
        reading.leaves.keys()
        - reading.written("+", "++", "~")
        - answered
        - beside.keys()
    )
    is_key = re.compile(r"(?!hydra\.)[^@/]*\.[^@/]*")
    return {
        name: value
        for name, value in reading.leaves.items()
        if name in found and is_key.fullmatch(name)
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
        self.left = itertools.count(_MAX_FILES - 1, -1)

    def start(self, command: Command, chosen: str | None) -> None:
        """Read the base file that the user or a command names, or else that of its
        program.
        """
        launch, path = self.launch, self.path
        name = option(command, "--config-name", "-cn") if chosen is None else chosen
        folders = [*_base_folders(command, path), *_program_folders(command, path)]
        if name is not None:
            self.add(name, [Path(path).parent, *folders], path)
            return
        part = next(
            (
                part
                for part in launch.programs
                if part and any(part in word for word in command.words)
            ),
            "",
        )
        default = launch.programs.get(part, "")
        if part or any(
            (folder / f"{default}.yaml").is_file()
            for folder in _program_folders(command, path)
        ):
            self.add(default, _program_folders(command, path), path)
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
        if next(self.left) < 0:
            raise ConfigError(
                f"more than {_MAX_FILES} base files; do they name each other?",
                key=PARENT,
                path=path,
            )
        for folder in folders:
            file = folder / f"{name}.yaml"
            if file.is_file() and str(file) != path:
                found, _ = read_leaves(read_text(file), str(file))
                if PARENT in found:
                    self.follow(found.pop(PARENT), file.parent, package)
                prefix = f"{package}." if package else ""
                self.beside.update(
                    {
                        self.launch.canonical(prefix + key): value
                        for key, value in found.items()
                    }
                )
                return
        if name in self.launch.bases:
            own = dict(self.launch.bases[name])
            if (parent := own.pop(PARENT, None)) is not None:
                self.add(parent, [], path)
            self.named.append(name)
            self.shipped.update(own)
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
    root = next(
        (place for place, folder in enumerate(folders) if (folder / ".git").exists()),
        len(folders),
    )
    return folders[: root + 1]


def find_in_repository(path: str, place: str) -> list[Path]:
    """Return what is at a place in the folders above a file, or in a copy of the system
    within its repository.
    """
    folders = repository_folders(path)
    is_repository = (folders[-1] / ".git").exists()
    copies = {
        up: sorted(up.glob(f"*/{place}"))
        for up in folders
        if is_repository or up == folders[0]
    }
    return [
        file
        for up in folders
        for file in (up / place, *copies.get(up, ()))
        if file.exists()
    ]


def known_end(path: str) -> str:
    """Return the part of a path that is known: behind the last folder that is not, such
    as one of the environment.
    """
    return (
        show_unknown(path).rpartition("$")[2].partition("/")[2]
        if unknown_names(path)
        else path
    )


def program_of(command: Command) -> str:
    """Return the path of the Python program that a command starts, without its suffix:
    `verl/trainer/main_ppo`.
    """
    modules = (
        following
        for word, following in itertools.pairwise(command.words)
        if word == "-m"
    )
    if module := next(
        (name for name in modules if not name.startswith(_LAUNCHERS)), ""
    ):
        return module.replace(".", "/")
    file = next((word for word in command.words if word.endswith(".py")), "")
    return known_end(file).removesuffix(".py")


def _program_folders(command: Command, path: str) -> list[Path]:
    """Return the folders of a program's base files that are there: `config` beside it,
    from the script upwards.
    """
    program = program_of(command)
    if "/" not in program.strip("/"):
        return []
    place = str(Path(program.lstrip("/")).parent / "config")
    return find_in_repository(path, place)
