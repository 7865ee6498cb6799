"""`Database`: the public face of a store. `topicstore.opening` makes one."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from .contract.batch import MessageBatch
from .contract.engine import KEYSPACES, Backend, Engine
from .contract.errors import (
    DatabaseClosedError,
    DatabaseLockedError,
    DatabaseNotFoundError,
    InvalidArgumentError,
    InvalidIteratorError,
    NotADatabaseError,
    ReadOnlyDatabaseError,
    StorageFullError,
    UnsupportedError,
    WrongDatabaseError,
)
from .contract.iterators import Iterator as StreamIterator
from .contract.layout import Damage, TopicNode
from .contract.model import Message
from .contract.options import make_options, options_dict
from .contract.positions import first_position, to_microseconds
from .contract.replay_plan import Order
from .contract.requests import (
    Destinations,
    IterateRequest,
    NextResult,
    ReplayRequest,
    StoreRequest,
    StoreResult,
    Stream,
    StreamsRequest,
)
from .contract.state import StateWrite
from .contract.topics import TopicFilter
from .lifecycle.archives import Archives
from .lifecycle.retention import Retention
from .plugins import check_pair, data_path, load_target, registry
from .pubsub.publishing import PublishResult, publish
from .pubsub.retained import retained
from .queues.queue import Overflow, Queue, Queues
from .shard.generations import MakeLayout, OpenArchive, check_local
from .shard.identity import check_identity
from .shard.locks import holding
from .shard.policy import Policy
from .shard.shard import Shard
from .shard.state import ShardState
from .storage import replays as replaying
from .storage.archive_locations import archive_directory, location_of
from .storage.compaction import CompactionScheduler
from .storage.data_path import DataPath
from .storage.directory_lock import DirectoryLock
from .storage.keyed import damaged_kept, destinations, kept, kept_get
from .storage.manifest import Manifest, read_manifest, sync_directory, write_manifest
from .storage.read_only import Mode, ReadOnlyShards
from .storage.reports import CompactReport, DatabaseInfo, GenerationInfo, ShardInfo, VerifyReport
from .storage.shard_map import ShardMap
from .storage.writer import Writer

if TYPE_CHECKING:
    import pyarrow as pa

    from .lifecycle.exporting import ExportReport
    from .pubsub.hub import Hub
    from .pubsub.persistence_rules import Persistence
    from .pubsub.subscription import Subscription
    from .sessions import Sessions
    from .storage.explain import Explanation

__all__ = ["BATCH_SIZE", "Database"]

BATCH_SIZE = 4_096
"""Default messages a batch when reading."""


class Database:
    """An open database. Made by `topicstore.open`; close it, or use it as a context manager.

    All methods may be called from any thread. Times given to methods are microseconds since the
    epoch, or datetimes with a time zone (a `Message.timestamp` is microseconds); ``start`` is
    inclusive, ``until`` exclusive, and both are compared with positions.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        options: Mapping[str, Mapping[str, Any]],
        plugins: Sequence[str],
        clock: Callable[[], int],
        *,
        auto_compact: bool,
        read_only: bool = False,
        lazily: bool = False,
    ) -> None:
        self.path = path.absolute()  # the working directory may change
        self.manifest = manifest
        self.shards: Sequence[Shard] = ()
        """Internal to the framework."""
        self._reading: ReadOnlyShards | None = None
        self._closed = True  # until everything is open
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._writers: weakref.WeakSet[Writer] = weakref.WeakSet()
        self.listening: Hub | None = None
        """Internal to the framework: who follows what is stored; None as long as nobody ever did."""
        self._sessions: Sessions | None = None
        self._persistence: Persistence | None = None
        self._beginning = threading.RLock()
        self._maintainer: CompactionScheduler | None = None
        self.retention = Retention(self)
        """How long messages stay, and how many bytes of them."""
        self.queues = Queues(path, manifest, plugins, clock, read_only=read_only)
        """The queues of the database; `queue` opens one."""
        self._options = options
        self.id = bytes.fromhex(manifest.id)
        """Sixteen bytes, the same for all copies of the database, and in every iterator."""
        self._clock = clock
        self._shard_map = ShardMap(manifest.shards)
        self._backend_spec = registry().backend(manifest.backend)
        # Not a method: shards keep it, and would keep the database from being closed when it is dropped.
        self._make_layout = functools.partial(registry().make_layout, self._backend_spec)
        check_pair(self._backend_spec, registry().layout(manifest.layout))
        wrappers = [(name, registry().wrapper(name)) for name in plugins]
        self.plugins = tuple(plugins)
        self._check_option_names()
        engine_backend = self._make_backend()
        self._make_layout(manifest.layout, options.get(manifest.layout, {}))  # refuse bad options before any file
        self._local = DataPath(self.id, self._shard_map, clock)
        self._hooks = data_path(wrappers, self._local).hook
        self._lock: DirectoryLock | None = None
        try:
            with _full_disk_translated():
                if read_only:
                    self._open_to_read(engine_backend, lazily=lazily)
                else:
                    self._open_files(engine_backend)
            if auto_compact and not read_only:
                self._maintainer = CompactionScheduler(self.shards)
            self._local.shards = self.shards
            self._closed = False
            self._hooks.topicstore_opened(db=self)
        except BaseException:
            self._release()
            raise

    def _check_option_names(self) -> None:
        known = {self.manifest.backend, self.manifest.layout}
        for name in () if self.manifest.complete else self._options:  # else `_check_same` has seen to it
            if name not in known:
                raise InvalidArgumentError(
                    f"options are by plugin: {{'{self.manifest.backend}': {{...}}, "
                    f"'{self.manifest.layout}': {{...}}}}; {name!r} is neither. Other layouts get theirs "
                    "with add_generation"
                )

    def _make_backend(self) -> Backend:
        target: type[Backend] = load_target(self._backend_spec)
        return target(make_options(self.manifest.backend, target.Options, self._options.get(self.manifest.backend, {})))

    def _open_files(self, backend: Backend) -> None:
        persistent = "persistent" in self._backend_spec.capabilities
        creating = not self.manifest.complete
        if persistent:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.path)
            if creating:
                self._check_not_overtaken()
                write_manifest(self.path, self.manifest)
        policy, open_archive, self.shards = self._policy(), Archives(self.path, self.manifest.id).open, []
        for number in range(self.manifest.shards):
            engine = backend.open_shard(self.path / f"shard-{number:04}", KEYSPACES, create=creating)
            try:
                check_identity(engine, self.id, number)
                self.shards.append(Shard(number, engine, policy, self._make_layout, open_archive))
            except BaseException:
                engine.close()
                raise
        self._complete_generations()
        if creating:
            self.manifest = attrs.evolve(self.manifest, complete=True)
            if persistent:
                for shard in self.shards:
                    shard.flush()
                sync_directory(self.path)
                write_manifest(self.path, self.manifest)

    def _policy(self) -> Policy:
        return Policy(
            durability=self.manifest.durability,
            timestamps=self.manifest.timestamps,
            late=self.manifest.late,
            max_skew=self.manifest.max_skew,
            clock=self._clock,
        )

    def _open_to_read(self, backend: Backend, *, lazily: bool) -> None:
        if not self.manifest.complete:
            raise DatabaseNotFoundError(f"the database at {self.path} has not been made to its end; open it to write")
        open_archive = Archives(self.path, self.manifest.id).open
        make_shard = functools.partial(_shard_to_read, self.id, self._policy(), self._make_layout, open_archive)
        self._reading = ReadOnlyShards(self.path, self.manifest.shards, backend, make_shard, lazily=lazily)
        self.shards = self._reading.shards

    def _check_not_overtaken(self) -> None:
        """The manifest was looked for before the lock was held; somebody may have created one since."""
        there = read_manifest(self.path)
        if there is not None and there != self.manifest:
            raise DatabaseLockedError(f"{self.path} was created by somebody else at this moment; open it again")

    def _complete_generations(self) -> None:
        """Finish what was interrupted between shards: what one shard has done, all do."""
        newest = max(self.shards, key=lambda shard: shard.current)
        if newest.current == 0:
            newest.add_generation(self.manifest.layout, dict(self._options.get(self.manifest.layout, {})))
        wanted = {record.number: record for shard in self.shards for record in shard.generations()}
        for shard in self.shards:
            for number in range(shard.current + 1, newest.current + 1):
                record = wanted.get(number, wanted[newest.current])  # one dropped since is only passed through
                shard.add_generation(record.layout, record.options)
        live = set.intersection(*({r.number for r in shard.generations()} for shard in self.shards))
        for shard in self.shards:
            for record in shard.generations():
                if record.number not in live:
                    shard.drop_generation(record.number)
            shard.remove_dropped()

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
        self._check_open()
        return self.store_request(_as_batch(messages), state or {})

    def store_request(
        self,
        batch: MessageBatch,
        state: Mapping[int, Sequence[StateWrite]],
        destinations: Destinations | None = None,
    ) -> StoreResult:
        """Pass a batch that was checked, and state, to the hooks. Internal to the framework."""
        self._check_may_write()
        for shard in state:
            self._check_shard(shard)
        if len(batch) and (destinations is None or destinations.stored.any()):
            self.retention.check_room()
        request = StoreRequest(db=self, batch=batch, state=state, destinations=destinations)
        result: StoreResult = self._hooks.topicstore_store(request=request)
        if self._maintainer is not None:
            self._maintainer.stored(result.count)
        self.retention.stored()
        return result

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
        self._check_may_write()
        return publish(self, _as_batch(messages), state or {})

    @property
    def persistence(self) -> Persistence:
        """The rules by which published messages are stored."""
        with self._beginning:
            if self._persistence is None:
                from .pubsub.persistence_rules import Persistence

                self._persistence = Persistence(self)
            return self._persistence

    def retained(self, topic_filter: str) -> list[Message]:
        """Return the retained messages whose topics match, in order of topics; those that expired are left out."""
        return retained(self, TopicFilter(topic_filter), self.clock())

    def queue(
        self,
        name: str,
        *,
        max_messages: int | None = None,
        max_bytes: int | None = None,
        overflow: Overflow | None = None,
    ) -> Queue:
        """Return a queue of the database, making it where there is none: durable, bounded, first in first out.

        name:         any text; whom it is for, say.
        max_messages: how many may wait to be committed.
        max_bytes:    of their topics, client ids and payloads, and some 6 for each.
        overflow:     what `Queue.append` does where there is no room: ``"refuse"``, ``"drop_oldest"`` or
                      ``"drop_newest"``.

        Bounds are stored; None leaves one as it is. A new queue has none, and refuses. It keeps its
        messages apart from those of the database, and is closed with it; `checkpoint` leaves it out.
        """
        self._check_may_write()
        return self.queues.open(name, max_messages=max_messages, max_bytes=max_bytes, overflow=overflow)

    def store_kept(
        self,
        messages: Iterable[Message] | MessageBatch,
        keys: Sequence[bytes | None],
        *,
        shards: Sequence[int] | None = None,
        stored: Sequence[bool] | None = None,
        state: Mapping[int, Sequence[StateWrite]] | None = None,
    ) -> StoreResult:
        """Keep messages beside the streams, each as the last of its key. Internal to the framework.

        keys:   by message; None: not kept.
        shards: by message, where it is kept; by default in the shard of its client id.
        stored: by message, whether it also goes to the streams; by default none does.
        state:  as for `store`; all of a shard is committed in one engine write.
        """
        batch = _as_batch(messages)
        return self.store_request(batch, state or {}, destinations(self, batch, keys, shards, stored))

    def kept(self, shard: int, prefix: bytes) -> Iterator[tuple[bytes, Message]]:
        """Yield (key, message) of what a shard keeps under keys that begin so. Internal to the framework."""
        return kept(self, shard, prefix)

    def kept_get(self, shard: int, key: bytes) -> Message | None:
        """Return the message that a shard keeps under a key, or None. Internal to the framework."""
        return kept_get(self, shard, key)

    def writer(self, *, max_items: int = 1_000, flush_interval: float = 0.1) -> Writer:
        """Return a buffered writer. ``flush_interval`` is in seconds."""
        self._check_may_write()
        writer = Writer(self, max_items, flush_interval)
        self._writers.add(writer)
        return writer

    def shard_of(self, client_id: str) -> int:
        """Return the number of the shard that a publisher's messages go to."""
        return self._shard_map.of(client_id)

    @property
    def shard_map(self) -> ShardMap:
        """How client ids map to shards."""
        return self._shard_map

    def state(self, shard: int) -> ShardState:
        """Return the state keyspace of a shard: small values beside the messages."""
        self._check_shard(shard)
        found = self.shards[shard]
        return ShardState(found.reader, found.write_state)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self._check_open()
        for shard in self.shards:
            shard.flush()

    # --- reading ---

    def streams(self, topic_filter: str, start: int | datetime = 0) -> list[Stream]:
        """Return the streams that may hold matching messages at or after ``start``.

        Later calls may return more: new topics and generations bring new streams.
        """
        self._check_open()
        request = StreamsRequest(db=self, topic_filter=TopicFilter(topic_filter), start=to_microseconds(start))
        streams: list[Stream] = self._hooks.topicstore_streams(request=request)
        return streams

    def iterate(self, stream: Stream, topic_filter: str, start: int | datetime = 0) -> StreamIterator:
        """Return an iterator over a stream's matching messages at or after ``start``.

        Raises `GenerationDroppedError`, or `InvalidIteratorError` if there is no such stream.
        """
        if not isinstance(stream, Stream):
            raise InvalidArgumentError(f"iterate takes a Stream, not a {type(stream).__name__}")
        self._check_shard(stream.shard)
        parsed = TopicFilter(topic_filter)
        position = first_position(to_microseconds(start))
        return self.iterator_at(stream.shard, stream.generation, stream.number, parsed, position)

    def iterator_at(
        self, shard: int, generation: int, stream: int, topic_filter: TopicFilter, position: int
    ) -> StreamIterator:
        """Return an iterator over a stream, from a position on."""
        try:
            place = self.shards[shard].slab(generation).begin(stream, topic_filter, position)
        except KeyError as unknown:
            raise InvalidIteratorError(f"shard {shard}, generation {generation} has no stream {stream}") from unknown
        return StreamIterator(self.id, shard, generation, stream, topic_filter.text, place)

    def next(
        self,
        iterator: StreamIterator,
        limit: int = BATCH_SIZE,
        *,
        until: int | datetime | None = None,
        timeout: float | None = None,
    ) -> NextResult:
        """Fetch the next batch of an iterator: at most ``limit`` messages, in the stream's order.

        Messages from ``until`` on are left. After ``timeout`` seconds it returns what it has, and
        the iterator has moved on all the same. An empty batch is not the end; ``end_of_stream`` is.

        Raises `GenerationDroppedError`, `WrongDatabaseError`, `InvalidIteratorError`, `CorruptionError`.
        """
        end = None if until is None else to_microseconds(until)
        return self._next(iterator, limit, until=end, timeout=timeout)

    def _next(
        self,
        iterator: StreamIterator,
        limit: int,
        *,
        until: int | None = None,
        bound: int | None = None,
        timeout: float | None = None,
    ) -> NextResult:
        self._check_open()
        if not isinstance(iterator, StreamIterator):
            raise InvalidIteratorError(f"a {type(iterator).__name__} is not an iterator")
        if iterator.database != self.id:
            raise WrongDatabaseError("the iterator was made by another database")
        if not 0 <= iterator.shard < len(self.shards):
            raise InvalidIteratorError(f"there is no shard {iterator.shard}")
        _check_count("limit", limit)
        request = IterateRequest(db=self, iterator=iterator, limit=limit, until=until, bound=bound, timeout=timeout)
        result: NextResult = self._hooks.topicstore_iterate(request=request)
        return result

    def replay(
        self,
        topic_filter: str,
        start: int | datetime = 0,
        until: int | datetime | None = None,
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
        batches = self._batches(topic_filter, start, until, order, batch_size)
        return chain.from_iterable(map(MessageBatch.to_messages, batches))

    def replay_arrow(
        self,
        topic_filter: str,
        start: int | datetime = 0,
        until: int | datetime | None = None,
        *,
        order: Order | None = None,
        batch_size: int = BATCH_SIZE,
        ids: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Like `replay`, as record batches of at most ``batch_size`` rows of `topicstore.SCHEMA`.

        With ``ids``, of `topicstore.SCHEMA_WITH_IDS`. The batches can be stored elsewhere as they are.
        """
        batches = replaying.slices(self._batches(topic_filter, start, until, order, batch_size), batch_size)
        return (batch.to_arrow(ids=ids) for batch in batches)

    def _batches(
        self,
        topic_filter: str,
        start: int | datetime,
        until: int | datetime | None,
        order: Order | None,
        batch_size: int,
    ) -> Iterator[MessageBatch]:
        self._check_open()
        if order not in (None, "time"):
            raise InvalidArgumentError(f"order is None or 'time', not {order!r}")
        _check_count("batch_size", batch_size)
        request = ReplayRequest(
            db=self,
            topic_filter=TopicFilter(topic_filter),
            start=to_microseconds(start),
            until=None if until is None else to_microseconds(until),
            order=order,
            batch_size=batch_size,
        )
        plan = self._hooks.topicstore_replay(request=request)
        return replaying.run(plan, self.fetch)

    def fetch(self, iterator: StreamIterator, bound: int, limit: int) -> NextResult:
        """Fetch the next batch of an iterator, up to a position. Internal to the framework."""
        return self._next(iterator, limit, bound=bound)

    # --- following ---

    @property
    def hub(self) -> Hub:
        """Who follows what is stored. Internal to the framework."""
        self._check_may_write()  # who only reads isn't told of what is stored
        with self._beginning:
            if self.listening is None:
                from .pubsub.hub import Hub

                self._check_open()
                self.listening = Hub(self)
                for shard in self.shards:
                    with shard.lock:
                        shard.log.listener = self.listening
            return self.listening

    def subscribe(
        self,
        topic_filter: str,
        start: int | datetime | Mapping[int, int] | None = None,
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

        self._check_open()
        _check_count("batch_size", batch_size)
        if window is not None:
            _check_count("window", window)
        return Subscription(self, TopicFilter(topic_filter), start, window=window, batch_size=batch_size)

    @property
    def sessions(self) -> Sessions:
        """The durable sessions of the database (`topicstore.sessions`)."""
        with self._beginning:
            if self._sessions is None:
                from .sessions import Sessions
                from .sessions.database_parts import DatabaseParts

                self._check_open()
                self._sessions = Sessions(
                    DatabaseParts(
                        states=[self.state(shard) for shard in range(len(self.shards))],
                        shard_of=self._shard_map.of,
                        clock=self.clock,
                        hub=self.hub,
                        publish=self.publish,
                        retained=self.retained,
                        keyed=self,
                    )
                )
            return self._sessions

    @property
    def reading(self) -> Mode | None:
        """How the database is read that was opened with ``read_only``; None: it may be written.

        ``"read-only"``: beside whoever writes it, as of one moment; ``"owner"``: nobody else has it open, or can.
        """
        return None if self._reading is None else self._reading.mode

    def refresh(self) -> None:
        """See what was stored since the database was opened with ``read_only``, or last refreshed.

        Iterators and replays that have begun go on. Whoever may write sees everything anyway.
        Raises what `open` raises; then everything is as it was.
        """
        with self._closing:
            self._check_open()
            if self._reading is not None:
                self.shards = self._local.shards = self._reading.refresh()

    def clock(self) -> int:
        """Return the present: microseconds since the epoch, by the clock that the database was opened with."""
        return self._clock()

    # --- removing ---

    def delete(self, topic_filter: str, start: int | datetime = 0, until: int | datetime | None = None) -> int:
        """Delete the matching messages stored before the call; return how many there were.

        Works through them a chunk at a time, beside readers and writers: not atomic, but if it is
        interrupted, calling it again does the rest. Batches fetched after it returns hold none of
        them, and iterators stay valid. Raises `GenerationError`, and deletes nothing, if it reaches
        into a generation that was archived.
        """
        self._check_may_write()
        parsed = TopicFilter(topic_filter)
        first = first_position(to_microseconds(start))
        ends = [(shard, shard.watermark) for shard in self.shards]
        if until is not None:
            last = first_position(to_microseconds(until)) - 1
            ends = [(shard, min(mark, last)) for shard, mark in ends]
        # Of all shards, before the first deletes anything.
        check_local(found for shard, end in ends for found in shard.archived_in(first, end))
        try:
            return sum(shard.delete(parsed, first, end) for shard, end in ends if first <= end)
        finally:
            if self.listening is not None:
                self.listening.forget()

    # --- generations ---

    def add_generation(self, layout: str | None = None, options: Mapping[str, Any] | None = None) -> int:
        """Seal the current generation of every shard and begin a new one; return its number.

        The new one has ``layout`` (default: that of the current) with ``options`` (default: those
        of the last generation that has this layout, else the layout's own). If it is interrupted
        between shards, the next open goes on. Raises `UnknownPluginError`, `IncompatibleError`, `InvalidOptionError`.
        """
        self._check_may_write()
        before = self.shards[0].generations()
        name = layout or before[-1].layout
        if options is None:
            options = next((record.options for record in reversed(before) if record.layout == name), {})
        self._make_layout(name, options)
        with self._all_locked():
            self._check_writable()
            number = min(shard.current for shard in self.shards) + 1
            for shard in self.shards:
                if shard.current < number:  # else it was here that an earlier call was interrupted
                    shard.add_generation(name, dict(options))
        self.flush()
        self._hooks.topicstore_generation_added(db=self, generation=number)
        return number

    def generations(self) -> list[GenerationInfo]:
        """Return the live generations, oldest first."""
        self._check_open()
        with self._all_locked():  # else one shard may tell of a generation that another has dropped
            records = [{record.number: record for record in shard.generations()} for shard in self.shards]
        everywhere = sorted(set.intersection(*map(set, records)))
        return [
            GenerationInfo(
                number=same[0].number,
                layout=same[0].layout,
                options=options_dict(registry().full_options(same[0].layout, same[0].options)),
                created=min(record.created for record in same),
                sealed=None if same[0].sealed is None else max(record.sealed or 0 for record in same),
                messages=sum(record.messages for record in same),
                live_bytes=sum(record.live_bytes for record in same),
            )
            for same in ([of_shard[number] for of_shard in records] for number in everywhere)
        ]

    def drop_generation(self, generation: int) -> bool:
        """Drop a sealed generation with all its messages; False if it was dropped before.

        Invisible at once and for good; what it held is removed before it returns or, if it is
        interrupted, at the next open; the disk has its bytes back then if the backend
        ``reclaims_disk``. One that was archived is forgotten, and its files stay. Raises
        `GenerationError` for the current generation and for one that never was.
        """
        self._check_may_write()
        with self._all_locked():
            self._check_writable()
            for shard in self.shards:
                shard.check_droppable(generation)  # all, before the first does it
            dropped = [shard.drop_generation(generation) for shard in self.shards]
        if self.listening is not None and any(dropped):
            self.listening.dropped()
        self.flush()
        for shard in self.shards:
            shard.remove_dropped()
        if any(dropped):
            self._hooks.topicstore_generation_dropped(db=self, generation=generation)
        return any(dropped)

    def export(self, target: str | Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Write sealed generations, by default all, to the directory ``target`` as partitioned Parquet.

        One or more files for each generation of a shard (`topicstore.lifecycle.export_format`), rows in order of
        positions, as they are stored beneath plugins; each is read back and compared row by row. What is
        there already is passed over, so an export that was interrupted, or has to grow, is simply called again. What
        it wrote is on disk when it returns.

        Raises `GenerationError` for the current generation and for one that isn't there,
        `ManifestMismatchError` if the directory holds something else or lies inside the database, `CorruptionError`,
        `OSError`.
        """
        from .lifecycle.exporting import export

        self._check_open()
        return export(self, Path(target), generations)

    def archive(self, target: str | Path, *, generations: Sequence[int] | None = None) -> ExportReport:
        """Export sealed generations, by default all that are local, and have their messages there only.

        Everything reads them from the export as if they were local, with streams and iterators of their own;
        nothing can be deleted from them. What is there already is compared row by row, too. Where the export is
        and that the local messages are gone is one write for each shard: a crash leaves
        either. An absolute ``target`` is noted as it is, another as it lies from the database's directory, so
        that both can be moved together. One that was archived elsewhere is copied, and read from the new place.
        Deletes wait while a generation is archived.

        Iterators and replays under way in a generation raise `GenerationArchivedError`; subscriptions and
        sessions go on. Raises what `export` raises; then nothing local is gone.
        """
        from .lifecycle.exporting import archive

        self._check_may_write()
        return archive(self, location_of(self.path, Path(target)), generations)

    def archived(self) -> dict[int, Path]:
        """Return the generations that were archived, oldest first, and in which exports they are."""
        self._check_open()
        return {
            record.number: archive_directory(self.path, record.archive)
            for record in self.shards[0].generations()
            if record.archive is not None
        }

    def _check_writable(self) -> None:
        for shard in self.shards:
            shard.check_writable()

    def _all_locked(self) -> contextlib.AbstractContextManager[None]:
        return holding(shard.lock for shard in self.shards)

    # --- care ---

    def compact(self) -> CompactReport:
        """Bring everything stored before the call into the form that is read fastest; say what it did.

        Layouts that merge do so whole; what is obsolete then is gone from the disk, if the backend
        ``reclaims_disk``. Readers, iterators, order and writers notice nothing, and a crash loses
        nothing: each step is one atomic write. Without the call, it happens in the background as
        far as it is worth it (``auto_compact``).
        """
        self._check_may_write()
        started, before = time.perf_counter(), self.info()
        messages = sum(shard.compact(whole=True) for shard in self.shards)
        for shard in self.shards:
            shard.reclaim()
        after = self.info()
        return CompactReport(
            messages=messages,
            live_bytes_before=before.live_bytes,
            live_bytes_after=after.live_bytes,
            disk_bytes_before=before.disk_bytes,
            disk_bytes_after=after.disk_bytes,
            seconds=time.perf_counter() - started,
        )

    def explain(
        self,
        topic_filter: str,
        start: int | datetime = 0,
        until: int | datetime | None = None,
        *,
        order: Order | None = None,
    ) -> Explanation:
        """Run a replay and say what it read, and passed over, to find its messages; it can be printed."""
        from .storage.explain import explain

        return explain(self, topic_filter, start, until, order=order)

    def topics(self, generation: int | None = None) -> dict[tuple[int, int], list[TopicNode]]:
        """Return what each (shard, generation), or those of one generation, learned of its topics' structure.

        Parents come before children. Layouts that learn nothing are left out.
        """
        self._check_open()
        found = {
            (shard.number, record.number): list(slab.learned())
            for shard in self.shards
            for record, slab in shard.slabs()
            if generation in (None, record.number)
        }
        return {place: nodes for place, nodes in found.items() if nodes}

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> pa.Table:
        """Run an SQL statement that only reads over the messages of all shards; return what it gives.

        For layouts that keep messages as rows, which say what tables there are: `table`, on DuckDB,
        has `messages`. It sees what is stored at this moment, as it is stored: plugins that change
        messages on their way in and out don't see it. Generations of other layouts, and those that were
        archived, are left out, with a warning. Raises `InvalidArgumentError` for a statement that is wrong or writes,
        `UnsupportedError` if there is nothing that speaks SQL.
        """
        self._check_open()
        if "sql" not in self._backend_spec.capabilities:
            raise UnsupportedError(f"backend {self.manifest.backend!r} does not speak SQL")
        others = {
            record.number: record.layout
            for record in self.shards[0].generations()
            if "sql" not in registry().layout(record.layout).requires or record.archive is not None
        }
        if len(others) == len(self.shards[0].generations()):
            names = ", ".join(sorted(set(others.values())))
            raise UnsupportedError(f"layout {names} keeps no rows that SQL can be run over; layout table does")
        if others:
            named = ", ".join(f"{number} ({layout})" for number, layout in sorted(others.items()))
            warnings.warn(f"SQL does not see generations that keep no rows here: {named}", stacklevel=2)
        first, *rest = (shard.engine() for shard in self.shards)
        return first.sql(statement, parameters, beside=rest)

    def checkpoint(self, path: str | Path) -> None:
        """Write a copy of the database, as it is now, into the new directory ``path``.

        A consistent one over all shards, a database of its own with the same id (so iterators are
        valid in both). What was archived stays in its export, which both read; if that was noted by a relative
        path, the copy looks for it from where it is itself, and a warning says so if that is another place. Raises
        `UnsupportedError` where the backend lacks ``checkpoint``, `NotADatabaseError` if ``path`` exists.
        """
        self._check_may_write()
        target = Path(path)
        if "checkpoint" not in self._backend_spec.capabilities:
            raise UnsupportedError(f"backend {self.manifest.backend!r} can't make checkpoints")
        if target.resolve().is_relative_to(self.path.resolve()):
            raise NotADatabaseError(f"{target} lies inside the database; a checkpoint needs a place of its own")
        if target.exists():
            raise NotADatabaseError(f"{target} exists already; a checkpoint needs a new directory")
        draft = target.with_name(f"{target.name}.unfinished-{os.getpid()}")
        draft.mkdir(parents=True)
        try:
            with self._all_locked():
                for shard in self.shards:
                    shard.engine().checkpoint(draft / f"shard-{shard.number:04}")
            write_manifest(draft, self.manifest)
            draft.rename(target)  # only what is whole gets the name
            sync_directory(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        self._warn_of_other_archives(target)

    def _warn_of_other_archives(self, copy: Path) -> None:
        """Say which exports a copy looks for elsewhere than this database does."""
        locations = {record.archive for record in self.shards[0].generations() if record.archive is not None}
        for location in sorted(locations):
            here, there = archive_directory(self.path, location), archive_directory(copy, location)
            if here != there:
                warnings.warn(
                    f"what was archived to {here} is noted by a relative path: {copy} looks for it in {there}",
                    stacklevel=3,
                )

    def verify(self, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read everything, check checksums, indexes and counts, and say what is damaged.

        ``progress`` is called with the number of messages read so far.
        """
        self._check_open()
        messages, damages = 0, []
        for shard in self.shards:
            for found in chain(shard.verify(), damaged_kept(shard)):
                if isinstance(found, Damage):
                    damages.append(found)
                else:
                    messages += found
                    if progress is not None:
                        progress(messages)
        return VerifyReport(messages=messages, damages=damages)

    def info(self) -> DatabaseInfo:
        """Return sizes, generations and counters. Cheap: reads no messages."""
        generations = self.generations()
        shards = [self._shard_info(shard) for shard in self.shards]
        return DatabaseInfo(
            path=str(self.path),
            id=self.manifest.id,
            backend=self.manifest.backend,
            layout=generations[-1].layout,
            durability=self.manifest.durability,
            timestamps=self.manifest.timestamps,
            plugins=self.plugins,
            streams=sum(slab.streams for shard in shards for slab in shard.slabs.values()),
            messages=sum(generation.messages for generation in generations),
            live_bytes=sum(generation.live_bytes for generation in generations),
            disk_bytes=sum(shard.disk_bytes for shard in shards),
            compaction_failure=None if self._maintainer is None else self._maintainer.failure,
            retention=self.retention.settings,
            retention_failure=self.retention.failure,
            generations=generations,
            shards=shards,
        )

    def _shard_info(self, shard: Shard) -> ShardInfo:
        stats = shard.engine().stats()
        slabs = {record.number: slab for record, slab in shard.slabs()}
        return ShardInfo(
            number=shard.number,
            watermark=shard.watermark,
            last_position=shard.last_position,
            ahead=shard.ahead(),
            lifted=shard.lifted,
            failure=shard.failure,
            disk_bytes=stats.disk_bytes,
            memory_bytes=stats.memory_bytes,
            counters=shard.counters,
            reads={number: slab.counters for number, slab in slabs.items()},
            slabs={number: slab.info() for number, slab in slabs.items()},
            engine=dict(stats.details),
        )

    def close(self) -> None:
        """Store what its writers hold, close the database and give back its lock. May be called twice."""
        with self._closing:
            if not self._closed:
                try:
                    for writer in list(self._writers):
                        writer.close()
                    if self._sessions is not None:
                        self._sessions.close()
                    if self.listening is not None:
                        self.listening.close()
                    self._hooks.topicstore_closed(db=self)
                finally:
                    self._release()

    def _release(self) -> None:
        self._closed = True
        if self.listening is not None:
            self.listening.close()
        if self._maintainer is not None:
            self._maintainer.stop()
        self.retention.stop()
        self.queues.close()
        with contextlib.ExitStack() as undo:
            if self._lock is not None:
                undo.callback(self._lock.release)
            if self.listening is not None:
                undo.callback(self.listening.join)
            if self._reading is not None:
                undo.callback(self._reading.close)
            else:
                for shard in self.shards:
                    undo.callback(shard.close)

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseClosedError(f"the database at {self.path} is closed")
        if os.getpid() != self._owner:
            raise DatabaseClosedError(
                f"the database at {self.path} was opened by process {self._owner}; a fork can't use it"
            )

    def _check_may_write(self) -> None:
        self._check_open()
        if self._reading is not None:
            raise ReadOnlyDatabaseError(
                f"the database at {self.path} was opened with read_only=True: it can be read and refreshed, no more"
            )

    def _check_shard(self, shard: int) -> None:
        self._check_open()
        if not isinstance(shard, int) or not 0 <= shard < len(self.shards):
            raise InvalidArgumentError(f"there is no shard {shard!r}; they go from 0 to {len(self.shards) - 1}")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._owner:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Database {self.path} {self.manifest.backend}/{self.manifest.layout}{' closed' * self._closed}>"


def _shard_to_read(
    database: bytes, policy: Policy, make_layout: MakeLayout, open_archive: OpenArchive, number: int, engine: Engine
) -> Shard:
    """Return a shard to which nothing is added. Not a method: see `Database.__init__`."""
    check_identity(engine, database, number)
    if policy.durability == "sync":
        engine.flush_log()  # nothing may be seen that power loss could take
    return Shard(number, engine, policy, make_layout, open_archive, read_only=True)


@contextlib.contextmanager
def _full_disk_translated() -> Iterator[None]:
    """Tell a full disk apart from what else can be wrong with a directory."""
    try:
        yield
    except OSError as bad:
        if bad.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError(str(bad)) from bad
        raise


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidArgumentError(f"{name} is a whole number of at least 1")


def _as_batch(messages: Iterable[Message] | MessageBatch | pa.RecordBatch) -> MessageBatch:
    if isinstance(messages, MessageBatch):
        return messages.checked()  # its constructor checks nothing
    if hasattr(messages, "num_rows") and hasattr(messages, "schema"):
        import pyarrow as pa

        if isinstance(messages, pa.Table):
            return MessageBatch.concat([MessageBatch.from_arrow(batch) for batch in messages.to_batches()])
        return MessageBatch.from_arrow(messages)
    if isinstance(messages, Iterable) and not isinstance(messages, (Message, str, bytes)):
        return MessageBatch.from_messages(messages)
    raise InvalidArgumentError(
        f"store takes messages (a list, say), a MessageBatch or a RecordBatch, not a {type(messages).__name__}"
    )
