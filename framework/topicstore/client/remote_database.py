"""`RemoteDatabase`: a database that a server has open, with the methods of `topicstore.Database` that commands use.

The methods return the same objects and raise the same errors as those of `topicstore.Database`, which documents them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs
import msgspec

from topicstore.contract.batch import MessageBatch, Messages
from topicstore.contract.layout import TopicNode
from topicstore.contract.model import Message
from topicstore.contract.replay_plan import By, Order
from topicstore.contract.requests import Stream
from topicstore.contract.state import StateWrite
from topicstore.contract.times import Time, instant
from topicstore.database import DatabaseInfo
from topicstore.files.formats import decode_line
from topicstore.runtime.clocks import now
from topicstore.storage.counting.contents import ClientTally, TopicTally
from topicstore.storage.directory.manifest import Manifest, existing_manifest
from topicstore.storage.generations import GenerationInfo
from topicstore.storage.maintenance import CompactReport
from topicstore.storage.reading.explain import Explanation
from topicstore.storage.reading.ordering import ReplayOrder, planned, sorted_by_timestamp
from topicstore.storage.reports import VerifyReport
from topicstore.storage.shard_map import ShardMap

from .arrow_streams import batches_of, table_of
from .connection import ARROW, Connection
from .following import follow
from .jobs import run_job
from .remote_archives import RemoteArchives
from .remote_imports import RemoteImports, RemoteState, RemoteStoreResult
from .remote_queues import RemoteQueues
from .remote_retention import RemoteRetention
from .remote_sessions import RemoteSessions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["RemoteDatabase"]


_SORTED = 4_096
"""The maximum number of messages in a batch that this client has sorted."""


class _Learned(msgspec.Struct):
    shard: int
    generation: int
    path: str
    stream: int | None


class _Deleted(msgspec.Struct):
    deleted: int


class _Generation(msgspec.Struct):
    number: int


class _Dropped(msgspec.Struct):
    dropped: bool


class RemoteDatabase:
    """The database in the directory ``path``, used over a connection to its server. `close` closes the connection."""

    def __init__(self, path: Path, connection: Connection) -> None:
        self.path = path
        self._connection = connection
        self.imports = RemoteImports(connection)
        self.archives = RemoteArchives(path, connection)
        self.queues = RemoteQueues(connection)
        self.retention = RemoteRetention(connection)
        self.sessions = RemoteSessions(connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def manifest(self) -> Manifest:
        """The settings with which the database was created, read from its file, which is safe beside the server."""
        return existing_manifest(self.path)

    @cached_property
    def _shard_map(self) -> ShardMap:
        return ShardMap(self.manifest.shards)

    # --- reading ---

    def replay(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        by: By = "position",
        order: ReplayOrder = "time",
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[Message]:
        """Iterate over the matching messages, which the server sends as Arrow batches."""
        found = self.replay_arrow(topic_filter, start, until, by=by, order=order, reverse=reverse, limit=limit)
        return chain.from_iterable(MessageBatch.from_arrow(batch).to_messages() for batch in found)

    def replay_arrow(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        by: By = "position",
        order: ReplayOrder = "time",
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the matching messages as they arrive. The server reads on only as batches are consumed."""
        options = {"by": by, "order": planned(order), "reverse": reverse and order != "timestamp"}
        found = batches_of(self._connection, "/messages", **_range(topic_filter, start, until), **options)
        if order == "timestamp":
            batches = sorted_by_timestamp(map(MessageBatch.from_arrow, found), limit, _SORTED, reverse=reverse)
            return (batch.to_arrow() for batch in batches)
        return found if limit is None else _first(found, limit)

    def follow(self, topic_filter: str, start: Time = 0) -> Iterator[list[Message]]:
        """Yield the matching messages, and then new ones as they are stored."""
        return follow(self._connection, topic_filter, _written(instant(start, now)))

    def explain(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        by: By = "position",
        order: Order = "time",
        limit: int | None = None,
    ) -> Explanation:
        """Run a replay, or only its first ``limit`` messages, in the server, and return a report of its reads."""
        asked = _range(topic_filter, start, until) | ({} if limit is None else {"limit": str(limit)})
        return self._connection.get("/messages/explain", Explanation, **asked, by=by, order=order)

    def streams(self, topic_filter: str, start: Time = 0) -> list[Stream]:
        """Return the streams that may hold matching messages."""
        return list(self._connection.pages("/streams", Stream, **_range(topic_filter, start)))

    def topics(self, topic_filter: str = "#") -> list[TopicTally]:
        """Return every matching topic that has messages, with its counts."""
        return list(self._connection.pages("/topics", TopicTally, filter=topic_filter))

    def clients(self, topic_filter: str = "#") -> list[ClientTally]:
        """Return every client id that has messages of matching topics, with its counts."""
        return list(self._connection.pages("/clients", ClientTally, filter=topic_filter))

    def latest(self, topic_filter: str = "#") -> list[Message]:
        """Return the last message of each topic that matches."""
        return self._messages("/latest", topic_filter)

    def retained(self, topic_filter: str) -> list[Message]:
        """Return the retained messages whose topics match."""
        return self._messages("/retained", topic_filter)

    def _messages(self, path: str, topic_filter: str) -> list[Message]:
        found = self._connection.pages(path, msgspec.Raw, filter=topic_filter)
        return [decode_line(bytes(one)) for one in found]

    def learned_topics(self, generation: int | None = None) -> dict[tuple[int, int], list[TopicNode]]:
        """Return the topic structure that each (shard, generation) has learned."""
        found: dict[tuple[int, int], list[TopicNode]] = {}
        for one in self._connection.pages("/learned-topics", _Learned, generation=generation):
            node = TopicNode(path=tuple(one.path.split("/")), stream=one.stream)
            found.setdefault((one.shard, one.generation), []).append(node)
        return found

    def sql(self, statement: str) -> pa.Table:
        """Run a read-only SQL statement over the messages."""
        return table_of(self._connection.ask("POST", "/sql", json={"statement": statement}, headers={"Accept": ARROW}))

    def info(self) -> DatabaseInfo:
        """Return sizes, generations and counters."""
        return attrs.evolve(self._connection.get("/info", DatabaseInfo), path=str(self.path))

    # --- importing ---

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that holds a publisher's messages."""
        return self._shard_map.of(client_id)

    def state(self, shard: int) -> RemoteState:
        """Return the part of a shard's state that imports use."""
        return self.imports.state(shard)

    def store(
        self, messages: Messages, *, state: Mapping[int, Sequence[StateWrite]] | None = None
    ) -> RemoteStoreResult:
        """Store messages, together with the progress of their import."""
        return self.imports.store(MessageBatch.of(messages), state or {})

    # --- changing ---

    def delete(self, topic_filter: str, start: Time = 0, until: Time | None = None, *, by: By = "position") -> int:
        """Delete the matching messages, and return their number."""
        asked = _range(topic_filter, start, until) | {"by": by}
        return self._connection.change("DELETE", "/messages", _Deleted, parameters=asked).deleted

    def generations(self) -> list[GenerationInfo]:
        """Return the live generations, oldest first."""
        return self._connection.items("/generations", GenerationInfo)

    def add_generation(self, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
        """Seal the current generation and begin a new one; return its number."""
        made = {"layout": layout, "options": options}
        return self._connection.change("POST", "/generations", _Generation, json=made).number

    def drop_generation(self, generation: int) -> bool:
        """Drop a sealed generation; return False if it was dropped already."""
        return self._connection.change("DELETE", f"/generations/{generation}", _Dropped).dropped

    # --- maintenance, as jobs of the server ---

    def compact(self) -> CompactReport:
        """Make the server merge all stored messages, if the layout merges."""
        return run_job(self._connection, "compact", CompactReport)

    def checkpoint(self, path: Path) -> None:
        """Make the server write a checkpoint, a copy of the database, into a new directory on its machine."""
        run_job(self._connection, "checkpoint", dict[str, Any], target=str(path.absolute()))

    def verify(self, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Make the server read and verify all stored data, and return the damage it found."""
        return run_job(self._connection, "verify", VerifyReport, progress=progress)


def _first(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[pa.RecordBatch]:
    """Yield the first ``limit`` rows, and then end the request.

    The server's own ``limit`` can't be used: it asks for a page, which has at most 10,000 messages.
    """
    with closing(batches):  # type: ignore[type-var]
        while limit > 0 and (batch := next(batches, None)) is not None:
            yield batch[:limit]
            limit -= batch.num_rows


def _range(topic_filter: str, start: Time, until: Time | None = None) -> dict[str, str | None]:
    """Return a filter and a time range as query parameters. Raises `InvalidArgumentError`."""
    return {
        "filter": topic_filter,
        "start": _written(instant(start, now)) if start != 0 else None,
        "until": None if until is None else _written(instant(until, now)),
    }


def _written(time: int) -> str:
    """Return microseconds since the Unix epoch as ``@seconds.fraction``, whose unit is unambiguous."""
    return f"@{time // 1_000_000}.{time % 1_000_000:06}"
