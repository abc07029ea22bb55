"""What starts the processes of a job: Slurm, MPI, manifests of Kubernetes (Job, JobSet,
PyTorchJob, RayJob), job files of Vertex and tasks of SkyPilot.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from rampup.contrib.check.shell.values import has_unknown

_MANIFEST = re.compile(
    r"^apiVersion:|\bcontainer_?[sS]pec\"?:|^run *: *[|>]", re.MULTILINE
)
_HEADER = re.compile(r"^#SBATCH[ \t]+(.*)$", re.MULTILINE)
_LETTERS = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task"}
# An option and the variables that have its value.
_VARIABLES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "--gpus": ("SLURM_GPUS",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
_ONE = re.compile(r"(\d+)-\1")  # at least and at most so many
_GRES = re.compile(r"\bgpu(?::[a-zA-Z]\w*)?(?::(\d+))?(?=,|$)")
_Entries = Mapping[Any, Any]
_STARTERS = ("srun", "mpirun", "mpiexec")


def read_header(text: str) -> dict[str, str]:
    """Return the variables that the `#SBATCH` lines of a script set."""
    lines = [line.partition(" #")[0] for line in _HEADER.findall(text)]
    return read_options(" ".join(lines).split())


def read_options(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that the options of `sbatch` or `srun` set for what they
    start.
    """
    found: dict[str, str] = {}
    for option, value in _pairs(words):
        if option in ("--gpus", "--gpus-per-node"):
            value = value.rpartition(":")[2]  # behind the kind
        if match := _ONE.fullmatch(value):
            value = match[1]
        if option == "--gres" and (match := _GRES.search(value)):
            found["SLURM_GPUS_ON_NODE"] = match[1] or "1"
        elif value.isdecimal() or has_unknown(value):
            found |= dict.fromkeys(_VARIABLES.get(option, ()), value)
    nodes = found.get("SLURM_NNODES", "")
    each = found.get("SLURM_NTASKS_PER_NODE", "")
    if nodes.isdecimal() and each.isdecimal() and "SLURM_NTASKS" not in found:
        found |= dict.fromkeys(_VARIABLES["--ntasks"], str(int(nodes) * int(each)))
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
        for option, value in _pairs(rest):
            if option in ("-np", "--np", "--ntasks"):
                return value
        return ""
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
            yield _LETTERS[match[1]], match[2] or following
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            yield name, value if equals else following


class Machine(NamedTuple):
    """The devices that a manifest asks for, and the TPU slices in which they are; 0 if
    it does not say.
    """

    devices: int = 0
    slices: int = 0


class Container(NamedTuple):
    """The command of a container as a script, and the machine of all containers of its
    manifest.
    """

    script: str
    line: int | None  # of its commands; None for those of the script
    machine: Machine = Machine()


_DEVICES = re.compile(
    r"(?:nvidia|amd)\.com/gpu|google\.com/tpu|acceleratorCount|accelerator_count"
)
_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
_LINES = object()  # the key of a mapping that has the lines of its other keys


class _Loader(yaml.BaseLoader):
    """Reads every value as text."""

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: ARG002
    ) -> dict[Any, Any]:
        # A template such as `{{ .Values.n }}` is a mapping whose key is one.
        items = {
            key.value: value for key, value in node.value if isinstance(key.value, str)
        }
        found = {
            name: self.construct_object(value, deep=True)
            for name, value in items.items()
        }
        return found | {
            _LINES: {name: value.start_mark.line + 1 for name, value in items.items()}
        }


def find_containers(text: str) -> list[Container]:
    """Return the commands of the containers in a manifest; none if the text is not
    one.
    """
    if not _MANIFEST.search(text):
        return []
    found: list[Container] = []
    try:
        for root in yaml.load_all(text, Loader=_Loader):
            rows = list(_walk(root, (), set()))
            machines = [machine for _, machine in rows if machine is not None]
            machine = Machine()
            if machines and all(row.devices for row in machines):
                devices = sum(row.devices for row in machines)
                machine = Machine(devices, max(row.slices for row in machines))
            found += [
                container._replace(machine=machine)
                for container, _ in rows
                if container is not None
            ]
    except (yaml.YAMLError, RecursionError):
        return []
    return found


def _walk(
    part: Any, above: tuple[_Entries, ...], seen: set[int]
) -> Iterator[tuple[Container | None, Machine | None]]:
    """Yield the command and the devices of each container in a part of a manifest,
    below the mappings `above`.
    """
    if id(part) in seen or not isinstance(part, dict | list):  # or an alias
        return
    seen.add(id(part))
    if isinstance(part, dict):
        container = _read_container(part)
        machine = _read_machine(part, above)
        if container or machine:
            yield container, machine
        above = (*above, part)
        part = list(part.values())
    for child in part if isinstance(part, list) else ():
        yield from _walk(child, above, seen)


