"""Slurm's options, in the header of a script or on a command line, and the variables that a job sees."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from rampup.dialects.unknown import has_unknown

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
_STARTERS = {"srun": ("-n", "--ntasks"), "mpirun": ("-n", "-np", "--np"), "mpiexec": ("-n", "-np", "--np")}


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
