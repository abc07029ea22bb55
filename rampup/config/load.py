"""base.yml -> Config: the base_config chain, key=value and the environment."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path

from rampup.config.schema import KEYS, Config
from rampup.config.yaml_file import Located, parse_scalar, read_mapping
from rampup.errors import ConfigError, RampupError, raise_together

BASE = "base_config"
ENVIRONMENT_PREFIX = "RAMPUP_"
COMMAND_LINE = "command line"


def load_config(path: str | Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None) -> Config:
    """Read a configuration.

    Args:
        path: a YAML file; a bare name that does not exist here is looked up among the configurations that come with rampup.
        overrides: `key=value` settings, which win over the file.
        environ: environment variables; `RAMPUP_STEPS=10` sets `steps`, and wins over the file.

    Returns:
        The checked configuration: defaults < base_config chain < file < overrides and environment. `Config.where` says
        where each value came from.

    Raises:
        ConfigError: whatever cannot be used, with file, line and key; several problems at once.
    """
    file = find_config(path)
    located = _chain(file, seen=())
    settings = _overrides(overrides)
    for name, value in _environment(environ or {}).items():
        _set_once(settings, name, value)
    located |= settings
    problems: list[RampupError] = []
    values = {}
    for name, entry in located.items():
        try:
            values[name] = KEYS[name].read(name, entry.value)
        except ConfigError as error:
            problems.append(ConfigError(str(error), key=name, nearest=error.nearest, path=entry.path, line=entry.line))
    raise_together(problems)
    try:
        return Config(**values, sources={name: str(entry) for name, entry in located.items()})
    except ConfigError as error:
        raise ConfigError(str(error), key=error.key, nearest=error.nearest, path=str(file)) from None


def find_config(path: str | Path, *, beside: Path | None = None) -> Path:
    """Return the file that a name means: beside the file that names it, here, or among rampup's own configurations.

    Raises:
        ConfigError: there is no such file.
    """
    name = Path(path)
    candidates = [name if beside is None else beside / name]
    if not name.is_absolute():
        candidates += [folder / file for folder in _own_configs() for file in (name, Path(f"{name}.yml"))]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    own = sorted(file.stem for folder in _own_configs() for file in folder.glob("*.yml"))
    close = difflib.get_close_matches(name.stem, own, n=1)
    hint = f"; did you mean {close[0]}.yml?" if close else ""
    kind = "is a folder, not a file" if candidates[0].is_dir() else "no such file"
    raise ConfigError(f"{kind}{hint}", path=str(candidates[0]), key=BASE if beside else None, nearest=close)


def _own_configs() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package / "configs", package.parent / "configs") if (folder / "base.yml").is_file()]


def _chain(file: Path, seen: tuple[Path, ...]) -> dict[str, Located]:
    resolved = file.resolve()
    if resolved in seen:
        cycle = " -> ".join(path.name for path in (*seen[seen.index(resolved) :], resolved))
        raise ConfigError(f"{BASE} goes round in a circle: {cycle}", key=BASE, path=str(file))
    own = read_mapping(file)
    base = own.pop(BASE, None)
    raise_together([_unknown(name, entry) for name, entry in own.items() if name not in KEYS][:20])
    if base is None or base.value in (None, ""):
        return own
    if not isinstance(base.value, str):
        raise ConfigError(f"{BASE} must be a file name", key=BASE, path=base.path, line=base.line)
    try:
        parent = find_config(base.value, beside=file.parent)
    except ConfigError as error:
        raise ConfigError(f"{BASE}: {error}", key=BASE, nearest=error.nearest, path=base.path, line=base.line) from None
    return _chain(parent, (*seen, resolved)) | own


def _overrides(settings: Sequence[str]) -> dict[str, Located]:
    result: dict[str, Located] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name != name.strip() or name.startswith("-"):
            raise ConfigError(f"{setting!r} is not key=value (no spaces around '=', no dashes)", path=COMMAND_LINE)
        entry = Located(value=text, path=COMMAND_LINE)
        if name not in KEYS:
            raise _unknown(name, entry)
        _set_once(result, name, _typed(name, entry))
    return result


def _environment(environ: Mapping[str, str]) -> dict[str, Located]:
    result = {}
    for variable, text in environ.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            entry = Located(value=text, path=variable)
            if name not in KEYS:
                raise _unknown(name, entry)
            result[name] = _typed(name, entry)
    return result


def _typed(name: str, entry: Located) -> Located:
    """Give text from outside YAML its type: verbatim where the key takes text, as YAML reads it elsewhere."""
    value = parse_scalar(entry.value, entry.path)
    named_null = value is None and KEYS[name].nullable
    verbatim = entry.value == "" or (KEYS[name].kind in ("text", "name") and not named_null)
    return Located(value=entry.value if verbatim else value, path=entry.path)


def _set_once(settings: dict[str, Located], name: str, entry: Located) -> None:
    before = settings.get(name)
    if before is not None and before.value != entry.value:
        raise ConfigError(
            f"{name} is given twice: {before.value!r} ({before.path}) and {entry.value!r} ({entry.path}); leave one out",
            key=name,
        )
    settings[name] = entry


def _unknown(name: str, entry: Located) -> ConfigError:
    close = difflib.get_close_matches(name.lower(), [*KEYS, BASE], n=1, cutoff=0.0)
    return ConfigError(
        f"unknown key {name[:100]!r}; the closest is {close[0]}", key=name, nearest=close, path=entry.path, line=entry.line
    )
