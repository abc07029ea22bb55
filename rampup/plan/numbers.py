"""Exact numbers from text: "250B" tokens, "61.5K" samples, fractional sizes per device. No float touches a sample count."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from rampup.errors import ConfigError, RampDefinitionError, RampupError

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Far beyond any training run; keeps "1e999999999" from filling the memory.
MAX_COUNT = 10**18
# Divisors of a step's samples are listed for error messages, which stays instant up to here.
MAX_SAMPLES = 10**9


def parse_count(text: str | int, *, what: str, key: str | None = None) -> int:
    """Read a whole number with an optional suffix K, M, B or T (powers of 1,000, either case).

    Args:
        text: for instance `"250B"`, `"117.25B"`, `"1_000"`, `"1e3"` or an int.
        what: what the number counts, for the error's message.
        key: the configuration key it came from, for the error.

    Returns:
        The exact value. Decimal arithmetic throughout: "8.2B" is 8,200,000,000 and not one less.

    Raises:
        RampDefinitionError: not a number, negative, not whole ("12.9") or above 10**18.

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
        raise RampDefinitionError(
            f"{what}={text!r} is not a number; write digits with an optional suffix K, M, B or T, for instance 250B", key=key
        ) from None
    if not number.is_finite() or number < 0 or number.adjusted() > 18 or number * factor > MAX_COUNT:
        raise RampDefinitionError(f"{what}={text!r} must be between 0 and 10**18", key=key)
    if number != 0 and number.adjusted() < -18:
        raise RampDefinitionError(f"{what}={text!r} must be a whole number", key=key)
    value = Fraction(number) * factor
    if value.denominator != 1:
        below = value.numerator // value.denominator
        raise RampDefinitionError(
            f"{what}={text!r} must be a whole number; nearest: {below:,}, {below + 1:,}", key=key, nearest=(below, below + 1)
        )
    return value.numerator


def exact_fraction(value: object, *, what: str, key: str | None = None) -> Fraction:
    """Return the number that a person wrote, exactly: 0.1 is one tenth and not the nearest double to it.

    Args:
        value: int, float, Decimal, Fraction or text such as `"0.5"` or `"1/3"`.
        what: what the number is, for the error's message.
        key: the configuration key it came from, for the error.

    Returns:
        The exact value; a float stands for its shortest decimal representation.

    Raises:
        RampDefinitionError: not a finite number, or beyond 10**18 or below 10**-18 in size.

    Example:
        >>> exact_fraction(0.1, what="per_device_batch_size") * 10
        Fraction(1, 1)
    """
    problem = RampDefinitionError(f"{what}={value!r} is not a number; write for instance 4, 0.5 or 1/3", key=key)
    if isinstance(value, bool):
        raise problem
    if isinstance(value, Fraction):
        result = value
    else:
        text = repr(value) if isinstance(value, float) else str(value).strip()
        numerator, slash, denominator = text.partition("/")
        try:
            decimals = [Decimal(numerator)] + ([Decimal(denominator)] if slash else [])
        except InvalidOperation:
            raise problem from None
        if any(not number.is_finite() or abs(number.adjusted()) > 18 for number in decimals if number != 0):
            raise RampDefinitionError(f"{what}={value!r} is out of range; the largest size is 10**18", key=key)
        if slash and decimals[1] == 0:
            raise problem
        result = Fraction(decimals[0]) / (Fraction(decimals[1]) if slash else 1)
    if abs(result) > MAX_COUNT:
        raise RampDefinitionError(f"{what}={value!r} is out of range; the largest size is 10**18", key=key)
    return result


def plain_number(value: Fraction) -> int | float:
    """Return a fraction as an int where it is whole and as the nearest float otherwise, for printing and JSON.

    Example:
        >>> plain_number(Fraction(6, 2)), plain_number(Fraction(1, 4))
        (3, 0.25)
    """
    return value.numerator if value.denominator == 1 else float(value)


def written(value: Fraction) -> int | float | str:
    """Return a fraction as what a configuration file reads back exactly.

    Example:
        >>> written(Fraction(4)), written(Fraction(1, 2)), written(Fraction(1, 3))
        (4, 0.5, '1/3')
    """
    number = plain_number(value)
    return number if Fraction(repr(number)) == value else str(value)


def count_problems(counts: dict[str, int], *, minimum: int = 1) -> list[RampupError]:
    """Return an error for every count that is no whole number between `minimum` and 10**9."""
    problems: list[RampupError] = []
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            problems.append(ConfigError(f"{name}={str(count)[:100]!r} must be a whole number", key=name))
        elif not minimum <= count <= MAX_SAMPLES:
            bound = minimum if count < minimum else MAX_SAMPLES
            limit = f"at least {minimum}" if count < minimum else f"at most {MAX_SAMPLES:,}"
            problems.append(ConfigError(f"{name}={count} must be {limit}", key=name, nearest=(bound,)))
    return problems


def divisors(number: int) -> list[int]:
    """Return the divisors of a number up to 10**9, smallest first.

    Example:
        >>> divisors(12)
        [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def next_to(value: int, legal: list[int]) -> list[int]:
    """Return the values of an ascending list that are next to `value`, below and above; `value` itself is not one.

    Example:
        >>> next_to(5, [1, 2, 4, 8, 16]), next_to(40, [1, 2, 4])
        ([4, 8], [4])
    """
    return [n for n in legal if n < value][-1:] + [n for n in legal if n > value][:1]
