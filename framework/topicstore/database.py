"""`Database`: the public face of a store. `topicstore.opening` makes one.

It composes the parts and documents them; the packages `storage`, `pubsub`, `lifecycle`, `queues` and `sessions`
implement them.

The result of `Database.info`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

import attrs

from .contract.arguments import check_length, check_path
from .contract.batch import MessageBatch, Messages
from .contract.cursors import Cursor
from .contract.errors import InvalidArgumentError
from .contract.forking import ProcessLock
from .contract.layout import TopicNode
from .contract.model import Message
from .contract.positions import first_position
from .contract.replay_plan import By, Order
from .contract.requests import ReadResult, ReplayRequest, StoreResult, Stream
from .contract.state import StateWrite
from .contract.times import Time, instant
from .contract.topics import TopicFilter
from .lifecycle.archives import Archives
from .lifecycle.retention import Retention
from .lifecycle.retention_policy import RetentionSettings
from .pubsub.publishing import PublishResult, publish
from .pubsub.retained import remove_expired
from .pubsub.retained_expiry import RetainedExpiry
from .pubsub.retained_lookup import retained
from .queues.queues import Queues
from .runtime.background import end_at_exit
from .runtime.closing import Closing, release_all
from .shard.rewriter import never
from .shard.state import ShardState
from .shard.writer import ShardCounters
from .storage import generations, replays, reports
from .storage import maintenance as checkpoints
from .storage.buffered_writer import Writer
from .storage.counting import contents
from .storage.counting.contents import ClientTally, TopicTally
from .storage.counting.counting import CountingScheduler
from .storage.generations import GenerationInfo, generation_infos
from .storage.maintenance import CompactionScheduler, CompactReport, compact, delete
from .storage.reading.message_times import judged_by
from .storage.reading.ordering import ReplayOrder, ordered, planned
from .storage.reading.sql import sql
from .storage.reports import ShardInfo, shard_info
from .storage.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

    from .pubsub.hub import Hub
    from .pubsub.persistence_rules import PersistenceRules
    from .pubsub.subscription import OnDropped, Subscription
    from .sessions import Sessions
    from .shard.rewriter import Decoders
    from .storage.reading.explain import Explanation

__all__ = [
    "BATCH_SIZE",
    "Database",
    "DatabaseInfo",
    "database_info",
    "state_decoders",
]


@attrs.frozen(kw_only=True)
class DatabaseInfo:
    """Figures of a database at one moment."""

    path: str
    id: str
    backend: str
    layout: str
    """Name of the current generation's layout."""
    durability: str
    timestamps: str
    plugins: tuple[str, ...]
    streams: int
    """Number of streams in all live generations."""
    messages: int
    live_bytes: int
    disk_bytes: int
    compaction_failure: str | None
    """Why background compaction failed the last time; None if it did not."""
    counting_failure: str | None
    """Why counting in the background failed the last time; None if it did not."""
    visibility_failure: str | None
    """Why waiting for stored messages to become visible failed the last time; None if it did not."""
    retained_failure: str | None
    """Why removing expired retained messages failed the last time; None if it did not."""
    ballast_failure: str | None
    """Why no disk space could be reserved for the case of a full disk; None if it could, or none is needed."""
    notes_failure: str | None
    """Why it could not be noted what is on disk, so that a loss might go unnoticed; None if it could."""
    retention: RetentionSettings
    retention_failure: str | None
    """Why background retention failed the last time; None if it did not."""
    clock_ahead: float
    """Seconds by which the clock has jumped ahead since the opening; retention doesn't count them as passed."""
    generations: list[GenerationInfo]
    shards: list[ShardInfo]

    @property
    def total(self) -> ShardCounters:
        """Return the shards' counters, added up."""
        rows = [attrs.astuple(shard.counters) for shard in self.shards]
        return ShardCounters(*(sum(column) for column in zip(*rows, strict=True)))


