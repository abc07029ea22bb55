"""Numbers and sizes as text for people."""

from __future__ import annotations

# Kinds of operations in a pipeline timetable.
KIND_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def format_value(value: object) -> str:
    """Format a value for people: thousands separators for integers, four significant digits for other numbers.

    Example:
        >>> format_value(1234567), format_value(0.123456), format_value(11060.4), format_value(True), format_value("x")
        ('1,234,567', '0.1235', '11,060', 'True', 'x')
    """
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
