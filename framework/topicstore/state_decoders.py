"""The decoders of all values that the framework keeps in the state of a database, for `Database.verify`."""

from __future__ import annotations

from typing import Final

from .lifecycle import expiry, retention
from .pubsub import persistence_rules
from .sessions import records, session_clock
from .sessions.shared import records as shared_records
from .shard.verification import Decoders
from .storage import keyed_message_records

__all__ = ["DECODERS"]

DECODERS: Final[Decoders] = {
    **keyed_message_records.DECODERS,
    **persistence_rules.DECODERS,
    **retention.DECODERS,
    **expiry.DECODERS,
    **records.DECODERS,
    **session_clock.DECODERS,
    **shared_records.DECODERS,
}
"""Decoders of all state but that of queues, which are databases of their own (`topicstore.queues.record`)."""
