"""Times as people write them, and back."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import click

__all__ = ["TIME", "TIME_HELP", "format_time", "parse_timestamp", "parse_when"]

TIME_HELP = "ISO 8601 (UTC unless it has a zone), -30m, -2h, -7d, now, or microseconds since the epoch"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_RELATIVE = re.compile(r"-(?:[0-9]{1,9}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")
_MICROSECONDS = re.compile(r"[0-9]{9,17}")


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
    """Like `parse_timestamp`, and also ``now``, and times before it such as ``-2h`` or ``-1d12h``."""
    if text == "now":
        return now
    if _RELATIVE.fullmatch(text):
        return now - sum(int(count) * _SECONDS[unit] for count, unit in _PART.findall(text)) * 1_000_000
    return parse_timestamp(text)


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
        except ValueError:
            self.fail(f"{value!r} is not a time; write {TIME_HELP}", param, ctx)


TIME = _Time()
