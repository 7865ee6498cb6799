"""What became of a promise, as it is told from one process to another."""

from __future__ import annotations

import msgspec

__all__ = ["Begun", "Outcome", "Record", "decode"]


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A test has begun."""

    test: str


class Outcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A test is over."""

    group: str
    """The module that the promise is from: ``iterators``."""
    test: str
    """Its name, with the case in brackets."""
    promise: str
    """The docstring."""
    outcome: str
    """``passed``, ``failed`` or ``skipped``."""
    reason: str = ""
    """Why it was skipped, or in one line how it failed."""
    where: str = ""
    """File and line of the failure."""
    seconds: float


Record = Begun | Outcome


def decode(line: bytes) -> Record:
    """Return a record from a line."""
    record: Record = msgspec.json.decode(line, type=Record)
    return record
