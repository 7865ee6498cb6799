"""Wills: messages that are published when a client's connection is lost, after a delay, or with the session's end.

A will is a keyed message (`topicstore.storage.keyed_messages`) in the shard of its session. The session's record holds
the delay and, after the connection has ended, the time of publication (MQTT 5, sections 3.1.2.5 and 3.1.3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from topicstore.contract.batch import MessageBatch
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.shard.state import FrameworkWrite
from topicstore.storage.keyed_messages import message_under, store_under

from .records import NEVER, Keys, SessionRecord
from .registry import SessionRegistry
from .session_store import StoredSession, encode_session, will_key

__all__ = ["Wills", "disconnected"]


class Wills:
    """The wills of one open database's sessions. Used under the sessions' mutex."""

    def __init__(self, registry: SessionRegistry) -> None:
        self._registry = registry

    def store(self, shard: int, wills: Sequence[tuple[str, Message]], writes: list[StateWrite]) -> None:
        """Commit writes of sessions of one shard together with wills, given as pairs of client id and message.

        The index of an `InvalidMessageError` counts the wills.
        """
        keys = [Keys(client_id).will for client_id, _ in wills]
        messages = [message for _, message in wills]
        store_under(
            self._registry.publisher.storage(), messages, keys, shards=[shard] * len(wills), state={shard: writes}
        )

    def publish(self, found: StoredSession) -> StoredSession:
        """Publish the will of a session, and update its record in the same write; return the changed session."""
        client_id, shard = found.client_id, self._registry.states.shard_of(found.client_id)
        after = encode_session(client_id, msgspec.structs.replace(found.record, will_due=NEVER, will_delay=NEVER))
        writes = [
            *self._registry.states.change(client_id, found, after),
            FrameworkWrite(will_key(Keys(client_id)), None),
        ]
        will = message_under(self._registry.publisher.storage(), shard, Keys(client_id).will)
        batch = MessageBatch.from_messages([] if will is None else [msgspec.structs.replace(will, timestamp=None)])
        self._registry.load_filters()
        self._registry.mutex.released(lambda: self._registry.publisher.publish(batch, {shard: writes}))
        return after


def disconnected(record: SessionRecord, now: int, interval: int, *, will: bool) -> SessionRecord:
    """Return the record of a session whose connection ends at ``now``.

    The will is due after its delay, or when the session ends if that is sooner.
    """
    due = NEVER
    if will and record.will_delay != NEVER:
        due = now + (record.will_delay if interval == NEVER else min(record.will_delay, interval))
    return msgspec.structs.replace(
        record,
        connected=False,
        expiry_interval=interval,
        expires=NEVER if interval == NEVER else now + interval,
        will_delay=record.will_delay if will else NEVER,
        will_due=due,
    )
