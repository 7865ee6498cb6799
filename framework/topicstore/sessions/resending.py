"""Reading messages in flight again after a resumption, to send them again (MQTT 5, section 4.4)."""

from __future__ import annotations

from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.retained_lookup import RetainedMessages

from .in_flight import InFlightBatch
from .model import Publish
from .shared_filters import read_filter

__all__ = ["delivery_again", "read_again"]


def read_again(
    batch: InFlightBatch, rows: list[int], hub: Hub, retained: RetainedMessages
) -> dict[int, Message | None]:
    """Return the messages of these rows of an in-flight batch; None for messages that were deleted.

    Messages in flight don't expire [MQTT-4.3.3-7].
    """
    if batch.copies:
        return {row: batch.copies[row] for row in rows}
    if batch.topics:  # stored without copies
        return dict(zip(rows, retained.of([batch.topics[row] for row in rows]), strict=True))
    found: dict[int, Message | None] = {}
    for topic_filter, some in _by_filter(batch, rows).items():
        positions = [int(batch.positions[row]) for row in some]
        fetched = hub.feed(read_filter(topic_filter)).fetch(batch.shard, positions)
        found.update((row, fetched.get(position)) for row, position in zip(some, positions, strict=True))
    return found


def _by_filter(batch: InFlightBatch, rows: list[int]) -> dict[str, list[int]]:
    """Group rows by the topic filter with which their messages are read."""
    if not batch.matched:
        return {batch.topic_filter: rows}
    by_filter: dict[str, list[int]] = {}
    for row in rows:
        by_filter.setdefault(batch.matched[batch.which[row]].topic_filter, []).append(row)
    return by_filter


def delivery_again(batch: InFlightBatch, packet_id: int, row: int, message: Message, now: int) -> Publish:
    """Return the PUBLISH that sends a row of an in-flight batch again, with DUP and the same packet id."""
    options, retained, matched = batch.options, bool(batch.topics), batch.matched_of(row)
    as_published = options.retain_as_published
    identifiers: tuple[int, ...] = (options.identifier,) if options.identifier else ()
    if matched is not None:
        as_published, identifiers = matched.retain_as_published, matched.identifiers
    since = (batch.since or now) if retained else time_of(int(batch.positions[row]))
    return Publish(
        packet_id,
        message,
        batch.qos_of(row),
        dup=True,
        retain=retained or (as_published and message.retain),
        subscription_identifiers=identifiers,
        expiry=left_of(message, since, now),
    )
