"""The records that sessions keep in the state of a shard, and their stored form.

All records of a session are in the shard of its client id. Every key begins with the byte 1
(`topicstore.shard.state.FrameworkWrite`), which is left out here. Numbers in keys are big-endian. ``client`` is the
client id in UTF-8, which holds no NUL. If that has more than 64 bytes, ``client`` is NUL and the 40 hexadecimal digits
of its BLAKE2b digest of 20 bytes, because long keys in an engine's index slow down every read. The session's own record
then has version 2, and older releases refuse it. Databases of such releases have long client ids in their keys; the
first opening of their sessions for writing replaces them (`topicstore.sessions.long_keys`).
Every value is a checksum (`topicstore.contract.checksums`) and a msgpack array
that begins with the version, which is 1 unless stated otherwise::

    "sr" client               the session itself: `SessionRecord`. Its bytes are the session's guard: every
                              write of the session is conditional on them, and each opening changes them.
    "sd" client               the client id that a digest stands for: [1, client id]
    "sl" client               the session was opened and not closed: [1]. A crash leaves this key.
    "ss" client 00 number:4   a subscription: `SubscriptionRecord`
    "sc" client 00 number:4   a subscription's place: [1, [position by shard]]: all messages up to it were delivered
    "sn" client 00 number:4   retained messages are being sent: [1, topic]: those up to this topic were delivered
    "sg" client 00 number:4   a shared subscription's places (`topicstore.sessions.shared.records`)
    "sf" client 00 number:8   an in-flight batch, in the order sent: messages that wait for a PUBACK or PUBREC:
                              `InFlightRecord`, of retained messages `StoredInFlight`, or in version 2
                              `MergedInFlightRecord`
    "sp" client 00 number:8   packet ids that wait for a PUBCOMP, in the order of PUBRECs: [1, 2 bytes each,
                              little-endian]
    "i"  client 00 id:2       an incoming QoS 2 packet id that waits for its PUBREL: [1]
    "t"  time:8 kind:1 client a timer, by the session clock: [1]; kind "e" the session ends, "w" its will is due.
                              It counts if the session's record names the same time.
    "c"                       in shard 0, or in each shard of a database that sites share, the time by both clocks
                              (`topicstore.sessions.clock`)

Times are microseconds by the session clock.

A will is a keyed message (`topicstore.storage.keyed_messages`) under ``"w" client``.

In-flight batches and packet ids to release are numbered in one sequence. A packet id in two records belongs to the
later one: the id was free when that record was written, but the earlier record had not been rewritten yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.checksums import add_checksum, add_checksums
from topicstore.contract.model import Message, Properties
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.shard.record_codec import RecordCodec
from topicstore.shard.rewriter import Decoders
from topicstore.shard.state import FrameworkWrite

from .model import SubscribeOptions, is_shared

__all__ = [
    "CLOCK",
    "DECODERS",
    "EXPIRY",
    "INCOMING",
    "IN_FLIGHT",
    "LEASES",
    "LIVE",
    "LONGEST",
    "MERGED",
    "NAME",
    "NAMED",
    "NEVER",
    "PLACE",
    "SESSION",
    "SUBSCRIPTION",
    "TIMER",
    "VERSION",
    "WILL",
    "InFlightRecord",
    "Keys",
    "Matched",
    "MergedInFlightRecord",
    "OptionsPeriod",
    "PackedPositions",
    "RetainedCopy",
    "SessionRecord",
    "StoredInFlight",
    "SubscriptionRecord",
    "Timer",
    "copy_of",
    "decode",
    "decoder",
    "is_durable",
    "owner_in",
    "owner_of",
    "pack_ids",
    "pack_positions",
    "put",
    "put_all",
    "timer_key",
    "timer_of",
    "unpack_ids",
    "unpack_positions",
]

VERSION = 1
MERGED = 2
"""The version of an in-flight batch of overlapping subscriptions, `MergedInFlightRecord`."""
NAMED = 2
"""The version of the `SessionRecord` of a client id that has a digest in the keys."""
LONGEST = 64
"""Longest client id, in bytes, that is stored in keys; longer ones are replaced with a digest."""
NEVER = -1
"""Stored in place of a time that never comes."""

SESSION = b"\1sr"
NAME = b"\1sd"
LIVE = b"\1sl"
SUBSCRIPTION = b"\1ss"
PLACE = b"\1sc"
_RETAINED = b"\1sn"
LEASES = b"\1sg"
IN_FLIGHT = b"\1sf"
_RELEASED = b"\1sp"
INCOMING = b"\1i"
TIMER = b"\1t"
CLOCK = b"\1c"

EXPIRY = b"e"
WILL = b"w"

T = TypeVar("T")

_DIGEST = 20
_ENCODER = msgspec.msgpack.Encoder()
_CODECS: dict[Any, RecordCodec[Any]] = {}
"""The codecs by type of record."""


class PackedPositions(NamedTuple):
    """Ascending positions as they are stored."""

    first: int
    steps: bytes
    """The distance of each position from the first, as little-endian numbers of `width` bytes."""
    width: int


class Timer(NamedTuple):
    """A stored timer of a session."""

    time: int
    kind: bytes
    """`EXPIRY` or `WILL`."""
    owner: str
    """See `owner_of`."""


class SessionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A session. Times are by the session clock. Fields are only ever appended."""

    version: int
    guard: int
    """A fencing token that increases at every opening."""
    created: int
    connected: bool
    expiry_interval: int
    """Microseconds from the end of the connection to the end of the session; -1: it never ends."""
    expires: int = -1
    """When the session ends; -1 while it is connected, or if it never ends."""
    will_delay: int = -1
    """Microseconds from the end of the connection to the will; -1: it has no will."""
    will_due: int = -1
    """When its will is published; -1: no will is pending."""
    ending: bool = False
    """Whether it has ended and its records are being removed."""
    user: str = ""
    """The user that opened it; empty: none was named."""


