"""The contender that measures topicstore: a layout on a backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import topicstore
from topicstore import Message

from .contender import Contender, Durability

__all__ = ["DatabaseContender"]

_ENGINES = {"rocksdb": "rocksdict", "leveldb": "plyvel", "duckdb": "duckdb"}
"""The distribution that contains the engine, by backend."""
_SETTINGS: dict[str, Any] = {"timestamps": "message", "auto_compact": False}


class DatabaseContender(Contender):
    """A topicstore database: a layout on a backend, with the default options of both, and no automatic compaction."""

    def __init__(self, name: str, path: Path, durability: Durability = "commit", **options: Any) -> None:
        super().__init__(name, path, durability)
        self._options = options

    def open(self) -> None:
        """Open the database, with positions that follow the messages' own times."""
        self._db = topicstore.open(self.path, durability=self.durability, **_SETTINGS, **self._options)

    def store(self, batch: list[Message]) -> None:
        """Store a batch with the contender's durability."""
        self._db.store(batch)

    def compact(self) -> bool:
        """Compact all messages; return False if the layout doesn't store compacted messages in another form."""
        return self._db.compact().messages > 0

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Replay in the layout's own order, because other stores are also read in theirs."""
        return self._db.replay(topic_filter, start, order="any")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of topicstore and of the engine's Python module."""
        engine = _ENGINES.get(self._options["backend"])
        return {"topicstore": topicstore.__version__} | ({engine: version(engine)} if engine else {})

    def settings(self) -> Mapping[str, object]:
        """Return the arguments with which the database is opened, besides the pair."""
        return _SETTINGS | {name: value for name, value in self._options.items() if name not in ("backend", "layout")}
