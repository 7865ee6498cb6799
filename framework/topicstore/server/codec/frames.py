"""Splits a client's bytes into frames: the first byte of a packet, and the body after its remaining length.

The number of elements in a packet is limited, so that decoding one packet never takes seconds. The packet size alone is
no sufficient limit: 16 MB can contain millions of filters or user properties of a few bytes. The limits are higher than
clients need.

Source: MQTT Version 5.0 (OASIS Standard), sections 1.5.5 and 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from .reason import PacketError, ReasonCode

__all__ = [
    "LARGEST_CONNECT",
    "MOST_FILTERS",
    "MOST_USER_PROPERTIES",
    "Frame",
    "FrameReader",
    "FramingError",
    "check_bounds",
    "joined",
]

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


Frame = tuple[int, bytes]
"""The first byte of a packet (its type and flags) and its body: everything after the remaining length."""


def joined(frames: Iterable[Frame]) -> bytes:
    """Return the bytes of frames, with the shortest form of their lengths."""
    parts: list[bytes] = []
    for first, body in frames:
        head, left = bytearray((first,)), len(body)
        while left > 127:
            head.append(left & 127 | 128)
            left >>= 7
        head.append(left)
        parts += (bytes(head), body)
    return b"".join(parts)


class FramingError(PacketError):
    """The bytes can't be split further. `frames` are complete frames before the error, which may be served."""

    def __init__(self, reason: ReasonCode, text: str, frames: list[Frame]) -> None:
        super().__init__(reason, text)
        self.frames = frames


class FrameReader:
    """Splits one connection's bytes into frames; frames may arrive in any number of parts.

    A frame has at most ``max_packet_size`` bytes, including its first byte and length; this is checked before its body
    has arrived. The first frame, a CONNECT, has at most `LARGEST_CONNECT` bytes, too. Between two calls less than one
    packet is kept in memory, as a single copy.
    """

    __slots__ = ("_needed", "_rest", "begun", "held", "max_packet_size", "version")

    def __init__(self, max_packet_size: int) -> None:
        self.max_packet_size = max_packet_size
        """Most bytes of a packet; may be changed between two calls."""
        self.version = 0
        """The protocol version, set after the CONNECT. A remaining length with more bytes than necessary is an error in
        MQTT 5 [MQTT-1.5.5-1], but not in MQTT 3.1.1."""
        self.held = 0
        """Number of received bytes of an incomplete packet."""
        self.begun = 0
        """Number of incomplete packets that were kept since the connection began."""
        self._rest: bytes | bytearray = b""
        """The bytes of an incomplete packet: a bytearray, or ``b""`` if there are none."""
        self._needed = 0
        """Number of bytes that `_rest` needs before it can be decoded further; 0 if it is empty."""

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are completed by received bytes, in order.

        Raises `FramingError`, after which the reader must not be used. The reason is `ReasonCode.MALFORMED_PACKET` for
        an invalid remaining length, `ReasonCode.PACKET_TOO_LARGE`, or `ReasonCode.PROTOCOL_ERROR` if a connection
        begins with an incomplete packet that is not a CONNECT.
        """
        if self._needed:
            if len(self._rest) + len(data) < self._needed:
                self._rest += data
                self.held = len(self._rest)
                return []
            data = b"".join((self._rest, data))
            self.drop()
        frames: list[Frame] = []
        append = frames.append
        size = len(data)
        limit = self.max_packet_size if self.version else min(self.max_packet_size, LARGEST_CONNECT)
        at = 0
        while at + 1 < size:
            length = data[at + 1]
            start = at + 2
            if length > 127:
                if start < size and 0 < data[start] < 128:
                    length += (data[start] << 7) - 128
                    start += 1
                else:
                    length, start = self._long(data, at, frames)
                    if start == 0:
                        break
            stop = start + length
            if stop - at > limit and (not frames or stop - at > self.max_packet_size):
                most = self.max_packet_size if frames else limit
                raise FramingError(ReasonCode.PACKET_TOO_LARGE, f"a packet has more than {most:,} bytes", frames)
            if stop > size:
                self._needed = stop - at
                break
            append((data[at], data[start:stop]))
            at = stop
        if at < size:
            self._keep(data[at:] if at else data, frames)
        return frames

    def _keep(self, rest: bytes, frames: list[Frame]) -> None:
        """Keep the beginning of an incomplete packet."""
        if not self.version and not frames and rest[0] != 0x10:
            text = "the first packet of a client is a CONNECT [MQTT-3.1.0-1]"
            raise FramingError(ReasonCode.PROTOCOL_ERROR, text, frames)
        self._rest = bytearray(rest)
        self.held = len(rest)
        self.begun += 1
        self._needed = max(self._needed, 2)

    def take(self) -> bytes:
        """Return the received bytes of an incomplete packet, and discard them."""
        rest = bytes(self._rest)
        self.drop()
        return rest

    def drop(self) -> None:
        """Discard an incomplete packet."""
        if self.held:
            self._rest = b""
            self.held = self._needed = 0

    def _long(self, data: bytes, at: int, frames: list[Frame]) -> tuple[int, int]:
        """Return a remaining length of any size, and the offset of the body: 0 if the length is incomplete."""
        length = 0
        for index in range(at + 1, min(at + 5, len(data))):
            byte = data[index]
            length |= (byte & 127) << 7 * (index - at - 1)
            if byte < 128:
                if byte == 0 and self._must_be_minimal(data[index + 1 : index + 8], frames):
                    text = "a remaining length has more bytes than it needs [MQTT-1.5.5-1]"
                    raise FramingError(ReasonCode.MALFORMED_PACKET, text, frames)
                return length, index + 1
        if len(data) - at >= 5:
            raise FramingError(ReasonCode.MALFORMED_PACKET, "a remaining length has more than four bytes", frames)
        self._needed = len(data) - at + 1
        return 0, 0

    def _must_be_minimal(self, body: bytes, frames: list[Frame]) -> bool:
        """Return whether the connection uses MQTT 5, before the CONNECT is decoded by the seventh byte of its body."""
        if self.version:
            return self.version == 5
        return (frames[0][1] if frames else body)[6:7] == b"\x05"
