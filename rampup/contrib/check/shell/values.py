"""The values of a script: texts with parts that only a run could know, and what bash
and small programs make of texts.

A part that is not known is a marker: its kind, a name, and why it is open.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from rampup.contrib.check.shell.grammar import ScriptError

# The kinds of markers; `script.py` says what they mean.
UNSET = "\ue000"
ARGUMENT = "\ue001"
UNKNOWN = "\ue002"
OPTIONS = "\ue003"
# A marker is a kind, a name, perhaps a reason behind the first of these, and the
# second.
_WHY, _END = "\ue007", "\ue004"
# added to the characters of a reason, so that no part of it means anything to a shell
_HIDDEN = 0xF0000
# Where words are split, and a part in quotes, which makes a word even if it is empty.
BREAK, EMPTY = "\ue005", "\ue006"
RESERVED = re.compile(f"[{UNSET}-{_WHY}\0]")
MARKER = re.compile(
    f"[{UNSET}-{OPTIONS}]([^{_WHY}{_END}]*)(?:{_WHY}([^{_END}]*))?{_END}"
)
_EMPTIES = re.compile(f"[{UNSET}][^{_END}]*{_END}")
_LONGEST = 80
MAX_NUMBERS = 1000
_READERS = (
    "wc",
    "tr",
    "cut",
    "awk",
)  # programs that print what they make of their input
_CUT = re.compile(r"-d ?(.) -f ?(\d+)")
_AWK = re.compile(r"(?:-F ?(.) )?\{ ?print (\$[1-9]|\$?NF) ?\}")
# Classes of characters in a regular expression, and what Python might search for long.
_CLASSES = {
    "digit": "[0-9]",
    "alnum": "[a-zA-Z0-9]",
    "alpha": "[a-zA-Z]",
    "space": r"\s",
}
_MAX_STARS = 3
_MAX_SEARCHED = 100
# C's binary operators, from the loosest to the tightest.
_LEVELS = (
    ",",
    "?",
    "||",
    "&&",
    "|",
    "^",
    "&",
    "== !=",
    "< <= > >=",
    "<< >>",
    "+ -",
    "* / %",
    "**",
)
_PRECEDENCE = {
    sign: level for level, signs in enumerate(_LEVELS) for sign in signs.split()
}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "<<": operator.lshift, ">>": operator.rshift, "&": operator.and_, "|": operator.or_, "^": operator.xor,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    ",": lambda _, last: last,
}  # fmt: skip
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": operator.not_,
    "~": operator.invert,
}
# A variable with what changes it: `++` or `--` on either side, or an assignment such as
# `<<=`.
VARIABLE = re.compile(
    r"(\+\+|--)?\s*([A-Za-z_]\w*)(\[[^\]]*\])?\s*((?:<<|>>|[-+*/%&^|])?=(?!=)|\+\+|--)?"
)
_TOKEN = re.compile(
    rf"{MARKER.pattern}|0[xX][0-9a-fA-F]+|\d+|{VARIABLE.pattern}|\*\*|<<|>>|[<>=!]=|&&|\|\||\S"
)


def mark(name: str, kind: str = UNKNOWN, reason: str = "") -> str:
    """Return a marker of a kind; `reason` says which condition or loop leaves it
    open.
    """
    plain = re.sub(rf"[\s{UNSET}-{_WHY}]+", "_", name[:_LONGEST])
    why = (
        _WHY + "".join(chr(ord(letter) % _HIDDEN + _HIDDEN) for letter in reason)
        if reason
        else ""
    )
    return f"{kind}{plain}{why}{_END}"


def has_unknown(text: str) -> bool:
    """Return whether a part of a text is unknown."""
    return _END in text


def drop_unset(text: str) -> str:
    """Return a text in which variables that nothing sets are empty."""
    return _EMPTIES.sub("", text)


def unknown_names(text: str) -> list[str]:
    """Return the names of the unknown parts of a text, such as `NNODES` or
    `$(nproc)`.
    """
    return list(dict.fromkeys(match[1] for match in MARKER.finditer(text)))


def show_unknown(text: str) -> str:
    """Return a text with `$NAME` for each unknown part."""
    return MARKER.sub(lambda match: _shown(match[1]), text)


def explain_unknown(text: str) -> str:
    """Return why the unknown parts of a text are open, as a sentence without an end."""
    names = " and ".join(map(_shown, unknown_names(text)))
    if reasons := list(
        dict.fromkeys(match[2] for match in MARKER.finditer(text) if match[2])
    ):
        shown = "".join(chr(ord(letter) % _HIDDEN) for letter in "; ".join(reasons))
        return f"{shown}, and {names} depends on it"
    return f"the script does not say what {names} is"


def first_marker(*texts: str) -> str:
    """Return the marker of the first variable on which one of the texts depends; empty
    if there is none.
    """
    found = (match for text in texts for match in MARKER.finditer(text))
    return next((match[0] for match in found if match[1].isidentifier()), "")


def _shown(name: str) -> str:
    return name if name.startswith("$") else f"${name}"


def compile_expression(
    text: str, variable: Callable[[re.Match[str], Callable[[], int]], int]
) -> Callable[[], int]:
    """Return the function that evaluates an arithmetic expression whose expansions with
    `$` are done.

    Its parts are functions too, so that a side of a condition that is not taken does
    not happen. `variable` gets a match of `VARIABLE` and the value to assign, and
    returns the value of that expression.
    """
    tokens = [*(match[0] for match in _TOKEN.finditer(text)), ""]

    def take() -> str:
        if not tokens:
            raise ScriptError(text)
        return tokens.pop(0)

    def expect(token: str) -> None:
        if take() != token:
            raise ScriptError(text)

    def expression(level: int) -> Callable[[], int]:
        token = take()
        left: Callable[[], int]
        if token in _UNARY:
            operand = expression(len(_LEVELS))
            left = partial(lambda sign: int(_UNARY[sign](operand())), token)
        elif token == "(":
            left = expression(0)
            expect(")")
        elif match := VARIABLE.fullmatch(token):
            right = expression(1) if match[4] and match[4].endswith("=") else lambda: 1
            left = partial(variable, match, right)
        else:
            left = partial(to_number, token)
        while tokens and (own := _PRECEDENCE.get(tokens[0], -1)) >= level:
            sign = take()
            right = expression(own + (sign not in ("?", "**")))
            if sign == "?":
                expect(":")
                left = partial(
                    lambda test, first, second: (first if test() else second)(),
                    left,
                    right,
                    expression(own),
                )
            else:
                left = partial(apply_sign, sign, left, right)
        return left

    value = expression(0) if len(tokens) > 1 else int
    expect("")
    return value


def to_number(token: str) -> int:
    """Return a number in bash's notation."""
    if not re.fullmatch(r"0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*", token):
        raise ScriptError(token)
    return int(token, 8 if re.fullmatch(r"0\d+", token) else 0)