class OptionsPeriod(msgspec.Struct, frozen=True, array_like=True):
    """Options of a subscription, and the positions up to which they held."""

    options: SubscribeOptions
    until: tuple[int, ...] | None = None
    """By shard, the last position to which the options apply; None: they are the current ones."""


class SubscriptionRecord(msgspec.Struct, frozen=True, array_like=True):
    """A subscription: all options that still apply to unread messages, oldest first; the last are the current ones."""

    version: int
    topic_filter: str
    periods: tuple[OptionsPeriod, ...]


def is_durable(record: SubscriptionRecord) -> bool:
    """Return whether matching messages are stored for a subscription: it is shared, or of QoS 1 or 2 in any period."""
    return is_shared(record.topic_filter) or any(period.options.qos for period in record.periods)


class InFlightRecord(msgspec.Struct, frozen=True, array_like=True):
    """Messages that one subscription delivered together, from one shard, in the order of their packet ids."""

    version: int
    topic_filter: str
    shard: int
    options: SubscribeOptions
    """The options at delivery, by which messages are sent again even after the subscription has ended."""
    ids: int | bytes
    """The first of consecutive ids, or two bytes for each id."""
    qos: int | bytes
    """The QoS of all messages, or a byte for each."""
    first: int
    """The first position."""
    steps: bytes
    """The distance of each position from the first, as little-endian numbers of `width` bytes."""
    width: int
    topics: tuple[str, ...] = ()
    """The topics of retained messages, which are not identified by positions."""


class Matched(msgspec.Struct, frozen=True, array_like=True):
    """The overlapping subscriptions that a message matched, as needed to send the message again."""

    topic_filter: str
    """The filter of one of them, by which the message is read again."""
    identifiers: tuple[int, ...]
    """All their subscription identifiers."""
    retain_as_published: bool
    """Whether one of them requested the RETAIN flag as it was published."""


class MergedInFlightRecord(InFlightRecord, frozen=True, array_like=True):
    """A batch of several overlapping subscriptions, each message once (`topicstore.sessions.overlapping_cursor`).

    Its version is 2, so that older releases, which would not find all its messages, refuse it. Batches of a single
    subscription have version 1.
    """

    matched: tuple[Matched, ...] = ()
    """The sets of subscriptions that messages of the in-flight batch matched."""
    which: bytes = b""
    """By message, the index of its set in `matched`, as two little-endian bytes."""


class RetainedCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A retained message in flight, without its topic."""

    payload: bytes
    client_id: str
    qos: int
    retain: bool
    timestamp: int | None
    properties: Properties | None

    def message(self, topic: str) -> Message:
        """Return the retained message with its topic, which the copy doesn't contain."""
        return Message(topic, self.payload, self.client_id, self.qos, self.retain, self.timestamp, self.properties)


class StoredInFlight(MergedInFlightRecord, frozen=True, array_like=True):
    """An in-flight batch of retained messages; other batches are decoded as this type too, with empty `copies`.

    A batch holds copies of its retained messages: the same PUBLISH must be sent again [MQTT-4.4.0-1], even if
    another message is retained by then, or none. In records of old releases, without copies, messages are found by
    topic.
    """

    copies: tuple[RetainedCopy, ...] = ()
    """The messages of `topics`."""
    since: int = 0
    """The time in microseconds since the epoch at which their remaining expiry intervals were computed."""


class Keys:
    """The keys of one session's state. ``old``: in the form of releases that had no digests in keys."""

    __slots__ = ("_client", "client_id")

    def __init__(self, client_id: str, *, old: bool = False) -> None:
        self.client_id = client_id
        self._client = client_id.encode() if old else owner_of(client_id)

    @property
    def name(self) -> bytes | None:
        """The key under which the client id of a digest is stored; None if the session's keys have no digest."""
        return NAME + self._client if self._client[:1] == b"\0" else None

    @property
    def session(self) -> bytes:
        """The key of the session itself."""
        return SESSION + self._client

    @property
    def live(self) -> bytes:
        """The key whose presence marks the session as open."""
        return LIVE + self._client

    @property
    def will(self) -> bytes:
        """The key under which the will is kept (`topicstore.storage.keyed_messages`)."""
        return b"w" + self._client

    def subscription(self, number: int) -> bytes:
        """Return the key of the subscription with this number."""
        return b"%b%b\0%b" % (SUBSCRIPTION, self._client, number.to_bytes(4, "big"))

    def place(self, number: int) -> bytes:
        """Return the key of a subscription's place."""
        return b"%b%b\0%b" % (PLACE, self._client, number.to_bytes(4, "big"))

    def retained(self, number: int) -> bytes:
        """Return the key of the last topic whose retained message was delivered to a subscription."""
        return b"%b%b\0%b" % (_RETAINED, self._client, number.to_bytes(4, "big"))

    def leases(self, number: int) -> bytes:
        """Return the key of a shared subscription's places."""
        return b"%b%b\0%b" % (LEASES, self._client, number.to_bytes(4, "big"))

    def batch(self, number: int) -> bytes:
        """Return the key of an in-flight batch."""
        return b"%b%b\0%b" % (IN_FLIGHT, self._client, number.to_bytes(8, "big"))

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
        """Return the prefixes of all keys of the session, except `session`, `live` and its timers."""
        names = {
            "subscriptions": SUBSCRIPTION,
            "places": PLACE,
            "retained": _RETAINED,
            "leases": LEASES,
            "batches": IN_FLIGHT,
            "released": _RELEASED,
            "incoming": INCOMING,
        }
        return {name: b"%b%b\0" % (kind, self._client) for name, kind in names.items()}


def copy_of(message: Message) -> RetainedCopy:
    """Return a copy of a retained message for its in-flight record, without the topic."""
    m = message
    return RetainedCopy(m.payload, m.client_id, m.qos, m.retain, m.timestamp, m.properties)


def timer_key(time: int, kind: bytes = b"") -> bytes:
    """Return the prefix of the keys of the timers due at a time."""
    return TIMER + time.to_bytes(8, "big") + kind


def timer_of(key: bytes) -> Timer:
    """Decode a timer's key to its time, its kind, and the client id in the form of keys (`owner_of`)."""
    return Timer(int.from_bytes(key[2:10], "big"), key[10:11], key[11:].decode())


