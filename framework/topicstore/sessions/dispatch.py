"""Which sessions have something to do, found through events and not by polling.

Sources that have read everything wait in the `Channel` of their filter, which all sessions in this
process that follow the filter share. A commit notifies the channel; the sources that wait there for its shard become
ready, and their sessions with them. So a session without traffic costs nothing.

All code of sessions runs under `Channels.lock`, called the dispatcher's lock elsewhere, except two kinds of methods,
which take no lock and only note what happened: those that the storing thread calls, and those that a server calls in
its event loop, such as acknowledging. While an engine writes, the lock is given up, and the sessions concerned are
claimed (`topicstore.sessions.claims`).
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from itertools import islice
from typing import Generic, Protocol, TypeVar

import attrs

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock, remember
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.bell import Bell, ListeningTask, ListeningThread
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.live_messages import LIVE, LIVE_BYTES

from .claims import Claims
from .entrance import Entrance
from .session_clock import SessionClock

__all__ = ["Channel", "Channels", "Dispatcher", "Follower"]


class Attentive(Protocol):
    """What becomes ready: a connected session."""

    def __hash__(self) -> int:
        """Return the identity, as objects do by default."""

    def noticed(self) -> None:
        """Handle what `Dispatcher.hear` noted."""


R = TypeVar("R", bound=Attentive)

_FEW = 16
"""Largest number of sources that are closed at once when their session ends."""
_CLOSED = 500
"""Number of sources that are closed in a piece, which takes a few milliseconds."""


class Follower(Protocol):
    """A source of messages that follows a filter."""

    def wake(self, shard: int) -> None:
        """Note that there may be something to read in a shard."""

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Take messages stored nowhere, published at ``now``; ``marks``: the shards' highest visible positions."""

    def miss_live(self, messages: list[Message]) -> None:
        """Count those of messages stored nowhere that it would have taken. Needs no lock."""


@attrs.frozen
class _Routed:
    """Published messages that are stored nowhere."""

    messages: list[Message]
    marks: list[int]
    """The shards' highest visible positions when the messages were published."""
    time: int
    size: int
    """How many bytes the payloads have."""


class Channel:
    """One filter, and the sources in this process that follow it."""

    __slots__ = ("_bytes", "_channels", "_count", "_noted", "_routed", "_waiting", "feed", "live", "passed", "users")

    def __init__(self, channels: Channels, feed: Feed, shards: int) -> None:
        self.feed = feed
        self.users = 0
        self.live: dict[Follower, None] = {}
        """The followers that take messages that are stored nowhere."""
        self._channels = channels
        self._waiting: list[dict[Follower, None]] = [{} for _ in range(shards)]
        """By shard, the followers that wait for something to read. The dispatcher's lock guards these three, though the
        storing thread reads `live`."""
        self._noted: dict[int, None] = {}
        """The shards with something to read. The storing thread adds to it without a lock."""
        self._routed: collections.deque[_Routed] = collections.deque()
        """The published messages that are stored nowhere. `Channels.counting` guards it, and the next two."""
        self._count = 0
        """How many messages these are."""
        self._bytes = 0
        """How many bytes their payloads have."""
        self.passed = 0
        """How often waiting followers were woken. Guarded by the dispatcher's lock."""

    def wait_locked(self, follower: Follower, shard: int) -> None:
        """Let a follower wait: it is woken when there is something to read in a shard."""
        self._waiting[shard][follower] = None

    def leave_locked(self, follower: Follower) -> None:
        """Remove a follower."""
        self.live.pop(follower, None)
        for waiting in self._waiting:
            waiting.pop(follower, None)

    # --- as `topicstore.pubsub.hub.Listener`, in the thread that stores ---

    def woken(self, feed: Feed, shard: int) -> None:
        """Note that there is something to read in a shard."""
        if shard not in self._noted:
            self._noted[shard] = None
            self._channels.note(self)

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        """Note messages that are stored nowhere, if a follower takes them."""
        if self.live:
            routed = self._channels.routed(messages)
            dropped = []
            with self._channels.counting:
                self._routed.append(routed)
                self._count += len(messages)
                self._bytes += routed.size
                while self._follow_enough(self._routed[0]):
                    dropped.append(self._take())
            for gone in dropped:
                for follower in list(self.live):
                    follower.miss_live(gone.messages)
            self._channels.note(self)

    def _follow_enough(self, oldest: _Routed) -> bool:
        """Return whether so many messages follow these that no follower will keep one of them."""
        return self._count - len(oldest.messages) >= LIVE or self._bytes - oldest.size >= LIVE_BYTES

    def _take(self) -> _Routed:
        """Remove the oldest messages that are stored nowhere. The caller holds `Channels.counting`."""
        routed = self._routed.popleft()
        self._count -= len(routed.messages)
        self._bytes -= routed.size
        return routed

    def closed(self) -> None:
        """Wake the threads and tasks that wait for something to do."""
        self._channels.close()

    # --- under the dispatcher's lock ---

    def pass_on_locked(self) -> None:
        """Wake the followers concerned by the events that were noted."""
        while self._noted:
            shard, _ = self._noted.popitem()  # before the followers are: a later event is handled again
            self.passed += 1
            waiting, self._waiting[shard] = self._waiting[shard], {}
            for follower in waiting:
                follower.wake(shard)
        while True:
            with self._channels.counting:
                if not self._routed:
                    break
                routed = self._take()
            for follower in list(self.live):
                follower.take_live(routed.messages, routed.marks, routed.time)


