"""topicstore's layouts behind the few calls that everything compared is measured by."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import topicstore
from topicstore import Message

__all__ = ["LayoutSide", "Side"]


class Side(ABC):
    """One way to keep messages, in a directory of its own: opened to store, closed, opened again to read."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path

    @abstractmethod
    def open(self) -> None:
        """Open it; create it where there is nothing."""

    @abstractmethod
    def store(self, batch: list[Message]) -> None:
        """Keep a batch, so that it survives the process."""

    @abstractmethod
    def prepare(self, filters: Sequence[str]) -> None:
        """Called before filters of one kind are replayed; not timed."""

    @abstractmethod
    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Return the matching messages with times from ``start`` on, each topic's in the order stored."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    def disk_bytes(self) -> int:
        """Return the sizes of its files, added up."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


class LayoutSide(Side):
    """A layout on RocksDB, with the defaults of both. Nothing is merged but by `merge`."""

    def __init__(self, name: str, path: Path, layout: str) -> None:
        super().__init__(name, path)
        self._layout = layout

    def open(self) -> None:
        """Positions go by the messages' own times."""
        self._db = topicstore.open(
            self.path, backend="rocksdb", layout=self._layout, timestamps="message", auto_compact=False
        )

    def store(self, batch: list[Message]) -> None:
        """It is in the engine's log when this returns."""
        self._db.store(batch)

    def merge(self) -> None:
        """Bring everything into the form that is read fastest."""
        self._db.compact()

    def prepare(self, filters: Sequence[str]) -> None:
        """There is one way to answer a filter."""

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """In the layout's own order."""
        return self._db.replay(topic_filter, start)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def copy(self, name: str) -> LayoutSide:
        """Return a copy, made while the side is closed."""
        path = self.path.with_name(name)
        shutil.copytree(self.path, path)
        return LayoutSide(name, path, self._layout)
