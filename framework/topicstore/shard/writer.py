"""`ShardWriter`, the only code that writes to a shard's engine, and `PendingWrite`, one change of a shard.

Positions are assigned and committed under one lock, so no reader sees a position before a lower one. Readers see up
to the watermark. The watermark advances after the commit or, with ``durability="sync"``, after the fsync, so that a
power failure can't undo a message that readers have seen. Fsyncs are shared: one covers every batch that was written
before it began (group commit, as in DeWitt et al., "Implementation techniques for main memory database systems", 1984).

A write has four steps. The first three run under the locks of all shards of a batch: `prepare_locked`, `encode_locked`
and `commit_locked`, each for all shards before the next. So no part of a batch is stored if one shard refuses a
message. `finish_commit` follows without the lock, so that writes share fsyncs.

The displacement of a shard is the maximum time by which positions are later than the timestamps of their messages, with
``timestamps="message"``. It is stored in the state keyspace, unless it is 0::

    00 "displacement" -> record (see `topicstore.shard.record_codec`) of version 1, microseconds
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Column, Constant, to_integers, to_iterable, to_list
from topicstore.contract.engine import STATE, Engine, Reader, WriteBatch
from topicstore.contract.errors import (
    DatabaseClosedError,
    EngineError,
    GenerationError,
    LateMessageError,
    ReadOnlyDatabaseError,
    RecoverableError,
    ShardElsewhereError,
    ShardReadOnlyError,
    TimestampAheadError,
)
from topicstore.contract.forking import remember
from topicstore.contract.layout import Slab
from topicstore.contract.positions import (
    COUNTER_BITS,
    MAX_TIME,
    Times,
    commit_position,
    consecutive_positions,
    late_rows,
    message_positions,
    span_text,
    time_of,
)
from topicstore.contract.state import StateWrite
from topicstore.runtime.locks import FairLock, check_not_owned, owned
from topicstore.runtime.warning import warn_caller

from .damaged_slab import DamagedSlab
from .record_codec import RecordCodec
from .records import PROGRESS, Tail, load_tail, put_tail
from .state import HEAD, OWN, Applied, ProposedState, stage
from .zones import Zone, fill, put_zone

__all__ = [
    "BOUNDS",
    "AddGeneration",
    "Change",
    "ChangeLog",
    "CommitListener",
    "Delete",
    "DropGeneration",
    "Latencies",
    "LogFullError",
    "PendingWrite",
    "RecordRecoveryPoint",
    "ShardCounters",
    "ShardLatencies",
    "ShardWriter",
    "WritePolicy",
    "displacement_of",
    "load_displacement",
    "put_displacement",
]


_SET_BACK = 1_000_000
"""The minimum number of microseconds by which the clock must be behind the last position to cause a warning. Adjusting
the clock commonly sets it back by less."""
_MANY = 64
"""The minimum number of messages whose timestamps are converted to an array, which later steps share."""


@attrs.define
class ShardCounters:
    """Work done and time spent since the database was opened. Times are in seconds.

    Writes are counted under the shard's lock. Reads are counted without a lock, so concurrent reads may lose counts.
    """

    batches: int = 0
    """Batches committed."""
    messages: int = 0
    """Messages committed."""
    bytes: int = 0
    """Bytes of all values written, including indexes and state."""
    payload_bytes: int = 0
    """Bytes of the payloads of the messages committed."""
    failed_batches: int = 0
    """Batches that the shard refused or failed to write, and those whose fsync failed, which `batches` counts, too. A
    batch is counted in each shard in which it failed."""
    failures: int = 0
    """Writes, fsyncs and records of the last fsynced write (`RecordRecoveryPoint`) that failed."""
    commit_seconds: float = 0.0
    """Seconds spent in the engine's writes."""
    flushes: int = 0
    """Fsyncs of the engine's log; with ``durability="sync"`` one may cover many batches."""
    flush_seconds: float = 0.0
    """Seconds spent in these fsyncs."""
    deleted: int = 0
    """Messages deleted."""
    compacted: int = 0
    """Messages rewritten by compactions."""
    reads: int = 0
    """Batches read by cursors and for counts."""
    read_messages: int = 0
    """Messages in those batches."""
    read_seconds: float = 0.0
    """Seconds spent reading these batches."""
    state_writes: int = 0
    """Commits of state without messages, such as the progress of sessions."""


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
    """Add a record to a write: the microseconds by which positions are ahead of the clock."""
    batch.put(STATE, _KEY, _CODEC.encode(_KEY, _Displacement(_VERSION, microseconds)))


def displacement_of(placed: MessageBatch) -> int:
    """Return the maximum by which a position's time in a batch is later than the message's own, in microseconds."""
    times = (placed.positions >> np.uint64(COUNTER_BITS)).astype(np.int64)
    own = placed.timestamps
    return int((times - (own.value if isinstance(own, Constant) else to_integers(own))).max())


