"""Messages that clients send as JSON objects, with the same keys as the lines of ``topicstore import``.

Responses have the same keys (`topicstore.files.formats.JsonMessage`).
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

import topicstore as ts
from topicstore.files.column_values import JsonProperties

__all__ = ["GivenMessage", "message_of"]


class GivenMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message with either a text ``payload``, or a ``payload_base64`` for any bytes."""

    topic: str
    payload: str | UnsetType = UNSET
    payload_base64: bytes | UnsetType = UNSET
    client_id: str = ""
    qos: int = 0
    retain: bool = False
    timestamp: int | None = None
    """Microseconds since the epoch; None for the time of the commit."""
    properties: JsonProperties | UnsetType = UNSET


def message_of(given: GivenMessage) -> ts.Message:
    """Convert a decoded JSON object to a message. Raises `InvalidMessageError`."""
    text, payload = given.payload, given.payload_base64
    if isinstance(text, str) and payload is UNSET:
        payload = text.encode()
    elif text is not UNSET or not isinstance(payload, bytes):
        raise ts.InvalidMessageError("a message has either a payload or a payload_base64")
    properties = given.properties
    return ts.Message(
        given.topic,
        payload,
        given.client_id,
        given.qos,
        given.retain,
        given.timestamp,
        None if isinstance(properties, UnsetType) else ts.Properties(*msgspec.structs.astuple(properties)),
    )
