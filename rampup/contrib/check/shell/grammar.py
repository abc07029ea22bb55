"""The grammar of bash: a script as nodes, with words as they are written."""

from __future__ import annotations

import bisect
import functools
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

OPERATOR = re.compile(
    r";;&|;;|;&|&&|\|\||\|&|<<<|<<-|<<|&>>|&>|>>|>&|<&|<>|>\||[;&|()\n]|[<>](?!\()"
)
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
_REDIRECTION = re.compile(r"\d*(<<<|<<-|<<|&>>|&>|>>|>&|<&|<>|>\||[<>](?!\())")
_CONTINUED = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
_ENDS = (
    "then",
    "elif",
    "else",
    "fi",
    "do",
    "done",
    "esac",
    "}",
    ")",
    ";;",
    ";&",
    ";;&",
)


class ScriptError(Exception):
    """A script that does not end, is no script, or cannot be followed."""


@dataclass(slots=True)
class Document:
    """A here-document, which a command gets as input."""

    end: str  # the word that ends it
    quoted: bool  # whether the text is as it stands, without expansions
    text: str = ""


class Node(NamedTuple):
    """A command with raw words, or a compound with lists of nodes."""

    kind: str
    line: int
    words: list[str]
    parts: list[Any]  # of a command, its `Document`s


@functools.lru_cache(maxsize=64)
def parse(text: str, line: int | None = None) -> list[Any]:
    """Return the (connector, negated, commands of a pipe) rows of a script; ScriptError
    if it does not end, or ends what has not begun.
    """
    parser = Parser(text, line)
    rows = parser.rows()
    if token := parser.peek():
        raise ScriptError(f"line {parser.here()}: {token!r} ends nothing")
    return rows


class Parser:
    """A recursive-descent parser of bash's grammar."""

    def __init__(self, text: str, line: int | None = None) -> None:
        self.text = text
        self.at = 0
        self.line = line  # of all nodes, if the text has none
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.documents: list[Document] = []  # those that begin in the next line

    def peek(self) -> str:
        """Return the next operator or raw word; empty at the end."""
        while match := _CONTINUED.match(self.text, self.at):
            self.at = match.end()
        if self.at >= len(self.text):
            return ""
        if match := OPERATOR.match(self.text, self.at):
            return match[0]
        text, start = self.text, self.at
        if text[start] in "<>":  # `<(command)`
            return text[start : find_close(text, start + 1) + 1]
        end = start
        while end < len(text) and text[end] not in " \t\r\n;&|()<>":
            end = skip_part(text, end)
            is_array = text[end - 1 : end + 1] == "=("
            if is_array and ASSIGNMENT.match(text, start, end):
                end = find_close(text, end) + 1
        return text[start:end]

    def next(self) -> str:
        """Return the next operator or raw word, and go on; here-documents are read at
        the end of their line.
        """
        token = self.peek()
        self.at += len(token)
        if token == "\n":
            documents, self.documents = self.documents, []
            for document in documents:
                document.text, self.at = _read_document(
                    self.text, self.at, document.end
                )
        return token

    def expect(self, *tokens: str) -> str:
        """Return the next word, which must be one of some."""
        self.skip("\n")
        if (token := self.next()) not in tokens:
            raise ScriptError(
                f"line {self.here()}: {token[:20]!r} instead of {tokens[0]!r}"
            )
        return token

    def take(self, *tokens: str) -> str:
        """Return the next word and go on if it is one of some; otherwise nothing."""
        if self.peek() in tokens:
            return self.next()
        return ""

    def skip(self, *tokens: str) -> None:
        """Go on behind some words."""
        while self.take(*tokens):
            pass

    def here(self) -> int:
        """Return the line of the next word."""
        if self.line is None:
            return bisect.bisect_left(self.newlines, self.at) + 1
        return self.line

    def rows(self) -> list[Any]:
        """Return (connector, negated, commands of a pipe) rows until an end word."""
        rows, connector = [], ""
        while token := self.peek():
            if token in _ENDS:
                break
            if token in ("&&", "||"):
                connector = self.next()
            elif not self.take(";", "&", "\n"):
                negated = bool(self.take("!"))
                pipe = [self.command()]
                while self.take("|", "|&"):
                    self.skip("\n")
                    pipe.append(self.command())
                rows.append((connector, negated, pipe))
                connector = ""
        return rows

    def command(self) -> Node:
        """Return a simple or a compound command; the redirections of a compound are
        dropped, with its here-documents.
        """
        kind = self.peek()
        line = self.here()
        words = list[str]()
        parts = list[Any]()
        if self.text.startswith("((", self.at):
            kind, words = "arithmetic", [self.in_brackets()]
        elif kind not in ("(", "{", "if", "while", "until", "for", "case", "function"):
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
        elif kind == "for":
            self.peek()
            if self.text.startswith("((", self.at):
                kind, words = "count", self.in_brackets().split(";")
            else:
                kind, words = "for", [self.next(), '"$@"']
                self.skip("\n")
                if self.take("in"):
                    del words[1:]
                    while self.peek() not in ("", ";", "\n"):
                        words.append(self.next())
            parts = [self.body()]
        elif kind == "case":
            words = [self.next()]
            self.expect("in")
            self.skip("\n")
            while self.peek() not in ("", "esac"):
                patterns = list[str]()
                self.take("(")
                while (token := self.next()) != ")":
                    if not token or (token != "|" and OPERATOR.fullmatch(token)):
                        raise ScriptError(f"line {line}: a case that is not read")
                    patterns.append(token)
                parts.append(([word for word in patterns if word != "|"], self.rows()))
                self.skip(";;", "\n")
            self.expect("esac")
        elif kind == "function":
            words = [self.next()]
            if self.take("("):
                self.expect(")")
            self.skip("\n")
            parts = [self.command()]
        while self.redirect([]):
            pass
        return Node(kind, line, words, parts)

    def in_brackets(self) -> str:
        """Return the text within `((` and `))`."""
        start, end = self.at + 2, find_close(self.text, self.at + 1)
        self.at = end + 2
        return self.text[start:end]

    def body(self) -> list[Any]:
        """Return the rows of a loop."""
        self.skip(";", "\n")
        self.expect("do")
        body = self.rows()
        self.expect("done")
        return body

    def simple(self, line: int) -> Node:
        """Return a simple command; redirections are dropped, here-documents kept."""
        node = Node("command", line, [], [])
        is_test = False
        while token := self.peek():
            if is_test:
                node.words.append(self.next())
                is_test = node.words[-1] != "]]"
            elif token == "(":
                self.next()
                self.expect(")")
                if len(node.words) != 1:
                    raise ScriptError(f"line {line}: unexpected '('")
                self.skip("\n")
                return Node("function", line, node.words, [self.command()])
            elif self.redirect(node.parts):
                continue
            elif OPERATOR.fullmatch(token):
                break
            else:
                node.words.append(self.next())
                is_test = node.words == ["[["]
        return node

    def redirect(self, documents: list[Any]) -> bool:
        """Drop a redirection, but add a here-document; return whether there was one."""
        if not self.peek() or (match := _REDIRECTION.match(self.text, self.at)) is None:
            return False
        self.at = match.end()
        target = self.next()
        if match[1] == "<<-":
            raise ScriptError(f"line {self.here()}: `<<-` is not read")
        if match[1] == "<<":
            end = re.sub(r"[\"'\\]", "", target)
            document = Document(end, quoted=end != target)
            self.documents.append(document)
            documents.append(document)
        return True


