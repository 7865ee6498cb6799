"""The values that sessions take and return: options, starts, wills, deliveries, results, and descriptions of sessions.

A call for many sessions takes rows, and returns a result for each. With ``partial``, a row that fails is refused, with
its error, and the other rows are carried out. Without ``partial``, the call raises the first error; each method
documents which errors are raised before any change.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

import attrs
import msgspec

from topicstore.contract.arguments import Length, check_within
from topicstore.contract.errors import (
    InvalidArgumentError,
    InvalidFilterError,
    SessionEndedError,
    ShardMovedError,
    TopicstoreError,
)
from topicstore.contract.model import Message
from topicstore.contract.places import Place
from topicstore.contract.times import Time
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.hub import Hub
from topicstore.pubsub.publish import PublishResult
from topicstore.runtime.warning import warn_caller

__all__ = [
    "OVER",
    "START_PROPERTY",
    "Acknowledged",
    "Ended",
    "GroupInfo",
    "GroupMember",
    "Overlapping",
    "PubRel",
    "Publish",
    "PublishedRows",
    "SessionCounts",
    "SessionInfo",
    "SessionStatus",
    "SessionSubscription",
    "SharedFilter",
    "Skipped",
    "Start",
    "SubscribeOptions",
    "SubscribeResult",
    "Will",
    "is_shared",
    "parse_shared",
    "places_of",
    "reached",
    "read_filter",
]

START_PROPERTY = "topicstore-start"
"""The MQTT 5 user property of a SUBSCRIBE that requests a replay. Its value can be passed on as a `Start`."""

Start = Time | Mapping[int, int] | None
"""The start of a subscription. None: only messages published from now on. A time, inclusive, in a form that
`Database.replay` accepts; 0: the beginning; a time after the newest message, also in the future, means from now on. A
`topicstore.Place`, or by shard the position after which to begin; shards that are left out begin at 0. Or text:
``now``, ``beginning``, a time that `Database.replay` accepts, or a place as text, with the database's id, or without it
as in ``0:3481600000000,1:3481600002048``."""

_SHARE = "$share"

_PLACE = re.compile(r"[0-9a-f]{32}(-[0-9a-f]+)+")
_POSITIONS = re.compile(r"[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*")


def places_of(start: Start, marks: list[int], hub: Hub, instant: Callable[[Time], int]) -> list[int]:
    """Return, by shard, the position after which a subscription with this start begins.

    Raises `InvalidArgumentError`, `WrongDatabaseError` for a place of another database, and `PlaceAheadError` for a
    place after the end of a shard, whose messages this database has lost.

    marks:   the shards' watermarks.
    instant: converts a time to microseconds since the epoch.
    """
    if isinstance(start, str):
        start = _parsed(start.strip())
    if start is None:
        return marks
    if isinstance(start, Mapping):
        return hub.after(start)
    try:
        time = instant(start)
    except InvalidArgumentError as bad:
        raise InvalidArgumentError(f"start: {bad}") from bad
    return hub.before(time)


def reached(places: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return stored places, by shard, limited to the ends of the shards; warn if a place lies after a shard's end.

    Such a shard has lost messages. No error is raised, because the caller has no better place. The warning names no
    session, so that Python shows it once.
    """
    ahead = [shard for shard, (place, end) in enumerate(zip(places, ends, strict=True)) if place > end]
    if ahead:
        with suppress(UserWarning):  # sessions are opened even if warnings are errors
            warn_caller(
                f"sessions stood after the end of shards {', '.join(map(str, ahead))}: the database has lost messages "
                "that they had been sent, as in a power failure. They go on at the end, and may miss what was stored "
                "since",
                UserWarning,
            )
    return list(map(min, places, ends))


def _parsed(text: str) -> Start:
    """Parse ``now``, ``beginning`` or a place; return other text unchanged."""
    if text == "now":
        return None
    if text == "beginning":
        return 0
    if _PLACE.fullmatch(text):
        return Place.parse(text)
    if _POSITIONS.fullmatch(text):
        return {int(shard): int(position) for shard, _, position in (pair.partition(":") for pair in text.split(","))}
    return text


@attrs.frozen
class SharedFilter:
    """The parts of a shared subscription's filter ``$share/<name>/<filter>``; the whole text identifies the group.

    See MQTT 5, section 4.8.2.
    """

    text: str
    name: str
    topic_filter: TopicFilter
    """The filter that the group reads."""


def is_shared(text: str) -> bool:
    """Return whether a filter is that of a shared subscription."""
    return text.startswith(_SHARE) and text[len(_SHARE) :][:1] in ("", "/")


