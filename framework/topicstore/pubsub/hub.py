"""`Hub`: who in this process follows what, and is told when something matching was stored.

A batch is announced, under its shard's lock and before its commit, to the feeds whose filters
match one of its topics; they are woken when it can be read. Filters that don't match cost nothing:
a thousand idle subscribers are as cheap as one. Nobody polls.
"""

from __future__ import annotations

import collections
import threading
import weakref
from itertools import chain
from typing import cast

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.storage.storage import Storage

from .feed import Feed, Listener
from .filter_index import FilterIndex
from .read_cache import ReadCache

__all__ = ["Hub"]


class Hub:
    """The feeds of one open database. All methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self.reads = ReadCache(storage)
        """What was read of the streams lately, for all who follow."""
        self._shards = storage.shards
        self._routes: FilterIndex[Feed] = FilterIndex()
        """Has a lock of its own."""
        self._lock = threading.Lock()
        """Guards what follows but one, and each feed's listeners."""
        self._feeds: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()
        self._closed = False
        self._abandoned: collections.deque[tuple[Feed, Listener]] = collections.deque()
        """Needs no lock: it is appended to and taken from in one step."""

    # --- following ---

    def feed(self, topic_filter: TopicFilter) -> Feed:
        """Return the feed of a filter: the same for everybody."""
        with self._lock:
            feed = self._feeds.get(topic_filter.text)
            if feed is None:
                feed = self._feeds[topic_filter.text] = Feed(self.reads, topic_filter)
            return feed

    def listen(self, feed: Feed, listener: Listener) -> None:
        """Tell a listener of a feed from now on."""
        self._leave_abandoned()
        with self._lock:
            if self._closed:
                raise DatabaseClosedError("the database is closed")
            first = not feed.listeners
            feed.listeners[listener] = None
            if first:
                self._routes.add(feed.topic_filter, feed)
                for number, shard in enumerate(self._shards):
                    with shard.lock:  # who stores now may have looked for listeners before this one was there
                        feed.listen(number, shard.last_position)

    def leave(self, feed: Feed, listener: Listener) -> None:
        """Tell a listener nothing more."""
        with self._lock:
            feed.listeners.pop(listener, None)
            if not feed.listeners:
                self._routes.remove(feed.topic_filter, feed)

    def abandon(self, feed: Feed, listener: Listener) -> None:
        """Like `leave`, at the next opportunity: takes no lock, so a garbage collection may call it anywhere."""
        self._abandoned.append((feed, listener))

    def _leave_abandoned(self) -> None:
        while self._abandoned:
            try:
                feed, listener = self._abandoned.popleft()
            except IndexError:  # another thread took it
                return
            self.leave(feed, listener)

    def matching(self, topic: str) -> tuple[Feed, ...]:
        """Return the feeds with listeners that a topic matches."""
        self._leave_abandoned()
        return self._routes.match(topic)

    def watermarks(self) -> list[int]:
        """Return each shard's highest position that can be seen: where "from now on" begins."""
        return [shard.watermark for shard in self._shards]

    # --- telling ---

    def announce(self, shard: int, batch: MessageBatch) -> list[Feed]:
        """A batch is about to be committed; return the feeds to be woken when it was. Under the shard's lock."""
        if not len(self._routes) or not len(batch):
            return []
        topics = set(to_iterable(batch.topics))
        feeds = list(dict.fromkeys(chain.from_iterable(map(self._routes.match, topics))))
        first, last = int(batch.positions[0]), int(batch.positions[-1])
        for feed in feeds:
            feed.announce(shard, first, last)
        return feeds

    def visible(self, shard: int, told: object) -> None:
        """What was announced to these feeds can be read. No lock is held."""
        self._leave_abandoned()
        for feed in cast("list[Feed]", told):
            feed.wake(shard)

    def route(self, messages: list[Message]) -> None:
        """Hand messages that are stored nowhere to whoever listens now."""
        routed: dict[Feed, list[Message]] = {}
        for message in messages:
            for feed in self._routes.match(message.topic):
                routed.setdefault(feed, []).append(message)
        for feed, matching in routed.items():
            feed.route(matching)

    def dropped(self) -> None:
        """A generation was dropped: what was read of it is forgotten, and listeners are told."""
        self.forget()
        for feed in self._all():
            for shard in range(len(self._shards)):
                feed.wake(shard)

    def forget(self) -> None:
        """Keep nothing of what was read: some of it was deleted."""
        self.reads.forget()
        for feed in self._all():
            feed.forget()

    def _all(self) -> list[Feed]:
        with self._lock:  # else feeds that are made meanwhile break off the walk
            return list(self._feeds.values())

    # --- the end ---

    def stop(self) -> None:
        """Tell all listeners that the database is being closed, and stop. May be called twice."""
        with self._lock:
            self._closed = True
            listeners = {listener: None for feed in list(self._feeds.values()) for listener in feed.listeners}
        self.reads.stop()
        for listener in listeners:
            listener.closed()

    def join(self) -> None:
        """Return when no thread of the hub runs; the shards are closed by then."""
        self.reads.join()
