"""What starts the processes of a job: Slurm, MPI, manifests of Kubernetes (Job, JobSet, PyTorchJob) and job files of Vertex."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import yaml

from rampup.dialects.unknown import has_unknown

_MANIFEST = re.compile(r"^apiVersion:|\bcontainer_?[sS]pec\"?:", re.MULTILINE)
_HEADER = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_LETTERS = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task"}
# An option and the variables that have its value.
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus": ("SLURM_GPUS",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
_STARTERS = ("srun", "mpirun", "mpiexec")


def read_header(text: str) -> dict[str, str]:
    r"""Return the variables that the `#SBATCH` lines of a script set.

    Example:
        >>> read_header("#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4")
        {'SLURM_NNODES': '2', 'SLURM_JOB_NUM_NODES': '2', 'SLURM_GPUS_ON_NODE': '4'}
    """
    return read_options([word for line in _HEADER.findall(text) for word in line.partition(" #")[0].split()])


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the options of `sbatch` or `srun` set for what they start."""
    found: dict[str, str] = {}
    for option, text in _pairs(words):
        value = text.rpartition(":")[2] if option in ("--gpus", "--gpus-per-node") else text
        first, dash, last = value.partition("-")
        value = first if dash and first == last else value
        if option == "--gres" and (match := re.search(r"\bgpu(?::[a-zA-Z]\w*)?(?::(\d+))?(?=,|$)", text)):
            found["SLURM_GPUS_ON_NODE"] = match[1] or "1"
        if value.isdecimal() or has_unknown(value):
            found |= dict.fromkeys(_VARIABLES.get(option, ()), value)
            found |= {"SLURM_GPUS_ON_NODE": value} if option == "--gpus-per-node" else {}
    nodes, each = found.get("SLURM_NNODES", ""), found.get("SLURM_NTASKS_PER_NODE", "")
    if nodes.isdecimal() and each.isdecimal() and "SLURM_NTASKS" not in found:
        found |= dict.fromkeys(_VARIABLES["--ntasks"], str(int(nodes) * int(each)))
    return found


def count_tasks(words: Sequence[str], variable: Callable[[str], str]) -> str:
    """Return how many processes `srun` or `mpirun` starts; empty if no such word is there, or its number is not known.

    Args:
        words: a command.
        variable: returns the value of a variable of the job; empty without it.
    """
    names = [word.rpartition("/")[2] for word in words]
    starter = next((name for name in names if name in _STARTERS), "")
    if not starter:
        return ""
    rest = words[names.index(starter) + 1 :]
    if starter != "srun":
        found = [value for option, value in _pairs(rest) if option in ("-np", "--np", "--ntasks")]
        return found[0] if found else ""
    own = read_options(rest)
    if "SLURM_NTASKS" in own:
        return own["SLURM_NTASKS"]
    nodes = own.get("SLURM_NNODES") or variable("SLURM_NNODES")
    each = own.get("SLURM_NTASKS_PER_NODE") or variable("SLURM_NTASKS_PER_NODE")
    tasks = variable("SLURM_NTASKS")
    if tasks and not own.keys() & {"SLURM_NTASKS_PER_NODE"}:
        return tasks
    for number in (nodes, each):
        if has_unknown(number):
            return number
    return str(int(nodes) * int(each or 1)) if nodes.isdecimal() and (each or "1").isdecimal() else ""


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield the options of some words by their long names, with their values."""
    for word, following in itertools.pairwise([*words, ""]):
        if match := re.fullmatch(r"(-[NnGc])(\d.*)?", word):
            yield _LETTERS[match[1]], match[2] or following
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            yield name, value if equals else following


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
