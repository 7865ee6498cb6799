"""The interfaces of contenders: the few methods with which message stores and limits are measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from topicstore import Message

__all__ = ["Contender", "Durability", "Limit"]

Durability = Literal["commit", "sync"]


class Contender(ABC):
    """A message store in a directory of its own, which is opened to store, closed, and opened again to read.

    All contenders take the same batches of `Message` objects and return `Message` objects. Times are microseconds since
    the epoch. Messages are stored in order of their timestamps.
    """

    abilities: ClassVar[frozenset[str]] = frozenset({"filters", "start", "mixed"})
    """The supported requests: ``filters`` other than ``#``, replays from a ``start`` time, and ``mixed``.

    ``mixed`` is reading and writing at the same time in two threads.
    """

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        self.name = name
        self.path = path
        self.durability = durability

    @abstractmethod
    def open(self) -> None:
        """Open the store; create it if it doesn't exist."""

    @abstractmethod
    def store(self, batch: list[Message]) -> None:
        """Store a batch, so that it survives a crash of the process (``commit``) or a power loss (``sync``)."""

    def prepare(self, filters: Sequence[str]) -> None:  # noqa: B027 - most have nothing to prepare
        """Find the fastest way to answer filters of one kind. This call is not timed."""

    @abstractmethod
    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return the matching messages from time ``start`` on, each topic's messages in the order stored."""

    def compact(self) -> bool:
        """Compact all messages; return False if there is nothing to compact."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    def disk_bytes(self) -> int:
        """Return the total size of the contender's files in bytes."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the contender's libraries, by distribution."""
        return {}

    def settings(self) -> Mapping[str, object]:
        """Return the settings that differ from their defaults."""
        return {}


class Limit(Contender):
    """A bare engine or file, whose speed is an upper limit for message stores that are built on it.

    Only the phases ``store`` and ``replay all`` are measured. Batches are encoded before the clock starts. `scan` reads
    everything in the engine's own form, without filters, and makes no `Message` objects. `replay` makes them to check
    that everything was stored, and is not timed.
    """

    abilities: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def encode(self, batch: list[Message]) -> Any:
        """Return the form of a batch that `store` takes. This call is not timed."""

    def finish(self) -> None:
        """Write buffered messages. This call is timed, once, after the last batch."""

    @abstractmethod
    def scan(self) -> int:
        """Read everything; return the number of messages. This call is timed."""
