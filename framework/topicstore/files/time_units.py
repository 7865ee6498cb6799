"""Times in various notations: ISO 8601 texts, or numbers of seconds, milliseconds, microseconds or nanoseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from fractions import Fraction

from topicstore.contract.positions import to_microseconds as exact
from topicstore.contract.times import is_finer, parse_timestamp

__all__ = ["AUTO", "UNITS", "to_microseconds"]

AUTO = "auto"
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The units of time, each with its number per second."""

_FROM, _TO = 10**9, 5 * 10**9
"""The range of times, in seconds since the epoch (2001 to 2128), in which the size of a number determines its unit."""
_NO_TIME = 10**24
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
_LEAST_DIGITS = 9
"""The minimum length of a text that counts as a number if the unit is unknown; ``20240131`` is a date."""


def to_microseconds(
    time: object, unit: str | None, finer: Callable[[object], None] = lambda _: None, zone: tzinfo = UTC
) -> int:
    """Return a time as microseconds since the epoch, rounded down. Raises `ValueError`.

    unit:  the unit of a number or of a numeric text. `AUTO` infers the unit from the number's size, for times from 2001
           to 2128. None means whole microseconds, as `replay` writes them, and parses texts as ISO 8601.
    finer: called with each time that has to be rounded.
    zone:  the time zone of a text or datetime without one.
    """
    if isinstance(time, str):
        if unit is None or not _NUMBER.fullmatch(time) or (unit == AUTO and len(time) < _LEAST_DIGITS):
            if is_finer(time):
                finer(time)
            return parse_timestamp(time, rounded=True, zone=zone)
        time = Decimal(time) if "." in time else int(time)
    if isinstance(time, datetime):
        return exact(time if time.tzinfo is not None else time.replace(tzinfo=zone))
    if isinstance(time, bool) or not isinstance(time, (int, float, Decimal)) or not -_NO_TIME < time < _NO_TIME:
        raise ValueError(f"{time!r:.80} is not a time")
    if unit is None:
        if not isinstance(time, int):
            raise ValueError(f"{time} is not whole microseconds; say in which unit it is with --time-unit")
        return time
    return _scaled(time, UNITS[_unit_of(time) if unit == AUTO else unit], finer)


def _scaled(time: float | Decimal, each: int, finer: Callable[[object], None]) -> int:
    if isinstance(time, int):
        whole, rest = divmod(time * 10**6, each)
        if rest:
            finer(time)
        return whole
    exact = Fraction(time) * 10**6 / each
    if each <= UNITS["ms"] and (isinstance(time, float) or time == Decimal(repr(float(time)))):
        # A float is exact to half a microsecond until 2242, so rounding to the nearest microsecond is right.
        return round(exact)
    if exact.denominator > 1:
        finer(time)
    return math.floor(exact)


def _unit_of(time: float | Decimal) -> str:
    for unit, each in UNITS.items():
        if _FROM * each <= time < _TO * each:
            return unit
    raise ValueError(f"{time} is no time from 2001 to 2128 in any unit; say in which it is with --time-unit")
