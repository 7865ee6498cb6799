"""`Dispatcher`: the queue of sessions that have packets to deliver or events to handle, filled by events, not polling.

A subscription that has read all its messages waits in the `FilterListener` of its filter. All sessions in this process
with the same filter share one listener. A commit notifies the listener; the subscriptions that wait there for the
commit's shard become ready, and their sessions with them. So a session without traffic costs nothing.

All code of sessions runs under the sessions' mutex, `FilterListeners.mutex`. Exceptions are methods that the storing
thread calls, and methods that a server calls in its event loop, such as acknowledgements: they take no lock and only
record an event. While an engine writes, the mutex is released, and the sessions that are written are locked
(`topicstore.sessions.locks`).

A filter is registered with the hub before the mutex is acquired, because that waits for the locks of all shards.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import Generic, Protocol, TypeVar

import attrs

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock, remember
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.nonpersistent import MOST, MOST_BYTES
from topicstore.pubsub.notifier import Notifier, TaskWaiter, ThreadWaiter
from topicstore.runtime.clocks import SteadyClock
from topicstore.runtime.closing import guarded

from .locks import SessionMutex

__all__ = ["Dispatcher", "FilterListener", "FilterListeners", "WaitingCursor"]


class Attentive(Protocol):
    """The dispatcher's view of a connected session."""

    def __hash__(self) -> int:
        """Return the identity, as objects do by default."""

    def noticed(self) -> None:
        """Handle the event that `Dispatcher.hear` recorded."""


R = TypeVar("R", bound=Attentive)
T = TypeVar("T")

_FEW = 16
"""Largest number of cursors that are closed at once when their session ends."""
_CLOSED = 500
"""Number of cursors that are closed in one batch, which takes a few milliseconds."""


