"""Parsing and formatting times, and detecting numbers that are probably not in microseconds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo

from .errors import InvalidArgumentError
from .positions import MAX_TIME, to_microseconds

__all__ = [
    "MOST_SUSPECTED",
    "Time",
    "format_time",
    "hardly_microseconds",
    "instant",
    "is_finer",
    "parse_timestamp",
    "parse_when",
    "suspected_unit",
]

Time = int | datetime | timedelta | str
"""A time to read from: microseconds since the epoch, a datetime with a time zone, a negative timedelta relative to now,
or a text: ISO 8601, ``now``, ``-2h``, ``-1d12h``, or ``@`` and seconds since the epoch."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_MICROSECONDS = re.compile(r"[0-9]{9,17}")
_FINER = re.compile(r"[.,][0-9]{6}0*[1-9]")
_AT_SECONDS = re.compile(r"@([0-9]{1,11})(?:\.([0-9]{1,6}))?")
_LEAST_MICROSECONDS = 10**14
"""The lowest number that is accepted as microseconds, in 1973. A lower one is probably seconds or milliseconds."""


def parse_timestamp(text: str, *, rounded: bool = False, zone: tzinfo = UTC) -> int:
    """Parse a time in ISO 8601, or a number of microseconds; return it in microseconds since the epoch.

    A time without a zone is in ``zone``. A number has nine digits or more, because ``20240131`` is a day. Raises
    `ValueError` for any other text, and for a time that is finer than microseconds unless it is to be ``rounded`` down.
    """
    if _MICROSECONDS.fullmatch(text):
        return int(text)
    if not rounded and is_finer(text):
        raise ValueError(f"{text[:80]!r} is finer than microseconds")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text[:80]!r} is not a time: those are 2025-06-01T12:00, or microseconds since the epoch, 9 to 17 digits"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=zone)
    return (moment - _EPOCH) // _MICROSECOND


def is_finer(text: str) -> bool:
    """Return whether a time in ISO 8601 is more precise than microseconds; trailing zeros don't count."""
    return _FINER.search(text) is not None


def parse_when(text: str, now: int) -> int:
    """Parse a time as users write it; return it in microseconds since the epoch.

    In addition to the forms of `parse_timestamp` the text may be ``now``, a time before now such as ``-2h`` or
    ``-1d12h``, or ``@`` and seconds since the epoch. Raises `ValueError` for numbers that are probably not in
    microseconds.
    """
    if text == "now":
        return now
    if text.startswith("-") and not text[-1].isspace():
        from .quantities import parse_microseconds  # imported here, because few programs pass such times

        with contextlib.suppress(ValueError):
            return now - parse_microseconds(text[1:])
    if seconds := _AT_SECONDS.fullmatch(text):
        return int(seconds[1]) * 1_000_000 + int((seconds[2] or "").ljust(6, "0"))
    if _MICROSECONDS.fullmatch(text) and int(text) < _LEAST_MICROSECONDS:
        year = format_time(int(text))[:4]
        raise ValueError(f"{text} is not a time: as microseconds it lies in {year}; seconds have an @ before them")
    try:
        return parse_timestamp(text)
    except ValueError as bad:
        if is_finer(text):
            raise
        raise ValueError(
            f"{text[:80]!r} is not a time: those are 2025-06-01T12:00, -2h, now, or @ with seconds"
        ) from bad


_LEAST_SECONDS, _MOST_SECONDS = 10**9, 5 * 10**9
"""The years 2001 to 2128."""
_DATES = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
"""The formats of dates written as a number, by their number of digits."""
MOST_SUSPECTED = 22 * 10**12
"""From this number on, `suspected_unit` returns None."""


def suspected_unit(timestamp: int) -> str | None:
    """Return the likely unit of a number that would be a time early in 1970 if it were in microseconds.

    Returns None if the number may be in microseconds.
    """
    for unit, each in (("seconds", 1), ("milliseconds", 1_000)):
        if _LEAST_SECONDS * each <= timestamp < _MOST_SECONDS * each:
            return unit
    digits = str(timestamp)
    if digits[:2] in ("19", "20", "21") and len(digits) in _DATES:
        with contextlib.suppress(ValueError):
            datetime.strptime(digits, _DATES[len(digits)]).replace(tzinfo=UTC)
            return "a date written as a number"
    return None


def hardly_microseconds(timestamp: int, unit: str) -> str:
    """Return the end of an error text about a number whose unit is suspected (`suspected_unit`)."""
    return (
        f"is hardly in microseconds, as which it would be {format_time(timestamp)}: it seems to be {unit}. "
        "If it is meant, allow it with allow_ancient"
    )


def instant(when: Time, now: Callable[[], int], *, allow_ancient: bool = False) -> int:
    """Return a time in microseconds since the epoch. Raises `InvalidArgumentError` for an invalid time.

    A number that means a time early in 1970 is probably in another unit, and is refused unless ``allow_ancient`` is
    set. A time after 2255, the limit of positions, is always refused.
    """
    if isinstance(when, str):
        try:
            return parse_when(when, now())
        except ValueError as bad:
            raise InvalidArgumentError(str(bad)) from bad
    if isinstance(when, timedelta):
        if when > timedelta(0):
            raise InvalidArgumentError(f"{when!r} lies ahead of now; two hours ago is timedelta(hours=-2)")
        return now() + when // _MICROSECOND
    microseconds = to_microseconds(when)
    if isinstance(when, int) and when < 0:
        raise InvalidArgumentError(
            f"{when} is no time, which is microseconds since the epoch; one before now is a timedelta, or text as '-2h'"
        )
    if isinstance(when, int) and when > MAX_TIME:
        raise InvalidArgumentError(f"{when} is no time in microseconds, which end in 2255: it seems to be nanoseconds")
    if isinstance(when, int) and not allow_ancient and (unit := suspected_unit(when)) is not None:
        raise InvalidArgumentError(f"{when} {hardly_microseconds(when, unit)}")
    return microseconds


def format_time(timestamp: int) -> str:
    """Format microseconds since the epoch as ISO 8601 in UTC, without fractional digits if they are zero."""
    return (_EPOCH + timedelta(microseconds=timestamp)).isoformat().replace("+00:00", "Z")