def apply_sign(sign: str, left: Callable[[], int], right: Callable[[], int]) -> int:
    """Return the value of a binary operator."""
    if sign in ("||", "&&"):
        return (
            int(bool(right())) if bool(left()) == (sign == "&&") else int(sign == "||")
        )
    first, second = left(), right()
    if sign in ("<<", ">>", "**") and not 0 <= second < 64:
        raise ScriptError(sign)  # undefined in C, or an error
    result = int(_ARITHMETIC[sign](first, second))
    if abs(result) >= 2**63:
        raise ScriptError(sign)
    return result


_NUMBER_TESTS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip
_OPERATORS = {"=", "==", "!=", "=~", "<", ">", *_NUMBER_TESTS}


class Test:
    """A test in brackets: `or` of `and` of tests. None is unknown, for instance whether
    a file exists.
    """

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
        """Return the result of the first test of the words."""
        if not self.words:
            return False
        word = text = self.words.pop(0)
        value: bool | None = bool(word)
        if (
            word in _OPERATORS and len(self.words) == 1
        ):  # an empty variable without quotes, which is an error in bash
            self.words.clear()
            return False
        if word == "!" and self.words:
            result = self.one()
            return None if result is None else not result
        if word == "(":
            result = self.value()
            self.words[:1] = []
            return result
        if (
            re.fullmatch(r"-[a-zA-Z]", word)
            and self.words
            and self.words[0] not in _OPERATORS
        ):
            text = self.words.pop(0)
            if word not in ("-z", "-n"):
                return None
            text = "" if text[:1] == ARGUMENT else text
            value = bool(text) == (word == "-n")
        elif len(self.words) > 1 and self.words[0] in _OPERATORS:
            sign, other = self.words.pop(0), self.words.pop(0)
            if not (word and other):  # whether the other side is empty
                word = "" if word[:1] == ARGUMENT else word
                other = "" if other[:1] == ARGUMENT else other
            text = word + other
            if sign in _NUMBER_TESTS:
                whole = all(
                    re.fullmatch(r"\s*-?\d+\s*", number) for number in (word, other)
                )
                value = _NUMBER_TESTS[sign](int(word), int(other)) if whole else None
            elif sign == "=~":
                value = None if has_unknown(text) else _search(other, word)
            elif sign in ("<", ">"):
                value = (word < other) == (sign == "<")
            else:
                value = fnmatchcase(word, other) == (sign != "!=")
        elif word[:1] == ARGUMENT:
            return False
        if has_unknown(text):
            self.unknown.append(text)
            return None
        return value


def _search(pattern: str, text: str) -> bool | None:
    """Return whether an extended regular expression matches a part of a text; None if
    it is not one that Python has too.
    """
    plain = re.sub(
        r"\[\[:(digit|alnum|alpha|space):\]\]",
        lambda match: _CLASSES[match[1]],
        pattern,
    )
    is_other = "[:" in plain or "\\" in pattern or "(?" in plain
    is_slow = (
        re.search(r"\)[*+{]", plain)
        or len(re.findall(r"[*+{]", plain)) > _MAX_STARS
        or len(text) > _MAX_SEARCHED
    )
    if is_other or is_slow:
        return None
    try:
        return re.search(plain, text) is not None
    except re.error:
        return None


