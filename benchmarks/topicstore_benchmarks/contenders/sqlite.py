"""What many would take instead: SQLite, used as well as we know how.

One table in WAL mode with ``synchronous=NORMAL`` (which, like ``durability="commit"``, loses
nothing when the process dies), an index on the topic, a batch a transaction. All else is as
SQLite comes, as all else is on the other sides. Messages are numbered as they come, in order of
time, so that a start is found by bisection. Rows come back as `Message` objects.

An exact topic is looked up in the index. There are three ways to answer a filter with ``+``, and
which is fastest depends on how many topics there are and match; all are tried before a filter is
first timed, and the fastest is kept:

* leap through the index from one topic to the next, and look up the messages of those that match
  (``SELECT DISTINCT`` reads every entry of the index instead, and took five times as long);
* read the range of the index below the filter's first levels;
* walk the table.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path

import msgspec
from topicstore import Message

from topicstore_benchmarks.timing import drained, timed

from .contender import Contender, Durability

__all__ = ["SqliteContender"]

_NAMES = ("topic", "payload", "client_id", "qos", "retain", "timestamp", "properties")
_COLUMNS = ", ".join(f"messages.{name}" for name in _NAMES)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    position INTEGER PRIMARY KEY, topic TEXT NOT NULL, payload BLOB NOT NULL, client_id TEXT NOT NULL,
    qos INTEGER NOT NULL, retain INTEGER NOT NULL, timestamp INTEGER NOT NULL, properties BLOB
);
CREATE INDEX IF NOT EXISTS by_topic ON messages (topic);
"""
_INSERT = f"INSERT INTO messages ({', '.join(_NAMES)}) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - names from above
_FROM = f"SELECT {_COLUMNS} FROM messages WHERE position >= ? ORDER BY position"  # noqa: S608
_EXACT = f"SELECT {_COLUMNS} FROM messages WHERE topic = ? ORDER BY position"  # noqa: S608
# `*` of GLOB matches slashes too, but with as many levels as the filter has there is none left for it.
_MATCHES = "{0} GLOB :glob AND length({0}) - length(replace({0}, '/', '')) = :slashes"
_LEAP = f"""
WITH RECURSIVE topics (topic) AS (
    SELECT min(topic) FROM messages WHERE topic >= :first AND topic < :behind
    UNION ALL
    SELECT (SELECT min(topic) FROM messages WHERE topic > topics.topic AND topic < :behind)
    FROM topics WHERE topics.topic IS NOT NULL
)
SELECT {_COLUMNS} FROM topics CROSS JOIN messages ON messages.topic = topics.topic
WHERE {_MATCHES.format("topics.topic")}
"""  # noqa: S608
_RANGE = f"""
SELECT {_COLUMNS} FROM messages INDEXED BY by_topic
WHERE topic >= :first AND topic < :behind AND {_MATCHES.format("topic")}
"""  # noqa: S608
_WALK = f"SELECT {_COLUMNS} FROM messages NOT INDEXED WHERE {_MATCHES.format('topic')}"  # noqa: S608
_SYNCHRONOUS = {"commit": "NORMAL", "sync": "FULL"}
_WAYS = (_LEAP, _RANGE, _WALK)


class SqliteContender(Contender):
    """One SQLite file. Answers ``#``, topics, and filters with ``+`` behind at least one level.

    ``ways`` keeps the fastest way to answer each filter that was prepared, for the next round too.
    """

    def __init__(
        self, name: str, path: Path, durability: Durability = "commit", *, ways: dict[str, str] | None = None
    ) -> None:
        super().__init__(name, path, durability)
        self._ways = {} if ways is None else ways

    def open(self) -> None:
        """Transactions are begun and ended by hand."""
        self.path.mkdir(exist_ok=True)
        self._db = sqlite3.connect(self.path / "messages.db", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={_SYNCHRONOUS[self.durability]}")
        self._db.executescript(_SCHEMA)

    def store(self, batch: list[Message]) -> None:
        """One transaction."""
        self._db.execute("BEGIN")
        self._db.executemany(_INSERT, map(msgspec.structs.astuple, batch))
        self._db.execute("COMMIT")

    def prepare(self, filters: Sequence[str]) -> None:
        """Find the fastest way to answer such filters."""
        if "+" in filters[0] and filters[0] not in self._ways:
            fastest = min(_WAYS, key=lambda way: timed(lambda: drained(self._wildcards(way, filters[0]))))
            self._ways.update(dict.fromkeys(filters, fastest))

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """A start only with ``#``."""
        if topic_filter == "#":
            return starmap(Message, self._db.execute(_FROM, (self._first(start),)))
        if "+" in topic_filter:
            return self._wildcards(self._ways[topic_filter], topic_filter)
        return starmap(Message, self._db.execute(_EXACT, (topic_filter,)))

    def _wildcards(self, way: str, topic_filter: str) -> Iterator[Message]:
        levels = topic_filter.partition("+")[0]
        arguments = {
            "first": levels,
            "behind": f"{levels[:-1]}0",  # in ASCII, 0 comes behind the slash
            "glob": topic_filter.replace("+", "*"),
            "slashes": topic_filter.count("/"),
        }
        return starmap(Message, self._db.execute(way, arguments))

    def _first(self, start: int) -> int:
        """Return the number of the first message at or behind a time."""
        (last,) = self._db.execute("SELECT coalesce(max(position), 0) FROM messages").fetchone()
        return 1 + bisect_left(range(1, last + 1), start, key=self._time)

    def _time(self, position: int) -> int:
        time: int
        (time,) = self._db.execute("SELECT timestamp FROM messages WHERE position = ?", (position,)).fetchone()
        return time

    def close(self) -> None:
        """What is left in the log goes into the table's file."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()
