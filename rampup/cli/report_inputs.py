"""What goes into a report of a configuration, a run's folder or another system's file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rampup
from rampup.cli.inputs import COMMAND_LINE, Named, config_of, rates_of, runs_of, sort_names
from rampup.config.build import build_plan
from rampup.config.schema import KEYS, Config
from rampup.dialects import check_file
from rampup.errors import ConfigError
from rampup.plan.plan import RampPlan
from rampup.rl.config import (
    ROLLOUT_KEYS,
    RolloutConfig,
    build_rollout_plan,
    is_rollout_file,
    load_rollout_config,
    rollout_notes,
)
from rampup.show.report import Report, key_values

CountDevices = Callable[[Any], int]


def gather_report(
    words: Sequence[str], *, environ: Mapping[str, str], count_devices: CountDevices, system: str | None = None
) -> Report:
    """Return what a report says.

    Args:
        words: a configuration and `key=value` settings, or the folder of a run.
        environ: environment variables with settings.
        count_devices: from a configuration to the devices to plan for.
        system: whose file it is, of those that `rampup check` knows; None = ours.

    Raises:
        RampupError: what is named cannot be read or planned.
    """
    named = sort_names(words)
    if system is not None:
        return _foreign(named, system)
    if named.config is not None and is_rollout_file(named.config):
        return _rollout(named, named.config, environ, count_devices)
    config = config_of(named, environ)
    plan = build_plan(config, count_devices(config))
    return Report(
        title=Path(named.config).stem if named.config else named.runs[0].resolve().name,
        plan=plan,
        notes=plan.advice,
        keys=key_values(KEYS, config.to_dict(), Config().to_dict(), config.where),
        rates=rates_of(config, plan),
        run=runs_of(named)[0] if named.runs else None,
        version=rampup.__version__,
    )


def _rollout(named: Named, file: str, environ: Mapping[str, str], count_devices: CountDevices) -> Report:
    config = load_rollout_config(file, named.overrides, environ=environ)
    plan = build_rollout_plan(config, count_devices(config))
    return Report(
        title=Path(file).stem,
        plan=plan,
        notes=rollout_notes(config, plan),
        keys=key_values(ROLLOUT_KEYS, config.to_dict(), RolloutConfig().to_dict(), config.where),
        version=rampup.__version__,
    )


def _foreign(named: Named, system: str) -> Report:
    if named.config is None:
        raise ConfigError("--from needs another system's file, not the folder of a run", key="from", path=COMMAND_LINE)
    verdict = check_file(named.config, system, named.overrides)
    plan = verdict.plan
    return Report(
        title=Path(named.config).name,
        plan=plan,
        notes=plan.advice if isinstance(plan, RampPlan) else (),
        verdict=verdict,
        version=rampup.__version__,
    )
