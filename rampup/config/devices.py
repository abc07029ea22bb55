"""The numbers of devices on which the batches of a run can be split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rampup.config.draft import Draft, plan_or_first_error
from rampup.config.schema import KEYS, Config
from rampup.errors import RampupError
from rampup.plan.mesh_axes import AXES
from rampup.plan.numbers import AUTO, divisors

MAX_DEVICES_LISTED = 16


def list_devices(numbers: Sequence[int]) -> str:
    """Return numbers of devices as text, of many only the first and the last."""
    shown = [f"{number:,}" for number in numbers]
    if len(shown) > MAX_DEVICES_LISTED:
        shown = [*shown[: MAX_DEVICES_LISTED - 2], "...", shown[-1]]
    return ", ".join(shown) or "none"


def numbers_that_can(
    config: Config, num_devices: int, same: Mapping[str, Any]
) -> list[int]:
    """Return the numbers of devices, ascending, that have a plan with the batches that
    the arguments `same` keep; up to about four times `num_devices` with an open axis
    that does not shard the batch.
    """
    sizes = {
        key: axis
        for group in ("ici", "dcn")
        for axis in AXES
        if (key := f"{group}_{axis}_parallelism") in KEYS
    }
    known = math.prod(
        getattr(config, key) for key in sizes if getattr(config, key) != AUTO
    )
    # What the axes of -1 share shards the batch, and so divides every one. Only another
    # axis could have any size.
    factors = divisors(math.gcd(*same["ramp"].sizes_to_come))
    if any(
        getattr(config, key) == AUTO and axis not in ("data", "fsdp")
        for key, axis in sizes.items()
    ):
        factors = list(range(1, 4 * num_devices // known + 1))
    found = []
    for number in [known * factor for factor in factors]:
        with contextlib.suppress(RampupError):
            plan_or_first_error(Draft(config=config, num_devices=number, **same))
            found.append(number)
    return found
