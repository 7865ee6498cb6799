"""What sessions keep in the state of a shard, and how it is written.

All of a session lies in the shard of its client id. Every key begins with a byte of one
(`topicstore.shard.state.FrameworkWrite`), left out here. Numbers in keys are big-endian; ``client`` and ``filter``
are UTF-8 and hold no NUL. Every value is a checksum (`topicstore.contract.checksums`) and a
msgpack array that begins with the version 1::

    "sr" client               the session itself: `SessionRecord`. Its bytes are the session's guard: every
                              write of the session is conditional on them, and each opening changes them.
    "sl" client               the session was opened and not closed: [1]. Left behind by a crash.
    "ss" client 00 number:4   a subscription: `SubscriptionRecord`
    "sc" client 00 number:4   its place: [1, [position by shard]]: everything up to there was delivered
    "sn" client 00 number:4   it is being sent retained messages: [1, topic]: those up to the topic were delivered
    "sg" client 00 number:4   its places, of a shared subscription (`topicstore.sessions.shared.records`)
    "sf" client 00 number:8   a flight, in the order sent: `FlightRecord`: messages whose PUBACK or PUBREC is due
    "sp" client 00 number:8   packet ids whose PUBCOMP is due, in the order of PUBRECs: [1, 2 bytes each, little-endian]
    "i"  client 00 id:2       an incoming QoS 2 packet id whose PUBREL is due: [1]
    "t"  time:8 kind:1 client a timer, in microseconds since the epoch: [1]; kind "e" the session ends, "w" its
                              will is due. It counts if the session's record names the same time.

A will is a keyed message (`topicstore.storage.keyed_messages`) under ``"w" client``.

Flights and packet ids to release are numbered in one sequence. An id that stands in two of them
belongs to the later: it was free when that was written, the other just had not been written anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.checksums import add_checksum
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.state import FrameworkWrite

from .model import SubscribeOptions

__all__ = [
    "EXPIRY",
    "INCOMING",
    "LIVE",
    "NEVER",
    "SESSION",
    "SUBSCRIPTION",
    "TIMER",
    "VERSION",
    "WILL",
    "Era",
    "FlightRecord",
    "Keys",
    "PackedPositions",
    "SessionRecord",
    "SubscriptionRecord",
    "Timer",
    "client_of",
    "decode",
    "pack_ids",
    "pack_positions",
    "put",
    "timer_key",
    "timer_of",
    "unpack_ids",
    "unpack_positions",
]

VERSION = 1
NEVER = -1
"""Stands for a time that never comes."""

SESSION = b"\1sr"
LIVE = b"\1sl"
SUBSCRIPTION = b"\1ss"
_PLACE = b"\1sc"
_RETAINED = b"\1sn"
_LEASES = b"\1sg"
_FLIGHT = b"\1sf"
_RELEASED = b"\1sp"
INCOMING = b"\1i"
TIMER = b"\1t"

EXPIRY = b"e"
WILL = b"w"

T = TypeVar("T")

_CODECS: dict[Any, RecordCodec[Any]] = {}
"""By the kind of their records."""


class PackedPositions(NamedTuple):
    """Ascending positions as they are stored."""

    first: int
    steps: bytes
    """Of each position, how far it lies behind the first: little-endian numbers of `width` bytes."""
    width: int


class Timer(NamedTuple):
    """A stored timer of a session."""

    time: int
    kind: bytes
    """`EXPIRY` or `WILL`."""
    client_id: str


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A session. Times are microseconds since the epoch. Fields are only ever appended."""

    version: int
    guard: int
    """Another one at every opening, higher than before."""
    created: int
    connected: bool
    expiry_interval: int
    """Microseconds from the end of the connection; -1: never."""
    expires: int = -1
    """When it ends; -1: never, or not while it is connected."""
    will_delay: int = -1
    """Microseconds; -1: it has no will."""
    will_due: int = -1
    """When its will is published; -1: not as things are."""
    ending: bool = False
    """It is over; what it kept is being removed."""


class Era(msgspec.Struct, frozen=True, array_like=True):
    """Options of a subscription, and how long they held."""

    options: SubscribeOptions
    until: tuple[int, ...] | None = None
    """By shard, the last position they are for; None: they hold."""


class SubscriptionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A subscription: the options that held, in their order, the last of which hold now."""

    version: int
    topic_filter: str
    eras: tuple[Era, ...]


class FlightRecord(msgspec.Struct, frozen=True, array_like=True):
    """Messages that one subscription delivered together, from one shard, in the order of their packet ids."""

    version: int
    topic_filter: str
    shard: int
    options: SubscribeOptions
    """Those they were delivered by: all a repetition needs, though the subscription be gone."""
    ids: int | bytes
    """The first of consecutive ids, or each."""
    qos: int | bytes
    """That of all, or a byte each."""
    first: int
    """The first position."""
    steps: bytes
    """Of each position, how far it lies behind the first: little-endian numbers of `width` bytes."""
    width: int
    topics: tuple[str, ...] = ()
    """Of retained messages, which have no positions that name them."""


class Keys:
    """The keys of one session's state."""

    __slots__ = ("_client", "client_id")

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self._client = client_id.encode()

    @property
    def session(self) -> bytes:
        """The session itself."""
        return SESSION + self._client

    @property
    def live(self) -> bytes:
        """The mark of an open session."""
        return LIVE + self._client

    @property
    def will(self) -> bytes:
        """Under which the will is kept (`topicstore.storage.keyed_messages`)."""
        return b"w" + self._client

    def subscription(self, number: int) -> bytes:
        """Return the key of a subscription."""
        return b"%b%b\0%b" % (SUBSCRIPTION, self._client, number.to_bytes(4, "big"))

    def place(self, number: int) -> bytes:
        """Return the key of a subscription's place."""
        return b"%b%b\0%b" % (_PLACE, self._client, number.to_bytes(4, "big"))

    def retained(self, number: int) -> bytes:
        """Return the key of how far a subscription's retained messages were delivered."""
        return b"%b%b\0%b" % (_RETAINED, self._client, number.to_bytes(4, "big"))

    def leases(self, number: int) -> bytes:
        """Return the key of a shared subscription's places."""
        return b"%b%b\0%b" % (_LEASES, self._client, number.to_bytes(4, "big"))

    def flight(self, number: int) -> bytes:
        """Return the key of a flight."""
        return b"%b%b\0%b" % (_FLIGHT, self._client, number.to_bytes(8, "big"))

    def released(self, number: int) -> bytes:
        """Return the key of packet ids to release."""
        return b"%b%b\0%b" % (_RELEASED, self._client, number.to_bytes(8, "big"))

    def incoming(self, packet_id: int) -> bytes:
        """Return the key of an incoming packet id."""
        return b"%b%b\0%b" % (INCOMING, self._client, packet_id.to_bytes(2, "big"))

    def timer(self, time: int, kind: bytes) -> bytes:
        """Return the key of one of the session's timers."""
        return timer_key(time, kind) + self._client

    def prefixes(self) -> dict[str, bytes]:
        """Return what the keys of everything but the session itself, its mark and its timers begin with."""
        names = {
            "subscriptions": SUBSCRIPTION,
            "places": _PLACE,
            "retained": _RETAINED,
            "leases": _LEASES,
            "flights": _FLIGHT,
            "released": _RELEASED,
            "incoming": INCOMING,
        }
        return {name: b"%b%b\0" % (kind, self._client) for name, kind in names.items()}


def timer_key(time: int, kind: bytes = b"") -> bytes:
    """Return what the keys of timers of a time begin with."""
    return TIMER + time.to_bytes(8, "big") + kind


def timer_of(key: bytes) -> Timer:
    """Return the timer of a key."""
    return Timer(int.from_bytes(key[2:10], "big"), key[10:11], key[11:].decode())


def client_of(key: bytes, prefix: bytes) -> str:
    """Return the client id in a key that begins with ``prefix``; what follows a NUL is left out."""
    return key[len(prefix) :].partition(b"\0")[0].decode()


def put(key: bytes, value: Any) -> StateWrite:
    """Return the write that keeps a value, an array that begins with `VERSION`."""
    return FrameworkWrite(key, add_checksum(key, msgspec.msgpack.encode(value)))


def decode(key: bytes, stored: bytes, kind: type[T]) -> T:
    """Return a stored value. Raises `CorruptionError` or `NewerFormatError`, naming the key."""
    codec = _CODECS.get(kind)
    if codec is None:
        codec = _CODECS[kind] = RecordCodec(kind, VERSION)
    found: T = codec.decode(key, stored, f"state {key!r}")
    return found


def pack_positions(positions: Positions) -> PackedPositions:
    """Return ascending positions as they are stored."""
    if not len(positions):
        return PackedPositions(0, b"", 1)
    steps = positions - positions[0]
    width = next(size for size in (1, 2, 4, 8) if int(steps[-1]) >> (8 * size) == 0)
    return PackedPositions(int(positions[0]), steps.astype(f"<u{width}").tobytes(), width)


def unpack_positions(first: int, steps: bytes, width: int) -> Positions:
    """Return what `pack_positions` packed."""
    return np.frombuffer(steps, dtype=f"<u{width}").astype(np.uint64) + np.uint64(first)


def pack_ids(ids: Sequence[int]) -> int | bytes:
    """Return packet ids as the first, if each follows the one before, else as two bytes each."""
    if isinstance(ids, range):
        return ids.start
    packed: npt.NDArray[np.uint16] = np.fromiter(ids, "<u2", len(ids))
    return packed.tobytes()


def unpack_ids(ids: int | bytes, count: int) -> Sequence[int]:
    """Return what `pack_ids` packed."""
    if isinstance(ids, int):
        return range(ids, ids + count)
    unpacked: list[int] = np.frombuffer(ids, "<u2").tolist()
    return unpacked
