"""Checks of common arguments, durations, and `KEEP`, the value of a setting that is left unchanged."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from .errors import InvalidArgumentError
from .topics import check_utf8

__all__ = [
    "KEEP",
    "Keep",
    "Length",
    "byte_count",
    "check_count",
    "check_length",
    "check_path",
    "check_reading",
    "check_within",
    "given",
    "seconds",
]

Length = timedelta | float | str
"""A duration: a timedelta, seconds, or a text with units such as ``"30m"`` or ``"1d12h"``."""

_LONGEST = 10**10
"""The exclusive upper bound of durations in seconds, 317 years. A longer one is a mistake, or overflows the
integers in which times are stored."""
_LARGEST = (1 << 64) - 1
"""The largest number that can be stored."""


class Keep(enum.Enum):
    """The type of `KEEP`."""

    KEEP = "keep"

    def __repr__(self) -> str:
        return self.name


KEEP: Final = Keep.KEEP
"""The default of arguments that change settings: the setting keeps its value. None, in contrast, removes a limit."""


def given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose value isn't `KEEP`."""
    return {name: value for name, value in settings.items() if value is not KEEP}


def seconds(length: Length | None) -> Any:
    """Convert a timedelta or a text such as ``"30m"`` to seconds, and ``"infinity"`` to None.

    Returns any other value unchanged. Raises `InvalidArgumentError` for a text that is no duration.
    """
    if isinstance(length, str):
        from .quantities import INFINITY, parse_duration  # imported here, because few programs pass texts

        if length == INFINITY:
            return None
        try:
            return parse_duration(length)
        except ValueError as bad:
            raise InvalidArgumentError(str(bad)) from bad
    return length.total_seconds() if isinstance(length, timedelta) else length


def byte_count(size: object) -> Any:
    """Convert a text such as ``"8MB"`` to a number of bytes, and ``"infinity"`` to None.

    Returns any other value unchanged. Raises `InvalidArgumentError` for a text that is no size.
    """
    if not isinstance(size, str):
        return size
    from .quantities import INFINITY, parse_size

    try:
        return None if size == INFINITY else parse_size(size)
    except ValueError as bad:
        raise InvalidArgumentError(str(bad)) from bad


def check_length(name: str, length: object) -> float:
    """Convert a duration to seconds. Raises `InvalidArgumentError` if it is negative, too long or not a duration."""
    found = seconds(length) if isinstance(length, (timedelta, str)) else length
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < _LONGEST:
        raise InvalidArgumentError(f"{name} is a timedelta, a number of seconds, or a text as '30m', not {length!r}")
    return found


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise `InvalidArgumentError` unless a value is an integer, not a bool, of at least ``least``, and below 2**64."""
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is a whole number of at least {least}, not {value!r}")
    if value > _LARGEST:
        raise InvalidArgumentError(f"{name} is a whole number below 2**64, which this one isn't")


def check_within(name: str, value: object, least: int, most: int) -> None:
    """Raise `InvalidArgumentError` unless a value is an integer, not a bool, from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgumentError(f"{name} is a whole number from {least} to {most:,}, not {value!r}")


def check_reading(kinds: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` unless a text of SQL has a single statement that only reads.

    kinds: the types of its statements in capitals, as DuckDB names them.
    """
    if len(kinds) != 1:
        raise InvalidArgumentError(f"one statement at a time is run, not {len(kinds)}")
    if kinds[0] not in ("SELECT", "EXPLAIN"):
        raise InvalidArgumentError(f"only statements that read are run, such as SELECT, not {kinds[0]}")


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return a path as a `Path`. Raises `InvalidArgumentError` for NUL or invalid UTF-8, which engines can't open."""
    return Path(check_utf8(os.fspath(path), "path", InvalidArgumentError))
