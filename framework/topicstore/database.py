"""`Database`, the main public class, which `topicstore.opening` creates, and `DatabaseInfo`, its statistics.

`Database` documents the public operations and forwards them; the packages `storage`, `pubsub`, `lifecycle`, `queues`
and `sessions` implement them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

import attrs

from .contract.arguments import Length, check_length, check_path, seconds
from .contract.batch import MessageBatch, Messages
from .contract.cursors import Cursor
from .contract.errors import InvalidArgumentError, ShardElsewhereError
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
from .lifecycle.retention_outlook import kept
from .lifecycle.retention_policy import RetentionSettings
from .pubsub.retained import remove_expired
from .pubsub.retained_expiry import RetainedExpiry
from .queues.queues import Queues
from .runtime.background import end_at_exit
from .runtime.closing import Closing, close_all
from .shard.rewriter import never
from .shard.state import ShardState
from .shard.writer import ShardCounters
from .storage import generations, replays, reports
from .storage import maintenance as checkpoints
from .storage.counting.counting import CountingScheduler
from .storage.generations import GenerationInfo, generation_infos
from .storage.maintenance import CompactionScheduler, CompactReport, compact, delete
from .storage.reading.message_times import judged_by
from .storage.reading.ordering import ReplayOrder, ordered, planned
from .storage.reports import ShardInfo, shard_info
from .storage.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

    from .pubsub.persistence_rules import PersistenceRules
    from .pubsub.publish import Publisher, PublishResult
    from .pubsub.subscription import OnDropped, Subscription
    from .replication.site import Site
    from .sessions import Sessions
    from .shard.rewriter import Decoders
    from .storage.buffered_writer import Writer
    from .storage.counting.contents import ClientTally, TopicTally
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
    """Statistics of a database, as returned by `Database.info`."""

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
    """The error of the last run of background compaction; None if the run succeeded."""
    counting_failure: str | None
    """The error of the last run of background counting (see `Database.topics`); None if the run succeeded."""
    visibility_failure: str | None
    """The last error of the thread that waits for stored messages to become visible; None if there is none."""
    retained_failure: str | None
    """The error of the last removal of expired retained messages; None if the removal succeeded."""
    delivered_failure: str | None
    """The error of the last removal of messages that no session needs any more; None if the removal succeeded."""
    ballast_failure: str | None
    """Why no disk space could be reserved for the case of a full disk; None if it was reserved or isn't needed."""
    notes_failure: str | None
    """Why the last fsynced writes could not be recorded, so that a later loss might go undetected; None if they were
    recorded."""
    retention: RetentionSettings
    retention_failure: str | None
    """The error of the last run of background retention; None if the run succeeded."""
    kept: tuple[str, ...]
    """Sentences that say which published messages are stored, by which rules, and for how long."""
    clock_ahead: float
    """Seconds by which the clock has jumped ahead since the database was opened. Retention ignores these seconds when
    it computes the age of messages."""
    generations: list[GenerationInfo]
    shards: list[ShardInfo]
    """Of a shard that this site of a cluster doesn't keep, the statistics are those of a site that keeps it."""
    missing: Mapping[int, str] = attrs.field(factory=dict)
    """The shards of a cluster that are not included, and for each the reason why no site that keeps it answered."""

    @property
    def total(self) -> ShardCounters:
        """The sum of the shards' counters."""
        rows = [attrs.astuple(shard.counters) for shard in self.shards]
        return ShardCounters(*(sum(column) for column in zip(*rows, strict=True)))


def _kept(storage: Storage, settings: RetentionSettings) -> tuple[str, ...]:
    from .pubsub.persistence_rules import stored_rules

    if storage.manifest.cluster is not None and settings.delivered is None:  # every message is stored and kept
        return kept(settings, ["#"])
    return kept(settings, [rule.described for rule in stored_rules(storage.state(0))])


