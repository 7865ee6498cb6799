"""The message, as people hand it in and get it back."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_PAYLOAD", "Message", "MessageId", "Properties"]

MAX_PAYLOAD = 268_435_455
"""Most bytes of a payload: what an MQTT packet can carry."""


class Properties(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The properties of an MQTT 5 PUBLISH that belong to the message (not to its delivery).

    ``user_properties`` keeps order and repeated names. None means absent.
    Fields are only ever appended: the struct is part of stored formats.
    """

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    """Seconds."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. Arguments may be given by position; nothing is checked until it is stored.

    topic:      MQTT 5 topic name.
    payload:    bytes; empty is allowed.
    client_id:  of the publisher; decides the shard. May be empty.
    qos:        0, 1 or 2.
    retain:     as published.
    timestamp:  microseconds since the epoch, kept verbatim; None means the time of the commit.
    properties: MQTT 5 properties, or None.
    """

    topic: str
    payload: bytes
    client_id: str = ""
    qos: int = 0
    retain: bool = False
    timestamp: int | None = None
    properties: Properties | None = None


class MessageId(msgspec.Struct, frozen=True, gc=False, order=True):
    """Names one stored message of a database for good: its shard and its position there."""

    shard: int
    position: int
