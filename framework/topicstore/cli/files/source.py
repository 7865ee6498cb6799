"""`Source`: the interface of files and streams to import, which are read in batches from any row on."""

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
from topicstore.storage.directory.files import convert_os_errors

from .rows import NO_PREFIX, Prefix, Rows

__all__ = ["Origin", "Source", "opening", "whole_file"]


@contextmanager
def opening(source: str) -> Iterator[None]:
    """Convert an OSError of the block to `ImportSourceError` with the source's name, or `TooManyOpenFilesError`."""
    try:
        with convert_os_errors():
            yield
    except OSError as bad:
        raise ImportSourceError(f"{source}: {bad.strerror or bad}") from bad


def whole_file(path: Path, source: str) -> Prefix:
    """Return the size and the XXH3 digest of all bytes of a file, without decompression. Raises as `opening` does."""
    with opening(source), path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128).digest()
        return Prefix(file.tell(), digest)


@attrs.frozen(kw_only=True)
class Origin:
    """The identity of a source, and the mapping of its columns."""

    name: str
    """The source's name in messages for people."""
    path: Path
    identify: Callable[[], str] | None
    """A function that returns the id under which the import's progress is stored; None for an unnamed stream."""
    named: bool = False
    """Whether the user's name for the source identifies it, instead of its content, so that it may grow."""
    mapping: ColumnMap = attrs.field(factory=ColumnMap)


class Source(ABC):
    """A file or stream to import."""

    format: str
    options = ""
    """The command-line options, besides those of the mapping, that affect how the source is read."""
    live = False
    """Whether rows arrive while they are read, from a pipe or a device, and can't be read again."""
    resumes_corrected = False
    """Whether the import of a corrected copy continues after the rows that were stored, as prefixes of text allow."""

    def __init__(self, origin: Origin) -> None:
        self.name, self.named, self.mapping = origin.name, origin.named, origin.mapping
        self._origin = origin
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        """A context manager around waits for a stream's data; such a wait may be interrupted without losing rows."""
        self.passed = NO_PREFIX
        """The expected prefix of the rows that `read` skips in a stream; if it differs, `read` raises an error."""

    @cached_property
    def id(self) -> str | None:
        """The id under which the import's progress is stored; None for an unnamed stream.

        Computing the id of a file that is identified by its content reads the whole file.
        """
        return None if self._origin.identify is None else self._origin.identify()

    @abstractmethod
    def read(self, skip: int, size: int) -> Generator[Rows]:
        """Yield the rows from number ``skip`` on, about ``size`` at a time.

        If a row is bad, the rows before it are yielded, and then `BadRowError` is raised. Raises `ImportSourceError` if
        the source as a whole can't be read.
        """

    @abstractmethod
    def progress(self) -> tuple[float, float | None]:
        """Return the amount read and the total, in the same unit; the total is None if it is unknown."""

    def begins_with(self, prefix: Prefix) -> bool:
        """Return whether the source begins with this prefix. For a stream the result is True, and `read` checks it.

        Raises `ImportSourceError` if the source can't be read that far.
        """
        return True

    def has_prefixes(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Return those of the prefixes that the source begins with, in ascending order of size."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
