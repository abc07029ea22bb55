"""The number of devices along each mesh axis, from MaxText's ici_*/dcn_*_parallelism
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError, combine
from rampup.plan.numbers import AUTO, check_whole, nearest_multiples

AXES = ("data", "fsdp", "tensor", "context", "expert", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxes:
    """Devices along each axis, over all slices.

    Attributes:
        data, fsdp: shard the batch. fsdp shards the parameters too.
        tensor, context, expert: shard the model or the sequence, not the batch.
        pipeline: the number of pipeline stages.
        slices: slices along each axis of `AXES`, a divisor of its devices. The
            inter-chip interconnect connects the devices of a slice, the data-center
            network the slices.

    Example:
        >>> axes = MeshAxes.resolve(8, ici={"fsdp": -1}, dcn={"data": 2})
        >>> axes.data, axes.fsdp, axes.data_parallel_size, axes.num_slices
        (2, 4, 8, 2)
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    slices: tuple[int, ...] = (1,) * len(AXES)

    def __post_init__(self) -> None:
        for axis, slices in zip(AXES, self.slices, strict=True):
            check_whole(**{axis: getattr(self, axis)})
            if slices < 1 or getattr(self, axis) % slices:
                raise ConfigError(
                    f"{slices} slices do not divide {axis}={getattr(self, axis)}",
                    key=_key("dcn", axis),
                    nearest=(1,),
                )

    @property
    def data_parallel_size(self) -> int:
        """The number of shards of the batch dimension."""
        return self.data * self.fsdp

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def num_slices(self) -> int:
        """Slices of the mesh."""
        return math.prod(self.slices)

    @classmethod
    def resolve(
        cls,
        num_devices: int,
        *,
        ici: Mapping[str, int],
        dcn: Mapping[str, int] | None = None,
        num_slices: int = AUTO,
    ) -> MeshAxes:
        """Infer the sizes that are -1, at most one of each group, for a number of
        devices over all slices. Missing axes are 1.

        Args:
            ici: devices along each axis within one slice; -1 is inferred from the
                devices of a slice.
            dcn: slices along each axis; -1 is inferred from the number of slices.
            num_slices: total number of slices. -1 = inferred from `ici` and `dcn`.

        Returns:
            The devices along every axis, over all slices.

        Raises:
            ConfigError: A size is neither -1 nor positive, two sizes of a group are -1,
                or they do not multiply to the devices.

        Source: the `ici_*_parallelism` and `dcn_*_parallelism` keys of MaxText's
            base.yml.
        """
        check_whole(num_devices=num_devices)
        ici = dict.fromkeys(AXES, 1) | dict(ici)
        dcn = dict.fromkeys(AXES, 1) | dict(dcn or {})
        problems: list[RampupError] = []
        for group, sizes in (("ici", ici), ("dcn", dcn)):
            for axis, size in sizes.items():
                if size < 1 and size != AUTO:
                    key = _key(group, axis)
                    problems.append(
                        ConfigError(
                            f"{key}={size} must be -1 (the rest) or at least 1",
                            key=key,
                            nearest=(-1, 1),
                        )
                    )
            automatic = [
                _key(group, axis) for axis, size in sizes.items() if size == AUTO
            ]
            if len(automatic) > 1:
                problems.append(
                    ConfigError(
                        f"only one {group}_*_parallelism may be -1 (the rest), not"
                        f" {' and '.join(automatic)}",
                        key=automatic[1],
                        nearest=(1,),
                    )
                )
        if problems:
            raise combine(problems)
        try:
            return cls(**_infer(num_devices, num_slices, ici, dcn))
        except BatchDivisibilityError as error:
            error.nearest = _legal_values(error, num_devices, num_slices, ici, dcn)
            raise


