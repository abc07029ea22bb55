"""Reads a configuration: the base_config chain of files, `key=value` settings and
environment variables.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rampup.config.key import Key, Settings, unknown_key
from rampup.config.rules import BUDGET_KEYS, auto_implies
from rampup.config.schema import Config
from rampup.config.yaml import Located, parse_mapping, parse_scalar, read_text
from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.ramp_keys import AUTO_SCHEDULE

BASE = "base_config"
ENVIRONMENT_PREFIX = "RAMPUP_"
COMMAND_LINE = "command line"
# Only the file of a rollout has this group of keys.
ROLLOUT_GROUP = "rl"
MAX_UNKNOWN = 20

S = TypeVar("S", bound=Settings)


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    text: str | None = None,
) -> Config:
    """Read a configuration.

    Values come from, in ascending order: defaults, the base_config chain, the file, and
    settings or variables. `Config.where` returns the source of each value.

    Args:
        path: a YAML file, or the folder of a run. A bare name that does not exist here
            is looked up among the configurations that come with rampup.
        overrides: `key=value` settings, which win over the file.
        environ: environment variables, such as `os.environ`. `RAMPUP_STEPS=10` sets
            `steps` and wins over the file. None: none.
        text: the content of the file, if it is not to be read from `path`.

    Returns:
        The checked configuration.

    Example:
        >>> load_config("base.yml", ["steps=10"]).steps
        10

    Raises:
        ConfigError: a file that cannot be read; all unknown keys and bad values, with
            file and line; or else contradictions.
    """
    return load_settings(Config, path, overrides, environ=environ, text=text)


def load_settings(
    schema: type[S],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    text: str | None = None,
) -> S:
    """Read a configuration of any schema. Dotted keys may be nested in a file; in a
    variable, underscores replace the dots.
    """
    file = find_config(path)
    located, problems = locate_values(
        file, overrides, environ or {}, schema.keys(), text=text
    )
    values = {name: entry.value for name, entry in located.items()}
    refused: RampupError | None = None
    try:
        config = schema.from_values(
            values, {name: str(entry) for name, entry in located.items()}
        )
    except ConfigError as error:
        refused = error
        problems += [
            ConfigError(
                str(problem),
                key=name,
                nearest=problem.nearest,
                path=located[name].path,
                line=located[name].line,
            )
            for problem in refused.problems or (refused,)
            if (name := problem.key) in located
            and not schema.keys()[name].allows(located[name].value)
        ]
    raise_together(
        problems,
        f"the plan is checked once {'this is' if len(problems) == 1 else 'these are'}"
        " solved",
    )
    if refused is None:
        return config
    # Keys that contradict each other may come from different lines: the error names the
    # file, or what won over it.
    places: dict[str, None] = {}
    for problem in refused.problems or (refused,):
        outside = {name: entry for name, entry in located.items() if entry.line is None}
        named = [
            name
            for name in outside
            if name == problem.key
            or re.search(rf"(?<![\w.]){re.escape(name)}=", str(problem))
        ]
        places |= dict.fromkeys([outside[name].path for name in named] or [str(file)])
    contradiction = ConfigError(
        str(refused),
        key=refused.key,
        nearest=refused.nearest,
        path=" and ".join(places),
    )
    contradiction.problems = refused.problems
    raise contradiction


def locate_values(
    file: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    keys: Mapping[str, Key],
    *,
    text: str | None = None,
) -> tuple[dict[str, Located], list[RampupError]]:
    """Return the unchecked value of each key that is set, with its place, and the
    errors about unknown or repeated names.
    """
    problems: list[RampupError] = []
    groups = {name.partition(".")[0] for name in keys if "." in name}
    located: dict[str, Located] = {}
    for entries in _files(file, text=text):
        # A nested group of keys becomes dotted keys.
        own: dict[str, Located] = {}
        for top, entry in entries.items():
            nested = top in groups and isinstance(entry.value, Mapping)
            values = (
                {f"{top}.{inner}": value for inner, value in entry.value.items()}
                if nested
                else {top: entry.value}
            )
            for name, value in values.items():
                if nested and name in entries:
                    raise ConfigError(
                        f"{name} is given twice",
                        key=name,
                        path=entry.path,
                        line=entry.line,
                    )
                own[name] = replace(
                    entry,
                    value=value,
                    line=entry.lines.get(name.partition(".")[2], entry.line),
                )
        unknown = [name for name in own if name not in keys]
        if ROLLOUT_GROUP not in groups and any(
            name.partition(".")[0] == ROLLOUT_GROUP for name in unknown
        ):
            raise ConfigError(
                "this is the configuration of a rollout: `rampup plan` shows it;"
                " everything else takes the keys of configs/base.yml",
                key=unknown[0],
                path=str(file),
            )
        problems += [
            unknown_key(name, keys, own[name].path, own[name].line)
            for name in unknown[:MAX_UNKNOWN]
        ]
        # `_files` goes from the file to its bases, so what is located already is
        # nearer.
        located = _override(
            far={name: entry for name, entry in own.items() if name in keys},
            near=located,
            keys=keys,
        )

    settings, others = _locate_settings(overrides, environ, keys)
    return _override(far=located, near=settings, keys=keys), [*problems, *others]


def _locate_settings(
    overrides: Sequence[str], environ: Mapping[str, str], keys: Mapping[str, Key]
) -> tuple[dict[str, Located], list[RampupError]]:
    """Return the value of each key that is set on the command line or by a variable,
    and the errors about unknown or repeated names.
    """
    problems: list[RampupError] = []
    texts: list[tuple[str, Located]] = []
    for setting in overrides:
        name, equals, written = setting.partition("=")
        if not equals or name != name.strip() or name.startswith("-"):
            raise ConfigError(
                f"{setting!r} is not key=value (no spaces around '=', no dashes)",
                path=COMMAND_LINE,
            )
        texts.append((name, Located(value=written, path=COMMAND_LINE)))
    names = {name.replace(".", "_"): name for name in keys}
    for variable, written in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            texts.append((names.get(name, name), Located(value=written, path=variable)))
    settings: dict[str, Located] = {}
    for name, entry in texts:
        if name not in keys:
            problems.append(unknown_key(name, keys, entry.path))
            continue
        # A key of text takes the text as it is; otherwise YAML gives it a type.
        value = parse_scalar(entry.value, entry.path)
        is_text = entry.value == "" or (
            keys[name].kind in ("text", "name")
            and not (value is None and keys[name].nullable)
        )
        entry = entry if is_text else replace(entry, value=value)
        before = settings.setdefault(name, entry)
        if before is not entry and before.value != entry.value:
            problems.append(
                ConfigError(
                    f"{name} is given twice: {before.value!r} ({before.path}) and"
                    f" {entry.value!r} ({entry.path}); leave one out",
                    key=name,
                )
            )
    return settings, problems


def _override(
    *, far: Mapping[str, Located], near: Mapping[str, Located], keys: Mapping[str, Key]
) -> dict[str, Located]:
    """Return the entries of two places. The place nearer to the command line wins.

    They also win over far entries that set the same fact by another key, such as
    `steps` by `train_tokens`. So does a near `batch_size_schedule: auto`, with the
    values that it needs, and with a far one a near length of the run, with the clock
    that it needs.
    """
    replaced = {
        other
        for name, entry in near.items()
        if entry.value not in (None, -1)
        for other in keys[name].instead_of
    }
    kept = {name: entry for name, entry in far.items() if name not in replaced}
    values = {name: entry.value for name, entry in (kept | dict(near)).items()}
    if values.get("batch_size_schedule") == AUTO_SCHEDULE:
        implied = auto_implies(
            has_budget=any(
                values.get(name) is not None
                for name in ("train_samples", "train_tokens")
            )
        )
        if (source := near.get("batch_size_schedule")) is None:
            source = next((near[name] for name in BUDGET_KEYS if name in near), None)
            implied = {"learning_rate_clock": implied["learning_rate_clock"]}
        if source is not None:
            kept |= {
                name: replace(source, value=value)
                for name, value in implied.items()
                if name in kept
            }
    return kept | dict(near)


def names_in(path: str | Path) -> frozenset[str]:
    """Return the top-level names in a file and in the files of its base_config chain,
    known or not.
    """
    return frozenset().union(*_files(find_config(path)))


def find_config(path: str | Path, *, folder: Path | None = None) -> Path:
    """Return the file with a name: in `folder` (by default the working directory), or
    among rampup's own configurations; in the folder of a run, its configuration.
    """
    # One in a bucket stays what it is.
    name = Path(path) if isinstance(path, str) else path
    candidates = [name if folder is None else folder / name]
    if not name.is_absolute():
        candidates += [
            own / file for own in _own_folders() for file in (name, Path(f"{name}.yml"))
        ]
    # Last that of a run, if its folder is named.
    for candidate in [*candidates, candidates[0] / "config.yml"]:
        if candidate.is_file():
            return candidate
    own_names = sorted(
        file.stem for own in _own_folders() for file in own.glob("*.yml")
    )
    close = difflib.get_close_matches(name.stem, own_names, n=1)
    hint = f"; did you mean {close[0]}.yml?" if close else ""
    if "=" in name.name:
        hint = "; first give a configuration or the folder of a run, then key=value"
    kind = (
        "is not a regular file" if candidates[0].exists() else "no such file or folder"
    )
    if candidates[0].is_dir():
        kind = "is a folder, not a file, and not of a run: it has no config.yml"
    raise ConfigError(
        f"{kind}{hint}",
        path=str(candidates[0]),
        key=BASE if folder else None,
        nearest=close,
    )


def _own_folders() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    return [
        folder
        for folder in (package / "configs", package.parent / "configs")
        if (folder / "base.yml").is_file()
    ]


def _files(
    file: Path, seen: tuple[Path, ...] = (), *, text: str | None = None
) -> Iterator[dict[str, Located]]:
    """Yield the entries of a file, then those of its base_config, and so on."""
    resolved = file.resolve()
    if resolved in seen:
        cycle = " -> ".join(
            path.name for path in (*seen[seen.index(resolved) :], resolved)
        )
        raise ConfigError(f"{BASE} is circular: {cycle}", key=BASE, path=str(file))
    own = parse_mapping(read_text(file) if text is None else text, str(file))
    base = own.pop(BASE, None)
    yield own
    if base is None or base.value in (None, ""):
        return
    if not isinstance(base.value, str):
        raise ConfigError(
            f"{BASE} must be a file name", key=BASE, path=base.path, line=base.line
        )
    try:
        parent = find_config(base.value, folder=file.parent)
    except ConfigError as error:
        raise ConfigError(
            f"{BASE}: {error}",
            key=BASE,
            nearest=error.nearest,
            path=base.path,
            line=base.line,
        ) from None
    yield from _files(parent, (*seen, resolved))
