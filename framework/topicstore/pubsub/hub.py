"""`Hub`: who in this process follows what, and is told when something matching was stored.

A batch is announced, under its shard's lock and before its commit, to the feeds whose filters
match one of its topics; they are woken when it can be read. Filters that don't match cost nothing:
a thousand idle subscribers are as cheap as one. Nobody polls.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, cast

import attrs

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.storage.replays import in_order

from .feed import Feed, Listener
from .filter_index import FilterIndex
from .shared_reads import Stretch
from .visibility import VisibilityWatcher

if TYPE_CHECKING:
    from topicstore.database import Database

__all__ = ["Hub"]

_ROWS = 131_072
"""Messages that are kept in memory for consumers who come by the same place."""
_BYTES = 32 << 20
"""Of their payloads."""
_STRETCHES = 1_024


@attrs.frozen
class _Gap:
    """Positions of a shard between, or in front of, its live generations: some were dropped there."""

    generations: tuple[int, ...]
    first: int
    last: int


class Hub:
    """The feeds of one open database. All methods may be called from any thread."""

    def __init__(self, db: Database) -> None:
        self._db = weakref.ref(db)  # else a database that nobody holds would not be closed
        self._id = bytes.fromhex(db.manifest.id)
        self._shards = db.shards
        self._routes: FilterIndex[Feed] = FilterIndex()
        self._feeds: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._awaiting = VisibilityWatcher(db.shards)
        self._gaps: list[tuple[object, list[_Gap]]] = [(None, []) for _ in db.shards]
        """By shard, for the live generations that they were found from."""
        self._memory: collections.deque[tuple[weakref.ref[Stretch], list[Stretch], int, int]] = collections.deque()
        """Stretches in the lists that keep them, with their rows and bytes."""
        self._rows = 0
        self._bytes = 0
        self._closed = False
        self._abandoned: collections.deque[tuple[Feed, Listener]] = collections.deque()

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
            self.leave(*self._abandoned.popleft())

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

    def gone(self) -> frozenset[int]:
        """Return the generations that were dropped by now."""
        live = {record.number for shard in self._shards for record, _ in shard.live}
        return frozenset(range(1, max(live, default=1))) - live

    def dropped_between(self, shard: int, after: int, position: int, quiet: tuple[int, int]) -> tuple[int, ...]:
        """Return the generations that who reads from ``after`` to ``position`` may have missed something of."""
        begin, end = quiet
        return tuple(
            number
            for gap in self._gaps_of(shard)
            if after < gap.last
            and gap.first <= position
            and not (begin <= after and gap.last <= end)  # nothing in it matched
            for number in gap.generations
        )

    def _gaps_of(self, shard: int) -> list[_Gap]:
        live, gaps = self._gaps[shard]
        if live is not self._shards[shard].live:
            live = self._shards[shard].live
            gaps = _gaps([record for record, _ in live])
            self._gaps[shard] = live, gaps
        return gaps

    def forget(self) -> None:
        """Keep nothing of what was read: some of it was deleted."""
        with self._lock:
            self._memory.clear()
            self._rows = self._bytes = 0
        for feed in self._all():
            feed.forget()

    def _all(self) -> list[Feed]:
        with self._lock:  # else feeds that are made meanwhile break off the walk
            return list(self._feeds.values())

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
        plan = self._shards[shard].plan(self._id, topic_filter, first, bound, since=None)
        return in_order(plan, db.fetch, rows), plan.bound

    def remember(self, stretch: Stretch, where: list[Stretch]) -> None:
        """A stretch is kept in a list; take the oldest from theirs if too many are."""
        rows, size = len(stretch.batch), stretch.batch.payload_bytes()
        with self._lock:
            self._memory.append((weakref.ref(stretch), where, rows, size))
            self._rows += rows
            self._bytes += size
            while self._rows > _ROWS or self._bytes > _BYTES or len(self._memory) > _STRETCHES:
                oldest, kept, rows, size = self._memory.popleft()
                self._rows -= rows
                self._bytes -= size
                with contextlib.suppress(ValueError):  # its feed has let go of it
                    kept.remove(oldest())  # type: ignore[arg-type]

    def hides(self, shard: int) -> bool:
        """Say whether a layout of the shard hides the epoch that is being written."""
        return any(slab.epoch > 1 for _, slab in self._shards[shard].slabs())

    def await_visible(self, feed: Feed, shard: int, seen: int, position: int) -> None:
        """Wake a feed, which has seen everything up to ``seen``, when everything up to a position can be."""
        committed = min(position, self._shards[shard].last_position)  # an announced batch may never be
        if seen < committed:
            self._awaiting.add(feed, shard, committed)

    # --- the end ---

    def close(self) -> None:
        """Tell all listeners that the database is being closed. May be called twice."""
        with self._lock:
            self._closed = True
            listeners = {listener: None for feed in list(self._feeds.values()) for listener in feed.listeners}
        self._awaiting.close()
        for listener in listeners:
            listener.closed()

    def join(self) -> None:
        """Return when no thread of the hub runs; the shards are closed by then."""
        self._awaiting.join()


def _gaps(live: list[GenerationRecord]) -> list[_Gap]:
    """Return where generations are missing that had positions."""
    gaps, number, end = [], 0, 0
    for record in live:
        if record.number > number + 1 and record.first_position > end + 1:
            gaps.append(_Gap(tuple(range(number + 1, record.number)), end + 1, record.first_position - 1))
        number, end = record.number, record.last_position or 0
    return gaps
