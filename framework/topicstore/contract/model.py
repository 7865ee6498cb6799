"""`Message`, which applications store and read, with its properties and its id."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec

__all__ = ["MAX_PAYLOAD", "Message", "MessageId", "Properties"]

MAX_PAYLOAD = 268_435_455
"""The largest size of a payload in bytes, which is the largest Remaining Length of an MQTT 5 packet (section 2.1.4)."""


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Properties(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The properties of an MQTT 5 PUBLISH packet (section 3.3.2.3) that belong to the message, not to its delivery.

    ``user_properties`` keeps order and repeated names. None means that a property is absent.
    Fields are only ever appended, because the struct is part of stored formats.
    """

    payload_format_indicator: int | None = None
    message_expiry_interval: int | None = None
    """The lifetime of the message in seconds."""
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    user_properties: tuple[tuple[str, str], ...] = ()


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. Arguments may be given by position; nothing is checked until the message is stored.

    topic:      the MQTT 5 topic name.
    payload:    bytes; they may be empty.
    client_id:  the client id of the publisher, which decides the shard; it may be empty.
    qos:        the QoS with which the message was published: 0, 1 or 2.
    retain:     the RETAIN flag with which the message was published.
    timestamp:  microseconds since the epoch, stored unchanged; None means the time of the commit.
    properties: the MQTT 5 properties, or None.
    """

    topic: str
    payload: bytes
    client_id: str = ""
    qos: int = 0
    retain: bool = False
    timestamp: int | None = None
    properties: Properties | None = None

    @property
    def time(self) -> datetime | None:
        """The timestamp as a datetime in UTC, exact to the microsecond; None if the message has no timestamp.

        Raises `OverflowError` for a number that no datetime can hold; a message with such a timestamp is never stored.
        """
        return None if self.timestamp is None else _EPOCH + timedelta(microseconds=self.timestamp)


class MessageId(msgspec.Struct, frozen=True, gc=False, order=True):
    """The permanent id of one stored message in its database: its shard and its position there."""

    shard: int
    position: int
