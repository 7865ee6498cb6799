"""`Hub`: the followers in this process, and their notification when matching messages are stored.

A batch is announced, under its shard's lock and before its commit, to the feeds whose filters
match one of its topics; they are woken when it can be read. Filters that don't match cost nothing: a thousand idle
subscribers cost as little as one. There is no polling.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

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
    """The feeds of one open database. All methods may be called from any thread."""

    def __init__(self, storage: Storage) -> None:
        self.reads = ReadCache(storage)
        """The stretches that were read recently, shared by all followers."""
        self._shards = storage.shards
        self._database = storage.id
        self._recent = RecentCommits()
        self._scans_only = len(storage.hooks.topicstore_read.get_hookimpls()) > 1
        """Whether a plugin wraps reading, so that messages may be read otherwise than they were stored."""
        self._announced: list[Commit | None] = [None for _ in storage.shards]
        """By shard, the last batch that was announced and can be read from memory. Guarded by the shard's lock."""
        self._routes: FilterIndex[Feed] = FilterIndex()
        """The index of the feeds' filters, which has a lock of its own."""
        self._lock = ProcessLock()
        """Guards the attributes below except `_abandoned`, and each feed's listeners."""
        self._feeds: weakref.WeakValueDictionary[str, Feed] = weakref.WeakValueDictionary()
        self._closed = False
        self._abandoned: collections.deque[tuple[Feed, Listener]] = collections.deque()
        """Listeners to remove. Needs no lock: it is appended to and taken from in one step."""

    # --- following ---

    def feed(self, topic_filter: TopicFilter) -> Feed:
        """Return the feed of a filter, which is shared by all its followers."""
        with self._lock:
            feed = self._feeds.get(topic_filter.text)
            if feed is None:
                feed = self._feeds[topic_filter.text] = Feed(self.reads, topic_filter)
            return feed

    def listen(self, feed: Feed, listener: Listener) -> None:
        """Notify a listener of a feed from now on."""
        self._leave_abandoned()
        with self._lock:
            if self._closed:
                raise DatabaseClosedError("the database is closed")
            first = not feed.listeners
            feed.listeners[listener] = None
            if first:
                self._routes.add(feed.topic_filter, feed)
                for number, shard in enumerate(self._shards):
                    with shard.writer.lock:  # a store under way may have looked for listeners before this one was there
                        feed.listen(number, shard.writer.tail.last_position)

    def leave(self, feed: Feed, listener: Listener) -> None:
        """Stop notifying a listener."""
        with self._lock:
            feed.listeners.pop(listener, None)
            if not feed.listeners:
                self._routes.remove(feed.topic_filter, feed)
                feed.leave()

    def abandon(self, feed: Feed, listener: Listener) -> None:
        """Remove a listener as `leave` does, but later. It takes no lock: a garbage collection may call it anywhere."""
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
        """Return each shard's highest visible position, at which "from now on" begins."""
        return [shard.writer.watermark for shard in self._shards]

    def last_positions(self) -> list[int]:
        """Return each shard's last position. A stored place that lies after it is in what the database has lost."""
        return [shard.writer.tail.last_position for shard in self._shards]

    def place(self, positions: Sequence[int]) -> Place:
        """Return the place of these positions, by shard."""
        return Place(self._database, dict(enumerate(positions)))

    def before(self, time: int) -> list[int]:
        """Return, by shard, the position after which to begin at a time; one after the newest message is from now on.

        What a shard stores from now on may have an earlier time than its newest message: its clock may be set back.
        """
        before = max(first_position(time) - 1, 0)
        return [min(before, last) for last in self.last_positions()]

    def after(self, place: Mapping[int, int]) -> list[int]:
        """Return, by shard, the position after which to begin at a place; shards that are left out begin at 0.

        Raises `PlaceAheadError` for a place in a part of the database that was lost since, and `WrongDatabaseError` for
        a place of another database. A mapping that isn't a `Place` counts as such if one of its positions lies after
        everything that the database has. Raises `InvalidArgumentError` for shards that there are not, and for what is
        no position.
        """
        known = isinstance(place, Place)
        if isinstance(place, Place) and place.database != self._database:
            raise WrongDatabaseError(f"{str(place)!r} is a place in another database")
        found = [0] * len(self._shards)
        for number, position in place.items():
            check_within("a shard", number, 0, len(found) - 1)
            check_within("a position", position, 0, (1 << 64) - 1)
            if not known and position > self._shards[number].writer.tail.last_position:
                raise WrongDatabaseError(
                    f"position {position} of shard {number} lies after everything in this database: the place is "
                    "probably of another one"
                )
            self._shards[number].reader.check_reached(position)
            found[number] = position
        return found

    # --- telling ---

    def announce(self, shard: int, batch: MessageBatch) -> list[Feed]:
        """Announce a batch that is about to be committed; return the feeds to wake then. Under the shard's lock."""
        earlier, self._announced[shard] = self._announced[shard], None
        if earlier is not None and not earlier.committed:  # an exception came between announcing and committing it
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
        commit = None if self._hidden(shard) else Commit(batch, len(distinct))
        self._announced[shard] = commit
        first, last = int(batch.positions[0]), int(batch.positions[-1])
        for feed, topics in wanted.items():
            feed.announce(shard, first, last, commit, topics)
        if commit is not None:
            self._recent.remember(commit)
        return list(wanted)

    def _hidden(self, shard: int) -> bool:
        """Return whether what is stored now has to be scanned: others may read it later, or otherwise."""
        found = self._shards[shard]
        return self._scans_only or found.generations.slab(found.generations.current).epoch > 1

    def committed(self, shard: int) -> None:
        """Note that the batch that was announced last is committed. Under the shard's lock."""
        commit = self._announced[shard]
        if commit is not None:
            commit.committed = True

    def visible(self, shard: int, told: object) -> None:
        """Wake the feeds to which a batch was announced, because it can be read. No lock is held."""
        self._leave_abandoned()
        for feed in cast("list[Feed]", told):
            feed.wake(shard)

    def route(self, messages: list[Message]) -> None:
        """Pass messages that are stored nowhere to the current listeners.

        Those of one topic are passed as one list, by which listeners know that what one of them has found out about it
        holds for the others, too.
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
        """Forget the messages read from a dropped generation, and notify the listeners."""
        self.forget()
        for feed in self._all():
            for shard in range(len(self._shards)):
                feed.wake(shard)

    def forget(self) -> None:
        """Forget all that was read, because some of it was deleted."""
        self.reads.forget()
        self._recent.forget()
        for feed in self._all():
            feed.forget()

    def _all(self) -> list[Feed]:
        with self._lock:  # otherwise feeds that are made meanwhile would interrupt the iteration
            return list(self._feeds.values())

    # --- the end ---

    def stop(self) -> None:
        """Notify all listeners that the database is being closed, and stop. May be called twice."""
        with self._lock:
            self._closed = True
            listeners = {listener: None for feed in list(self._feeds.values()) for listener in feed.listeners}
        self.reads.stop()
        for listener in listeners:
            listener.closed()

    def join(self) -> None:
        """Wait until no thread of the hub runs. The shards have to be closed before."""
        self.reads.join()
