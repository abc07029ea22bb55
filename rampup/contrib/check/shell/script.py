"""Shell scripts as the commands that they would run. Nothing is executed and nothing is
guessed.

A script is parsed into nodes, and these are evaluated as bash would. A value that only
a run could know (the output of a command, the environment, positional parameters) is
*unknown*: a marker with a name in the text, which spreads to all that is made of it.
The environment counts as empty if it is not given, so `${X:-8}` is 8.

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
down again. If a condition is unknown, every branch is read. Where they join
(`_Reader.join`), a variable keeps its first value if all branches agree, or if its
words set the same keys to the same values in all of them (`relevant`). Otherwise it
goes up to a marker with the name of a variable of the condition, because to give that
one settles all that differ; if the condition has none, the marker has the name of the
variable that differs, and the condition as its reason. A branch that ends in `exit` is
a check that has passed, and does not take part. The state before the branches does, if
it is possible that none of them is taken.

A loop is followed to its end while its condition is known, for at most `MAX_REPEATS`
passes. From a pass on whose condition is unknown, the state is joined with that after
the pass until it stays; and what a loop changes that is too long becomes unknown.

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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.contrib.check.launchers import (
    Machine,
    count_tasks,
    read_header,
    read_options,
)
from rampup.contrib.check.shell.grammar import (
    ASSIGNMENT,
    OPERATOR,
    Document,
    Node,
    Parser,
    ScriptError,
    find_close,
    parse,
    skip_part,
)
from rampup.contrib.check.shell.values import (
    ARGUMENT,
    BREAK,
    EMPTY,
    MARKER,
    OPTIONS,
    RESERVED,
    UNKNOWN,
    UNSET,
    VARIABLE,
    Test,
    apply_sign,
    compile_expression,
    drop_unset,
    explain_unknown,
    first_marker,
    has_unknown,
    mark,
    print_output,
    print_path,
    show_unknown,
    split_fields,
    to_number,
    unknown_names,
)
from rampup.errors import ConfigError

MAX_STEPS = 40_000
MAX_TEXT = 200_000
MAX_REPEATS = 256
MAX_NESTING = 20
MAX_SCRIPTS = 200
MAX_REASONS = 3  # that a question names
MAX_LAUNCHES = 8  # of one script by one line, as in a sweep
_PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])")
_PRINTING = ("echo", "printf", "export", "tee", "log", "logger", "sed", "grep", "awk")
# The suffixes of scripts, the commands that take one, those before a command, and files
# of a machine, not of a run.
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_SHELLS = ("bash", "sh", "zsh", "dash", "sbatch")
_WRAPPERS = (
    "srun",
    "env",
    "nohup",
    "time",
    "timeout",
    "nice",
    "sudo",
    "setsid",
    "stdbuf",
    "mpirun",
    "mpiexec",
    "xargs",
)
_OF_MACHINE = (
    "activate",
    "conda.sh",
    ".bashrc",
    ".profile",
    ".bash_profile",
    "profile",
)
_STARTS = re.compile(
    r"(?:^|[\s;&|/])(?:bash|sh|sbatch|source|\.)\s[^\n;&|]*\.(?:sh|bash|slurm|sbatch)\b|^\S+\.sh\s"
)
# `-c` of a shell, alone or with others, and what stands before a command in an option
# such as `--wrap=COMMAND`.
_SHELL_OPTION = re.compile(r"-\w*c")
_LONG_OPTION = re.compile(r"^--[\w-]+=(?=\S+\s)")
# What every machine sets, and what a match of a regular expression does.
_ALWAYS = (
    "HOSTNAME",
    "HOSTTYPE",
    "OSTYPE",
    "MACHTYPE",
    "UID",
    "EUID",
    "USER",
    "HOME",
    "LOGNAME",
    "BASH_REMATCH",
)
_SHOWN = 60


_Relevant = Callable[[Sequence[str]], object]


class Command(NamedTuple):
    """A command of a script. A text is empty where there is nothing of its kind."""

    words: tuple[str, ...]  # after all expansions
    line: int  # where it begins; 0 on the command line
    path: str = ""  # the file in which it stands
    script: str = ""  # the script that it starts or sources
    unread: str = ""  # why that script is not read
    remark: str = ""  # how that script was found, if it was not where its name says
    places: Mapping[str, tuple[str, int]] = MappingProxyType(
        {}
    )  # file and line of the arguments of its own script
    outer: tuple[str, ...] = ()  # the words of the command in whose quotes it stands
    tasks: str = ""  # how many processes run it, by Slurm or MPI
    environment: Mapping[str, str] = MappingProxyType({})  # the variables that it sees
    machine: Machine = Machine()  # the devices that the manifest around it asks for
    # the line in which a backslash before a comment or a blank ends it, though more
    # seems to follow
    cut: int = 0
    skipped: str = ""  # the condition under which it would run, though it does not

    def locate(self, value: Any, *words: str) -> Located:
        """Return a value that some words of the command set, and where they stand."""
        found = [self.places[word] for word in words if word in self.places]
        path, line = (
            found[0] if found and len(found) == len(words) else (self.path, self.line)
        )
        return Located(value=value, path=path, line=line or None)


class _Stop(Exception):  # noqa: N818 - control flow, not an error
    """`exit`, `return`, `break` or `continue`."""

    def __init__(self, name: str, level: int = 1) -> None:
        super().__init__(name)
        self.name = name
        # how many loops it leaves; or the status that `return` gives, -1 if unknown
        self.level = level

    @property
    def is_check(self) -> bool:
        """Whether a branch that ends so is a check, which has passed."""
        return self.name == "exit" or (self.name == "return" and self.level > 0)


class _Open(list[str]):
    """Words of which a part without quotes is unknown: they may be more, or fewer."""


class _Left(NamedTuple):
    """A branch that may have left a loop or a function."""

    name: str
    level: int
    env: dict[str, Any]
    why: _Why


class _Why(NamedTuple):
    """Why a condition is unknown: the marker of a variable on which it depends, if
    there is one, and its text.
    """

    marker: str = ""
    reason: str = ""


def read_commands(
    text: str,
    path: str | Path,
    given: Mapping[str, str],
    nested: re.Pattern[str],
    relevant: _Relevant = tuple,
    line: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[Command]:
    """Return the commands that a script would run, in order, or refuse what is no shell
    script.

    `given` are values of variables, which win over the script's own; those of the
    `environment` do not. A quoted word or a
    here-document that matches `nested` is read as another script. Branches that agree
    in what is `relevant` of some words do not differ.
    """
    start = str(Path(path).absolute())
    variables = (
        {"PWD": "."} | {name: mark(name) for name in _ALWAYS} | read_header(text)
    )
    variables |= {k: v for k, v in environment.items() if k != "PWD"}
    reader = _Reader(
        Path(path),
        given,
        nested,
        relevant,
        variables | {"@": [start]},
        variables.keys(),
        [(start,)],
    )
    try:
        with contextlib.suppress(_Stop):
            reader.run(parse(RESERVED.sub("?", text), line))
    except (ScriptError, RecursionError) as error:
        reason = (
            "it is nested too deeply"
            if isinstance(error, RecursionError)
            else str(error)
        )
        raise ConfigError(
            f"cannot read the shell script: {reason}", path=str(path)
        ) from None
    if not any(nested.search(" ".join(command.words)) for command in reader.commands):
        # Those of branches that are not taken, as written.
        skipped = [
            (said, node)
            for said, rows in reader.skipped
            for node in _walk(rows)
            if node.kind == "command"
        ]
        found = [
            (said, node)
            for said, node in skipped
            if nested.search(" ".join(node.words))
        ]
        reader.commands += [
            Command(tuple(node.words), node.line, str(reader.path), skipped=said)
            for said, node in found
        ]
    return reader.commands


def _walk(part: Any) -> Iterator[Node]:
    """Yield the nodes within a part of a parsed script."""
    if isinstance(part, Node):
        yield part
        part = part.parts
    for inner in part if isinstance(part, list | tuple) else ():
        yield from _walk(inner)


def _show(pipe: Sequence[Node]) -> str:
    """Return a condition for a message, with its line."""
    text = " ".join(
        " | ".join(" ".join(node.words) or node.kind for node in pipe).split()
    )
    return (
        f"`{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}` (line {pipe[0].line})"
    )


def _expand_braces(raw: str) -> list[str]:
    """Return the words that `{1..4}` or `{a,b}` stands for, or another raw word as it
    is.
    """
    if span := re.fullmatch(r"\{(\d{1,9})\.\.(\d{1,9})\}", raw):
        first, last = int(span[1]), int(span[2])
        numbers = (
            range(first, last + 1) if first <= last else range(first, last - 1, -1)
        )
        return list(map(str, numbers[:MAX_STEPS]))
    listed = re.fullmatch(r"\{([^{}$,]+(?:,[^{}$,]+)+)\}", raw)
    return listed[1].split(",") if listed else [raw]


@dataclass
class _Reader:
    """Evaluates nodes."""

    path: Path
    given: Mapping[str, str]
    nested: re.Pattern[str]
    relevant: _Relevant
    # Variables: texts, or lists for arrays. `NAME[key]` is an item of a mapping, and
    # `@` the positional parameters from $0 on.
    env: dict[str, Any]
    exported: Set[str]  # the variables and functions that another shell sees
    running: Sequence[tuple[Any, ...]]  # the scripts that have started each other
    exports_all: bool = False
    asks: bool = (
        True  # whether a positional parameter that is not there may have been given
    )
    places: Mapping[str, tuple[str, int]] = field(
        default_factory=dict
    )  # those of the arguments
    outer: tuple[str, ...] = ()  # the command in whose quotes this stands
    tasks: str = ""  # how many processes run this, if a launcher says so
    functions: dict[str, Node] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    skipped: list[tuple[str, Sequence[Any]]] = field(
        default_factory=list
    )  # branches that are not taken, and why
    spent: Counter[Any] = field(
        default_factory=Counter
    )  # of all shells: "steps", "scripts", launches of a script by a line
    depth: int = 0
    why: _Why = field(default_factory=_Why)  # of the last unknown condition
    left: list[_Left] = field(default_factory=list)
    locals: dict[str, Any] | None = (
        None  # what the local variables of this function were before it; None outside
    )
    # those around this command in its function: without one, `break` does nothing
    loops: int = 0
    assumed: bool = (
        False  # whether the last status is that of a program, which is taken to succeed
    )

    # Control flow.

    def run(self, rows: Sequence[Any]) -> bool | None:
        """Evaluate a list; return its status: None if unknown."""
        status: bool | None = True
        for connector, negated, pipe in rows:
            if (connector == "&&" and status is False) or (
                connector == "||" and status is True
            ):
                continue
            is_test = (
                len(pipe) == 1
                and pipe[0].kind == "command"
                and pipe[0].words[:1] in (["["], ["[["], ["test"])
            )
            if connector and status is None and not is_test:
                self.join(
                    [self.attempt([("", negated, pipe)])], self.why, exhaustive=False
                )
                continue
            before = status
            try:
                status = self.pipe(pipe)
            except _Stop as stop:
                if not (connector and stop.name == "exit"):
                    raise
                continue
            if status is None:
                reason = self.why.reason if len(pipe) == 1 else ""
                self.why = _Why(
                    self.why.marker,
                    reason or f"it is not known whether {_show(pipe)} holds",
                )
            status = not status if negated and status is not None else status
            if before is None and status is (connector == "&&") and connector:
                status = None  # unknown and true, or unknown or false
        return status

    def condition(self, rows: Sequence[Any]) -> bool | None:
        """Evaluate a condition; the success of a program is not known in advance."""
        self.why, self.assumed = _Why(), False
        status = self.run(rows)
        if self.assumed and status is not None:
            self.why = _Why(
                "", f"it is not known whether {_show(rows[-1][2])} succeeds"
            )
            return None
        return status

    def pipe(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            self.spent["steps"] += 1
            if self.spent["steps"] > MAX_STEPS:
                raise ScriptError(
                    f"line {node.line}: it has more than {MAX_STEPS:,} steps"
                )
            if len(nodes) == 1:
                status = self.node(node)
            elif node is nodes[-1] and (found := self.grep(nodes)) is not None:
                status, self.assumed = found, False
            else:
                status = self.subshell([("", False, [node])])
        return status

    def subshell(self, rows: Sequence[Any]) -> bool | None:
        with self.changed(env=dict(self.env), left=[]), contextlib.suppress(_Stop):
            return self.run(rows)
        return True

    def attempt(self, rows: Sequence[Any]) -> dict[str, Any] | None:
        """Evaluate a branch in a copy of the variables; return them, or None if it
        leaves a loop, a function or the script.
        """
        why = self.why
        with self.changed(env=dict(self.env)):
            try:
                self.run(rows)
            except _Stop as stop:
                if not stop.is_check:
                    self.left = [
                        *self.left,
                        _Left(stop.name, stop.level, self.env, why),
                    ]
                return None
            return self.env

    @contextlib.contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Change attributes for a part of the script."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)

    def join(
        self, branches: Iterable[dict[str, Any] | None], why: _Why, *, exhaustive: bool
    ) -> None:
        """Continue after branches when `why` leaves open which one was taken."""
        ends = [env for env in branches if env is not None]
        if not exhaustive or not ends:
            ends.append(self.env)
        joined: dict[str, Any] = {}
        for name in {n: 0 for env in ends for n in env}:
            values = [env.get(name) for env in ends]
            if values.count(values[0]) == len(values):
                joined[name] = values[0]
                continue
            words = [
                value if isinstance(value, list) else (value or "").split()
                for value in values
            ]
            matters = [self.relevant(part) for part in words]
            if any(matters) and matters.count(matters[0]) == len(matters):
                joined[name] = values[0]  # they do not differ in anything that matters
            else:
                kind = OPTIONS if any(matters) else UNKNOWN
                joined[name] = (
                    kind + why.marker[1:]
                    if why.marker
                    else mark(name, kind, why.reason)
                )
        self.env = joined

    def take_left(self, name: str) -> list[_Left]:
        """Return the branches that may have left the innermost loop or function in a
        way, and forget them.
        """
        found = [
            left
            for left in self.left
            if left.name == name and (name == "return" or left.level == 1)
        ]
        self.left = [left for left in self.left if left not in found]
        return found

    def join_left(self, lefts: Sequence[_Left]) -> None:
        """Continue with the state that each of some branches may have left behind,
        too.
        """
        if lefts:
            self.join(
                [self.env, *(left.env for left in lefts)], lefts[0].why, exhaustive=True
            )

    def node(self, node: Node) -> bool | None:
        match node.kind:
            case "command":
                return self.command(node)
            case "{":
                return self.run(node.parts[0])
            case "(":
                return self.subshell(node.parts[0])
            case "arithmetic":
                value = self.arithmetic(node.words[0])
                self.why = _Why(first_marker(value), self.why.reason)
                return None if has_unknown(value) else value != "0"
            case "function":
                self.functions[node.words[0]] = node.parts[0]
            case "if" | "case":
                self.choose(node)
            case _:
                if node.kind == "count":
                    self.arithmetic(node.words[0])
                with self.changed(loops=self.loops + 1):
                    self.loop(node)
        return True

    def choose(self, node: Node) -> None:
        """Evaluate an `if` or a `case`: the branch that is taken, or all that may
        be.
        """
        subject = self.text(node.words[0], empty=True) if node.words else ""
        ends: list[dict[str, Any] | None] = []
        whys: list[_Why] = []
        for condition, body in node.parts:
            if node.kind == "case":
                texts = [self.text(pattern, empty=True) for pattern in condition]
                met: bool | None = any(fnmatchcase(subject, text) for text in texts)
                if any(map(has_unknown, (subject, *texts))) and "*" not in texts:
                    met = None
                    reason = (
                        f"it is not known what {node.words[0]} is (line {node.line})"
                    )
                    self.why = _Why(first_marker(subject, *texts), reason)
            else:
                met = True if condition is None else self.condition(condition)
            if met is False:
                said = (
                    f"case {node.words[0]} in {'|'.join(condition)})"
                    if node.kind == "case"
                    else _show(condition[-1][2])
                )
                self.skipped.append((said, body))
                continue
            whys += [self.why] if met is None else []
            if met and not ends:  # nothing before it may have been taken
                before = dict(self.env)
                try:
                    self.run(body)
                    return
                except _Stop as stop:
                    if stop.name != "exit":
                        raise
                    self.env = before  # a check, which has passed
                if condition is None:
                    return
                continue
            ends.append(self.attempt(body))
            if met and (ends[-1] is not None or condition is None):
                break
        else:
            ends.append(self.env)
        marker = next((why.marker for why in whys if why.marker), "")
        reasons = list(dict.fromkeys(why.reason for why in whys))
        more = (
            [f"nor {len(reasons) - 1} more conditions"]
            if len(reasons) > MAX_REASONS
            else []
        )
        self.join(
            ends,
            _Why(marker, "; ".join([*reasons[: 1 if more else MAX_REASONS], *more])),
            exhaustive=True,
        )

    def loop(self, node: Node) -> None:
        """Evaluate a loop to its end, or until its state stays."""
        body = node.parts[-1]
        passes = self.passes(node)
        endless = _Why("", f"the loop in line {node.line} is not followed to its end")
        outer, self.left = self.left, []
        is_broken = is_long = False
        for number in itertools.count():
            before = dict(self.env)
            is_long |= node.kind != "for" and (
                number >= MAX_REPEATS or self.spent["steps"] > MAX_STEPS // 8
            )
            if (status := next(passes, False)) is False:
                break
            why = endless if is_long or status else self.why
            if status is None:
                ends = [
                    self.attempt(body),
                    *(left.env for left in self.take_left("continue")),
                    self.env,
                ]
                self.join([*ends, *([before] if number else [])], why, exhaustive=True)
            else:
                try:
                    self.run(body)
                except _Stop as stop:
                    if stop.name not in ("break", "continue") or stop.level > 1:
                        self.left = [*outer, *self.left]
                        raise _Stop(
                            stop.name, stop.level - (stop.name in ("break", "continue"))
                        ) from None
                    is_broken = stop.name == "break"
                self.join_left(self.take_left("continue"))
                if is_long:
                    self.join([before], why, exhaustive=False)
            if (
                status is None or is_long
            ):  # what is open stays so, under one name: then the state does not change any more
                is_open = {
                    name
                    for name in before
                    if MARKER.fullmatch(str(before[name]))
                    and MARKER.fullmatch(str(self.env.get(name)))
                }
                self.env |= {name: before[name] for name in is_open}
            if is_broken or (
                number and self.env == before and (status is None or node.kind != "for")
            ):
                break  # or it goes on like this without end
        broken = self.take_left("break")
        self.left = [
            *outer,
            *(
                left._replace(level=left.level - (left.name != "return"))
                for left in self.left
            ),
        ]
        self.join_left(broken)

    def passes(self, node: Node) -> Iterator[bool | None]:
        """Prepare each pass of a loop; yield whether there is one, None if that is not
        known.
        """
        if node.kind == "for":
            name, *listed = node.words
            items = [
                word
                for raw in listed
                for part in _expand_braces(raw)
                for word in self.words(part)
            ]
            unknown = [item for item in items if has_unknown(item) or "*" in item]
            said = (
                f"it is not known what the loop over {name} in line {node.line} goes"
                " through"
            )
            for item in itertools.repeat(mark(name)) if unknown else items:
                self.assign(name, "", item)
                self.why = _Why(first_marker(*unknown), said) if unknown else self.why
                yield None if unknown else True
            return
        while node.kind == "count":
            value = self.arithmetic(node.words[1]) if node.words[1].strip() else "1"
            said = (
                f"it is not known whether (({node.words[1].strip()})) holds (line"
                f" {node.line})"
            )
            self.why = _Why(first_marker(value), said)
            yield None if has_unknown(value) else value != "0"
            self.arithmetic(node.words[2])
        while True:
            with self.changed(
                asks=False
            ):  # where no arguments are given, a loop over them does nothing
                status = self.condition(node.parts[0])
            yield status if status is None else status is not (node.kind == "until")

    # Commands.

    def command(self, node: Node) -> bool | None:
        own = [
            match.groups()
            for match in itertools.takewhile(
                bool, map(ASSIGNMENT.fullmatch, node.words)
            )
            if match
        ]
        raw = node.words[len(own) :]
        self.assumed = False
        if not raw:
            for assignment in own:
                self.set(*assignment)
            return True
        if raw[0] in ("[[", "[", "test"):
            return self.test(raw)
        if raw[0] in ("export", "declare", "local", "readonly", "typeset"):
            self.declare(raw)
            return True
        words = [word for part in raw for word in self.words(part)]
        if not words:
            return True
        if words[0] in self.functions:
            return self.function(words)
        values = {name: self.text(value) for name, _, _, value in own}
        return self.builtin(words, node, values)

    def test(self, raw: Sequence[str]) -> bool | None:
        """Evaluate a test in brackets."""
        quoted, words = raw[0] == "[[", list[str]()
        for before, part in itertools.pairwise(raw):
            if quoted and before == "=~" and re.search(r"[\\\"']", part):
                words.append(mark(part))  # a part of the pattern stands for itself
            else:
                words += self.words(part, empty=True, split=not quoted) or [""] * quoted
        test = Test(words if raw[0] == "test" else words[:-1])
        value = test.value()
        if value is None:
            self.why = _Why(
                self.why.marker or first_marker(*test.unknown), self.why.reason
            )
        return value

    def declare(self, raw: Sequence[str]) -> None:
        """Evaluate `export`, `declare`, `local`, `readonly` or `typeset`."""
        exports = raw[0] == "export" or any(
            re.fullmatch(r"-\w*x\w*", word) for word in raw
        )
        is_local = (
            self.locals is not None
            and raw[0] != "export"
            and raw[0] != "readonly"
            and "-g" not in raw
        )
        for word in raw[1:]:
            name = re.match(r"\w+", word)
            if is_local and self.locals is not None and name:
                self.locals.setdefault(name[0], self.env.get(name[0]))
            if match := ASSIGNMENT.fullmatch(word):
                self.set(*match.groups())
            elif (match := ASSIGNMENT.fullmatch(self.text(word))) and '"' in word:
                self.assign(match[1], match[2], match[4])
            self.exported |= {match[1] if match else word} if exports else set()

    def function(self, words: list[str]) -> bool | None:
        """Call a function; return its status."""
        if self.depth >= MAX_NESTING:
            return None
        before: dict[str, Any] = {}
        with self.changed(depth=self.depth + 1, asks=False, loops=0, locals=before):
            try:
                return self.call(
                    lambda: self.node(self.functions[words[0]]), [self.zero, *words[1:]]
                )
            finally:
                after = self.env | before
                self.env = {
                    name: value
                    for name, value in after.items()
                    if value is not None or name not in before
                }

    def call(
        self, body: Callable[[], bool | None], arguments: list[str] | None
    ) -> bool | None:
        """Evaluate a function or a sourced script, which `return` ends; return its
        status. None shares the arguments.
        """
        before, outer, self.left = self.env["@"], self.left, []
        self.env["@"] = before if arguments is None else arguments
        status: bool | None = None
        end: _Stop | None = None
        try:
            status = body()
        except _Stop as stop:
            end = stop if stop.name != "return" else None
            status = None if stop.level < 0 else not stop.level
        finally:
            returned = self.take_left("return")
            self.left = [*outer, *self.left]
        if end and returned:  # a branch goes on behind the call
            self.left += (
                []
                if end.is_check
                else [_Left(end.name, end.level, self.env, returned[0].why)]
            )
            self.env = returned[0].env
        self.join_left(returned)
        self.env["@"] = self.env["@"] if arguments is None else before
        if end and not returned:
            raise end
        return None if returned else status

    def builtin(
        self, words: list[str], node: Node, values: dict[str, str]
    ) -> bool | None:
        """Evaluate a command of bash itself, or record a program; `values` are the
        variables before it.
        """
        name, *rest = words
        match name:
            case "exit" | "return" | "break" | "continue":
                level = (
                    int(rest[0])
                    if rest and rest[0].isdecimal() and len(rest[0]) < 4
                    else -1
                    if name == "return"
                    else 1
                )
                if name in ("exit", "return"):
                    raise _Stop(name, level)
                if self.loops:
                    raise _Stop(name, min(level, self.loops))
            case "set":
                self.exports_all |= any(
                    re.fullmatch(r"-\w*a\w*|allexport", word) for word in rest
                )
                if "--" in rest or (rest and rest[0][0] not in "-+"):
                    self.env["@"] = [
                        self.zero,
                        *rest[rest.index("--") + 1 if "--" in rest else 0 :],
                    ]
                    self.asks = False
            case "shift":
                arguments = self.env["@"]
                if isinstance(arguments, str) or any(map(has_unknown, rest)):
                    self.env["@"] = mark("@")
                    return None
                number = int(rest[0]) if rest and rest[0].isdecimal() else 1
                if number >= len(arguments):
                    return False
                self.env["@"] = [arguments[0], *arguments[1 + number :]]
            case "cd":
                folder = next(
                    (word for word in rest if not word.startswith("-")), mark("PWD")
                )
                path = os.path.normpath(os.path.join(self.folder, folder))
                self.env["PWD"] = mark("PWD") if has_unknown(path) else path
            case "unset":
                for word in rest:
                    array, bracket, _ = word.partition("[")
                    if (
                        bracket
                        and isinstance(self.env.get(array), list)
                        and word not in self.env
                    ):
                        self.env[array] = mark(array)  # the others keep their numbers
                    self.env.pop(word, None)
            case "printf" if rest[:1] == ["-v"] and len(rest) > 2:
                known = (
                    None
                    if any(map(has_unknown, rest))
                    else print_output(["printf", *rest[2:]], "")
                )
                self.assign(rest[1], "", mark(rest[1]) if known is None else known)
            case "getopts" if len(rest) > 1:
                return self.getopts(rest[0], rest[1], rest[2:])
            case "read" | "mapfile" | "readarray":
                return self.read(name, rest, node.parts, values)
            case "let":
                for word in rest:
                    self.evaluate(word)
            case "eval":
                return self.script(" ".join(rest), node.line)
            case "exec" if rest:
                self.record(rest, node, values)
                raise _Stop("exit")
            case "source" | "." if rest and Path(rest[0]).name not in _OF_MACHINE:
                return self.follow(words, 1, node.line, {})
            case "false":
                return False
            case "exec" | "source" | "." | ":" | "true":
                pass
            case _:
                return self.record(words, node, values)
        return True

    def getopts(self, letters: str, name: str, arguments: list[str]) -> bool | None:
        """Evaluate a call of POSIX's `getopts`; OPTIND is the next argument, and
        `OPTIND@` the next letter in it.
        """
        given = arguments or self.env["@"][1:]
        index = self.text("${OPTIND:-1}")
        word = (
            given[int(index) - 1]
            if index.isdecimal() and 0 < int(index) <= len(given)
            else ""
        )
        if (
            isinstance(self.env["@"], str)
            or not index.isdecimal()
            or has_unknown(word[:2])
            or has_unknown(letters)
        ):
            self.assign(name, "", mark(name))
            self.assign("OPTARG", "", mark("OPTARG"))
            return None
        option = "?"
        argument = None
        following = int(index)
        place = int(self.env.get("OPTIND@", "0"))
        found = bool(place) or (word[:1] == "-" and word not in ("-", "--"))
        if found:
            place = max(place, 1)
            letter, rest = word[place], word[place + 1 :]
            is_silent = letters.startswith(":")
            takes = letters.partition(letter)[2][:1] == ":"
            following, place = (
                (following, place + 1) if rest and not takes else (following + 1, 0)
            )
            if letter == ":" or letter not in letters:
                argument = letter if is_silent else None
            elif not takes or rest:
                option, argument = letter, rest if takes else None
            elif following <= len(given):
                option, argument = letter, given[following - 1]
                following += 1
            else:
                option, argument = (":", letter) if is_silent else ("?", None)
        else:
            following += word == "--"
        self.assign(name, "", option)
        self.env |= {"OPTIND": str(following), "OPTIND@": str(place)}
        self.env.pop("OPTARG", None)
        if argument is not None:
            self.assign("OPTARG", "", argument)
        return found

    def input(self, documents: Sequence[Document], *, empty: bool = True) -> str | None:
        """Return what the last here-document or here-string gives a command to read;
        `empty` as in `text`.
        """
        if not documents:
            return None
        last = documents[-1]
        if not last.end:
            return self.text(last.text, empty=empty) + "\n"
        return (
            last.text
            if last.quoted
            else self.text(last.text.replace('\\"', '\\\\"'), quoted=True)
        )

    def read(
        self,
        name: str,
        rest: list[str],
        documents: Sequence[Document],
        values: Mapping[str, str],
    ) -> bool | None:
        """Evaluate `read` or `mapfile`: known is only what a here-document or a
        here-string says.
        """
        text = self.input(documents)
        names = list[str]()
        is_list = name != "read"
        ends = "\n"
        words = iter(rest)
        option = re.compile(
            r"-\w*?([adinNptu])(.*)" if name == "read" else r"-\w*?([dnOsuCc])(.*)",
            re.DOTALL,
        )
        for word in words:
            if match := option.fullmatch(word):
                value = match[2] or next(words, "")
                is_list |= match[1] == "a"
                names += [value] if match[1] == "a" else []
                ends = value if match[1] == "d" else ends
            elif word.isidentifier():
                names.append(word)
        if (
            text is None
            or ends not in ("", "\n")
            or has_unknown(text)
            or (name != "read" and "-t" not in rest)
        ):
            for word in names:
                self.assign(
                    word,
                    "",
                    (
                        mark(word)
                        if text is None or len(names) > 1 or is_list
                        else text.strip()
                    ),
                )
            return None
        if (
            is_list and not text.strip() and name == "read"
        ):  # what nothing sets has a number of parts that is not known
            self.assign(names[0], "", _Open())
            return True
        names = names or ["MAPFILE" if name != "read" else "REPLY"]
        if name != "read":
            self.assign(names[0], "", text.splitlines())
            return True
        line = text.partition("\n")[0] if ends else text
        fields = split_fields(
            line, values.get("IFS", self.env.get("IFS")), 0 if is_list else len(names)
        )
        for number, word in enumerate(names):
            self.assign(
                word,
                "",
                fields if is_list else fields[number] if number < len(fields) else "",
            )
        return True

    def grep(self, nodes: Sequence[Node]) -> bool | None:
        """Return whether `... | grep -q TEXT` finds a plain text in what the commands
        before it print, if that is known.
        """
        words = self.expanded(nodes[-1])
        if (
            len(words) != 3
            or words[0] != "grep"
            or not re.fullmatch(r"-[qiEF]*q[qiEF]*", words[1])
        ):
            return None
        text = self.output(nodes[:-1])
        if (
            text is None
            or has_unknown(text)
            or not re.fullmatch(r"[\w /:=-]+", words[2])
        ):
            return None
        return words[2].lower() in text.lower() if "i" in words[1] else words[2] in text

    def script(self, text: str, line: int | None) -> bool | None:
        """Evaluate a text in the same shell."""
        with self.changed(depth=self.depth + 1):
            return self.run(parse(text, line)) if self.depth < MAX_NESTING else None

    def record(self, words: list[str], node: Node, own: dict[str, str]) -> bool | None:
        """Keep a command, and those in its script, its quoted words and
        here-documents.
        """
        if words[0] in _PRINTING:
            words = words[:1]
        self.assumed = True
        with self.changed(
            tasks=count_tasks(words, lambda name: drop_unset(self.text(f"${name}")))
            or self.tasks
        ):
            if (place := _find_script(words)) is not None:
                return self.follow(words, place, node.line, own)
            command = Command(
                tuple(words), node.line, str(self.path), places=self.places
            )
            exported = {
                name: self.get(name) for name in self.exported & self.env.keys()
            }
            self.commands.append(
                command._replace(
                    outer=self.outer,
                    tasks=self.tasks,
                    environment=exported | own,
                    cut=node.cut,
                )
            )
            for text, parameters in self.find_texts(words, node):
                number = len(self.commands)
                try:
                    self.shell(
                        text,
                        node.line,
                        own,
                        arguments=parameters or [mark("$0")],
                        outer=tuple(words),
                    )
                except ScriptError:
                    del self.commands[number:]
        return None if words[0] in ("grep", "command", "which", "nvidia-smi") else True

    def find_texts(
        self, words: Sequence[str], node: Node
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the texts in a command that are scripts themselves, with their
        arguments.
        """
        searches = (self.nested.search, _STARTS.search)
        for place, (before, whole) in enumerate(itertools.pairwise(words)):
            word = _LONG_OPTION.sub("", whole)
            if any(map(str.isspace, word)) and (
                _SHELL_OPTION.fullmatch(before)
                or any(search(word) for search in searches)
            ):
                yield word, list(words[place + 2 :])
        text = self.input(node.parts) or ""
        if any(search(text) for search in searches):
            yield text, []

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
        changes |= {
            "env": (
                {
                    name: value
                    for name, value in self.env.items()
                    if name in self.exported
                }
                | own
                | {"@": arguments}
            ),
            "exported": self.exported | own.keys(),
            "functions": {
                name: body
                for name, body in self.functions.items()
                if name in self.exported
            },
        }
        with contextlib.suppress(_Stop):
            dataclasses.replace(
                self, **({"asks": False} | changes), exports_all=False, left=[]
            ).script(text, line)

    def follow(
        self, words: list[str], place: int, line: int, own: dict[str, str]
    ) -> bool | None:
        """Evaluate the script that the word at a place starts or sources, or keep the
        reason why it is not read.
        """
        number = len(self.commands)
        word = words[place]
        before = words[:place]
        arguments = words[place + 1 :]
        sourced = words[0] in ("source", ".")
        command = Command(
            tuple(words), line, str(self.path), script=word, places=self.places
        )
        self.commands.append(command)
        try:
            file, folder, remark = self.find_file(word)
            text = RESERVED.sub("?", read_text(file))
            if not sourced:
                exports = [
                    part
                    for word in before
                    for part in word.removeprefix("--export=").split(",")
                ]
                own = {
                    **own,
                    "PWD": folder,
                    **dict(
                        part.split("=", 1)
                        for part in exports
                        if ASSIGNMENT.fullmatch(part)
                    ),
                }
                if "sbatch" in before or "srun" in before:
                    own |= read_header(text) if "sbatch" in before else {}
                    own |= read_options(before)
            state = (
                file,
                arguments,
                {
                    name: self.env[name]
                    for name in self.env
                    if sourced or name in self.exported
                }
                | own,
            )
            if state in self.running:
                raise ConfigError(f"{word} starts itself")
            start = (str(self.path), line, file)
            if self.spent[start] >= MAX_LAUNCHES:
                raise ConfigError(
                    f"line {line} of {self.path} starts {word} more than {MAX_LAUNCHES}"
                    " times"
                )
            self.spent["scripts"] += 1
            if self.depth + 1 >= MAX_NESTING or self.spent["scripts"] > MAX_SCRIPTS:
                raise ConfigError(
                    f"scripts start each other too often, {MAX_NESTING} deep or"
                    f" {MAX_SCRIPTS} in all"
                )
            path = Path(file.removeprefix(f"{Path.cwd()}/"))
            self.commands[number] = command._replace(script=str(path), remark=remark)
            changes: dict[str, Any] = {"path": path, "running": [*self.running, state]}
            if arguments or not sourced:
                changes["places"] = {
                    word: self.places.get(word, (str(self.path), line))
                    for word in arguments
                }
            if not sourced:
                # What is typed may lack arguments; what a script starts has all that it
                # gets.
                changes["asks"] = line == 0 and not arguments
                self.shell(text, None, own, [file, *arguments], **changes)
                self.spent[start] += any(
                    self.nested.search(" ".join(row.words))
                    for row in self.commands[number + 1 :]
                )
                return True
            with self.changed(**changes):
                return self.call(
                    lambda: self.script(text, None),
                    [self.zero, *arguments] if arguments else None,
                )
        except (ConfigError, ScriptError) as error:
            reason = (
                str(error)
                if isinstance(error, ConfigError)
                else f"{path}: cannot read the shell script: {error}"
            )
            self.commands[number:] = [command._replace(unread=reason)]
            return None if sourced else True
        return True

    def find_file(self, word: str) -> tuple[str, str, str]:
        """Return the file of a script that is started or sourced, where it runs, and a
        remark on how it was found.
        """
        if word.startswith("<("):
            raise ConfigError(f"what {show_unknown(word)} prints is not known")
        # The working directory may be one of another machine.
        parents = list(map(str, self.path.absolute().parents))
        folders = ("." if has_unknown(self.folder) else self.folder, ".")
        starts = [
            os.path.normpath(os.path.join(up, folder))
            for folder in folders
            for up in parents
        ]
        files = [
            (os.path.normpath(os.path.join(start, word)), start) for start in starts
        ]
        found = [
            row for row in files if not has_unknown(word) and os.path.isfile(row[0])
        ]
        running = {row[0] for row in self.running}
        if found:
            return *min(found, key=lambda row: row[0] in running), ""
        # So may be the folder of the script: then the end of its path counts, but a
        # mere name only beside this script.
        parts = word.split("/") if word.startswith("/") or has_unknown(word) else []
        known = len(parts) - next(
            (n for n, part in enumerate(reversed(parts)) if has_unknown(part)),
            len(parts),
        )
        for first in range(max(known, 1), len(parts)):
            end = os.path.join(*parts[first:])
            for up in parents if first < len(parts) - 1 else parents[:1]:
                if (
                    ".." not in parts
                    and os.path.isfile(file := os.path.join(up, end))
                    and file not in running
                ):
                    return file, up, f"{show_unknown(word)} is read as {file}"
        if names := unknown_names(word):
            settle = f"; add {names[0]}=..." if names[0].isidentifier() else ""
            raise ConfigError(
                f"{explain_unknown(word)}, in {show_unknown(word)}{settle}"
            )
        raise ConfigError(
            f"{word} is neither beside this script nor in a folder above it; put it"
            " there"
        )

    # Variables and expansions.

    @property
    def folder(self) -> str:
        """The working directory: `.` where the run begins, and also after `unset
        PWD`.
        """
        found: str = self.get("PWD")
        return "." if found == mark("PWD", UNSET) else found

    @property
    def zero(self) -> str:
        """The script, as $0 is."""
        arguments = self.env["@"]
        return (
            str(self.path.absolute())
            if isinstance(arguments, str)
            else str(arguments[0])
        )

    def argument(self, name: str) -> Any:
        """Return a positional parameter, all of them, or their number."""
        arguments = self.env["@"]
        if isinstance(arguments, str):
            match = MARKER.fullmatch(arguments)
            return (
                mark(f"${name}", UNKNOWN, match[2] or "")
                if match and match[1] == "@"
                else arguments
            )
        if not name.isdecimal():
            return str(len(arguments) - 1) if name == "#" else arguments[1:]
        missing = mark(f"${name}", ARGUMENT if self.asks else UNSET)
        return arguments[int(name)] if int(name) < len(arguments) else missing

    def get(self, name: str, key: str | None = None) -> Any:
        """Return the value of a parameter: text, a list, or the marker of one that is
        not set.
        """
        if name in self.given and not key:
            return self.given[name]
        if name.isdecimal() or name in "@*#":
            return self.argument(name)
        if name in "?$!-":
            return "0" if name == "?" else mark(f"${name}")
        missing = mark(name, UNSET)
        value = (
            [str(self.path.absolute())]
            if name == "BASH_SOURCE"
            else self.env.get(name, [] if key else missing)
        )
        value = self.given[name].split() if name in self.given else value
        if key is None:
            return value[0] if isinstance(value, list) and value else value or ""
        index = self.text(key[1:-1])
        if f"{name}[{index}]" in self.env:
            return self.env[f"{name}[{index}]"]
        items = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return items
        number = self.arithmetic(index)
        if has_unknown(number) or (
            isinstance(value, str) and has_unknown(value) and number != "0"
        ):
            return mark(name)
        if (
            isinstance(value, _Open)
            and number != "0"
            and any(map(has_unknown, value[: int(number) + 1]))
        ):
            return mark(name)
        return (
            items[int(number)] if -len(items) <= int(number) < len(items) else missing
        )

    def set(self, name: str, key: str | None, plus: str, raw: str) -> None:
        """Assign the raw text after the `=`."""
        before = self.env.get(name)
        if raw.startswith("(") and raw.endswith(")") and not key:
            parser, parts = (
                Parser(raw[1:-1], 1),
                list[str](),
            )  # comments and line ends between items are dropped
            while token := parser.peek():
                parser.next()
                parts += [] if OPERATOR.fullmatch(token) else [token]
            parts = [part for raw in parts for part in _expand_braces(raw)]
            items = [
                word
                for part in parts
                for word in (self.words(part) if "=" not in part[:1] else [part])
            ]
            pairs = (
                re.fullmatch(r"\[([^\]]+)\]=(.*)", part, re.DOTALL) for part in items
            )
            keyed = {pair[1]: pair[2] for pair in pairs if pair}
            self.env |= {f"{name}[{index}]": item for index, item in keyed.items()}
            old = (
                (
                    before
                    if isinstance(before, list)
                    else []
                    if before is None
                    else [before]
                )
                if plus
                else []
            )
            rows = [old, *map(self.words, parts)]
            kind = (
                _Open
                if any(
                    isinstance(row, _Open) or any("*" in word for word in row)
                    for row in rows
                )
                else list
            )
            self.assign(name, "", kind([*old, *(keyed.values() or items)]))
            return
        value = self.text(raw)
        if plus and not key:
            value = (
                before[0]
                if isinstance(before, list) and before
                else before
                if isinstance(before, str)
                else ""
            ) + value
        self.assign(name, key, value)

    def assign(self, name: str, key: str | None, value: Any) -> None:
        if isinstance(value, str):
            # A value that is unknown as a whole, and has no name of its own, gets that
            # of its variable.
            match = MARKER.fullmatch(value)
            value = (
                mark(name, value[0], match[2] or "")
                if match and match[1].startswith("$")
                else value
            )
            if len(value) > MAX_TEXT:
                raise ScriptError(f"{name} is longer than {MAX_TEXT:,} characters")
            self.exported |= {name} if self.exports_all else set()
        if not key:
            self.env[name] = value
            return
        index, items = self.text(key[1:-1]), self.env.get(name)
        if isinstance(items, list) and not any(
            item.startswith(f"{name}[") for item in self.env
        ):  # no mapping
            index = self.arithmetic(index)
        if index.isdigit() and isinstance(items, list) and int(index) <= len(items):
            self.env[name] = [*items[: int(index)], value, *items[int(index) + 1 :]]
        else:
            self.env[f"{name}[{index}]"] = value

    def words(self, raw: str, *, empty: bool = False, split: bool = True) -> list[str]:
        """Return the words that a raw word becomes: none, one or several; `empty` as in
        `text`.
        """
        text, ifs, is_open = "", self.env.get("IFS", ""), False
        separators = (
            f"[{re.escape(ifs)}]" if isinstance(ifs, str) and ifs.strip() else r"\s+"
        )
        for piece, quoted in self.pieces(raw):
            parts = piece if isinstance(piece, list) else [piece]
            is_open |= isinstance(piece, _Open) or (
                split and not quoted and any(map(has_unknown, parts))
            )
            if quoted or not split:
                text += BREAK.join(EMPTY + part for part in parts)
            else:
                text += re.sub(separators, BREAK, BREAK.join(parts))
        text = drop_unset(text) if empty else text
        found = [word.replace(EMPTY, "") for word in text.split(BREAK) if word]
        return _Open(found) if is_open else found

    def expanded(self, node: Node) -> list[str]:
        """Return the words of a simple command; none of a compound."""
        return (
            [word for raw in node.words for word in self.words(raw)]
            if node.kind == "command"
            else []
        )

    def text(self, raw: str, *, empty: bool = False, quoted: bool = False) -> str:
        """Return a raw word, or the inside of double quotes, as one text; in a test,
        what nothing sets is `empty`.
        """
        pieces = self.pieces(raw, quoted=quoted)
        text = "".join(
            " ".join(part) if isinstance(part, list) else part for part, _ in pieces
        )
        return drop_unset(text) if empty else text

    def pieces(self, raw: str, *, quoted: bool = False) -> Iterator[tuple[Any, bool]]:
        """Yield the expanded parts of a raw word, or of the inside of double quotes,
        and whether each is protected.
        """
        at = 0
        while at < len(raw):
            letter, start = raw[at], at
            if letter in "$`":
                value, at = self.expand(raw, at)
                joined = (
                    quoted
                    and isinstance(value, list)
                    and raw[start:at].endswith(("*", "[*]}"))
                )
                yield (
                    self.env.get("IFS", " ")[:1].join(value) if joined else value,
                    quoted or raw.startswith("$'", start),
                )
            elif letter == "\\" and (
                not quoted or raw[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")
            ):
                at += 2
                yield raw[start + 1 : at].strip("\n"), True
            elif letter in "'\"" and not quoted:
                at = skip_part(raw, at)
                inner: list[tuple[Any, bool]] = [(raw[start + 1 : at - 1], True)]
                if letter == '"':
                    inner = list(self.pieces(inner[0][0], quoted=True))
                if len(inner) != 1 or not isinstance(inner[0][0], list):
                    yield "", True
                yield from inner
            else:
                ends = "\\$`" if quoted else "\\'\"$`"
                at = next(
                    (n for n in range(at + 1, len(raw)) if raw[n] in ends), len(raw)
                )
                yield raw[start:at], True

    def expand(self, raw: str, at: int) -> tuple[Any, int]:
        """Return the value of the expansion at a place, and the place after it."""
        end = skip_part(raw, at)
        part = raw[at:end]
        if match := re.fullmatch(r"\$\(\((.*)\)\)|\$\[(.*)\]", part, re.DOTALL):
            return self.arithmetic(match[1] if match[2] is None else match[2]), end
        if part.startswith("$'"):
            return (
                part[2:-1]
                .replace("\\n", "\n")
                .replace("\\t", "\t")
                .replace("\\'", "'"),
                end,
            )
        if part[0] == "`" or part.startswith("$("):
            printed = self.substitute(part.removeprefix("$")[1:-1])
            return (
                mark("$" + part if part[0] == "`" else part)
                if printed is None
                else printed
            ), end
        if part.startswith("${"):
            return self.parameter(part[2:-1]), end
        match = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])").match(raw, at)
        return ("$", at + 1) if match is None else (self.get(match[1]), match.end())

    def substitute(self, text: str) -> str | None:
        """Return what a command substitution prints, if it is known: that of one pipe,
        perhaps after `cd`.
        """
        try:
            rows = parse(text, 0)
        except ScriptError:
            return None
        if not rows:
            return None
        *before, (connector, _, nodes) = rows
        with self.changed(depth=self.depth + 1, env=dict(self.env)):
            is_plain = connector != "||" and all(
                len(pipe) == 1 and pipe[0].words[:1] == ["cd"] for _, _, pipe in before
            )
            if self.depth >= MAX_NESTING or not is_plain:
                return None
            self.run(before)
            printed = self.output(nodes)
            if (
                printed is None
                and len(nodes) == 1
                and (words := self.expanded(nodes[0]))
            ):
                return print_path(words, self.folder)
            return printed and printed.rstrip("\n")

    def output(self, nodes: Sequence[Node]) -> str | None:
        """Return what a pipe of small programs prints, if it is known."""
        if [node.words[:2] for node in nodes] == [
            ["scontrol", "show"],
            ["wc", "-l"],
        ]:  # the nodes of the job
            number = self.get("SLURM_NNODES")
            return None if has_unknown(number) else str(number)
        text: str | None = None
        for node in nodes:
            words = self.expanded(node)
            if not words or words[0] in self.functions:
                return None
            given = self.input(node.parts, empty=False)
            text = text if given is None else given
            if words[0] not in ("echo", "cat") and any(
                map(has_unknown, (*words, text or ""))
            ):
                return None
            if (text := print_output(words, text)) is None:
                return None
        return text

    def parameter(self, body: str) -> Any:
        """Return the value of `${body}`."""
        match = _PARAMETER.match(body)
        if match is None:
            return mark("${" + body + "}")
        prefix, name = match.groups()
        end = match.end()
        if body.startswith("[", end):  # a subscript, which may hold another one
            end = find_close(body, end) + 1
        key, rest = body[match.end() : end] or None, body[end:]
        if prefix == "!" and not rest and not key:
            target = self.text(f"${name}")
            return (
                self.get(target)
                if target.isidentifier() or target.isdecimal()
                else mark(name)
            )
        value = self.get(name, key)
        keys = [
            item[len(name) + 1 : -1] for item in self.env if item.startswith(f"{name}[")
        ]  # of a mapping
        is_missing = (
            isinstance(value, str)
            and value[:1] in (UNSET, ARGUMENT)
            and bool(MARKER.fullmatch(value))
        )
        if prefix == "!":
            return keys or [str(n) for n in range(len(value))]
        if prefix == "#":
            whole = self.env.get(name) if name not in self.given else ""
            if key and (
                isinstance(whole, _Open)
                or (isinstance(whole, str) and has_unknown(whole))
            ):
                return mark(name)
            if key and keys:
                is_indexed = all(map(str.isdecimal, keys))
                return str(
                    len(keys)
                    + (len(whole) if is_indexed and isinstance(whole, list) else 0)
                )
            if (
                is_missing and not key and value[0] == UNSET
            ):  # a number of something that the environment may set
                return mark(unknown_names(value)[0])
            return (
                "0"
                if is_missing
                else (
                    mark(name)
                    if isinstance(value, str) and has_unknown(value)
                    else str(len(value))
                )
            )
        if found := re.match(r":?[-=+?]", rest):
            is_set = not is_missing and (found[0][0] != ":" or bool(value))
            if found[0][-1] == "+":
                return self.text(rest[found.end() :]) if is_set else ""
            if is_set or found[0][-1] == "?":
                return value
            other = self.text(rest[found.end() :].strip("\n"))
            if found[0][-1] == "=":
                self.assign(name, key, other)
            return other
        if not rest:
            return value
        if isinstance(value, list):
            if sliced := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest) or re.fullmatch(
                r":\s+(-\d+)()", rest
            ):
                first = (
                    int(sliced[1]) - (name in "@*")
                    if sliced[2] is None or sliced[2]
                    else len(value) + int(sliced[1])
                )
                return value[
                    max(first, 0) : first + int(sliced[2]) if sliced[2] else None
                ]
            return [self.modify(item, rest) for item in value]
        return self.modify(value, rest)

    def modify(self, value: str, rest: str) -> str:
        """Return a text after `#`, `%`, `/`, `:`, `^` or `,` of `${NAME...}`."""
        parts = re.fullmatch(
            r"(##?|%%?|//?|.)((?:\\.|[^/\\])*)(/?)(.*)", rest, re.DOTALL
        )
        assert parts is not None
        sign, raw, _, new = parts.groups()
        pattern = self.text(raw if sign[0] == "/" else rest[len(sign) :])
        if has_unknown(value) or (sign[0] in "#%/" and has_unknown(pattern)):
            return value if MARKER.fullmatch(value) else mark("${...}")
        if sign[0] in "#%":
            places = range(len(value) + 1)[:: -1 if sign in ("##", "%") else 1]
            if sign[0] == "#":
                return next(
                    (value[n:] for n in places if fnmatchcase(value[:n], pattern)),
                    value,
                )
            return next(
                (value[:n] for n in places if fnmatchcase(value[n:], pattern)), value
            )
        if sign[0] == "/":
            return _replace(value, pattern, self.text(new), everywhere=sign == "//")
        if rest[0] == ":":
            first, _, length = rest[1:].partition(":")
            start = self.arithmetic(first)
            size = self.arithmetic(length) if length else str(len(value))
            if not (re.fullmatch(r"-?\d+", start) and re.fullmatch(r"-?\d+", size)):
                return mark("${...}")
            return value[int(start) :][: int(size)]
        change: Callable[[str], str] = {"^": str.upper, ",": str.lower}.get(
            rest[0], str
        )
        return change(value) if len(rest) > 1 else change(value[:1]) + value[1:]

    def arithmetic(self, raw: str) -> str:
        """Return the value of an arithmetic expression, which may assign; unknown if a
        part that is evaluated is.
        """
        return self.evaluate(self.text(raw.replace('"', ""), quoted=True))

    def evaluate(self, text: str) -> str:
        """Return the value of an arithmetic expression whose expansions with `$` are
        done.
        """
        try:
            return str(compile_expression(text, self.variable)())
        except (ScriptError, ZeroDivisionError) as error:
            # Which of its assignments have happened is not known.
            for name in (
                match[2]
                for match in VARIABLE.finditer(MARKER.sub("?", text))
                if match[1] or match[4]
            ):
                for item in (
                    name,
                    *(item for item in self.env if item.startswith(f"{name}[")),
                ):
                    self.env[item] = mark(name)
            found = MARKER.search(text) or MARKER.fullmatch(str(error))
            return found[0] if found else mark(f"$(({text.strip()}))")

    def variable(self, match: re.Match[str], right: Callable[[], int]) -> int:
        """Return the value of a variable in an arithmetic expression, which may hold
        one itself; change it as the signs say.
        """
        before, name, key, after = match.groups("")
        if after == "=":
            old = new = right()
        else:
            text = self.text("${" + name + key + "}")
            if not (text.isdecimal() or has_unknown(text)):
                if self.depth >= MAX_NESTING:
                    raise ScriptError(text)
                self.spent["steps"] += 1
                if self.spent["steps"] > MAX_STEPS:
                    raise RecursionError
                with self.changed(depth=self.depth + 1):
                    text = self.evaluate(text)
            old = to_number(text)
            if not before + after:
                return old
            new = apply_sign((before or after)[:-1], lambda: old, right)
        self.assign(name, key, str(new))
        return old if after in ("++", "--") else new