BOUNDS = (
    *(50e-6, 100e-6, 250e-6, 500e-6),
    *(1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""The upper bounds of the histogram's buckets in seconds, inclusive; a last bucket has all longer durations."""


class Latencies:
    """A histogram of durations. It is updated without a lock, so concurrent updates may lose counts."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """The number of durations in each bucket of `BOUNDS`, and in the bucket of longer ones."""
        self.seconds = 0.0
        """The sum of all durations."""

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds


class ShardLatencies:
    """Histograms of the durations of one shard's stores and reads."""

    __slots__ = ("read", "store")

    def __init__(self) -> None:
        self.store = Latencies()
        """Durations from a batch's arrival, including the wait for the shard's lock, until it was durable and visible.
        """
        self.read = Latencies()
        """Durations of reading the next batch of a stream."""


@attrs.frozen(kw_only=True)
class WritePolicy:
    """The settings by which a shard assigns positions and makes messages durable."""

    durability: str
    timestamps: str
    late: str
    max_skew: float
    """The maximum number of seconds by which a message's own time may be ahead of the clock."""
    synced_at_once: bool
    """Whether the engine fsyncs every write, whatever the durability."""
    clock: Callable[[], int]
    """A function that returns the current time in microseconds since the epoch."""
    monotonic: Callable[[], int]
    """A function that returns the microseconds since an arbitrary moment, and never jumps."""

    def now(self) -> int:
        """Return the current time in microseconds, clamped to the range of positions, from 1970 to 2255."""
        return min(max(self.clock(), 0), MAX_TIME)


RecordRecoveryPoint = Callable[[int, int, int], bool]
"""A function that records, outside the shard, the last write that is known to be on disk. Its arguments are the shard,
the number of the write and the write's last position. It returns whether the recording succeeded, and never raises."""


class CommitListener(Protocol):
    """An object that is notified of the messages that a shard commits."""

    def announce(self, shard: int, batch: MessageBatch) -> object:
        """Prepare for a batch; called under the shard's lock before its commit. The result is passed to `visible`."""

    def committed(self, shard: int) -> None:
        """Register that the last announced batch is in the engine; called under the shard's lock.

        The messages may not be visible yet.
        """

    def visible(self, shard: int, announced: object) -> None:
        """Notify readers that the announced messages are readable, or never will be; called without a lock.

        ``announced`` is the result of `announce`.
        """

    def dropped(self) -> None:
        """React to a dropped generation or a reopened shard; called without a shard's lock."""

    def forget(self) -> None:
        """Discard cached messages; called after messages were deleted or archived, without a shard's lock."""

    def replaced(self, shard: int) -> None:
        """React to new contents of a shard, none of which was announced; called without a shard's lock."""

    def extended(self, shard: int) -> None:
        """Wake readers of a shard that only other sites keep, and that has new messages. No shard's lock is held."""

    def changed(self, shard: int, heads: Collection[bytes]) -> None:
        """React to an applied entry of the log that has changed keys of the state with these heads, `HEAD` bytes each.

        No shard's lock is held.
        """


class AddGeneration(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The change that seals the current generation of a shard and adds a new one."""

    number: int
    layout: str
    options: dict[str, Any]
    created: int
    """The time of the change, in microseconds since the epoch."""


class DropGeneration(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The change that makes a sealed generation invisible."""

    number: int


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The change that removes messages with positions from ``first`` to ``last``, inclusive."""

    topic_filter: str | None
    """The filter that the messages match; None for all topics."""
    first: int
    last: int
    spare: tuple[str, ...] = ()
    """Filters of messages that are kept."""


Change = AddGeneration | DropGeneration | Delete
"""A change of a shard other than storing messages and state, in the form in which a log records it."""


class LogFullError(RecoverableError):
    """Too many bytes of proposed writes wait for the log; nothing was proposed."""


class ChangeLog(Protocol):
    """A replicated log that orders a shard's writes, for a database shared by several sites.

    A writer with a log proposes its writes to the log instead of committing them. When the log has accepted writes, it
    calls `ShardWriter.apply`, in order, for one or several writes at a time.
    """

    @property
    def owned(self) -> bool:
        """Whether this site may propose writes."""

    @property
    def owner(self) -> tuple[str, str]:
        """The name and address of the site that owns the shard; empty if they are unknown."""

    @property
    def epoch(self) -> int:
        """The number of the last period in which this site owns, or was to own, the shard; later ones are higher."""

    @property
    def applied(self) -> int:
        """The number of entries of the log that this site has applied; later reads include all of them."""

    def check_owned(self) -> None:
        """Raise the error that `encode_locked` raises while another site owns the shard."""

    def encode_locked(self, pending: PendingWrite) -> None:
        """Encode a prepared write for the log, and check that the log accepts it.

        Called under the writer's lock, so it must not wait. Raises `LogFullError`, and the errors of sites that may not
        propose writes.
        """

    def propose_locked(self, pending: PendingWrite) -> None:
        """Accept an encoded write for the log. Called under the writer's lock, so it must not wait."""

    def wait_for_room(self, pending: PendingWrite) -> None:
        """Return when the log may accept the write for which it raised `LogFullError`. No lock may be held."""

    def wait(self, pending: PendingWrite) -> None:
        """Return when a write is as durable as promised. Raises the reason if the write will not be applied."""


class PendingWrite:
    """One write of a shard, from its preparation to its completion: a shard's part of a batch, or any other change.

    writer:   the writer of the shard.
    messages: the messages to store, without positions.
    state:    writes of state, whose conditions are checked in the preparation.
    rows:     the messages' indices in the batch that was split among shards; None if the batch wasn't split.
    write:    other keys and values to write.
    change:   the change that ``encode`` or ``work`` makes, in the form that a log records.
    encode:   a function that adds the change's keys and values to `write`. It is called under the lock, immediately
              before the commit, and so with a log once the earlier writes are applied.
    work:     a function that makes the part of the change that takes several writes. With a log, it is called without
              the lock before the commit, and is repeated if the process ends between. Its result is kept.
    """

    __slots__ = (
        "announced",
        "batch",
        "change",
        "encode",
        "heads",
        "install",
        "last_position",
        "last_time",
        "lifted",
        "messages",
        "number",
        "proposal",
        "result",
        "rows",
        "state",
        "tail",
        "work",
        "write",
        "writer",
    )

    def __init__(
        self,
        writer: ShardWriter,
        messages: MessageBatch | None = None,
        state: Sequence[StateWrite] = (),
        rows: npt.NDArray[np.intp] | None = None,
        write: WriteBatch | None = None,
        *,
        change: Change | None = None,
        encode: Callable[[PendingWrite], object] | None = None,
        work: Callable[[], int] | None = None,
    ) -> None:
        self.writer, self.state, self.rows = writer, state, rows
        self.messages = _NONE if messages is None else messages
        self.batch = self.messages
        """The messages; with positions and times after the preparation."""
        self.change, self.encode, self.work = change, encode, work
        self.last_position = self.last_time = 0
        """The shard's last position and time after the write. Valid after the preparation."""
        self.tail = writer.tail
        """The shard's tail after the write. Valid once the write is encoded."""
        self.write = WriteBatch() if write is None else write
        self.lifted = 0
        """The number of late messages that took the next position."""
        self.heads: Collection[bytes] = ()
        """The first `HEAD` bytes of the keys of the framework's state that the write has changed; only with a log."""
        self.install: Callable[[], object] | None = None
        """A function that updates the in-memory state after the engine's write."""
        self.announced: object = None
        """The result of `CommitListener.announce`."""
        self.number = 0
        """The write's number in the shard, counted from 1; 0 until it is committed or, with a log, proposed."""
        self.proposal: Any = None
        """The form in which the write is proposed to a log; only the log uses it."""
        self.result = 0
        """The result of ``work``."""


_NONE = MessageBatch.empty()


class ShardWriter:
    """The engine of one shard, the lock that serialises all its changes, and the watermark of its readers."""

    def __init__(
        self,
        number: int,
        engine: Engine,
        policy: WritePolicy,
        record_recovery_point: RecordRecoveryPoint,
        *,
        read_only: bool,
    ) -> None:
        self.number = number
        self.engine = engine
        """The engine. Use it through `open_engine`, which checks that the shard is open."""
        self.policy = policy
        self._record_recovery_point = record_recovery_point
        self.read_only = read_only
        """Whether the engine is a read-only snapshot."""
        self.counters = ShardCounters()
        self.latencies = ShardLatencies()
        self.lock = FairLock()
        """The lock that guards all writes and the in-memory state that depends on them."""
        self.moved_on = threading.Condition(self.lock)
        """A condition that is notified when the last position advances, a generation is added, or the shard fails or is
        closed."""
        self.listener: CommitListener | None = None
        """The listener that is notified of every batch, or None. Guarded by `lock`."""
        self.tail = load_tail(engine)
        """The shard's tail. Guarded by `lock`; replaced as a whole, so it can be read without the lock."""
        self.log: ChangeLog | None = None
        """The log that orders the writes, or None if writes are committed immediately. Guarded by `lock`."""
        self.elsewhere = False
        """Whether this site of a cluster has no whole copy of the shard, so that it can't be read here."""
        self.proposed: deque[PendingWrite] = deque()
        """The writes that were proposed to the log and are not applied to the engine, oldest first. Guarded by `lock`.
        """
        self._proposed_state = ProposedState(engine)
        """The state including all proposed writes. Guarded by `lock`."""
        self.opened = Applied(0, policy.monotonic())
        """The opening, reopening or copying of the shard: another object after each. It and `_applied` are guarded by
        `lock`; reading them needs no lock."""
        self._applied: dict[bytes, Applied] = {}
        """By the first `HEAD` bytes of keys, the last applied write of the log that changed the framework's state
        under such keys."""
        self.displacement = load_displacement(engine)
        """The maximum, in microseconds, by which a position's time is later than its message's own time; 0 while
        positions follow the time of storing. Guarded by `lock`; reading it needs no lock."""
        self.generation = 0
        """The number of the current generation; 0 before the first was added. Guarded by `lock`."""
        self.slab: Slab | None = None
        """The slab of the current generation, which `Generations` sets. Guarded by `lock`."""
        self.last_commit = time.monotonic()
        """The time (`time.monotonic`) at which the last position advanced. Guarded by `lock`."""
        self.watermark = self.tail.last_position
        """The highest position that readers may see. Commits or fsyncs advance it; reading it needs no lock."""
        self._failure: BaseException | None = None
        """The error of a write, set under `lock`, or of an fsync, set under `_fsync_lock`. Reading it needs no lock."""
        self._end = (self.tail.writes, self.watermark)
        """The number of the last write, and the last position. Guarded by `lock`; `_fsync` reads the tuple without it.
        """
        self._fsync_lock = FairLock()
        self._fsynced = self.tail.writes if read_only else self.tail.writes - 1
        """The number of the last write that is known to be fsynced. After the opening it is one less than the last
        write, so that the first fsync isn't skipped. Guarded by `_fsync_lock`."""
        self._recording_lock = FairLock()
        """Held while a recovery point is recorded, which therefore never waits for an fsync."""
        self._reached = self._recorded = (0, 0)
        """The last write known to be on disk, and the last one that was recorded, each with its position. Guarded
        by `_recording_lock`. The order of the locks is `lock`, `_fsync_lock`, `_recording_lock`."""
        self._refusal: str | None = None
        """The reason for refusing every call, after the close and in a forked process; None while the shard is open. A
        close sets it under `lock` and `_fsync_lock` together, and it can be read without them."""
        self.closed = False
        """Whether the engine has been closed, too. Guarded like `_refusal`."""
        self._inherited = False
        """Whether this process is a fork of the one that opened the shard."""
        remember(self)
        self._behind = False
        """Whether the clock was behind the positions at the last store. Guarded by `lock`."""
        if not read_only:
            self._finish(self._end[0])
            if self.ahead() > 0:
                self._behind = True
                self._warn_of_clock()

    @property
    def failure(self) -> str | None:
        """The reason why the shard takes no writes, or None."""
        return None if self._failure is None else str(self._failure) or type(self._failure).__name__

    @property
    def owned(self) -> bool:
        """Whether this process decides the order of writes: always, unless another site of a cluster owns the shard."""
        return self.log is None or self.log.owned

    @property
    def epoch(self) -> int | None:
        """The number of the period in which this site of a cluster owns the shard; None while another site does.

        0 for a database of this process alone.
        """
        log = self.log
        if log is None:
            return 0
        epoch = log.epoch  # read before `owned`, since a site begins an epoch before it owns the shard
        return epoch if log.owned else None

    def check_owned(self) -> None:
        """Raise `ShardElsewhereError` if another site of a cluster owns the shard."""
        if self.log is not None:
            self.log.check_owned()

    def last_position(self) -> int:
        """Return the last assigned position, including those of proposed writes that are not applied yet."""
        with self.lock:
            last = self.proposed[-1] if self.proposed else self.tail
            return last.last_position

    # --- writing ---

    def commit(self, prepare: Callable[[PendingWrite], object]) -> PendingWrite | None:
        """Prepare, commit and finish one write to this shard alone, bypassing the shard's log if it has one.

        ``prepare`` is called under the lock, and fills the write: it adds keys and values, and may change the tail
        and set `PendingWrite.install`. If it returns False, nothing is written and this method returns None.
        """
        with self.lock:
            self.check_writable()
            pending = PendingWrite(self)
            if prepare(pending) is False:
                return None
            self.commit_locked(pending)
        self.finish_applied(pending)
        return pending

    def submit(self, pending: PendingWrite) -> PendingWrite:
        """Prepare and submit a write of this shard alone; return it, or the equal write that took its place.

        The caller must call `finish_commit`. The caller must not hold the lock.
        """
        check_not_owned(self.lock)
        while True:
            try:
                with self.lock:
                    self.prepare_locked(pending)
                    self.submit_locked(pending)
                self.counters.state_writes += pending.change is None
                return pending
            except LogFullError:
                if self.log is not None:
                    self.log.wait_for_room(pending)
                pending = PendingWrite(
                    self, state=pending.state, change=pending.change, encode=pending.encode, work=pending.work
                )

    def write_state(self, writes: Sequence[StateWrite]) -> None:
        """Commit state writes without messages."""
        self.finish_commit(self.submit(PendingWrite(self, state=writes)))

    def store_again(self, batch: MessageBatch, end: Tail) -> None:
        """Store messages at their existing positions, in one engine write; later writes continue after ``end``."""
        pending = PendingWrite(self)
        with self.lock:
            self.prepare_locked(pending)
            pending.batch = batch
            pending.last_position = max(pending.last_position, end.last_position)
            pending.last_time = max(pending.last_time, end.last_time)
            self.encode_locked(pending)
            self.commit_locked(pending)
        self.finish_applied(pending)

    def prepare_locked(self, pending: PendingWrite) -> None:
        """Check a write and the conditions of its state, and assign positions. The shard isn't changed yet."""
        if self._refusal is not None or self.read_only or self._failure is not None:
            self.check_writable()
        rows = len(pending.messages)
        slab = self.slab
        if rows and type(slab) is DamagedSlab:  # `isinstance` of an abstract class calls a Python function
            raise slab.error
        if rows and slab is None and self.owned:  # if another site owns the shard, the log refuses the write
            raise GenerationError(f"shard {self.number} has no generation yet")
        if pending.state:
            stage(pending.state, self._proposed_state if self.proposed else self.engine, pending.write)
        last = self.proposed[-1] if self.proposed else self.tail
        pending.last_position, pending.last_time = last.last_position, last.last_time
        if rows:
            self._place(pending)

    def encode_locked(self, pending: PendingWrite) -> None:
        """Add everything to the write that depends on the applied writes; nothing is committed yet.

        If the layout fails, the shard takes no more writes, because the layout's in-memory state may be inconsistent.
        """
        batch, write, tail = pending.batch, pending.write, self.tail
        rows = len(batch)
        if rows:
            if self.slab is None:
                raise GenerationError(f"shard {self.number} has no generation yet")
            before = write.size
            try:
                self.slab.store(batch, write)
                live_bytes = tail.live_bytes + write.size - before
                if self.policy.timestamps == "message":
                    self._displace(batch, write)
                full, zone = fill(tail.zone or Zone(tail.last_position + 1), batch)
                for record in full:
                    put_zone(write, self.generation, record)
                tail = msgspec.structs.replace(
                    tail,
                    last_position=pending.last_position,
                    last_time=pending.last_time,
                    lifted=tail.lifted + pending.lifted,
                    messages=tail.messages + rows,
                    live_bytes=live_bytes,
                    zone=zone,
                )
            except BaseException as error:
                self.fail(error)
                raise
        elif pending.last_position > tail.last_position or pending.last_time > tail.last_time:
            tail = msgspec.structs.replace(tail, last_position=pending.last_position, last_time=pending.last_time)
        pending.tail = tail
        if pending.encode is not None:
            pending.encode(pending)

    def submit_locked(self, pending: PendingWrite) -> None:
        """Encode and commit a prepared write of this shard alone or, with a log, propose it to the log."""
        if self.log is None:
            self.encode_locked(pending)
            self.commit_locked(pending)
        else:
            self.log.encode_locked(pending)
            self.propose_locked(pending)

    def commit_locked(self, pending: PendingWrite) -> None:
        """Announce the messages to the listener, write to the engine, and update the in-memory state.

        `finish_commit` then makes the write durable and visible. After any exception, including Ctrl-C, the shard takes
        no more writes, because its in-memory state may differ from the engine's. Every write includes the tail with the
        number of the write, so that lost writes are detected.
        """
        started = time.perf_counter()
        batch, write, listener = pending.batch, pending.write, self.listener
        rows = len(batch)
        if rows and listener is not None:  # before the commit, so that readers see only announced messages
            pending.announced = listener.announce(self.number, batch)
        try:
            tail = msgspec.structs.replace(pending.tail, writes=self.tail.writes + 1)
            put_tail(write, tail)
            self.engine.write(write)
            if rows and self.slab is not None:
                self.slab.committed()
            if pending.install is not None:
                pending.install()
            if tail.last_position != self.tail.last_position:
                self.last_commit = time.monotonic()
                self.moved_on.notify_all()
            self.tail = tail
            self._end = (tail.writes, tail.last_position)
            if pending.announced is not None and listener is not None:
                listener.committed(self.number)
        except BaseException as error:
            self.fail(error)
            raise
        counters = self.counters
        counters.commit_seconds += time.perf_counter() - started
        counters.bytes += write.size
        if rows:
            counters.batches += 1
            counters.messages += rows
            counters.payload_bytes += batch.payload_bytes()
        if self.policy.durability == "commit":
            self.watermark = tail.last_position
        pending.number = tail.writes

    def finish_commit(self, pending: PendingWrite) -> None:
        """Complete a submitted write: see `finish_applied`. With a log, wait until the log has applied it."""
        if self.log is None:
            self.finish_applied(pending)
        else:
            self.log.wait(pending)

    def finish_applied(self, pending: PendingWrite) -> None:
        """Complete a committed write. The lock must not be held, so that other writes can share the fsync.

        With ``durability="sync"``, fsync the write unless a later fsync already covers it, and advance the watermark.
        Then notify the listener, even if the fsync failed. The last fsynced write is recorded (`RecordRecoveryPoint`).
        """
        try:
            self._finish(pending.number)
        finally:
            if pending.announced is not None and self.listener is not None:
                self.listener.visible(self.number, pending.announced)
            if pending.heads and self.listener is not None:
                self.listener.changed(self.number, pending.heads)

    # --- with a log ---

    def propose_locked(self, pending: PendingWrite) -> None:
        """Propose an encoded write to the log; `apply` commits it when the log has accepted it."""
        if self.log is None:
            raise ValueError("without a log a write is committed at once")
        self.log.propose_locked(pending)
        pending.number = self.tail.writes + len(self.proposed) + 1
        self.proposed.append(pending)
        self._proposed_state.add(pending.write)

    def apply(self, writes: Sequence[PendingWrite], progress: bytes, opened: Applied) -> None:
        """Commit and complete consecutive writes that the log has ordered: see `apply_locked` and `finish_applied`.

        Raises `EngineError`, with nothing committed, if the shard was reopened or copied since ``opened``: it may lack
        writes before these, or have these already.
        """
        with self.lock:
            if self.opened is not opened:
                raise EngineError(f"shard {self.number} was opened again; its log is to be read from where it ends")
            applied = self.apply_locked(writes, progress)
        self.finish_applied(applied)

    def apply_locked(self, writes: Sequence[PendingWrite], progress: bytes) -> PendingWrite:
        """Commit writes together: one `Slab.store`, and one engine write.

        The writes are the oldest proposed ones, or were not proposed here. ``progress`` is stored with them under
        `topicstore.shard.records.PROGRESS`, and records the last applied entry of the log. A write with a
        `PendingWrite.change` must be applied alone. Raises the errors of `commit_locked`, with the same effect.
        """
        self.check_writable()
        joined = writes[0] if len(writes) == 1 else self._joined(writes)
        heads = _heads(joined.write)
        joined.write.put(STATE, PROGRESS, progress)
        self.encode_locked(joined)
        self.commit_locked(joined)
        joined.heads = heads
        if heads:
            self._applied.update(dict.fromkeys(heads, Applied(joined.number, self.policy.monotonic())))
        for one in writes:
            if self.proposed and self.proposed[0] is one:
                self.proposed.popleft()
                self._proposed_state.applied()
        return joined

    def last_applied(self, head: bytes) -> Applied:
        """Return the last applied write that changed keys of the state with this beginning; needs no lock."""
        opened = self.opened
        applied = self._applied.get(head[:HEAD], opened)
        return max(applied, opened)

    def abandon_locked(self) -> None:
        """Forget all proposed writes, because the log will not apply them."""
        self.proposed.clear()
        self._proposed_state = ProposedState(self.engine)

    def _joined(self, writes: Sequence[PendingWrite]) -> PendingWrite:
        """Return one write with the effect of several consecutive writes."""
        joined = PendingWrite(self)
        joined.batch = MessageBatch.concat([one.batch for one in writes])
        joined.last_position, joined.last_time = self.tail.last_position, self.tail.last_time
        for one in writes:
            if one.change is not None:
                raise ValueError("a write that changes more than messages and state is applied alone")
            joined.last_position, joined.last_time = one.last_position, one.last_time
            joined.lifted += one.lifted
            for keyspace, keys, values in one.write.runs:
                joined.write.change_many(keyspace, keys, values)
        return joined

    def finish_all(self) -> None:
        """Make all submitted writes durable and visible, including those of other threads, as `finish_commit` does."""
        if self.log is None:
            self._finish(self._end[0])
            return
        with self.lock:
            proposed = list(self.proposed)[-1:]
        for last in proposed:
            self.log.wait(last)

    def _finish(self, number: int) -> None:
        if self.policy.durability == "sync":
            self._fsync(number)
        elif self.policy.synced_at_once:
            self._record(self._end)

    def flush(self) -> None:
        """Fsync everything stored so far, whatever the durability; return when it is on disk."""
        self._fsync(self._end[0])
        self._record(self._reached)  # recorded again, in case the last recording failed

    def _fsync(self, number: int) -> None:
        """Fsync the engine's log, unless an earlier fsync already covers the write of this number."""
        with self._fsync_lock:
            if self._fsynced >= number:
                return  # covered by an fsync that began after this write
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
            self._fsynced, position = end
            if self.policy.durability == "sync":  # otherwise the commit has advanced the watermark
                self.watermark = position
            self._record(end)

    def _record(self, end: tuple[int, int]) -> None:
        """Record ``end``, a write and its position, as the last one that is on disk (`RecordRecoveryPoint`)."""
        with self._recording_lock:
            self._reached = max(end, self._reached)
            if self._recorded < self._reached:
                if self._record_recovery_point(self.number, *self._reached):
                    self._recorded = self._reached
                else:
                    self.counters.failures += 1

    def begin_again_locked(self, open_generations: Callable[[], object], *, replaced: bool = False) -> None:
        """Take writes again after the engine was reopened or its contents were replaced: reload the state from it.

        ``open_generations`` reloads the generations. `lock` must be held, so that nothing is written in the meantime.
        Unless the contents were ``replaced``, the last position never falls below positions that readers have seen,
        even if those writes were lost. With a log, the last position may fall, because the log has the missing writes.
        """
        with self._fsync_lock:
            stored = load_tail(self.engine)
            position, last_time = stored.last_position, stored.last_time
            if not replaced and self.log is None:
                position, last_time = max(position, self.watermark), max(last_time, self.tail.last_time)
            open_generations()
            self.displacement = load_displacement(self.engine)
            self.tail = msgspec.structs.replace(stored, last_position=position, last_time=last_time)
            self.abandon_locked()
            self._applied.clear()
            self.opened = Applied(stored.writes, self.policy.monotonic())
            self._end = (stored.writes, position)
            self._fsynced = stored.writes - 1
            self._failure = None
            if self.policy.durability == "commit":
                self.watermark = position
            self.moved_on.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make the shard refuse writes because of an error.

        A failed fsync isn't retried, because the kernel may have dropped the data that it could not write: see
        Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020.
        """
        self._failure = error
        self.counters.failures += 1
        if owned(self.lock):  # notifying needs the lock; without it, waiting threads see the failure at their next poll
            self.moved_on.notify_all()

    # --- positions and times ---

    def _place(self, pending: PendingWrite) -> None:
        """Assign positions and timestamps to the messages of a write."""
        policy, batch, last_time = self.policy, pending.messages, pending.last_time
        rows, now = len(batch), policy.now()
        timestamps = _fill(batch.timestamps, now)
        if policy.timestamps == "commit":
            if (self.ahead(now) >= _SET_BACK) is not self._behind:
                self._turn_behind()
            first = commit_position(pending.last_position, now)
            if rows == 1:  # needs no array of positions
                pending.batch, pending.last_position = batch.placed(first, timestamps, self.number), first
                return
            positions = consecutive_positions(first, rows)
        else:
            times, pending.lifted = self._times(batch.timestamps, timestamps, now, last_time)
            positions = message_positions(pending.last_position, times)
            pending.last_time = max(last_time, int(times.max()))
        if isinstance(timestamps, list) and rows >= _MANY:
            timestamps = to_integers(timestamps)
        pending.batch = batch.placed(positions, timestamps, self.number)
        pending.last_position = int(positions[-1])

    def _displace(self, placed: MessageBatch, write: WriteBatch) -> None:
        """Add the shard's new displacement to the write, if a batch increases it."""
        displaced = displacement_of(placed)
        if displaced > self.displacement:
            self.displacement = displaced  # if the write fails, the value is too large until the shard is reopened
            put_displacement(write, displaced)

    def _times(self, given: Column, filled: Column, now: int, last_time: int) -> tuple[Times, int]:
        """Return the times from which positions are computed, and the number of late messages.

        A message without a timestamp is never late: it gets the newest time of the messages before it.
        """
        if isinstance(filled, np.ndarray):
            times = filled.astype(np.int64)
        else:
            times = np.fromiter(to_iterable(filled), np.int64, len(filled))
        self._refuse_ahead(times, now)
        newest = np.maximum.accumulate(np.maximum(times, last_time))
        if isinstance(given, Constant):
            times = newest if given.value is None else times
        elif given is not filled:  # some timestamps were absent
            absent = np.fromiter((value is None for value in to_iterable(given)), np.bool_, len(times))
            times = np.where(absent, newest, times)
        late = np.flatnonzero(late_rows(last_time, times))
        if len(late) and self.policy.late == "raise":
            first = int(late[0])
            raise LateMessageError(
                f"its time lies {span_text(int(newest[first]) - int(times[first]))} before that of a message "
                f"stored before it in shard {self.number}",
                first,
            )
        return times, len(late)

    def _refuse_ahead(self, times: Times, now: int) -> None:
        most = self.policy.max_skew
        ahead = np.flatnonzero(times > now + int(most * 1e6))
        if len(ahead):
            first = int(ahead[0])
            raise TimestampAheadError(
                f"its time lies {span_text(int(times[first]) - now)} ahead of the clock; {most:g} s are allowed",
                first,
            )

    def _warn_of_clock(self) -> None:
        warn_caller(
            f"shard {self.number}: its last position lies {span_text(self.ahead())} in the future; "
            "messages committed until then get positions right after it",
            UserWarning,
        )

    def _turn_behind(self) -> None:
        """Warn that the clock was set back behind the last position, or note that it has caught up."""
        self._behind = not self._behind
        if self._behind:
            with suppress(UserWarning):  # where warnings are errors, messages are stored nevertheless
                self._warn_of_clock()

    def ahead(self, now: int | None = None) -> int:
        """Return the number of microseconds by which the last position lies in the future, or 0.

        now: the current time in microseconds, if the caller knows it.
        """
        # A tolerance of 1 ms, because the counters of a large batch may overflow into the time.
        return max(0, time_of(self.tail.last_position) - (self.policy.now() if now is None else now) - 1_000)

    # --- opening and closing ---

    def open_engine(self) -> Engine:
        """Return the engine. Raises `DatabaseClosedError` if the shard is closed, and in a forked process."""
        self.check_open()
        return self.engine

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` after the close, and in a process that was forked since the opening."""
        if self._refusal is not None:
            raise DatabaseClosedError(self._refusal)

    def elsewhere_error(self) -> ShardElsewhereError:
        """Return the error for a read of a shard of which this site has no whole copy."""
        site, address = ("", "") if self.log is None else self.log.owner
        owner = f"; site {site}" + f" ({address})" * bool(address) + " writes it" if site else ""
        reason = f"shard {self.number} is not kept on this site, or its copy is not complete yet{owner}"
        return ShardElsewhereError(reason, self.number, site, address)

    def leave_to_parent(self) -> None:
        """Refuse all calls in a forked process."""
        self._inherited = True
        self._refusal = "the database was opened by another process; a fork can't use it"

    def check_writable(self) -> None:
        """Raise an error if the shard takes no writes.

        The error is `ShardReadOnlyError` if an earlier write failed, `ShardElsewhereError` if one failed and another
        site owns the shard, `DatabaseClosedError` if the shard is closed, and `ReadOnlyDatabaseError` if the database
        was opened for reading.
        """
        self.check_open()
        if self.read_only:
            raise ReadOnlyDatabaseError("the database was opened with mode='r'; another mode lets you write")
        if self._failure is not None:
            self.check_owned()  # another site may have taken the shard over
            raise ShardReadOnlyError(
                f"shard {self.number} takes no writes since one failed ({self.failure}); "
                "remove the cause, then call recover(), or close and open the database"
            ) from self._failure

    def close(self, forget: Callable[[], object]) -> None:
        """Close the engine, after ``forget`` has dropped the objects that read from it. This is idempotent.

        If a call is interrupted, the next call finishes it.
        """
        if self._inherited:
            return  # the engine's threads and files belong to the parent process
        with self.lock, self._fsync_lock:
            if self.closed:
                return
            try:
                if self._refusal is None and not self.read_only and self._failure is None:
                    self.flush()  # after a clean close everything is on disk, whatever the durability
            finally:
                self._refusal = "the database is closed"
                self.moved_on.notify_all()
                forget()
                self._close_engine_locked()

    @property
    def closed_in_order(self) -> bool:
        """Whether the shard was closed cleanly: every write is on disk, and no write failed or was interrupted."""
        return self.closed and self._failure is None and self._fsynced >= self._end[0]

    def _close_engine_locked(self) -> None:
        try:
            self.engine.close()
        except BaseException as failed:
            self._failure = self._failure or failed
            self.closed = isinstance(failed, Exception)  # any other exception, such as Ctrl-C, interrupted the close
            raise
        self.closed = True


def _heads(write: WriteBatch) -> set[bytes]:
    """Return the first `HEAD` bytes of the keys of the framework's state that a write changes: at most 65,536."""
    changed = chain.from_iterable(keys for keyspace, keys, _ in write.runs if keyspace is STATE)
    return {bytes(key[:HEAD]) for key in changed if key[:1] == OWN}


def _fill(timestamps: Any, now: int) -> Any:
    """Return the timestamps, with ``now`` for messages without one."""
    if isinstance(timestamps, Constant):
        return Constant(now, len(timestamps)) if timestamps.value is None else timestamps
    if isinstance(timestamps, np.ndarray) and timestamps.dtype != object:
        return timestamps  # an array of numbers has no None
    values = to_list(timestamps)
    return [now if value is None else value for value in values] if None in values else values
