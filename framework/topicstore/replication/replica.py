"""`Replica`: a shard of this site as the state machine of its log, and as the log to which the shard's writer proposes.

The owner's replica keeps the prepared writes, and applies each when an entry of the log has its change. Every other
replica decodes the changes. Every replica applies all changes of an entry in one write of the engine, with the
progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, islice

import msgspec

from topicstore.contract.engine import STATE, Engine, Reader, WriteBatch
from topicstore.contract.errors import (
    ClusterNotReadyError,
    DatabaseClosedError,
    ShardElsewhereError,
    UnsupportedError,
)
from topicstore.contract.log_store import LogStore, StorageUnavailableError
from topicstore.shard.interest_records import ends
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.records import PROGRESS, load_generations
from topicstore.shard.shard import Shard
from topicstore.shard.writer import AddGeneration, Change, Delete, PendingWrite

from . import names
from .bases import Sealed, cut_log, highest, read_part, write_base
from .changes import decode_change, encode_change
from .circuit_breaker import CircuitBreaker
from .heads import BEGINNING, Kind, Progress
from .log import ShardLog
from .objects import Base, Entry
from .reading import LocalWrite
from .snapshots import clear, has_contents, pieces_of_generation, pieces_of_state, put_piece
from .taking_over import Step

__all__ = ["Replica", "begin_log"]

_LONGEST_PAUSE = 60.0
"""The most seconds between two tries to take over a shard."""
_VERSION = 1
_CODEC: RecordCodec[tuple[int, Progress]] = RecordCodec(tuple[int, Progress], _VERSION)


def _encoded(progress: Progress) -> bytes:
    return _CODEC.encode(PROGRESS, (_VERSION, progress))


def _progress_of(shard: Shard) -> Progress:
    """Return the progress that a shard has stored; empty a shard without one, whose copying was interrupted.

    Raises `CorruptionError` and `NewerFormatError`.
    """
    engine = shard.writer.open_engine()
    progress = _stored(engine, f"shard {shard.number}")
    if progress is None and has_contents(engine):
        with shard.generations.replacing() as engine:
            clear(engine)
    return BEGINNING if progress is None else progress


def _stored(reader: Reader, shard: str) -> Progress | None:
    data = reader.get(STATE, PROGRESS)
    return None if data is None else _CODEC.decode(PROGRESS, data, f"{shard}, state: progress")[1]


def _write_base(
    snapshot: Reader, store: LogStore, shard: int, site: str, progress: Progress, changed_by: Callable[[int], int]
) -> None:
    """Write a base of a snapshot; ``changed_by`` returns the last entry that changed a generation, by its number."""
    records = [one for one in load_generations(snapshot) if not one.dropped]
    sealed = [
        Sealed(one.number, changed_by(one.number), partial(pieces_of_generation, snapshot, one.number))
        for one in records
        if one.sealed is not None
    ]
    current = [pieces_of_generation(snapshot, one.number) for one in records if one.sealed is None]
    parts = chain(*current, pieces_of_state(snapshot))
    write_base(store, shard, site, progress, progress.next, parts, sealed)


def check_copied(shard: Shard) -> None:
    """Raise `UnsupportedError` if the copy of a shard is not whole, because a site didn't keep the shard.

    Raises `CorruptionError`.
    """
    place = f"shard {shard.number}"
    if _stored(shard.writer.open_engine(), place) is None:
        raise UnsupportedError(f"this copy lacks {place}: take a copy of a site that keeps all shards")


def begin_log(shard: Shard, store: LogStore, site: str) -> None:
    """Write a base of a shard that has no log yet, and a cut at its index, from which replicas begin.

    The shard gets the progress of the base. The shard must not be written during the call, and afterwards only through
    its log. Bases of earlier calls are superseded. Raises `StorageUnavailableError` and `CorruptionError`.
    """
    number, writer = shard.number, shard.writer
    index = 1 + max(highest(store, names.bases(number)) or 0, highest(store, names.cuts(number)) or 0)
    progress = msgspec.structs.replace(BEGINNING, next=index, last_position=writer.tail.last_position)
    with writer.open_engine().snapshot() as snapshot:
        _write_base(snapshot, store, number, site, progress, lambda _: index - 1)
    cut_log(store, number, site, index)
    writer.commit(lambda pending: pending.write.put(STATE, PROGRESS, _encoded(progress)))


class Replica:
    """A replica of a shard, and the log of its writer. One thread reads the log; any thread may propose writes.

    timeout:  the seconds that a caller waits for the log store; None for no limit.
    patience: the seconds that a proposed write waits for others (`ShardLog`).
    breaker:  the site's circuit breaker for the log store; by default the replica has its own.
    settle:   called after entries or a base of other sites were read, and before they are applied. It returns once the
              site has released each shard that it had lost by the time of the read.
    """

    def __init__(
        self,
        shard: Shard,
        store: LogStore,
        site: str,
        timeout: float | None = None,
        patience: float = 0.0,
        breaker: CircuitBreaker | None = None,
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self.shard = shard
        self.progress = _progress_of(shard)
        """The applied prefix of the log. Set by the thread that applies entries."""
        self._opened = shard.writer.opened
        """The opening or copying of the shard to which `progress` belongs."""
        self.owner = ("", "")
        """The name and address of the site that owns the shard, as the last document says."""
        self.kept = True
        """Whether this site is to keep a copy of the shard. Changed only with `_reading`."""
        self.closing = False
        """Whether the database is being closed."""
        self.missing = 0
        """The number of sites that must join before anything is stored."""
        self.epoch = 0
        """The last epoch that this process has tried to begin; 0 for none."""
        self.tries = 0
        """The number of takeovers that failed since the last one that didn't."""
        self.retry = float("-inf")
        """The time (`time.monotonic`) from which a failed takeover may be tried again, with a new epoch."""
        self.released = False
        """Whether the last applied entry releases the shard."""
        self.failure: str | None = None
        """The error of the last attempt to follow or take over the shard; None if it succeeded."""
        self.caught_up = float("-inf")
        """The time (`time.monotonic`) at which this site last had all entries of the log."""
        self.log = ShardLog(store, shard.number, self, site, patience=patience, breaker=breaker)
        self._site = site
        self._timeout = timeout
        self._place = f"{store.place}: shard {shard.number}"
        self.grown = 0
        """The bytes of the changes that were applied since the last base."""
        self.base_due = False
        """Whether a generation was sealed since the last base."""
        self.base = 0
        """The index of the last base that this process has written; 0 for none."""
        self._emptied = False
        """Whether `drop` has removed the copy of this shard. Guarded by `_reading`."""
        self._changed: dict[int, int] = {}
        """The index of the last entry that changed a generation; of others, `_changed_before`."""
        self._changed_before = self.progress.next - 1
        self._store = store
        self._settle = settle
        self._settled = False
        """Whether `_settle` was called for the entries that were read last. Guarded by `_reading`."""
        self._meanwhile: Callable[[], object] = lambda: None
        self._applying = threading.Lock()
        """Held while an entry is applied, so that no base has a part of it."""
        self._reading = threading.Lock()
        """Held while entries are read and applied that this site hasn't written."""
        with shard.writer.lock:
            shard.writer.log = self

    # --- the state machine of the log ---

    def write(self, entry: Entry, write: LocalWrite) -> None:
        """Apply an entry's changes, if ``write.changes``, and store the progress, in one write of the engine.

        A new owner's fence ends the span of messages that were stored only for sessions
        (`topicstore.storage.site_interest`).
        """
        if not self.log.owned and not self._settled:
            self._settle()
            self._settled = True
        writer = self.shard.writer
        writes = self._writes(entry) if write.changes else [PendingWrite(writer)]
        with self._applying:
            if writer.opened is not self._opened:
                self._accept_reopened()
            for one in writes:
                if one.work is not None:
                    one.result = one.work()
            if entry.head.kind is Kind.FENCE and entry.head.epoch > self.progress.epoch:
                for change in ends(writer.open_engine(), write.progress.last_position):
                    writes[0].write.change_many(STATE, [change.key], [change.value])
            writer.apply(writes, _encoded(write.progress), self._opened)
        self.progress = write.progress
        self.grown += sum(map(len, entry.changes))
        for one in writes:
            if one.change is not None:
                self._note(one.change, entry.head.index)
        self.released = entry.head.kind is Kind.RELEASED and entry.head.epoch == write.progress.epoch

    def _note(self, change: Change, index: int) -> None:
        """Register the generations that an entry has changed, and let the listener discard removed messages."""
        listener = self.shard.writer.listener
        if isinstance(change, AddGeneration):
            self._changed[change.number - 1] = index
            self.base_due = change.number > 1
        elif isinstance(change, Delete):
            for record in self.shard.generations.listed():
                if record.first_position <= change.last and (record.last_position or change.first) >= change.first:
                    self._changed[record.number] = index
            if listener is not None:
                listener.forget()
        elif listener is not None:
            listener.dropped()

    def _writes(self, entry: Entry) -> list[PendingWrite]:
        """Return the writes of an entry: those that were proposed here, or those that its changes say."""
        writer = self.shard.writer
        with writer.lock:
            proposed = list(islice(writer.proposed, len(entry.changes)))
        if proposed and proposed[0].proposal.change is entry.changes[0]:
            return proposed
        place = f"{self._place}, log entry {entry.head.index}"
        return [decode_change(self.shard, change, place) for change in entry.changes]

    def take_base(self, base: Base) -> None:
        """Replace the shard's contents by a base.

        If this is interrupted, the shard counts as empty, can't be read, and the next attempt begins anew. Raises
        `CorruptionError`, `StorageUnavailableError`, and `ObjectNotFoundError` if the base was deleted.
        """
        shard, writer = self.shard, self.shard.writer
        self._settle()
        with shard.generations.replacing() as engine:
            try:
                self._copy(base, engine)
            except BaseException:
                shard.read_copy(False)
                raise
        self.progress, self._opened = base.progress, writer.opened
        self.released = False
        self._changed = {shared.generation: shared.changed for shared in base.shared}
        self._changed_before = base.progress.next - 1
        self.grown = 0
        if writer.listener is not None:
            writer.listener.replaced(shard.number)

    def _copy(self, base: Base, engine: Engine) -> None:
        clear(engine, self._meanwhile)
        for part in (*(part for shared in base.shared for part in shared.parts), *base.parts):
            write = WriteBatch()
            put_piece(read_part(self._store, part), write, f"{self._place}, part {part.name}")
            engine.write(write)
            self.shard.writer.counters.bytes += write.size  # the quota sums up the live bytes again
            self._meanwhile()
        finished = WriteBatch()
        finished.put(STATE, PROGRESS, _encoded(base.progress))
        engine.write(finished)

    def keep(self) -> bool:
        """Let the site keep a copy. It can be read once `follow` has received it from the log store.

        Returns False, and does nothing, while `drop` removes an earlier copy.
        """
        if not self._reading.acquire(blocking=False):
            return False
        try:
            self._emptied, self.kept = False, True
            return True
        finally:
            self._reading.release()

    def refuse(self) -> bool:
        """Refuse further reads of this site's copy, which is to be dropped; return whether the copy was kept until now.

        Readers then ask a site that keeps the shard, or get `ShardElsewhereError`. The caller must have checked that
        this site does not own the shard. Does nothing, and returns False, while the shard's log is being read.
        """
        if not self.kept or not self._reading.acquire(blocking=False):
            return False
        try:
            self.kept = False
            self.shard.read_copy(False)
            return True
        finally:
            self._reading.release()

    def drop(self) -> None:
        """Remove this site's copy of a shard that is not kept; do nothing for other shards. This may take long.

        If the call is interrupted, the next call removes the rest.
        """
        shard, writer = self.shard, self.shard.writer
        with self._reading:
            if self.kept or self._emptied:
                return
            self._step_down()
            with shard.generations.replacing() as engine:
                if has_contents(engine):
                    clear(engine)
            self._go_by_what_is_stored()
            self._changed, self._changed_before = {}, -1
            self.grown, self.base_due, self.base = 0, False, 0
            self._emptied = True
        if writer.listener is not None:
            writer.listener.replaced(shard.number)

    def write_base(self) -> None:
        """Write a base with all applied entries. Raises `StorageUnavailableError`."""
        with self._applying:
            self.grown, self.base_due = 0, False
            snapshot = self.shard.writer.open_engine().snapshot()
        with snapshot:
            progress = _stored(snapshot, self._place) or BEGINNING
            _write_base(
                snapshot, self._store, self.shard.number, self._site, progress, partial(self._changed_by, progress)
            )
        self.base = progress.next

    def _changed_by(self, progress: Progress, generation: int) -> int:
        """Return the index of an entry before ``progress`` after which no other one before it changed a generation."""
        return min(self._changed.get(generation, self._changed_before), progress.next - 1)

    # --- reading ---

    def follow(self, *, certain: bool = True, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Apply the entries of the log to its end; with ``certain``, all that were acknowledged before the call.

        Afterwards the copy can be read. ``meanwhile`` is called after each of the steps, of a few seconds at most. Does
        nothing while this site owns the shard. Raises the errors of `topicstore.replication.log_reader.LogReader.read`.
        """
        with self._reading:
            self._follow_locked(certain, meanwhile)

    def _follow_locked(self, certain: bool, meanwhile: Callable[[], object]) -> None:
        self._step_down()
        if self.shard.writer.opened is not self._opened and not self.log.owned:
            self._go_by_what_is_stored()
        self._meanwhile = meanwhile
        while self.kept and not self.log.owned:
            began, writer, self._settled = time.monotonic(), self.shard.writer, False
            if self.log.reader.read(certain=certain or writer.elsewhere) is not Step.READ:
                self.caught_up = began
                if writer.elsewhere:
                    self.shard.read_copy(True)
                return
            meanwhile()

    def _accept_reopened(self) -> None:
        """Let entries be applied to a shard that was reopened, if it lacks nothing and has nothing more."""
        writer = self.shard.writer
        with writer.lock:
            if _stored(writer.open_engine(), self._place) == self.progress:
                self._opened = writer.opened

    def _go_by_what_is_stored(self) -> None:
        """Read on where the shard's contents end, after it was reopened, or its copying was interrupted.

        A reopened shard may lack the last applied entries, or have the one that failed.
        """
        shard = self.shard
        with shard.generations.rewrite_lock, shard.writer.lock:
            self.progress, self._opened = _progress_of(shard), shard.writer.opened
        self.released = False
        self.log.reader.begin_again()

    def confirm(self) -> None:
        """Return when this replica has applied all that was acknowledged before the call, on any site.

        The owner looks for the next entry too, because another site may have taken over without the owner's knowledge.
        Raises `StorageUnavailableError`, and the other errors of `follow`.
        """
        if not self._reading.acquire(timeout=-1 if self._timeout is None else self._timeout):
            raise StorageUnavailableError(f"{self._place}: the log could not be read{self.log.reason}")
        try:
            if self.log.owned and self._is_deposed() and not self.log.release(self._timeout):
                raise StorageUnavailableError(f"{self._place} has moved{self.log.reason}")
            self._follow_locked(True, lambda: None)
        finally:
            self._reading.release()

    def _is_deposed(self) -> bool:
        """Return whether the log has an entry of a later epoch after those of this owner."""
        index = self.progress.next
        while (head := self.log.reader.head(index)) is not None:
            if head.epoch > self.epoch:
                return True
            index += 1
        return False

    def take_over(self, epoch: int, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Become the shard's owner with an epoch, its fencing token; return False if a later epoch has begun.

        ``meanwhile`` is called now and then while entries are read. Raises the errors of `ShardLog.take_over`.
        """
        with self._reading:
            self.epoch, self.tries = epoch, self.tries + 1
            self.retry = time.monotonic() + min(_LONGEST_PAUSE, 2.0**self.tries)
            self._follow_locked(False, meanwhile)
            self._settled = False
            if not self.log.take_over(epoch):
                return False
            self.tries = 0
            return True

    def _step_down(self) -> None:
        """Forget the writes that were proposed while this site owned the shard, and will not be applied."""
        writer = self.shard.writer
        with writer.lock:
            if not self.log.owned and writer.proposed:
                writer.abandon_locked()

    # --- the log of the writer ---

    @property
    def owned(self) -> bool:
        """Whether this site may propose writes."""
        return self.log.owned

    @property
    def applied(self) -> int:
        """The number of entries of the log that are applied to the copy."""
        return self.progress.next

    @property
    def failed(self) -> bool:
        """Whether a write of the copy has failed. The copy then takes no writes and no entries until it is reopened."""
        return self.shard.writer.failure is not None

    def check_owned(self) -> None:
        """Raise `ShardElsewhereError` if another site, or none, owns the shard.

        A site that the cluster document names as the owner passes, too, if its copy takes no writes since one failed.
        """
        shard, (site, address) = self.shard.number, self.owner
        if not self.log.owned and not (self.failed and site == self._site):
            owner = f"site {site}" + f" ({address})" * bool(address) if site else "no site"
            raise ShardElsewhereError(f"shard {shard} is written by {owner}", shard, site, address)

    def encode_locked(self, pending: PendingWrite) -> None:
        """Encode a prepared write.

        Raises `LogFullError`, `EntryTooLargeError`, `ClusterNotReadyError`, `ShardElsewhereError`, `ShardMovedError`,
        `DatabaseClosedError`, and the error that has stopped the log.
        """
        if self.closing:
            raise DatabaseClosedError("the database is closed")
        if self.missing and pending.change is None:
            raise ClusterNotReadyError(
                f"{self.missing} more sites must join the cluster before anything is stored (n_sites)"
            )
        self.check_owned()
        pending.proposal = encode_change(pending)
        self.log.check(len(pending.proposal))

    def propose_locked(self, pending: PendingWrite) -> None:
        """Queue an encoded write for the log. Raises `ShardMovedError` if this site has ceased to own the shard."""
        writer = self.shard.writer
        before = writer.proposed[-1] if writer.proposed else writer.tail
        first = int(pending.batch.positions[0]) if len(pending.batch) else pending.last_position
        span = (first, pending.last_position) if pending.last_position > before.last_position else (0, 0)
        pending.proposal = self.log.propose(pending.proposal, *span, alone=pending.change is not None)

    def wait_for_room(self, pending: PendingWrite) -> None:
        """Return when the queue may have room for a write. Raises `StorageUnavailableError` after the timeout."""
        self.log.wait_for_room(len(pending.proposal), self._timeout)

    def wait(self, pending: PendingWrite) -> None:
        """Return when a write is in the log and applied. Raises the errors of `Proposal.wait`."""
        pending.proposal.wait(self._timeout)
