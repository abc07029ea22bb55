"""Shell scripts as the commands that they would run. Nothing is executed and nothing is guessed.

A script is parsed into nodes, and these are evaluated as bash would: assignments, arrays, `export`, expansions with operators,
arithmetic, tests, loops, functions, here-documents and commands in quotes. A value that only a run could know (the output of a
command, the environment, positional parameters) is *unknown*: a marker with a name in the text, which spreads to all that is
made of it. If a condition is unknown, every branch is read, and a variable that differs between them is unknown.

The environment counts as empty, so `${X:-8}` is 8. A branch that ends in `exit` is a check that has passed.

The values of a variable form a small lattice. Below are known texts and lists; above them stand the markers, and nothing is
known of a text beyond the names of the markers in it, which say what a user must give:

- `_UNSET`, a variable that nothing sets: empty for tests and `:-`, as in bash, but a gap in the words of a command.
- `_ARGUMENT`, a positional parameter that was not given: empty for `-z`, `-n` and `:-` only.
- `_UNKNOWN`, what only a run can know.
- `_OPTIONS`, unknown as well, but some of its possible values set keys that matter: an error in the command that is chosen.

Expansions, tests and arithmetic only go up: a result is unknown if a part on which it depends is; only an assignment of a known
value goes down again. Where branches join (`_Reader.join`), a variable keeps its first value if all branches agree, or if its
words set the same keys to the same values in all of them (`relevant`). Otherwise it goes up to a marker with the name of a
variable of the condition, because to give that one settles all that differ. A branch that ends in `exit` does not take part.
The state before the branches does, if it is possible that none of them is taken.

A script that another one starts or sources is read as well. Where the run begins is not known: `PWD` is `.` until a `cd`, and a
relative path is that of the nearest file, from the folder of the script upwards.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rampup.config.yaml import Located, read_text
from rampup.errors import ConfigError

MAX_STEPS, MAX_TEXT, MAX_REPEATS, MAX_NESTING, MAX_SCRIPTS = 20_000, 200_000, 64, 20, 200
# A marker is one of the first four, a name and the last.
_UNSET, _ARGUMENT, _UNKNOWN, _OPTIONS, _END = "\ue000", "\ue001", "\ue002", "\ue003", "\ue004"
# Where words are split, and a part in quotes, which makes a word even if it is empty.
_BREAK, _EMPTY = "\ue005", "\ue006"
_RESERVED = re.compile(f"[{_UNSET}-{_EMPTY}\0]")
_MARKER = re.compile(f"[{_UNSET}-{_OPTIONS}]([^{_END}]*){_END}")
_EMPTIES = re.compile(f"{_UNSET}[^{_END}]*{_END}")
_OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|<<<|<<-|<<|&>>|&>|>>|>&|<&|<>|>\||[;&|()<>\n]")
_REDIRECTION = re.compile(r"\d*(<<<|<<-|<<|&>>|&>|>>|>&|<&|<>|>\||[<>](?!\())")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])(\[[^\]]*\])?(.*)", re.DOTALL)
_CONTINUED = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
_ENDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}", ")", ";;", ";&", ";;&")
_PRINTING = ("echo", "printf", "export", "tee", "log", "logger", "sed", "grep", "awk")
_SLURM = re.compile(r"^#SBATCH +(?:--(nodes|ntasks-per-node|gpus-per-node)[= ]|-N *)(\d+)[ \t\r]*(?:#.*)?$", re.MULTILINE)
_SLURM_NAMES = {"ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "gpus-per-node": ("SLURM_GPUS_PER_NODE",)}
# The suffixes of scripts, the commands that take one, those before a command, and files of a machine, not of a run.
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
_SHELLS = ("bash", "sh", "zsh", "dash", "sbatch")
_WRAPPERS = ("srun", "env", "nohup", "time", "timeout", "nice", "sudo", "setsid", "stdbuf", "mpirun", "mpiexec", "xargs")
_OF_MACHINE = ("activate", "conda.sh", ".bashrc", ".profile", ".bash_profile", "profile")
_STARTS = re.compile(r"(?:^|[\s;&|/])(?:bash|sh|sbatch|source|\.)\s[^\n;&|]*\.(?:sh|bash|slurm|sbatch)\b|^\S+\.sh\s")
_PATHS = re.compile(r"\s*(?:dirname|basename|realpath|readlink|pwd|cd)\b")


class Command(NamedTuple):
    """A command of a script.

    Attributes:
        words: its words after all expansions.
        line: the line where it begins; 0 on the command line.
        path: the file in which it stands.
        script: the script that it starts or sources; empty if none.
        unread: why that script is not read; empty if it is.
        places: file and line of the arguments with which its own script was started.
    """

    words: tuple[str, ...]
    line: int
    path: str = ""
    script: str = ""
    unread: str = ""
    places: Mapping[str, tuple[str, int]] = MappingProxyType({})

    def locate(self, value: Any, *words: str) -> Located:
        """Return a value that some words of the command set, and where they stand."""
        found = [self.places[word] for word in words if word in self.places]
        path, line = found[0] if found and len(found) == len(words) else (self.path, self.line)
        return Located(value=value, path=path, line=line or None)


class _Node(NamedTuple):
    """A command, with raw words and the bodies of its here-documents, or a compound with lists of nodes."""

    kind: str
    line: int
    words: list[str]
    parts: list[Any]


class _Stop(Exception):  # noqa: N818 - control flow, not an error
    """`exit`, `return`, `break` or `continue`."""


def read_commands(
    text: str,
    path: str | Path,
    given: Mapping[str, str],
    nested: re.Pattern[str],
    *,
    relevant: Callable[[Sequence[str]], object] = tuple,
    line: int | None = None,
) -> list[Command]:
    r"""Return the commands that a script would run, in order.

    Args:
        text: the script.
        path: its file, or another name of its source in the folder where it would run.
        given: values of variables, which win over the script's own assignments.
        nested: a quoted word or a here-document that matches is read as another script, as in `bash -c "..."`.
        relevant: what matters of some words; branches that agree in it do not differ.
        line: the line of all commands, if the text has no lines of its own.

    Raises:
        ConfigError: it is not a shell script: a quote or a compound command does not end.

    Example:
        >>> [command] = read_commands("N=2\nrun --n $((N * 4)) ${M:-8}", "x.sh", {}, re.compile("!"))
        >>> command.words, command.line
        (('run', '--n', '8', '8'), 2)
    """
    reader = _Reader(Path(path), given, nested, relevant)
    reader.env |= _read_slurm(text)
    reader.exported |= reader.env.keys()
    try:
        reader.run(_Parser(_RESERVED.sub("?", text), line).script())
    except _Stop:
        pass
    except (IndexError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"cannot read the shell script: {reason}", path=str(path)) from None
    return reader.commands


def _read_slurm(text: str) -> dict[str, str]:
    """Return Slurm's variables that the header of a batch script sets."""
    nodes = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return {name: number for option, number in _SLURM.findall(text) for name in _SLURM_NAMES.get(option, nodes)}