class WaitingCursor(Protocol):
    """A subscription that waits in a listener for new messages."""

    def wake(self, shard: int) -> None:
        """Handle the event that a shard may have new messages."""

    def take_nonpersistent(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored, published at ``now``; ``marks``: the shards' watermarks."""

    def miss_nonpersistent(self, messages: list[Message]) -> None:
        """Count the messages, not stored and dropped, that `take_nonpersistent` would have queued. Needs no lock."""


@attrs.frozen
class _Routed:
    """Published messages that are not stored."""

    messages: list[Message]
    marks: list[int]
    """The shards' watermarks when the messages were published."""
    time: int
    size: int
    """The size of the payloads in bytes."""


class FilterListener:
    """A topic filter, and the subscriptions in this process that follow it."""

    __slots__ = (
        "_bytes",
        "_count",
        "_listeners",
        "_noted",
        "_routed",
        "_waiting",
        "feed",
        "listening",
        "nonpersistent",
        "passed",
        "users",
    )

    def __init__(self, listeners: FilterListeners, feed: Feed, shards: int) -> None:
        self.feed = feed
        self.users = 0
        """The number of calls of `FilterListeners.follow` that `FilterListeners.unfollow` has not undone yet."""
        self.listening = False
        """Whether the hub announces batches to it. Set once, without a lock."""
        self.nonpersistent: dict[WaitingCursor, None] = {}
        """The followers that also receive messages that are not stored."""
        self._listeners = listeners
        self._waiting: list[dict[WaitingCursor, None]] = [{} for _ in range(shards)]
        """By shard, the followers that wait for new messages. The sessions' mutex guards `nonpersistent` and this;
        the storing thread reads `nonpersistent` without the lock."""
        self._noted: dict[int, None] = {}
        """The shards with new messages. The storing thread adds to it without a lock."""
        self._routed: collections.deque[_Routed] | None = None  # a deque takes 760 bytes, and most filters need none
        """The published messages that are not stored; None if there are none. `FilterListeners.counting` guards it, and
        the next two."""
        self._count = 0
        """The number of messages in `_routed`."""
        self._bytes = 0
        """The size of their payloads in bytes."""
        self.passed = 0
        """The number of times that waiting followers were woken. Guarded by the sessions' mutex."""

    def wait_locked(self, cursor: WaitingCursor, shard: int) -> None:
        """Make a follower wait; `WaitingCursor.wake` is called once the shard has new messages."""
        self._waiting[shard][cursor] = None

    def leave_locked(self, cursor: WaitingCursor) -> None:
        """Remove a follower."""
        self.nonpersistent.pop(cursor, None)
        for waiting in self._waiting:
            waiting.pop(cursor, None)

    # --- methods of `topicstore.pubsub.hub.Listener`, called by the storing thread ---

    def on_stored(self, feed: Feed, shard: int) -> None:
        """Record that a shard has new messages."""
        if shard not in self._noted:
            self._noted[shard] = None
            self._listeners.note(self)

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        """Queue messages that are not stored, if a follower receives them; drop the oldest ones above the limits."""
        if self.nonpersistent:
            routed = self._listeners.routed(messages)
            dropped = []
            with self._listeners.counting:
                waiting = self._routed = self._routed or collections.deque()
                waiting.append(routed)
                self._count += len(messages)
                self._bytes += routed.size
                while self._follow_enough(waiting[0]):
                    dropped.append(self._take(waiting))
            for gone in dropped:
                for cursor in list(self.nonpersistent):
                    cursor.miss_nonpersistent(gone.messages)
            self._listeners.note(self)

    def _follow_enough(self, oldest: _Routed) -> bool:
        """Return whether the messages after ``oldest`` alone fill the limits, so that every follower would drop it."""
        return self._count - len(oldest.messages) >= MOST or self._bytes - oldest.size >= MOST_BYTES

    def _take(self, waiting: collections.deque[_Routed]) -> _Routed:
        """Remove and return the oldest entry of `_routed`. The caller holds `FilterListeners.counting`."""
        routed = waiting.popleft()
        self._count -= len(routed.messages)
        self._bytes -= routed.size
        return routed

    def closed(self) -> None:
        """Mark the database as closed, and wake the waiting threads and tasks."""
        self._listeners.close()

    # --- under the sessions' mutex ---

    def pass_on_locked(self) -> None:
        """Wake the waiting followers of shards with new messages, and hand over the messages that are not stored."""
        while self._noted:
            shard, _ = self._noted.popitem()  # removed before followers wake, so that a later event is recorded again
            self.passed += 1
            waiting, self._waiting[shard] = self._waiting[shard], {}
            for cursor in waiting:
                cursor.wake(shard)
        while True:
            with self._listeners.counting:
                if not self._routed:
                    self._routed = None
                    break
                routed = self._take(self._routed)
            for cursor in list(self.nonpersistent):
                cursor.take_nonpersistent(routed.messages, routed.marks, routed.time)


class FilterListeners:
    """The listeners of one open database, and the mutex that guards its sessions."""

    def __init__(
        self,
        hub: Hub,
        shards: int,
        shard_of: Callable[[str], int],
        clock: Callable[[], int],
        steady: SteadyClock,
    ) -> None:
        self.hub = hub
        self.shard_of = shard_of
        self.clock = clock
        """The wall clock, by which messages expire."""
        self.steady = steady
        """The clock for all other times, which never jumps."""
        self.mutex = SessionMutex()
        self.notifier = Notifier()
        """Wakes the waiting threads and tasks when a session may have packets to deliver."""
        self.counting = ProcessLock()
        """Guards the counts and queues of messages that are not stored. Held for microseconds, with or without `mutex`.
        Its holder takes no other lock."""
        self.missed = 0
        """The number of messages of QoS 0 that were dropped because their sessions did not fetch them in time. Guarded
        by `counting`; may be read without it."""
        self.closed = False
        """Set once, by `close` or in a forked child; reading it needs no lock."""
        self._inherited = False
        """Whether this is a forked child, in which every call is refused. Set before `closed`."""
        self._shards = shards
        self._listeners: dict[str, FilterListener] = {}
        """The listeners by filter. Guarded by `_registering`, as are their numbers of users."""
        self._registering = ProcessLock()
        """Held for microseconds, with or without `mutex`. Its holder takes no other lock but the hub's."""
        self._routed: _Routed | None = None
        """The entry that `routed` returned last. Replaced as a whole, without a lock."""
        self._noted: collections.deque[FilterListener] = collections.deque()
        """The listeners with new events. Any thread appends to it, without a lock."""

    def follow(self, topic_filter: TopicFilter) -> FilterListener:
        """Return the listener of a filter, registered with the hub, and increment its number of users.

        Registering a new filter waits for the locks of all shards, and so perhaps for the engine. Under the mutex this
        may be called only for a filter that has a user already.
        """
        with self._registering:
            listener = self._listeners.get(topic_filter.text)
            if listener is None:
                listener = self._listeners[topic_filter.text] = FilterListener(
                    self, self.hub.feed(topic_filter), self._shards
                )
            listener.users += 1
        if not listener.listening:
            try:
                self.hub.listen(listener.feed, listener)
            except BaseException:
                self.unfollow(listener)
                raise
            listener.listening = True
        return listener

    def unfollow(self, listener: FilterListener) -> None:
        """Decrement a listener's number of users, and remove it from the hub if it has none left. Thread-safe."""
        with self._registering:
            listener.users -= 1
            if not listener.users:
                del self._listeners[listener.feed.topic_filter.text]
                self.hub.leave(listener.feed, listener)

    def following(self, topic_filters: Iterable[TopicFilter], work: Callable[[], T]) -> T:
        """Call ``work``, during which `follow` doesn't wait for these filters; return its result."""
        followed: list[FilterListener] = []

        def follow() -> T:
            for topic_filter in topic_filters:
                followed.append(self.follow(topic_filter))  # noqa: PERF401 - after an error, those before are undone
            return work()

        def unfollow() -> None:
            while followed:
                self.unfollow(followed.pop())

        return guarded(follow, unfollow)

    def leave_locked(self, listener: FilterListener, cursor: WaitingCursor) -> None:
        """Remove a follower from its listener, and decrement the listener's number of users."""
        listener.leave_locked(cursor)
        self.unfollow(listener)

    def routed(self, messages: list[Message]) -> _Routed:
        """Return the entry of published messages that are not stored. Consecutive calls with one list share an entry.

        So the watermarks are read once, and not once for each filter. May be called in any thread, without the mutex.
        """
        routed = self._routed
        if routed is None or routed.messages is not messages:
            size = sum(len(message.payload) for message in messages)
            routed = self._routed = _Routed(messages, self.hub.watermarks(), self.clock(), size)
        return routed

    def note(self, listener: FilterListener) -> None:
        """Record that a listener has new events. May be called in any thread, without the mutex."""
        self._noted.append(listener)
        self.notifier.notify()

    def close(self) -> None:
        """Mark the database as closed, and wake all waiters. May be called in any thread, without the mutex."""
        self.closed = True
        self.notifier.notify()

    def leave_to_parent(self) -> None:
        """Refuse every call in a forked child (`topicstore.contract.forking`)."""
        self._inherited = self.closed = True

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` if the database is closed, or was opened by another process. Needs no lock."""
        if self.closed:
            self.check_process()
            raise DatabaseClosedError("the database is closed")

    def check_process(self) -> None:
        """Raise `DatabaseClosedError` in a forked child. Needs no lock."""
        if self._inherited:
            raise DatabaseClosedError("the database was opened by another process; a fork can't use it")


class Dispatcher(FilterListeners, Generic[R]):
    """The listeners, and the ready queue: the sessions that have packets to deliver."""

    def __init__(
        self,
        hub: Hub,
        shards: int,
        shard_of: Callable[[str], int],
        clock: Callable[[], int],
        steady: SteadyClock,
    ) -> None:
        super().__init__(hub, shards, shard_of, clock, steady)
        self.dirty: dict[R, None] = {}
        """The sessions with acknowledgements that are not committed. Guarded by the lock, as are the next two."""
        self.failed: dict[R, None] = {}
        """The sessions of which a read or a commit failed and is to be retried."""
        self.ready: dict[R, None] = {}
        """The ready queue, in the order of turns, without sessions that are locked. Guarded by the lock."""
        self._hidden: dict[R, bool] = {}
        """The sessions that are locked, and whether each is ready. Guarded by the lock."""
        self._closing: collections.deque[Iterator[None]] = collections.deque()
        """Iterators that close the cursors of ended sessions, one a step. Guarded by the lock."""
        self._heard: collections.deque[R] = collections.deque()
        """The sessions with new events, such as acknowledgements. Any thread appends to it, without a lock."""
        remember(self)

    def hear(self, one: R) -> None:
        """Queue a session for a call of its `noticed`, before other events are handled. Thread-safe, without the mutex.

        Doesn't wake the waiters: only the session knows whether its event can make it ready.
        """
        self._heard.append(one)

    def hear_locked(self) -> None:
        """Handle the events that `hear` recorded."""
        while self._heard:
            self._heard.popleft().noticed()

    def listen_locked(self) -> None:
        """Handle the events of sessions and listeners that were recorded so far."""
        self.hear_locked()
        while self._noted:
            self._noted.popleft().pass_on_locked()

    def hide_locked(self, sessions: Collection[R]) -> None:
        """Remove locked sessions from the ready queue: a waiting thread could not deliver their packets."""
        for one in sessions:
            self._hidden[one] = one in self.ready
            self.ready.pop(one, None)

    def show_locked(self, sessions: Collection[R]) -> None:
        """Put sessions that are ready, and whose locks were released, at the end of the ready queue."""
        for one in sessions:
            if self._hidden.get(one):
                self.ready[one] = None
                self.notifier.notify()
            self._hidden.pop(one, None)  # the last step, so that an interrupted call can be repeated

    def ready_locked(self, one: R) -> None:
        """Put a session into the ready queue."""
        if one in self._hidden:
            self._hidden[one] = True
            return
        self.ready[one] = None
        self.notifier.notify()

    def again_locked(self, one: R) -> None:
        """Move a session to the end of the ready queue."""
        self.ready.pop(one, None)
        self.ready_locked(one)

    def idle_locked(self, one: R) -> None:
        """Remove a session from the ready queue."""
        self.ready.pop(one, None)
        if one in self._hidden:
            self._hidden[one] = False

    def close_locked(self, closing: Iterator[None], cursors: int) -> None:
        """Close the cursors of an ended session, ``cursors`` in number: a few at once, many in batches at ticks."""
        if cursors > _FEW:
            self._closing.append(closing)
        else:
            for _ in closing:
                pass

    def close_piece_locked(self) -> bool:
        """Close one batch of the cursors of ended sessions; return whether more are left."""
        left = _CLOSED
        while self._closing and left:
            left -= sum(1 for _ in islice(self._closing[0], left))
            if left:
                self._closing.popleft()
        return bool(self._closing)

    def forget_locked(self, one: R) -> None:
        """Remove a session that has ended."""
        self.idle_locked(one)
        self.dirty.pop(one, None)
        self.failed.pop(one, None)

    # --- waiting, in any thread ---

    def wait(self, timeout: float | None) -> bool:
        """Block until a session is ready, then return True; return False after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        if timeout == 0:  # no waiter is needed
            return bool(self.ready and not self.closed) or (self._must_listen() and self._listen(end))
        with ThreadWaiter(self.notifier, timeout) as waiter:
            while not self.ready or self.closed:
                if self._must_listen() and self._listen(end):
                    break
                if not waiter.wait():
                    return False
        return True

    async def wait_async(self, timeout: float | None, executor: Executor | None) -> bool:
        """Wait like `wait` without blocking the event loop.

        Events are handled in a thread of ``executor``: an event of a shared subscription reads, and may take long.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else time.monotonic() + timeout
        with TaskWaiter(self.notifier, timeout) as waiter:
            while not self.ready or self.closed:
                if self._must_listen() and await loop.run_in_executor(executor, self._listen, end):
                    break
                if not await waiter.wait():
                    return False
        return True

    def _must_listen(self) -> bool:
        """Return whether no session is ready, but unhandled events may make one ready."""
        self.check_open()
        return not self.ready and bool(self._heard or self._noted)

    def _listen(self, end: float | None) -> bool:
        """Handle events, if the lock can be acquired before ``end``; return whether a session is ready."""

        def listen(held: bool) -> bool:
            self.check_open()
            if held:
                self.listen_locked()
            return bool(self.ready)

        return self.mutex.within(end, listen)
