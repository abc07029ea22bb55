"""Exact numbers: parsing ("250B" tokens, "61.5K" samples, fractional sizes per device), divisors and nearest legal values.

Everything is an int or a `Fraction`. A sample count never passes through a float.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, TypeVar

from rampup.errors import ConfigError, RampDefinitionError

Number = TypeVar("Number", int, Fraction)

# In a configuration: infer or choose this size. It has nothing to do with `auto`, a value of other keys.
AUTO = -1
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Far beyond any training run. The limit keeps "1e999999999" from exhausting memory.
MAX_COUNT = 10**18
# `divisors` tries factors up to this one, so it is complete up to 10**10 and fast for any number.
MAX_FACTOR = 10**5
GIB, MAX_GIB = 2**30, 10**6


def parse_count(text: str | int, *, what: str, key: str | None = None) -> int:
    """Parse a whole number with an optional suffix K, M, B or T (powers of 1,000, either case).

    Args:
        text: for instance `"250B"`, `"117.25B"`, `"1_000"`, `"1e3"` or an int.
        what: the name of the number in error messages.
        key: the configuration key that errors refer to.

    Returns:
        The exact value. The arithmetic is decimal, so "8.2B" is exactly 8,200,000,000.

    Raises:
        RampDefinitionError: If `text` is not a number, is negative, not whole ("12.9") or above 10**18.

    Example:
        >>> parse_count("2.01K", what="threshold")
        2010
    """
    digits = str(text).strip().upper()
    factor = 1
    if digits and digits[-1] in SUFFIXES:
        factor = SUFFIXES[digits[-1]]
        digits = digits[:-1]
    try:
        number = Decimal(digits)
    except InvalidOperation:
        rule = "is not a number; write digits with an optional suffix K, M, B or T, for instance 250B"
        raise RampDefinitionError(f"{what}={text!r} {rule}", key=key) from None
    if not number.is_finite() or number < 0 or number.adjusted() > 18 or number * factor > MAX_COUNT:
        raise RampDefinitionError(f"{what}={text!r} must be between 0 and 10**18", key=key)
    if number != 0 and number.adjusted() < -18:
        raise RampDefinitionError(f"{what}={text!r} must be a whole number", key=key)
    value = Fraction(number) * factor
    if value.denominator != 1:
        below = value.numerator // value.denominator
        rule = f"{what}={text!r} must be a whole number; nearest: {below:,}, {below + 1:,}"
        raise RampDefinitionError(rule, key=key, nearest=(below, below + 1))
    return value.numerator


def parse_memory_gib(value: str | float, *, key: str = "memory-gib") -> int:
    """Return a memory size in bytes from a number of GiB.

    Args:
        value: GiB, for instance 80, 0.5 or `"1/3"`.
        key: the option it came from, for the error.

    Raises:
        RampupError: not a number, below one byte or above 1,000,000 GiB.

    Example:
        >>> parse_memory_gib("0.5")
        536870912
    """
    size = exact_fraction(value, what=key, key=key)
    if size * GIB < 1 or size > MAX_GIB:
        rule = f"{key}={value} must be above 0 and at most {MAX_GIB:,} GiB"
        raise ConfigError(rule, key=key, nearest=(1,) if size < 1 else (MAX_GIB,))
    return int(size * GIB)


def exact_fraction(value: object, *, what: str, key: str | None = None) -> Fraction:
    """Return a number exactly as written: 0.1 is one tenth, not the nearest double.

    Args:
        value: int, float, Decimal, Fraction or text such as `"0.5"` or `"1/3"`.
        what: the name of the number in error messages.
        key: the configuration key that errors refer to.

    Returns:
        The exact value. A float is read as its shortest decimal representation.

    Raises:
        RampDefinitionError: If `value` is not a finite number, or its magnitude is above 10**18 or below 10**-18.

    Example:
        >>> exact_fraction(0.1, what="per_device_batch_size") * 10
        Fraction(1, 1)
    """
    if isinstance(value, bool):
        raise _no_number(value, what, key)
    if isinstance(value, Fraction):
        result = value
    else:
        text = repr(value) if isinstance(value, float) else str(value).strip()
        numerator, slash, denominator = text.partition("/")
        try:
            decimals = [Decimal(numerator)] + ([Decimal(denominator)] if slash else [])
        except InvalidOperation:
            raise _no_number(value, what, key) from None
        if any(not number.is_finite() or abs(number.adjusted()) > 18 for number in decimals if number != 0):
            raise _out_of_range(value, what, key)
        if slash and decimals[1] == 0:
            raise _no_number(value, what, key)
        result = Fraction(decimals[0]) / (Fraction(decimals[1]) if slash else 1)
    if abs(result) > MAX_COUNT:
        raise _out_of_range(value, what, key)
    return result


def _no_number(value: object, what: str, key: str | None) -> RampDefinitionError:
    return RampDefinitionError(f"{what}={value!r} is not a number; write for instance 4, 0.5 or 1/3", key=key)


def _out_of_range(value: object, what: str, key: str | None) -> RampDefinitionError:
    return RampDefinitionError(f"{what}={value!r} is out of range; the largest size is 10**18", key=key)


def plain_number(value: Fraction) -> int | float:
    """Return a fraction as an int if it is whole and as the nearest float otherwise, for printing and JSON.

    Example:
        >>> plain_number(Fraction(6, 2)), plain_number(Fraction(1, 4))
        (3, 0.25)
    """
    return value.numerator if value.denominator == 1 else float(value)


def to_yaml_number(value: Fraction) -> int | float | str:
    """Return a fraction in a form that `exact_fraction` reads back exactly.

    Example:
        >>> to_yaml_number(Fraction(4)), to_yaml_number(Fraction(1, 2)), to_yaml_number(Fraction(1, 3))
        (4, 0.5, '1/3')
    """
    number = plain_number(value)
    return number if Fraction(repr(number)) == value else str(value)


def finite_or_none(value: Any) -> int | float | None:
    """Return a number as JSON can represent it: None for NaN and infinity."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order; above 10**10, only each d with d or number / d at most 10**5.

    Example:
        >>> divisors(12), divisors(0)
        ([1, 2, 3, 4, 6, 12], [])
    """
    if number < 1:
        return []
    small = [n for n in range(1, min(math.isqrt(number), MAX_FACTOR) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def nearest_in(value: Number, legal: Sequence[Number]) -> list[Number]:
    """Return the neighbors of `value` in an ascending list, below and above; `value` itself is not one.

    Example:
        >>> nearest_in(5, [1, 2, 4, 8, 16]), nearest_in(40, [1, 2, 4])
        ([4, 8], [4])
    """
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]


def nearest_multiples(value: Number, step: Number, offset: Number | None = None) -> list[Number]:
    """Return the positive numbers of the form `offset + n * step` next to `value`, the lower one first.

    The last one is the first such number at or above `value`. The one before it is missing if it would not be positive.

    Example:
        >>> nearest_multiples(1000, 512), nearest_multiples(3, 8), nearest_multiples(8, 8)
        ([512, 1024], [8], [8])
        >>> nearest_multiples(Fraction(5, 2), Fraction(1), offset=Fraction(1, 4))
        [Fraction(9, 4), Fraction(13, 4)]
    """
    start = value * 0 if offset is None else offset
    above = start - (start - value) // step * step
    if above <= 0:
        above = start % step or step
    return [n for n in (above - step, above) if n > 0]


def format_product(factors: Mapping[str, int]) -> str:
    """Return a product as text, with names and values. Factors of 1 are left out.

    Example:
        >>> format_product({"data_parallel_size": 64, "microbatch_size": 8})
        'data_parallel_size * microbatch_size = 64 * 8 = 512'
    """
    used = {name: size for name, size in factors.items() if size != 1} or factors
    names = " * ".join(used)
    values = " * ".join(map(str, used.values()))
    return f"{names} = {values}" + (f" = {math.prod(used.values())}" if len(used) > 1 else "")
