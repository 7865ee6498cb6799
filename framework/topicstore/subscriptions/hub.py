"""`Hub`: who in this process follows what, and is told when something matching was stored.

A batch is announced, under its shard's lock and before its commit, to the feeds whose filters
match one of its topics; they are woken when it can be read. Filters that don't match cost nothing:
a thousand idle subscribers are as cheap as one. Nobody polls.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import attrs

from topicstore.batch import MessageBatch
from topicstore.columns import to_iterable
from topicstore.errors import DatabaseClosedError
from topicstore.generations import GenerationRecord
from topicstore.lanes import plan_lane
from topicstore.model import Message
from topicstore.replay import in_order
from topicstore.topics import TopicFilter

from .awaiting import Awaiting
from .feed import Feed, Listener
from .routes import Routes
from .runs import Stretch

if TYPE_CHECKING:
    from topicstore.database import Database

__all__ = ["Hub"]

_ROWS = 131_072
"""Messages that are kept in memory for consumers who come by the same place."""
_STRETCHES = 1_024


@attrs.frozen
class _Dropped:
    """A generation that was dropped while somebody listened."""

    shard: int
    number: int
    last: int
    """Its last position."""


class Hub:
    """The feeds of one open database. All methods may be called from any thread."""

    def __init__(self, db: Database) -> None:
        self._db = weakref.ref(db)  # else a database that nobody holds would not be closed
        self._id = bytes.fromhex(db.manifest.id)
        self._shards = db.shards
        self._routes: Routes[Feed] = Routes()
        self._feeds: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._awaiting = Awaiting(db.shards)
        self._dropped: list[_Dropped] = []
        self._memory: collections.deque[tuple[Stretch, list[Stretch]]] = collections.deque()
        self._rows = 0
        self._closed = False

    # --- following ---

    def feed(self, topic_filter: TopicFilter) -> Feed:
        """Return the feed of a filter: the same for everybody."""
        with self._lock:
            feed = self._feeds.get(topic_filter.text)
            if feed is None:
                feed = self._feeds[topic_filter.text] = Feed(self, topic_filter, len(self._shards))
            return feed

    def listen(self, feed: Feed, listener: Listener) -> None:
        """Tell a listener of a feed from now on."""
        with self._lock:
            if self._closed:
                raise DatabaseClosedError("the database is closed")
            first = not feed.listeners
            feed.listeners[listener] = None
            if first:
                self._routes.add(feed.topic_filter, feed)
                feed.listen([shard.last_position for shard in self._shards])  # behind it: so none is missed

    def leave(self, feed: Feed, listener: Listener) -> None:
        """Tell a listener nothing more."""
        with self._lock:
            feed.listeners.pop(listener, None)
            if not feed.listeners:
                self._routes.remove(feed.topic_filter, feed)

    def matching(self, topic: str) -> tuple[Feed, ...]:
        """Return the feeds with listeners that a topic matches."""
        return self._routes.match(topic)

    def watermarks(self) -> list[int]:
        """Return each shard's highest position that can be seen: where "from now on" begins."""
        return [shard.watermark for shard in self._shards]

    # --- telling ---

    def announce(self, shard: int, batch: MessageBatch) -> list[Feed]:
        """A batch is about to be committed; return the feeds to `wake` when it was. Under the shard's lock."""
        if not len(self._routes) or not len(batch):
            return []
        topics = set(to_iterable(batch.topics))
        feeds = list(dict.fromkeys(chain.from_iterable(map(self._routes.match, topics))))
        first, last = int(batch.positions[0]), int(batch.positions[-1])
        for feed in feeds:
            feed.announce(shard, first, last)
        return feeds

    def wake(self, woken: Iterable[tuple[int, list[Feed]]]) -> None:
        """The batches that were announced to these feeds, by shard, can be read. No lock is held."""
        for shard, feeds in woken:
            for feed in feeds:
                feed.wake(shard)

    def route(self, messages: list[Message]) -> None:
        """Hand messages that are stored nowhere to whoever listens now."""
        routed: dict[Feed, list[Message]] = {}
        for message in messages:
            for feed in self._routes.match(message.topic):
                routed.setdefault(feed, []).append(message)
        for feed, matching in routed.items():
            feed.route(matching)

    def dropping(self, records: Iterable[tuple[int, GenerationRecord]]) -> None:
        """These generations, with their shards, were dropped: forget what was read of them, and tell listeners."""
        self._dropped += [
            _Dropped(shard, record.number, record.last_position or 0) for shard, record in records if record.messages
        ]
        self.forget()
        for feed in list(self._feeds.values()):
            for shard in range(len(self._shards)):
                feed.wake(shard)

    def gone(self) -> frozenset[int]:
        """Return the generations that were dropped since somebody listened first."""
        return frozenset(dropped.number for dropped in self._dropped)

    def dropped_between(self, shard: int, after: int, position: int, quiet: tuple[int, int]) -> tuple[int, ...]:
        """Return the generations that who reads from ``after`` to ``position`` might have missed something of."""
        begin, end = quiet
        return tuple(
            gone.number
            for gone in self._dropped
            if gone.shard == shard
            and after < gone.last <= position
            and not (begin <= after and gone.last <= end)  # nothing in it matched
        )

    def forget(self) -> None:
        """Keep nothing of what was read: some of it was deleted."""
        with self._lock:
            self._memory.clear()
            self._rows = 0
        for feed in list(self._feeds.values()):
            feed.forget()

    # --- reading ---

    def scan(
        self, topic_filter: TopicFilter, shard: int, first: int, last: int | None, rows: int
    ) -> tuple[Iterator[MessageBatch], int]:
        """Plan to read positions from ``first`` to ``last``, or all that can be seen; return batches and the bound."""
        db = self._db()
        if db is None:
            raise DatabaseClosedError("the database is closed")
        bound = self._shards[shard].watermark
        bound = bound if last is None else min(bound, last)
        lane = plan_lane(self._id, self._shards[shard], topic_filter, first, bound, since=None)
        return in_order(lane, db.fetch, rows), lane.bound

    def remember(self, stretch: Stretch, where: list[Stretch]) -> None:
        """A stretch is kept in a list; take the oldest from theirs if too many are."""
        with self._lock:
            self._memory.append((stretch, where))
            self._rows += len(stretch.batch)
            while self._rows > _ROWS or len(self._memory) > _STRETCHES:
                oldest, kept = self._memory.popleft()
                self._rows -= len(oldest.batch)
                if oldest in kept:
                    kept.remove(oldest)

    def hides(self, shard: int) -> bool:
        """Say whether a layout of the shard hides the epoch that is being written."""
        return any(slab.epoch > 1 for _, slab in self._shards[shard].slabs())

    def await_visible(self, feed: Feed, shard: int, position: int) -> None:
        """Wake a feed when everything up to a position can be seen."""
        self._awaiting.add(feed, shard, position)

    # --- the end ---

    def close(self) -> None:
        """Tell all listeners that the database is being closed. May be called twice."""
        with self._lock:
            self._closed = True
            feeds = list(self._feeds.values())
        self._awaiting.close()
        for listener in {listener: None for feed in feeds for listener in feed.listeners}:
            listener.closed()

    def join(self) -> None:
        """Return when no thread of the hub runs; the shards are closed by then."""
        self._awaiting.join()