def parse_shared(text: str) -> SharedFilter:
    """Return the parts of a shared subscription's filter. Raises `InvalidFilterError`."""
    _, name, rest = (*text.split("/", 2), "", "")[:3]
    if not (name and rest) or "+" in name or "#" in name:
        raise InvalidFilterError(f"a shared subscription is $share/<name>/<filter>, not {text[:80]!r}")
    return SharedFilter(text, name, TopicFilter(rest))


def read_filter(text: str) -> TopicFilter:
    """Return the topic filter of a subscription, without the ``$share/<name>/`` of a shared one."""
    return parse_shared(text).topic_filter if is_shared(text) else TopicFilter(text)


MAX_IDENTIFIER = 268_435_455

Overlapping = Literal["each", "once"]
"""Whether a message that matches several subscriptions of a session is delivered for each of them, or once."""


class SubscribeOptions(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The options of one subscription (MQTT 5, section 3.8.3.1).

    Fields are only ever appended: the struct is part of stored formats.
    """

    qos: int = 1
    no_local: bool = False
    """Whether messages that the session's own client published are left out."""
    retain_as_published: bool = False
    retain_handling: int = 0
    """Whether retained messages are sent. 0: always; 1: only if the subscription is new; 2: never."""
    identifier: int = 0
    """The subscription identifier (MQTT 5, section 3.8.2.1.2); 0: none."""

    def checked(self) -> SubscribeOptions:
        """Return these options. Raises `InvalidArgumentError` if one of them is out of its range."""
        check_within("qos", self.qos, 0, 2)
        check_within("retain_handling", self.retain_handling, 0, 2)
        check_within("a subscription identifier", self.identifier, 0, MAX_IDENTIFIER)
        for name in ("no_local", "retain_as_published"):
            value = getattr(self, name)
            if type(value) is not bool:  # records with a value of another type could not be decoded
                raise InvalidArgumentError(f"{name} is True or False, not {value!r}")
        return self


@attrs.frozen(kw_only=True)
class SubscribeResult:
    """The result of a SUBSCRIBE."""

    created: bool
    """Whether the subscription is new; if not, the options of an existing one were changed."""


class Will(msgspec.Struct, frozen=True, gc=False):
    """The message that is published when a session's connection is lost (MQTT 5, section 3.1.2.5)."""

    message: Message
    delay: Length = 0.0
    """A timedelta, or seconds. The will is published after the delay, or when the session ends if that is sooner."""


class Publish(msgspec.Struct, frozen=True, gc=False):
    """One message to send to a session's client: a PUBLISH."""

    packet_id: int
    """The packet id, 1 to 65,535; 0 at QoS 0, which has none."""
    message: Message
    """The message. Sessions with the same filter and place get the same object. So do sessions with other filters if
    the message was committed recently. A server can cache the encoded message by the identity of this object."""
    qos: int
    """The QoS of delivery: the lower of those of the message and the subscription."""
    dup: bool = False
    """Whether the message may have been sent before under this packet id (MQTT 5, section 3.3.1.1)."""
    retain: bool = False
    """The RETAIN flag to send, which depends on the subscription's options (MQTT 5, section 3.3.1.3)."""
    subscription_identifiers: tuple[int, ...] = ()
    expiry: int | None = None
    """The remaining message expiry interval in seconds (MQTT 5, section 3.3.2.3.3); None if the message has none."""


class PubRel(msgspec.Struct, frozen=True, gc=False):
    """A PUBREL to send."""

    packet_id: int


class Ended(enum.Enum):
    """The reason why a session object can't be used any more."""

    DISCONNECTED = "it was disconnected"
    LOST = "its connection was lost"
    TAKEN_OVER = "its client connected again"
    KICKED = "it was kicked"
    EXPIRED = "it was made to expire"
    KEEP_ALIVE = "its client was silent for longer than its keep-alive allows"
    CLOSED = "the database was closed"
    MOVED = "its shard has moved to another site"
    UNCERTAIN = "the log store has not answered, so it is unknown whether a change of it was stored"


OVER: tuple[type[TopicstoreError], ...] = (SessionEndedError, ShardMovedError)
"""The errors of calls of a session object that has ended."""


@attrs.frozen(kw_only=True)
class SessionSubscription:
    """One subscription of a connected session."""

    topic_filter: str
    options: SubscribeOptions
    places: tuple[int, ...]
    """By shard, the position up to which everything was delivered or found not to match."""
    dropped: tuple[int, ...]
    """The generations that were dropped before the session had read them."""


@attrs.frozen(kw_only=True)
class SessionStatus:
    """A snapshot of the state of a connected session."""

    client_id: str
    in_flight: int
    """The number of messages that were sent, or are to be sent again, and are not fully acknowledged."""
    receive_maximum: int
    to_resend: int
    """The number of messages in flight that wait to be sent again."""
    waits_for: str
    """``nothing``, ``acknowledgements`` (the window is full), ``delivery`` (packets wait to be delivered), ``resume``
    (the session is paused), ``permission`` (``allow`` answered None) or the text of an error. New messages count only
    after a call of `Sessions.wait` or `Sessions.deliver` has noticed them."""
    stuck_since: int | None
    """The time, as in `SessionInfo`, since which the window has been full without an acknowledgement; None if it isn't.
    """
    missed: int
    """The number of QoS 0 messages that were dropped because they were not fetched in time."""
    refused: int
    """The number of messages that were not sent on this connection because its ``allow`` refused them."""
    subscriptions: tuple[SessionSubscription, ...]


@attrs.frozen
class Skipped:
    """The messages that a session was not sent because too many waited for it; see `Sessions.bound_backlogs`."""

    messages: int = 0
    """The number of messages. A message that matches several filters of a session counts for each of them."""
    payload_bytes: int = 0

    def __add__(self, other: Skipped) -> Skipped:
        """Return the sums of both numbers of messages and of bytes."""
        return Skipped(self.messages + other.messages, self.payload_bytes + other.payload_bytes)


@attrs.frozen(kw_only=True)
class SessionCounts:
    """Counts of the sessions whose clients are connected."""

    connected: int
    paused: int
    """The number of connected sessions that are paused (`Session.pause`)."""
    subscriptions: int
    in_flight: int
    """The number of messages that were sent, or are to be sent again, and are not fully acknowledged."""
    awaiting_pubrel: int
    """The number of incoming QoS 2 packet ids that wait for their PUBREL."""
    missed: int = 0
    """The number of QoS 0 messages that were dropped since the database was opened because they were not fetched in
    time; includes sessions that have ended."""
    skipped: Skipped = Skipped()
    """The messages that `Sessions.bound_backlogs` has skipped since the database was opened, of all sessions."""


@attrs.frozen(kw_only=True)
class SessionInfo:
    """A session as it is stored."""

    client_id: str
    connected: bool
    """Whether the session's client is connected. After a crash this stays true until the next `Sessions.tick`."""
    created: int
    """When the session was created. Times are microseconds since the Unix epoch, by the wall clock as it is set now."""
    expiry_interval: float | None
    """Seconds from the end of the connection to the end of the session; None: it never ends."""
    expires: int | None
    """When the session ends; None while its client is connected, or if it never ends."""
    will_due: int | None
    """When the session's will is published; None if no will is pending."""
    will_delay: float | None = None
    """Seconds from the loss of the connection to the publishing of the will; None if the session has no will."""
    subscriptions: tuple[tuple[str, SubscribeOptions], ...] = ()
    in_flight: int = 0
    """The number of messages in flight at the last commit."""
    awaiting_pubrel: int = 0
    """The number of incoming QoS 2 packet ids that wait for their PUBREL."""
    in_memory: bool = False
    """Whether the session is kept in memory only. Then all fields show its current state, not the last commit."""


@attrs.frozen(kw_only=True)
class GroupMember:
    """A session that has a shared subscription."""

    client_id: str
    connected: bool
    slow: bool
    """Whether its window has been full for so long that other members get its share."""
    slices: tuple[int, ...]
    """By shard, the number of the 64 partitions that the member is assigned; empty while its client is disconnected."""


@attrs.frozen(kw_only=True)
class GroupInfo:
    """A shared subscription and its members."""

    name: str
    topic_filter: str
    """The filter that it reads, without the ``$share/<name>/`` before it."""
    members: tuple[GroupMember, ...]
    """The members, sorted by client id."""
    returned: int
    """The number of messages that were taken back from ended or disconnected members and wait for another member."""
    dropped: tuple[int, ...]
    """The generations that were dropped before the group had read them: those found since the database was opened.

    In a cluster those that its present members have found, on any site.
    """


@attrs.frozen(kw_only=True)
class PublishedRows:
    """The result of `Sessions.publish`. Rows are numbered from 0, in the order of the call."""

    result: PublishResult
    """The result of the messages that were published: neither refused nor repetitions, in the order of their rows."""
    matched: list[bool]
    """By row, whether a subscription matches its topic; if not, a server may answer with the reason code 0x10, "no
    matching subscribers" (MQTT 5, section 3.4.2.1). False for a refused row. ``no_local`` is not considered."""
    repeated: frozenset[int]
    """The rows that repeat a message of QoS 2 that was published before, and were left out."""
    refused: Mapping[int, TopicstoreError]
    """The error of each row that was refused."""


@attrs.frozen(kw_only=True)
class Acknowledged:
    """The result of `Sessions.pubrel` and `Sessions.pubrec`. Rows are numbered from 0, in the order of the call."""

    known: list[bool]
    """By row, whether its packet id was in use; if not, a server answers with the reason code 0x92, "packet identifier
    not found" (MQTT 5, section 3.7.2.1). False for a refused row."""
    refused: Mapping[int, TopicstoreError]
    """The error of each row that was refused."""
