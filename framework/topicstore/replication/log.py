"""`ShardLog`: one shard's log on one site, which follows, takes over, writes and releases the shard.

One thread writes. A caller that stores something proposes a change under the shard's lock, and waits for the change
without the lock. Changes proposed while a PUT is in flight become the next entry (group commit). If there are such
changes, their PUT begins immediately, while a second thread applies the entry before.
"""

from __future__ import annotations

import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue

import attrs

from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError, ShardMovedError
from topicstore.contract.log_store import LogStore, ObjectExistsError, ObjectNotFoundError, StorageUnavailableError
from topicstore.runtime.background import end_at_exit
from topicstore.runtime.wake_event import AutoResetEvent
from topicstore.shard.writer import LogFullError

from . import names
from .circuit_breaker import CircuitBreaker
from .heads import Head, Kind, Progress
from .log_reader import LogReader, Machine
from .objects import CHANGE_OVERHEAD, LARGEST_CHANGE, Entry, EntryTooLargeError, decode_entry, encode_entry
from .owning import Answer, Outcome, Stage, after_put, again, may_acknowledge, may_put, may_release
from .reading import apply
from .taking_over import Step, after_fence, after_look, after_reading, at_end

__all__ = ["Proposal", "ShardLog"]

_MOST_BYTES = 8 << 20
"""The most bytes of the changes of one entry, unless the entry has a single, larger change."""
_MOST_QUEUED = 64 << 20
"""The bytes of queued changes at which the queue is full, unless a single change has more."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
"""The least and the most seconds between two tries of a PUT."""


@attrs.define(eq=False)
class Proposal:
    """A change that was queued for the log and can be waited for."""

    change: bytes
    first_position: int
    """The lowest position that the change assigns; 0 if it assigns none."""
    last_position: int
    alone: bool
    """Whether the change must be the only one of its entry."""
    _log: ShardLog
    _proposed: float = attrs.field(factory=time.monotonic, init=False)
    """The time (`time.monotonic`) of the proposal."""
    _done: threading.Event = attrs.field(factory=threading.Event, init=False)
    _failure: BaseException | None = attrs.field(default=None, init=False)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the change is in the log and applied on this site.

        Raises `ShardMovedError`, the error with which applying the change failed, or `StorageUnavailableError` if
        there is no result within ``timeout`` seconds of the proposal; the change is then still in progress and may be
        stored later. Until the store answers, `ShardLog.check` refuses further changes immediately.
        """
        left = None if timeout is None else max(self._proposed + timeout - time.monotonic(), 0.0)
        if not self._done.wait(left):
            reason = f"the store has not answered for {timeout:g} s{self._log.reason}"
            self._log.waited(self._proposed, reason)
            raise StorageUnavailableError(f"{reason}; the change is still on its way, and may be stored")
        if self._failure is not None:
            raise self._failure

    def settle(self, failure: BaseException | None = None) -> None:
        """End the wait of `wait`: successfully, or with ``failure``, which `wait` raises. Later calls do nothing.

        Called by the log's threads one after the other.
        """
        if not self._done.is_set():
            self._failure = failure
            self._done.set()