def _read_container(part: _Entries) -> Container | None:
    """Return the command of a container, of a RayJob or of a task of SkyPilot, with the
    variables that it is given; None if a mapping has none.
    """
    written = [name for name in ("command", "args", "entrypoint") if name in part]
    is_task = isinstance(part.get("run"), str)  # SkyPilot
    name = "run" if is_task else written[0] if written else ""
    if not name:
        return None
    parts = [part[key] for key in ([name] if is_task else written)]
    listed = [part if isinstance(part, list) else [part] for part in parts]
    words = [word for row in listed for word in row if isinstance(word, str)]
    if not words:
        return None
    variables = _read_variables(part)
    if is_task:
        nodes = _number(part.get("num_nodes")) or 1
        machine = _read_task(part)
        variables |= {
            "SKYPILOT_NUM_NODES": str(nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(machine.devices // nodes or ""),
        }
    words = [
        re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), word)
        for word in words
    ]
    exports = "".join(
        f"export {key}={shlex.quote(value)}\n"
        for key, value in variables.items()
        if value
    )
    # A single word is a line of a shell.
    is_line = len(words) == 1 and any(map(str.isspace, words[0]))
    script = words[0] if is_line else shlex.join(words)
    return Container(exports + script, part[_LINES][name])


def _read_variables(part: _Entries) -> dict[str, str]:
    """Return the variables of a container, of a task, or of a RayJob's runtime."""
    listed = part["env"] if isinstance(part.get("env"), list) else ()
    pairs = [(row.get("name"), row.get("value")) for row in map(_entries, listed)]
    pairs += [*_entries(part.get("envs")).items()]
    runtime = part.get("runtimeEnvYAML")
    if isinstance(runtime, str):
        loaded = _entries(yaml.load(runtime, Loader=_Loader))
        pairs += [*_entries(loaded.get("env_vars")).items()]
    return {
        key: value
        for key, value in pairs
        if isinstance(key, str) and key.isidentifier() and isinstance(value, str)
    }


def _read_task(part: _Entries) -> Machine:
    """Return the devices of a task of SkyPilot: `accelerators: H100:8` on each node."""
    asked = _entries(part.get("resources")).get("accelerators")
    if isinstance(asked, dict):
        asked = next((f"{name}:{count}" for name, count in asked.items()), "")
    match = re.fullmatch(r"([\w.-]+?)(?::(\d+))?", str(asked or ""))
    if match is None or match[1].startswith("tpu"):
        return Machine()
    return Machine(int(match[2] or 1) * (_number(part.get("num_nodes")) or 1))


def _read_machine(entries: _Entries, above: Sequence[_Entries]) -> Machine | None:
    """Return the devices of a container, or of a pool of Vertex, in all copies of it;
    None if it asks for none.

    A job has `parallelism` pods, and a JobSet, a replica of it for each slice. A chip
    of TPU7x counts two devices.
    """
    if isinstance(entries.get("run"), str):
        return _read_task(entries)
    resources = _entries(entries.get("resources"))
    pool = _entries(entries.get("machineSpec") or entries.get("machine_spec"))
    counts = [
        *_entries(resources.get("limits")).items(),
        *_entries(resources.get("requests")).items(),
        *pool.items(),
    ]
    asked = [
        value
        for name, value in counts
        if isinstance(name, str) and _DEVICES.fullmatch(name)
    ]
    if not asked:
        return None
    pods = replicas = chip = 1
    for level in (*above, entries):
        for name in ("replicas", "replicaCount", "replica_count"):
            replicas *= _number(level[name]) if name in level else 1
        if "parallelism" in level:
            pods_at_once = _number(level["parallelism"])
            completions = _number(level.get("completions"))
            pods *= min(pods_at_once, completions or pods_at_once)
        kind = _entries(level.get("nodeSelector")).get(_ACCELERATOR)
        if str(kind).startswith("tpu7"):
            chip = 2
    return Machine(_number(asked[0]) * pods * replicas * chip, replicas)


def _entries(value: Any) -> _Entries:
    if isinstance(value, dict):
        return value
    return {}


def _number(value: Any) -> int:
    """Return a whole number; 0 for what a template leaves open."""
    is_number = isinstance(value, str) and value.isdecimal() and len(value) < 10
    if is_number:
        return int(value)
    return 0
