"""The function through which every write of a shard goes, and the state that its lock guards.

Positions are assigned and committed under one lock, so no reader sees a position before a lower one. Readers see up
to the watermark. It moves after the commit or, with ``durability="sync"``, after the flush, so that readers never see
a message that a power failure could undo. Flushes are shared: one serves every batch that was written before it began
(group commit, as in DeWitt et al., "Implementation techniques for main memory database systems", 1984).

The counters of a shard, which start at 0 when it is opened.

How much later the times of a shard's positions are than its messages' own, where positions go by those.

Stored form (state keyspace, the key begins with a zero byte; absent as long as it is 0)::

    00 "displacement" -> record (see `topicstore.shard.record_codec`) of version 1, microseconds

How long a shard's batches take, as histograms, which start empty when it is opened.

The settings of a database that concern writing.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, Protocol

import attrs
import msgspec
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Constant, to_integers
from topicstore.contract.engine import STATE, Engine, Reader, WriteBatch
from topicstore.contract.errors import (
    DatabaseClosedError,
    ReadOnlyDatabaseError,
    ShardReadOnlyError,
)
from topicstore.contract.positions import COUNTER_BITS, MAX_TIME
from topicstore.runtime.locks import FairLock, owned

from .record_codec import RecordCodec
from .records import Tail, load_tail, put_tail

__all__ = [
    "BOUNDS",
    "CommitListener",
    "CommitLog",
    "Latencies",
    "NoteSynced",
    "ShardCounters",
    "ShardLatencies",
    "Ticket",
    "WriteSettings",
    "displacement_of",
    "load_displacement",
    "put_displacement",
]


@attrs.define
class ShardCounters:
    """Work done and time spent since the database was opened. Times are in seconds.

    Writes are counted under the shard's lock. Reads are counted without a lock, so one of two at once may be missed.
    """

    batches: int = 0
    """Batches committed."""
    messages: int = 0
    """Messages committed."""
    bytes: int = 0
    """Bytes of the values written for the messages, indexes and state included."""
    payload_bytes: int = 0
    """Bytes of the payloads of the messages committed."""
    failed_batches: int = 0
    """Batches that were refused by the shard or could not be written, and those whose flush failed, which `batches` has
    too. Counted for each shard that a batch did not get into."""
    failures: int = 0
    """Writes and flushes that failed, and notes of what is on disk that failed."""
    commit_seconds: float = 0.0
    """Seconds spent in the engine's writes."""
    flushes: int = 0
    """Flushes of the engine's log; with ``durability="sync"`` one may serve many batches."""
    flush_seconds: float = 0.0
    deleted: int = 0
    """Messages deleted."""
    compacted: int = 0
    """Messages rewritten by compactions."""
    reads: int = 0
    """Batches read by cursors."""
    read_messages: int = 0
    """Messages in those batches."""
    read_seconds: float = 0.0
    """Seconds spent reading them."""
    state_writes: int = 0
    """Commits of state without messages, such as those of sessions that deliver."""


_VERSION = 1
_KEY = b"\0displacement"


class _Displacement(msgspec.Struct, frozen=True, array_like=True):
    version: int
    microseconds: int


_CODEC = RecordCodec(_Displacement, _VERSION)


def load_displacement(reader: Reader) -> int:
    """Return the stored displacement in microseconds."""
    data = reader.get(STATE, _KEY)
    return 0 if data is None else _CODEC.decode(_KEY, data, "state: displacement").microseconds


def put_displacement(batch: WriteBatch, microseconds: int) -> None:
    """Add the displacement to a write."""
    batch.put(STATE, _KEY, _CODEC.encode(_KEY, _Displacement(_VERSION, microseconds)))


