"""The interface of sources: their rows from a number on, batch by batch, their progress, and their prefixes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Self

import attrs
import xxhash

from topicstore import ImportSourceError
from topicstore.files.mapping import ColumnMap
from topicstore.storage.directory.files import failure_told

from .rows import NO_PREFIX, Prefix, Rows

__all__ = ["Origin", "Source", "opening", "whole_file"]


@contextmanager
def opening(source: str) -> Iterator[None]:
    """Raise `ImportSourceError`, with a source's name, if it can't be opened; or `TooManyOpenFilesError`."""
    try:
        with failure_told():
            yield
    except OSError as bad:
        raise ImportSourceError(f"{source}: {bad.strerror or bad}") from bad


def whole_file(path: Path, source: str) -> Prefix:
    """Return the size and the XXH3 of all bytes of a file, as they are. Raises as `opening` does."""
    with opening(source), path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).digest()
        return Prefix(file.tell(), digest)


@attrs.frozen(kw_only=True)
class Origin:
    """What a source is known by, and what its rows become."""

    name: str
    """Its name for people."""
    path: Path
    identify: Callable[[], str] | None
    """What finds the id of its import's record; None for a stream without a name."""
    named: bool = False
    """Whether it is known by a name from a person, not by content, so that it may grow."""
    mapping: ColumnMap = attrs.field(factory=ColumnMap)


class Source(ABC):
    """A file or stream to import."""

    format: str
    options = ""
    """Options that decide how it is read, beyond those of its mapping."""
    live = False
    """Whether its rows come while they are read, from a pipe or a device, and can't be read again."""
    corrected_goes_on = False
    """Whether the import of a corrected copy continues by itself, because text has prefixes."""

    def __init__(self, origin: Origin) -> None:
        self.name, self.named, self.mapping = origin.name, origin.named, origin.mapping
        self._origin = origin
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is entered for waits for a stream, which may be interrupted without losing what was read."""
        self.passed = NO_PREFIX
        """The prefix of the rows that `read` passes over, of a stream; it raises `ImportSourceError` for other ones."""

    @cached_property
    def id(self) -> str | None:
        """The id of its import's record; None for a stream without a name. For it, a file is read from end to end."""
        return None if self._origin.identify is None else self._origin.identify()

    @abstractmethod
    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from number ``skip`` on, about ``size`` at a time.

        If a row is bad, yields those before it, then raises `BadRowError`; `ImportSourceError`
        if the source as a whole can't be read.
        """

    @abstractmethod
    def progress(self) -> tuple[float, float | None]:
        """Return how much was read, and how much there is, if that is known."""

    def begins_with(self, prefix: Prefix) -> bool:
        """Return whether rows with this prefix came from the source. A stream does, and is checked by `read`.

        Raises `ImportSourceError` if it can't be read so far.
        """
        return True

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Return the prefixes, of these, with which the source begins, in rising order of size."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
