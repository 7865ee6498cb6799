"""The asynchronous interface of `topicstore`, for asyncio.

::

    async with ts.aopen("data") as db:
        await db.store([ts.Message("fleet/eu/bus-7/speed", b"41.5", "bus-7", qos=1)])
        async for message in db.replay("fleet/+/+/speed"):
            print(message.topic, message.payload)

The asynchronous interface calls the synchronous one in threads, so that the event loop isn't blocked. Names,
parameters and guarantees are the same; `AsyncDatabase` documents which calls are awaited.

Importing this package imports none of its modules, because that would block the event loop. Each public name is
imported when it is first used, and the database in the thread that opens it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "AsyncArchives": "archives",
    "AsyncDatabase": "database",
    "AsyncPersistenceRules": "persistence_rules",
    "AsyncQueue": "queues",
    "AsyncQueues": "queues",
    "AsyncRetention": "retention",
    "AsyncSession": "sessions",
    "AsyncSessions": "sessions",
    "AsyncShardState": "state",
    "AsyncSharedSubscriptions": "sessions",
    "AsyncSubscription": "subscription",
    "AsyncWriter": "writer",
    "Iteration": "iteration",
    "Opening": "opening",
    "aopen": "opening",
}


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        """Import the object of a public name when the name is first used."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted(__all__)
