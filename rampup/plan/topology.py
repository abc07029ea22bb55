"""TPU slices by name: their chips, shape, torus links and published figures, to plan
and compile for slices without having one.

Names are those of the TPU compiler (`v5e:4x4`), Google's product names (`v5litepod-16`,
`v5p-128`, `v6e-256`), and either with a number of slices in front (`2*v5e:4x4`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from rampup.errors import ConfigError
from rampup.plan.numbers import GIB, nearest_in

MAX_SLICES = 1024
# The status of every result for an absent slice.
NOT_RUN_ON = "compiled for, not run on"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chip:
    """A TPU generation: its entry in `chips.yml`, which says what the figures are."""

    name: str
    product: str
    aliases: Sequence[str] = ()
    counts_cores: bool
    devices: int = 1
    dimensions: int
    hbm_gib: float
    peak_flops: float
    hbm_bandwidth: float
    ici_bandwidth: float
    max_chips: int
    source: str
    config: str | None = None
    kinds: Sequence[str]


_TABLES: dict[str, dict[str, Any]] = yaml.safe_load(
    files(__package__).joinpath("chips.yml").read_text("utf-8")
)
CHIPS = {name: Chip(name=name, **chip) for name, chip in _TABLES["chips"].items()}
# The shapes of slices in two dimensions, and of small ones in three: larger ones are
# built of cubes of 4 x 4 x 4 chips.
_FLAT = {2**k: (2 ** (k // 2), 2 ** (k - k // 2)) for k in (0, *range(2, 11))}
_SMALL_CUBES = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CUBE, _RING = 4, 16
_NAME = re.compile(r"(?:([0-9]{1,9})\s*[*x]\s*)?([a-z]+[0-9a-z]*)([:-])([0-9x]{1,99})")


@functools.cache
def _shapes(chip: Chip) -> dict[int, tuple[int, ...]]:
    """Return the most compact shape for each number of chips, in ascending order of
    chips.
    """
    shapes = dict(_FLAT if chip.dimensions == 2 else _SMALL_CUBES)
    for cubes in (
        range(1, chip.max_chips // _CUBE**3 + 1) if chip.dimensions == 3 else ()
    ):
        boxes = (
            (a, b, cubes // (a * b))
            for a in range(1, math.isqrt(cubes) + 1)
            if cubes % a == 0
            for b in range(a, math.isqrt(cubes // a) + 1)
            if cubes // a % b == 0
        )
        shapes[cubes * _CUBE**3] = tuple(side * _CUBE for side in min(boxes, key=sum))
    return {chips: shape for chips, shape in shapes.items() if chips <= chip.max_chips}


def _is_slice(chip: Chip, shape: tuple[int, ...]) -> bool:
    """Return whether there are slices of a shape."""
    return shape in _shapes(chip).values() or (
        chip.dimensions == len(shape) == 3
        and all(side and side % _CUBE == 0 for side in shape)
        and list(shape) == sorted(shape)
        and math.prod(shape) <= chip.max_chips
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One or several equal slices of a TPU generation, with `shape` chips along each
    dimension of a slice.

    Example:
        >>> topology = Topology.parse("v5p-128")
        >>> (
        ...     topology.name,
        ...     topology.num_devices,
        ...     topology.wrap,
        ...     Topology.parse("2*v5litepod-16").name,
        ... )
        ('v5p:4x4x4', 64, (True, True, True), '2*v5e:4x4')
    """

    chip: Chip
    shape: tuple[int, ...]
    num_slices: int = 1

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Return the topology of a name, or raise a ConfigError about its generation,
        shape or size.
        """
        match = _NAME.fullmatch(text.strip().lower()) if isinstance(text, str) else None
        if match is None:
            raise _error(
                f"topology={str(text)[:60]!r} must be a name such as v5e:4x4,"
                " v5litepod-16 or 2*v5p:4x4x4"
            )
        slices, prefix, separator, size = match.groups()
        chip = CHIPS.get(prefix) or next(
            (c for c in CHIPS.values() if prefix in (c.product, *c.aliases)), None
        )
        if chip is None:
            raise _error(
                f"topology={text}: {prefix!r} is not a TPU generation; choose from"
                f" {', '.join(CHIPS)}",
                *CHIPS,
            )
        num_slices = int(slices or 1)
        if not 1 <= num_slices <= MAX_SLICES:
            raise _error(
                f"topology={text}: the number of slices must be between 1 and"
                f" {MAX_SLICES}"
            )
        if separator == ":":
            shape = tuple(int(side) for side in size.split("x") if side)
            chips = math.prod(shape)
        else:  # the number of a product name counts chips or TensorCores
            unit = 2 if chip.counts_cores else 1
            chips, rest = divmod(int(size) if size.isdecimal() else 0, unit)
            shape = () if rest else _shapes(chip).get(chips, ())
        if not _is_slice(chip, shape):
            raise _nearest_error(chip, text, chips)
        return cls(chip=chip, shape=shape, num_slices=num_slices)

    @property
    def slice_name(self) -> str:
        """The compiler's name of one slice."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def name(self) -> str:
        """The compiler's name, with the number of slices in front if there are
        several.
        """
        return (
            self.slice_name
            if self.num_slices == 1
            else f"{self.num_slices}*{self.slice_name}"
        )

    @property
    def product_name(self) -> str:
        """Google's name of one slice."""
        return f"{self.chip.product}-{math.prod(self.shape) * (2 if self.chip.counts_cores else 1)}"

    @property
    def num_devices(self) -> int:
        """JAX devices of all slices."""
        return math.prod(self.shape) * self.num_slices * self.chip.devices

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Whether the links along each dimension close to a ring: sides of 16 in two
        dimensions, whole cubes of 4 in three.

        The compiler has to be told: it else replaces collectives that need a ring, such
        as every all-gather over a v5p:4x4x4.
        Source: `utils/accelerator_to_spec_map.py` of MaxText.
        """
        if self.chip.dimensions == 2:
            return (*(side % _RING == 0 for side in self.shape), False)
        return (all(side % _CUBE == 0 for side in self.shape),) * 3

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device in bytes."""
        return int(self.chip.hbm_gib * GIB)

    @property
    def chips_per_host(self) -> tuple[int, int, int]:
        """Chips of a host along each dimension."""
        return (1, 1, 1) if math.prod(self.shape) == 1 else (2, 2, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return name and published figures, for JSON; those of a device are its share
        of the chip.
        """
        chip = self.chip
        return {
            "name": self.name,
            "product_name": self.product_name,
            "num_slices": self.num_slices,
            "num_chips": math.prod(self.shape) * self.num_slices,
            "num_devices": self.num_devices,
            "devices_per_chip": chip.devices,
            "wrap": list(self.wrap[: len(self.shape)]),
            "hbm_bytes": self.hbm_bytes,
            **{
                name: getattr(chip, name) / chip.devices
                for name in ("peak_flops", "hbm_bandwidth", "ici_bandwidth")
            },
            "source": chip.source,
        }


def known_topologies() -> Iterator[Topology]:
    """Yield one slice for each power of two of chips that has a product name, up to
    1,024: larger ones have the same cubes.
    """
    for chip in CHIPS.values():
        for chips, shape in _shapes(chip).items():
            if chips.bit_count() == 1 and (
                not chip.counts_cores if chips == 1 else chips <= 1024
            ):
                yield Topology(chip=chip, shape=shape)


def _nearest_error(chip: Chip, text: str, chips: int) -> ConfigError:
    """Return the error about a slice that does not exist, with the nearest ones that
    do.
    """
    near = [chips] if chips in _shapes(chip) else nearest_in(chips, [*_shapes(chip)])
    names = [Topology(chip=chip, shape=_shapes(chip)[n]).name for n in near]
    return _error(
        f"topology={text} is not a slice of {chip.name}; nearest: {', '.join(names)};"
        " `rampup explain topology` lists them",
        *names,
    )


def _error(message: str, *nearest: str) -> ConfigError:
    return ConfigError(message, key="topology", nearest=nearest)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak FLOP/s of a JAX device, by its `device_kind`, in bfloat16 without
    sparsity; None for an unknown one.
    """
    for chip in CHIPS.values():
        if device_kind in chip.kinds:
            return chip.peak_flops / chip.devices
    return next(
        (
            peak
            for name, peak in _TABLES["gpus"].items()
            if re.search(rf"\b{name}\b", device_kind)
        ),
        None,
    )