class Channels:
    """The channels of one open database, and the lock of everything that its sessions do."""

    def __init__(
        self,
        hub: Hub,
        shards: int,
        shard_of: Callable[[str], int],
        clock: Callable[[], int],
        steady: SessionClock,
    ) -> None:
        self.hub = hub
        self.shard_of = shard_of
        self.clock = clock
        """The wall clock, by which messages expire."""
        self.steady = steady
        """The clock for everything else, which never jumps."""
        self.lock = ProcessLock()
        self.bell = Bell()
        """Rings when there may be something to do."""
        self.entrance = Entrance(self.lock)
        """The way to the lock for calls that wait for it, and what they do after it."""
        self.counting = ProcessLock()
        """Held for microseconds, with or without `lock`. Whoever holds it takes no other lock."""
        self.missed = 0
        """How many messages of QoS 0 were dropped because their sessions did not fetch them in time. Guarded by
        `counting`; it can be read without it."""
        self.closed = False
        """Set once, by `close` or in a forked child; reading it needs no lock."""
        self._inherited = False
        """Whether this is a forked child, in which nothing can be used. Set before `closed`."""
        self._shards = shards
        self._channels: dict[str, Channel] = {}
        """The channels by filter. Guarded by `lock`."""
        self._routed: _Routed | None = None
        """What was routed last. It is replaced as a whole, without a lock."""
        self._noted: collections.deque[Channel] = collections.deque()
        """The channels with new events. Any thread appends to it, without a lock."""

    def channel_locked(self, topic_filter: TopicFilter) -> Channel:
        """Return the channel of a filter, and count one more user of it."""
        channel = self._channels.get(topic_filter.text)
        if channel is None:
            channel = Channel(self, self.hub.feed(topic_filter), self._shards)
            self.hub.listen(channel.feed, channel)
            self._channels[topic_filter.text] = channel
        channel.users += 1
        return channel

    def leave_locked(self, channel: Channel, follower: Follower) -> None:
        """Remove a follower from its channel, and count one user less."""
        channel.leave_locked(follower)
        channel.users -= 1
        if not channel.users:
            self.hub.leave(channel.feed, channel)
            del self._channels[channel.feed.topic_filter.text]

    def routed(self, messages: list[Message]) -> _Routed:
        """Return published messages that are stored nowhere, the same for all channels that are passed the same list.

        So the watermarks are read once, and not once for each filter. May be called in any thread, without the lock.
        """
        routed = self._routed
        if routed is None or routed.messages is not messages:
            size = sum(len(message.payload) for message in messages)
            routed = self._routed = _Routed(messages, self.hub.watermarks(), self.clock(), size)
        return routed

    def note(self, channel: Channel) -> None:
        """Note that a channel has new events. May be called in any thread, without the lock."""
        self._noted.append(channel)
        self.bell.ring()

    def listen_locked(self) -> None:
        """Handle the events noted so far."""
        while self._noted:
            self._noted.popleft().pass_on_locked()

    def close(self) -> None:
        """Note that the database is closed, and wake all that wait. May be called in any thread, without the lock."""
        self.closed = True
        self.bell.ring()

    def leave_to_parent(self) -> None:
        """Refuse everything in a forked child (`topicstore.contract.forking`)."""
        self._inherited = self.closed = True

    def check_open(self) -> None:
        """Raise `DatabaseClosedError` if the database is closed, or was opened by another process. Needs no lock."""
        self.check_process()
        if self.closed:
            raise DatabaseClosedError("the database is closed")

    def check_process(self) -> None:
        """Raise `DatabaseClosedError` in a forked child. Needs no lock."""
        if self._inherited:
            raise DatabaseClosedError("the database was opened by another process; a fork can't use it")