def displacement_of(placed: MessageBatch) -> int:
    """Return the most microseconds by which the time of a position in a batch is later than its message's own."""
    times = (placed.positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    own = placed.timestamps
    return int((times - (own.value if isinstance(own, Constant) else to_integers(own))).max())


BOUNDS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The longest duration of each class, in seconds; one more class has those that took longer."""


class Latencies:
    """Durations by class. Observed without a lock, so one of two at once may be missed."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """How many durations there were in each class of `BOUNDS`, and how many above them."""
        self.seconds = 0.0
        """All of them together."""

    def observe(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


class ShardLatencies:
    """The durations of one shard's work."""

    __slots__ = ("read", "store")

    def __init__(self) -> None:
        self.store = Latencies()
        """From a batch's arrival, with its wait for the shard, until it was as durable as promised, and visible."""
        self.read = Latencies()
        """Of reading the next messages of a stream."""


@attrs.frozen(kw_only=True)
class WriteSettings:
    """The settings by which a shard assigns positions and makes messages durable."""

    durability: str
    timestamps: str
    late: str
    max_skew: float
    """The number of seconds by which a message's own time may be ahead of the clock."""
    synced_at_once: bool
    """Whether the engine syncs every write, whatever the durability."""
    clock: Callable[[], int]
    """A function that returns the present time in microseconds since the epoch."""

    def now(self) -> int:
        """Return the present time, clamped to the range of positions, from 1970 to 2255."""
        return min(max(self.clock(), 0), MAX_TIME)


NoteSynced = Callable[[int, int, int], bool]
"""A function that records that everything up to a write of a shard is on disk: (shard, number of the write, its
position). It returns whether that succeeded, and raises nothing."""


class CommitListener(Protocol):
    """An object that is notified of the messages that a shard commits."""

    def announce(self, shard: int, batch: MessageBatch) -> object:
        """Called under the shard's lock before messages are committed. The result is passed to `visible`."""

    def committed(self, shard: int) -> None:
        """Called under the shard's lock when the engine has taken what was announced last, visible or not."""

    def visible(self, shard: int, told: object) -> None:
        """Called, without a lock, when the announced messages can be read, or when it is certain that they never can.

        ``told`` is the result of `announce`.
        """


class Ticket(NamedTuple):
    """The argument with which `CommitLog.settle` makes a write durable and visible."""

    written: int
    """The number of the write."""
    told: object = None
    """The result of `CommitListener.announce`."""


class CommitLog:
    """The engine of one shard, the lock that all writers of the shard take, and the watermark of its readers."""

    def __init__(
        self, number: int, engine: Engine, policy: WriteSettings, note_synced: NoteSynced, *, read_only: bool
    ) -> None:
        self.number = number
        self.engine = engine
        """The engine. Use it through `reader` or `open_engine`, which check that the shard is open."""
        self.policy = policy
        self._note_synced = note_synced
        self.read_only = read_only
        """Whether the engine is a view of one moment, which is never written."""
        self.counters = ShardCounters()
        self.latencies = ShardLatencies()
        self.lock = FairLock()
        """The lock that guards everything that is written, and the state in memory that depends on it."""
        self.moved_on = threading.Condition(self.lock)
        """A condition that is notified when the last position moves, a generation is added, or the shard fails or is
        closed."""
        self.listener: CommitListener | None = None
        """The listener that is notified of every batch, or None. Guarded by `lock`."""
        self.tail = load_tail(engine)
        """The shard's tail. Guarded by `lock`; replaced as a whole, so it can be read without the lock."""
        self.last_commit = time.monotonic()
        """The time (`time.monotonic`) at which the last position moved. Guarded by `lock`."""
        self.watermark = self.tail.last_position
        """The highest position that readers may see. Moved by commits or flushes; it can be read without a lock."""
        self._failure: BaseException | None = None
        """The error of a write, set under `lock`, or of a flush, set under `_flush_lock`. It can be read without a
        lock."""
        self._end = (self.tail.writes, self.watermark)
        """The last write and its position, set in one step. Guarded by `lock`; read without it by `_flush`."""
        self._flush_lock = FairLock()
        self._flushed = self.tail.writes if read_only else self.tail.writes - 1
        """The number of the last write that is known to be flushed. After the opening it is one less than the last
        write, so that the first flush isn't skipped. Guarded by `_flush_lock`."""
        self._note_lock = FairLock()
        """Held while a note is written, so that a note never waits for a flush. It is taken after all other locks."""
        self._reached = self._noted = (0, 0)
        """The last write that is known to be on disk, and the last one that was noted, each with its position. Guarded
        by `_note_lock`. The order of the locks is `lock`, `_flush_lock`, `_note_lock`."""
        self._closing = False
        """Whether the shard may no longer be used. It is set under `lock` and `_flush_lock` together, and can be read
        without them."""
        self.closed = False
        """Whether the engine has been closed, too. Guarded like `_closing`."""
        self._owner = os.getpid()
        if not read_only:
            self.settle(self.last_ticket())

    @property
    def failure(self) -> str | None:
        """The reason why the shard takes no writes, or None."""
        return None if self._failure is None else str(self._failure) or type(self._failure).__name__

    def last_ticket(self) -> Ticket:
        """Return a ticket that settles everything written so far."""
        return Ticket(self._end[0])

    # --- writing ---

    def commit_locked(
        self,
        write: WriteBatch,
        tail: Tail,
        adopt: Callable[[], object] | None = None,
        batch: MessageBatch | None = None,
    ) -> Ticket:
        """Announce a batch, apply its write, and call ``adopt``, which brings the state in memory up to date.

        Returns the ticket with which `settle` makes the write durable and visible. Any exception, Ctrl-C included,
        closes the shard to writes, because the state in memory may differ from the engine's. Every write includes the
        tail with the number of the write, so that a lost write is detected.
        """
        started = time.perf_counter()
        told = None
        if batch is not None and self.listener is not None:  # so that a caught-up reader knows its place
            told = self.listener.announce(self.number, batch)
        try:
            tail = msgspec.structs.replace(tail, writes=self.tail.writes + 1)
            put_tail(write, tail)
            self.engine.write(write)
            if adopt is not None:
                adopt()
            if tail.last_position != self.tail.last_position:
                self.last_commit = time.monotonic()
                self.moved_on.notify_all()
            self.tail = tail
            self._end = (tail.writes, tail.last_position)
            if told is not None and self.listener is not None:
                self.listener.committed(self.number)
        except BaseException as error:
            self.fail(error)
            raise
        self.counters.commit_seconds += time.perf_counter() - started
        self.counters.bytes += write.size
        if self.policy.durability == "commit":
            self.watermark = tail.last_position
        return Ticket(tail.writes, told)

    def settle(self, ticket: Ticket) -> None:
        """Complete a write. The lock must not be held, so that other writes can share the flush.

        With ``durability="sync"``, flush the write of this ticket unless another flush has done it, and let readers
        see it. Then notify the listener, even if the flush failed. The flushed writes are noted as being on disk.
        """
        try:
            if self.policy.durability == "sync":
                self._flush(ticket.written)
            elif self.policy.synced_at_once:
                self._note(self._end)
        finally:
            if ticket.told is not None and self.listener is not None:
                self.listener.visible(self.number, ticket.told)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self._flush(self._end[0])
        self._note(self._reached)  # again, if the last note failed

    def _flush(self, ticket: int) -> None:
        """Flush, unless another flush has served the write of this number."""
        with self._flush_lock:
            if self._flushed >= ticket:
                return  # a flush that began after this write has served it
            self.check_writable()
            end = self._end
            started = time.perf_counter()
            try:
                self.engine.flush_log()
            except BaseException as error:
                self.fail(error)
                raise
            self.counters.flushes += 1
            self.counters.flush_seconds += time.perf_counter() - started
            self._flushed, position = end
            if self.policy.durability == "sync":  # otherwise it moved with the commit
                self.watermark = position
            self._note(end)

    def _note(self, end: tuple[int, int]) -> None:
        """Record that everything up to a write is on disk, and note it."""
        with self._note_lock:
            self._reached = max(end, self._reached)
            if self._noted < self._reached:
                if self._note_synced(self.number, *self._reached):
                    self._noted = self._reached
                else:
                    self.counters.failures += 1

    def begin_again_locked(self, adopt: Callable[[], object]) -> None:
        """Take writes again: read the tail again from the engine, which was opened again, and call ``adopt``.

        ``adopt`` reads again what else is kept in memory. Nothing may be written meanwhile, as `lock` ensures. The last
        position doesn't fall below those that readers have seen, even if the writes of these have vanished.
        """
        with self._flush_lock:
            stored = load_tail(self.engine)
            position = max(stored.last_position, self.watermark)
            last_time = max(stored.last_time, self.tail.last_time)
            adopt()
            self.tail = msgspec.structs.replace(stored, last_position=position, last_time=last_time)
            self._end = (stored.writes, position)
            self._flushed = stored.writes - 1
            self._failure = None
            if self.policy.durability == "commit":
                self.watermark = position
            self.moved_on.notify_all()

    def fail(self, error: BaseException) -> None:
        """Close the shard to writes because of an error.

        A failed flush isn't tried again, because the kernel may have dropped the data that it could not write: see
        Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
        """
        self._failure = error
        self.counters.failures += 1
        if owned(self.lock):  # otherwise threads that wait for the end of an epoch look again soon
            self.moved_on.notify_all()

    # --- opening and closing ---

    def open_engine(self) -> Engine:
        """Return the engine. Raises `DatabaseClosedError` after the close, and in a forked process."""
        self.check_open()
        return self.engine

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` after the close, and in a process that was forked since the opening."""
        if self._closing:
            raise DatabaseClosedError("the database is closed")
        if os.getpid() != self._owner:
            raise DatabaseClosedError(f"the database was opened by process {self._owner}; a fork can't use it")

    def check_writable(self) -> None:
        """Raise an error if the shard takes no writes.

        The error is `ShardReadOnlyError` if an earlier write failed, `DatabaseClosedError` after the close, and
        `ReadOnlyDatabaseError` if the database was opened for reading.
        """
        self.check_open()
        if self.read_only:
            raise ReadOnlyDatabaseError("the database was opened with mode='r'; another mode lets you write")
        if self._failure is not None:
            raise ShardReadOnlyError(
                f"shard {self.number} takes no writes since one failed ({self.failure}); "
                "remove the cause, then call recover(), or close and open the database"
            ) from self._failure

    def close(self, forget: Callable[[], object]) -> None:
        """Close the engine, after ``forget`` has dropped the objects that read from it. May be called twice.

        A close that was interrupted is finished by the next call.
        """
        if os.getpid() != self._owner:
            return  # the engine's threads and files are the other process's
        with self.lock, self._flush_lock:
            if self.closed:
                return
            try:
                if not self._closing and not self.read_only and self._failure is None:
                    self.flush()  # after an orderly close everything is on disk, whatever the durability
            finally:
                self._closing = True
                self.moved_on.notify_all()
                forget()
                self._close_engine_locked()

    @property
    def closed_in_order(self) -> bool:
        """Whether the shard was closed, every write is on disk, and nothing failed or was interrupted."""
        return self.closed and self._failure is None and self._flushed >= self._end[0]

    def _close_engine_locked(self) -> None:
        try:
            self.engine.close()
        except BaseException as failed:
            self._failure = self._failure or failed
            self.closed = isinstance(failed, Exception)  # then everything is released; otherwise it was interrupted
            raise
        self.closed = True
