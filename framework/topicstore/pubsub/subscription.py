"""`Subscription`: the public object that delivers the messages of a filter, in a thread or in asyncio.

Consumers pull: a batch is read when it is fetched, in the fetching thread. So a slow consumer doesn't hold up others,
and stored messages don't accumulate in memory. While the window of unacknowledged messages is full, further messages
wait in the store.
"""

from __future__ import annotations

import asyncio
import collections
import time
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor
from types import TracebackType
from typing import Literal, Self

import attrs

from topicstore.contract.arguments import Length, check_count, seconds
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import (
    DatabaseClosedError,
    GenerationDroppedError,
    InvalidArgumentError,
    SubscriptionClosedError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message
from topicstore.contract.places import Place
from topicstore.contract.times import Time, instant
from topicstore.contract.topics import TopicFilter
from topicstore.runtime.warning import warn_caller
from topicstore.storage.counting.lag import Lag, LagCounter
from topicstore.storage.storage import Storage

from .feed import Feed
from .hub import Hub
from .nonpersistent import NonPersistentMessages
from .notifier import Notifier, TaskWaiter, ThreadWaiter
from .read_cache import ReadSlice

__all__ = ["OnDropped", "Subscription", "SubscriptionBatch", "SubscriptionStatus", "report_dropped"]


OnDropped = Literal["warn", "raise"] | Callable[[tuple[int, ...]], object]
"""The reaction of iteration to generations that were dropped before the subscription had read them: a warning,
`GenerationDroppedError`, or a call of a function with their numbers."""


@attrs.frozen(kw_only=True, slots=False)
class SubscriptionBatch:
    """Messages of one shard in order of position, or messages that are not stored."""

    messages: list[Message]
    """The messages. Several consumers may share the list; don't change it."""
    sequence: int
    """The number of messages that the subscription has delivered, with this batch: the argument of `acknowledge`."""
    shard: int | None
    """The shard of the messages; None if they are not stored."""
    lagging: bool
    """Whether more messages are stored already, so that the subscription is catching up and not live."""
    stuck: bool = False
    """Whether the batch is empty because the window is full, until messages are acknowledged."""
    dropped: tuple[int, ...] = ()
    """The generations that were dropped before the subscription had read them; their unread messages are lost."""
    read_slice: ReadSlice | None = attrs.field(default=None, repr=False)
    after: int = attrs.field(default=0, repr=False)
    """The position in the shard after which the batch was read."""

    @property
    def batch(self) -> MessageBatch:
        """Return the messages as columns, with shards and positions if they are stored."""
        return MessageBatch.from_messages(self.messages) if self.read_slice is None else self.read_slice.batch

    def __len__(self) -> int:
        return len(self.messages)


@attrs.frozen(kw_only=True)
class SubscriptionStatus:
    """A snapshot of the status of a subscription."""

    topic_filter: str
    place: Place
    lagging: bool
    """Whether there may be unread messages; `Subscription.lag` counts them."""
    unacknowledged: int
    stuck: bool
    """Whether the window is full."""
    stuck_for: float
    """Seconds since the window filled up; 0 if it isn't full."""
    missed: int
    """The number of messages, not stored, that were dropped because too many waited."""
    dropped: int
    """The number of generations dropped before the subscription had read them; their unread messages are lost."""


class _Inbox:
    """The events from the hub, and the waiters for them. Has no reference to its subscription."""

    def __init__(self, shards: int) -> None:
        self.lock = ProcessLock()
        """Guards the attributes below and the subscription's place. Held briefly, never while messages are read."""
        self.ready: dict[int, None] = dict.fromkeys(range(shards))
        """The shards that may have unread messages, in the order of their turns."""
        self.nonpersistent: NonPersistentMessages[Message] = NonPersistentMessages(lambda message: len(message.payload))
        """The queue of messages that are not stored; above its limits, the oldest are dropped."""
        self.missed = 0
        self.ended: Exception | None = None
        self.notifier = Notifier()
        """Wakes the waiters when any of the attributes changes."""

    def on_stored(self, feed: Feed, shard: int) -> None:
        with self.lock:
            self.ready[shard] = None
        self.notifier.notify()

    def routed(self, feed: Feed, messages: list[Message]) -> None:
        with self.lock:
            for message in messages:
                self.nonpersistent.append(message)
            self.missed += sum(1 for _ in self.nonpersistent.drop())
        self.notifier.notify()

    def closed(self) -> None:
        self.end(DatabaseClosedError("the database was closed"))

    def end(self, why: Exception) -> None:
        with self.lock:
            self.ended = self.ended or why
        self.notifier.notify()


class Subscription:
    """A subscription to a topic filter, created by `Database.subscribe`. Close it, or use it as a context manager.

    Iteration, with ``for`` or ``async for``, yields each message, stored messages first, until the subscription is
    closed. With a ``window``, a batch counts as acknowledged when the first message after it is requested.
    Alternatively, `fetch` batches and `acknowledge` them. If retention drops generations before they are read, batches
    name these generations, and iteration acts according to ``on_dropped``; after an error, another iteration continues.
    Methods are thread-safe; threads that fetch at the same time get different batches.

    After an error of `fetch`, another call continues at the same place. When the database is closed,
    `DatabaseClosedError` is raised. When the subscription is closed, `fetch` raises `SubscriptionClosedError`, and
    iteration ends.
    """

    def __init__(
        self,
        storage: Storage,
        hub: Hub,
        topic_filter: TopicFilter,
        start: Time | Mapping[int, int] | None,
        window: int | None,
        batch_size: int,
        on_dropped: OnDropped,
    ) -> None:
        check_count("batch_size", batch_size)
        if window is not None:
            check_count("window", window)
        if on_dropped not in ("warn", "raise") and not callable(on_dropped):
            raise InvalidArgumentError(f'on_dropped is "warn", "raise" or a function, not {on_dropped!r}')
        self._storage = storage  # the database stays open as long as a subscription exists
        self._window = window
        self._batch_size = batch_size
        self._on_dropped = on_dropped
        self._hub = hub
        self._feed = hub.feed(topic_filter)
        self._inbox = _Inbox(len(storage.shards))
        self._reading = ProcessLock()
        """Held while a batch is taken, so that batches are taken in sequence. Acquired before the inbox's lock."""
        self._lock = self._inbox.lock
        """Guards all attributes below."""
        self._held: dict[int, SubscriptionBatch] = {}
        """By `id`, the batches that a thread took for an asyncio task, until the task or another fetch returns them."""
        self._holding = False
        """Whether the batch that is being taken is for an asyncio task. Guarded by `_reading`."""
        self._sequence = 0
        """The number of messages that were delivered."""
        self._acknowledged = 0
        """The number of messages that were acknowledged."""
        self._nonpersistent_last = False
        """Whether the last batch had messages that are not stored."""
        self._iterated: collections.deque[Message] = collections.deque()
        """The rest of the batch that is iterated over. Needs no lock, because the operations of a deque are atomic."""
        self._iterated_to = 0
        """The sequence of that batch."""
        self._full_since: float | None = None
        """The monotonic time at which the window filled up; None if it is not full."""
        self._delivered: collections.deque[tuple[int, int, int]] = collections.deque()
        """Sequence, shard and position of each batch that waits to be acknowledged."""
        self._dropped = 0
        """The number of generations that were dropped before they were read."""
        self._gone = frozenset() if isinstance(start, Mapping) else hub.reads.gone()  # a place may precede any of them
        """The generations whose dropping was reported or is irrelevant."""
        place = None if start is None else _place(start, storage, hub)
        hub.listen(self._feed, self._inbox)
        self._end = weakref.finalize(self, hub.abandon, self._feed, self._inbox)
        self._end.atexit = False
        self._place = list(hub.watermarks()) if place is None else place  # read after `listen`: no message is missed
        """By shard, the position up to which all was delivered. Changed only while `_reading` is held, too."""
        self._done = list(self._place)
        """By shard, the position up to which all was acknowledged."""

    @property
    def topic_filter(self) -> str:
        """The topic filter of the subscription."""
        return self._feed.topic_filter.text

    @property
    def place(self) -> Place:
        """Return the place up to which messages were fetched, from which another subscription can start."""
        with self._lock:
            return self._hub.place(self._before_held_locked(self._place))

    @property
    def acknowledged(self) -> Place:
        """Return the place up to which messages were acknowledged, from which another subscription can start.

        A batch of which only a part was acknowledged doesn't count.
        """
        with self._lock:
            return self._hub.place(self._before_held_locked(self._done))

    def _before_held_locked(self, places: list[int]) -> list[int]:
        """Return places, by shard, moved back before batches that were taken but not yet returned to a caller."""
        found = list(places)
        for batch in self._held.values():
            if batch.shard is not None:
                found[batch.shard] = min(found[batch.shard], batch.after)
        return found

    # --- fetching ---

    def fetch(self, limit: int | None = None, timeout: Length | None = None) -> SubscriptionBatch:
        """Return at most ``limit`` of the next messages; block until there are some.

        After ``timeout`` (a timedelta or seconds; None: never) the batch is empty. No messages are returned while the
        window is full.
        """
        found = self._take(limit)
        if found is not None:  # found without a waiter, which costs as much as a short read
            return found
        with ThreadWaiter(self._inbox.notifier, seconds(timeout)) as waiter:
            while True:
                found = self._take(limit)
                if found is not None:
                    return found
                if not self._worth_a_look() and not waiter.wait():
                    return self._nothing()

    async def fetch_async(
        self, limit: int | None = None, timeout: Length | None = None, *, executor: Executor | None = None
    ) -> SubscriptionBatch:
        """Fetch as `fetch` does, without blocking the event loop. Messages are read in a thread of ``executor``."""
        with TaskWaiter(self._inbox.notifier, seconds(timeout)) as waiter:
            while True:
                found = await self._take_async(limit, executor) if self._worth_a_look() else None
                if found is not None:
                    return found
                if not self._worth_a_look() and not await waiter.wait():
                    return self._nothing()

    async def _take_async(self, limit: int | None, executor: Executor | None) -> SubscriptionBatch | None:
        taking = asyncio.get_running_loop().run_in_executor(executor, self._take_held, limit)
        try:
            held = await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._leave)
            await asyncio.wait([taking])  # the next fetch must not begin before this one has ended, to keep the order
            raise
        with self._lock:
            return None if held is None else self._held.pop(id(held), None)  # None: another fetch took the batch

    def _take_held(self, limit: int | None) -> SubscriptionBatch | None:
        """Take a batch that counts as fetched only when its task returns it, because the task may be cancelled."""
        with self._reading:
            self._holding = True
            try:
                return self._take(limit)
            finally:
                self._holding = False

    def _leave(self, taking: asyncio.Future[SubscriptionBatch | None]) -> None:
        """Leave a batch that was taken for a cancelled task to the next fetch."""
        if not taking.cancelled() and taking.exception() is None:
            self._inbox.notifier.notify()

    def _worth_a_look(self) -> bool:
        inbox = self._inbox
        with self._lock:
            unread = inbox.nonpersistent or inbox.ready  # fetched only while the window has room
            return bool(self._held) or inbox.ended is not None or bool(unread and self._room_locked())

    def _room_locked(self) -> int:
        """Return the number of further messages that the window permits."""
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
        """Return the next batch; None if no messages are available, or if the window is full."""
        if limit is not None:
            check_count("limit", limit)
        most = self._batch_size if limit is None else min(limit, self._batch_size)
        with self._reading:
            with self._lock:
                if self._inbox.ended is not None:
                    raise self._inbox.ended.with_traceback(None)
                if self._held:
                    first = next(iter(self._held))
                    return self._held[first] if self._holding else self._held.pop(first)
            sources = [self._take_nonpersistent, self._take_stored]
            if self._nonpersistent_last:  # the two sources alternate, so that neither starves
                sources.reverse()
            found = sources[0](most)
            return sources[1](most) if found is None else found  # a batch without messages names dropped generations

    def _take_nonpersistent(self, most: int) -> SubscriptionBatch | None:
        nonpersistent = self._inbox.nonpersistent
        with self._lock:
            messages = [nonpersistent.take() for _ in range(min(most, len(nonpersistent), self._room_locked()))]
            return self._deliver_locked(messages, None, None) if messages else None

    def _take_stored(self, most: int) -> SubscriptionBatch | None:
        inbox = self._inbox
        while True:
            with self._lock:
                room = self._room_locked()
                if not (inbox.ready and room):
                    return None
                shard = next(iter(inbox.ready))
                del inbox.ready[shard]  # removed before reading, so that messages committed meanwhile add it again
                place = self._place[shard]
            try:
                read_slice = self._feed.read(shard, place, min(most, room))
                messages = read_slice.messages
            except BaseException:
                inbox.on_stored(self._feed, shard)
                raise
            if not read_slice.caught_up:
                inbox.on_stored(self._feed, shard)
            with self._lock:
                self._place[shard] = read_slice.position
                if len(read_slice) or not self._gone.issuperset(read_slice.dropped):
                    return self._deliver_locked(messages, shard, read_slice, place)
                if not self._delivered:
                    self._done[shard] = read_slice.position

    def _deliver_locked(
        self, messages: list[Message], shard: int | None, read_slice: ReadSlice | None, after: int = 0
    ) -> SubscriptionBatch:
        self._sequence += len(messages)
        self._nonpersistent_last = read_slice is None
        if self._window is None:
            self._acknowledged = self._sequence
        if read_slice is not None and shard is not None:
            self._delivered.append((self._sequence, shard, read_slice.position))
            if self._window is None:
                self._advance_locked()
        if self._room_locked() == 0:
            self._full_since = time.monotonic()
        dropped = () if read_slice is None else tuple(gone for gone in read_slice.dropped if gone not in self._gone)
        self._gone = self._gone.union(dropped)  # each generation is reported once, not for every shard
        self._dropped += len(dropped)
        batch = SubscriptionBatch(
            messages=messages,
            sequence=self._sequence,
            shard=shard,
            lagging=read_slice is not None and not read_slice.caught_up,
            dropped=dropped,
            read_slice=read_slice,
            after=after,
        )
        if self._holding:
            self._held[id(batch)] = batch
        return batch

    # --- acknowledging ---

    def acknowledge(self, sequence: int) -> None:
        """Acknowledge all messages up to this number (`SubscriptionBatch.sequence`), which makes room in the window."""
        with self._lock:
            if type(sequence) is not int or not 0 <= sequence <= self._sequence:
                raise InvalidArgumentError(f"{self._sequence} were delivered; {sequence!r} can't be acknowledged")
            if sequence > self._acknowledged:
                self._acknowledged = sequence
                self._full_since = None
                self._advance_locked()
                self._inbox.notifier.notify()

    def _advance_locked(self) -> None:
        while self._delivered and self._delivered[0][0] <= self._acknowledged:
            _, shard, position = self._delivered.popleft()
            self._done[shard] = position

    def status(self) -> SubscriptionStatus:
        """Return a consistent snapshot of the status."""
        with self._lock:
            full = self._full_since
            return SubscriptionStatus(
                topic_filter=self.topic_filter,
                place=self.place,
                lagging=bool(self._inbox.ready),
                unacknowledged=self._sequence - self._acknowledged,
                stuck=full is not None,
                stuck_for=0.0 if full is None else time.monotonic() - full,
                missed=self._inbox.missed,
                dropped=self._dropped,
            )

    def lag(self) -> Lag:
        """Return the lag of fetching behind the stored messages; messages that are not stored don't count.

        Up to 10,000 unread messages of each shard are read and counted; the number of further ones is estimated. Raises
        the errors of reading.
        """
        if self._inbox.ended is not None:
            raise self._inbox.ended.with_traceback(None)
        counter = LagCounter(self._storage)
        with self._lock:
            places = self._before_held_locked(self._place)
        unread = [self._feed.unread(shard, place) for shard, place in enumerate(places)]
        return counter.lag(self._feed.topic_filter, counter.caught_up(places, unread))

    # --- iterating ---

    def __iter__(self) -> Iterator[Message]:
        try:
            while True:
                while self._iterated:
                    try:
                        message = self._iterated.popleft()
                    except IndexError:  # another thread took the last message
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
                    except IndexError:  # another thread took the last message
                        break
                    yield message
                self.acknowledge(self._iterated_to)
                self._iterate(await self.fetch_async())
        except SubscriptionClosedError:
            return

    def _iterate(self, batch: SubscriptionBatch) -> None:
        """Make a batch the next one to iterate over. It is kept, so that a new iteration continues an earlier one."""
        with self._lock:
            self._iterated.extend(batch.messages)
            self._iterated_to = batch.sequence
        report_dropped(batch, self.topic_filter, self._on_dropped)

    # --- closing ---

    def close(self) -> None:
        """End the subscription, and wake all waiters. Idempotent. Does nothing in a forked child."""
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


def report_dropped(batch: SubscriptionBatch, topic_filter: str, on_dropped: OnDropped) -> None:
    """If a batch names generations dropped unread, warn, raise an error or call a function, as ``on_dropped`` says."""
    if not batch.dropped:
        return
    if callable(on_dropped):
        on_dropped(batch.dropped)
        return
    numbers = ", ".join(map(str, batch.dropped))
    text = (
        f"generations {numbers} were dropped before the subscription to {topic_filter!r} had read them: their unread "
        "messages are lost"
    )
    if on_dropped == "raise":
        raise GenerationDroppedError(text)
    warn_caller(text)


def _place(start: Time | Mapping[int, int], storage: Storage, hub: Hub) -> list[int]:
    """Return, by shard, the position after which to begin."""
    if isinstance(start, Mapping):
        return hub.after(start)
    return hub.before(instant(start, storage.clock, allow_ancient=storage.allow_ancient))
