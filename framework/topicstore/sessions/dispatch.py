"""Which sessions have something to do, found by events, not by looking.

Sources that have read everything wait in the `Channel` of their filter, which all sessions in this
process that follow the filter share. A commit tells the channel; the sources that wait there for its
shard become ready, and their sessions with them. So a session without traffic costs nothing.

Everything of sessions runs under `Dispatcher.lock`, except what the storing thread calls: that only
notes what happened.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Channel", "Dispatcher", "Follower"]

_ROUTED = 1_024
"""Batches of messages that are stored nowhere which a channel keeps until somebody looks."""


class Follower(Protocol):
    """A source that follows a filter."""

    def wake(self, shard: int) -> None:
        """There may be something to read in a shard."""

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Messages that are stored nowhere came by at ``now``; ``marks``: the shards' highest visible positions."""


class Channel:
    """One filter, and who in this process follows it."""

    __slots__ = ("_dispatcher", "_noted", "_routed", "_waiting", "feed", "live", "users")

    def __init__(self, dispatcher: Dispatcher, feed: Feed, shards: int) -> None:
        self.feed = feed
        self.users = 0
        self.live: dict[Follower, None] = {}
        """Who wants messages that are stored nowhere."""
        self._dispatcher = dispatcher
        self._waiting: list[dict[Follower, None]] = [{} for _ in range(shards)]
        self._noted: dict[int, None] = {}
        self._routed: list[tuple[list[Message], list[int], int]] = []

    def wait(self, follower: Follower, shard: int) -> None:
        """Wake a follower when there is something to read in a shard."""
        self._waiting[shard][follower] = None

    def leave(self, follower: Follower) -> None:
        """Forget a follower."""
        self.live.pop(follower, None)
        for waiting in self._waiting:
            waiting.pop(follower, None)

    # --- as `topicstore.pubsub.hub.Listener`, in the thread that stores ---

    def woken(self, feed: Feed, shard: int) -> None:
        """Note that there is something to read in a shard."""
        if shard not in self._noted:
            self._noted[shard] = None
            self._dispatcher.note(self)

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        """Note messages that are stored nowhere, if somebody wants them."""
        if self.live:
            self._routed.append((messages, self._dispatcher.hub.watermarks(), self._dispatcher.clock()))
            del self._routed[:-_ROUTED]
            self._dispatcher.note(self)

    def closed(self) -> None:
        """Wake who waits for something to do."""
        self._dispatcher.closed = True
        self._dispatcher.ring()

    # --- under the dispatcher's lock ---

    def pass_on(self) -> None:
        """Wake the followers that what was noted concerns."""
        while self._noted:
            shard, _ = self._noted.popitem()  # before who waits is looked at: what is noted later comes again
            waiting, self._waiting[shard] = self._waiting[shard], {}
            for follower in waiting:
                follower.wake(shard)
        while self._routed:
            messages, marks, now = self._routed.pop(0)
            for follower in list(self.live):
                follower.take_live(messages, marks, now)


class Dispatcher:
    """What is shared by the sessions of one open database."""

    def __init__(self, hub: Hub, shards: int, shard_of: Callable[[str], int], clock: Callable[[], int]) -> None:
        self.hub = hub
        self.shard_of = shard_of
        self.clock = clock
        self.lock = threading.RLock()
        self.dirty: dict[Session, None] = {}
        """Sessions with acknowledgements that are not committed."""
        self.closed = False
        self._shards = shards
        self._ready: dict[Session, None] = {}
        self._channels: dict[str, Channel] = {}
        self._noted: collections.deque[Channel] = collections.deque()
        self._bell = threading.Event()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # --- channels ---

    def channel(self, topic_filter: TopicFilter) -> Channel:
        """Return the channel of a filter, with one user more."""
        channel = self._channels.get(topic_filter.text)
        if channel is None:
            channel = Channel(self, self.hub.feed(topic_filter), self._shards)
            self.hub.listen(channel.feed, channel)
            self._channels[topic_filter.text] = channel
        channel.users += 1
        return channel

    def leave(self, channel: Channel, follower: Follower) -> None:
        """Take a follower from its channel."""
        channel.leave(follower)
        channel.users -= 1
        if not channel.users:
            self.hub.leave(channel.feed, channel)
            del self._channels[channel.feed.topic_filter.text]

    def note(self, channel: Channel) -> None:
        """Something happened in a channel. In any thread, without the lock."""
        self._noted.append(channel)
        self.ring()

    # --- who is ready ---

    def ready(self, session: Session) -> None:
        """A session has something to do."""
        self._ready[session] = None
        self.ring()

    def again(self, session: Session) -> None:
        """A session that had its turn has more to do: behind the others."""
        self._ready.pop(session, None)
        self.ready(session)

    def idle(self, session: Session) -> None:
        """A session has nothing to do."""
        self._ready.pop(session, None)

    def listen(self) -> None:
        """Take note of what happened since."""
        while self._noted:
            self._noted.popleft().pass_on()

    def next_ready(self, limit: int) -> list[Session]:
        """Return at most ``limit`` sessions that have something to do."""
        self.listen()
        return list(islice(self._ready, limit))

    def forget(self, session: Session) -> None:
        """A session is over."""
        self._ready.pop(session, None)
        self.dirty.pop(session, None)

    # --- waiting ---

    def ring(self) -> None:
        """Wake who waits. In any thread."""
        if not self._bell.is_set():
            self._bell.set()
            for loop, event in list(self._waiters):
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(event.set)

    def wait(self, timeout: float | None) -> bool:
        """Return True as soon as a session has something to do, False if none has after ``timeout`` seconds."""
        left = _countdown(timeout)
        while not self._look():
            if not self._bell.wait(left()):
                return False
        return True

    async def wait_async(self, timeout: float | None) -> bool:
        """Do the same without holding up the event loop."""
        left, waiter = _countdown(timeout), (asyncio.get_running_loop(), asyncio.Event())
        self._waiters.append(waiter)
        try:
            while not self._look():
                try:
                    await asyncio.wait_for(waiter[1].wait(), left())
                except TimeoutError:
                    return False
                waiter[1].clear()
            return True
        finally:
            self._waiters.remove(waiter)

    def _look(self) -> bool:
        with self.lock:
            self._bell.clear()  # before looking: what happens from here on rings again
            if self.closed:
                raise DatabaseClosedError("the database is closed")
            self.listen()
            return bool(self._ready)


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """Return a function that says how many seconds are left."""
    end = None if timeout is None else time.monotonic() + timeout
    return lambda: None if end is None else max(0.0, end - time.monotonic())