def needs_arguments(text: str) -> bool:
    """Return whether a part of a text is an argument that the script was not given."""
    return _ARGUMENT in text


def unknown_names(text: str) -> list[str]:
    """Return the names of the unknown parts of a text, such as `NNODES` or `$(nproc)`."""
    return list(dict.fromkeys(_MARKER.findall(text)))


def show_unknown(text: str) -> str:
    """Return a text with `$NAME` for each unknown part."""
    return _MARKER.sub(lambda match: match[1] if match[1].startswith("$") else f"${match[1]}", text)


def _mark(name: str, kind: str = _UNKNOWN) -> str:
    return kind + re.sub(rf"[\s{_UNSET}-{_END}]+", "_", name[:80]) + _END


class _Parser:
    """A recursive-descent parser of bash's grammar."""

    def __init__(self, text: str, line: int | None = None) -> None:
        self.text, self.at, self.line = text, 0, line
        self.newlines = [match.start() for match in re.finditer("\n", self.text)]
        self.documents: list[tuple[str, str, list[str]]] = []  # end word, pattern of indents to strip, where the body goes

    def script(self) -> list[Any]:
        """Return all nodes of the text; a stray end of a compound is skipped."""
        nodes = self.rows()
        while self.peek():
            self.next()
            nodes += self.rows()
        return nodes

    def peek(self) -> str:
        """Return the next operator or raw word; empty at the end."""
        while match := _CONTINUED.match(self.text, self.at):
            self.at = match.end()
        if self.at >= len(self.text):
            return ""
        if (match := _OPERATOR.match(self.text, self.at)) and not self.text.startswith(("<(", ">("), self.at):
            return match[0]
        text, start = self.text, self.at
        end = _skip(text, start)  # also over `<` or `>`, with which `<(command)` begins
        while True:
            is_process = text[end - 1] in "=<>" and (text[start] in "<>" or _ASSIGNMENT.match(text, start, end))
            if text[end : end + 1] == "(" and (is_process or (text[end - 1] in "@?*+!" and end - 1 > start)):
                end = _close(text, end) + 1
            if end >= len(text) or text[end] in " \t\r\n;&|()<>":
                return text[start:end]
            end = _skip(text, end)

    def next(self) -> str:
        token = self.peek()
        self.at += len(token)
        if token == "\n":
            documents, self.documents = self.documents, []
            for end, tabs, body in documents:
                last = re.compile(rf"^{tabs}{re.escape(end)}\r*$", re.MULTILINE).search(self.text, self.at)
                inner = self.text[self.at : last.start() if last else len(self.text)].removesuffix("\n")
                body.append(re.sub(rf"^{tabs}", "", inner, flags=re.MULTILINE))
                self.at = last.end() if last else len(self.text)
                self.at += self.text.startswith("\n", self.at)
        return token

    def expect(self, *tokens: str) -> str:
        self.skip("\n")
        if (token := self.next()) not in tokens:
            raise ValueError(f"line {self.here()}: {token[:20]!r} instead of {tokens[0]!r}")
        return token

    def skip(self, *tokens: str) -> None:
        while self.peek() in tokens:
            self.next()

    def here(self) -> int:
        return bisect.bisect_left(self.newlines, self.at) + 1 if self.line is None else self.line

    def rows(self) -> list[Any]:
        """Return (connector, negated, commands of a pipe) rows until an end word."""
        rows, connector = [], ""
        while token := self.peek():
            if token in (";", "&", "\n"):
                self.next()
            elif token in ("&&", "||"):
                connector = self.next()
            elif token in _ENDS:
                break
            else:
                negated = token == "!"
                if negated:
                    self.next()
                pipe = [self.command()]
                while self.peek() in ("|", "|&"):
                    self.next()
                    self.skip("\n")
                    pipe.append(self.command())
                rows.append((connector, negated, pipe))
                connector = ""
        return rows

    def command(self) -> _Node:
        """Return a simple or a compound command; the redirections of a compound are dropped, with its here-documents."""
        kind, line, words, parts = self.peek(), self.here(), list[str](), list[Any]()
        if self.text.startswith("((", self.at):
            kind, words = "arithmetic", [self.in_brackets()]
        elif kind not in ("(", "{", "if", "while", "until", "for", "select", "case", "function"):
            return self.simple(line)
        else:
            self.next()
        if kind in ("(", "{"):
            parts = [self.rows()]
            self.expect(")" if kind == "(" else "}")
        elif kind == "if":
            word = "elif"
            while word == "elif":
                condition = self.rows()
                self.expect("then")
                parts.append((condition, self.rows()))
                word = self.expect("fi", "elif", "else")
            if word == "else":
                parts.append((None, self.rows()))
                self.expect("fi")
        elif kind in ("while", "until"):
            parts = [self.rows(), self.body()]
        elif kind in ("for", "select"):
            self.peek()
            if self.text.startswith("((", self.at):
                kind, words = "count", self.in_brackets().split(";")
            else:
                kind, words = "for", [self.next(), '"$@"']
                self.skip("\n")
                if self.peek() == "in":
                    self.next()
                    del words[1:]
                    while self.peek() not in ("", ";", "\n"):
                        words.append(self.next())
            parts = [self.body()]
        elif kind == "case":
            words = [self.next()]
            self.expect("in")
            self.skip("\n")
            while self.peek() not in ("", "esac"):
                patterns = []
                while (token := self.next()) != ")":
                    if not token:
                        raise ValueError(f"line {line}: the case does not end")
                    if token not in ("|", "("):
                        patterns.append(token)
                parts.append((patterns, self.rows()))
                if self.peek() in (";;", ";&", ";;&"):
                    self.next()
                self.skip("\n")
            self.expect("esac")
        elif kind == "function":
            words = [self.next()]
            if self.peek() == "(":
                self.next()
                self.expect(")")
            self.skip("\n")
            parts = [self.command()]
        while self.redirect([]):
            pass
        return _Node(kind, line, words, parts)

    def in_brackets(self) -> str:
        """Return the text within `((` and `))`."""
        start, end = self.at + 2, _close(self.text, self.at + 1)
        self.at = end + 2
        return self.text[start:end]

    def body(self) -> list[Any]:
        self.skip(";", "\n")
        end = "}" if self.expect("do", "{") == "{" else "done"
        body = self.rows()
        self.expect(end)
        return body

    def simple(self, line: int) -> _Node:
        """Return a simple command; redirections are dropped, here-documents kept."""
        node = _Node("command", line, [], [])
        is_test = False
        ends = ("\n", ";", "&", "|", "|&", "&&", "||", ")", ";;", ";&", ";;&")
        while (token := self.peek()) and (is_test or token not in ends):
            if is_test:
                node.words.append(self.next())
                is_test = node.words[-1] != "]]"
            elif token == "(":
                self.next()
                self.expect(")")
                if len(node.words) != 1:
                    raise ValueError(f"line {line}: unexpected '('")
                self.skip("\n")
                return _Node("function", line, node.words, [self.command()])
            elif not self.redirect(node.parts):
                node.words.append(self.next())
                is_test = node.words == ["[["]
        return node

    def redirect(self, bodies: list[Any]) -> bool:
        """Drop a redirection, but add the body of a here-document; return whether there was one."""
        if not self.peek() or (match := _REDIRECTION.match(self.text, self.at)) is None:
            return False
        self.at = match.end()
        target = self.next()
        if match[1] in ("<<", "<<-"):
            end = re.sub(r"[\"'\\]", "", target)
            body = [] if end == target else ["quoted"]
            self.documents.append((end, "\t*" if match[1] == "<<-" else "", body))
            bodies.append(body)
        return True