def owner_of(client_id: str) -> bytes:
    """Return the form of a client id in keys: the client id itself, or NUL and its digest. Idempotent.

    The digest is cryptographic, so that no client can choose a client id with the digest of another one.
    """
    client = client_id.encode()
    if len(client) <= LONGEST:
        return client
    return b"\0%b" % blake2b(client, digest_size=_DIGEST).hexdigest().encode()


def owner_in(key: bytes, prefix: bytes) -> str:
    """Return the form of the client id (`owner_of`) in a key that begins with ``prefix``."""
    owner = key[len(prefix) :]
    return (owner[: 1 + 2 * _DIGEST] if owner[:1] == b"\0" else owner.partition(b"\0")[0]).decode()


def put(key: bytes, value: Any) -> StateWrite:
    """Return the write that stores a value, an array that begins with `VERSION`."""
    return FrameworkWrite(key, add_checksum(key, _ENCODER.encode(value)))


def put_all(keys: Sequence[bytes], value: Any) -> list[StateWrite]:
    """Return the writes that store one value, an array that begins with `VERSION`, under each of the keys."""
    return list(map(FrameworkWrite, keys, add_checksums(keys, msgspec.msgpack.encode(value))))


def decode(key: bytes, stored: bytes, kind: type[T]) -> T:
    """Return a stored value. Raises `CorruptionError` or `NewerFormatError`, naming the key."""
    codec = _CODECS.get(kind)
    if codec is None:
        codec = _CODECS[kind] = RecordCodec(kind, _NEWEST.get(kind, VERSION))
    found: T = codec.decode(key, stored, f"state {key!r}")
    return found


_NEWEST: dict[Any, int] = {StoredInFlight: MERGED, SessionRecord: NAMED}
"""The highest known version by type of record, where it isn't `VERSION`."""


def decoder(kind: type[Any]) -> Callable[[bytes, bytes], object]:
    """Return a function that decodes a key and its value, a record of this kind."""
    return lambda key, stored: decode(key, stored, kind)


DECODERS: Decoders = {
    SESSION: decoder(SessionRecord),
    NAME: decoder(tuple[int, str]),
    LIVE: decoder(tuple[int]),
    SUBSCRIPTION: decoder(SubscriptionRecord),
    PLACE: decoder(tuple[int, list[int]]),
    _RETAINED: decoder(tuple[int, str]),
    IN_FLIGHT: decoder(StoredInFlight),
    _RELEASED: decoder(tuple[int, bytes]),
    INCOMING: decoder(tuple[int]),
    TIMER: decoder(tuple[int]),
}
"""Decoders of sessions' state, except that of `topicstore.sessions.clock` and of shared subscriptions."""


def pack_positions(positions: Positions) -> PackedPositions:
    """Return ascending positions in stored form."""
    if not len(positions):
        return PackedPositions(0, b"", 1)
    if len(positions) == 1:
        return PackedPositions(int(positions[0]), b"\0", 1)
    steps = positions - positions[0]
    width = next(size for size in (1, 2, 4, 8) if int(steps[-1]) >> (8 * size) == 0)
    return PackedPositions(int(positions[0]), steps.astype(f"<u{width}").tobytes(), width)


def unpack_positions(first: int, steps: bytes, width: int) -> Positions:
    """Return the positions that `pack_positions` packed."""
    return np.frombuffer(steps, dtype=f"<u{width}").astype(np.uint64) + np.uint64(first)


def pack_ids(ids: Sequence[int]) -> int | bytes:
    """Encode packet ids: as the first id if they are consecutive, otherwise as two bytes for each id."""
    if isinstance(ids, range):
        return ids.start
    packed: npt.NDArray[np.uint16] = np.fromiter(ids, "<u2", len(ids))
    return packed.tobytes()


def unpack_ids(ids: int | bytes, count: int) -> Sequence[int]:
    """Return the packet ids that `pack_ids` packed."""
    if isinstance(ids, int):
        return range(ids, ids + count)
    unpacked: list[int] = np.frombuffer(ids, "<u2").tolist()
    return unpacked