class _Applier:
    """Runs functions in a second thread, one at a time; without ``threads``, at the end of `beside`."""

    def __init__(self, name: str, *, threads: bool) -> None:
        self._name = name
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()

    @contextmanager
    def beside(self, call: Callable[[], object] | None) -> Iterator[None]:
        """Run ``call`` while the body runs; wait for it at the end, and raise its error."""
        if call is not None and self._threads:
            self._begin()
            self._calls.put(call)
        try:
            yield
        finally:
            if call is not None and not self._threads:
                call()
            elif call is not None and (error := self._results.get()) is not None:
                raise error

    def end(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
            self._thread = None

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - `beside` raises it
                self._results.put(error)
            else:
                self._results.put(None)


class ShardLog:
    """A shard's log on one site. One thread takes over; any thread may propose changes.

    ``pause`` is called with the number of tries before a PUT is repeated, and waits. ``identity`` returns a number of
    random bytes, for the id of an entry. Without ``threads``, the log starts none: its user calls `write_queued` after
    proposing.

    ``patience`` is the number of seconds that a change waits for others, to become one entry with them. A change does
    not wait once the queued ones fill an entry, the shard is to be released, or the log is closed. ``breaker`` is
    shared by all logs of a site.
    """

    def __init__(
        self,
        store: LogStore,
        shard: int,
        machine: Machine,
        site: str,
        pause: Callable[[int], object] | None = None,
        *,
        identity: Callable[[int], bytes] = secrets.token_bytes,
        threads: bool = True,
        patience: float = 0.0,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.reader = LogReader(store, shard, machine)
        self._store = store
        self._shard = shard
        self._machine = machine
        self._site = site
        self._pause = pause or self._back_off
        self._identity = identity
        self._threads = threads
        self._lock = threading.Lock()
        """Guards the queue, the number of PUTs in flight, and the reason why proposals are refused."""
        self._room = threading.Condition(self._lock)
        """Notified when the queue becomes shorter."""
        self._patience = patience
        self._complete = threading.Condition(self._lock)
        """Notified when the queued changes need not wait for others any more."""
        self._due = float("-inf")
        """The time (`time.monotonic`) at which the queued changes are to be written. Guarded by the lock."""
        self._queue: list[Proposal] = []
        self._queued = 0
        """The bytes of the queued changes, `CHANGE_OVERHEAD` included."""
        self._in_flight = 0
        self.takeovers = 0
        """The number of times that this site has become the owner."""
        self.fenced = 0
        """The number of entries that could not be written, because another site had become the owner."""
        self._refuses: BaseException | None = ShardMovedError(f"site {site} does not own shard {shard}")
        """The error that `propose` raises; None while this site owns the shard."""
        self._leaving = False
        """Whether the shard is to be released as soon as the queue is empty."""
        self._stopping = threading.Event()
        self._wake = AutoResetEvent()
        self._applier = _Applier(f"topicstore-applying-{shard}", threads=threads)
        self.failure: str | None = None
        """The error with which the store answered the last PUT; None after a success. Reading it needs no lock."""
        self._breakers = (CircuitBreaker(), CircuitBreaker() if breaker is None else breaker)
        """The circuit breakers of this log and of the site."""
        self._unanswered = False
        """Whether a try of the current entry had no answer. Used by the writing thread."""
        self._epoch = 0
        self._thread: threading.Thread | None = None
        end_at_exit(self, ShardLog.close)

    @property
    def owned(self) -> bool:
        """Whether this site accepts proposals. Another site may already own the shard; the next PUT detects this."""
        return self._refuses is None

    @property
    def reason(self) -> str:
        """The store's last error in parentheses, to be appended to an error message; empty without an error."""
        failure = self.failure
        return "" if failure is None else f" ({failure})"

    # --- taking over ---

    def take_over(self, epoch: int) -> bool:
        """Become the owner with an epoch (a fencing token) from a cluster document; return whether it succeeded.

        False means that another site has a higher epoch: continue with `LogReader.read`. No other thread may call
        `LogReader.read` during this call or while this site owns the shard. Raises the errors of `LogReader.read`,
        `DatabaseClosedError` after `close`, and `InvalidArgumentError` if this site owns the shard already.
        """
        if self.owned:
            raise InvalidArgumentError(f"site {self._site} owns shard {self._shard} already, with epoch {self._epoch}")
        self._join()  # the writing thread of an earlier epoch may still be failing its proposals
        if self._stopping.is_set():
            raise DatabaseClosedError("the log was closed")
        while True:
            step = self.reader.read(epoch)
            if step is Step.FENCE and at_end() is Step.FENCE:
                step = self._fence(epoch)
            if step is Step.STOP:
                return False
            if step is Step.OWN:
                self._begin(epoch)
                return True

    def _fence(self, epoch: int) -> Step:
        fence, outcome, _ = self._put(self._head(Kind.FENCE, epoch, self._machine.progress), ())
        step = after_fence(outcome)
        if step is not Step.LOOK:
            return step
        if after_look(fence.head, self.reader.cut()) is Step.BASE:
            self.reader.take_base()
            return after_reading(epoch, self._machine.progress)
        self.reader.apply(fence)
        return Step.OWN

    def _begin(self, epoch: int) -> None:
        with self._lock:
            self._epoch, self._refuses, self._leaving = epoch, None, False
            self._breakers[0].reset()
            self.takeovers += 1
            if self._threads:
                self._thread = threading.Thread(target=self._work, name=f"topicstore-log-{self._shard}", daemon=True)
                self._thread.start()

    # --- writing ---

    def check(self, size: int) -> None:
        """Raise the error that `propose` raises for a change of ``size`` bytes; return if the change is accepted.

        Also raises `StorageUnavailableError` while a `CircuitBreaker` is open, so that callers don't wait for an
        unresponsive store one after the other. Until the caller releases the shard's lock, only a change of the owner
        can make a later `propose` fail.
        """
        with self._lock:
            reason = next((one.reason for one in self._breakers if one.reason is not None), None)
            if self._refuses is None and reason is not None:
                raise StorageUnavailableError(f"{reason}; nothing was queued")
            self._check_locked(size)

    def waited(self, since: float, reason: str) -> None:
        """Let `check` refuse changes, because a caller's wait for the store, begun at ``since``, has timed out."""
        for breaker in self._breakers:
            breaker.trip(since, reason)

    def _check_locked(self, size: int) -> None:
        if size + CHANGE_OVERHEAD > LARGEST_CHANGE:
            raise EntryTooLargeError(
                f"a change has {size} bytes, and a log entry has room for {LARGEST_CHANGE - CHANGE_OVERHEAD}; "
                "split the batch"
            )
        if self._refuses is not None:
            raise self._refuses.with_traceback(None)
        if self._leaving:
            raise ShardMovedError(f"site {self._site} is releasing shard {self._shard}")
        if not self._has_room_locked(size):
            raise LogFullError(f"{self._queued} bytes of changes wait for the store{self.reason}")

    def propose(
        self, change: bytes, first_position: int = 0, last_position: int = 0, *, alone: bool = False
    ) -> Proposal:
        """Queue a change for the log; return without waiting for it. With ``alone``, it gets an entry of its own.

        The caller holds the shard's lock, so that proposals are queued in the order of their positions. Changes are
        acknowledged in this order too. So a batch that is too large for one change is proposed as several, and its
        caller waits only for the last. Raises `LogFullError`, `EntryTooLargeError` for more than `LARGEST_CHANGE` bytes
        less `CHANGE_OVERHEAD`, `ShardMovedError`, or the error that has stopped the log.
        """
        proposal = Proposal(change, first_position, last_position, alone, self)
        with self._lock:
            self._check_locked(len(change))
            if not self._queue and self._patience:
                self._due = time.monotonic() + self._patience
            self._queue.append(proposal)
            self._queued += len(change) + CHANGE_OVERHEAD
            if self._queued >= _MOST_BYTES:
                self._complete.notify_all()
        self._wake.set()
        return proposal

    def wait_for_room(self, size: int, timeout: float | None = None) -> None:
        """Wait until a change of ``size`` bytes fits in the queue, or the log accepts no changes at all.

        The caller doesn't hold the shard's lock, which applying an entry may need. Raises `StorageUnavailableError`
        after ``timeout`` seconds; then `check` refuses changes immediately until the store answers.
        """
        began = time.monotonic()
        with self._room:
            done = self._room.wait_for(lambda: self._has_room_locked(size) or self._refuses is not None, timeout)
        if not done:
            reason = f"the store has not taken queued changes for {timeout:g} s{self.reason}"
            self.waited(began, reason)
            raise StorageUnavailableError(f"{reason}; nothing was queued")

    def _has_room_locked(self, size: int) -> bool:
        return not self._queue or self._queued + size + CHANGE_OVERHEAD <= _MOST_QUEUED

    def leave(self) -> None:
        """Begin to release the shard: refuse further changes, write the queued ones, and then a release entry."""
        with self._lock:
            self._leaving = True
            self._complete.notify_all()
        self._wake.set()

    def release(self, timeout: float | None = None) -> bool:
        """Release the shard, and wait until this is done; return False if it isn't after ``timeout`` seconds.

        The call also returns if another site has taken over the shard.
        """
        self.leave()
        return self._join(timeout)

    def close(self) -> None:
        """Stop the log. Queued and in-flight changes fail; the changes in flight may still be stored."""
        self._stopping.set()
        with self._lock:
            self._complete.notify_all()
        self._wake.set()
        self._join()

    def _join(self, timeout: float | None = None) -> bool:
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self.write_queued():
            self._wake.wait(None)
        self._applier.end()

    def write_queued(self) -> bool:
        """Write and apply the queued changes, and release the shard if `release` has requested that.

        Returns whether this site still owns the shard. Errors are raised by `Proposal.wait`, not here. Called by the
        log's own thread, or by its user's if it has none.
        """
        written: list[Entry] = []
        """The last entries that are in the log, which are applied while the PUT of the next one is in flight."""
        applying: list[Proposal] = []
        pending: list[Proposal] = []
        at = self._machine.progress
        try:
            while True:
                pending = [] if self._stopping.is_set() else self._next(patient=not written)
                if pending:
                    with self._applier.beside(partial(self._apply, written, applying) if written else None):
                        entries = self._put_next(Kind.CHANGES, pending, at)
                    with self._lock:
                        self._in_flight -= 1
                    written, applying = entries, pending
                    at = self._after(at, written)
                elif written:
                    self._apply(written, applying)
                    written, applying = [], []
                elif self._stopping.is_set():
                    raise ShardMovedError(f"site {self._site} has stopped writing shard {self._shard}")
                elif self._may_release():
                    self._apply(self._put_next(Kind.RELEASED, (), at), ())
                    raise ShardMovedError(f"site {self._site} has released shard {self._shard}")
                else:
                    return True
        except BaseException as error:  # noqa: BLE001 - every thread that waits raises it
            self._end([*applying, *pending], error)
        return False

    def _next(self, *, patient: bool) -> list[Proposal]:
        """Take the changes of the next entry from the queue; none while a PUT is in flight.

        If the changes are to wait for others, the call waits if it is ``patient``, and otherwise takes none.
        """
        with self._lock:
            if not may_put(self._in_flight, len(self._queue)):
                return []
            while (left := self._left_locked()) > 0:
                if not patient:
                    return []
                self._complete.wait(left)
            if self._stopping.is_set():
                return []
            size = number = 0
            for proposal in self._queue:
                size += len(proposal.change) + CHANGE_OVERHEAD
                if number and (proposal.alone or size > _MOST_BYTES):
                    break
                number += 1
                if proposal.alone:
                    break
            taken, self._queue = self._queue[:number], self._queue[number:]
            self._queued -= sum(len(proposal.change) + CHANGE_OVERHEAD for proposal in taken)
            self._due = float("-inf")  # the remaining changes have waited long enough
            self._room.notify_all()
            self._in_flight += 1
            return taken

    def _left_locked(self) -> float:
        """Return the seconds that the queued changes still wait for others."""
        if self._leaving or self._stopping.is_set() or self._queued >= _MOST_BYTES:
            return 0.0
        return self._due - time.monotonic()

    def _may_release(self) -> bool:
        with self._lock:
            return self._leaving and may_release(self._in_flight, len(self._queue))

    def _apply(self, written: Sequence[Entry], pending: Sequence[Proposal]) -> None:
        """Apply entries that are in the log, and then acknowledge their changes."""
        for entry in written:
            self.reader.apply(entry)
        if may_acknowledge(Stage.APPLIED):
            for proposal in pending:
                proposal.settle()

    def _put_next(self, kind: Kind, pending: Sequence[Proposal], at: Progress) -> list[Entry]:
        """Write the entry that follows ``at``; return it after the void entries before it. Raises `ShardMovedError`."""
        identity = self._identity(16)
        changes = tuple(proposal.change for proposal in pending)
        void: list[Entry] = []
        while True:
            entry, outcome, found = self._put(self._head(kind, self._epoch, at, pending, identity), changes)
            if outcome is Outcome.WRITTEN:
                return [*void, entry]
            if outcome is Outcome.FENCED or found is None:
                self.fenced += 1
                owner = f"site {found.head.site}" if found is not None else "another site"
                reason = f"shard {self._shard} has moved to {owner}; epoch {self._epoch} is over"
                # After a lost answer, the entry may have been written, applied by others, and deleted by truncation.
                raise ShardMovedError(reason, stored=None if self._unanswered else False)
            void.append(found)
            at = self._after(at, [found])

    @staticmethod
    def _after(at: Progress, written: Sequence[Entry]) -> Progress:
        """Return the progress after entries that follow ``at``."""
        for entry in written:
            at = apply(at, entry.head)[-1].progress
        return at

    def _head(
        self, kind: Kind, epoch: int, at: Progress, pending: Sequence[Proposal] = (), identity: bytes = b""
    ) -> Head:
        positions = [one for one in pending if one.last_position]
        return Head(
            index=at.next,
            kind=kind,
            epoch=epoch,
            id=identity or self._identity(16),
            site=self._site,
            before=at.before,
            checksum=b"",
            first_position=positions[0].first_position if positions else 0,
            last_position=positions[-1].last_position if positions else 0,
            fence=at.fence,
        )

    def _put(self, head: Head, changes: tuple[bytes, ...]) -> tuple[Entry, Outcome, Entry | None]:
        """Send an entry until its outcome is known; return the entry, the outcome, and the entry found at its index."""
        tries = 0
        self._unanswered = False
        while True:
            entry, data = encode_entry(self._shard, head, changes)
            answer, found = self._create(entry.head.index, data)
            self._unanswered = self._unanswered or answer is Answer.NONE
            outcome = after_put(entry.head, answer, found.head if found is not None else None)
            if outcome is not Outcome.AGAIN:
                return entry, outcome, found
            head, tries = again(head), tries + 1
            self._pause(tries)
            if self._stopping.is_set():
                raise StorageUnavailableError(
                    f"the log was closed before the store answered{self.reason}; the change may be stored"
                )

    def _create(self, index: int, data: bytes) -> tuple[Answer, Entry | None]:
        name = names.entry(self._shard, index)
        answer, found = Answer.CREATED, None
        try:
            try:
                self._store.create(name, data)
            except ObjectExistsError:
                answer = Answer.EXISTS
                found = decode_entry(self._shard, index, self._store.get(name), self._store.place)
        except ObjectNotFoundError:
            self._failed(f"{self._store.place} says that {name} is taken, and has no such object")
        except StorageUnavailableError as error:
            self._failed(str(error))
            return Answer.NONE, None
        else:
            self.failure = None
            for breaker in self._breakers:
                breaker.reset()
        return answer, found

    def _failed(self, failure: str) -> None:
        known, self.failure = self.failure, failure
        if failure != known:
            with suppress(RuntimeWarning):  # if warnings are errors, `failure` still reports it
                warnings.warn(f"the log of shard {self._shard} waits: {failure}", RuntimeWarning, stacklevel=1)

    def _back_off(self, tries: int) -> None:
        self._stopping.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(tries, 10)))

    def _end(self, pending: Sequence[Proposal], reason: BaseException) -> None:
        """Refuse further proposals with ``reason``, and fail the pending and queued ones with it."""
        with self._lock:
            self._refuses = reason
            self._in_flight = 0
            queued, self._queue, self._queued = self._queue, [], 0
            self._room.notify_all()
        for proposal in pending:
            proposal.settle(reason)
        if isinstance(reason, ShardMovedError) and reason.stored is not False:
            reason = ShardMovedError(str(reason))
        for proposal in queued:
            proposal.settle(reason)