def _skip(text: str, at: int) -> int:
    """Return the place after the character, quoted text or expansion at a place."""
    letter = text[at]
    if letter == "\\":
        return min(at + 2, len(text))
    if letter == "'":
        return text.index("'", at + 1) + 1
    if letter in '"`':
        end = at + 1
        while text[end] != letter:
            end = _skip(text, end) if text[end] in "\\$" or (text[end] == "`" and letter == '"') else end + 1
        return end + 1
    if letter == "$" and text[at + 1 : at + 2] in ("{", "(", "["):
        return _close(text, at + 1) + 1
    if text[at : at + 2] == "$'":
        at += 2
        while text[at] != "'":
            at += 2 if text[at] == "\\" else 1
    return at + 1


def _close(text: str, at: int) -> int:
    """Return the place of the bracket that closes the one at a place."""
    opening = text[at]
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    depth, end = 1, at + 1
    while True:
        if end >= len(text):
            raise ValueError(f"a {opening!r} does not end")
        if text[end] == closing:
            depth -= 1
            if not depth:
                return end
        depth += text[end] == opening
        if text[end] == "#" and opening == "(" and text[end - 1] in " \t\n":
            end = (text.find("\n", end) + 1 or len(text) + 1) - 1
        is_plain = text[end : end + 1] in ("", "$") and text[end + 1 : end + 2] not in ("{", "(", "'")
        end = end + 1 if is_plain else _skip(text, end)


def _has_unknown(text: str) -> bool:
    return _END in text


def _first_name(*texts: str) -> str:
    """Return the first variable on which one of the texts depends; empty if there is none."""
    return next((name for text in texts for name in unknown_names(text) if name.isidentifier()), "")


def open_options(word: str) -> str:
    """Return the name on which it depends what a word adds to a command, or nothing if that does not matter."""
    match = _MARKER.fullmatch(word)
    return match[1] if match and word[0] == _OPTIONS else ""


