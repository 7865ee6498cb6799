"""Limits for the number of elements in a packet, so that decoding one packet never takes seconds.

The packet size alone is no sufficient limit: 16 MB can contain millions of filters or user properties of a few bytes.
The limits are higher than clients need.
"""

from __future__ import annotations

from .reason import PacketError, ReasonCode

__all__ = ["LARGEST_CONNECT", "MOST_FILTERS", "MOST_USER_PROPERTIES", "check_bounds"]

LARGEST_CONNECT = 1 << 20
"""Most bytes of a CONNECT: its fields have up to 64 KiB each, and the client is not authenticated yet."""
MOST_FILTERS = 65_536
"""Most filters in one SUBSCRIBE or UNSUBSCRIBE."""
MOST_USER_PROPERTIES = 65_536
"""Most user properties of one PUBLISH."""
_LARGEST_PROPERTIES = 1 << 18
"""Most bytes of the properties of any other packet, or of the whole packet if it has little else."""
_SUBSCRIBE, _UNSUBSCRIBE = 8, 10


def check_bounds(version: int, kind: int, body: bytes) -> None:
    """Raise `PacketError` for a packet that exceeds the limits; ``kind`` is its type, neither PUBLISH nor CONNECT.

    The reason is `ReasonCode.QUOTA_EXCEEDED` for too many filters, `ReasonCode.PACKET_TOO_LARGE` for properties that
    are too long.
    """
    if kind not in (_SUBSCRIBE, _UNSUBSCRIBE):
        if len(body) > _LARGEST_PROPERTIES:
            raise PacketError(ReasonCode.PACKET_TOO_LARGE, f"a packet of type {kind} has {len(body):,} bytes")
        return
    option = 1 if kind == _SUBSCRIBE else 0
    if len(body) <= min(_LARGEST_PROPERTIES, (2 + option) * MOST_FILTERS):
        return
    at = 2
    if version == 5:
        length, at = _length(body)
        if length > _LARGEST_PROPERTIES:
            raise PacketError(ReasonCode.PACKET_TOO_LARGE, f"the properties of a packet have {length:,} bytes")
        at += length
    filters, size = 0, len(body)
    while at + 1 < size:
        filters += 1
        if filters > MOST_FILTERS:
            raise PacketError(ReasonCode.QUOTA_EXCEEDED, f"a packet has more than {MOST_FILTERS:,} topic filters")
        at += 2 + option + (body[at] << 8 | body[at + 1])


def _length(body: bytes) -> tuple[int, int]:
    """Return the length of the properties after a packet id, and the offset at which they begin."""
    length = 0
    for index in range(4):
        byte = body[2 + index]
        length |= (byte & 127) << 7 * index
        if byte < 128:
            break
    return length, 3 + index  # the decoder refuses an invalid length