def database_info(
    storage: Storage,
    retention: Retention,
    compaction: CompactionScheduler | None,
    counting: CountingScheduler | None,
    expiry: RetainedExpiry,
    hub: Hub | None,
) -> DatabaseInfo:
    """Return the figures of a database. Cheap: reads no messages."""
    generations, manifest = generation_infos(storage), storage.manifest
    shards = [shard_info(shard) for shard in storage.shards]
    return DatabaseInfo(
        path=str(storage.path),
        id=manifest.id,
        backend=manifest.backend,
        layout=generations[-1].layout,
        durability=manifest.durability,
        timestamps=manifest.timestamps,
        plugins=storage.plugins,
        streams=sum(slab.streams for shard in shards for slab in shard.slabs.values()),
        messages=sum(generation.messages for generation in generations),
        live_bytes=sum(generation.live_bytes for generation in generations),
        disk_bytes=sum(shard.disk_bytes for shard in shards),
        compaction_failure=None if compaction is None else compaction.task.failure,
        counting_failure=None if counting is None else counting.task.failure,
        visibility_failure=None if hub is None else hub.reads.failure,
        retained_failure=expiry.task.failure,
        ballast_failure=storage.ballast.failure,
        notes_failure=None if storage.notes is None else storage.notes.failure,
        retention=retention.settings,
        retention_failure=retention.failure,
        clock_ahead=retention.clock_ahead,
        generations=generations,
        shards=shards,
    )


BATCH_SIZE = 4_096
"""Default number of messages in a batch when reading."""
_INTERNAL = frozenset(("storage",))
"""Public attributes that only other parts of the framework use."""


