"""What starts the processes of a job: Slurm, MPI, tasks of SkyPilot and RayJobs."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from rampup.contrib.check.known import load_table
from rampup.contrib.check.shell.values import has_unknown
from rampup.errors import ConfigError

# Where the command of a task of SkyPilot or of a RayJob stands.
_COMMAND = re.compile(r"^(?:run| +entrypoint) *:", re.MULTILINE)
_CONTAINERS = re.compile(
    r"^apiVersion *:[\s\S]*\bcontainers *:|\bcontainer_?[sS]pec\b", re.MULTILINE
)
_HEADER = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
NAMES = load_table("shell", "names")  # those that the reader of scripts knows
_ONE = re.compile(r"(\d+)-\1")  # at least and at most so many
_GRES = re.compile(r"\bgpu(?::[a-zA-Z]\w*)?(?::(\d+))?(?=,|$)")
_STARTERS = ("srun", "mpirun", "mpiexec")


def read_header(text: str) -> dict[str, str]:
    """Return the variables that the `#SBATCH` lines of a script set."""
    lines = [line.partition(" #")[0] for line in _HEADER.findall(text)]
    return read_options(" ".join(lines).split())


def option(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option among some words: `--name value` or `--name=value`;
    None without it.
    """
    found = (value for name, value in _pairs(words) if name in names)
    return next(found, None)


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the options of `sbatch` or `srun` set for what they
    start.
    """
    found: dict[str, str] = {}
    variables = NAMES["slurm_variables"]
    for name, value in _pairs(words):
        if name in ("--gpus", "--gpus-per-node"):
            value = value.rpartition(":")[2]  # behind the kind
        if match := _ONE.fullmatch(value):
            value = match[1]
        if name == "--gres" and (match := _GRES.search(value)):
            found["SLURM_GPUS_ON_NODE"] = match[1] or "1"
        elif value.isdecimal() or has_unknown(value):
            found |= dict.fromkeys(variables.get(name, ()), value)
    nodes = found.get("SLURM_NNODES", "")
    each = found.get("SLURM_NTASKS_PER_NODE", "")
    if nodes.isdecimal() and each.isdecimal() and "SLURM_NTASKS" not in found:
        found |= dict.fromkeys(variables["--ntasks"], str(int(nodes) * int(each)))
    return found


def count_tasks(words: Sequence[str], variable: Callable[[str], str]) -> str:
    """Return how many processes `srun` or `mpirun` starts; empty without such a word,
    or if its number is not known.
    """
    names = [word.rpartition("/")[2] for word in words]
    place = next((place for place, name in enumerate(names) if name in _STARTERS), None)
    if place is None:
        return ""
    rest = words[place + 1 :]
    if names[place] != "srun":
        return option(rest, "-np", "--np", "--ntasks") or ""
    own = read_options(rest)
    if "SLURM_NTASKS" in own:
        return own["SLURM_NTASKS"]
    if "SLURM_NTASKS_PER_NODE" not in own and variable("SLURM_NTASKS"):
        return variable("SLURM_NTASKS")
    nodes = own.get("SLURM_NNODES") or variable("SLURM_NNODES")
    each = own.get("SLURM_NTASKS_PER_NODE") or variable("SLURM_NTASKS_PER_NODE")
    each = each or "1"
    if nodes.isdecimal() and each.isdecimal():
        return str(int(nodes) * int(each))
    return next(filter(has_unknown, (nodes, each)), "")


def _pairs(words: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield the options of some words by their long names, with their values."""
    for word, following in itertools.pairwise([*words, ""]):
        if match := re.fullmatch(r"(-[NnGc])(\d.*)?", word):
            yield NAMES["slurm_letters"][match[1]], match[2] or following
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            yield name, value if equals else following


class Script(NamedTuple):
    """A script, or a command as one, with what a manifest says of it."""

    text: str
    line: int | None = None  # of its commands; None for those of the script
    devices: int = 0  # those that the manifest asks for; 0 if it does not say


def find_scripts(text: str, path: str) -> list[Script]:
    """Return the commands of tasks of SkyPilot and of RayJobs; none if a text is neither.
    Other manifests with containers are refused.
    """
    lines = (
        text.count("\n", 0, match.start()) + 1 for match in _COMMAND.finditer(text)
    )
    found: list[Script] = []
    try:
        for root in map(_entries, yaml.load_all(text, Loader=yaml.BaseLoader)):
            spec = _entries(root.get("spec"))
            if isinstance(root.get("run"), str):
                found.append(_read_task(root)._replace(line=next(lines, 1)))
            elif isinstance(spec.get("entrypoint"), str):
                found.append(Script(spec["entrypoint"], next(lines, 1)))
    except (yaml.YAMLError, RecursionError):
        found = []
    if not found and _CONTAINERS.search(text):
        raise ConfigError(
            "this is a manifest with containers, which is not read",
            fix="paste the command of its container, `rampup check -- COMMAND ...`, and"
            " add the number of devices",
            path=path,
        )
    return found


def _read_task(root: Mapping[str, Any]) -> Script:
    """Return a task of SkyPilot: `accelerators: H100:8` are those of each node."""
    # A template leaves the number open.
    match = re.fullmatch(r"[1-9]\d{0,8}", str(root.get("num_nodes")))
    nodes = int(match[0]) if match else 1
    asked = _entries(root.get("resources")).get("accelerators", "")
    match = re.fullmatch(r"(?!tpu)[\w.-]+?(?::(\d+))?", str(asked))
    devices = int(match[1] or 1) if match else 0
    variables = _entries(root.get("envs")) | {
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(devices or ""),
    }
    return Script(_export(variables) + root["run"], devices=nodes * devices)


def _export(variables: Mapping[str, Any]) -> str:
    """Return the commands of a shell that set variables."""
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in variables.items()
        if name.isidentifier() and isinstance(value, str) and value
    )


def _entries(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
