"""What is compared: one way to keep messages, behind the few calls that all of them are measured by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from topicstore import Message

__all__ = ["Contender", "Durability"]

Durability = Literal["commit", "sync"]


class Contender(ABC):
    """One way to keep messages, in a directory of its own: opened to store, closed, opened again to read.

    All take the same batches of `Message` objects and give `Message` objects back. Times are
    microseconds since the epoch; messages come in order of their timestamps.
    """

    abilities: ClassVar[frozenset[str]] = frozenset({"filters", "start", "mixed"})
    """What it can be asked: ``filters`` other than ``#``, a ``start`` of a replay, ``mixed`` reading and
    writing at the same time by two threads."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        self.name = name
        self.path = path
        self.durability = durability

    @abstractmethod
    def open(self) -> None:
        """Open it, and start the server it may need; create it where there is nothing."""

    @abstractmethod
    def store(self, batch: list[Message]) -> None:
        """Keep a batch, so that it survives the process (``commit``) or power loss (``sync``)."""

    def prepare(self, filters: Sequence[str]) -> None:  # noqa: B027 - most have nothing to prepare
        """Find the fastest way to answer filters of one kind. Not timed."""

    @abstractmethod
    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return the matching messages with times from ``start`` on, each topic's in the order stored."""

    def compact(self) -> bool:
        """Bring everything into the form that is read fastest; return False if it is in it always, or already."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Close it; its server ends."""

    def disk_bytes(self) -> int:
        """Return the sizes of its files, added up."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def server_memory(self) -> int:
        """Return the peak of the memory of processes that it has started, in bytes."""
        return 0

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what it is made of: libraries, and servers."""
        return {}

    def settings(self) -> Mapping[str, object]:
        """Return what was set to something else than the default, for whoever repeats it."""
        return {}
