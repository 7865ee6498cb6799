"""Times as people write them, and back."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import click

__all__ = ["TIME", "TIME_HELP", "format_time", "parse_timestamp", "parse_when", "suspected_unit"]

TIME_HELP = (
    "ISO 8601 (UTC unless it has a zone), now, -30m, -2h, -7d, @SECONDS since the epoch, or microseconds, "
    "a number of 15 digits or more"
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_RELATIVE = re.compile(r"-(?:[0-9]{1,9}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")
_MICROSECONDS = re.compile(r"[0-9]{9,17}")
_AT_SECONDS = re.compile(r"@([0-9]{1,11})(?:\.([0-9]{1,6}))?")
_LEAST_MICROSECONDS = 10**14
"""In 1973. What a person writes as a lower number is in seconds or milliseconds."""


def parse_timestamp(text: str) -> int:
    """Return microseconds since the epoch of ISO 8601 text, without a zone UTC, or of such a number itself.

    A number has nine digits or more: ``20240131`` is a day. Raises `ValueError`.
    """
    if _MICROSECONDS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is not a time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def parse_when(text: str, now: int) -> int:
    """Like `parse_timestamp`, and also ``now``, times before it such as ``-2h`` or ``-1d12h``, and ``@`` seconds.

    Refuses numbers that are hardly microseconds.
    """
    if text == "now":
        return now
    if _RELATIVE.fullmatch(text):
        return now - sum(int(count) * _SECONDS[unit] for count, unit in _PART.findall(text)) * 1_000_000
    if seconds := _AT_SECONDS.fullmatch(text):
        return int(seconds[1]) * 1_000_000 + int((seconds[2] or "").ljust(6, "0"))
    if _MICROSECONDS.fullmatch(text) and int(text) < _LEAST_MICROSECONDS:
        year = format_time(int(text))[:4]
        raise ValueError(f"{text} is not a time: as microseconds it lies in {year}; seconds have an @ before them")
    return parse_timestamp(text)


def suspected_unit(timestamp: int) -> str | None:
    """Return in what a time seems to be counted if not in microseconds: as such it lies early in 1970."""
    if 10**9 <= timestamp < 5 * 10**9:
        return "seconds"
    return "milliseconds" if 10**12 <= timestamp < 5 * 10**12 else None


def format_time(timestamp: int) -> str:
    """Return microseconds since the epoch as ISO 8601 in UTC, with no more digits than it needs."""
    return (_EPOCH + timedelta(microseconds=timestamp)).isoformat().replace("+00:00", "Z")


class _Time(click.ParamType[int]):
    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_when(value, time.time_ns() // 1_000)
        except ValueError as bad:
            self.fail(f"{bad}; write {TIME_HELP}", param, ctx)


TIME = _Time()
