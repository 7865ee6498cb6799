"""`Subscription`: what a program holds to follow a filter, in a thread or in asyncio.

Consumers pull: a batch is read when it is asked for, by whoever asks, so a slow consumer holds back
nobody and nothing piles up for it. What it can't pull because too much is unacknowledged waits in the store.
"""

from __future__ import annotations

import asyncio
import collections
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import datetime
from types import TracebackType
from typing import Self

import attrs

from topicstore.contract.arguments import check_count, check_within
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError, SubscriptionClosedError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.positions import first_position, time_of, to_microseconds
from topicstore.contract.topics import TopicFilter
from topicstore.storage.storage import Storage

from .bell import Bell, ListeningTask, ListeningThread
from .feed import Feed
from .hub import Hub
from .read_cache import Run

__all__ = ["Place", "Subscription", "SubscriptionBatch", "SubscriptionStatus"]

LIVE_ONLY = 10_000
"""Messages stored nowhere that wait for a consumer; when more come, the oldest go."""

Place = Mapping[int, int]
"""By shard, the position up to which everything was read."""


@attrs.frozen(kw_only=True, slots=False)
class SubscriptionBatch:
    """Messages of one shard in order of position, or messages that are stored nowhere."""

    messages: list[Message]
    """Shared by all who read them; don't change the list."""
    sequence: int
    """How many messages the subscription has delivered, these among them: what to acknowledge."""
    shard: int | None
    """None: they are stored nowhere."""
    lagging: bool
    """More is stored already: this is catching up, not live."""
    stuck: bool = False
    """Empty because the window is full: acknowledge."""
    dropped: tuple[int, ...] = ()
    """Generations that were dropped before the subscription had read them: what matched of the rest is lost."""
    run: Run | None = attrs.field(default=None, repr=False)

    @property
    def batch(self) -> MessageBatch:
        """The messages as columns, with shards and positions if they are stored."""
        return MessageBatch.from_messages(self.messages) if self.run is None else self.run.batch

    def __len__(self) -> int:
        return len(self.messages)


@attrs.frozen(kw_only=True)
class SubscriptionStatus:
    """Where a subscription stands."""

    topic_filter: str
    place: dict[int, int]
    lagging: bool
    """There is something to read, as far as is known."""
    behind: float
    """Seconds between what was read last and what can be read, of the shard that is furthest behind; 0 if none is."""
    unacknowledged: int
    stuck: bool
    """The window is full."""
    stuck_for: float
    """Seconds since it filled up; 0 if it is not."""
    missed: int
    """Messages stored nowhere that came while too many waited, and were thrown away."""


class _Inbox:
    """What listeners of the hub are told, and who waits for it. Holds nothing of the subscription, which may go."""

    def __init__(self, shards: int) -> None:
        self.lock = ProcessLock()
        """Guards what follows, and where its subscription stands. Held for moments, never while something is read."""
        self.ready: dict[int, None] = dict.fromkeys(range(shards))
        """Shards with something to read, as far as is known; in the order in which their turn comes."""
        self.live: collections.deque[Message] = collections.deque()
        self.missed = 0
        self.ended: Exception | None = None
        self.bell = Bell()
        """Rings when any of it changes."""

    def woken(self, feed: Feed, shard: int) -> None:
        with self.lock:
            self.ready[shard] = None
        self.bell.ring()

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        with self.lock:
            self.live.extend(messages)
            while len(self.live) > LIVE_ONLY:
                self.live.popleft()
                self.missed += 1
        self.bell.ring()

    def closed(self) -> None:
        self.end(DatabaseClosedError("the database was closed"))

    def end(self, why: Exception) -> None:
        with self.lock:
            self.ended = self.ended or why
        self.bell.ring()


