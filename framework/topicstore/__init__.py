"""topicstore: a durable, replayable store for MQTT messages that runs inside a Python process.

::

    import topicstore as ts

    with ts.open("data") as db:
        db.store([ts.Message("fleet/eu/bus-7/speed", b"41.5", "bus-7", qos=1)])
        for message in db.replay("fleet/+/+/speed"):
            print(message.topic, message.payload)

Importing this package takes a few milliseconds: the object of each name is imported when the name is first used, and an
engine when a database that uses it is opened. See `topicstore.contract.engine` and `topicstore.contract.layout` for
the guarantees of backends and layouts, `topicstore.contract.hookspecs` for the hooks of plugins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .contract import errors
from .contract.errors import *  # noqa: F403 - errors.__all__

if TYPE_CHECKING:
    from ._version import __version__
    from .aio import AsyncDatabase, aopen
    from .contract.arrow import SCHEMA, SCHEMA_WITH_IDS
    from .contract.batch import MessageBatch
    from .contract.cursors import Cursor
    from .contract.hookspecs import hookimpl
    from .contract.model import MAX_PAYLOAD, Message, MessageId, Properties
    from .contract.places import Place
    from .contract.requests import ReadResult, StoreResult, Stream
    from .contract.state import ANY, StateWrite
    from .contract.times import Time
    from .contract.topics import TopicFilter, matches
    from .database import Database
    from .lifecycle.retention import RetentionReport
    from .lifecycle.retention_outlook import Departure
    from .lifecycle.retention_policy import RetentionSettings
    from .opening import (
        begin_cluster,
        open,  # noqa: A004 - the name people know
    )
    from .pubsub.persistence_rules import PersistenceRule
    from .pubsub.publish import PERSIST, PublishResult
    from .pubsub.subscription import Subscription, SubscriptionBatch, SubscriptionStatus
    from .queues.queue import Queue, QueueBatch
    from .replication.settings import Cluster
    from .storage.buffered_writer import Writer
    from .storage.counting.contents import ClientTally, TopicTally
    from .storage.counting.lag import Lag

__all__ = [
    "ANY",
    "MAX_PAYLOAD",
    "PERSIST",
    "SCHEMA",
    "SCHEMA_WITH_IDS",
    "AsyncDatabase",
    "ClientTally",
    "Cluster",
    "Database",
    "Cursor",
    "Lag",
    "Message",
    "MessageBatch",
    "MessageId",
    "ReadResult",
    "Properties",
    "PersistenceRule",
    "Place",
    "PublishResult",
    "Queue",
    "QueueBatch",
    "Departure",
    "RetentionReport",
    "RetentionSettings",
    "StateWrite",
    "StoreResult",
    "Stream",
    "Subscription",
    "SubscriptionBatch",
    "SubscriptionStatus",
    "Time",
    "TopicFilter",
    "TopicTally",
    "Writer",
    "__version__",
    "aopen",
    "begin_cluster",
    "hookimpl",
    "matches",
    "open",
    *errors.__all__,
]


_MODULES = {
    "ANY": "contract.state",
    "MAX_PAYLOAD": "contract.model",
    "PERSIST": "pubsub.publish",
    "SCHEMA": "contract.arrow",
    "SCHEMA_WITH_IDS": "contract.arrow",
    "AsyncDatabase": "aio.database",
    "ClientTally": "storage.counting.contents",
    "Cluster": "replication.settings",
    "Cursor": "contract.cursors",
    "Place": "contract.places",
    "Database": "database",
    "Departure": "lifecycle.retention_outlook",
    "Lag": "storage.counting.lag",
    "Message": "contract.model",
    "MessageBatch": "contract.batch",
    "MessageId": "contract.model",
    "PersistenceRule": "pubsub.persistence_rules",
    "Properties": "contract.model",
    "PublishResult": "pubsub.publish",
    "Queue": "queues.queue",
    "QueueBatch": "queues.queue",
    "ReadResult": "contract.requests",
    "RetentionReport": "lifecycle.retention",
    "RetentionSettings": "lifecycle.retention_policy",
    "StateWrite": "contract.state",
    "StoreResult": "contract.requests",
    "Stream": "contract.requests",
    "Subscription": "pubsub.subscription",
    "SubscriptionBatch": "pubsub.subscription",
    "SubscriptionStatus": "pubsub.subscription",
    "Time": "contract.times",
    "TopicFilter": "contract.topics",
    "TopicTally": "storage.counting.contents",
    "Writer": "storage.buffered_writer",
    "__version__": "_version",
    "aopen": "aio.opening",
    "begin_cluster": "opening",
    "hookimpl": "contract.hookspecs",
    "matches": "contract.topics",
    "open": "opening",
}
"""The module of each public name. Most programs, such as a shell that completes a command, need only a few of them."""


if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        """Import the object of a public name when the name is first used."""
        if name in _MODULES:
            found = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
            globals()[name] = found
            return found
        if not name.startswith("_") and hasattr(importlib.import_module(".database", __name__).Database, name):
            raise AttributeError(f"{name} is of an open database: with {__name__}.open(path) as db: db.{name}(…)")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return sorted(__all__)
