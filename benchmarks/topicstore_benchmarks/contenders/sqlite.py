"""The contender SQLite, a common alternative, tuned for this use.

It has one table in WAL mode, an index on the topic, and one transaction per batch. ``synchronous=NORMAL``, like
``durability="commit"``, loses nothing when the process crashes: https://www.sqlite.org/pragma.html#pragma_synchronous

Messages are numbered as they are stored, in order of time. A start time is therefore found by bisection. Index entries
end with that number, so the index also yields a topic's messages from a start on. Rows are returned as `Message`
objects.

An exact topic is looked up in the index. A filter with wildcards can be answered in three ways, whose speed depends on
the numbers of all and of matching topics. All are tried before the filter is timed, and the fastest is used:

* leap through the index from one topic to the next, and look up the messages of matching topics
  (``SELECT DISTINCT`` reads every entry of the index instead, and took five times as long);
* read the range of the index below the filter's first levels;
* scan the table.
"""

from __future__ import annotations

import sqlite3
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path

import msgspec
from topicstore import Message, Properties, TopicFilter

from topicstore_benchmarks.timing import consume, timed

from .contender import Contender, Durability

__all__ = ["SqliteContender"]

_NAMES = ("topic", "payload", "client_id", "qos", "retain", "timestamp", "properties")
_COLUMNS = ", ".join(f"messages.{name}" for name in _NAMES)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (
    position INTEGER PRIMARY KEY, topic TEXT NOT NULL, payload BLOB NOT NULL, client_id TEXT NOT NULL,
    qos INTEGER NOT NULL, retain INTEGER NOT NULL, timestamp INTEGER NOT NULL, properties MQTT_PROPERTIES
);
CREATE INDEX IF NOT EXISTS by_topic ON messages (topic);
"""
_INSERT = f"INSERT INTO messages ({', '.join(_NAMES)}) VALUES (?, ?, ?, ?, ?, ?, ?)"  # noqa: S608 - names from above
_FROM = f"SELECT {_COLUMNS} FROM messages WHERE position >= ? ORDER BY position"  # noqa: S608
_EXACT = f"SELECT {_COLUMNS} FROM messages WHERE topic = ? AND position >= ? ORDER BY position"  # noqa: S608
_GLOB = "{0} GLOB :glob AND length({0}) - length(replace({0}, '/', '')) = :slashes"
"""The condition for filters with ``+``. The `*` of GLOB also matches slashes, so the number of slashes is compared."""
_ANY = "matches(:filter, {0})"
"""The condition for all other filters, which calls `_matches`."""
_LEAP = f"""
WITH RECURSIVE topics (topic) AS (
    SELECT min(topic) FROM messages WHERE topic >= :first AND topic < :behind
    UNION ALL
    SELECT (SELECT min(topic) FROM messages WHERE topic > topics.topic AND topic < :behind)
    FROM topics WHERE topics.topic IS NOT NULL
)
SELECT {_COLUMNS} FROM topics CROSS JOIN messages ON messages.topic = topics.topic AND messages.position >= :position
WHERE topics.topic IS NOT NULL AND {{topics_match}}
"""  # noqa: S608
_RANGE = f"""
SELECT {_COLUMNS} FROM messages INDEXED BY by_topic
WHERE topic >= :first AND topic < :behind AND position >= :position AND {{match}}
"""  # noqa: S608
_WALK = f"""
SELECT {_COLUMNS} FROM messages NOT INDEXED WHERE position >= :position AND {{match}} ORDER BY position
"""  # noqa: S608
_SYNCHRONOUS = {"commit": "NORMAL", "sync": "FULL"}
_MEMORY = {"cache_size": -65_536, "mmap_size": 256 << 20}
"""Pragmas for memory: the cache size in KiB (negative), and the size of the memory map in bytes.

