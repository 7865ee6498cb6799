"""`IncomingQos2`: what a client publishes at QoS 2 is stored exactly once, however often it is sent.

The packet id of such a message is committed in one engine write with it. Until its PUBREL comes, a message with the
same id is a repetition.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topicstore.contract.errors import InvalidArgumentError, StateConflictError
from topicstore.contract.model import Message
from topicstore.pubsub.publishing import PublishResult
from topicstore.shard.state import FrameworkWrite

from .context import SessionContext
from .delivery import LiveSession
from .inflight import MAX_PACKET_ID
from .records import VERSION, put

__all__ = ["IncomingQos2", "qos2_ids"]


def qos2_ids(messages: Sequence[Message], packet_ids: Sequence[int] | None) -> list[int]:
    """Return, by message, the packet id if it is of QoS 2, else 0. Raises `InvalidArgumentError`."""
    if packet_ids is None:
        packet_ids = [0] * len(messages)
    if len(packet_ids) != len(messages):
        raise InvalidArgumentError(f"{len(messages)} messages, but {len(packet_ids)} packet ids")
    ids = [packet_id if message.qos == 2 else 0 for message, packet_id in zip(messages, packet_ids, strict=True)]
    if any(type(packet_id) is not int or not 0 <= packet_id <= MAX_PACKET_ID for packet_id in ids):
        raise InvalidArgumentError(f"a packet id is a number from 1 to {MAX_PACKET_ID:,}")
    return ids


class IncomingQos2:
    """The packet ids of incoming messages whose PUBREL has not come. Used under the dispatcher's lock."""

    __slots__ = ("_context", "_ids", "_session")

    def __init__(self, context: SessionContext, session: LiveSession, ids: Iterable[int]) -> None:
        self._context = context
        self._session = session
        self._ids = dict.fromkeys(ids)  # an empty set takes more than three times the room, also in an idle session

    def publish(self, messages: list[Message], ids: list[int]) -> PublishResult:
        """Publish messages but those whose packet id is in use, and commit the ids that are new."""
        session, new = self._session, dict[int, Message]()
        for message, packet_id in zip(messages, ids, strict=True):
            if packet_id not in self._ids:
                new.setdefault(packet_id or -1 - len(new), message)  # any other key for those that have no id
        fresh = [packet_id for packet_id in new if packet_id > 0]
        writes = [session.guard, *(put(session.keys.incoming(packet_id), (VERSION,)) for packet_id in fresh)]
        shard = self._context.states.shard_of(session.client_id)
        try:
            result = self._context.publish(new.values(), state={shard: writes})
        except StateConflictError as conflict:
            raise self._context.commits.overtaken(session) from conflict
        self._ids.update(dict.fromkeys(fresh))
        return result

    def release(self, packet_ids: Iterable[int]) -> int:
        """Free the packet ids of which the PUBREL came, in one commit; return how many were in use."""
        session, known = self._session, self._ids.keys() & packet_ids
        if known:
            writes = [FrameworkWrite(session.keys.incoming(packet_id), None) for packet_id in known]
            self._context.commits.write(session, [session.guard, *writes])
            for packet_id in known:
                del self._ids[packet_id]
        return len(known)
