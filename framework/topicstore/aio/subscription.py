"""`AsyncSubscription`: stored and new messages of a topic filter, in asyncio."""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator, Callable
from typing import Self

from topicstore.contract.arguments import Length
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
    """A subscription to a filter, made by `AsyncDatabase.subscribe`. Enter it, or await and close it.

    Iterating with ``async for`` returns each message, stored ones first, until the subscription is closed. With a
    ``window``, iterating acknowledges a batch when it asks for the first message of the next. Alternatively, `fetch`
    batches and `acknowledge` them. The subscription occupies a thread only while it reads stored messages. If a call is
    cancelled, the next call returns its messages, so none is lost.

    The subscription begins when it is entered with ``async with``, awaited, or asked for messages; before that, `place`
    and `acknowledged` raise `RuntimeError`. After an error of `fetch`, another call continues at the same place. Calls
    raise `DatabaseClosedError` once the database is closed, and `SubscriptionClosedError` once the subscription is
    closed, which ends iterating.
    """

    def __init__(
        self, threads: Threads, topic_filter: str, make: Callable[[], Subscription], on_dropped: OnDropped
    ) -> None:
        super().__init__(threads, make, Subscription.close, _closed)
        self.topic_filter = topic_filter
        """The topic filter of the subscription."""
        self._on_dropped = on_dropped
        self._batch: collections.deque[Message] = collections.deque()
        """The messages of the current batch that iterating has not returned yet."""
        self._sequence = 0
        """The sequence number of the current batch, to be acknowledged when the batch is finished."""

    @property
    def place(self) -> Place:
        """The place up to which messages were fetched, from which another subscription can start."""
        return self._there().place

    @property
    def acknowledged(self) -> Place:
        """The place up to which messages were acknowledged, from which another subscription can start.

        A batch of which only a part was acknowledged doesn't count.
        """
        return self._there().acknowledged

    async def fetch(self, limit: int | None = None, timeout: Length | None = None) -> SubscriptionBatch:
        """Return the next messages, at most ``limit``: immediately if there are any, otherwise as soon as some arrive.

        After ``timeout`` seconds (None: no limit), the batch is empty, even if the window is full. Messages read for a
        cancelled call are returned by the next call, regardless of its ``limit``.
        """
        subscription = await self._get()
        return await subscription.fetch_async(limit, timeout, executor=self._threads)

    async def acknowledge(self, sequence: int) -> None:
        """Acknowledge all messages up to this `SubscriptionBatch.sequence`, which frees space in the window."""
        (await self._get()).acknowledge(sequence)

    async def status(self) -> SubscriptionStatus:
        """Return a consistent snapshot of the status. Never waits once the subscription has begun."""
        return (await self._get()).status()

    async def lag(self) -> Lag:
        """Return the lag of fetching behind the stored messages; see `Subscription.lag`."""
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
        """End the subscription, and wake all waiting tasks. May be called twice."""
        await super().close()

    def __repr__(self) -> str:
        state = " closed" if self._over else " not begun" if self._made is None else ""
        return f"<AsyncSubscription {self.topic_filter!r}{state}>"


def _closed() -> SubscriptionClosedError:
    return SubscriptionClosedError("the subscription was closed")
