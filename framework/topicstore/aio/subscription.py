"""`AsyncSubscription`: the object by which a task follows a filter."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Self

from topicstore.contract.errors import SubscriptionClosedError
from topicstore.contract.model import Message
from topicstore.contract.places import Place
from topicstore.pubsub.subscription import (
    OnDropped,
    Subscription,
    SubscriptionBatch,
    SubscriptionStatus,
    report_dropped,
)
from topicstore.storage.counting.lag import Lag

from .beginning import Beginning
from .threads import Threads

__all__ = ["AsyncSubscription"]


class AsyncSubscription(Beginning[Subscription], AsyncIterator[Message]):
    """A subscription to a filter, made by `AsyncDatabase.subscribe`. Enter it or await and close it.

    Iterating over it with ``async for`` returns each message, stored ones first, until it is closed; with a ``window``,
    a batch counts as acknowledged when the first message after it is asked for. Alternatively, `fetch` batches and
    `acknowledge` them. It occupies a thread only while it reads stored messages. If a call is cancelled, the next one
    returns its messages, so none is lost.

    It begins when it is entered with ``async with``, awaited, or asked for messages; before that, `place` and
    `acknowledged` raise `RuntimeError`.
    After an error of `fetch`, another call goes on at the same place. When the database is closed,
    `DatabaseClosedError` is raised. When the subscription is closed, `SubscriptionClosedError` is raised, and iterating
    ends.
    """

    def __init__(
        self, threads: Threads, topic_filter: str, make: Callable[[], Subscription], on_dropped: OnDropped
    ) -> None:
        super().__init__(threads, make, Subscription.close, _closed)
        self.topic_filter = topic_filter
        """The filter that it follows."""
        self._on_dropped = on_dropped
        self._batch: collections.deque[Message] = collections.deque()
        """The rest of the batch that is iterated over."""
        self._sequence = 0
        """The sequence of that batch."""

    @property
    def place(self) -> Place:
        """Return the place up to which messages were fetched, from which another subscription can start."""
        return self._there().place

    @property
    def acknowledged(self) -> Place:
        """Return the place up to which messages were acknowledged, from which another subscription can start.

        A batch of which only a part was acknowledged doesn't count.
        """
        return self._there().acknowledged

    async def fetch(self, limit: int | None = None, timeout: timedelta | float | None = None) -> SubscriptionBatch:
        """Return the next messages, at most ``limit``: at once if there are some, otherwise when they come.

        After ``timeout`` seconds (None: never), or if the window is full by then, it returns an empty batch. Messages
        read for a cancelled call are returned by the next one, whatever its ``limit`` is.
        """
        subscription = await self._get()
        return await subscription.fetch_async(limit, timeout, executor=self._threads)

    async def acknowledge(self, sequence: int) -> None:
        """Acknowledge all messages up to this number (`SubscriptionBatch.sequence`), which makes room in the window."""
        (await self._get()).acknowledge(sequence)

    async def status(self) -> SubscriptionStatus:
        """Return the status, as of one moment. Once the subscription has begun, it never waits."""
        return (await self._get()).status()

    async def lag(self) -> Lag:
        """Return how far fetching lags behind the stored messages; see `Subscription.lag`."""
        return await self._threads.run((await self._get()).lag)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        try:
            while not self._batch:
                await self.acknowledge(self._sequence)
                batch = await self.fetch()
                self._batch.extend(batch.messages)
                self._sequence = batch.sequence
                report_dropped(batch, self.topic_filter, self._on_dropped)
        except SubscriptionClosedError:
            raise StopAsyncIteration from None
        return self._batch.popleft()

    # --- beginning and end ---

    def _there(self) -> Subscription:
        if self._made is None:
            raise RuntimeError("the subscription has not begun: enter it with async with, or await it")
        return self._made

    async def close(self) -> None:
        """End the subscription, and wake all waiters. May be called twice."""
        await super().close()

    def __repr__(self) -> str:
        state = " closed" if self._over else " not begun" if self._made is None else ""
        return f"<AsyncSubscription {self.topic_filter!r}{state}>"


def _closed() -> SubscriptionClosedError:
    return SubscriptionClosedError("the subscription was closed")