class Database:
    """An open database. Made by `topicstore.open`; close it, or use it as a context manager.

    One that is open when the interpreter exits is closed then. All methods may be called from any thread. Times are
    microseconds since the epoch, datetimes with a time zone, negative timedeltas, which lie before now, or texts: ISO
    8601 (by default in UTC), ``now``, ``-2h``, ``-1d12h``, ``@`` with seconds. ``start`` is inclusive, ``until``
    exclusive; both are compared with positions, unless a method says otherwise.
    """

    def __init__(self, storage: Storage, queues: Queues, *, auto_compact: bool) -> None:
        self.storage = storage
        """The shards, called through their hooks. Internal to the framework."""
        self.path = storage.path
        self.manifest = storage.manifest
        self.id = storage.id
        """Sixteen bytes that identify the database: the same in all its copies and in every cursor."""
        self.plugins = storage.plugins
        self.queues = queues
        """The durable, bounded queues. They are closed with the database, and don't keep it open."""
        self.archives = Archives(storage)
        """The generations that are exported as Parquet."""
        self.retention = Retention(storage, remove_expired)
        """The limits on the age of messages and on the bytes that they take."""
        self._compaction: CompactionScheduler | None = None
        self._counting: CountingScheduler | None = None
        self._retained_expiry = RetainedExpiry(storage)
        self._made_hub: Hub | None = None
        self._sessions: Sessions | None = None
        self._rules: PersistenceRules | None = None
        self._beginning = ProcessLock()
        """Held while one of the attributes below is made. Guards them; reading one needs no lock."""
        self._writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        self._closing = Closing("database")
        storage.on_close(queues.close)
        storage.on_close(self.retention.stop)
        if auto_compact:
            self._compaction = CompactionScheduler(storage.shards, storage.jobs)
            storage.on_close(self._compaction.stop)
            self._counting = CountingScheduler(storage)
            storage.on_close(self._counting.stop)
        end_at_exit(self, Database.close)

    # --- storing ---

    def store(self, messages: Messages, *, state: Mapping[int, Sequence[StateWrite]] | None = None) -> StoreResult:
        """Store messages: all or none in each shard, and none at all if one of them is invalid.

        ``messages`` are `Message` objects, a `MessageBatch`, or anything that exports Arrow data with the columns of
        `topicstore.SCHEMA`: batches, tables and readers of PyArrow, frames of Polars and pandas, relations of DuckDB. A
        stream is first read to its end, as one batch in memory; store a larger one batch by batch.

        ``state`` holds state writes by shard number; those of each shard are committed in one engine write with its
        messages.

        When the call returns, the messages are as durable as the database's ``durability`` says, and every replay that
        begins later returns them. Cursors see them too, but in a layout with epochs only once the epoch has ended
        (`topicstore.contract.layout.Slab.epoch`).

        Raises `InvalidMessageError` naming the invalid message (or its subclasses `LateMessageError` and
        `TimestampAheadError`), `StateConflictError`, `StorageFullError`, `ShardReadOnlyError`, and `NestedCallError` if
        it is called within another call of the same thread that is writing, as in a signal handler. If the engine fails
        in one shard, the shards with lower numbers have committed their part.
        """
        self.storage.check_may_write()  # before messages are taken out of a cursor
        return self.storage.write(MessageBatch.of(messages), state or {})

    def publish(self, messages: Messages, *, state: Mapping[int, Sequence[StateWrite]] | None = None) -> PublishResult:
        """Publish messages: store those selected as below, and deliver the others to current subscribers only.

        A message is stored if its publisher asks for it (`topicstore.pubsub.publishing.PERSIST`), if one of the
        rules in `persistence` matches, or if a durable subscription does (for QoS 0, see `Sessions.store_qos0`); it is
        stored once, however many of these apply. Subscribers whose filters match get it in any case. A message with
        ``retain`` becomes its topic's retained message, stored or not; one with an empty payload clears it (MQTT 5,
        section 3.3.1.3). Stored messages are committed as by `store`, together with ``state`` and the retained messages
        of the same shard, before any message is delivered; there is no order between stored messages and others. A
        retained message is kept in the shard of its topic. Raises the errors of `store`; then none was delivered.
        """
        self.storage.check_may_write()
        return publish(
            self.storage,
            MessageBatch.of(messages),
            state or {},
            rules=self.persistence,
            wanted=lambda: self.sessions.wants,
            store_qos0=lambda: self._sessions is None or self._sessions.store_qos0,
            hub=lambda: self._made_hub,
        )

    @property
    def persistence(self) -> PersistenceRules:
        """The rules by which published messages are stored."""
        with self._beginning:
            if self._rules is None:
                from .pubsub.persistence_rules import PersistenceRules

                self._rules = PersistenceRules(self.storage.state(0))
            return self._rules

    def retained(self, topic_filter: str, *, after: str | None = None, limit: int | None = None) -> list[Message]:
        """Return the retained messages whose topics match and that have not expired, in order of topics.

        ``limit`` is the most to return, at least 1; ``after`` a topic before and at which nothing is returned. With the
        last topic of a page as ``after``, the next call returns the next page; one that isn't full is the last. Takes
        no lock; each page is as it is stored then. Raises `InvalidFilterError`, `InvalidArgumentError`.
        """
        return retained(self.storage, topic_filter, self.clock(), after, limit)

    def writer(self, *, max_items: int = 1_000, flush_interval: timedelta | float = 0.1) -> Writer:
        """Return a buffered writer. ``flush_interval`` is a timedelta or seconds."""
        with self._beginning:
            self.storage.check_may_write()
            writer = Writer(self.storage, max_items, flush_interval)
            self._writers.add(writer)
            return writer

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that a publisher's messages go to."""
        return self.storage.shard_of(client_id)

    def state(self, shard: int) -> ShardState:
        """Return the state keyspace of a shard, which holds small values next to the messages."""
        return self.storage.state(shard)

    def flush(self) -> None:
        """Wait until everything stored so far is on disk, whatever the durability."""
        self.storage.flush()

    def recover(self) -> list[int]:
        """Open the shards again that take no writes since one failed; return the numbers of those that do again.

        Call it when the cause has gone, such as a full disk. Subscriptions, sessions and replays go on, and reads wait
        meanwhile. Everything acknowledged is there, and the failed write is there as a whole, with a `RuntimeWarning`,
        or not at all.

        Raises the errors of `open`, several as an `ExceptionGroup`, as long as the cause is there, and may be called
        again; the shards can be read as before. If the backend isn't persistent it raises `ShardReadOnlyError`.
        """
        return self.storage.recover()

    # --- reading ---

    def streams(self, topic_filter: str, start: Time = 0) -> list[Stream]:
        """Return the streams that may hold matching messages at or after ``start``.

        Later calls may return more: new topics and generations bring new streams.
        """
        self.storage.check_open()
        return self.storage.streams(TopicFilter(topic_filter), self._instant(start))

    def cursor(self, stream: Stream, topic_filter: str, start: Time = 0) -> Cursor:
        """Return a cursor over a stream's matching messages at or after ``start``.

        Raises `GenerationDroppedError`, or `InvalidCursorError` if there is no such stream.
        """
        if not isinstance(stream, Stream):
            raise InvalidArgumentError(f"cursor takes a Stream, not a {type(stream).__name__}")
        parsed, position = TopicFilter(topic_filter), first_position(self._instant(start))
        return self.storage.begin(stream.shard, stream.generation, stream.number, parsed, position)

    def read(
        self,
        cursor: Cursor,
        limit: int = BATCH_SIZE,
        *,
        until: Time | None = None,
        timeout: timedelta | float | None = None,
    ) -> ReadResult:
        """Fetch the next batch of a cursor: at most ``limit`` messages, in the stream's order.

        Messages from ``until`` on are left. After ``timeout``, a timedelta or seconds, it returns what it has, and
        the cursor has moved on all the same. An empty batch is not the end; ``end_of_stream`` is.

        Raises `GenerationDroppedError`, `WrongDatabaseError`, `InvalidCursorError`, `CorruptionError`, and
        `PlaceAheadError` for a cursor after everything that the database has. A database that is only read, beside a
        possible writer, returns nothing instead, because there may be more than it sees.
        """
        self.storage.check_place(cursor)
        return self.storage.read(
            cursor,
            limit,
            until=self._until(until),
            timeout=None if timeout is None else check_length("timeout", timeout),
        )

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
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[Message]:
        """Iterate over the matching messages stored before the call, at most ``limit`` of them.

        ``start`` and ``until`` are compared with the times of positions. Where those go by the messages' own times
        (``timestamps="message"``), each message is judged by its own, exactly. With ``by="timestamp"`` it always is, in
        whatever order messages were stored: every stored message is found. Stretches of about 65,000 consecutive
        messages that are known to hold none are skipped.

        They come in order of positions, which is the order of time, and at equal positions in order of shards. With
        ``reverse`` that order is reversed: the newest comes first, and hardly any message older than the last of
        ``limit`` is read. With ``order="any"`` only each publisher's messages of each topic come in the order stored.
        This makes long replays faster: merging four shards takes 1.2 to 3 times as long, and merging the hundreds of
        streams of `wildcard_optimized` and `skipstream` 1.5 to 12 times. With one stream, nothing is gained.
        With ``order="timestamp"`` they are sorted by their own times; all of them are read first, and held in memory,
        or with ``limit`` about twice as many as that.

        ``batch_size`` messages are fetched at a time, and held in memory; in order of time up to 64 of every stream, if
        that is more; with ``reverse`` four batches; and what a layout decodes at once (`block`: the rest of a merged
        segment for each shard and generation, up to some 50 MB). Messages deleted meanwhile may be missing; if a
        generation that is still to be read is dropped, `GenerationDroppedError` is raised.
        """
        request = self._request(topic_filter, start, until, by, planned(order), batch_size)
        batches = ordered(self.storage, request, order, reverse=reverse, limit=limit)
        return chain.from_iterable(map(MessageBatch.to_messages, batches))

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
        batch_size: int = BATCH_SIZE,
        ids: bool = False,
    ) -> pa.RecordBatchReader:
        """Return the messages of a `replay` as record batches of at most ``batch_size`` rows of `topicstore.SCHEMA`.

        With ``ids`` the schema is `topicstore.SCHEMA_WITH_IDS`. pandas, Polars, DuckDB and `store` of another database
        accept the reader as it is; batches are fetched as it is read. Reading in Python raises the same errors as
        `replay`; through Arrow's C stream interface they appear as Arrow's own errors.
        """
        import pyarrow as pa

        from .contract.arrow import SCHEMA, SCHEMA_WITH_IDS

        request = self._request(topic_filter, start, until, by, planned(order), batch_size)
        batches = ordered(self.storage, request, order, reverse=reverse, limit=limit)
        return pa.RecordBatchReader.from_batches(
            SCHEMA_WITH_IDS if ids else SCHEMA,
            (batch.to_arrow(ids=ids) for batch in replays.slices(batches, batch_size)),
        )

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
        """Run a replay, or its first ``limit`` messages, and return a printable report of what it read and skipped."""
        from .storage.reading.explain import explain

        return explain(self.storage, self._request(topic_filter, start, until, by, order, BATCH_SIZE), limit)

    def _request(
        self, topic_filter: str, start: Time, until: Time | None, by: By, order: Order, batch_size: int
    ) -> ReplayRequest:
        self.storage.check_open()
        if by not in get_args(By):
            raise InvalidArgumentError(f"by is 'position' or 'timestamp', not {by!r}")
        request = ReplayRequest(
            db=self.storage,
            topic_filter=TopicFilter(topic_filter),
            start=self._instant(start),
            until=self._until(until),
            order=order,
            batch_size=batch_size,
        )
        return judged_by(self.storage, request, by)

    def _instant(self, when: Time) -> int:
        return instant(when, self.clock, allow_ancient=self.storage.allow_ancient)

    def _until(self, when: Time | None) -> int | None:
        return None if when is None else self._instant(when)

    # --- what is in it ---

    def topics(self, topic_filter: str = "#") -> list[TopicTally]:
        """Return, in order of topics, every matching topic that has messages: their number, bytes, first and last time.

        The counts are exact, as of the call, and count the messages as they are stored, beneath plugins. They are kept
        in memory from the first call on: a later one reads what was stored since. Most messages were counted in the
        background or by `compact`: then only about 65,000 in each shard are read, however long ago the last call was.
        Topics that begin with ``$``, which only filters that begin with ``$`` match (MQTT 5, section 4.7.2), are
        counted by reading.
        """
        return contents.topics(self.storage, TopicFilter(topic_filter))

    def clients(self, topic_filter: str = "#") -> list[ClientTally]:
        """Return, in order, every client id that has messages of matching topics, counted as by `topics`."""
        return contents.clients(self.storage, TopicFilter(topic_filter))

    def latest(self, topic_filter: str = "#") -> list[Message]:
        """Return the last message of each topic that matches, in order of topics: that of the highest position.

        That is the one that was stored last. Of a device that sends late it may be older, by its own timestamp, than
        what came before it.

        Counts as `topics` does, and then reads hardly more than these messages.
        """
        return contents.latest(self.storage, TopicFilter(topic_filter))

    # --- following ---

    @property
    def _hub(self) -> Hub:
        """The hub through which subscriptions follow the messages that are stored."""
        self.storage.check_may_write()  # a reader isn't notified of what is stored
        with self._beginning:
            if self._made_hub is None:
                from .pubsub.hub import Hub

                hub = Hub(self.storage)
                self.storage.listen(hub)
                self._made_hub = hub
            return self._made_hub

    def subscribe(
        self,
        topic_filter: str,
        start: Time | Mapping[int, int] | None = None,
        *,
        window: int | None = None,
        batch_size: int = BATCH_SIZE,
        on_dropped: OnDropped = "warn",
    ) -> Subscription:
        """Follow a filter: first the messages stored from ``start`` on, then new ones live, none lost or repeated.

        start:      a time (0 for the beginning; one after the newest message, also in the future, is from now on), a
                    `Place` of this database, positions by shard, or None: from now on.
        window:     how many messages may be delivered and not acknowledged (`Subscription.acknowledge`); None: any.
        batch_size: the most messages of a batch.
        on_dropped: what iterating does if generations are dropped unread: "warn", "raise", or a function that is called
                    with their numbers. `fetch` returns them in `SubscriptionBatch.dropped`.

        Each shard's messages come in order of positions. Raises `InvalidFilterError`, `InvalidArgumentError`,
        `WrongDatabaseError` for a place of another database, and `PlaceAheadError` for a place after everything that
        this one has, as after it was restored from an older copy.
        """
        from .pubsub.subscription import Subscription

        self.storage.check_open()
        return Subscription(self.storage, self._hub, TopicFilter(topic_filter), start, window, batch_size, on_dropped)

    @property
    def sessions(self) -> Sessions:
        """The durable sessions of the database (`topicstore.sessions`).

        In a database that is only read they are as of the first access to this attribute, and can be looked at but not
        changed.
        """
        from .sessions import Sessions
        from .sessions.database_parts import DatabaseParts

        self.storage.check_open()
        if self.storage.mode is not None:
            from .pubsub.hub import Hub

            return Sessions(DatabaseParts.of(self.storage, Hub(self.storage), self.persistence))
        with self._beginning:
            if self._sessions is None:
                self._sessions = Sessions(DatabaseParts.of(self.storage, self._hub, self.persistence))
            return self._sessions

    @property
    def read_only(self) -> bool:
        """Whether the database was opened with ``mode="r"``, so that it can't be written."""
        return self.storage.mode is not None

    def refresh(self) -> None:
        """See what was stored since the database was opened with ``mode="r"``, or last refreshed.

        Cursors and replays that have begun go on. A database opened for writing sees everything anyway. Raises the
        errors of `open`; then nothing has changed.
        """
        self.storage.refresh()

    def clock(self) -> int:
        """Return the current time by the database's clock, in microseconds since the epoch."""
        return self.storage.clock()

    # --- removing ---

    def delete(self, topic_filter: str, start: Time = 0, until: Time | None = None, *, by: By = "position") -> int:
        """Delete the matching messages stored before the call, and return how many there were.

        ``start``, ``until`` and ``by`` are those of `replay`, which returns the same messages. They are deleted in
        chunks, concurrently with readers and writers: not atomically, but if a call is interrupted, another one deletes
        the rest. ``by="timestamp"`` reads what matches, and writes once for each run of messages that go. Batches
        fetched after it hold none of them; cursors stay valid. Raises `GenerationError`, and deletes nothing, for
        archived messages.
        """
        self.storage.check_may_write()
        return delete(self.storage, self._request(topic_filter, start, until, by, "any", BATCH_SIZE))

    # --- generations ---

    def add_generation(self, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
        """Seal the current generation of every shard and begin a new one; return its number.

        The new generation has ``layout`` (by default that of the current one) with ``options`` (by default those of the
        last generation with this layout, else the layout's defaults). If the call is interrupted between shards, the
        next open completes it. Raises `UnknownPluginError`, `IncompatibleError`, `InvalidOptionError`.
        """
        return generations.add_generation(self.storage, layout, options)

    def generations(self) -> list[generations.GenerationInfo]:
        """Return the live generations, oldest first."""
        return generations.generation_infos(self.storage)

    def drop_generation(self, generation: int) -> bool:
        """Drop a sealed generation with all its messages; return False if it was dropped before.

        Its messages are invisible at once and for good. They are removed before the call returns or, if it is
        interrupted, at the next open; if the backend ``reclaims_disk``, their disk space is free then. The files of an
        archived generation stay. Raises `GenerationError` for the current generation and for one that never existed.
        """
        return generations.drop_generation(self.storage, generation)

    # --- care ---

    def compact(self, *, stop: Callable[[], bool] = never) -> CompactReport:
        """Merge everything stored before the call, if the layout merges, and return a report.

        Merged messages take fewer bytes, and a narrow filter reads a small part of them. Replays of everything and of
        the last minutes become slower, because a whole segment has to be sorted for them. A layout that merges does so
        completely; if the backend ``reclaims_disk``, obsolete data is then gone from the disk. Readers, cursors,
        writers and the order of messages are unaffected, and a crash loses nothing, because each step is one atomic
        write. The call also counts, for `topics`, the messages that were not counted yet. Without it, both happen in
        the background as far as it pays (``auto_compact``).

        ``stop`` is called before each step; once it returns True, the rest is left as it is.
        """
        return compact(self.storage, stop)

    def learned_topics(self, generation: int | None = None) -> dict[tuple[int, int], list[TopicNode]]:
        """Return the topic structure that each (shard, generation) has learned, of all generations or of one.

        Parents come before children. Layouts that learn nothing are left out.
        """
        return reports.learned_topics(self.storage, generation)

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run a read-only SQL statement over the messages of all shards, and return its result.

        This is for layouts that keep messages as rows, which document their tables: `table`, on DuckDB, has `messages`.
        Its column ``time`` is the time of the position, ``timestamp`` the message's own:
        ``SELECT payload FROM messages WHERE "timestamp" >= '2025-06-01 12:00:00+00'``. It reads the messages stored at
        this moment, as they are stored: plugins that change messages on their way in and out are not applied.
        Generations of other layouts and archived ones are left out, with a warning. Raises `InvalidArgumentError` for a
        statement that is wrong or writes, `UnsupportedError` if no generation can be queried with SQL.
        """
        return sql(self.storage, statement, parameters)

    def checkpoint(self, path: str | Path) -> None:
        """Write a copy of the database, as of now, into the new directory ``path``.

        Writers wait only while a snapshot is taken. The copy is consistent over all shards, has all queues, each as
        of a moment during the call, and is a database of its own with the same id (so cursors are valid in
        both). Archived generations stay in their export, which both read; if its path was recorded as relative, the
        copy resolves it from its own directory, and a warning says so if that is another place. Raises
        `UnsupportedError` where the backend lacks ``checkpoint``, `NotADatabaseError` if ``path`` exists.
        """
        checkpoints.checkpoint(self.storage, check_path(path), self.queues.write_copies)

    def verify(self, progress: Callable[[int], None] | None = None) -> reports.VerifyReport:
        """Read everything, check checksums, indexes and counts, and report the damage.

        This includes queues, the manifest, the exports of archived generations, and the state: the values that
        sessions, retained messages, rules and retention keep there are decoded. Values that programs, imports or Spark
        keep in the state are read but not decoded; whether records are consistent with each other is not checked.
        ``progress`` is called with the number of messages read so far.
        """
        report = reports.verify(self.storage, state_decoders(), progress)
        return attrs.evolve(report, damages=[*report.damages, *self.queues.damages()])

    def info(self) -> DatabaseInfo:
        """Return sizes, generations and counters. This is cheap: it reads no messages."""
        expiry, hub = self._retained_expiry, self._made_hub
        return database_info(self.storage, self.retention, self._compaction, self._counting, expiry, hub)

    # --- the end ---

    def close(self) -> None:
        """Store the messages that its writers hold, close the database and release its lock. May be called twice.

        Everything is closed even if some of it fails; then the errors are raised, several of them as an
        `ExceptionGroup`. If the call is interrupted, as by Ctrl-C, the next call finishes it.

        It may also be called by a signal handler or other code that runs within another call of the same thread. That
        call can't be waited for: `close` then returns before the database is closed, which happens in another thread as
        soon as the other call has ended or raised `DatabaseClosedError`. The next `close`, and the end of the ``with``
        block or of the interpreter, waits for this and raises the errors.
        """
        if self.storage.inherited:
            return
        sessions = self._sessions
        within = self.storage.entered or (sessions is not None and sessions.entered())
        self._closing.run(self._close, within=within)

    def _close(self) -> None:
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

    def __dir__(self) -> list[str]:
        """Return the public attributes, for completion."""
        return sorted(set(super().__dir__()) - _INTERNAL)

    def __repr__(self) -> str:
        return repr(self.storage)


def state_decoders() -> Decoders:
    """Return the decoders of all state but that of queues, which are databases of their own (`queues.record`)."""
    from .lifecycle import expiry, retention
    from .pubsub import persistence_rules
    from .sessions import records, session_clock
    from .sessions.shared import records as shared_records
    from .storage import keyed_message_records

    return {
        **keyed_message_records.DECODERS,
        **persistence_rules.DECODERS,
        **retention.DECODERS,
        **expiry.DECODERS,
        **records.DECODERS,
        **session_clock.DECODERS,
        **shared_records.DECODERS,
    }
