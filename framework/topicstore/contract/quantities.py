"""The notation of durations and sizes, on the command line, in settings, over HTTP, and as text in Python.

A duration is one or several numbers, each with a unit: ``"100ms"``, ``"30m"``, ``"2w"``, ``"1d12h"``. A size is a
number with a unit: ``"8MB"``, ``"512 KiB"``. Units of sizes with an ``i`` are powers of 1,024, others of 1,000; case is
ignored. ``"infinity"`` stands for no limit, where a limit is optional.
"""

from __future__ import annotations

import re

__all__ = [
    "DURATIONS",
    "INFINITY",
    "SIZES",
    "format_duration",
    "format_size",
    "parse_duration",
    "parse_microseconds",
    "parse_size",
]

INFINITY = "infinity"
"""The word for no limit."""

_MICROSECONDS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_BYTES = {
    "B": 1,
    "kB": 1_000,
    "MB": 1_000_000,
    "GB": 1_000_000_000,
    "TB": 1_000_000_000_000,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_UNWRITTEN = {"min", "w"}
"""Units in which nothing is formatted: another spelling, and weeks, because people count 30 days as such."""
_UNIT_OF = {name.lower(): worth for name, worth in _BYTES.items()}
_UNIT_OF |= {name.lower().removesuffix("b"): worth for name, worth in _BYTES.items() if name != "B"}

_NUMBER = r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*"
_PART = re.compile(rf"{_NUMBER}(us|ms|min|[smhdw])")
DURATIONS = r"^(\s*[0-9]{1,19}(\.[0-9]{1,9})?\s*(us|ms|min|[smhdw]))+\s*$"
"""The regular expression of a duration."""
_DURATION = re.compile(DURATIONS)
SIZES = r"^\s*[0-9]{1,19}(\.[0-9]{1,9})?\s*([kKmMgGtT][iI]?[bB]?|[bB])\s*$"
"""The regular expression of a size."""
_SIZE = re.compile(SIZES)
_SIZE_PARTS = re.compile(rf"{_NUMBER}([A-Za-z]+)")


def parse_duration(text: object) -> float:
    """Return a duration in seconds. Raises ValueError for anything but a text with a unit for each number."""
    return parse_microseconds(text) / 1e6


def parse_microseconds(text: object) -> int:
    """Return a duration in microseconds, rounded. Raises ValueError as `parse_duration` does."""
    if not isinstance(text, str) or _DURATION.fullmatch(text) is None:
        raise ValueError(_wrong(text, "duration", "30m, 12h or 1d12h", _MICROSECONDS))
    return sum(_times(number, _MICROSECONDS[unit]) for number, unit in _PART.findall(text))


def parse_size(text: object) -> int:
    """Return a size in bytes, rounded. Raises ValueError for anything but a text of a number and a unit."""
    if not isinstance(text, str) or _SIZE.fullmatch(text) is None:
        raise ValueError(_wrong(text, "size", "500kB, 8MB or 10GB", _BYTES))
    [(number, unit)] = _SIZE_PARTS.findall(text)
    return _times(number, _UNIT_OF[unit.lower()])


def _times(number: str, worth: int) -> int:
    """Return a decimal number of units, rounded; exact, as floats above 2**53 aren't."""
    whole, _, fraction = number.partition(".")
    scale = int("1".ljust(len(fraction) + 1, "0"))
    return (int(whole + fraction) * worth + scale // 2) // scale


def _wrong(text: object, kind: str, examples: str, units: dict[str, int]) -> str:
    shown = repr(text[:80] if isinstance(text, str) else text)
    bare = re.fullmatch(r"\s*[0-9]+(\.[0-9]*)?\s*", str(text)) is not None
    wrong = "has no unit" if bare else f"is not a {kind}"
    return f"{shown} {wrong}: write {examples}; units are {', '.join(units)}"


def format_duration(seconds: float) -> str:
    """Return a duration in the notation: a whole number of the largest possible unit."""
    return _whole(round(seconds * 1e6), _MICROSECONDS) or "0s"


def format_size(size: int) -> str:
    """Return a size in the notation, as a whole number of the largest possible unit."""
    return _whole(size, _BYTES) or "0B"


def _whole(amount: int, units: dict[str, int]) -> str | None:
    """Return a positive quantity as a whole number of the largest possible unit; None for zero."""
    for unit, worth in sorted(units.items(), key=lambda item: -item[1]):
        if amount >= worth and amount % worth == 0 and unit not in _UNWRITTEN:
            return f"{amount // worth}{unit}"
    return None
