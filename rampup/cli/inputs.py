"""What a picture or a report is about: a configuration, the folder of a run, or both, found by what is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rampup.config.load import COMMAND_LINE, load_config
from rampup.config.schema import Config
from rampup.errors import ConfigError
from rampup.lm.train import learning_rate
from rampup.plan.learning_rate import CLOCKS, Clock
from rampup.plan.plan import RampPlan
from rampup.rl.config import is_rollout_file
from rampup.run.run_folder import CONFIG_FILE, EVAL_FILE, METRICS_FILE, read_lines
from rampup.show.series import RunMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What stands on a command line, sorted.

    Attributes:
        runs: folders of runs.
        config: a configuration; None where only runs are named.
        overrides: `key=value` settings for the configuration.
    """

    runs: tuple[Path, ...]
    config: str | None
    overrides: tuple[str, ...]


def sort_names(words: Sequence[str]) -> Named:
    """Sort words into folders of runs, one configuration and its settings.

    Raises:
        ConfigError: nothing named, two configurations, both kinds at once, or settings without a configuration.

    Example:
        >>> sort_names(["configs/base.yml", "steps=3"]).overrides
        ('steps=3',)
    """
    runs = tuple(Path(word) for word in words if Path(word).is_dir())
    rest = [word for word in words if not Path(word).is_dir()]
    overrides = tuple(word for word in rest if "=" in word and not Path(word).exists())
    configs = [word for word in rest if word not in overrides]
    if len(configs) > 1:
        raise ConfigError(f"one configuration at a time: {', '.join(configs[:5])}", path=COMMAND_LINE)
    if bool(configs) == bool(runs):
        what = "a configuration and folders of runs cannot stand together" if runs else "name a configuration or a run's folder"
        raise ConfigError(what, path=COMMAND_LINE)
    if runs and overrides:
        raise ConfigError(f"{overrides[0]} is of no use: a run was what it was", key=overrides[0].partition("=")[0])
    return Named(runs=runs, config=configs[0] if configs else None, overrides=overrides)


def config_of(named: Named, environ: Mapping[str, str]) -> Config:
    """Return the configuration named, or the one that the one run named was last started with.

    Raises:
        ConfigError: it cannot be read, is not of a ramp, or the run's folder has none.
    """
    if named.config is not None:
        if is_rollout_file(named.config):
            raise ConfigError(
                "a step of reinforcement learning has no ramp to draw; `rampup plan` and `rampup report` show it",
                path=named.config,
            )
        return load_config(named.config, named.overrides, environ=environ)
    if len(named.runs) > 1:
        raise ConfigError(f"{len(named.runs)} runs are named; only their metrics can be drawn together", path=COMMAND_LINE)
    file = named.runs[0] / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{named.runs[0]} has no {CONFIG_FILE}, which `rampup train` writes; its metrics alone can be drawn: "
            f"rampup plot {named.runs[0]} -o FILE",
            path=COMMAND_LINE,
        )
    return load_config(file)


def runs_of(named: Named) -> tuple[RunMetrics, ...]:
    """Return the metrics of the runs named.

    Raises:
        DataError: a folder without metrics.
        ConfigError: no runs are named.
    """
    if not named.runs:
        raise ConfigError("only the folder of a run has metrics", path=COMMAND_LINE)
    names = [folder.resolve().name for folder in named.runs]
    unique = len(set(names)) == len(names)
    return tuple(
        RunMetrics.from_lines(
            name if unique else str(folder), read_lines(folder / METRICS_FILE), read_lines(folder / EVAL_FILE)
        )
        for folder, name in zip(named.runs, names, strict=True)
    )


def rates_of(config: Config, plan: RampPlan) -> dict[Clock, Callable[[int], float]]:
    """Return the configured learning rate, with its schedule on each clock, the plan's own first.

    Example:
        >>> from rampup import build_plan
        >>> config = Config(batch_size_schedule="0:8 80:16", steps=20)
        >>> rates = rates_of(config, build_plan(config, 1))
        >>> round(rates["steps"](10), 6), round(rates["samples"](10), 6)
        (0.001884, 0.002576)
    """
    clocks = sorted(CLOCKS, key=lambda clock: clock != plan.learning_rate_clock)
    return {clock: learning_rate(config, replace(plan, learning_rate_clock=clock)).at for clock in clocks}
