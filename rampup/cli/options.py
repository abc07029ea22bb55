"""Options that several commands share, and the devices that they mean."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rampup
from rampup.errors import ConfigError, RampupError

if TYPE_CHECKING:
    from rampup.rl.config import RolloutConfig

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


def config_options(parser: argparse.ArgumentParser) -> None:
    """Add a configuration file and its settings."""
    parser.add_argument("config", metavar="CONFIG.yml", help="a configuration file")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win over the file")


def devices_options(parser: argparse.ArgumentParser) -> None:
    """Add a configuration file and the number of devices."""
    config_options(parser)
    parser.add_argument("--devices", type=int, metavar="N", help="plan for N devices instead of those of this machine")


def num_devices(args: argparse.Namespace, config: rampup.Config | RolloutConfig) -> int:
    """The devices asked for, or those of the configuration, or those of this machine, for which JAX is needed."""
    if args.devices is not None:
        if args.devices < 1:
            raise ConfigError(f"--devices={args.devices} must be at least 1", key="num_devices", nearest=(1,))
        return int(args.devices)
    if config.num_devices != -1:
        return config.num_devices
    import jax

    return jax.device_count()


def use_fake_devices(number: int | None) -> None:
    """Let JAX see so many pretended CPU devices, if any were asked for."""
    if number is None:
        return
    if not 1 <= number <= 1024:
        raise ConfigError(f"--fake-devices={number} must be between 1 and 1024", key="fake-devices", nearest=(1, 1024))
    import jax

    jax.config.update("jax_platforms", "cpu")
    split_cpu(number)


def split_cpu(number: int) -> None:
    """Let JAX see so many CPU devices, if it runs on the CPU."""
    import jax

    jax.config.update("jax_num_cpu_devices", number)


def check_output(path: str | None, endings: Sequence[str]) -> None:
    """Refuse a file that could not be written, before the work that it is for.

    Args:
        path: the file, or None for none.
        endings: what it may end in.
    """
    if path is None:
        return
    if Path(path).suffix.lower() not in endings:
        raise ConfigError(f"cannot write {path}: it must end in {', '.join(endings)}", key="output", nearest=tuple(endings))
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}", key="output")


def report_error(error: Exception, as_json: bool, more: dict[str, Any] | None = None) -> None:
    """Print an error: in JSON on standard output, and one of ours in words on standard error."""
    if as_json:
        details: dict[str, Any] = {
            "type": type(error).__name__,
            "message": str(error),
            "key": getattr(error, "key", None),
            "nearest": list(getattr(error, "nearest", ())),
        }
        print(json.dumps({"error": details, **(more or {})}))
    if isinstance(error, RampupError):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
