"""Times as devices write them: ISO 8601 texts, or numbers of seconds, milliseconds, microseconds or nanoseconds."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from topicstore.contract.times import parse_timestamp

__all__ = ["AUTO", "UNITS", "to_microseconds"]

AUTO = "auto"
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Each unit, with the number of them in a second."""

_FROM, _TO = 10**9, 5 * 10**9
"""The seconds of the years 2001 to 2128: no two units have a number in common for them."""
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?")
_LEAST_DIGITS = 9
"""The least digits of a text that is a number: a shorter one is a day, as ``20240131``, unless the unit is known."""


def to_microseconds(time: object, unit: str | None) -> int:
    """Return a time as microseconds since the epoch, rounded down from nanoseconds. Raises `ValueError`.

    ``unit``: that of a number, or of a text that is one. With `AUTO` it is known by the size of the number, for times
    from 2001 to 2128. With None a number is whole microseconds, as `replay` writes it.
    """
    if isinstance(time, str):
        found = _NUMBER.fullmatch(time)
        if unit is None or not found or (unit == AUTO and len(time) < _LEAST_DIGITS):
            return parse_timestamp(time)
        time = Decimal(time) if found[1] else int(time)
    if isinstance(time, bool) or not isinstance(time, (int, float, Decimal)) or not math.isfinite(time):
        raise ValueError(f"{time!r:.80} is not a time")
    if unit is None:
        if not isinstance(time, int):
            raise ValueError(f"{time} is not whole microseconds; say in which unit it is with --time-unit")
        return time
    each = UNITS[_unit_of(time) if unit == AUTO else unit]
    if isinstance(time, int):
        return time * 10**6 // each
    # A float of seconds until 2242 is exact to half a microsecond, so the nearest one is meant; a product is not.
    return round(Decimal(time) * 10**6 / each)


def _unit_of(time: float | Decimal) -> str:
    for unit, each in UNITS.items():
        if _FROM * each <= time < _TO * each:
            return unit
    raise ValueError(f"{time} is no time from 2001 to 2128 in any unit; say in which it is with --time-unit")
