"""Checks of arguments that many methods take."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InvalidArgumentError
from .topics import check_utf8

__all__ = ["check_count", "check_path", "check_within"]


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise `InvalidArgumentError` unless a value is a whole number, and no bool, of at least ``least``."""
    if type(value) is not int or value < least:
        raise InvalidArgumentError(f"{name} is a whole number of at least {least}, not {value!r}")


def check_within(name: str, value: object, least: int, most: int) -> None:
    """Raise `InvalidArgumentError` unless a value is a whole number, and no bool, from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise InvalidArgumentError(f"{name} is a whole number from {least} to {most:,}, not {value!r}")


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return a path. Raises `InvalidArgumentError` for one that isn't UTF-8, which engines can't open, or has a NUL."""
    return Path(check_utf8(os.fspath(path), "path", InvalidArgumentError))
