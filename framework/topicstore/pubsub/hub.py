"""`Hub`: the followers in this process, and their notification when matching messages are stored.

A batch is announced, under its shard's lock and before its commit, to the feeds whose filters match one of its topics.
The feeds are woken when the batch can be read. Filters that don't match cost nothing, so the cost of a commit doesn't
depend on the number of idle subscribers. There is no polling.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from topicstore.contract.arguments import check_within
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_iterable
from topicstore.contract.errors import DatabaseClosedError, WrongDatabaseError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.places import Place
from topicstore.contract.positions import first_position
from topicstore.contract.topics import TopicFilter
from topicstore.storage.storage import Storage

from .feed import Feed, Listener
from .filter_index import FilterIndex
from .read_cache import ReadCache
from .recent_commits import Commit, RecentCommits

__all__ = ["Hub"]


class Hub:
    """The feeds of one open database. All methods are thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self.reads = ReadCache(storage)
        """The read batches that were read recently, shared by all followers."""
        self.watchers: list[Callable[[int, Collection[bytes]], object]] = []
        """See `StorageListener.watchers`."""
        self._shards = storage.shards
        self._database = storage.id
        self._storage = weakref.ref(storage)
        self._recent = RecentCommits()
        self._scans_only = len(storage.hooks.topicstore_read.get_hookimpls()) > 1
        """Whether a plugin wraps reading, so that messages may differ from the stored ones when they are read."""
        self._announced: list[Commit | None] = [None for _ in storage.shards]
        """By shard, the last batch that was announced and can be read from memory. Guarded by the shard's lock."""
        self._opened = [shard.writer.opened for shard in storage.shards]
        """By shard, the opening or copying of which the feeds know. Replaced without a lock, after they know of it."""
        self._routes: FilterIndex[Feed] = FilterIndex()
        """The index of the feeds' filters, which has its own lock."""
        self._joining = ProcessLock()
        """Held while new feeds are announced to the shards, which waits for their locks. `_lock` is free meanwhile."""
        self._lock = ProcessLock()
        """Guards the attributes below except `_abandoned`, and each feed's listeners."""
        self._feeds: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()
        self._closed = False
        self._abandoned: collections.deque[tuple[Feed, Listener]] = collections.deque()
        """Listeners to remove. Needs no lock, because the operations of a deque are atomic."""

    # --- following ---

    def feed(self, topic_filter: TopicFilter) -> Feed:
        """Return the feed of a filter, which is shared by all its followers."""
        with self._lock:
            feed = self._feeds.get(topic_filter.text)
            if feed is None:
                feed = self._feeds[topic_filter.text] = Feed(self.reads, topic_filter)
            return feed

    def listen(self, feed: Feed, listener: Listener) -> None:
        """Add a listener to a feed. Waits for the locks of all shards if it is the first."""
        self._leave_abandoned()
        with self._lock:
            if self._closed:
                raise DatabaseClosedError("the database is closed")
            if not feed.listeners:
                self._routes.add(feed.topic_filter, feed)
            feed.listeners[listener] = None
            if feed.announced:
                return
        try:
            with self._joining:
                if not feed.announced:
                    for number, shard in enumerate(self._shards):
                        with shard.writer.lock:  # a running store may have looked up feeds earlier
                            feed.listen(number, shard.reader.last_position)
                    feed.announced = True
        except BaseException:
            self.leave(feed, listener)
            raise

    def leave(self, feed: Feed, listener: Listener) -> None:
        """Remove a listener from a feed."""
        with self._lock:
            feed.listeners.pop(listener, None)
            if not feed.listeners:
                self._routes.remove(feed.topic_filter, feed)
                feed.announced = False
                feed.leave()

    def abandon(self, feed: Feed, listener: Listener) -> None:
        """Remove a listener later. Takes no lock, because a garbage collection may call this anywhere."""
        self._abandoned.append((feed, listener))

    def _leave_abandoned(self) -> None:
        while self._abandoned:
            try:
                feed, listener = self._abandoned.popleft()
            except IndexError:  # another thread took the last entry
                return
            self.leave(feed, listener)

    @property
    def followed(self) -> bool:
        """Whether a feed has a listener."""
        return len(self._routes) > 0

    def matching(self, topic: str) -> tuple[Feed, ...]:
        """Return the feeds with listeners whose filters match a topic."""
        if self._abandoned:
            self._leave_abandoned()
        return self._routes.match(topic)

    def watermarks(self) -> list[int]:
        """Return each shard's watermark, after which a subscription without a start begins."""
        return [shard.reader.watermark for shard in self._shards]

    def last_positions(self) -> list[int]:
        """Return each shard's last position. A stored place after it refers to messages that the database has lost."""
        return [shard.reader.last_position for shard in self._shards]

    def place(self, positions: Sequence[int]) -> Place:
        """Return the place of these positions, by shard."""
        return Place(self._database, dict(enumerate(positions)))

    def before(self, time: int) -> list[int]:
        """Return, by shard, the position after which to begin at a time, at most the shard's last position.

        The limit matters if the clock is set back: new messages may get earlier times than the newest stored message.
        """
        before = max(first_position(time) - 1, 0)
        return [min(before, last) for last in self.last_positions()]

    def after(self, place: Mapping[int, int]) -> list[int]:
        """Return, by shard, the position after which to begin at a place; shards that are left out begin at 0.

        Raises `PlaceAheadError` for a place in a part of the database that was lost since, and `WrongDatabaseError` for
        a place of another database. A mapping that isn't a `Place` counts as of another database if one of its
        positions lies after the end of its shard. On a site of a cluster, the end is that of the log, which is read if
        need be; this raises the errors of `Site.refresh`. Raises `InvalidArgumentError` for unknown shards and for
        values that are no positions.
        """
        known = isinstance(place, Place)
        if isinstance(place, Place) and place.database != self._database:
            raise WrongDatabaseError(f"{str(place)!r} is a place in another database")
        for number, position in place.items():
            check_within("a shard", number, 0, len(self._shards) - 1)
            check_within("a position", position, 0, (1 << 64) - 1)
        ends = self.last_positions()
        storage = self._storage()
        if storage is not None and any(position > ends[number] for number, position in place.items()):
            storage.catch_up()  # the site that made the place may have applied more
        found = [0] * len(self._shards)
        for number, position in place.items():
            if not known and position > self._shards[number].reader.last_position:
                raise WrongDatabaseError(
                    f"position {position} of shard {number} lies after everything in this database: the place is "
                    "probably of another one"
                )
            self._shards[number].reader.check_reached(position)
            found[number] = position
        return found

    # --- notifying ---

    def announce(self, shard: int, batch: MessageBatch) -> list[Feed]:
        """Announce a batch that is about to be committed; return the feeds to wake once it is visible.

        The caller holds the shard's lock.
        """
        earlier, self._announced[shard] = self._announced[shard], None
        if earlier is not None and not earlier.committed:  # the commit after the announcement failed
            earlier.void = True
        if not len(self._routes) or not len(batch):
            return []
        distinct = set(to_iterable(batch.topics))
        wanted: dict[Feed, list[str]] = {}
        match = self._routes.match
        for topic in distinct:
            for feed in match(topic):
                if feed in wanted:
                    wanted[feed].append(topic)
                else:
                    wanted[feed] = [topic]
        if not wanted:
            return []
        slab = self._shards[shard].writer.slab
        scanned = self._scans_only or slab is None or slab.epoch > 1  # a scan is needed: see `RecentCommits`
        commit = None if scanned else Commit(batch, len(distinct))
        self._announced[shard] = commit
        first, last = batch.span
        for feed, topics in wanted.items():
            feed.announce(shard, first, last, commit, topics)
        if commit is not None:
            self._recent.remember(commit)
        return list(wanted)

    def committed(self, shard: int) -> None:
        """Record that the batch announced last is committed. The caller holds the shard's lock."""
        commit = self._announced[shard]
        if commit is not None:
            commit.committed = True

    def visible(self, shard: int, announced: object) -> None:
        """Wake the feeds to which a batch was announced, because it is visible. The caller holds no lock."""
        if self._abandoned:
            self._leave_abandoned()
        for feed in announced:  # type: ignore[attr-defined]  # it is the result of `announce`
            feed.wake(shard)
        if self.watchers:
            self.changed(shard, ())

    def changed(self, shard: int, heads: Collection[bytes]) -> None:
        """Notify the watchers that a shard's state has changed; or, if ``heads`` is empty, that it has new messages."""
        for watch in list(self.watchers):
            watch(shard, heads)

    def route(self, messages: list[Message]) -> None:
        """Pass messages that are not stored to the current listeners.

        If all messages have the same topic, all listeners get the same list object, so that they can share results.
        """
        if messages and all(message.topic == messages[0].topic for message in messages):
            for feed in self._routes.match(messages[0].topic):
                feed.route(messages)
            return
        routed: dict[Feed, list[Message]] = {}
        for message in messages:
            for feed in self._routes.match(message.topic):
                routed.setdefault(feed, []).append(message)
        for feed, matching in routed.items():
            feed.route(matching)

    def dropped(self) -> None:
        """Clear the caches after a generation was dropped, and notify the listeners."""
        opened = [shard.writer.opened for shard in self._shards]
        self.forget()
        for feed in self._all():
            for shard in range(len(self._shards)):
                feed.wake(shard)
        self._opened[:] = opened

    def forget(self) -> None:
        """Clear the caches, because messages were deleted."""
        self.reads.forget()
        self._recent.forget()
        for feed in self._all():
            feed.forget()

    def replaced(self, shard: int) -> None:
        """Clear the caches of a shard whose contents were replaced by a copy, and wake its listeners."""
        self.reads.forget()
        self._recent.forget()
        opened = self._shards[shard].writer.opened
        for feed in self._all():
            feed.forget()
        self.extended(shard)
        self._opened[shard] = opened

    def extended(self, shard: int) -> None:
        """Wake the listeners of a shard whose new messages were not announced, because this site did not store them."""
        found = self._shards[shard]
        for feed in self._all():
            with found.writer.lock:
                feed.listen(shard, found.reader.last_position)
            feed.wake(shard)

    def knows(self, shard: int) -> bool:
        """Return whether the feeds were notified of the current contents of a shard since a copy last replaced them."""
        return self._opened[shard] is self._shards[shard].writer.opened

    def _all(self) -> list[Feed]:
        with self._lock:  # a feed that is added meanwhile would break the iteration
            return list(self._feeds.values())

    # --- closing ---

    def stop(self) -> None:
        """Notify all listeners that the database is being closed, and stop. Idempotent."""
        with self._lock:
            self._closed = True
            listeners = {listener: None for feed in list(self._feeds.values()) for listener in feed.listeners}
        self.reads.stop()
        for listener in listeners:
            listener.closed()

    def join(self) -> None:
        """Wait until all threads of the hub have ended. The caller must have closed the shards first."""
        self.reads.join()
