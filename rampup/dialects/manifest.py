"""Commands in the manifests of Kubernetes (Job, JobSet, PyTorchJob) and in the job files of Vertex."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

import yaml

_MANIFEST = re.compile(r"^apiVersion:|\bcontainer_?[sS]pec\"?:", re.MULTILINE)


class Container(NamedTuple):
    """The command of a container as a script."""

    script: str
    line: int


def find_containers(text: str) -> list[Container]:
    r"""Return the commands of the containers in a manifest; none if the text is not one.

    Example:
        >>> text = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - command: [run, a b]\n    args: [$(N)]\n"
        >>> find_containers(text + "    env: [{name: N, value: 4}]")
        [Container(script="export N=4\nrun 'a b' 4", line=5)]
    """
    if not _MANIFEST.search(text):
        return []
    try:
        roots = list(yaml.compose_all(text, Loader=yaml.SafeLoader))
        return [found for root in roots if root is not None for found in _walk(root, set())]
    except (yaml.YAMLError, RecursionError):
        return []


def _walk(node: yaml.Node, seen: set[int]) -> Iterator[Container]:
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        entries = {key.value: value for key, value in node.value if isinstance(key.value, str)}
        parts = [entries[name] for name in ("command", "args") if name in entries]
        words = [item.value for part in parts for item in _items(part) if isinstance(item.value, str)]
        if words:
            variables = dict(_read_variables(entries.get("env")))
            words = [re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word) for word in words]
            exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
            # A single word is a line of a shell.
            script = words[0] if len(words) == 1 and any(map(str.isspace, words[0])) else shlex.join(words)
            yield Container(exports + script, parts[0].start_mark.line + 1)
    for child in (part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,)) if part is not None):
        if isinstance(child, yaml.CollectionNode):
            yield from _walk(child, seen)


def _items(node: yaml.Node) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else [node]


def _read_variables(node: yaml.Node | None) -> Iterator[tuple[str, str]]:
    """Yield the names and values of `env`."""
    for item in node.value if isinstance(node, yaml.SequenceNode) else ():
        found = {key.value: value.value for key, value in item.value} if isinstance(item, yaml.MappingNode) else {}
        name, value = found.get("name"), found.get("value")
        if isinstance(name, str) and name.isidentifier() and isinstance(value, str):
            yield name, value