class Dispatcher(Channels, Generic[R]):
    """The channels, and the sessions that have something to do."""

    def __init__(
        self,
        hub: Hub,
        shards: int,
        shard_of: Callable[[str], int],
        clock: Callable[[], int],
        steady: SessionClock,
    ) -> None:
        super().__init__(hub, shards, shard_of, clock, steady)
        self.dirty: dict[R, None] = {}
        """The sessions with acknowledgements that are not committed. Guarded by the lock, as are the next two."""
        self.failed: dict[R, None] = {}
        """The sessions for which something failed that is to be tried again."""
        self._ready: dict[R, None] = {}
        """The sessions that have something to do, in the order of their turns, without those that are claimed."""
        self._hidden: dict[R, bool] = {}
        """The sessions that are claimed, and whether they have something to do. Guarded by the lock."""
        self.claims = Claims(self.lock, self.entrance, self._hide_locked, self._show_locked)
        self._closing: collections.deque[Iterator[None]] = collections.deque()
        """What closes the sources of ended sessions, one a step. Guarded by the lock."""
        self._heard: collections.deque[R] = collections.deque()
        """The sessions that were acknowledged, paused or resumed since. Any thread appends to it, without a lock."""
        remember(self)

    def hear(self, one: R) -> None:
        """Have `noticed` of a session called before anything else is done. In any thread, without the lock.

        It doesn't ring the bell: only the session knows whether it may have something to do now.
        """
        self._heard.append(one)

    def hear_locked(self) -> None:
        """Handle what happened to sessions."""
        while self._heard:
            self._heard.popleft().noticed()

    def listen_locked(self) -> None:
        """Handle the events noted so far."""
        self.hear_locked()
        super().listen_locked()

    def _hide_locked(self, claimed: Collection[R]) -> None:
        """Keep sessions from having a turn: whoever waits for one would find nothing to deliver."""
        for one in claimed:
            self._hidden[one] = one in self._ready
            self._ready.pop(one, None)

    def _show_locked(self, released: Collection[R]) -> None:
        """Let sessions have a turn again, after the others."""
        for one in released:
            if self._hidden.get(one):
                self._ready[one] = None
                self.bell.ring()
            self._hidden.pop(one, None)  # last: a release that is interrupted is repeated

    def ready_locked(self, one: R) -> None:
        """Note that a session has something to do."""
        if one in self._hidden:
            self._hidden[one] = True
            return
        self._ready[one] = None
        self.bell.ring()

    def again_locked(self, one: R) -> None:
        """Note that a session that had its turn has more to do, after the others."""
        self._ready.pop(one, None)
        self.ready_locked(one)

    def idle_locked(self, one: R) -> None:
        """Note that a session has nothing to do."""
        self._ready.pop(one, None)
        if one in self._hidden:
            self._hidden[one] = False

    def next_ready_locked(self, limit: int) -> list[R]:
        """Return at most ``limit`` sessions that have something to do."""
        self.listen_locked()
        return list(islice(self._ready, limit))

    def is_ready_locked(self, one: R) -> bool:
        """Return whether a session has something to do."""
        return one in self._ready

    def close_locked(self, closing: Iterator[None], sources: int) -> None:
        """Close the sources of an ended session, which are so many: now, or if they are many in pieces at ticks."""
        if sources > _FEW:
            self._closing.append(closing)
        else:
            for _ in closing:
                pass

    def close_piece_locked(self) -> bool:
        """Close a piece of what is left to close; return whether more is left."""
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
        """Return True once a session has something to do, or False if none has after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with ListeningThread(self.bell, timeout) as listening:
            while not self._ready or self.closed:
                if self._must_listen() and self._listen(end):
                    break
                if not listening.wait():
                    return False
        return True

    async def wait_async(self, timeout: float | None, executor: Executor | None) -> bool:
        """Wait like `wait` without blocking the event loop.

        It looks in a thread if there are events to handle: that may take long, as that of a shared subscription reads.
        """
        loop = asyncio.get_running_loop()
        end = None if timeout is None else time.monotonic() + timeout
        with ListeningTask(self.bell, timeout) as listening:
            while not self._ready or self.closed:
                if self._must_listen() and await loop.run_in_executor(executor, self._listen, end):
                    break
                if not await listening.wait():
                    return False
        return True

    def _must_listen(self) -> bool:
        """Return whether events have to be handled before it is known if a session has something to do."""
        self.check_open()
        return not self._ready and bool(self._heard or self._noted)

    def _listen(self, end: float | None) -> bool:
        """Handle events, if the lock can be had before ``end``; return whether a session has something to do."""

        def listen(held: bool) -> bool:
            self.check_open()
            if held:
                self.listen_locked()
            return bool(self._ready)

        return self.entrance.within(end, listen)
