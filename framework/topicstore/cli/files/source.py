"""What every source can: its rows from a number on, a batch at a time, how far it was read, and what it begins with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import Self

from .rows import Prefix, Rows

__all__ = ["Source"]


class Source(ABC):
    """One file or stream to import."""

    format: str
    corrected_goes_on = False
    """The import of a corrected copy goes on by itself, because text has prefixes."""

    def __init__(self, name: str, identify: Callable[[], str] | None, *, named: bool) -> None:
        self.name = name
        self.named = named
        """Known by a name from a person, not by content, so that it may grow."""
        self._identify = identify

    @cached_property
    def id(self) -> str | None:
        """Under what its import is noted; None for a stream without a name. A file is read for it, from end to end."""
        return None if self._identify is None else self._identify()

    def former_id(self) -> str | None:
        """Return under what an earlier version noted its import, if nothing else tells that it is the same."""
        return None

    @abstractmethod
    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from number ``skip`` on, about ``size`` at a time.

        Where a row is bad, yields those before it, then raises `BadRowError`; `ImportSourceError`
        if the source as a whole can't be read.
        """

    @abstractmethod
    def progress(self) -> tuple[float, float | None]:
        """Return how much was read, of how much, if that is known."""

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Return those prefixes, in rising order of size, with which the source begins."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
