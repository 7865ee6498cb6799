"""Which sessions have something to do, found by events, not by looking.

Sources that have read everything wait in the `Channel` of their filter, which all sessions in this
process that follow the filter share. A commit tells the channel; the sources that wait there for its
shard become ready, and their sessions with them. So a session without traffic costs nothing.

Everything of sessions runs under `Channels.lock`, which "the dispatcher's lock" means, except what the
storing thread calls: that only notes what happened.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, Protocol, TypeVar

import attrs

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.bell import Bell, ListeningTask, ListeningThread
from topicstore.pubsub.feed import Feed
from topicstore.pubsub.hub import Hub

__all__ = ["Channel", "Channels", "Dispatcher", "Follower"]

R = TypeVar("R", bound=Hashable)
"""What gets ready: a connected session."""

_ROUTED = 1_024
"""Batches of messages that are stored nowhere which a channel keeps until somebody looks."""


class Follower(Protocol):
    """A source that follows a filter."""

    def wake(self, shard: int) -> None:
        """There may be something to read in a shard."""

    def take_live(self, messages: list[Message], marks: list[int], now: int) -> None:
        """Messages that are stored nowhere came by at ``now``; ``marks``: the shards' highest visible positions."""


@attrs.frozen
class _Routed:
    """Messages that came by and are stored nowhere."""

    messages: list[Message]
    marks: list[int]
    """The shards' highest visible positions at that moment."""
    time: int


class Channel:
    """One filter, and who in this process follows it."""

    __slots__ = ("_channels", "_noted", "_routed", "_waiting", "feed", "live", "users")

    def __init__(self, channels: Channels, feed: Feed, shards: int) -> None:
        self.feed = feed
        self.users = 0
        self.live: dict[Follower, None] = {}
        """Who wants messages that are stored nowhere."""
        self._channels = channels
        self._waiting: list[dict[Follower, None]] = [{} for _ in range(shards)]
        """By shard, who waits for something to read. Guarded by the dispatcher's lock, as `users` and `live` are."""
        self._noted: dict[int, None] = {}
        """Shards with something to read. The storing thread adds to it without a lock."""
        self._routed: list[_Routed] = []
        """What came by and is stored nowhere. The storing thread adds to it without a lock."""

    def wait_locked(self, follower: Follower, shard: int) -> None:
        """Wake a follower when there is something to read in a shard."""
        self._waiting[shard][follower] = None

    def leave_locked(self, follower: Follower) -> None:
        """Forget a follower."""
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
        """Note messages that are stored nowhere, if somebody wants them."""
        if self.live:
            self._routed.append(_Routed(messages, self._channels.hub.watermarks(), self._channels.clock()))
            del self._routed[:-_ROUTED]
            self._channels.note(self)

    def closed(self) -> None:
        """Wake who waits for something to do."""
        self._channels.close()

    # --- under the dispatcher's lock ---

    def pass_on_locked(self) -> None:
        """Wake the followers that what was noted concerns."""
        while self._noted:
            shard, _ = self._noted.popitem()  # before who waits is looked at: what is noted later comes again
            waiting, self._waiting[shard] = self._waiting[shard], {}
            for follower in waiting:
                follower.wake(shard)
        while self._routed:
            routed = self._routed.pop(0)
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
        steady: Callable[[], int],
    ) -> None:
        self.hub = hub
        self.shard_of = shard_of
        self.clock = clock
        """By it messages expire."""
        self.steady = steady
        """All else goes by it: it never jumps."""
        self.lock = ProcessLock()
        self.bell = Bell()
        """Rings when there may be something to do."""
        self.closed = False
        """Set once, by whoever closes; a glance needs no lock."""
        self._shards = shards
        self._channels: dict[str, Channel] = {}
        """By filter. Guarded by `lock`."""
        self._noted: collections.deque[Channel] = collections.deque()
        """Channels in which something happened. Any thread appends to it, without a lock."""

    def channel_locked(self, topic_filter: TopicFilter) -> Channel:
        """Return the channel of a filter, with one user more."""
        channel = self._channels.get(topic_filter.text)
        if channel is None:
            channel = Channel(self, self.hub.feed(topic_filter), self._shards)
            self.hub.listen(channel.feed, channel)
            self._channels[topic_filter.text] = channel
        channel.users += 1
        return channel

    def leave_locked(self, channel: Channel, follower: Follower) -> None:
        """Take a follower from its channel."""
        channel.leave_locked(follower)
        channel.users -= 1
        if not channel.users:
            self.hub.leave(channel.feed, channel)
            del self._channels[channel.feed.topic_filter.text]

    def note(self, channel: Channel) -> None:
        """Something happened in a channel. In any thread, without the lock."""
        self._noted.append(channel)
        self.bell.ring()

    def listen_locked(self) -> None:
        """Take note of what happened since."""
        while self._noted:
            self._noted.popleft().pass_on_locked()

    def close(self) -> None:
        """Wake who waits, to be told that the database is closed. In any thread, without the lock."""
        self.closed = True
        self.bell.ring()


class Dispatcher(Channels, Generic[R]):
    """The channels, and who has something to do."""

    def __init__(
        self,
        hub: Hub,
        shards: int,
        shard_of: Callable[[str], int],
        clock: Callable[[], int],
        steady: Callable[[], int],
    ) -> None:
        super().__init__(hub, shards, shard_of, clock, steady)
        self.dirty: dict[R, None] = {}
        """Those with acknowledgements that are not committed. Guarded by the lock, as the next two."""
        self.failed: dict[R, None] = {}
        """Those for which something failed that is to be tried again."""
        self._ready: dict[R, None] = {}
        """Those that have something to do, in the order of their turns."""

    def ready_locked(self, one: R) -> None:
        """One has something to do."""
        self._ready[one] = None
        self.bell.ring()

    def again_locked(self, one: R) -> None:
        """One that had its turn has more to do: after the others."""
        self._ready.pop(one, None)
        self.ready_locked(one)

    def idle_locked(self, one: R) -> None:
        """One has nothing to do."""
        self._ready.pop(one, None)

    def next_ready_locked(self, limit: int) -> list[R]:
        """Return at most ``limit`` that have something to do."""
        self.listen_locked()
        return list(islice(self._ready, limit))

    def forget_locked(self, one: R) -> None:
        """One is over."""
        self._ready.pop(one, None)
        self.dirty.pop(one, None)
        self.failed.pop(one, None)

    # --- waiting, in any thread, without the lock ---

    def wait(self, timeout: float | None) -> bool:
        """Return True as soon as one has something to do, False if none has after ``timeout`` seconds."""
        with ListeningThread(self.bell, timeout) as listening:
            while not self._look():
                if not listening.wait():
                    return False
        return True

    async def wait_async(self, timeout: float | None) -> bool:
        """Do the same without holding up the event loop."""
        with ListeningTask(self.bell, timeout) as listening:
            while not self._look():
                if not await listening.wait():
                    return False
        return True

    def _look(self) -> bool:
        with self.lock:
            if self.closed:
                raise DatabaseClosedError("the database is closed")
            self.listen_locked()
            return bool(self._ready)