def skip_part(text: str, at: int) -> int:
    """Return the place after the character, quoted text or expansion at a place."""
    letter = text[at]
    if letter == "\\":
        return min(at + 2, len(text))
    if letter == "'":
        return _end_of_quote(text, at, "'")
    if letter in '"`':
        end = at + 1
        while end < len(text) and text[end] != letter:
            inner = text[end] in "\\$" or (text[end] == "`" and letter == '"')
            end = skip_part(text, end) if inner else end + 1
        return _end_of_quote(text, end - 1, letter)
    if letter == "$" and text[at + 1 : at + 2] in ("{", "(", "["):
        return find_close(text, at + 1) + 1
    if text[at : at + 2] == "$'":
        raise ScriptError("`$'...'` is not read")
    return at + 1


def _end_of_quote(text: str, at: int, letter: str) -> int:
    """Return the place behind the next letter of a kind after a place."""
    end = text.find(letter, at + 1)
    if end < 0:
        raise ScriptError(f"a {letter} does not end")
    return end + 1


def find_close(text: str, at: int) -> int:
    """Return the place of the bracket that closes the one at a place."""
    opening = text[at]
    closing = {"(": ")", "{": "}", "[": "]"}[opening]
    depth, end = 1, at + 1
    while True:
        if end >= len(text):
            raise ScriptError(f"a {opening!r} does not end")
        if text[end] == closing:
            depth -= 1
            if not depth:
                return end
        depth += text[end] == opening
        if text[end] == "#" and opening == "(" and text[end - 1] in " \t\n":
            end = text.find("\n", end)  # behind the comment
            if end < 0:
                raise ScriptError(f"a {opening!r} does not end")
        else:
            end = skip_part(text, end)


def _read_document(text: str, at: int, end: str) -> tuple[str, int]:
    """Return the here-document that begins at a place, and the place after it."""
    last = re.compile(rf"^{re.escape(end)}\r*(?:\n|\Z)", re.MULTILINE)
    match = last.search(text, at)
    if match is None:
        raise ScriptError(f"the here-document {end!r} does not end")
    return text[at : match.start()].removesuffix("\n"), match.end()
