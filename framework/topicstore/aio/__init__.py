"""The asynchronous interface of `topicstore`, for asyncio.

::

    async with ts.aopen("data") as db:
        await db.store([ts.Message("fleet/eu/bus-7/speed", b"41.5", "bus-7", qos=1)])
        async for message in db.replay("fleet/+/+/speed"):
            print(message.topic, message.payload)

It is built on the synchronous interface and calls it in threads, so that the event loop isn't blocked. Names,
parameters and guarantees are the same; `AsyncDatabase` documents which calls are awaited.
"""

from __future__ import annotations

from .archives import AsyncArchives
from .database import AsyncDatabase
from .iteration import Iteration
from .opening import Opening, aopen
from .persistence_rules import AsyncPersistenceRules
from .queues import AsyncQueue, AsyncQueues
from .retention import AsyncRetention
from .sessions import AsyncSession, AsyncSessions, AsyncSharedSubscriptions
from .state import AsyncShardState
from .subscription import AsyncSubscription
from .writer import AsyncWriter

__all__ = [
    "AsyncArchives",
    "AsyncDatabase",
    "AsyncPersistenceRules",
    "AsyncQueue",
    "AsyncQueues",
    "AsyncRetention",
    "AsyncSession",
    "AsyncSessions",
    "AsyncShardState",
    "AsyncSharedSubscriptions",
    "AsyncSubscription",
    "AsyncWriter",
    "Iteration",
    "Opening",
    "aopen",
]
