"""TPU slices by name: their chips, shape, torus links and published figures, to plan
and compile for slices without having one.

Names are those of the TPU compiler (`v5e:4x4`), Google's product names (`v5litepod-16`,
`v5p-128`, `v6e-256`), and either with a number of slices in front (`2*v5e:4x4`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rampup.errors import ConfigError
from rampup.plan.numbers import GIB, nearest_in

MAX_SLICES = 1024
# The status of every result for an absent slice.
NOT_RUN_ON = "compiled for, not run on"
_DOCS = "https://docs.cloud.google.com/tpu/docs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A TPU generation. The figures are per chip and published, but the HBM is what the
    compiler lets programs use.
    """

    name: str  # the name that the compiler takes
    product: str  # the prefix of Google's product names, followed by `-` and a count
    aliases: tuple[str, ...] = ()  # other prefixes of such names
    # whether the number in a product name counts TensorCores, two a chip, and not chips
    counts_cores: bool
    devices: int = 1  # JAX devices of a chip
    dimensions: int  # of the torus
    # memory that the compiler lets the programs of one *device* use (libtpu 0.0.50)
    hbm_gib: float
    peak_flops: float  # bfloat16 matrix products, FLOP/s
    hbm_bandwidth: float  # bytes/s
    # bytes/s that a chip sends to its neighbors over all its links, in one direction
    # each
    ici_bandwidth: float
    max_chips: int  # chips of the largest slice
    source: str  # where the figures are published
    config: str | None = None  # `chip_config_name` of the compiler
    kinds: tuple[str, ...]  # what JAX calls its devices


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


_LINKS = (
    "links: Norrie et al., 'The Design Process for Google's Training Chips: TPUv2 and"
    " TPUv3' (IEEE Micro 2021)"
)
# The bandwidth of the links is half of Google's bidirectional figure, or its figure in
# Gbps divided by 8.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(name="v2", product="v2", counts_cores=True, devices=2, dimensions=2, hbm_gib=7.48, max_chips=256,
             peak_flops=46e12, hbm_bandwidth=700e9, ici_bandwidth=248e9, kinds=("TPU v2",), source=f"{_DOCS}/v2; {_LINKS}"),
        Chip(name="v3", product="v3", counts_cores=True, devices=2, dimensions=2, hbm_gib=15.48, max_chips=1024,
             peak_flops=123e12, hbm_bandwidth=900e9, ici_bandwidth=328e9, kinds=("TPU v3",), source=f"{_DOCS}/v3; {_LINKS}"),
        Chip(name="v4", product="v4", counts_cores=True, dimensions=3, hbm_gib=30.75, max_chips=4096, config="megacore",
             peak_flops=275e12, hbm_bandwidth=1228e9, ici_bandwidth=300e9, kinds=("TPU v4",), source=f"{_DOCS}/v4"),
        Chip(name="v5e", product="v5litepod", aliases=("v5e",), counts_cores=False, dimensions=2, hbm_gib=15.75, max_chips=256,
             peak_flops=197e12, hbm_bandwidth=819e9, ici_bandwidth=200e9,
             kinds=("TPU v5 lite", "TPU v5e"), source=f"{_DOCS}/v5e"),
        Chip(name="v5p", product="v5p", counts_cores=True, dimensions=3, hbm_gib=95.73, max_chips=8960,
             peak_flops=459e12, hbm_bandwidth=2765e9, ici_bandwidth=600e9, kinds=("TPU v5", "TPU v5p"), source=f"{_DOCS}/v5p"),
        Chip(name="v6e", product="v6e", counts_cores=False, dimensions=2, hbm_gib=31.24, max_chips=256,
             peak_flops=918e12, hbm_bandwidth=1638e9, ici_bandwidth=400e9,
             kinds=("TPU v6 lite", "TPU v6e"), source=f"{_DOCS}/v6e"),
        Chip(name="tpu7x", product="tpu7x", counts_cores=True, devices=2, dimensions=3, hbm_gib=94.74, max_chips=9216,
             peak_flops=2307e12, hbm_bandwidth=7380e9, ici_bandwidth=600e9, kinds=("TPU7x",), source=f"{_DOCS}/tpu7x"),
    )
}  # fmt: skip
# The shapes of slices in two dimensions, and of small ones in three: larger ones are
# built of cubes of 4 x 4 x 4 chips.
_FLAT = {
    1: (1, 1),
    4: (2, 2),
    8: (2, 4),
    16: (4, 4),
    32: (4, 8),
    64: (8, 8),
    128: (8, 16),
    256: (16, 16),
}
_FLAT |= {512: (16, 32), 1024: (32, 32)}
_SMALL_CUBES = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CUBE, _RING = 4, 16
_NAME = re.compile(r"(?:([0-9]{1,9})\s*[*x]\s*)?([a-z]+[0-9a-z]*)([:-])([0-9x]{1,99})")


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
            if (
                len(shape) != chip.dimensions
                or size.count("x") != chip.dimensions - 1
                or min(shape) < 1
            ):
                example = cls(chip=chip, shape=_shapes(chip)[64]).name
                raise _error(
                    f"topology={text}: a slice of {chip.name} has {chip.dimensions}"
                    f" sides, such as {example}",
                    example,
                )
            if chip.dimensions == 2 and shape not in _shapes(chip).values():
                raise _nearest_error(chip, text, chips, "is not a shape of its slices")
            if chip.dimensions == 3 and shape not in _SMALL_CUBES.values():
                if any(side % _CUBE for side in shape) or list(shape) != sorted(shape):
                    rule = (
                        "must be one of 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4, or have"
                        " sides that are multiples of 4"
                    )
                    raise _nearest_error(
                        chip, text, chips, f"{rule} in ascending order"
                    )
                if chips > chip.max_chips:
                    raise _nearest_error(
                        chip,
                        text,
                        chips,
                        f"has {chips:,} chips of at most {chip.max_chips:,}",
                    )
        else:  # the number of a product name counts chips or TensorCores
            unit = 2 if chip.counts_cores else 1
            number = int(size) if size.isdecimal() else 0
            if number % unit or number // unit not in _shapes(chip):
                what = (
                    f"has {number} {'TensorCores' if unit == 2 else 'chips'}, which is"
                    " not a size of its slices"
                )
                raise _nearest_error(chip, text, number // unit, what)
            shape = _shapes(chip)[number // unit]
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


def _nearest_error(chip: Chip, text: str, chips: int, rule: str) -> ConfigError:
    """Return the error about a size that does not exist, with the nearest ones that
    do.
    """
    near = [chips] if chips in _shapes(chip) else nearest_in(chips, [*_shapes(chip)])
    names = [Topology(chip=chip, shape=_shapes(chip)[n]).name for n in near]
    return _error(f"topology={text} {rule}; nearest: {', '.join(names)}", *names)


def _error(message: str, *nearest: str) -> ConfigError:
    return ConfigError(message, key="topology", nearest=nearest)


# Dense bfloat16 FLOP/s of GPUs, from the vendor's data sheets. The first name that
# occurs in a device's kind counts.
_GPU_PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "NVIDIA L4": 121e12,
}


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
            for name, peak in _GPU_PEAK_FLOPS.items()
            if re.search(rf"\b{name}\b", device_kind)
        ),
        None,
    )