def split_fields(line: str, separators: str | None, count: int) -> list[str]:
    """Return the fields of a line as `read` splits it, at most `count` if that is
    positive; `separators` is IFS.
    """
    is_blank = separators is None or (separators and not separators.strip())
    if separators == "" or count == 1:
        return [line.strip() if is_blank else line]
    if is_blank:
        return line.strip().split(None, count - 1)
    return re.split(
        f"[{re.escape(separators or '')}]", line, maxsplit=max(count - 1, 0)
    )


def print_output(words: Sequence[str], given: str | None) -> str | None:
    """Return what a program prints for what a script gives it to read, both known; None
    if that is not known here.
    """
    name, *rest = words
    if (
        given is None and name in _READERS
    ):  # it reads a file, or what the script was given
        return None
    text = given or ""
    match name, rest:
        case "cat", []:
            return text
        case "echo", _:
            rest = [word for word in rest if word not in ("-n", "-e")]
            return " ".join(rest) + "\n"
        case "printf", [form, *values]:
            return _print_formatted(form, values)
        case "seq", _ if (
            rest
            and all(re.fullmatch(r"-?\d{1,9}", word) for word in rest)
            and len(rest) <= 3
        ):
            numbers = list(map(int, rest))
            first = numbers[0] if len(rest) > 1 else 1
            step = numbers[1] if len(rest) == 3 else 1
            found = (
                range(first, numbers[-1] + (1 if step > 0 else -1), step)
                if step
                else range(0)
            )
            return (
                "".join(f"{number}\n" for number in found)
                if len(found) <= MAX_NUMBERS
                else None
            )
        case "expr", _ if re.fullmatch(r"[-+]?\d+( [-+*/%] [-+]?\d+)*", " ".join(rest)):
            return _print_expression(" ".join(rest))
        case "wc", ["-w"]:
            return f"{len(text.split())}\n"
        case "wc", ["-l"]:
            return f"{text.count(chr(10))}\n"
        case "tr", ["-d", drop] if len(drop) == 1:
            return text.replace(drop, "")
        case "tr", [old, new] if len(old) == 1 or old == "\\n":
            return text.replace(old.replace("\\n", "\n"), new.replace("\\n", "\n")[:1])
        case (("cut" | "awk"), _):
            return _print_field(_CUT if name == "cut" else _AWK, rest, text)
    return None


def print_path(words: Sequence[str], folder: str) -> str | None:
    """Return the path that a program prints which is started in a folder; None if that
    is not known here.
    """
    name, *rest = words
    operands = [word for word in rest if not word.startswith("-")]
    path = os.path.normpath(os.path.join(folder, *operands[:1]))
    match name, operands:
        case _ if has_unknown(path):
            return None
        case ("pwd", _) | ("realpath" | "readlink", [_, *_]):
            return path
        case "dirname", [file, *_]:
            return os.path.dirname(file) or "."
        case "basename", [file, *suffix] if not {*rest} - {*operands, "--"}:
            return os.path.basename(file).removesuffix("".join(suffix))
    return None


def _print_expression(text: str) -> str | None:
    """Return what `expr` prints for whole numbers with signs between them."""

    def no_variable(match: re.Match[str], _: Callable[[], int]) -> int:
        raise ScriptError(match[0])

    try:
        return f"{compile_expression(text, no_variable)()}\n"
    except (ScriptError, ZeroDivisionError):
        return None


def _print_formatted(form: str, values: Sequence[str]) -> str | None:
    kinds = re.findall(r"%(0?\d*[sd])", form)
    if (
        form.count("%") != len(kinds)
        or len(kinds) != len(values)
        or "\\" in form.replace("\\n", "")
    ):
        return None
    rows = list(zip(kinds, values, strict=True))
    if not all(
        kind[-1] == "s" or re.fullmatch(r"-?\d+", value) for kind, value in rows
    ):
        return None
    filled = [int(value) if kind[-1] == "d" else value for kind, value in rows]
    return str(form.replace("\\n", "\n") % tuple(filled))


def _print_field(
    pattern: re.Pattern[str], options: Sequence[str], text: str
) -> str | None:
    """Return the field that `cut -d, -f2` or `awk -F, '{print $2}'` selects in each
    line, or their number.
    """
    found = pattern.fullmatch(" ".join(options))
    if found is None:
        return None
    sign, field = found.groups()
    lines = [line.split(sign) if line else [] for line in text.splitlines()]
    if field == "NF":
        return "".join(f"{len(line)}\n" for line in lines)
    at = -1 if field == "$NF" else int(field.lstrip("$")) - 1
    if (
        sign is None or pattern is _AWK or all(len(line) > 1 for line in lines)
    ):  # cut prints a line without the sign
        return "".join(
            f"{line[at] if -len(line) <= at < len(line) else ''}\n" for line in lines
        )
    return None