class _Reader:
    """Evaluates nodes. `env` maps a variable to its text, or a list for an array; `NAME[key]` is an item of a mapping."""

    def __init__(
        self, path: Path, given: Mapping[str, str], nested: re.Pattern[str], relevant: Callable[[Sequence[str]], object]
    ) -> None:
        self.path, self.given, self.nested, self.relevant = path, given, nested, relevant
        self.env: dict[str, Any] = {"PWD": "."}
        self.exported = {"PWD"}  # the variables and functions that another shell sees
        self.exports_all = False
        self.arguments = [str(path.absolute())]  # from $0 on
        self.places: Mapping[str, tuple[str, int]] = MappingProxyType({})  # those of the arguments
        self.running: list[tuple[Any, ...]] = [(str(path.absolute()),)]  # the scripts that have started each other
        self.functions: dict[str, _Node] = {}
        self.commands: list[Command] = []
        self.steps, self.scripts, self.depth = itertools.count(1), itertools.count(1), 0  # both of all shells
        self.cause = ""  # a variable on which the last unknown condition depends

    def run(self, rows: Sequence[Any]) -> bool | None:
        """Evaluate a list; return its status: None if unknown."""
        status: bool | None = True
        for connector, negated, pipe in rows:
            if (connector == "&&" and status is False) or (connector == "||" and status is True):
                continue
            is_test = len(pipe) == 1 and pipe[0].kind == "command" and pipe[0].words[:1] in (["["], ["[["], ["test"])
            if connector and status is None and not is_test:
                self.join([self.attempt([("", negated, pipe)])], self.cause, exhaustive=False)
                continue
            before = status
            for node in pipe:
                if next(self.steps) > MAX_STEPS:
                    raise ValueError(f"line {node.line}: it has more than {MAX_STEPS:,} steps")
                status = self.node(node)
            status = not status if negated and status is not None else status
            if before is None and status is (connector == "&&") and connector:
                status = None  # unknown and true, or unknown or false
        return status

    def attempt(self, rows: Sequence[Any]) -> dict[str, Any] | None:
        """Evaluate a branch in a copy of the variables; return them, or None if it ends with `exit`."""
        with self.changed(env=dict(self.env)):
            try:
                self.run(rows)
            except _Stop as stop:
                if stop.args[0] == "exit":
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

    def join(self, branches: Iterable[dict[str, Any] | None], cause: str, *, exhaustive: bool) -> None:
        """Continue after branches when the variable `cause` leaves open which one was taken."""
        ends = [env for env in branches if env is not None]
        if not exhaustive or not ends:
            ends.append(self.env)
        joined: dict[str, Any] = {}
        for name in {n: 0 for env in ends for n in env}:
            values = [env.get(name) for env in ends]
            words = [value if isinstance(value, list) else (value or "").split() for value in values]
            matters = [self.relevant(part) for part in words] if values.count(values[0]) < len(values) else []
            if (any(matters) and matters.count(matters[0]) == len(matters)) or not matters:
                joined[name] = values[0]  # they do not differ in anything that matters
            else:
                joined[name] = _mark(cause or name, _OPTIONS if any(matters) else _UNKNOWN)
        self.env = joined

    def node(self, node: _Node) -> bool | None:
        status: bool | None = True
        if node.kind == "command":
            return self.command(node)
        if node.kind == "{":
            return self.run(node.parts[0])
        if node.kind == "(":
            self.attempt(node.parts[0])
        elif node.kind == "arithmetic":
            value = self.arithmetic(node.words[0])
            status = None if _has_unknown(value) else value != "0"
        elif node.kind == "function":
            self.functions[node.words[0]] = node.parts[0]
        elif node.kind in ("if", "case"):
            subject, ends, cause = self.text(node.words[0], empty=True) if node.words else "", [], ""
            for condition, body in node.parts:
                self.cause = ""
                if node.kind == "if":
                    met = True if condition is None else self.run(condition)
                else:
                    texts = [self.text(pattern, empty=True) for pattern in condition]
                    self.cause = _first_name(subject, *texts)
                    met = any(fnmatchcase(subject, text) for text in texts)
                    if any(map(_has_unknown, (subject, *texts))) and "*" not in texts:
                        met = None
                cause = cause or self.cause
                if met is False:
                    continue
                ends.append(self.attempt(body))
                if met and (ends[-1] is not None or condition is None):
                    break
            else:
                ends.append(self.env)
            self.join(ends, cause, exhaustive=True)
        elif node.kind == "for":  # once for each word
            name = node.words[0]
            raw_words = list[str]()
            for raw in node.words[1:]:  # {1..4} and {a,b} are several words
                span, listed = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", raw), re.fullmatch(r"\{([^{}$,]+(?:,[^{}$,]+)+)\}", raw)
                first, last = (int(span[1]), int(span[2])) if span else (0, 0)
                numbers = map(str, range(first, min(last, first + MAX_REPEATS) + 1))
                raw_words += numbers if span else listed[1].split(",") if listed else [raw]
            for item in [word for raw in raw_words for word in self.words(raw)][:MAX_REPEATS]:
                unknown = _has_unknown(item) or "*" in item
                self.assign(name, "", _mark(name) if unknown else item)
                if not self.repeat(node.parts[-1]):
                    break
        elif node.kind == "count":
            self.arithmetic(node.words[0])
            for _ in range(MAX_REPEATS):
                value = self.arithmetic(node.words[1]) if node.words[1].strip() else "1"
                if _has_unknown(value):  # once, as a branch that may not be taken
                    self.join([self.attempt(node.parts[-1])], "", exhaustive=False)
                if value == "0" or _has_unknown(value) or not self.repeat(node.parts[-1]):
                    break
                self.arithmetic(node.words[2])
        elif self.run(node.parts[0]) is not (node.kind == "until"):  # likewise
            self.join([self.attempt(node.parts[-1])], "", exhaustive=False)
        return status

    def repeat(self, body: Sequence[Any]) -> bool:
        try:
            self.run(body)
        except _Stop as stop:
            if stop.args[0] in ("exit", "return"):
                raise
            return bool(stop.args[0] == "continue")
        return True

    def command(self, node: _Node) -> bool | None:
        own = [match.groups() for match in itertools.takewhile(bool, map(_ASSIGNMENT.fullmatch, node.words)) if match]
        raw = node.words[len(own) :]
        if not raw:
            for assignment in own:
                self.set(*assignment)
            return True
        if raw[0] in ("[[", "[", "test"):
            quoted = raw[0] == "[["
            found = (self.words(part, empty=True, split=not quoted) or [""] * quoted for part in raw[1:])
            words = list(itertools.chain.from_iterable(found))
            test = _Test(words if raw[0] == "test" else words[:-1])
            value = test.value()
            if value is None:
                self.cause = self.cause or _first_name(*test.unknown)
            return value
        if raw[0] in ("export", "declare", "local", "readonly", "typeset"):
            exports = raw[0] == "export" or any(re.fullmatch(r"-\w*x\w*", word) for word in raw)
            for word in raw[1:]:
                if match := _ASSIGNMENT.fullmatch(word):
                    self.set(*match.groups())
                elif (match := _ASSIGNMENT.fullmatch(self.text(word))) and '"' in word:
                    self.assign(match[1], match[2], match[4])
                self.exported |= {match[1] if match else word} if exports else set()
            return True
        words = [word for part in raw for word in self.words(part)]
        if not words:
            return True
        name, *rest = words
        if name in self.functions:
            if self.depth >= MAX_NESTING:
                return None
            with self.changed(arguments=[self.arguments[0], *rest], depth=self.depth + 1):
                try:
                    return self.node(self.functions[name])
                except _Stop as stop:
                    if stop.args[0] != "return":
                        raise
                    return None
        values = {name: self.text(value) for name, _, _, value in own}
        match name:
            case "exit" | "return" | "break" | "continue":
                raise _Stop(name)
            case "set":
                self.exports_all |= any(re.fullmatch(r"-\w*a\w*|allexport", word) for word in rest)
                if "--" in rest:
                    self.arguments[1:] = rest[rest.index("--") + 1 :]
            case "shift":
                del self.arguments[1 : 1 + (int(rest[0]) if rest and rest[0].isdigit() else 1)]
            case "cd":
                folder = next((word for word in rest if not word.startswith("-")), _mark("PWD"))
                path = os.path.normpath(os.path.join(self.folder, folder))
                self.env["PWD"] = _mark("PWD") if _has_unknown(path) else path
            case "unset":
                for word in rest:
                    self.env.pop(word, None)
            case "read" | "mapfile" | "readarray" | "getopts":
                for word in filter(str.isidentifier, rest):
                    self.assign(word, "", _mark(word))
                return False if name == "getopts" else None
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

    def script(self, text: str, line: int | None) -> bool | None:
        """Evaluate a text in the same shell."""
        with self.changed(depth=self.depth + 1):
            return self.run(_Parser(text, line).script()) if self.depth < MAX_NESTING else None

    def record(self, words: list[str], node: _Node, own: dict[str, str]) -> bool | None:
        """Keep a command, and those in its script, its quoted words and here-documents."""
        if words[0] in _PRINTING:
            words = words[:1]
        if (place := _find_script(words)) is not None:
            return self.follow(words, place, node.line, own)
        self.commands.append(Command(tuple(words), node.line, str(self.path), places=self.places))
        searches = (self.nested.search, _STARTS.search)
        texts = [
            (word.removeprefix("--wrap="), words[place + 2 :])
            for place, (before, word) in enumerate(itertools.pairwise(words))
            if any(map(str.isspace, word)) and (before in ("-c", "-lc") or any(search(word) for search in searches))
        ]
        for body in node.parts:
            text = body[-1] if len(body) > 1 else self.text(body[-1].replace('\\"', '\\\\"'), quoted=True) if body else ""
            texts += [(text, [])] if any(search(text) for search in searches) else []
        for text, parameters in texts:
            number = len(self.commands)
            try:
                self.shell(text, node.line, own, arguments=parameters or [_mark("$0")])
            except (ValueError, IndexError):
                del self.commands[number:]
        return None if words[0] in ("grep", "command", "which", "nvidia-smi") else True

    def shell(self, text: str, line: int | None, own: dict[str, str], **changes: Any) -> None:
        """Evaluate a text in another shell, which sees what is exported and the variables of its `own`."""
        shell = copy.copy(self)
        shell.env = {name: value for name, value in self.env.items() if name in self.exported} | own
        shell.exported = self.exported | own.keys()
        shell.functions = {name: body for name, body in self.functions.items() if name in self.exported}
        shell.exports_all = False
        vars(shell).update(changes)
        with contextlib.suppress(_Stop):
            shell.script(text, line)

    def follow(self, words: list[str], place: int, line: int, own: dict[str, str]) -> bool | None:
        """Evaluate the script that the word at a place starts or sources, or keep the reason why it is not read."""
        number, word, arguments, sourced = len(self.commands), words[place], words[place + 1 :], words[0] in ("source", ".")
        command = Command(tuple(words), line, str(self.path), script=word, places=self.places)
        self.commands.append(command)
        try:
            if word.startswith("<("):
                raise ConfigError(f"what {show_unknown(word)} prints is not known")
            if names := unknown_names(word):
                settle = f"; add {names[0]}=..." if names[0].isidentifier() else ""
                raise ConfigError(f"the script does not say what ${names[0].lstrip('$')} is, in {show_unknown(word)}{settle}")
            # The working directory may be one of another machine.
            pwd, found = self.folder, list[tuple[str, str]]()
            for directory in dict.fromkeys(("." if _has_unknown(pwd) else pwd, ".")):
                for up in map(str, self.path.absolute().parents):
                    start = os.path.normpath(os.path.join(up, directory))
                    file = os.path.normpath(os.path.join(start, word))
                    found += [(file, start)] if os.path.isfile(file) else []
            if not found:
                raise ConfigError(f"{word} is neither beside this script nor in a folder above it; put it there")
            running = {row[0] for row in self.running}
            file, folder = min(found, key=lambda row: row[0] in running)
            text = _RESERVED.sub("?", read_text(file))
            if not sourced:
                before = [part for word in words[:place] for part in word.removeprefix("--export=").split(",")]
                own = {**own, "PWD": folder, **dict(part.split("=", 1) for part in before if _ASSIGNMENT.fullmatch(part))}
                if "sbatch" in before or "srun" in before:
                    options = (f"\n#SBATCH {a}\n#SBATCH {a} {b}" for a, b in itertools.pairwise(words[: place + 1]))
                    own |= _read_slurm("".join([text if "sbatch" in before else "", *options]))
            state = (file, arguments, {name: self.env[name] for name in self.env if sourced or name in self.exported} | own)
            if state in self.running:
                raise ConfigError(f"{word} starts itself")
            if self.depth + 1 >= MAX_NESTING or next(self.scripts) > MAX_SCRIPTS:
                raise ConfigError(f"scripts start each other too often, {MAX_NESTING} deep or {MAX_SCRIPTS} in all")
            path = Path(file.removeprefix(f"{Path.cwd()}/"))
            self.commands[number] = command._replace(script=str(path))
            changes = {"path": path, "running": [*self.running, state]}
            if arguments or not sourced:
                places = {word: self.places.get(word, (str(self.path), line)) for word in arguments}
                changes |= {"places": places, "arguments": [self.arguments[0] if sourced else file, *arguments]}
            if not sourced:
                self.shell(text, None, own, **changes)
                return True
            with self.changed(**changes):
                try:
                    self.script(text, None)
                except _Stop as stop:
                    if stop.args[0] != "return":
                        raise
        except (ValueError, IndexError) as error:
            reason = str(error) if isinstance(error, ConfigError) else f"{path}: cannot read the shell script: {error}"
            self.commands[number:] = [command._replace(unread=reason)]
            return None if sourced else True
        return True

    # Variables and expansions.

    @property
    def folder(self) -> str:
        """The working directory: `.` where the run begins, and also after `unset PWD`."""
        found: str = self.get("PWD")
        return "." if found == _mark("PWD", _UNSET) else found

    def get(self, name: str, key: str | None = None) -> Any:
        """Return the value of a parameter: text, a list, or the marker of one that is not set."""
        if name in self.given:
            return self.given[name]
        if name in ("@", "*"):
            return self.arguments[1:]
        if name.isdigit():
            return self.arguments[int(name)] if int(name) < len(self.arguments) else _mark(f"${name}", _ARGUMENT)
        if name in "#?$!-":
            return str(len(self.arguments) - 1) if name == "#" else "0" if name == "?" else _mark(f"${name}")
        missing = _mark(name, _UNSET)
        value = [str(self.path.absolute())] if name == "BASH_SOURCE" else self.env.get(name, [] if key else missing)
        if key is None:
            return value[0] if isinstance(value, list) and value else value or ""
        index = self.text(key[1:-1])
        if f"{name}[{index}]" in self.env:
            return self.env[f"{name}[{index}]"]
        items = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return items
        number = self.arithmetic(index)
        if _has_unknown(number) or (isinstance(value, str) and _has_unknown(value) and number != "0"):
            return _mark(name)
        return items[int(number)] if -len(items) <= int(number) < len(items) else missing

    def set(self, name: str, key: str | None, plus: str, raw: str) -> None:
        """Assign the raw text after the `=`."""
        before = self.env.get(name)
        if raw.startswith("(") and raw.endswith(")") and not key:
            parser, parts = _Parser(raw[1:-1], 1), list[str]()  # comments and line ends between items are dropped
            while token := parser.peek():
                parser.next()
                parts += [] if _OPERATOR.fullmatch(token) else [token]
            items = [word for part in parts for word in (self.words(part) if "=" not in part[:1] else [part])]
            pairs = (re.fullmatch(r"\[([^\]]+)\]=(.*)", part, re.DOTALL) for part in items)
            keyed = {pair[1]: pair[2] for pair in pairs if pair}
            self.env |= {f"{name}[{index}]": item for index, item in keyed.items()}
            old = before if isinstance(before, list) else [] if before is None else [before]
            self.assign(name, "", [*(old if plus else []), *(keyed.values() or items)])
            return
        value = self.text(raw)
        if plus and not key:
            value = (before[0] if isinstance(before, list) and before else before if isinstance(before, str) else "") + value
        self.assign(name, key, value)

    def assign(self, name: str, key: str | None, value: Any) -> None:
        if isinstance(value, str):
            # A value that is unknown as a whole, and has no name of its own, gets that of its variable.
            match = _MARKER.fullmatch(value)
            value = value[0] + name + _END if match and match[1].startswith("$") else value
            if len(value) > MAX_TEXT:
                raise ValueError(f"{name} is longer than {MAX_TEXT:,} characters")
            self.exported |= {name} if self.exports_all else set()
        if not key:
            self.env[name] = value
            return
        index, items = self.text(key[1:-1]), self.env.get(name)
        if isinstance(items, list) and not any(item.startswith(f"{name}[") for item in self.env):  # no mapping
            index = self.arithmetic(index)
        if index.isdigit() and isinstance(items, list) and int(index) <= len(items):
            self.env[name] = [*items[: int(index)], value, *items[int(index) + 1 :]]
        else:
            self.env[f"{name}[{index}]"] = value

    def words(self, raw: str, *, empty: bool = False, split: bool = True) -> list[str]:
        """Return the words that a raw word becomes: none, one or several; `empty` as in `text`."""
        text = ""
        for piece, quoted in self.pieces(raw):
            parts = piece if isinstance(piece, list) else [piece]
            if quoted or not split:
                text += _BREAK.join(_EMPTY + part for part in parts)
            else:
                text += re.sub(r"\s+", _BREAK, " ".join(parts))
        text = _EMPTIES.sub("", text) if empty else text
        return [word.replace(_EMPTY, "") for word in text.split(_BREAK) if word]

    def text(self, raw: str, *, empty: bool = False, quoted: bool = False) -> str:
        """Return a raw word, or the inside of double quotes, as one text, without splitting it.

        Variables that nothing sets are empty in a test (`empty`), but not among the words of a command.
        """
        pieces = self.pieces(raw, quoted=quoted)
        text = "".join(" ".join(part) if isinstance(part, list) else part for part, _ in pieces)
        return _EMPTIES.sub("", text) if empty else text

    def pieces(self, raw: str, *, quoted: bool = False) -> Iterator[tuple[Any, bool]]:
        """Yield the expanded parts of a raw word, or of the inside of double quotes, and whether each is protected."""
        at = 0
        while at < len(raw):
            letter, start = raw[at], at
            if letter in "$`":
                value, at = self.expand(raw, at)
                joined = quoted and isinstance(value, list) and raw[start:at].endswith(("*", "[*]}"))
                yield " ".join(value) if joined else value, quoted or raw.startswith("$'", start)
            elif letter == "\\" and (not quoted or raw[at + 1 : at + 2] in ("$", "`", '"', "\\", "\n")):
                at += 2
                yield raw[start + 1 : at].strip("\n"), True
            elif letter in "'\"" and not quoted:
                at = _skip(raw, at)
                inner: list[tuple[Any, bool]] = [(raw[start + 1 : at - 1], True)]
                if letter == '"':
                    inner = list(self.pieces(inner[0][0], quoted=True))
                if len(inner) != 1 or not isinstance(inner[0][0], list):
                    yield "", True
                yield from inner
            else:
                ends = "\\$`" if quoted else "\\'\"$`"
                at = next((n for n in range(at + 1, len(raw)) if raw[n] in ends), len(raw))
                yield raw[start:at], True

    def expand(self, raw: str, at: int) -> tuple[Any, int]:
        """Return the value of the expansion at a place, and the place after it."""
        end = _skip(raw, at)
        part = raw[at:end]
        if part.startswith("$((") and part.endswith("))"):
            return self.arithmetic(part[3:-2]), end
        if part.startswith("$["):
            return self.arithmetic(part[2:-1]), end
        if part.startswith("$'"):
            return part[2:-1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'"), end
        if part[0] == "`" or part.startswith("$("):
            path = self.print_path(part.removeprefix("$")[1:-1])
            return _mark("$" + part if part[0] == "`" else part) if path is None else path, end
        if part.startswith("${"):
            return self.parameter(part[2:-1]), end
        match = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])").match(raw, at)
        return ("$", at + 1) if match is None else (self.get(match[1]), match.end())

    def print_path(self, text: str) -> str | None:
        """Return the path that `dirname`, `basename`, `realpath`, `readlink -f`, `pwd` or `cd ... && pwd` prints, if known."""
        rows = _Parser(text, 0).script() if _PATHS.match(text) else []
        folder, result = self.folder, None
        for _, _, pipe in rows:
            name, *rest = [word for raw in pipe[0].words for word in self.words(raw)] or [""]
            operands = [word for word in rest if not word.startswith("-")]
            path = os.path.normpath(os.path.join(folder, *operands[:1]))
            if len(pipe) > 1 or _has_unknown(path) or not (operands or name == "pwd"):
                return None
            if name == "cd":
                folder = path
            elif name in ("pwd", "realpath", "readlink"):
                result = path
            elif name == "dirname":
                result = os.path.dirname(operands[0]) or "."
            elif name == "basename":
                result = os.path.basename(operands[0]).removesuffix("".join(operands[1:]))
            else:
                return None
        return result

    def parameter(self, body: str) -> Any:
        """Return the value of `${body}`."""
        match = _PARAMETER.fullmatch(body)
        if match is None:
            return _mark("${" + body + "}")
        prefix, name, key, rest = match.groups()
        if prefix == "!" and not rest and not key:
            target = self.text(f"${name}")
            return self.get(target) if target.isidentifier() else _mark(name)
        value = self.get(name, key)
        is_missing = isinstance(value, str) and value[:1] in (_UNSET, _ARGUMENT) and bool(_MARKER.fullmatch(value))
        if prefix == "!":  # the keys of a mapping
            keys = [item[len(name) + 1 : -1] for item in self.env if item.startswith(f"{name}[")]
            return keys or [str(n) for n in range(len(value))]
        if prefix == "#":
            return "0" if is_missing else _mark(name) if isinstance(value, str) and _has_unknown(value) else str(len(value))
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
            if sliced := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", rest):
                first = int(sliced[1]) - (name in "@*")
                return value[max(first, 0) : None if sliced[2] is None else first + int(sliced[2])]
            return [self.modify(item, rest) for item in value]
        return self.modify(value, rest)

    def modify(self, value: str, rest: str) -> str:
        """Return a text after `#`, `%`, `/`, `:`, `^` or `,` of `${NAME...}`."""
        sign, raw, _, new = re.fullmatch(r"(##?|%%?|//?|.)((?:\\.|[^/\\])*)(/?)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
        pattern = self.text(raw if sign[0] == "/" else rest[len(sign) :])
        if _has_unknown(value) or (sign[0] in "#%/" and _has_unknown(pattern)):
            return value if _MARKER.fullmatch(value) else _mark("${...}")
        if sign[0] in "#%":
            places = range(len(value) + 1)[:: -1 if sign in ("##", "%") else 1]
            if sign[0] == "#":
                return next((value[n:] for n in places if fnmatchcase(value[:n], pattern)), value)
            return next((value[:n] for n in places if fnmatchcase(value[n:], pattern)), value)
        if sign[0] == "/":
            is_plain = pattern and not set(pattern) & set("*?[")
            return value.replace(pattern, self.text(new), -1 if sign == "//" else 1) if is_plain else value
        if rest[0] == ":":
            first, _, length = rest[1:].partition(":")
            start, size = self.arithmetic(first), self.arithmetic(length) if length else str(len(value))
            if not (re.fullmatch(r"-?\d+", start) and re.fullmatch(r"-?\d+", size)):
                return _mark("${...}")
            return value[int(start) :][: int(size)]
        return {"^": str.upper, ",": str.lower}.get(rest[0], str)(value) if len(rest) > 1 else value

    def arithmetic(self, raw: str) -> str:
        """Return the value of an arithmetic expression, which may assign; unknown if a part that is evaluated is."""
        return self.evaluate(self.text(raw.replace('"', ""), quoted=True))

    def evaluate(self, text: str) -> str:
        """Return the value of an arithmetic expression whose expansions with `$` are done.

        It is parsed into functions without arguments, so that a side of a condition that is not taken does not happen.
        """
        tokens = [*(match[0] for match in _TOKEN.finditer(text)), ""]

        def expect(token: str) -> None:
            if tokens.pop(0) != token:
                raise ValueError(text)

        def expression(level: int) -> Callable[[], int]:
            token = tokens.pop(0)
            left: Callable[[], int]
            if token in _UNARY:
                operand = expression(len(_LEVELS))
                left = partial(lambda sign: int(_UNARY[sign](operand())), token)
            elif token == "(":
                left = expression(0)
                expect(")")
            elif match := _VARIABLE.fullmatch(token):
                right = expression(1) if match[4] and match[4].endswith("=") else lambda: 1
                left = partial(self.variable, match, right)
            else:
                left = partial(_number, token)
            while (own := _PRECEDENCE.get(tokens[0], -1)) >= level:
                sign = tokens.pop(0)
                right = expression(own + (sign not in ("?", "**")))
                if sign == "?":
                    expect(":")
                    left = partial(lambda test, first, second: (first if test() else second)(), left, right, expression(own))
                else:
                    left = partial(_apply, sign, left, right)
            return left

        try:
            value = expression(0) if len(tokens) > 1 else int
            expect("")
            return str(value())
        except (ValueError, ArithmeticError, IndexError) as error:
            # Which of its assignments have happened is not known.
            for name in (match[2] for match in _VARIABLE.finditer(_MARKER.sub("?", text)) if match[1] or match[4]):
                for item in (name, *(item for item in self.env if item.startswith(f"{name}["))):
                    self.env[item] = _mark(name)
            found = _MARKER.search(text) or _MARKER.fullmatch(str(error))
            return found[0] if found else _mark(f"$(({text.strip()}))")

    def variable(self, match: re.Match[str], right: Callable[[], int]) -> int:
        """Return the value of a variable in an arithmetic expression, which may hold one itself; change it as the signs say."""
        before, name, key, after = match.groups("")
        if after == "=":
            old = new = right()
        else:
            text = self.text("${" + name + key + "}")
            if not (text.isdecimal() or _has_unknown(text)):
                if self.depth >= MAX_NESTING:
                    raise ValueError(text)
                if next(self.steps) > MAX_STEPS:
                    raise RecursionError
                with self.changed(depth=self.depth + 1):
                    text = self.evaluate(text)
            old = _number(text)
            if not before + after:
                return old
            new = _apply((before or after)[:-1], lambda: old, right)
        self.assign(name, key, str(new))
        return old if after in ("++", "--") else new


# C's binary operators, from the loosest to the tightest.
_LEVELS = (",", "?", "||", "&&", "|", "^", "&", "== !=", "< <= > >=", "<< >>", "+ -", "* / %", "**")
_PRECEDENCE = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    ",": lambda _, last: last,
}  # fmt: skip
_UNARY: dict[str, Callable[[int], int]] = {"-": operator.neg, "+": operator.pos, "!": operator.not_, "~": operator.invert}
# A variable with what changes it: `++` or `--` on either side, or an assignment such as `<<=`.
_VARIABLE = re.compile(r"(\+\+|--)?\s*([A-Za-z_]\w*)(\[[^\]]*\])?\s*((?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)?")
_TOKEN = re.compile(rf"{_MARKER.pattern}|0[xX][0-9a-fA-F]+|\d+|{_VARIABLE.pattern}|\*\*|<<|>>|[<>=!]=|&&|\|\||\S")


