"""The result of a promise, as one process reports it to another."""

from __future__ import annotations

import msgspec

__all__ = ["Begun", "Outcome", "Record", "decode"]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """The record that a test has begun."""

    test: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The record that a test is over."""

    group: str
    """The module that the promise is from, such as ``cursors``."""
    test: str
    """The name of the test, with the case in brackets."""
    promise: str
    """The docstring of the test."""
    outcome: str
    """The result: ``passed``, ``failed`` or ``skipped``."""
    reason: str = ""
    """The reason why the test was skipped, or in one line how it failed."""
    where: str = ""
    """The file and line of the failure."""
    seconds: float


Record = Begun | Outcome


def decode(line: bytes) -> Record:
    """Return a record from a line."""
    record: Record = msgspec.json.decode(line, type=Record)
    return record
