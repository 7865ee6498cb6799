"""What a client publishes at QoS 2 is stored exactly once, however often it is sent.

The packet id of such a message is committed in one engine write with it. Until its PUBREL comes, a message with the
same id is a repetition. All of it is used under the dispatcher's lock, but for the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from topicstore.contract.errors import InvalidArgumentError, StateConflictError
from topicstore.contract.model import Message
from topicstore.pubsub.publishing import PublishResult
from topicstore.shard.state import FrameworkWrite

from .context import SessionContext
from .inflight import MAX_PACKET_ID
from .live_session import LiveSession
from .records import VERSION, put

__all__ = ["publish_once", "qos2_ids", "release"]


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


def publish_once(
    context: SessionContext, session: LiveSession, messages: list[Message], ids: list[int]
) -> PublishResult:
    """Publish messages but those whose packet id is in use, and commit the ids that are new."""
    new: dict[int, Message] = {}
    for message, packet_id in zip(messages, ids, strict=True):
        if packet_id not in session.incoming:
            new.setdefault(packet_id or -1 - len(new), message)  # any other key for those that have no id
    fresh = [packet_id for packet_id in new if packet_id > 0]
    writes = [session.guard, *(put(session.keys.incoming(packet_id), (VERSION,)) for packet_id in fresh)]
    shard = context.states.shard_of(session.client_id)
    try:
        result = context.publish(new.values(), state={shard: writes})
    except StateConflictError as conflict:
        raise context.commits.overtaken(session) from conflict
    session.incoming.update(dict.fromkeys(fresh))
    return result


def release(context: SessionContext, session: LiveSession, packet_ids: Iterable[int]) -> int:
    """Free the packet ids of which the PUBREL came, in one commit; return how many were in use."""
    known = session.incoming.keys() & packet_ids
    if known:
        writes = [FrameworkWrite(session.keys.incoming(packet_id), None) for packet_id in known]
        context.commits.write(session, [session.guard, *writes])
        for packet_id in known:
            del session.incoming[packet_id]
    return len(known)
