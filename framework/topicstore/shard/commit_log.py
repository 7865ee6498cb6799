"""The one function through which every write of a shard goes, and what it guards.

Positions are assigned and committed under one lock, so no reader sees a position before a lower one. Readers see up
to the watermark, which moves after the commit or, under ``sync``, after the flush: never what power loss could take
back. Flushes are shared: one serves every batch that was written before it began (group commit).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from topicstore.contract.batch import MessageBatch
from topicstore.contract.engine import Engine, WriteBatch
from topicstore.contract.errors import DatabaseClosedError, ReadOnlyDatabaseError, ShardReadOnlyError

from .counters import ShardCounters
from .locks import FairLock, owned
from .records import Tail, load_tail, put_tail
from .write_settings import WriteSettings

__all__ = ["CommitListener", "CommitLog", "NoteSynced", "Ticket"]

NoteSynced = Callable[[int, int, int], object]
"""Takes note that everything up to a write of a shard is on disk: (shard, number of the write, its position)."""


class CommitListener(Protocol):
    """Who is told what a shard commits."""

    def announce(self, shard: int, batch: MessageBatch) -> object:
        """Messages are about to be committed, under the shard's lock; return what `visible` is to be told."""

    def visible(self, shard: int, told: object) -> None:
        """What was announced can be read, or never will. No lock is held."""


class Ticket(NamedTuple):
    """With which `CommitLog.settle` makes a write durable and visible."""

    written: int
    """The number of the write."""
    told: object = None
    """What `CommitListener.announce` returned."""


