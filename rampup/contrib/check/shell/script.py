"""Shell scripts as the commands that they would run. Nothing is executed and nothing is
guessed.

A script is parsed into nodes (`grammar`), and these are evaluated as bash would
(`flow`), with words that are expanded (`variables`). A value that only a run could know
(the output of a command, the environment, positional parameters) is *unknown*: a marker
with a name in the text, which spreads to all that is made of it. So is what a construct
makes that is not read here. The environment counts as empty if it is not given, so
`${X:-8}` is 8.

The values of a variable form a small lattice. Below are known texts and lists; above
them stand the markers, with the names of what a user must give:

- `UNSET`, a variable that nothing sets: empty for tests and `:-`, as in bash, but a gap
  in the words of a command.
- `ARGUMENT`, a positional parameter that was not given: empty for `-z`, `-n`, `:-` and
  the like only.
- `UNKNOWN`, what only a run can know.
- `OPTIONS`, unknown as well, but some of its possible values set keys that matter: an
  error in the command that is chosen.

Expansions, tests and arithmetic only go up; only an assignment of a known value goes
down again.

Where the run begins is not known: `PWD` is `.` until a `cd`, and a relative path of a
script that this one starts or sources is that of the nearest file, from the folder of
the script upwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.launchers import NAMES, count_tasks, read_header, read_options
from rampup.contrib.check.shell.flow import Flow, Relevant, Stop
from rampup.contrib.check.shell.grammar import ASSIGNMENT, Node, ScriptError, parse
from rampup.contrib.check.shell.values import (
    RESERVED,
    Env,
    Status,
    Words,
    drop_unset,
    explain_unknown,
    has_unknown,
    mark,
    show_unknown,
    unknown_names,
)
from rampup.contrib.check.shell.variables import MAX_NESTING
from rampup.errors import ConfigError

MAX_SCRIPTS = 200
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")  # their suffixes
_ALL = re.compile(r"-\w*a\w*")  # of `set`
_STARTS = re.compile(
    r"(?:^|[\s;&|/])(?:bash|sh|sbatch|source|\.)\s[^\n;&|]*\.(?:sh|bash|slurm|sbatch)\b|^\S+\.sh\s"
)
# `-c` of a shell, alone or with others, and what stands before a command in an option
# such as `--wrap=COMMAND`.
_SHELL_OPTION = re.compile(r"-\w*c")
_LONG_OPTION = re.compile(r"^--[\w-]+=(?=\S+\s)")


class Command(NamedTuple):
    """A command of a script. A text is empty where there is nothing of its kind."""

    words: tuple[str, ...]  # after all expansions
    line: int  # where it begins; 0 on the command line
    path: str = ""  # the file in which it stands
    script: str = ""  # the script that it starts or sources
    unread: str = ""  # why that script is not read
    tasks: str = ""  # how many processes run it, by Slurm or MPI
    environment: Mapping[str, str] = MappingProxyType({})  # the variables that it sees
    devices: int = 0  # those that the manifest around it asks for

    def locate(self, value: Any) -> Located:
        """Return a value that the command sets, and where the command stands."""
        return Located(value=value, path=self.path, line=self.line or None)


def read_commands(
    text: str,
    path: str | Path,
    given: Mapping[str, str],
    nested: re.Pattern[str],
    relevant: Relevant = tuple,
    line: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Command]:
    """Return the commands that a script would run, in order, or refuse what is no shell
    script.

    `given` are values of variables, which win over the script's own; those of the
    `environment` do not. A quoted word or a here-document that matches `nested` is read
    as another script. Branches that agree in what is `relevant` of some words do not
    differ.
    """
    variables = {name: mark(name) for name in NAMES["always"]} | read_header(text)
    variables |= {**environment, "PWD": "."}
    reader = _Reader(
        path=Path(path),
        given=given,
        nested=nested,
        relevant=relevant,
        env=variables | {"@": [str(Path(path).absolute())]},
        exported=variables.keys(),
    )
    try:
        with contextlib.suppress(Stop):
            reader.run(parse(RESERVED.sub("?", text), line))
    except (ScriptError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if is_deep else error
        raise ConfigError(
            f"cannot read the shell script: {reason}",
            fix="paste its command: `rampup check -- COMMAND ...`",
            path=str(path),
        ) from None
    return reader.commands


@dataclass(kw_only=True)
class _Reader(Flow):
    """Collects the commands of a script and of those that it starts."""

    nested: re.Pattern[str]
    tasks: str = ""  # how many processes run this, if a launcher says so
    commands: list[Command] = field(default_factory=list)

    def program(self, words: list[str], node: Node, values: dict[str, str]) -> Status:
        """Evaluate a command of bash itself, or record a program; `values` are the
        variables before it.
        """
        name, *rest = words
        match name:
            case "exit" | "return" | "break" | "continue":
                self.leave(name, rest, node.line)
            case "set":
                options = [word for word in rest if word[:1] in "-+"]
                if "allexport" in rest or any(map(_ALL.fullmatch, options)):
                    self.exports_all = True
                if "--" in rest or (rest and not options):
                    self.env["@"] = [self.argument("0"), *rest["--" in rest :]]
                    self.asks = False
            case "shift":
                return self.shift(rest)
            case "cd":
                folders = [word for word in rest if not word.startswith("-")]
                path = os.path.join(self.get("PWD"), *(folders or [mark("PWD")]))
                is_open = has_unknown(path)
                self.env["PWD"] = mark("PWD") if is_open else os.path.normpath(path)
            case "unset":
                for word in rest:
                    array, bracket, _ = word.partition("[")
                    self.env.pop(word, None)
                    self.env |= {array: mark(array)} if bracket else {}
            case "getopts" if len(rest) == 2 and self.env["@"][1:] == []:
                return False
            case "read" | "getopts" | "mapfile" | "readarray" | "printf" | "let":
                if name != "printf" or "-v" in rest:  # what they set is not followed
                    names = re.findall(r"[A-Za-z_]\w*", " ".join(rest))
                    self.env |= {
                        name: mark(name) for name in (*names, *NAMES["set_by_read"])
                    }
                return None
            case "eval":
                return self.script(" ".join(rest), node.line)
            case "exec" if rest:
                self.record(rest, node, values)
                raise Stop("exit")
            case "source" | "." if (
                rest and Path(rest[0]).name not in NAMES["of_machine"]
            ):
                return self.follow(words, 1, node.line, {})
            case "false":
                return False
            case "exec" | "source" | "." | ":" | "true":
                pass
            case _:
                return self.record(words, node, values)
        return True

    # Commands of bash itself.

    def leave(self, name: str, rest: Words, line: int) -> None:
        """Leave a loop, a function or the script."""
        if name in ("exit", "return"):
            is_known = rest and rest[0].isdecimal()
            raise Stop(name, int(rest[0][:4]) if is_known else None)
        if rest and rest[0] != "1":
            raise ScriptError(f"line {line}: `{name}` out of several loops is not read")
        if self.loops:
            raise Stop(name)

    def shift(self, rest: Words) -> Status:
        """Drop the first positional parameters."""
        arguments = self.env["@"]
        if isinstance(arguments, str) or any(map(has_unknown, rest)):
            self.env["@"] = mark("@")
            return None
        number = int(rest[0]) if rest and rest[0].isdecimal() else 1
        if number >= len(arguments):
            return False
        self.env["@"] = [arguments[0], *arguments[1 + number :]]
        return True

    def script(self, text: str, line: int | None) -> Status:
        """Evaluate a text in the same shell."""
        with self.changed(depth=self.depth + 1):
            if self.depth < MAX_NESTING:
                return self.run(parse(text, line))
            return None

    # Programs, and the scripts that they start.

    def record(self, words: list[str], node: Node, own: dict[str, str]) -> Status:
        """Keep a command, and those in its script, its quoted words and
        here-documents.
        """
        if words[0] in NAMES["printing"]:
            words = words[:1]
        self.assumed = True
        tasks = count_tasks(words, lambda name: drop_unset(self.text(f"${name}")))
        with self.changed(tasks=tasks or self.tasks):
            if (place := _find_script(words)) is not None:
                return self.follow(words, place, node.line, own)
            command = Command(
                tuple(words),
                node.line,
                str(self.path),
                tasks=self.tasks,
                environment=self.environment() | own,
            )
            self.commands.append(command)
            for text, parameters in self.find_texts(words, node):
                number = len(self.commands)
                arguments = parameters or [mark("$0")]
                try:
                    self.shell(text, node.line, own, arguments)
                except ScriptError:
                    del self.commands[number:]
        return None if words[0] in NAMES["asking"] else True

    def find_texts(self, words: Words, node: Node) -> Iterator[tuple[str, list[str]]]:
        """Yield the texts in a command that are scripts themselves, with their
        arguments.
        """
        for place, (before, whole) in enumerate(itertools.pairwise(words)):
            word = _LONG_OPTION.sub("", whole)
            if not any(map(str.isspace, word)):
                continue
            if _SHELL_OPTION.fullmatch(before) or self.is_script(word):
                yield word, list(words[place + 2 :])
        text = self.input(node.parts)
        if self.is_script(text):
            yield text, []

    def is_script(self, text: str) -> bool:
        """Return whether a text looks like commands that may start a run."""
        return bool(self.nested.search(text) or _STARTS.search(text))

    def environment(self) -> Env:
        """Return the variables that another program sees."""
        names = self.exported & self.env.keys()
        return {name: self.get(name) for name in names}

    def shell(
        self,
        text: str,
        line: int | None,
        own: dict[str, str],
        arguments: list[str],
        **changes: Any,
    ) -> None:
        """Evaluate a text in another shell, which sees what is exported and the
        variables of its `own`.
        """
        inner = dataclasses.replace(
            self,
            **({"asks": False} | changes),
            env=self.environment() | own | {"@": arguments},
            exported=self.exported | own.keys(),
            functions={},
            exports_all=False,
            left=[],
            returned=[],
            locals=None,
            loops=0,
        )
        with contextlib.suppress(Stop):
            inner.script(text, line)

    def follow(
        self, words: list[str], place: int, line: int, own: dict[str, str]
    ) -> Status:
        """Evaluate the script that the word at a place starts or sources, or keep the
        reason why it is not read.
        """
        number, sourced = len(self.commands), words[0] in ("source", ".")
        command = Command(tuple(words), line, str(self.path), script=words[place])
        self.commands.append(command)
        try:
            file, folder = self.find_file(words[place])
            if sourced:
                return self.source(file, words[place + 1 :])
            self.start(file, words, place, line, own | {"PWD": folder})
        except (ConfigError, ScriptError) as error:
            reason = str(error)
            if isinstance(error, ScriptError):
                reason = f"{words[place]}: cannot read the shell script: {error}"
            self.commands[number:] = [command._replace(unread=reason)]
            return None if sourced else True
        return True

    def start(
        self, file: str, words: list[str], place: int, line: int, own: dict[str, str]
    ) -> None:
        """Evaluate a script in another shell, with what the words before it say of its
        environment.
        """
        before, arguments = words[:place], words[place + 1 :]
        text = self.open(file)
        for word in before:
            for part in word.removeprefix("--export=").split(","):
                if match := ASSIGNMENT.fullmatch(part):
                    own[match[1]] = match[4]
        if "sbatch" in before or "srun" in before:
            own |= read_header(text) if "sbatch" in before else {}
            own |= read_options(before)
        self.shell(
            text,
            None,
            own,
            [file, *arguments],
            path=_shown(file),
            # What is typed may lack arguments; what a script starts has all that it
            # gets.
            asks=line == 0 and not arguments,
        )

    def source(self, file: str, arguments: list[str]) -> Status:
        """Evaluate a script in this shell."""
        text = self.open(file)
        given = [self.argument("0"), *arguments] if arguments else None
        with self.changed(path=_shown(file)):
            return self.call(lambda: self.script(text, None), given)

    def open(self, file: str) -> str:
        """Return the text of a script that is started, and note that it is."""
        self.spent["scripts"] += 1
        if self.depth + 1 >= MAX_NESTING or self.spent["scripts"] > MAX_SCRIPTS:
            raise ConfigError(
                f"scripts start each other {MAX_NESTING} deep or {MAX_SCRIPTS} in all"
            )
        text = RESERVED.sub("?", read_text(file))
        self.commands[-1] = self.commands[-1]._replace(script=str(_shown(file)))
        return text

    def find_file(self, word: str) -> tuple[str, str]:
        """Return the file of a script that is started or sourced, and where it runs."""
        if names := unknown_names(word):
            settle = f"; add {names[0]}=..." if names[0].isidentifier() else ""
            raise ConfigError(
                f"{explain_unknown(word)}, in {show_unknown(word)}{settle}"
            )
        # The working directory may be one of another machine.
        folders = [self.get("PWD"), "."]
        own = self.path.absolute()
        found: list[tuple[str, str]] = []
        for folder in itertools.filterfalse(has_unknown, folders):
            for up in own.parents:
                start = os.path.normpath(os.path.join(up, folder))
                file = os.path.normpath(os.path.join(start, word))
                if os.path.isfile(file):
                    found.append((file, start))
        if not found:
            raise ConfigError(
                f"{word} is neither beside this script nor in a folder above it; put"
                " it there"
            )
        return min(found, key=lambda row: row[0] == str(own))


def _shown(file: str) -> Path:
    """Return a file by its path from here."""
    return Path(file.removeprefix(f"{Path.cwd()}/"))


def _find_script(words: Words) -> int | None:
    """Return the place of the script that a command starts: `bash x.sh`, `./x.sh`, or
    `srun -n 8 bash -x x.sh`.
    """
    wrapped = True  # whether all words so far belong to a wrapper
    for place, word in enumerate(words):
        if wrapped and word.endswith(SCRIPTS) and "=" not in word and word[0] != "-":
            return place
        name = word.rpartition("/")[2]
        is_value = "=" in word or word[:1] in "-0123456789"
        is_value |= words[place - 1].startswith("-")
        wrapped &= name in NAMES["wrappers"] or (is_value and place > 0)
        if name not in NAMES["shells"]:
            continue
        for at in range(place + 1, len(words)):
            before, following = words[at - 1 : at + 1]
            if name != "sbatch" and re.fullmatch(r"-\w*[cs]\w*", following):
                return None
            is_option = following[:1] in ("-", "+")
            if is_option or re.fullmatch(r"[-+]\w*[oO]|--rcfile|--init-file", before):
                continue
            if following.endswith(SCRIPTS):
                return at
            if name != "sbatch":
                return at if place == 0 else None
    return None
