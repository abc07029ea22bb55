"""The folder of a run -> the throughput that was measured there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from rampup.errors import ConfigError
from rampup.run.run_folder import METRICS_FILE, read_lines

KEY = "measured"


def measured_throughput(folder: str | Path) -> dict[int, Fraction]:
    """Return the median tokens per second of a run at each global batch size that it trained at.

    Args:
        folder: the run's folder, with its metrics.jsonl. Steps that compiled are left out where there are others.

    Returns:
        Tokens per second by global batch size, in samples.

    Raises:
        ConfigError: no such folder or file, or no step with a throughput in it.
    """
    file = Path(folder) / METRICS_FILE
    rates: dict[int, list[tuple[bool, float]]] = defaultdict(list)
    for number, record in enumerate(_records(file)):
        size, rate = record.get("global_batch_size"), record.get("tokens_per_second")
        if isinstance(size, int) and isinstance(rate, int | float) and _positive(size) and _positive(rate):
            rates[size].append((number == 0 or "compile_seconds" in record, float(rate)))
    if not rates:
        raise ConfigError("no line has a global_batch_size and its tokens_per_second", key=KEY, path=str(file))
    return {size: Fraction(_median(found)) for size, found in sorted(rates.items())}


def _median(found: list[tuple[bool, float]]) -> float:
    steady = [rate for compiled, rate in found if not compiled] or [rate for _, rate in found]
    return sorted(steady)[(len(steady) - 1) // 2]


def _positive(value: float) -> bool:
    return not isinstance(value, bool) and 0 < value < 1e18


def _records(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"cannot read the run's metrics: {file} is no file", key=KEY, path=str(file))
    try:
        yield from read_lines(file)
    except OSError as error:
        raise ConfigError(f"cannot read the run's metrics: {error.strerror or error}", key=KEY, path=str(file)) from None
