"""Numbers and sizes as text for people."""

from __future__ import annotations

from rampup.plan.describe import format_count as format_count
from rampup.plan.describe import format_value as format_value


def format_si(value: float) -> str:
    """Format a number in few letters, with K, M, B and T for powers of 1,000.

    >>> (
    ...     format_si(1500),
    ...     format_si(2e12),
    ...     format_si(0.003),
    ...     format_si(0),
    ...     format_si(-2.5e7),
    ... )
    ('1.5K', '2T', '0.003', '0', '-25M')
    """
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def format_bytes(number: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(900), format_bytes(1536), format_bytes(17_179_869_184)
    ('900 bytes', '1.5 KiB', '16 GiB')
    """
    for unit in ("bytes", "KiB", "MiB"):
        if abs(number) < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.4g} GiB"
