"""What commands share: their result, exit codes, arguments, the devices that they mean,
and where they find what is in `contrib`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from rampup.config.build import build_plan, with_slices
from rampup.config.load import COMMAND_LINE, load_config, names_in
from rampup.config.schema import KEYS, Config
from rampup.errors import ConfigError, RampupError
from rampup.loop.run_folder import CHECKPOINT_FOLDER, CONFIG_FILE, as_path
from rampup.plan.describe import format_count
from rampup.plan.numbers import AUTO, GIB
from rampup.plan.plan import RampPlan
from rampup.plan.topology import Topology

# What commands find in `contrib`, by these names alone.
ROLLOUTS = "rampup.contrib.rl.commands"  # the commands of a rollout's file or run
EXPORTS = "rampup.contrib.check.export"
PREDICTIONS = "rampup.contrib.lab.prediction"
TOPOLOGIES = "rampup.contrib.lab.topology_command"

# The devices of this machine, and how a TPU names its vendor.
PCI_DEVICES, GOOGLE = Path("/sys/bus/pci/devices"), "0x1ae0"
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a command returns."""

    facts: (
        Mapping[str, Any] | None
    )  # printed with `--json`; None = nothing, in a process that leaves it to process 0
    show: Callable[[Console], None] = lambda console: (
        None
    )  # prints the result for people
    exit_code: int = 0
    problem: RampupError | None = None  # an error to report together with the result


def write_text(path: str | Path, text: str) -> None:
    """Write the file that a command is asked for."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write the file: {error.strerror}", key="output", path=str(path)
        ) from None


def usage_error(
    problem: str, *, key: str | None = None, nearest: Sequence[object] = ()
) -> ConfigError:
    """Return the error about what is on the command line."""
    return ConfigError(problem, key=key, nearest=nearest, path=COMMAND_LINE)


def arg(metavar: str | None, words: str, **options: Any) -> dict[str, Any]:
    """Return what `add_argument` takes besides the name; without a metavar and other
    options, that of a switch.
    """
    if metavar is not None:
        options["metavar"] = metavar
    elif not options:
        options["action"] = "store_true"
    return {"help": words, **options}


# Arguments that several commands have, by name.
OVERRIDES = {
    "overrides": arg(
        "key=value",
        "settings that take precedence over the file",
        nargs="*",
        default=[],
    )
}
CONFIG = {
    "config": arg("CONFIG.yml", "a configuration file, or the folder of a run"),
    **OVERRIDES,
}
DEVICES = {
    "--devices": arg(
        "N", "plan for N devices instead of those of this machine", type=int
    )
}
FAKE_DEVICES = {"--fake-devices": arg("N", "simulate N CPU devices", type=int)}
SLICES = "TPU slices such as v5e:4x4, v5litepod-16 or 2*v5p-128, without them"
TOPOLOGY = {"--topology": arg("NAME", f"plan for {SLICES}")}


def load(name: str) -> Any:
    """Return a module of `contrib`, or of a command, by its name."""
    return importlib.import_module(name)


def commands_of(path: str | Path) -> Any:
    """Return the module with the commands of a file whose keys are not base.yml's; None
    if they are. It is imported only if a name in the file needs it.
    """
    if names_in(path) <= KEYS.keys():
        return None
    rollouts = load(ROLLOUTS)
    return rollouts if rollouts.is_rollout_file(path) else None


class HasDevices(Protocol):
    """A configuration of a run: its devices, -1 = those of the machine."""

    @property
    def num_devices(self) -> int:
        """The key."""


def count_devices(args: argparse.Namespace, config: HasDevices) -> int:
    """Return the devices of `--topology`, `--devices`, the configuration, or this
    machine; only the last needs JAX.
    """
    if (topology := named_topology(args)) is not None:
        if args.devices is not None:
            raise ConfigError(
                "--topology has a number of devices; leave --devices out", key="devices"
            )
        if config.num_devices not in (AUTO, topology.num_devices):
            raise ConfigError(
                f"num_devices={config.num_devices}, but topology={args.topology} has"
                f" {topology.num_devices}",
                key="num_devices",
                nearest=(topology.num_devices, AUTO),
            )
        return topology.num_devices
    if args.devices is not None:
        if args.devices < 1:
            raise ConfigError(
                f"--devices={args.devices} must be at least 1",
                key="num_devices",
                nearest=(1,),
            )
        return int(args.devices)
    if config.num_devices != -1:
        return config.num_devices
    import jax

    return jax.device_count()


def run_config(folder: Path) -> Path:
    """Return the file with the configuration of a run."""
    if not (folder / CONFIG_FILE).is_file():
        raise usage_error(
            f"{folder} is not the folder of a run: it has no {CONFIG_FILE}"
        )
    return folder / CONFIG_FILE


def named_topology(args: argparse.Namespace) -> Topology | None:
    """Return the slices of `--topology`, or None."""
    name = getattr(args, "topology", None)
    return None if name is None else Topology.parse(name)


def read_plan(
    args: argparse.Namespace,
    path: str | Path,
    overrides: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
) -> tuple[Config, RampPlan]:
    """Return a configuration and its plan, with the environment's variables and the
    slices of `--topology`. Of the folder of a run, it is the plan with which the run
    goes on: it may have begun on other devices or with another ramp.
    """
    config = with_slices(
        load_config(path, overrides, environ=environ), named_topology(args)
    )
    num_devices = count_devices(args, config)
    checkpoints = as_path(path) / CHECKPOINT_FOLDER
    if not checkpoints.is_dir():
        return config, build_plan(config, num_devices)
    from rampup.lm.train import plan_of_run
    from rampup.loop.checkpoint import find_checkpoint

    return config, plan_of_run(config, num_devices, find_checkpoint(checkpoints))


def skip_absent_tpu() -> None:
    """Before JAX is imported, keep it from searching for a TPU, with warnings, where
    libtpu is installed only to compile.
    """
    if (
        "jax" in sys.modules
        or "JAX_PLATFORMS" in os.environ
        or importlib.util.find_spec("libtpu") is None
    ):
        return
    if not accelerator_plugins() and not any(
        path.read_text().strip() == GOOGLE for path in PCI_DEVICES.glob("*/vendor")
    ):
        os.environ["JAX_PLATFORMS"] = "cpu"


def accelerator_plugins() -> bool:
    """Return whether JAX has a plugin for another accelerator, such as a GPU."""
    return importlib.util.find_spec("jax_plugins") is not None or bool(
        importlib.metadata.entry_points(group="jax_plugins")
    )


def describe_topology(topology: Topology) -> str:
    """Return a line about the devices of a plan."""
    product = (
        topology.product_name
        if topology.num_slices == 1
        else f"{topology.num_slices}*{topology.product_name}"
    )
    return (
        f"planned for {topology.name} ({product}):"
        f" {format_count(topology.num_devices, 'device')}"
        f" with {topology.hbm_bytes / GIB:.4g} GiB each; `rampup tune --topology"
        f" {shlex.quote(topology.name)}` compiles for it"
    )


def use_fake_devices(number: int | None) -> None:
    """Simulate CPU devices, if a number is given."""
    if number is None:
        return
    if not 1 <= number <= 1024:
        raise ConfigError(
            f"--fake-devices={number} must be between 1 and 1024",
            key="fake-devices",
            nearest=(1, 1024),
        )
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", number)