They saved up to 10 % of the CPU time of reading and writing 50,000 messages. Other page sizes, and fewer checkpoints of
the log, made no difference.
"""
_WAYS = (_LEAP, _RANGE, _WALK)
_BEHIND_ALL = b"\xff"
"""An upper bound of all topics: a BLOB sorts after every TEXT."""
_SPECIAL = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]", "+": "*"})

sqlite3.register_adapter(Properties, msgspec.msgpack.encode)
sqlite3.register_converter("MQTT_PROPERTIES", msgspec.msgpack.Decoder(Properties).decode)


class SqliteContender(Contender):
    """One SQLite file. Each thread has its own connection.

    ``#`` returns everything, including topics that begin with ``$``.
    """

    def __init__(self, name: str, path: Path, durability: Durability = "commit") -> None:
        super().__init__(name, path, durability)
        self._ways: dict[str, str] = {}
        """The fastest statement for each prepared filter."""

    def open(self) -> None:
        """Open the file. Transactions are begun and ended explicitly."""
        self.path.mkdir(exist_ok=True)
        self._writer = threading.get_ident()
        self._db = self._connect()
        self._db.executescript(_SCHEMA)
        self._readers: dict[int, sqlite3.Connection] = {}

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path / "messages.db",
            isolation_level=None,
            check_same_thread=False,
            detect_types=sqlite3.PARSE_DECLTYPES,
        )
        db.execute("PRAGMA journal_mode=WAL")
        for name, value in _MEMORY.items():
            db.execute(f"PRAGMA {name}={value}")
        db.execute(f"PRAGMA synchronous={_SYNCHRONOUS[self.durability]}")
        db.create_function("matches", 2, _matches, deterministic=True)
        return db

    def _connection(self) -> sqlite3.Connection:
        """Return the connection of the calling thread, opened on its first call."""
        thread = threading.get_ident()
        if thread == self._writer:
            return self._db
        if thread not in self._readers:
            self._readers[thread] = self._connect()
        return self._readers[thread]

    def store(self, batch: list[Message]) -> None:
        """Insert a batch in one transaction."""
        self._db.execute("BEGIN")
        self._db.executemany(_INSERT, map(msgspec.structs.astuple, batch))
        self._db.execute("COMMIT")

    def prepare(self, filters: Sequence[str]) -> None:
        """Time the three statements for the first filter, and use the fastest for all of these filters."""
        first = filters[0]
        if first != "#" and not TopicFilter(first).literal and first not in self._ways:
            fastest = min(_WAYS, key=lambda way: timed(lambda: consume(self._wildcards(way, first, 0))))
            self._ways.update(dict.fromkeys(filters, fastest))

    def replay(self, topic_filter: str, start: int = 0) -> Iterator[Message]:
        """Replay in order of the table, or topic by topic."""
        db = self._connection()
        position = self._first(db, start) if start else 0
        if topic_filter == "#":
            return starmap(Message, db.execute(_FROM, (position,)))
        if TopicFilter(topic_filter).literal:
            return starmap(Message, db.execute(_EXACT, (topic_filter, position)))
        return self._wildcards(self._ways.get(topic_filter, _LEAP), topic_filter, position)

    def _wildcards(self, way: str, topic_filter: str, position: int) -> Iterator[Message]:
        levels = topic_filter.split("/")
        wild = next(depth for depth, level in enumerate(levels) if level in ("+", "#"))
        prefix = "/".join([*levels[:wild], ""])
        with_glob = wild > 0 and levels[-1] != "#"
        if levels[wild] == "#":
            prefix = prefix[:-1]  # the filter a/# also matches the topic a
        condition = _GLOB if with_glob else _ANY
        arguments = {
            "first": prefix,
            # In ASCII, 0 comes after the slash.
            "behind": f"{prefix.removesuffix('/')}0" if prefix else _BEHIND_ALL,
            "glob": topic_filter.translate(_SPECIAL),
            "slashes": topic_filter.count("/"),
            "filter": topic_filter,
            "position": position,
        }
        statement = way.format(topics_match=condition.format("topics.topic"), match=condition.format("topic"))
        return starmap(Message, self._connection().execute(statement, arguments))

    def _first(self, db: sqlite3.Connection, start: int) -> int:
        """Return the number of the first message at or after a time."""

        def time(position: int) -> int:
            found: int
            (found,) = db.execute("SELECT timestamp FROM messages WHERE position = ?", (position,)).fetchone()
            return found

        (last,) = db.execute("SELECT coalesce(max(position), 0) FROM messages").fetchone()
        return 1 + bisect_left(range(1, last + 1), start, key=time)

    def close(self) -> None:
        """Copy the write-ahead log into the database file, and close all connections."""
        for reader in self._readers.values():
            reader.close()
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def versions(self) -> Mapping[str, str]:
        """Return the version of the library."""
        return {"sqlite": sqlite3.sqlite_version}

    def settings(self) -> Mapping[str, object]:
        """Return the pragmas, and the way in which each prepared filter is answered."""
        names = {_LEAP: "leap", _RANGE: "range", _WALK: "walk"}
        ways = {topic_filter: names[way] for topic_filter, way in self._ways.items()}
        return {"journal_mode": "WAL", "synchronous": _SYNCHRONOUS[self.durability], **_MEMORY, "ways": ways}


def _matches(topic_filter: str, topic: str) -> bool:
    return TopicFilter(topic_filter).matches(topic)
