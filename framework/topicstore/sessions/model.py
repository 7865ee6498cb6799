"""What goes into sessions and comes out of them: options, wills, deliveries, what can be seen of one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import attrs
import msgspec

from topicstore.contract.arguments import check_within
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.model import Message
from topicstore.contract.positions import first_position, to_microseconds

__all__ = [
    "KEEP",
    "START_PROPERTY",
    "Delivery",
    "Ended",
    "GroupInfo",
    "GroupMember",
    "Keep",
    "Release",
    "SessionInfo",
    "SessionStatus",
    "Start",
    "SubscribeOptions",
    "SubscriptionStatus",
    "Will",
    "parse_start",
    "places_of",
]

START_PROPERTY = "topicstore-start"
"""The MQTT 5 user property of a SUBSCRIBE that asks for a replay; `parse_start` reads its value."""

Start = int | datetime | str | Mapping[int, int] | None
"""Where a subscription begins: None from now on; ``"beginning"`` or 0; a time, inclusive; the value of a user
property (`parse_start`); or a place: by shard, the position behind which to begin; shards left out begin at 0."""

MAX_IDENTIFIER = 268_435_455


class SubscribeOptions(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The options of one subscription. Fields are only ever appended: the struct is part of stored formats."""

    qos: int = 1
    no_local: bool = False
    """Leave out what the session's own client published."""
    retain_as_published: bool = False
    retain_handling: int = 0
    """0: send retained messages; 1: only if the subscription is new; 2: never."""
    identifier: int = 0
    """The subscription identifier; 0: none."""

    def checked(self) -> SubscribeOptions:
        """Return the options. Raises `InvalidArgumentError` if one is out of its range."""
        check_within("qos", self.qos, 0, 2)
        check_within("retain_handling", self.retain_handling, 0, 2)
        check_within("a subscription identifier", self.identifier, 0, MAX_IDENTIFIER)
        return self


class Will(msgspec.Struct, frozen=True, gc=False):
    """What is published when a session's connection is lost."""

    message: Message
    delay: float = 0.0
    """Seconds. It is published after the delay, or when the session ends if that is sooner."""


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message to send to a session's client: a PUBLISH."""

    packet_id: int
    """1 to 65,535; 0 for QoS 0, which has none."""
    message: Message
    qos: int
    """The lower of the message's and the subscription's."""
    dup: bool = False
    """It may have been sent before, under this packet id."""
    retain: bool = False
    """The flag to send: as the subscription's options have it, not as published."""
    subscription_identifiers: tuple[int, ...] = ()
    expiry: int | None = None
    """What is left of the message's expiry interval, in seconds; None if it has none."""


class Release(msgspec.Struct, frozen=True, gc=False):
    """A PUBREL to send."""

    packet_id: int


class Keep(enum.Enum):
    """Says to leave a setting as it is, where None says something else."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


class Ended(enum.Enum):
    """Why a session object is of no more use."""

    DISCONNECTED = "it was disconnected"
    LOST = "its connection was lost"
    TAKEN_OVER = "its client connected anew"
    KICKED = "it was kicked"
    EXPIRED = "it was made to expire"
    KEEP_ALIVE = "its client was silent for longer than its keep-alive allows"
    CLOSED = "the database was closed"


@attrs.frozen(kw_only=True)
class SubscriptionStatus:
    """How far one subscription of a session has come."""

    topic_filter: str
    options: SubscribeOptions
    places: tuple[int, ...]
    """By shard: everything up to this position was delivered, or found not to match."""
    behind: float
    """Seconds between the newest message of the database and the oldest that may be unread; 0: nothing is unread."""
    dropped: tuple[int, ...]
    """Generations that were dropped before the session had read them."""


@attrs.frozen(kw_only=True)
class SessionStatus:
    """What a connected session is doing."""

    client_id: str
    in_flight: int
    """Messages sent, or to be sent again, whose exchange is not over."""
    receive_maximum: int
    to_resend: int
    """Of those in flight, how many wait to be sent again."""
    waits_for: str
    """``nothing``, ``acknowledgements`` (the window is full), ``delivery`` (there is something), or an error."""
    stuck_since: int | None
    """Since when the window has been full without an acknowledgement; a time as those of `SessionInfo`."""
    missed: int
    """QoS 0 messages that were dropped because nobody fetched them."""
    subscriptions: tuple[SubscriptionStatus, ...]


@attrs.frozen(kw_only=True)
class SessionInfo:
    """A session as it is stored."""

    client_id: str
    connected: bool
    """Also if a crash left it so, until the first `Sessions.tick` that follows."""
    created: int
    """Microseconds since the epoch, as all times here; `Sessions.tick` says what becomes of them if the clock jumps."""
    expiry_interval: float | None
    """Seconds; None: never."""
    expires: int | None
    """When it ends; None while it is connected, or never."""
    will_due: int | None
    """When its will is published; None if none is pending."""
    subscriptions: tuple[tuple[str, SubscribeOptions], ...] = ()
    in_flight: int = 0
    """As of the last commit."""
    awaiting_release: int = 0
    """Incoming QoS 2 packet ids whose PUBREL has not come."""


@attrs.frozen(kw_only=True)
class GroupMember:
    """A session that has a shared subscription."""

    client_id: str
    connected: bool
    slow: bool
    """Its window has been full for so long that others get its share."""
    slices: tuple[int, ...]
    """By shard, how many of the 64 slices it has; nothing while it is away."""


@attrs.frozen(kw_only=True)
class GroupInfo:
    """A shared subscription, and who shares it."""

    name: str
    topic_filter: str
    """What it reads: without the name."""
    members: tuple[GroupMember, ...]
    """Sorted by client id."""
    behind: float
    """Seconds between the newest message of the database and the oldest that may be unread; 0: nothing is unread."""
    returned: int
    """Messages that came back from sessions that ended or stayed away, and wait for another member."""
    dropped: tuple[int, ...]
    """Generations that were dropped before the group had read them."""


def parse_start(text: str) -> int | Mapping[int, int] | None:
    """Return the start that a user property `START_PROPERTY` asks for.

    ``now``, ``beginning``, microseconds since the epoch, a time of ISO 8601 with its zone, or a place,
    ``0:3481600000000,1:3481600002048``. Raises `InvalidArgumentError` for anything else.
    """
    word = text.strip()
    if word == "now":
        return None
    if word == "beginning":
        return 0
    try:
        if word.isdecimal():
            return int(word)
        if ":" in word and set(word) <= set("0123456789:,"):
            pairs = [pair.split(":") for pair in word.split(",")]
            return {int(shard): int(position) for shard, position in pairs}
        return to_microseconds(datetime.fromisoformat(word))
    except ValueError as bad:  # InvalidArgumentError is one
        raise InvalidArgumentError(f"{START_PROPERTY} is not {text[:80]!r}: {bad}") from bad


def places_of(start: Start, now: list[int]) -> list[int]:
    """Return, by shard, the position up to which a subscription with this start has nothing to deliver.

    ``now``: the watermarks.
    """
    if isinstance(start, str):
        return places_of(parse_start(start), now)
    if start is None:
        return now
    if isinstance(start, Mapping):
        for shard, position in start.items():
            check_within("a shard", shard, 0, len(now) - 1)
            check_within("a position", position, 0, (1 << 64) - 1)
        return [start.get(shard, 0) for shard in range(len(now))]
    return [max(first_position(to_microseconds(start)) - 1, 0)] * len(now)
