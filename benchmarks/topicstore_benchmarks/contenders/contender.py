"""The interfaces of contenders: the few calls by which every message store is measured, and limits are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from topicstore import Message

__all__ = ["Contender", "Durability", "Limit"]

Durability = Literal["commit", "sync"]


class Contender(ABC):
    """One way to keep messages, in a directory of its own: opened to store, closed, opened again to read.

    All take the same batches of `Message` objects and return `Message` objects. Times are
    microseconds since the epoch; messages come in order of their timestamps.
    """

    abilities: ClassVar[frozenset[str]] = frozenset({"filters", "start", "mixed"})
    """The supported requests: ``filters`` other than ``#``, a ``start`` of a replay, and ``mixed``, which reads and
    writes at the same time in two threads."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        self.name = name
        self.path = path
        self.durability = durability

    @abstractmethod
    def open(self) -> None:
        """Open the store; create it if it doesn't exist."""

    @abstractmethod
    def store(self, batch: list[Message]) -> None:
        """Store a batch, so that it survives the end of the process (``commit``) or power loss (``sync``)."""

    def prepare(self, filters: Sequence[str]) -> None:  # noqa: B027 - most have nothing to prepare
        """Find the fastest way to answer filters of one kind. Not timed."""

    @abstractmethod
    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return the matching messages with times from ``start`` on, each topic's in the order stored."""

    def compact(self) -> bool:
        """Bring everything into the compacted form; return False if there is none, or it is compacted already."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    def disk_bytes(self) -> int:
        """Return the bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def versions(self) -> Mapping[str, str]:
        """Return the versions of its libraries."""
        return {}

    def settings(self) -> Mapping[str, object]:
        """Return the settings that differ from their defaults."""
        return {}


class Limit(Contender):
    """The speed of an engine or a file without the work that makes it a message store.

    It is stored and read as a whole, in a form that is prepared before the clock starts. Only ``store`` and
    ``replay all`` are measured. There are no filters, no starts and no order but that of storing; what is read stays in
    the engine's own form, so no `Message` objects are made. Those of `replay` are for checking that everything was
    stored, and aren't timed.
    """

    abilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def encode(self, batch: list[Message]) -> Any:
        """Return what `store` takes in place of a batch. Not timed."""

    def finish(self) -> None:
        """Write messages that are held back. Timed, once, after the last batch."""

    @abstractmethod
    def scan(self) -> int:
        """Read everything; return the number of messages. This call is timed."""