class Subscription:
    """Follows a filter. Made by `Database.subscribe`; close it, or use it as a context manager.

    Iterate over it, with ``for`` or ``async for``, and each message comes, catching up first, until it is
    closed; with a ``window``, a batch counts as acknowledged when the first message behind it is asked for.
    Or `fetch` batches, and `acknowledge` them. Methods may be called from any thread; batches that
    several threads fetch are different ones.

    An error of a `fetch` ends nothing: fetching again goes on at the same place. When the database is
    closed, `DatabaseClosedError` is raised; when the subscription is, `SubscriptionClosedError`, and
    iterating ends.
    """

    def __init__(
        self,
        storage: Storage,
        hub: Hub,
        topic_filter: TopicFilter,
        start: int | datetime | Place | None,
        *,
        window: int | None,
        batch_size: int,
    ) -> None:
        self._storage = storage  # which stays open as long as somebody follows it
        self._window = window
        self._batch_size = batch_size
        self._hub = hub
        self._feed = hub.feed(topic_filter)
        self._inbox = _Inbox(len(storage.shards))
        self._reading = ProcessLock()
        """Held, before the inbox's lock, by who takes a batch: so batches are taken one after the other."""
        self._lock = self._inbox.lock
        """Guards all that follows."""
        self._given_back: collections.deque[SubscriptionBatch] = collections.deque()
        """Batches taken for an asyncio task that was cancelled meanwhile."""
        self._sequence = 0
        """How many messages were delivered."""
        self._acknowledged = 0
        """How many of them were acknowledged."""
        self._live_last = False
        """The last batch was of messages that are stored nowhere."""
        self._iterated: collections.deque[Message] = collections.deque()
        """What is left of the batch that is iterated over. Needs no lock: it is extended and taken from in one step."""
        self._iterated_to = 0
        """The sequence of that batch."""
        self._full_since: float | None = None
        """When the window filled up; None if it is not full."""
        self._delivered: collections.deque[tuple[int, int, int]] = collections.deque()
        """Sequence, shard and position of the batches that wait to be acknowledged."""
        self._gone = frozenset() if isinstance(start, Mapping) else hub.reads.gone()  # who begins there missed nothing
        """Generations whose dropping was told, or concerns nobody."""
        place = None if start is None else _place(start, len(storage.shards))
        hub.listen(self._feed, self._inbox)
        self._end = weakref.finalize(self, hub.abandon, self._feed, self._inbox)
        self._end.atexit = False
        self._place = list(hub.watermarks()) if place is None else place  # behind it: so nothing is missed
        """By shard, up to where everything was delivered. Changed only by who also holds `_reading`."""
        self._done = list(self._place)
        """By shard, up to where everything was acknowledged."""

    @property
    def topic_filter(self) -> str:
        """The filter."""
        return self._feed.topic_filter.text

    @property
    def place(self) -> dict[int, int]:
        """What was fetched, as a start for another subscription to go on behind it."""
        with self._lock:
            return dict(enumerate(self._place))

    @property
    def acknowledged(self) -> dict[int, int]:
        """What was acknowledged, as a start for another subscription to go on behind it.

        Of a batch of which only a part was acknowledged, nothing counts.
        """
        with self._lock:
            return dict(enumerate(self._done))

    # --- fetching ---

    def fetch(self, limit: int | None = None, timeout: float | None = None) -> SubscriptionBatch:
        """Return the next messages: at most ``limit``, at once if there are some, else when they come.

        After ``timeout`` seconds (None: never), or if the window is full by then, it returns an empty batch.
        """
        found = self._take(limit)
        if found is not None:  # at once, without listening first, which costs as much as a short read
            return found
        with ListeningThread(self._inbox.bell, timeout) as listening:
            while True:
                found = self._take(limit)
                if found is not None:
                    return found
                if not self._worth_a_look() and not listening.wait():
                    return self._nothing()

    async def fetch_async(self, limit: int | None = None, timeout: float | None = None) -> SubscriptionBatch:
        """Like `fetch`, in asyncio. What is read to catch up is read in a thread, so the loop isn't held up."""
        with ListeningTask(self._inbox.bell, timeout) as listening:
            while True:
                found = await self._take_async(limit) if self._worth_a_look() else None
                if found is not None:
                    return found
                if not self._worth_a_look() and not await listening.wait():
                    return self._nothing()

    async def _take_async(self, limit: int | None) -> SubscriptionBatch | None:
        taking = asyncio.get_running_loop().run_in_executor(None, self._take, limit)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)  # what the thread takes is for the next fetch
            await asyncio.wait([taking])  # which must not begin before: what it takes comes behind this
            raise

    def _give_back(self, taking: asyncio.Future[SubscriptionBatch | None]) -> None:
        if not taking.cancelled() and taking.exception() is None and (found := taking.result()) is not None:
            with self._lock:
                self._given_back.append(found)
            self._inbox.bell.ring()

    def _worth_a_look(self) -> bool:
        inbox = self._inbox
        with self._lock:
            unread = inbox.live or inbox.ready  # with a full window neither can be had
            return bool(self._given_back) or inbox.ended is not None or bool(unread and self._room_locked())

    def _room_locked(self) -> int:
        """Return how many messages the window lets through."""
        if self._window is None:
            return self._batch_size
        return max(self._window - (self._sequence - self._acknowledged), 0)

    def _nothing(self) -> SubscriptionBatch:
        with self._lock:
            return SubscriptionBatch(
                messages=[],
                sequence=self._sequence,
                shard=None,
                lagging=bool(self._inbox.ready),
                stuck=self._room_locked() == 0,
            )

    def _take(self, limit: int | None) -> SubscriptionBatch | None:
        """Return what there is; None if there is nothing, or no room for it."""
        if limit is not None:
            check_count("limit", limit)
        most = self._batch_size if limit is None else min(limit, self._batch_size)
        with self._reading:
            with self._lock:
                if self._inbox.ended is not None:
                    raise self._inbox.ended.with_traceback(None)
                if self._given_back:
                    return self._given_back.popleft()
            sources = [self._take_live, self._take_stored]
            if self._live_last:  # they take turns, so that neither starves
                sources.reverse()
            return sources[0](most) or sources[1](most)

    def _take_live(self, most: int) -> SubscriptionBatch | None:
        live = self._inbox.live
        with self._lock:
            messages = [live.popleft() for _ in range(min(most, len(live), self._room_locked()))]
            return self._deliver_locked(messages, None, None) if messages else None

    def _take_stored(self, most: int) -> SubscriptionBatch | None:
        inbox = self._inbox
        while True:
            with self._lock:
                room = self._room_locked()
                if not (inbox.ready and room):
                    return None
                shard = next(iter(inbox.ready))
                del inbox.ready[shard]  # before reading: what comes meanwhile puts it back
                place = self._place[shard]
            try:
                run = self._feed.read(shard, place, min(most, room))
                messages = run.messages
            except BaseException:
                inbox.woken(self._feed, shard)
                raise
            if not run.caught_up:
                inbox.woken(self._feed, shard)
            with self._lock:
                self._place[shard] = run.position
                if len(run) or not self._gone.issuperset(run.dropped):
                    return self._deliver_locked(messages, shard, run)
                if not self._delivered:
                    self._done[shard] = run.position

    def _deliver_locked(self, messages: list[Message], shard: int | None, run: Run | None) -> SubscriptionBatch:
        self._sequence += len(messages)
        self._live_last = run is None
        if self._window is None:
            self._acknowledged = self._sequence
        if run is not None and shard is not None:
            self._delivered.append((self._sequence, shard, run.position))
            if self._window is None:
                self._advance_locked()
        if self._room_locked() == 0:
            self._full_since = time.monotonic()
        dropped = () if run is None else tuple(gone for gone in run.dropped if gone not in self._gone)
        self._gone = self._gone.union(dropped)  # each is told once, not for every shard
        return SubscriptionBatch(
            messages=messages,
            sequence=self._sequence,
            shard=shard,
            lagging=run is not None and not run.caught_up,
            dropped=dropped,
            run=run,
        )

    # --- acknowledging ---

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this number (`SubscriptionBatch.sequence`) is done with; the window moves on."""
        with self._lock:
            if type(sequence) is not int or not 0 <= sequence <= self._sequence:
                raise InvalidArgumentError(f"{self._sequence} were delivered; {sequence!r} can't be acknowledged")
            if sequence > self._acknowledged:
                self._acknowledged = sequence
                self._full_since = None
                self._advance_locked()
                self._inbox.bell.ring()

    def _advance_locked(self) -> None:
        while self._delivered and self._delivered[0][0] <= self._acknowledged:
            _, shard, position = self._delivered.popleft()
            self._done[shard] = position

    def status(self) -> SubscriptionStatus:
        """Return where it stands, as of one moment."""
        marks = self._hub.watermarks()
        with self._lock:
            behind = [time_of(marks[shard]) - time_of(self._place[shard]) for shard in self._inbox.ready]
            full = self._full_since
            return SubscriptionStatus(
                topic_filter=self.topic_filter,
                place=self.place,
                lagging=bool(self._inbox.ready),
                behind=max([*behind, 0]) / 1e6,
                unacknowledged=self._sequence - self._acknowledged,
                stuck=full is not None,
                stuck_for=0.0 if full is None else time.monotonic() - full,
                missed=self._inbox.missed,
            )

    # --- iterating ---

    def __iter__(self) -> Iterator[Message]:
        try:
            while True:
                while self._iterated:
                    try:
                        message = self._iterated.popleft()
                    except IndexError:  # another thread took it
                        break
                    yield message
                self.acknowledge(self._iterated_to)
                self._iterate(self.fetch())
        except SubscriptionClosedError:
            return

    async def __aiter__(self) -> AsyncIterator[Message]:
        try:
            while True:
                while self._iterated:
                    try:
                        message = self._iterated.popleft()
                    except IndexError:  # another thread took it
                        break
                    yield message
                self.acknowledge(self._iterated_to)
                self._iterate(await self.fetch_async())
        except SubscriptionClosedError:
            return

    def _iterate(self, batch: SubscriptionBatch) -> None:
        """Iterate over a batch next. It stays here, so that who breaks off and begins again goes on where it was."""
        with self._lock:
            self._iterated.extend(batch.messages)
            self._iterated_to = batch.sequence

    # --- the end ---

    def close(self) -> None:
        """Follow nothing more; who waits is let go. May be called twice. In a forked child it does nothing."""
        if self._storage.inherited:
            return
        if self._end.detach() is not None:
            self._hub.leave(self._feed, self._inbox)
        self._inbox.end(SubscriptionClosedError("the subscription was closed"))

    def __del__(self) -> None:
        if hasattr(self, "_end") and self._inbox.ended is None and not self._storage.inherited:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription {self.topic_filter!r}{' closed' * (self._inbox.ended is not None)}>"


def _place(start: int | datetime | Place, shards: int) -> list[int]:
    """Return, by shard, the position behind which to begin."""
    if not isinstance(start, Mapping):
        return [max(first_position(to_microseconds(start)) - 1, 0)] * shards
    for shard, position in start.items():
        if type(shard) is not int or not 0 <= shard < shards:
            raise InvalidArgumentError(f"there is no shard {shard!r}; they go from 0 to {shards - 1}")
        check_within("a position", position, 0, (1 << 64) - 1)
    return [start.get(shard, 0) for shard in range(shards)]
