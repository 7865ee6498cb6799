"""`Database`: the public face of a store. `topicstore.opening` makes one.

It composes the parts and documents them; what they do is told in `storage`, `pubsub`, `lifecycle`, `queues` and
`sessions`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from .contract.arguments import check_count, check_path
from .contract.batch import MessageBatch
from .contract.errors import InvalidArgumentError
from .contract.forking import ProcessLock
from .contract.iterators import Iterator as StreamIterator
from .contract.layout import TopicNode
from .contract.model import Message
from .contract.positions import first_position, to_microseconds
from .contract.replay_plan import Order
from .contract.requests import NextResult, ReplayRequest, StoreResult, Stream
from .contract.state import StateWrite
from .contract.topics import TopicFilter
from .database_info import DatabaseInfo, database_info
from .lifecycle.archives import Archives
from .lifecycle.retention import Retention
from .pubsub.publishing import PublishResult, publish
from .pubsub.retained import remove_expired, retained
from .queues.queues import Queues
from .releasing import release_all
from .shard.state import ShardState
from .storage import checkpoints, generations, replays, reports
from .storage.compaction import CompactionScheduler, CompactReport, compact
from .storage.deletion import delete
from .storage.read_only import Mode
from .storage.sql import sql
from .storage.storage import Storage
from .storage.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

    from .pubsub.hub import Hub
    from .pubsub.persistence_rules import PersistenceRules
    from .pubsub.subscription import Subscription
    from .sessions import Sessions
    from .storage.explain import Explanation

__all__ = ["BATCH_SIZE", "Database"]

BATCH_SIZE = 4_096
"""Default messages a batch when reading."""

Time = int | datetime
"""Microseconds since the epoch, or a datetime with a time zone."""


class Database:
    """An open database. Made by `topicstore.open`; close it, or use it as a context manager.

    All methods may be called from any thread. Times given to methods are microseconds since the
    epoch, or datetimes with a time zone (a `Message.timestamp` is microseconds); ``start`` is
    inclusive, ``until`` exclusive, and both are compared with positions.
    """

    def __init__(self, storage: Storage, queues: Queues, *, auto_compact: bool) -> None:
        self.storage = storage
        """The shards behind their hooks. Internal to the framework."""
        self.path = storage.path
        self.manifest = storage.manifest
        self.id = storage.id
        """Sixteen bytes, the same for all copies of the database, and in every iterator."""
        self.plugins = storage.plugins
        self.shard_map = storage.shard_map
        """How client ids map to shards."""
        self.queues = queues
        """Durable, bounded queues beside the messages. They are closed with the database, and don't hold it open."""
        self.archives = Archives(storage)
        """Generations exported as Parquet."""
        self.retention = Retention(storage, remove_expired)
        """How long messages stay, and how many bytes of them."""
        self._compaction: CompactionScheduler | None = None
        self._hub: Hub | None = None
        self._sessions: Sessions | None = None
        self._rules: PersistenceRules | None = None
        self._beginning = ProcessLock()
        """Held while one of these is made. Guards them, and what follows; a glance needs no lock."""
        self._writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        storage.on_close(queues.close)
        storage.on_close(self.retention.stop)
        storage.before_store.append(self.retention.admit)
        storage.after_store.append(self.retention.stored)
        if auto_compact:
            self._compaction = CompactionScheduler(storage.shards)
            storage.on_close(self._compaction.stop)
            storage.after_store.append(self._compaction.stored)

    # --- storing ---

    def store(
        self,
        messages: Iterable[Message] | MessageBatch | pa.RecordBatch,
        *,
        state: Mapping[int, Sequence[StateWrite]] | None = None,
    ) -> StoreResult:
        """Store messages, all or nothing per shard, and nothing at all if one of them is bad.

        ``state``: writes by shard number, each shard's committed in one engine write with its messages.

        When it returns, the messages are as durable as the database's ``durability`` says, and every
        replay that begins later has them. Iterators see them too, but in a layout with epochs only
        when the epoch is over (`topicstore.contract.layout.Slab.epoch`).

        Raises `InvalidMessageError` naming the bad message (with its kinds `LateMessageError` and
        `TimestampAheadError`), `StateConflictError`, `StorageFullError`, `ShardReadOnlyError`. If
        the engine fails at one shard, the shards of lower number have committed their part.
        """
        self.storage.check_may_write()  # before messages are taken out of an iterator
        return self.storage.write(MessageBatch.of(messages), state or {})

    def publish(
        self,
        messages: Iterable[Message] | MessageBatch | pa.RecordBatch,
        *,
        state: Mapping[int, Sequence[StateWrite]] | None = None,
    ) -> PublishResult:
        """Publish messages: store those that somebody wants stored, and hand the others to who listens now.

        A message is stored if its publisher asks for it (`topicstore.pubsub.publishing.PERSIST`), if one of the
        rules in `persistence` matches, or if a durable subscription does; once, however many do. Who
        follows a filter gets it in any case. One with ``retain`` becomes its topic's retained message,
        stored or not; with an empty payload it clears that.

        What is stored is committed as by `store`, together with ``state`` and the retained messages of the
        same shard, before anything is handed on; between stored messages and others there is no order.
        A retained message is kept in the shard of its topic. Raises what `store` raises; then nothing was handed on.
        """
        self.storage.check_may_write()
        return publish(
            self.storage,
            MessageBatch.of(messages),
            state or {},
            rules=self.persistence,
            wanted=lambda: self.sessions.wants,
            hub=lambda: self._hub,
        )

    @property
    def persistence(self) -> PersistenceRules:
        """The rules by which published messages are stored."""
        with self._beginning:
            if self._rules is None:
                from .pubsub.persistence_rules import PersistenceRules

                self._rules = PersistenceRules(self.storage.state(0))
            return self._rules

    def retained(self, topic_filter: str) -> list[Message]:
        """Return the retained messages whose topics match, in order of topics; those that expired are left out."""
        return retained(self.storage, TopicFilter(topic_filter), self.clock())

    def writer(self, *, max_items: int = 1_000, flush_interval: float = 0.1) -> Writer:
        """Return a buffered writer. ``flush_interval`` is in seconds."""
        with self._beginning:
            self.storage.check_may_write()
            writer = Writer(self.storage, max_items, flush_interval)
            self._writers.add(writer)
            return writer

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that a publisher's messages go to."""
        return self.storage.shard_of(client_id)

    def state(self, shard: int) -> ShardState:
        """Return the state keyspace of a shard: small values beside the messages."""
        return self.storage.state(shard)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self.storage.flush()

    # --- reading ---

    def streams(self, topic_filter: str, start: Time = 0) -> list[Stream]:
        """Return the streams that may hold matching messages at or after ``start``.

        Later calls may return more: new topics and generations bring new streams.
        """
        self.storage.check_open()
        return self.storage.streams(TopicFilter(topic_filter), to_microseconds(start))

    def iterate(self, stream: Stream, topic_filter: str, start: Time = 0) -> StreamIterator:
        """Return an iterator over a stream's matching messages at or after ``start``.

        Raises `GenerationDroppedError`, or `InvalidIteratorError` if there is no such stream.
        """
        if not isinstance(stream, Stream):
            raise InvalidArgumentError(f"iterate takes a Stream, not a {type(stream).__name__}")
        parsed, position = TopicFilter(topic_filter), first_position(to_microseconds(start))
        return self.storage.begin(stream.shard, stream.generation, stream.number, parsed, position)

    def next(
        self,
        iterator: StreamIterator,
        limit: int = BATCH_SIZE,
        *,
        until: Time | None = None,
        timeout: float | None = None,
    ) -> NextResult:
        """Fetch the next batch of an iterator: at most ``limit`` messages, in the stream's order.

        Messages from ``until`` on are left. After ``timeout`` seconds it returns what it has, and
        the iterator has moved on all the same. An empty batch is not the end; ``end_of_stream`` is.

        Raises `GenerationDroppedError`, `WrongDatabaseError`, `InvalidIteratorError`, `CorruptionError`.
        """
        return self.storage.next(iterator, limit, until=_microseconds(until), timeout=timeout)

    def replay(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        order: Order | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Message]:
        """Iterate over the matching messages stored before the call.

        Each publisher's messages of each topic come in the order stored. That is all the order there
        is by default; with ``order="time"``, as the command line has it,
        everything comes in order of positions (then of shards).

        ``batch_size`` bounds how many messages are fetched at a time. In memory are those of one
        batch; with ``order="time"`` up to 64 of every stream, if that is more; and what a layout has
        to decode at once (`block`: the rest of a merged segment for each shard and generation, up to
        some 50 MB). What is deleted while the replay runs may be missing; if
        a generation is dropped under it, it raises `GenerationDroppedError`.
        """
        batches = self._replay(topic_filter, start, until, order, batch_size)
        return chain.from_iterable(map(MessageBatch.to_messages, batches))

    def replay_arrow(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        order: Order | None = None,
        batch_size: int = BATCH_SIZE,
        ids: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Like `replay`, as record batches of at most ``batch_size`` rows of `topicstore.SCHEMA`.

        With ``ids``, of `topicstore.SCHEMA_WITH_IDS`. The batches can be stored elsewhere as they are.
        """
        batches = self._replay(topic_filter, start, until, order, batch_size)
        return (batch.to_arrow(ids=ids) for batch in replays.slices(batches, batch_size))

    def explain(
        self, topic_filter: str, start: Time = 0, until: Time | None = None, *, order: Order | None = None
    ) -> Explanation:
        """Run a replay and say what it read, and passed over, to find its messages; it can be printed."""
        from .storage.explain import explain

        return explain(self.storage, self._request(topic_filter, start, until, order, BATCH_SIZE))

    def _replay(self, *arguments: Any) -> Iterator[MessageBatch]:
        return replays.run(self.storage.plan(self._request(*arguments)), self.storage.fetch)

    def _request(
        self, topic_filter: str, start: Time, until: Time | None, order: Order | None, batch_size: int
    ) -> ReplayRequest:
        self.storage.check_open()
        return ReplayRequest(
            db=self.storage,
            topic_filter=TopicFilter(topic_filter),
            start=to_microseconds(start),
            until=_microseconds(until),
            order=order,
            batch_size=batch_size,
        )

    # --- following ---

    @property
    def hub(self) -> Hub:
        """Who follows what is stored. Internal to the framework."""
        self.storage.check_may_write()  # who only reads isn't told of what is stored
        with self._beginning:
            if self._hub is None:
                from .pubsub.hub import Hub

                hub = Hub(self.storage)
                self.storage.listen(hub)
                self._hub = hub
            return self._hub

    def subscribe(
        self,
        topic_filter: str,
        start: Time | Mapping[int, int] | None = None,
        *,
        window: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Subscription:
        """Follow a filter: first what is stored from ``start`` on, then live what comes, nothing lost or repeated.

        start:      a time (0: the beginning); a place, as `Subscription.place` and `Subscription.acknowledged`
                    give it; or None: from now on.
        window:     how many messages may be delivered and not acknowledged (`Subscription.acknowledge`)
                    before no more are delivered; None: as many as you like.
        batch_size: most messages of a batch.

        Each shard's messages come in order of positions. Raises `InvalidFilterError`, `InvalidArgumentError`.
        """
        from .pubsub.subscription import Subscription

        self.storage.check_open()
        parsed = TopicFilter(topic_filter)
        check_count("batch_size", batch_size)
        if window is not None:
            check_count("window", window)
        return Subscription(self.storage, self.hub, parsed, start, window=window, batch_size=batch_size)

    @property
    def sessions(self) -> Sessions:
        """The durable sessions of the database (`topicstore.sessions`)."""
        with self._beginning:
            if self._sessions is None:
                from .sessions import Sessions
                from .sessions.database_parts import DatabaseParts

                self.storage.check_open()
                self._sessions = Sessions(DatabaseParts.of(self.storage, self.hub, self.persistence))
            return self._sessions

    @property
    def reading(self) -> Mode | None:
        """How the database is read that was opened with ``read_only``; None: it may be written.

        ``"read-only"``: beside whoever writes it, as of one moment; ``"owner"``: nobody else has it open, or can.
        """
        return self.storage.mode

    def refresh(self) -> None:
        """See what was stored since the database was opened with ``read_only``, or last refreshed.

        Iterators and replays that have begun go on. Whoever may write sees everything anyway.
        Raises what `open` raises; then everything is as it was.
        """
        self.storage.refresh()

    def clock(self) -> int:
        """Return the present: microseconds since the epoch, by the clock that the database was opened with."""
        return self.storage.clock()

    # --- removing ---

    def delete(self, topic_filter: str, start: Time = 0, until: Time | None = None) -> int:
        """Delete the matching messages stored before the call; return how many there were.

        Works through them a chunk at a time, beside readers and writers: not atomic, but if it is
        interrupted, calling it again does the rest. Batches fetched after it returns hold none of
        them, and iterators stay valid. Raises `GenerationError`, and deletes nothing, if it reaches
        into a generation that was archived.
        """
        self.storage.check_may_write()
        return delete(self.storage, TopicFilter(topic_filter), to_microseconds(start), _microseconds(until))

    # --- generations ---

    def add_generation(self, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
        """Seal the current generation of every shard and begin a new one; return its number.

        The new one has ``layout`` (default: that of the current) with ``options`` (default: those
        of the last generation that has this layout, else the layout's own). If it is interrupted
        between shards, the next open goes on. Raises `UnknownPluginError`, `IncompatibleError`, `InvalidOptionError`.
        """
        return generations.add_generation(self.storage, layout, options)

    def generations(self) -> list[generations.GenerationInfo]:
        """Return the live generations, oldest first."""
        return generations.generation_infos(self.storage)

    def drop_generation(self, generation: int) -> bool:
        """Drop a sealed generation with all its messages; False if it was dropped before.

        Invisible at once and for good; what it held is removed before it returns or, if it is
        interrupted, at the next open; the disk has its bytes back then if the backend
        ``reclaims_disk``. One that was archived is forgotten, and its files stay. Raises
        `GenerationError` for the current generation and for one that never was.
        """
        return generations.drop_generation(self.storage, generation)

    # --- care ---

    def compact(self) -> CompactReport:
        """Bring everything stored before the call into the form that is read fastest; say what it did.

        Layouts that merge do so whole; what is obsolete then is gone from the disk, if the backend
        ``reclaims_disk``. Readers, iterators, order and writers notice nothing, and a crash loses
        nothing: each step is one atomic write. Without the call, it happens in the background as
        far as it is worth it (``auto_compact``).
        """
        return compact(self.storage)

    def topics(self, generation: int | None = None) -> dict[tuple[int, int], list[TopicNode]]:
        """Return what each (shard, generation), or those of one generation, learned of its topics' structure.

        Parents come before children. Layouts that learn nothing are left out.
        """
        return reports.learned_topics(self.storage, generation)

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run an SQL statement that only reads over the messages of all shards; return what it gives.

        For layouts that keep messages as rows, which say what tables there are: `table`, on DuckDB,
        has `messages`. It sees what is stored at this moment, as it is stored: plugins that change
        messages on their way in and out don't see it. Generations of other layouts, and those that were
        archived, are left out, with a warning. Raises `InvalidArgumentError` for a statement that is wrong or writes,
        `UnsupportedError` if there is nothing that speaks SQL.
        """
        return sql(self.storage, statement, parameters)

    def checkpoint(self, path: str | Path) -> None:
        """Write a copy of the database, as it is now, into the new directory ``path``.

        A consistent one over all shards, a database of its own with the same id (so iterators are
        valid in both). What was archived stays in its export, which both read; if that was noted by a relative
        path, the copy looks for it from where it is itself, and a warning says so if that is another place. Raises
        `UnsupportedError` where the backend lacks ``checkpoint``, `NotADatabaseError` if ``path`` exists.
        """
        checkpoints.checkpoint(self.storage, check_path(path))

    def verify(self, progress: Callable[[int], None] | None = None) -> reports.VerifyReport:
        """Read everything, check checksums, indexes and counts, and say what is damaged.

        Queues, the manifest, state, and the exports of archived generations are part of it.
        ``progress`` is called with the number of messages read so far.
        """
        report = reports.verify(self.storage, progress)
        return attrs.evolve(report, damages=[*report.damages, *self.queues.damages()])

    def info(self) -> DatabaseInfo:
        """Return sizes, generations and counters. Cheap: reads no messages."""
        visibility_failure = None if self._hub is None else self._hub.reads.failure
        return database_info(self.storage, self.retention, self._compaction, visibility_failure)

    # --- the end ---

    def close(self) -> None:
        """Store what its writers hold, close the database and give back its lock. May be called twice.

        All of it is closed, whatever fails; then that is raised, several failures as an `ExceptionGroup`.
        """
        if self.storage.inherited:
            return
        with self._beginning:
            writers = [writer.close for writer in self._writers]
            sessions = () if self._sessions is None else (self._sessions.close,)
        release_all((*writers, *sessions, self.storage.close))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self.storage)


def _microseconds(until: Time | None) -> int | None:
    return None if until is None else to_microseconds(until)
