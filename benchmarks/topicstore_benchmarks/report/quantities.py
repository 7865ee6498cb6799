"""Formats values for people: 1.25 M messages/s, 0.21 ms, 37.5 bytes, 212 MB."""

from __future__ import annotations

from topicstore_benchmarks.results import UNITS

__all__ = ["bare", "quantity", "short", "unprefixed"]

_LARGE = 999.5
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def quantity(metric: str, value: float) -> str:
    """Return a value of a metric with its unit. Times of a second or more are in s, shorter ones in ms."""
    unit = UNITS[metric]
    if unit == "ms" and value >= _LARGE:
        unit, value = "s", value / 1e3
    if unit in ("ms", "s"):
        return f"{unprefixed(value)} {unit}"
    if unit == "bytes":
        number, _, prefix = short(value).partition(" ")
        return f"{number} bytes" if metric == "bytes_per_message" and not prefix else f"{number} {prefix}B"
    return f"{short(value)} {unit}".rstrip()


def bare(metric: str, value: float) -> str:
    """Return a value of a metric without its unit."""
    return unprefixed(value) if UNITS[metric] in ("ms", "s") else short(value)


def unprefixed(value: float) -> str:
    """Return a number with about three digits, or as an integer if it has at least four digits."""
    return f"{value:,.0f}" if value >= _LARGE else _digits(value)


def short(value: float) -> str:
    """Return a number with about three digits, with a metric prefix if it is at least 1,000."""
    for size, prefix in _STEPS:
        if value >= 0.9995 * size:
            return f"{_digits(value / size)} {prefix}"
    return _digits(value)


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.0995 or value == 0 else f"{value:.2g}"
