"""Exact numbers: parsing, divisors and nearest legal values. Each is an int or a
`Fraction`; samples are never floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, TypeVar

from rampup.errors import ConfigError, RampDefinitionError

Number = TypeVar("Number", int, Fraction)

# In a configuration: infer or choose this size. It has nothing to do with `auto`, a
# value of other keys.
AUTO = -1
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Far beyond any training run. The limit keeps "1e999999999" from exhausting memory.
MAX_COUNT = 10**18
# `divisors` tries factors up to this one, so it is complete up to 10**10 and fast for
# any number.
MAX_FACTOR = 10**5
GIB, MAX_GIB = 2**30, 10**6


def parse_count(text: str | int, *, what: str, key: str | None = None) -> int:
    """Return a whole number up to 10**18 from an int or text, exactly: "1e3", or
    "117.25B" and "2k" with powers of 1,000.
    """
    digits = str(text).strip().upper()
    factor = 1
    if digits and digits[-1] in SUFFIXES:
        factor = SUFFIXES[digits[-1]]
        digits = digits[:-1]
    try:
        number = Decimal(digits)
    except InvalidOperation:
        rule = (
            "is not a number; write digits with an optional suffix K, M, B or T, for"
            " instance 250B"
        )
        raise RampDefinitionError(f"{what}={text!r} {rule}", key=key) from None
    if (
        not number.is_finite()
        or number < 0
        or number.adjusted() > 18
        or number * factor > MAX_COUNT
    ):
        raise RampDefinitionError(
            f"{what}={text!r} must be between 0 and 10**18", key=key
        )
    if number != 0 and number.adjusted() < -18:
        raise RampDefinitionError(f"{what}={text!r} must be a whole number", key=key)
    value = Fraction(number) * factor
    if value.denominator != 1:
        below = value.numerator // value.denominator
        raise RampDefinitionError(
            f"{what}={text!r} must be a whole number; nearest: {below:,}, {below + 1:,}",
            key=key,
            nearest=(below, below + 1),
        )
    return value.numerator


def parse_memory_gib(value: str | float) -> int:
    """Return a memory size in bytes from a number of GiB such as 80, 0.5 or "1/3"; at
    least one byte, at most 1,000,000 GiB.
    """
    key = "memory-gib"
    size = exact_fraction(value, what=key, key=key)
    if size * GIB < 1 or size > MAX_GIB:
        raise ConfigError(
            f"{key}={value} must be above 0 and at most {MAX_GIB:,} GiB",
            key=key,
            nearest=(1,) if size < 1 else (MAX_GIB,),
        )
    return int(size * GIB)


def exact_fraction(value: object, *, what: str, key: str | None = None) -> Fraction:
    """Return a number exactly as written, 0 or of a magnitude from 10**-18 to 10**18:
    0.1 is one tenth; text may be "1/3". An error calls None by its name in YAML.
    """
    value = "null" if value is None else value

    def refusal(rule: str) -> RampDefinitionError:
        return RampDefinitionError(f"{what}={value!r} {rule}", key=key)

    no_number = "is not a number; write for instance 4, 0.5 or 1/3"
    out_of_range = "is out of range; the largest size is 10**18"
    if isinstance(value, bool):
        raise refusal(no_number)
    if isinstance(value, Fraction):
        result = value
    else:
        text = repr(value) if isinstance(value, float) else str(value).strip()
        try:
            numerator, *denominator = map(Decimal, text.split("/", maxsplit=1))
        except InvalidOperation:
            raise refusal(no_number) from None
        if any(
            not n.is_finite() or (n and abs(n.adjusted()) > 18)
            for n in (numerator, *denominator)
        ):
            raise refusal(out_of_range)
        if denominator == [0]:
            raise refusal(no_number)
        result = Fraction(numerator) / (Fraction(denominator[0]) if denominator else 1)
    if abs(result) > MAX_COUNT:
        raise refusal(out_of_range)
    return result


def check_whole(minimum: int | None = None, /, **numbers: object) -> None:
    """Refuse arguments, given by name, that are no whole numbers, such as "8", 8.0,
    True and None, or that are below a minimum.
    """
    for name, number in numbers.items():
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise ConfigError(f"{name}={number!r} must be a whole number", key=name)
        if minimum is not None and operator.index(number) < minimum:
            raise ConfigError(
                f"{name}={number} must be at least {minimum}",
                key=name,
                nearest=(minimum,),
            )


def check_whole_or_none(minimum: int | None = None, /, **numbers: object) -> None:
    """Refuse arguments as `check_whole` does, except for None."""
    given = {name: number for name, number in numbers.items() if number is not None}
    check_whole(minimum, **given)


def check_range(low: float, high: float = math.inf, /, **numbers: object) -> None:
    """Refuse arguments, given by name, that are no numbers from `low` to `high`."""
    limits = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
    for name, number in numbers.items():
        if not isinstance(number, Real) or not low <= float(number) <= high:
            raise ConfigError(f"{name}={number!r} must be a number {limits}", key=name)


def plain_number(value: Fraction) -> int | float:
    """Return a fraction as an int if it is whole and as the nearest float otherwise,
    for printing and JSON.
    """
    return value.numerator if value.denominator == 1 else float(value)


def to_yaml_number(value: Fraction) -> int | float | str:
    """Return a fraction in a form that `exact_fraction` reads back exactly: 4, 0.5 or
    "1/3".
    """
    number = plain_number(value)
    return number if Fraction(repr(number)) == value else str(value)


def finite_or_none(value: Any) -> int | float | None:
    """Return a number as JSON can represent it: None for NaN and infinity."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order; above 10**10, only each d
    with d or number / d at most 10**5.
    """
    if number < 1:
        return []
    small = [
        n for n in range(1, min(math.isqrt(number), MAX_FACTOR) + 1) if number % n == 0
    ]
    return small + [number // n for n in reversed(small) if n * n != number]


def nearest_in(value: Number, legal: Sequence[Number]) -> list[Number]:
    """Return the neighbors of `value` in an ascending list, below and above; `value`
    itself is not one.
    """
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def nearest_multiples(
    value: Number, step: Number, offset: Number | Literal[0] = 0
) -> list[Number]:
    """Return the positive numbers `offset + n * step` next to `value`: the last below
    it, if any, and the first from it on.
    """
    above = offset - (offset - value) // step * step
    if above <= 0:
        above = offset % step or step
    return [n for n in (above - step, above) if n > 0]


def format_product(factors: Mapping[str, int]) -> str:
    """Return a product as text, such as "data_parallel_size * microbatch_size = 64 * 8
    = 512". Factors of 1 are left out.
    """
    used = {name: size for name, size in factors.items() if size != 1} or factors
    names = " * ".join(used)
    values = " * ".join(map(str, used.values()))
    return f"{names} = {values}" + (
        f" = {math.prod(used.values())}" if len(used) > 1 else ""
    )


def has_numbers(dtype: Any) -> bool:
    """Return whether a type of NumPy is one of numbers: not of objects, bytes, texts,
    times or records.
    """
    return dtype.kind not in "OSUMm" and dtype.names is None