def _infer(
    num_devices: int, num_slices: int, ici: Mapping[str, int], dcn: Mapping[str, int]
) -> dict[str, Any]:
    """Return the size of every axis over all slices, and the slices along each axis."""
    if num_slices == AUTO:
        # If both groups have a -1, the fewest slices are meant: that of `dcn` is 1.
        if AUTO in ici.values() or AUTO not in dcn.values():
            num_slices = _known_size(dcn)
        else:
            known = _known_size(ici)
            if num_devices % known:
                raise _remainder_error(
                    "num_devices", num_devices, _product("ici", ici), known
                )
            num_slices = num_devices // known
    if num_devices % num_slices:
        raise _remainder_error(
            "num_devices", num_devices, "the number of slices", num_slices
        )
    within = _infer_group(
        ici,
        num_devices // num_slices,
        "ici",
        f"devices per slice ({num_devices=} / {num_slices=})",
    )
    between = _infer_group(dcn, num_slices, "dcn", "the number of slices")
    sizes: dict[str, Any] = {axis: within[axis] * between[axis] for axis in AXES}
    return sizes | {"slices": tuple(between[axis] for axis in AXES)}


def _infer_group(
    sizes: Mapping[str, int], total: int, group: str, what: str
) -> dict[str, int]:
    known = _known_size(sizes)
    if AUTO in sizes.values():
        if total % known:
            raise _remainder_error(what, total, _product(group, sizes), known)
        return {
            axis: total // known if size == AUTO else size
            for axis, size in sizes.items()
        }
    if known != total:
        # The key of a single change that fixes the group, with its value; otherwise the
        # first key that is set.
        first = next((axis for axis in sizes if sizes[axis] != 1), "data")
        order = sorted(sizes, key=lambda axis: sizes[axis] == 1)
        fixed = next((axis for axis in order if total * sizes[axis] % known == 0), None)
        rule = (
            f"{_product(group, sizes)} = {known} must be {what} = {total}; set one"
            f" {group}_*_parallelism to -1 (the rest)"
        )
        nearest = () if fixed is None else (total * sizes[fixed] // known,)
        raise BatchDivisibilityError(
            rule,
            value=known,
            divisor=total,
            key=_key(group, fixed or first),
            nearest=nearest,
        )
    return dict(sizes)


def _known_size(sizes: Mapping[str, int]) -> int:
    """Return the product of the sizes that are not -1."""
    return abs(math.prod(sizes.values()))


def _legal_values(
    error: BatchDivisibilityError,
    num_devices: int,
    num_slices: int,
    ici: Mapping[str, int],
    dcn: Mapping[str, int],
) -> tuple[Any, ...]:
    """Return the values of an error's key with which all sizes fit. `_infer` proposes
    those that meet one condition.
    """
    key = error.key
    candidates = [*error.nearest]
    if key == "num_devices":
        slices = _known_size(dcn) if num_slices == AUTO else num_slices
        candidates += nearest_multiples(num_devices, _known_size(ici) * slices)

    def is_legal(value: Any) -> bool:
        groups = ("ici", ici), ("dcn", dcn)
        changed = [
            {a: value if _key(g, a) == key else size for a, size in sizes.items()}
            for g, sizes in groups
        ]
        try:
            _infer(value if key == "num_devices" else num_devices, num_slices, *changed)
        except BatchDivisibilityError:
            return False
        return True

    return tuple(filter(is_legal, candidates))


def _remainder_error(
    what: str, total: int, parts: str, part: int
) -> BatchDivisibilityError:
    return BatchDivisibilityError(
        f"{what}={total} must be a multiple of {parts} = {part}",
        value=total,
        divisor=part,
        key="num_devices",
        nearest=(),
    )


def _product(group: str, sizes: Mapping[str, int]) -> str:
    named = [_key(group, axis) for axis, size in sizes.items() if size not in (1, AUTO)]
    return " * ".join(named) or f"all {group}_*_parallelism"


def _key(group: str, axis: str) -> str:
    return f"{group}_{axis}_parallelism"