def _number(token: str) -> int:
    if _has_unknown(token):
        raise ValueError(token)
    return int(token, 8 if re.fullmatch(r"0\d+", token) else 0)


def _apply(sign: str, left: Callable[[], int], right: Callable[[], int]) -> int:
    if sign in ("||", "&&"):
        return int(bool(right())) if bool(left()) == (sign == "&&") else int(sign == "||")
    first, second = left(), right()
    if sign in ("<<", ">>", "**") and not 0 <= second < 64:
        raise ValueError(sign)  # undefined in C, or an error
    result = int(_ARITHMETIC[sign](first, second))
    if abs(result) >= 2**63:
        raise ValueError(sign)
    return result


_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_OPERATORS = {"=", "==", "!=", "=~", "<", ">", *_NUMBER_TESTS}


class _Test:
    """A test in brackets: `or` of `and` of tests. None is unknown, for instance whether a file exists."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.unknown: list[str] = []

    def value(self, *, any_of: bool = True) -> bool | None:
        """Return the result of the words up to an end or a `)`."""
        signs = ("||", "-o") if any_of else ("&&", "-a")
        result = self.value(any_of=False) if any_of else self.one()
        while self.words and self.words[0] in signs:
            self.words.pop(0)
            both = (result, self.value(any_of=False) if any_of else self.one())
            result = any_of if any_of in both else None if None in both else not any_of
        return result

    def one(self) -> bool | None:
        if not self.words:
            return False
        word = text = self.words.pop(0)
        value: bool | None = bool(word)
        if word in _OPERATORS and len(self.words) == 1:  # an empty variable without quotes, which is an error in bash
            self.words.clear()
            return False
        if word == "!" and self.words:
            result = self.one()
            return None if result is None else not result
        if word == "(":
            result = self.value()
            self.words[:1] = []
            return result
        if re.fullmatch(r"-[a-zA-Z]", word) and self.words and self.words[0] not in _OPERATORS:
            text = self.words.pop(0)
            if word not in ("-z", "-n"):
                return None
            value = bool(text) == (word == "-n")
            if text[:1] == _ARGUMENT:
                value, text = word == "-z", ""
        elif len(self.words) > 1 and self.words[0] in _OPERATORS:
            sign, other = self.words.pop(0), self.words.pop(0)
            text += other
            if sign in _NUMBER_TESTS:
                whole = all(re.fullmatch(r"\s*-?\d+\s*", number) for number in (word, other))
                value = _NUMBER_TESTS[sign](int(word), int(other)) if whole else None
            elif sign in ("<", ">"):
                value = (word < other) == (sign == "<")
            else:
                value = fnmatchcase(word, other) == (sign != "!=") if sign != "=~" else None
        if _has_unknown(text):
            self.unknown.append(text)
            return None
        return value


def _find_script(words: Sequence[str]) -> int | None:
    """Return the place of the script that a command starts: `bash x.sh`, `./x.sh`, or `srun -n 8 bash -x x.sh`."""
    names = [word.rpartition("/")[2] for word in words]
    wrapped = True  # whether all words so far belong to a wrapper
    for place, word in enumerate(words):
        if wrapped and word.endswith(SCRIPTS) and "=" not in word and word[0] != "-":
            return place
        value = "=" in word or word[:1] in "-0123456789" or words[place - 1].startswith("-")
        wrapped &= names[place] in _WRAPPERS or (value and place > 0)
        for at in range(place + 1, len(words) if names[place] in _SHELLS else 0):
            if names[place] != "sbatch" and re.fullmatch(r"-\w*[cs]\w*", words[at]):
                return None
            is_option = words[at][:1] in ("-", "+") or re.fullmatch(r"[-+]\w*[oO]|--rcfile|--init-file", words[at - 1])
            if words[at].endswith(SCRIPTS) and not is_option:
                return at
            if not is_option and names[place] != "sbatch":
                return at if place == 0 else None
    return None