def _replace(value: str, pattern: str, new: str, *, everywhere: bool) -> str:
    """Return a text after `${NAME/PATTERN/NEW}`; unknown where the pattern has several
    stars, whose match is not unique.
    """
    start, end = "", ""
    if not everywhere and pattern[:1] in ("#", "%"):
        start, end, pattern = (
            "\\A" * (pattern[0] == "#"),
            "\\Z" * (pattern[0] == "%"),
            pattern[1:],
        )
    if not pattern:
        return new * bool(start) + value + new * bool(end)
    if pattern.count("*") > 1:
        return mark("${...}")
    found = re.fullmatch(
        r"\(\?s:(.*)\)\\[Zz]", translate(pattern.replace("[^", "[!")), re.DOTALL
    )
    assert found is not None
    return re.sub(
        f"{start}(?s:{found[1]}){end}",
        lambda _: new,
        value,
        count=0 if everywhere else 1,
    )


def _find_script(words: Sequence[str]) -> int | None:
    """Return the place of the script that a command starts: `bash x.sh`, `./x.sh`, or
    `srun -n 8 bash -x x.sh`.
    """
    names = [word.rpartition("/")[2] for word in words]
    wrapped = True  # whether all words so far belong to a wrapper
    for place, word in enumerate(words):
        if wrapped and word.endswith(SCRIPTS) and "=" not in word and word[0] != "-":
            return place
        value = (
            "=" in word or word[:1] in "-0123456789" or words[place - 1].startswith("-")
        )
        wrapped &= names[place] in _WRAPPERS or (value and place > 0)
        for at in range(place + 1, len(words) if names[place] in _SHELLS else 0):
            if names[place] != "sbatch" and re.fullmatch(r"-\w*[cs]\w*", words[at]):
                return None
            is_option = words[at][:1] in ("-", "+") or re.fullmatch(
                r"[-+]\w*[oO]|--rcfile|--init-file", words[at - 1]
            )
            if words[at].endswith(SCRIPTS) and not is_option:
                return at
            if not is_option and names[place] != "sbatch":
                return at if place == 0 else None
    return None