def database_info(
    storage: Storage,
    retention: Retention,
    compaction: CompactionScheduler | None,
    counting: CountingScheduler | None,
    expiry: RetainedExpiry,
    publisher: Publisher | None,
    sessions: Sessions | None,
) -> DatabaseInfo:
    """Return the statistics of a database. This is cheap: it reads no messages."""
    generations, manifest = generation_infos(storage), storage.manifest
    shards, missing = list[ShardInfo](), dict[int, str](generations[-1].missing)
    for shard in storage.shards:
        try:
            shards.append(shard_info(shard))
        except ShardElsewhereError as error:
            missing[shard.number] = str(error)
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
        visibility_failure=None if publisher is None else publisher.visibility_failure,
        retained_failure=expiry.task.failure,
        delivered_failure=None if sessions is None else sessions.removal_failure,
        ballast_failure=storage.ballast.failure,
        notes_failure=None if storage.recovery_points is None else storage.recovery_points.failure,
        retention=retention.settings,
        retention_failure=retention.failure,
        kept=_kept(storage, retention.settings),
        clock_ahead=retention.clock_ahead,
        generations=generations,
        shards=shards,
        missing=missing,
    )


BATCH_SIZE = 4_096
"""Default number of messages in a batch when reading."""
ARROW_BATCH_SIZE = 16_384
"""Default number of messages in a record batch, which costs more to begin."""
_INTERNAL = frozenset(("storage",))
"""Public attributes that only other parts of the framework use."""


