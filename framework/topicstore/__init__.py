"""topicstore: a durable, replayable store for MQTT messages that runs inside a Python process.

::

    import topicstore as ts

    with ts.open("data") as db:
        db.store([ts.Message("fleet/eu/bus-7/speed", b"41.5", "bus-7", qos=1)])
        for message in db.replay("fleet/+/+/speed"):
            print(message.topic, message.payload)

Importing this loads no engine. See `topicstore.contract.engine` and `topicstore.contract.layout` for what
backends and layouts must hold, `topicstore.contract.hookspecs` for the hooks of plugins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .contract import errors
from .contract.batch import MessageBatch
from .contract.errors import *  # noqa: F403 - errors.__all__
from .contract.hookspecs import hookimpl
from .contract.iterators import Iterator
from .contract.model import MAX_PAYLOAD, Message, MessageId, Properties
from .contract.requests import NextResult, StoreResult, Stream
from .contract.state import ANY, StateWrite
from .contract.topics import TopicFilter, matches
from .database import Database
from .lifecycle.retention import RetentionReport
from .lifecycle.retention_policy import RetentionSettings
from .opening import create, open, open_existing  # noqa: A004 - the name people know
from .pubsub.publishing import PERSIST, PublishResult
from .queues.queue import Queue, QueueBatch
from .storage.writer import Writer

if TYPE_CHECKING:
    from .contract.arrow import SCHEMA, SCHEMA_WITH_IDS
    from .pubsub.persistence_rules import PersistenceRule
    from .pubsub.subscription import Subscription, SubscriptionBatch, SubscriptionStatus

__all__ = [
    "ANY",
    "MAX_PAYLOAD",
    "PERSIST",
    "SCHEMA",
    "SCHEMA_WITH_IDS",
    "Database",
    "Iterator",
    "Message",
    "MessageBatch",
    "MessageId",
    "NextResult",
    "Properties",
    "PersistenceRule",
    "PublishResult",
    "Queue",
    "QueueBatch",
    "RetentionReport",
    "RetentionSettings",
    "StateWrite",
    "StoreResult",
    "Stream",
    "Subscription",
    "SubscriptionBatch",
    "SubscriptionStatus",
    "TopicFilter",
    "Writer",
    "__version__",
    "create",
    "hookimpl",
    "matches",
    "open",
    "open_existing",
    *errors.__all__,
]


_LATER = {
    "SCHEMA": "contract.arrow",
    "SCHEMA_WITH_IDS": "contract.arrow",
    "PersistenceRule": "pubsub.persistence_rules",
    "Subscription": "pubsub.subscription",
    "SubscriptionBatch": "pubsub.subscription",
    "SubscriptionStatus": "pubsub.subscription",
}
"""Names of modules that not every program needs; pyarrow takes longer to import than all else."""


def __getattr__(name: str) -> Any:
    """Load what is not needed by everybody when it is first asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
