"""The flow of a script: lists, branches, loops and functions, also where it is not
known which way a run goes.

If a condition is unknown, every branch is read. Where they join (`Flow.join`), a
variable keeps its value if all branches agree. Otherwise it goes up to the marker of a
variable of the condition, because to give that one settles all that differ; if the
condition has none, to one with the name of the variable that differs. A branch that
ends in `exit` is a check that has passed, and does not take part. The state before the
branches does, if it is possible that none of them is taken.

A loop is followed to its end while its condition is known, for at most `MAX_REPEATS`
passes. From a pass on whose condition is unknown, the state is joined with that after
the pass until it stays. A branch that may have left a loop or a function by `break`,
`continue` or `return` takes part where each pass, the loop and the function end.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rampup.contrib.check.shell.grammar import ASSIGNMENT, Node, ScriptError
from rampup.contrib.check.shell.programs import Test
from rampup.contrib.check.shell.values import (
    MARKER,
    OPTIONS,
    UNKNOWN,
    Env,
    Status,
    Words,
    first_marker,
    has_unknown,
    mark,
)
from rampup.contrib.check.shell.variables import MAX_NESTING, Variables

MAX_STEPS = 40_000
MAX_REPEATS = 256
_OPEN = re.compile(r"\*|\{.*(?:,|\.\.).*\}")  # files, or several words

Relevant = Callable[[Words], object]


@dataclass(eq=False)
class Stop(Exception):  # noqa: N818 - control flow, not an error
    """`exit`, `return`, `break` or `continue`."""

    name: str
    status: int | None = 0  # that of `return`; None if unknown


@dataclass(kw_only=True)
class Flow(Variables):
    """Evaluates nodes; a subclass evaluates their commands."""

    relevant: Relevant
    spent: Counter[Any] = field(
        default_factory=Counter
    )  # of all shells: "steps" and "scripts"
    # The marker of a variable of the last unknown condition; empty if it has none.
    why: str = ""
    # The variables of branches that may have left this loop, and this function.
    left: list[Env] = field(default_factory=list)
    returned: list[Env] = field(default_factory=list)
    # What the local variables of this function were before it; None outside of one.
    locals: Env | None = None
    # Loops around this command in its function: without one, `break` does nothing.
    loops: int = 0
    # Whether the last status is that of a program, which is taken to succeed.
    assumed: bool = False

    def program(self, words: list[str], node: Node, values: dict[str, str]) -> Status:
        """Evaluate another command; return its status. `values` are the variables
        before it.
        """
        raise NotImplementedError

    # Lists and pipes.

    def run(self, rows: Sequence[Any]) -> Status:
        """Evaluate a list; return its status: None if unknown."""
        status: Status = True
        for connector, negated, pipe in rows:
            if connector and status is (connector == "||"):
                continue
            if connector and status is None:
                branch = self.attempt([("", negated, pipe)])
                self.join([branch], self.why, exhaustive=False)
                continue
            try:
                status = self.pipe(pipe)
            except Stop as stop:
                if not (connector and stop.name == "exit"):
                    raise
                continue
            if negated and status is not None:
                status = not status
        return status

    def condition(self, rows: Sequence[Any]) -> Status:
        """Evaluate a condition; the success of a program is not known in advance."""
        self.why, self.assumed = "", False
        status = self.run(rows)
        return None if self.assumed else status

    def pipe(self, nodes: Sequence[Node]) -> Status:
        """Evaluate commands with pipes between them, each in a shell of its own."""
        status: Status = True
        for node in nodes:
            self.spent["steps"] += 1
            if self.spent["steps"] > MAX_STEPS:
                raise ScriptError(
                    f"line {node.line}: it has more than {MAX_STEPS:,} steps"
                )
            is_one = len(nodes) == 1
            status = self.node(node) if is_one else self.subshell([("", False, [node])])
        return status

    def subshell(self, rows: Sequence[Any]) -> Status:
        """Evaluate a list whose variables are lost behind it."""
        own = self.changed(env=dict(self.env), left=[], returned=[])
        with own, contextlib.suppress(Stop):
            return self.run(rows)
        return True

    def node(self, node: Node) -> Status:
        """Evaluate a command or a compound; return its status."""
        match node.kind:
            case "command":
                return self.command(node)
            case "{":
                return self.run(node.parts[0])
            case "(":
                return self.subshell(node.parts[0])
            case "arithmetic":
                value = self.arithmetic(node.words[0])
                self.why = first_marker(value)
                if has_unknown(value):
                    return None
                return value != "0"
            case "function":
                self.functions[node.words[0]] = node.parts[0]
            case "if" | "case":
                self.choose(node)
            case _:
                with self.changed(loops=self.loops + 1, left=[]):
                    self.loop(node)
        return True

    # Branches.

    def attempt(self, rows: Sequence[Any]) -> Env | None:
        """Evaluate a branch in a copy of the variables; return them, or None if it
        leaves a loop, a function or the script. One that ends in `exit`, or in `return`
        with an error, is a check, which has passed.
        """
        with self.changed(env=dict(self.env)):
            try:
                self.run(rows)
            except Stop as stop:
                if stop.name in ("break", "continue"):
                    self.left.append(self.env)
                elif stop.name == "return" and not stop.status:
                    self.returned.append(self.env)
                return None
            return self.env

    def join(
        self, branches: Iterable[Env | None], why: str, *, exhaustive: bool
    ) -> None:
        """Continue after branches when `why` leaves open which one was taken."""
        ends = [env for env in branches if env is not None]
        if not exhaustive or not ends:
            ends.append(self.env)
        joined: Env = {}
        for name in {n: 0 for env in ends for n in env}:
            values = [env.get(name) for env in ends]
            if values.count(values[0]) == len(values):
                joined[name] = values[0]
                continue
            matters = (self.relevant(_words(value)) for value in values)
            kind = OPTIONS if any(matters) else UNKNOWN
            joined[name] = kind + why[1:] if why else mark(name, kind)
        self.env = joined

    def choose(self, node: Node) -> None:
        """Evaluate an `if` or a `case`: the branch that is taken, or all that may
        be.
        """
        ends: list[Env | None] = []
        why = ""
        is_sure = bool(node.parts) and node.parts[-1][0] is None  # there is an `else`
        for met, body in self.branches(node):
            if met is False:
                continue
            why = why or self.why
            if met and not ends:  # nothing before it may have been taken
                before = dict(self.env)
                try:
                    self.run(body)
                    return
                except Stop as stop:
                    if stop.name != "exit":
                        raise
                    self.env = before  # a check, which has passed
                continue
            ends.append(self.attempt(body))
            if met and ends[-1] is not None:
                is_sure = True
                break
        self.join(ends, why, exhaustive=is_sure)

    def branches(self, node: Node) -> Iterator[tuple[Status, Sequence[Any]]]:
        """Yield whether the condition of each branch holds, and the branch. None is
        unknown, and `why` then says why.
        """
        if node.kind == "if":
            for condition, body in node.parts:
                yield condition is None or self.condition(condition), body
            return
        [word] = node.words
        subject = self.text(word, empty=True)
        for patterns, body in node.parts:
            texts = [self.text(pattern, empty=True) for pattern in patterns]
            met: Status = any(fnmatchcase(subject, text) for text in texts)
            if any(map(has_unknown, (subject, *texts))) and "*" not in texts:
                met = None
                self.why = first_marker(subject, *texts)
            yield met, body

    # Loops.

    def loop(self, node: Node) -> None:
        """Evaluate a loop to its end, or until its state stays."""
        body, passes = node.parts[-1], self.passes(node)
        is_open = False
        for number in itertools.count():
            before = dict(self.env)
            if (status := next(passes, False)) is False:
                break
            is_long = node.kind != "for" and (
                number >= MAX_REPEATS or self.spent["steps"] > MAX_STEPS // 8
            )
            is_open |= status is None or is_long
            if is_open:
                why = self.why if status is None else ""
                ends = [self.attempt(body), self.env, before if number else None]
                self.join(ends, why, exhaustive=True)
                # What is open stays so, under one name: then the state stays, too.
                for name, value in before.items():
                    if is_whole(value) and is_whole(self.env.get(name)):
                        self.env[name] = value
            else:
                try:
                    self.run(body)
                except Stop as stop:
                    if stop.name == "break":
                        break
                    if stop.name != "continue":
                        raise
            self.join([self.env, *self.left], "", exhaustive=True)
            if number and self.env == before and (is_open or node.kind != "for"):
                break  # or it goes on like this without end
        self.join([self.env, *self.left], "", exhaustive=True)

    def passes(self, node: Node) -> Iterator[Status]:
        """Prepare each pass of a loop; yield whether there is one, None if that is not
        known.
        """
        if node.kind == "for":
            yield from self.listed(node)
            return
        while node.kind == "count":  # what its head changes is unknown
            for part in node.words:
                self.arithmetic(part)
            self.why = ""
            yield None
        while True:
            # Where no arguments are given, a loop over them does nothing.
            with self.changed(asks=False):
                status = self.condition(node.parts[0])
            yield status if status is None else status is not (node.kind == "until")

    def listed(self, node: Node) -> Iterator[Status]:
        """Give the variable of a `for` each of its words, as `passes` does."""
        name, *listed = node.words
        items = self.expanded(listed)
        unknown = [item for item in items if has_unknown(item) or _OPEN.search(item)]
        if not unknown:
            for item in items:
                self.assign(name, item)
                yield True
            return
        while True:
            self.assign(name, mark(name))
            self.why = first_marker(*unknown)
            yield None

    # Commands of the shell itself, and calls.

    def command(self, node: Node) -> Status:
        """Evaluate a simple command; return its status."""
        own = []
        for word in node.words:
            match = ASSIGNMENT.fullmatch(word)
            if match is None:
                break
            own.append(match.groups())
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
        words = self.expanded(raw)
        if not words:
            return True
        if words[0] in self.functions:
            return self.function(words)
        values = {name: self.text(value) for name, _, _, value in own}
        return self.program(words, node, values)

    def test(self, raw: Words) -> Status:
        """Evaluate a test in brackets."""
        is_double = raw[0] == "[["
        words = list[str]()
        for part in raw[1:]:
            found = self.words(part, empty=True, split=not is_double)
            if is_double and not found:
                found = [""]
            words += found
        if raw[0] != "test":
            del words[-1:]  # the closing bracket
        test = Test(words)
        value = test.value()
        if value is None:
            self.why = self.why or first_marker(*test.unknown)
        return value

    def declare(self, raw: Words) -> None:
        """Evaluate `export`, `declare`, `local`, `readonly` or `typeset`."""
        command, *rest = raw
        options = "".join(word for word in rest if word.startswith("-"))
        exports = command == "export" or "x" in options
        is_local = command not in ("export", "readonly") and "g" not in options
        for word in rest:
            name = re.match(r"\w+", word)
            match = ASSIGNMENT.fullmatch(word)
            if name and is_local and self.locals is not None:
                self.locals.setdefault(name[0], self.env.get(name[0]))
            if match:
                self.set(*match.groups())
            elif '"' in word and (match := ASSIGNMENT.fullmatch(self.text(word))):
                self.assign(match[1], match[4])
            elif "=" in word:
                raise ScriptError(f"`{command} {word}` sets a name that is not known")
            if exports:
                self.exported = self.exported | {match[1] if match else word}

    def function(self, words: list[str]) -> Status:
        """Call a function; return its status."""
        if self.depth >= MAX_NESTING:
            return None
        before: Env = {}
        body = self.functions[words[0]]
        arguments = [self.argument("0"), *words[1:]]
        with self.changed(depth=self.depth + 1, asks=False, loops=0, locals=before):
            try:
                return self.call(lambda: self.node(body), arguments)
            finally:
                for name, value in before.items():
                    if value is None:
                        self.env.pop(name, None)
                    else:
                        self.env[name] = value

    def call(self, body: Callable[[], Status], arguments: list[str] | None) -> Status:
        """Evaluate a function or a sourced script, which `return` ends; return its
        status. None shares the arguments.
        """
        before = self.env["@"]
        if arguments is not None:
            self.env["@"] = arguments
        status: Status = None
        end: Stop | None = None
        with self.changed(returned=[]):
            try:
                status = body()
            except Stop as stop:
                if stop.name != "return":
                    end = stop
                elif stop.status is not None:
                    status = not stop.status
            returned = self.returned
        if end is not None and returned:  # a branch goes on behind the call
            self.env, end = returned[0], None
        self.join([self.env, *returned], "", exhaustive=True)
        if arguments is not None:
            self.env["@"] = before
        if end is not None:
            raise end
        return None if returned else status


def is_whole(value: Any) -> bool:
    """Return whether a value is a single marker."""
    return isinstance(value, str) and MARKER.fullmatch(value) is not None


def _words(value: Any) -> list[str]:
    """Return the words of the value of a variable."""
    if isinstance(value, list):
        return value
    return (value or "").split()