class Database:
    """An open database, created by `topicstore.open`. Close it, or use it as a context manager.

    A database that is still open when the interpreter exits is closed at that point. All methods are thread-safe.

    Times are microseconds since the epoch, datetimes with a time zone, negative timedeltas relative to now, or strings:
    ISO 8601 (by default in UTC), ``now``, ``-2h``, ``-1d12h``, or ``@`` followed by seconds since the epoch. ``start``
    is inclusive, ``until`` exclusive; unless a method says otherwise, both are compared with the messages' positions.
    """

    def __init__(self, storage: Storage, queues: Queues, *, auto_compact: bool) -> None:
        self.storage = storage
        """The shards and the plugin hooks around them. Internal to the framework."""
        self.path = storage.path
        self.manifest = storage.manifest
        self.id = storage.id
        """Sixteen bytes that identify the database: the same in all its copies and in every cursor."""
        self.plugins = storage.plugins
        self.queues = queues
        """The durable, bounded queues. Closing the database closes them; they hold no reference to the database."""
        self.archives = Archives(storage)
        """The generations that were exported to Parquet files."""
        self.retention = Retention(storage, remove_expired)
        """The limits on the age and total size of stored messages."""
        self._compaction: CompactionScheduler | None = None
        self._counting: CountingScheduler | None = None
        self._retained_expiry = RetainedExpiry(storage)
        self._made_publisher: Publisher | None = None
        self._sessions: Sessions | None = None
        self._beginning = ProcessLock()
        """Held while `_writers` changes, and while an attribute such as `_sessions` is created on first use. Reading
        these attributes needs no lock."""
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
        """Store messages atomically in each shard; store nothing if any message is invalid.

        ``messages`` are one `Message` or several, a `MessageBatch`, or any object that exports Arrow data with the
        columns of `topicstore.SCHEMA`: batches, tables and readers of PyArrow, frames of Polars and pandas, relations
        of DuckDB.
        An Arrow stream is read to its end into one batch in memory before anything is stored. Store streams that don't
        fit into memory batch by batch.

        ``state`` holds state writes by shard number. Those of each shard are committed in the same atomic engine write
        as the shard's messages.

        When the call returns, the messages are as durable as the database's ``durability`` says, and every replay that
        begins later returns them. Cursors return them too; in a layout with epochs
        (`topicstore.contract.layout.Slab.epoch`), only after the epoch has ended.

        Raises `InvalidMessageError` naming the invalid message (or its subclasses `LateMessageError` and
        `TimestampAheadError`), `StateConflictError`, `StorageFullError`, `ShardReadOnlyError`, and `NestedCallError` if
        a signal handler or destructor calls it while the same thread is already writing. If the engine fails in one
        shard, the shards with lower numbers have already committed their part.
        """
        self.storage.check_may_write()  # checked before a stream is consumed that can't be read again
        return self.storage.write(MessageBatch.of(messages), state or {})

    def publish(self, messages: Messages, *, state: Mapping[int, Sequence[StateWrite]] | None = None) -> PublishResult:
        """Deliver messages to the current subscribers whose filters match, and store those that must be durable.

        A message is stored, once, if any of these holds: its publisher requests it
        (`topicstore.pubsub.publish.PERSIST`), a rule in `persistence` matches, or a durable subscription matches
        (for QoS 0, see `Sessions.store_qos0`). On a site of a cluster, every message is stored, because subscribers of
        other sites receive stored messages.

        A message with ``retain`` becomes the retained message of its topic, kept in the topic's shard, even if it isn't
        stored otherwise. On a site of a cluster it is kept in its publisher's shard; if several shards have one of the
        topic, the one with the highest position counts. A message with ``retain`` and an empty payload clears the
        retained message (MQTT 5, section 3.3.1.3).

        Messages are stored as by `store`, together with ``state`` and the retained messages of the same shard, before
        any message is delivered. Subscribers may receive stored and not stored messages in any relative order. Raises
        the errors of `store`; in that case no message is delivered.
        """
        self.storage.check_may_write()
        publisher, batch = self._publisher, MessageBatch.of(messages)
        requested = publisher.requested(batch)
        if requested is not True and not publisher.filters.loaded:
            self.sessions.load_filters()
        return publisher.publish(batch, state or {}, requested)

    @property
    def persistence(self) -> PersistenceRules:
        """The rules that decide by topic which published messages are stored."""
        return self._publisher.rules

    def retained(self, topic_filter: str, *, after: str | None = None, limit: int | None = None) -> list[Message]:
        """Return the retained messages whose topics match and that have not expired, in ascending order of topics.

        ``limit`` is the maximum number of messages, at least 1. ``after`` is a topic: only greater topics are returned.
        To read page by page, pass the last topic of a page as ``after``; a page with fewer than ``limit`` messages is
        the last. The call takes no lock, so pages may reflect different states of the database. Raises
        `InvalidFilterError` and `InvalidArgumentError`.
        """
        from .pubsub.retained_lookup import retained

        self.storage.check_readable()
        return retained(self.storage, topic_filter, self.clock(), after, limit)

    def writer(self, *, max_items: int = 1_000, flush_interval: Length = 0.1) -> Writer:
        """Return a writer that buffers messages and stores them in batches.

        It stores its buffer at ``max_items`` messages, or ``flush_interval`` (a timedelta or seconds) after the
        buffer's first message.
        """
        from .storage.buffered_writer import Writer

        with self._beginning:
            self.storage.check_may_write()
            writer = Writer(self.storage, max_items, flush_interval)
            self._writers.add(writer)
            return writer

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that stores the messages of the publisher ``client_id``."""
        return self.storage.shard_of(client_id)

    def state(self, shard: int) -> ShardState:
        """Return the key-value state of a shard: small values that can be committed atomically with its messages."""
        found = self.storage.state(shard)
        self.storage.check_whole(self.storage.shards[shard : shard + 1])
        return found

    def flush(self) -> None:
        """Fsync everything stored so far, whatever the database's ``durability``; return when it is on disk."""
        self.storage.flush()

    def recover(self) -> list[int]:
        """Reopen the shards that became read-only after a failed write; return the numbers of the recovered shards.

        Call it after the cause, such as a full disk, has been removed. Subscriptions, sessions and replays continue;
        reads wait until the shard is open again. Afterwards, a shard has all acknowledged writes. The failed write is
        either present as a whole, which a `RuntimeWarning` reports, or absent.

        While the cause persists, the call raises the errors of `open` (several as an `ExceptionGroup`); the shards stay
        readable and the call may be repeated. Raises `ShardReadOnlyError` if the backend isn't persistent.
        """
        return self.storage.recover()

    # --- reading ---

    def streams(self, topic_filter: str, start: Time = 0) -> list[Stream]:
        """Return the streams that may hold matching messages at or after ``start``.

        Later calls may return more streams, because new topics and generations create new ones.
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
        timeout: Length | None = None,
    ) -> ReadResult:
        """Fetch the next batch of a cursor: at most ``limit`` messages, in the stream's order.

        Messages at or after ``until`` are not returned. After ``timeout`` (a timedelta or seconds), the call returns
        the messages found so far, and the returned cursor has advanced past everything that was examined. An empty
        batch doesn't mean that the stream has ended; ``end_of_stream`` does.

        Raises `GenerationDroppedError`, `WrongDatabaseError`, `InvalidCursorError`, `CorruptionError`, and
        `PlaceAheadError` for a cursor that lies after all stored messages. A database opened with ``mode="r"`` returns
        an empty batch for such a cursor, because another process may have written messages that it doesn't see yet.
        """
        self.storage.check_place(cursor)
        return self.storage.read(
            cursor,
            limit,
            until=self._until(until),
            timeout=None if seconds(timeout) is None else check_length("timeout", timeout),
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
        fresh: bool = True,
    ) -> Iterator[Message]:
        """Iterate over the matching messages stored before the call, at most ``limit`` of them.

        ``start`` and ``until`` are compared with the times of positions. If positions follow the messages' own
        timestamps (``timestamps="message"``), each message's timestamp is compared exactly. With ``by="timestamp"`` the
        timestamps are compared in every database, and every matching message is found, in whatever order messages were
        stored. Runs of about 65,000 consecutive messages whose recorded time spans lie outside the range are skipped.

        ``order="time"``: ascending positions, which is the order of time; equal positions in order of shards. With
            ``reverse`` the order is reversed: the newest message comes first, and hardly any message older than the
            last of ``limit`` is read.
        ``order="any"``: only the messages of each publisher and topic keep their order. This makes long replays faster:
            in order of time, merging four shards takes 1.2 to 3 times as long, and merging the hundreds of streams of
            `wildcard_optimized` and `skipstream` 1.5 to 12 times. With a single stream there is no difference.
        ``order="timestamp"``: ascending timestamps. All matching messages are read and held in memory before the first
            is returned; with ``limit``, about twice that many are held.

        Messages are fetched in batches of ``batch_size`` and held in memory. In order of time, up to 64 messages of
        every stream are held if that is more; with ``reverse``, four batches. A layout may decode more together
        (`block`: the rest of a merged segment for each shard and generation, up to some 50 MB). Messages that are
        deleted during the replay may be missing. Raises `GenerationDroppedError` if a generation is dropped before it
        was read.

        On a site of a cluster, a replay with ``fresh`` has all messages that any site had stored before the call. It
        first asks the log store for later entries, one request for each shard, and raises `StorageUnavailableError` if
        the store doesn't answer. Without ``fresh``, the replay has the messages that this site has received.
        """
        if fresh and self.storage.site is not None:
            self.storage.catch_up()
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
        batch_size: int = ARROW_BATCH_SIZE,
        ids: bool = False,
        columns: Sequence[str] | None = None,
        fresh: bool = True,
    ) -> pa.RecordBatchReader:
        """Return the messages of a `replay` as record batches of at most ``batch_size`` rows of `topicstore.SCHEMA`.

        With ``ids`` the schema is `topicstore.SCHEMA_WITH_IDS`. With ``columns``, the batches have only these columns
        of `topicstore.SCHEMA_WITH_IDS`, in the given order. Other columns aren't read where the layout can avoid it:
        `block`, `table` and exports read no payloads then. A database with plugins reads all columns.

        Polars, DuckDB and `store` of another database accept the reader directly, and pandas with `read_pandas`;
        batches are fetched on demand. Reading in Python raises the same errors as `replay`; consumers of Arrow's C
        stream interface see Arrow's own errors instead.
        """
        import pyarrow as pa

        from .contract.arrow import fields_of, selected

        schema = selected(columns, ids=ids)
        if fresh and self.storage.site is not None:
            self.storage.catch_up()
        request = self._request(topic_filter, start, until, by, planned(order), batch_size)
        request.columns = fields_of(schema)
        if order == "timestamp" or request.timestamps is not None:
            request.columns |= {"timestamps"}
        batches = ordered(self.storage, request, order, reverse=reverse, limit=limit)
        return pa.RecordBatchReader.from_batches(
            schema, (batch.to_arrow(columns=schema.names) for batch in replays.slices(batches, batch_size))
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
        """Run a replay, up to ``limit`` messages, and return a printable report of what it read and skipped."""
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

    # --- contents ---

    def topics(self, topic_filter: str = "#") -> list[TopicTally]:
        """Return the message count, bytes, and first and last time of each matching topic, in ascending order.

        The counts are exact at the time of the call. They count messages in their stored form, without the changes that
        plugins make to messages when they are read.

        Only messages that may match the filter are counted. Counts of ``#`` and of the last 16 other filters are kept
        in memory, and a later call reads only the messages stored since. Messages that were counted in the background
        or by a compaction are not read again. The layout ``block`` counts messages as it compacts them, and doesn't
        read the payloads of others. With other layouts a background thread counts messages, except the last 65,000 or
        so of each shard. Messages of topics that begin with ``$`` are always read; only filters that begin with ``$``
        match them (MQTT 5, section 4.7.2).
        """
        from .storage.counting import contents

        return contents.topics(self.storage, TopicFilter(topic_filter))

    def clients(self, topic_filter: str = "#") -> list[ClientTally]:
        """Return, in ascending order, each client id that published to matching topics, counted as by `topics`."""
        from .storage.counting import contents

        return contents.clients(self.storage, TopicFilter(topic_filter))

    def latest(self, topic_filter: str = "#") -> list[Message]:
        """Return the last stored message (the highest position) of each matching topic, in ascending order of topics.

        If a device sends messages late, this message may have an older timestamp than messages stored before it. The
        call first counts the messages of each topic as `topics` does, at the same cost. It then reads few messages
        besides those that it returns.
        """
        from .storage.counting import contents

        return contents.latest(self.storage, TopicFilter(topic_filter))

    # --- following ---

    @property
    def _publisher(self) -> Publisher:
        """The publisher, with the hub that notifies subscriptions of newly stored messages, created on first use."""
        with self._beginning:
            if self._made_publisher is None:
                from .pubsub.publish import Publisher

                self._made_publisher = Publisher(self.storage)
            return self._made_publisher

    def subscribe(
        self,
        topic_filter: str,
        start: Time | Mapping[int, int] | None = None,
        *,
        window: int | None = None,
        batch_size: int = BATCH_SIZE,
        on_dropped: OnDropped = "warn",
    ) -> Subscription:
        """Subscribe to a filter: first the stored messages from ``start`` on, then new ones, none lost or repeated.

        start:      a time (0 for the beginning; a time after the newest message, even in the future, is from now on),
                    a `Place` of this database, positions by shard, or None (from now on).
        window:     the maximum number of messages in flight, that is, delivered but not acknowledged
                    (`Subscription.acknowledge`); None for no limit.
        batch_size: the maximum number of messages in a batch.
        on_dropped: the reaction of the iterator to generations that were dropped before they were read: "warn",
                    "raise", or a function that is called with their numbers. `fetch` returns these numbers in
                    `SubscriptionBatch.dropped`.

        The messages of each shard come in order of positions. Raises `InvalidFilterError`, `InvalidArgumentError`,
        `WrongDatabaseError` for a place of another database, and `PlaceAheadError` for a place after all stored
        messages, which happens after a restore from an older copy.
        """
        from .pubsub.subscription import Subscription

        self.storage.check_may_write()  # a database opened with mode="r" isn't notified of new messages
        self.storage.check_readable()
        hub = self._publisher.hub
        return Subscription(self.storage, hub, TopicFilter(topic_filter), start, window, batch_size, on_dropped)

    @property
    def sessions(self) -> Sessions:
        """The durable MQTT sessions of the database (`topicstore.sessions`).

        A database opened with ``mode="r"`` returns new, read-only objects at each access.
        """
        from .sessions import Sessions

        self.storage.check_open()
        if self.storage.mode is not None:
            from .pubsub.publish import Publisher

            return Sessions(Publisher(self.storage), self.retention)
        publisher = self._publisher
        with self._beginning:
            if self._sessions is None:
                self._sessions = Sessions(publisher, self.retention)
            return self._sessions

    @property
    def read_only(self) -> bool:
        """Whether the database was opened with ``mode="r"``, and so takes no writes."""
        return self.storage.mode is not None

    @property
    def cluster(self) -> Site | None:
        """The `Site` of this process in the cluster that shares the database; None if no cluster shares it.

        Raises `DatabaseClosedError`.
        """
        self.storage.check_open()
        return self.storage.site

    def refresh(self) -> None:
        """In a database opened with ``mode="r"``, make everything visible that another process has stored.

        Cursors and running replays stay valid. In a database opened for writing the call has no effect. Raises the
        errors of `open`; in that case the database shows the same messages as before the call.
        """
        self.storage.refresh()

    def clock(self) -> int:
        """Return the current time by the database's clock, in microseconds since the epoch."""
        return self.storage.clock()

    # --- removing ---

    def delete(
        self,
        topic_filter: str,
        start: Time = 0,
        until: Time | None = None,
        *,
        by: By = "position",
        shards: Collection[int] | None = None,
    ) -> int:
        """Delete the matching messages stored before the call, and return their number.

        ``shards`` are the numbers of the shards to delete from; None stands for all. A site of a cluster deletes only
        from shards that it owns; for any other shard it raises `ShardElsewhereError`, before anything is deleted.

        ``start``, ``until`` and ``by`` select the same messages as in `replay`. They are deleted in chunks,
        concurrently with readers and writers. The call is not atomic; if it is interrupted, call it again to delete the
        rest. ``by="timestamp"`` reads the matching messages, and writes once for each consecutive run to delete.
        Batches fetched after the call contain no deleted message, and cursors stay valid. Raises `GenerationError`, and
        deletes nothing, if matching messages are archived.
        """
        self.storage.check_may_write()
        return delete(self.storage, self._request(topic_filter, start, until, by, "any", BATCH_SIZE), shards)

    # --- generations ---

    def add_generation(self, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
        """Seal the current generation of every shard and begin a new one; return its number.

        The new generation has ``layout`` (by default that of the current generation) with ``options`` (by default those
        of the last generation with this layout, else the layout's defaults). If the call is interrupted between shards,
        opening the database completes it. Raises `UnknownPluginError`, `IncompatibleError`, `InvalidOptionError`.
        """
        return generations.add_generation(self.storage, layout, options)

    def generations(self) -> list[generations.GenerationInfo]:
        """Return the live generations, oldest first.

        A server of a cluster asks the others about shards that it doesn't keep. Shards of which no site answers are
        left out: see `GenerationInfo.missing`.
        """
        return generations.generation_infos(self.storage)

    def drop_generation(self, generation: int) -> bool:
        """Drop a sealed generation with all its messages; return False if it was already dropped.

        Its messages become invisible immediately and permanently. They are removed from disk before the call returns
        or, if the call is interrupted, when the database is opened again. Backends with the capability
        ``reclaims_disk`` free the disk space at that point. The exported files of an archived generation are kept.
        Raises `GenerationError` for the current generation and for a number that never existed.
        """
        return generations.drop_generation(self.storage, generation)

    # --- maintenance ---

    def compact(self, *, stop: Callable[[], bool] = never) -> CompactReport:
        """Compact everything stored before the call, if the layout supports compaction, and return a report.

        Compacted messages take fewer bytes, and a narrow filter reads a small part of them. Replays of everything and
        of the last minutes become slower, because a whole segment has to be sorted for them. With a backend that
        ``reclaims_disk``, obsolete data is removed from the disk before the call returns.

        Readers, cursors, writers and the order of messages are not affected. Each step is one atomic write, so a crash
        loses nothing. The call also counts the messages that `topics` would otherwise have to read. With
        ``auto_compact``, the database also compacts and counts in the background, but only where the gain is worth the
        work.

        ``stop`` is called before each step; when it returns True, the remaining steps are skipped.
        """
        return compact(self.storage, stop)

    def learned_topics(self, generation: int | None = None) -> dict[tuple[int, int], list[TopicNode]]:
        """Return the tree of topics that the layout has learned, by (shard, generation), of one or all generations.

        Parents come before children. Generations whose layout learns no structure are omitted.
        """
        return reports.learned_topics(self.storage, generation)

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run a read-only SQL statement, in DuckDB's dialect, on any backend, and return its result.

        ``parameters`` are the values of ``?`` or ``$1`` in the statement. The tables are:

        ``messages``: all messages stored before the call that the filter ``#`` matches, with the columns ``time``,
            ``timestamp``, ``topic``, ``client_id``, ``qos``, ``retain``, ``payload``, ``payload_bytes``,
            ``properties``, ``shard`` and ``position``. ``time`` is the time of the position, ``timestamp`` that of the
            message: ``SELECT payload FROM messages WHERE "timestamp" >= '2025-06-01 12:00:00+00'``.
        ``topics``, ``clients``: the results of `topics` and `clients`: ``topic`` or ``client_id``, ``messages``,
            ``bytes``, ``first`` and ``last``.
        ``latest``: the messages of `latest`, with the columns of `topicstore.SCHEMA`.

        Comparisons of ``topic``, ``client_id``, ``time``, ``timestamp``, ``shard`` and ``position`` with constants, by
        ``=``, ``IN``, ``<``, ``>`` or ``BETWEEN``, narrow the range that is read; ``LIKE`` doesn't. Only the columns
        that the statement uses are read. All times are in UTC. Results are in no order without ``ORDER BY``.

        If all generations have the layout `table` and there are no plugins, the statement is run within the engine:
        ``messages`` then also has topics that begin with ``$``, and the columns ``generation`` and ``stream``.

        A statement can name and read any file that the process can read, so never run one from a stranger. Raises
        `InvalidArgumentError` for a statement that is wrong or that writes, `BackendUnavailableError` if DuckDB isn't
        installed, and the errors of `replay`.
        """
        from .sql.statements import run

        return run(self.storage, statement, parameters)

    def checkpoint(self, path: str | Path) -> None:
        """Write a consistent copy of the database into the new directory ``path``.

        The copy of the shards is a consistent snapshot, for which writers wait only while it is taken. Each queue is
        copied by itself, at some time during the call. The copy is an independent database with the same id, so
        cursors are valid in both.

        Archived generations are not copied: both databases read the same exported files. If the path of an export was
        recorded as relative, the copy resolves it from its own directory; a warning reports a different path.
        Raises `UnsupportedError` if the backend lacks the capability ``checkpoint``, and `NotADatabaseError` if
        ``path`` exists.
        """
        checkpoints.checkpoint(self.storage, check_path(path), self.queues.write_copies)

    def verify(self, progress: Callable[[int], None] | None = None) -> reports.VerifyReport:
        """Read everything stored, check checksums, indexes and counts, and return a report of the damage.

        This covers the messages, the queues, the manifest, the exports of archived generations, and the state. The
        state records of sessions, retained messages, rules and retention are decoded; those of applications, imports
        and Spark are only read. Consistency between state records is not checked. ``progress`` is called with the
        number of messages read so far.
        """
        report = reports.verify(self.storage, state_decoders(), progress)
        return attrs.evolve(report, damages=[*report.damages, *self.queues.damages()])

    def info(self) -> DatabaseInfo:
        """Return sizes, generations and counters. This is cheap: it reads no messages.

        A server of a cluster asks the others about shards that it doesn't keep. Shards of which no site answers are
        left out: see `DatabaseInfo.missing`.
        """
        made = self._compaction, self._counting, self._retained_expiry, self._made_publisher, self._sessions
        return database_info(self.storage, self.retention, *made)

    # --- closing ---

    def close(self) -> None:
        """Flush the buffered writers, close the database and release its lock. This is idempotent.

        All parts are closed even if some of them fail; the errors are raised afterwards, several as an
        `ExceptionGroup`. If the call is interrupted, for example by Ctrl-C, the next call finishes it.

        A signal handler or destructor may call `close` while the same thread is inside another call of the database. It
        can't wait for that call, and so returns immediately. Another thread closes the database after the interrupted
        call has returned or raised `DatabaseClosedError`. The next `close`, the end of the ``with`` block, or the exit
        of the interpreter waits for that thread and raises its errors.
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
        close_all((*writers, *sessions, self.storage.close))

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
    """Return the decoders of all state records but those of queues, which are separate databases (`queues.record`)."""
    from .lifecycle import expiry, retention
    from .pubsub import persistence_rules
    from .sessions import clock as session_clock
    from .sessions import interest_notes, records
    from .sessions.shared import records as shared_records
    from .shard import interest_records
    from .storage import keyed_message_records

    return {
        **keyed_message_records.DECODERS,
        **persistence_rules.DECODERS,
        **retention.DECODERS,
        **expiry.DECODERS,
        **interest_records.DECODERS,
        **records.DECODERS,
        **session_clock.DECODERS,
        **interest_notes.DECODERS,
        **shared_records.DECODERS,
    }
