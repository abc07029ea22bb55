"""The variables of a script, and the words that its text becomes with them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rampup.contrib.check.shell.arithmetic import CHANGE, evaluate
from rampup.contrib.check.shell.grammar import (
    OPERATOR,
    Document,
    Node,
    Parser,
    ScriptError,
    find_close,
    parse,
    skip_part,
)
from rampup.contrib.check.shell.programs import print_output
from rampup.contrib.check.shell.values import (
    ARGUMENT,
    BREAK,
    EMPTY,
    MARKER,
    UNSET,
    Env,
    drop_unset,
    has_unknown,
    mark,
)

MAX_TEXT = 200_000
MAX_NESTING = 20
# An item of an array with a key, or braces that stand for several.
_ITEM = re.compile(r"\[[^\]]+\]=|\{.*(?:,|\.\.).*\}$")
_PARAMETER = re.compile(r"([!#]?)([A-Za-z_]\w*|\d+|[@*#?$!-])")


class OpenList(list[str]):
    """Words of which a part without quotes is unknown: they may be more, or fewer."""


@dataclass(kw_only=True)
class Variables:
    """What the variables of a shell are, and what words become with them."""

    path: Path  # the script
    given: Mapping[str, str]  # values that the user gives, which win
    # Texts, and lists for arrays. `@` has the positional parameters from $0 on.
    env: Env
    exported: Set[str]  # those that another shell sees
    exports_all: bool = False
    # whether a positional parameter that is not there may have been given
    asks: bool = True
    functions: dict[str, Node] = field(default_factory=dict)
    depth: int = 0  # of scripts, functions and substitutions within each other

    @contextlib.contextmanager
    def changed(self, **changes: Any) -> Iterator[None]:
        """Change attributes for a part of the script."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)

    # The value of a variable.

    def argument(self, name: str) -> Any:
        """Return a positional parameter, all of them, or their number."""
        arguments = self.env["@"]
        if isinstance(arguments, str):  # a marker
            return arguments
        if name == "#":
            return str(len(arguments) - 1)
        if not name.isdecimal():
            return arguments[1:]
        if int(name) < len(arguments):
            return arguments[int(name)]
        return mark(f"${name}", ARGUMENT if self.asks else UNSET)

    def get(self, name: str) -> Any:
        """Return the value of a parameter: a text, the list of `$@`, or the marker of
        one that is not set.
        """
        if name in self.given:
            return self.given[name]
        if name.isdecimal() or name in "@*#":
            return self.argument(name)
        if name in "?$!-":
            if name == "?":
                return "0"
            return mark(f"${name}")
        if name == "BASH_SOURCE":
            return str(self.path.absolute())
        value = self.env.get(name, mark(name, UNSET))
        if isinstance(value, list):
            return "".join(value[:1])
        return value

    def item(self, name: str, key: str) -> Any:
        """Return an item of an array, or a list of all."""
        whole: Any = self.env.get(name, [])
        if name in self.given:
            whole = self.given[name].split()
        if isinstance(whole, str) or name == "BASH_SOURCE":
            whole = [self.get(name)]
            whole = OpenList(whole) if has_unknown(whole[0]) else whole
        if key in ("@", "*"):
            return whole
        number = self.arithmetic(key)
        # A word that is open may be several, so that only the first place is known.
        if has_unknown(number) or (isinstance(whole, OpenList) and number != "0"):
            return mark(name)
        place = int(number)
        is_there = -len(whole) <= place < len(whole)
        if is_there:
            return whole[place]
        return mark(name, UNSET)

    # Assignments.

    def set(self, name: str, key: str | None, plus: str, raw: str) -> None:
        """Assign the raw text after the `=`. A single item of an array is not followed:
        then the whole is unknown.
        """
        before = self.env.get(name)
        is_array = raw.startswith("(") and raw.endswith(")")
        is_several = isinstance(before, list) and len(before) > 1
        if is_array and not key:
            self.env[name] = self.array(name, raw[1:-1], before if plus else None)
        elif key or is_several:
            self.env[name] = mark(name)
        elif plus and before is not None:
            self.assign(name, f"{self.get(name)}{self.text(raw)}")
        else:
            self.assign(name, self.text(raw))

    def array(self, name: str, raw: str, before: Any) -> Any:
        """Return the items in the brackets of `NAME=(...)`, behind those before."""
        items: list[str] = before or []
        if isinstance(before, str):
            items = [before]
        is_open = isinstance(items, OpenList)
        parser = Parser(raw, 1)
        while parser.peek():
            part = parser.next()
            if OPERATOR.fullmatch(part):  # the end of a line
                continue
            if _ITEM.match(part):
                return mark(name)
            words = self.words(part)
            items = [*items, *words]
            is_open |= isinstance(words, OpenList)
        if is_open or any("*" in word for word in items):
            return OpenList(items)
        return items

    def assign(self, name: str, value: str) -> None:
        """Assign a text to a variable."""
        if name == "IFS":
            raise ScriptError("it sets IFS, at which words are split")
        # A value that is unknown as a whole, and has no name of its own, gets that of
        # its variable.
        match = MARKER.fullmatch(value)
        if match and match[1].startswith("$"):
            value = mark(name, value[0], match[2])
        if len(value) > MAX_TEXT:
            raise ScriptError(f"{name} is longer than {MAX_TEXT:,} characters")
        if self.exports_all:
            self.exported = self.exported | {name}
        self.env[name] = value

    # Words and texts.

    def words(self, raw: str, *, empty: bool = False, split: bool = True) -> list[str]:
        """Return the words that a raw word becomes: none, one or several; `empty` as in
        `text`.
        """
        text, is_open = "", False
        for piece, quoted in self.pieces(raw):
            parts = piece if isinstance(piece, list) else [piece]
            is_open |= isinstance(piece, OpenList) or (
                split and not quoted and any(map(has_unknown, parts))
            )
            if quoted or not split:
                text += BREAK.join(EMPTY + part for part in parts)
            else:
                text += re.sub(r"[ \t\n]+", BREAK, BREAK.join(parts))
        text = drop_unset(text) if empty else text
        found = [word.replace(EMPTY, "") for word in text.split(BREAK) if word]
        if is_open:
            return OpenList(found)
        return found

    def text(self, raw: str, *, empty: bool = False, quoted: bool = False) -> str:
        """Return a raw word, or the inside of double quotes, as one text; in a test,
        what nothing sets is `empty`.
        """
        pieces = self.pieces(raw, quoted=quoted)
        text = "".join(
            " ".join(part) if isinstance(part, list) else part for part, _ in pieces
        )
        if empty:
            return drop_unset(text)
        return text

    def pieces(self, raw: str, *, quoted: bool = False) -> Iterator[tuple[Any, bool]]:
        """Yield the expanded parts of a raw word, or of the inside of double quotes,
        and whether each is protected.
        """
        at = 0
        while at < len(raw):
            letter, start = raw[at], at
            if letter in "$`":
                value, at = self.expand(raw, at)
                if quoted and isinstance(value, list) and "*" in raw[start:at]:
                    value = " ".join(value)
                yield value, quoted
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
                at += 1
                while at < len(raw) and raw[at] not in ends:
                    at += 1
                yield raw[start:at], True

    def input(self, documents: Sequence[Document]) -> str:
        """Return what the last here-document gives a command to read."""
        if not documents:
            return ""
        last = documents[-1]
        if last.quoted:
            return last.text
        return self.text(last.text.replace('\\"', '\\\\"'), quoted=True)

    # Expansions.

    def expand(self, raw: str, at: int) -> tuple[Any, int]:
        """Return the value of the expansion at a place, and the place after it."""
        end = skip_part(raw, at)
        part = raw[at:end]
        if match := re.fullmatch(r"\$\(\((.*)\)\)", part, re.DOTALL):
            return self.arithmetic(match[1]), end
        if part.startswith("$["):  # an old form of arithmetic
            return mark(part), end
        if part[0] == "`" or part.startswith("$("):
            printed = self.substitute(part.removeprefix("$")[1:-1])
            name = "$" + part if part[0] == "`" else part
            if printed is None:
                printed = mark(name, command=part)
            return printed, end
        if part.startswith("${"):
            return self.parameter(part[2:-1]), end
        match = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!-])").match(raw, at)
        if match is None:  # other signs are texts
            return "$", at + 1
        return self.get(match[1]), match.end()

    def substitute(self, text: str) -> str | None:
        """Return what a command substitution prints, if it is known: that of one small
        program, perhaps after `cd`.
        """
        if self.depth >= MAX_NESTING:
            return None
        try:
            rows = parse(text, 0)
        except ScriptError:
            return None
        is_followed = all(
            sign != "||" and len(nodes) == 1 and nodes[0].kind == "command"
            for sign, _, nodes in rows
        )
        if not rows or not is_followed:
            return None
        with self.changed(depth=self.depth + 1, env=dict(self.env)):
            *before, last = [nodes[0].words for _, _, nodes in rows]
            folder = self.get("PWD")
            for raw in before:
                words = self.expanded(raw)
                if words[:1] != ["cd"] or len(words) != 2:
                    return None
                folder = os.path.join(folder, words[1])
            words = self.expanded(last)
            if not words or words[0] in self.functions:
                return None
            printed = print_output(words, folder)
            return printed and printed.rstrip("\n")

    def expanded(self, raw: Sequence[str]) -> list[str]:
        """Return the words that some raw words become."""
        return [word for part in raw for word in self.words(part)]

    def parameter(self, body: str) -> Any:
        """Return the value of `${body}`."""
        match = _PARAMETER.match(body)
        if match is None:
            return mark("${" + body + "}")
        (prefix, name), end = match.groups(), match.end()
        key = None
        if body.startswith("[", end):  # a subscript, which may hold another one
            close = find_close(body, end)
            key, end = body[end + 1 : close], close + 1
        rest = body[end:]
        value = self.get(name) if key is None else self.item(name, key)
        if prefix:  # the number of items; that of letters, or a name, is not followed
            is_counted = prefix == "#" and not rest and type(value) is list
            if is_counted:
                return str(len(value))
            return OpenList([mark(name)])
        if found := re.match(r":?[-=+?]", rest):
            return self.default(name, value, found[0], rest[found.end() :])
        if not rest:
            return value
        # What other forms make of a value is not followed.
        if isinstance(value, str):
            return value if MARKER.fullmatch(value) else mark("${" + body + "}")
        return OpenList([mark(name)])

    def default(self, name: str, value: Any, sign: str, raw: str) -> Any:
        """Return `${NAME:-raw}` and the like."""
        is_set = not is_unset(value) and (sign[0] != ":" or bool(value))
        if sign[-1] == "+":
            if is_set:
                return self.text(raw)
            return ""
        if is_set or sign[-1] == "?":
            return value
        other = self.text(raw.strip("\n"))
        if sign[-1] == "=":
            self.assign(name, other)
        return other

    # Arithmetic.

    def arithmetic(self, raw: str) -> str:
        """Return the value of an arithmetic expression; unknown if a part is, or if it
        changes a variable, which is unknown then.
        """
        text = self.text(raw.replace('"', ""), quoted=True)
        try:
            return str(evaluate(text, lambda name: self.text("${" + name + "}")))
        except ScriptError as error:
            for match in CHANGE.finditer(MARKER.sub("?", text)):
                name = match[1] or match[2]
                self.env[name] = mark(name)
            found = MARKER.search(text) or MARKER.fullmatch(str(error))
            if found:
                return found[0]
            return mark(f"$(({text.strip()}))")


def is_unset(value: Any) -> bool:
    """Return whether a value is that of a variable or an argument that is not set."""
    return (
        isinstance(value, str)
        and value[:1] in (UNSET, ARGUMENT)
        and bool(MARKER.fullmatch(value))
    )
