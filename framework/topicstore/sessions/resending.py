"""Messages of earlier connections, read once more to be sent again after a resumption."""

from __future__ import annotations

from collections.abc import Callable

from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.pubsub.hub import Hub

from .inflight import Flight
from .model import Delivery
from .portions import expiry_of
from .shared.filters import read_filter

__all__ = ["delivery_again", "read_again"]


def read_again(
    flight: Flight, rows: list[int], hub: Hub, retained: Callable[[str], list[Message]], now: int
) -> dict[int, Message | None]:
    """Return the messages of these rows of a flight, None for those that have vanished or expired."""
    if flight.topics:
        current = [retained(flight.topics[row]) for row in rows]
        return {row: next(iter(messages), None) for row, messages in zip(rows, current, strict=True)}
    positions = [int(flight.positions[row]) for row in rows]
    found = hub.feed(read_filter(flight.topic_filter)).fetch(flight.shard, positions)
    return {
        row: message if message is None or expiry_of(message, time_of(position), now) != 0 else None
        for row, position in zip(rows, positions, strict=True)
        for message in (found.get(position),)
    }


def delivery_again(flight: Flight, packet_id: int, row: int, message: Message, now: int) -> Delivery:
    """Return what to send again of a row of a flight, under the packet id that it has."""
    options, retained = flight.options, bool(flight.topics)
    since = now if retained else time_of(int(flight.positions[row]))
    return Delivery(
        packet_id,
        message,
        flight.qos_of(row),
        dup=True,
        retain=retained or (options.retain_as_published and message.retain),
        subscription_identifiers=(options.identifier,) if options.identifier else (),
        expiry=expiry_of(message, since, now),
    )