class CommitLog:
    """The engine of one shard, the lock of everything that writes it, and how far readers may see."""

    def __init__(
        self, number: int, engine: Engine, policy: WriteSettings, note_synced: NoteSynced, *, read_only: bool
    ) -> None:
        self.number = number
        self.engine = engine
        """Use it through `reader` or `open_engine`, which check that the shard is open."""
        self.policy = policy
        self._note_synced = note_synced
        self.read_only = read_only
        """Whether the engine is a view of one moment, to which nothing is added."""
        self.counters = ShardCounters()
        self.lock = FairLock()
        """Guards all that is written, and what memory knows of it."""
        self.moved_on = threading.Condition(self.lock)
        """Told when the last position moves, a generation is added, or the shard fails or is closed."""
        self.listener: CommitListener | None = None
        """Told of every batch. Guarded by `lock`."""
        self.tail = load_tail(engine)
        """Guarded by `lock`; replaced as a whole, so that a glance needs no lock."""
        self.last_commit = time.monotonic()
        """When the last position moved. Guarded by `lock`."""
        self.watermark = self.tail.last_position
        """The highest position that readers may see. Moved by who commits or flushes; a glance needs no lock."""
        self._failure: BaseException | None = None
        """Of a write, set under `lock`, or of a flush, under `_flush_lock`; a glance needs no lock."""
        self._end = (self.tail.writes, self.watermark)
        """The last write and its position, set in one step. Guarded by `lock`; read without it by `_flush`."""
        self._flush_lock = FairLock()
        self._flushed = self.tail.writes if read_only else self.tail.writes - 1
        """The last write that is known to be on disk: of those before the opening, not all. Guarded by `_flush_lock`.
        """
        self._closed = False
        """Guarded by `lock` and `_flush_lock` together; a glance needs none."""
        self._owner = os.getpid()
        if not read_only:
            self.settle(self.last_ticket())

    @property
    def failure(self) -> str | None:
        """Why the shard takes no writes, or None."""
        return None if self._failure is None else str(self._failure) or type(self._failure).__name__

    def last_ticket(self) -> Ticket:
        """Return a ticket with which everything written so far is settled."""
        return Ticket(self._end[0])

    # --- writing ---

    def commit_locked(
        self,
        write: WriteBatch,
        tail: Tail,
        adopt: Callable[[], object] | None = None,
        batch: MessageBatch | None = None,
    ) -> Ticket:
        """Announce a batch, apply its write, and with ``adopt`` what memory must know of it.

        Returns the ticket with which `settle` makes it durable and visible. Whatever interrupts
        it, Ctrl-C too, closes the shard to writes, because memory may lag behind the engine. The tail is
        part of every write and has its number, so that a write which vanishes can be missed.
        """
        started = time.perf_counter()
        told = None
        if batch is not None and self.listener is not None:  # so that who has caught up knows where to read on
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
        except BaseException as error:
            self.fail(error)
            raise
        self.counters.commit_seconds += time.perf_counter() - started
        self.counters.bytes += write.size
        if self.policy.durability == "commit":
            self.watermark = tail.last_position
        if self.policy.synced_at_once:
            self._note_synced(self.number, *self._end)
        return Ticket(tail.writes, told)

    def settle(self, ticket: Ticket) -> None:
        """The second half of every write, without the lock, so that others can join the flush.

        Under ``sync``, return when the write of this ticket is on disk, and let readers see it. Then, also if that
        failed, tell who listens.
        """
        try:
            if self.policy.durability == "sync":
                self._flush(ticket.written)
        finally:
            if ticket.told is not None and self.listener is not None:
                self.listener.visible(self.number, ticket.told)

    def flush(self) -> None:
        """Return when everything stored so far is on disk, whatever the durability."""
        self._flush(self._end[0])

    def _flush(self, ticket: int) -> None:
        """Flush unless it was done since. Takes no other lock, because who holds that may wait for this."""
        with self._flush_lock:
            if self._flushed >= ticket:
                return  # a flush that began after this write has served it
            self.check_writable()
            written, position = self._end
            started = time.perf_counter()
            try:
                self.engine.flush_log()
            except BaseException as error:
                self.fail(error)
                raise
            self.counters.flushes += 1
            self.counters.flush_seconds += time.perf_counter() - started
            self._flushed = written
            if self.policy.durability == "sync":  # else it has moved on meanwhile
                self.watermark = position
            self._note_synced(self.number, written, position)

    def fail(self, error: BaseException) -> None:
        """Close the shard to writes because one failed."""
        self._failure = error
        self.counters.failures += 1
        if owned(self.lock):  # else who waits for the end of an epoch looks soon
            self.moved_on.notify_all()

    # --- open or not ---

    def open_engine(self) -> Engine:
        """Return the engine; raise `DatabaseClosedError` after the close, and in a forked process."""
        self.check_open()
        return self.engine

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` after the close, and in a process that was forked since the opening."""
        if self._closed:
            raise DatabaseClosedError("the database is closed")
        if os.getpid() != self._owner:
            raise DatabaseClosedError(f"the database was opened by process {self._owner}; a fork can't use it")

    def check_writable(self) -> None:
        """Raise `ShardReadOnlyError` if an earlier write failed, `DatabaseClosedError` after the close.

        `ReadOnlyDatabaseError` if the database was opened to be read.
        """
        self.check_open()
        if self.read_only:
            raise ReadOnlyDatabaseError("the database was opened to be read; open it without read_only to write")
        if self._failure is not None:
            raise ShardReadOnlyError(
                f"shard {self.number} takes no writes since one failed ({self.failure}); "
                "remove the cause, then close and open the database"
            ) from self._failure

    def close(self, forget: Callable[[], object]) -> None:
        """Close the engine, after ``forget`` has dropped what reads from it. May be called twice."""
        if os.getpid() != self._owner:
            return  # the engine's threads and files are the other process's
        with self.lock, self._flush_lock:
            if self._closed:
                return
            try:
                if not self.read_only and self._failure is None:
                    self.flush()  # what is left in order is on disk, whatever the durability
            finally:
                self._closed = True
                self.moved_on.notify_all()
                forget()
                try:
                    self.engine.close()
                except BaseException:
                    self._closed = False  # interrupted: it may be called again
                    raise
