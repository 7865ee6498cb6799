"""What goes over to the thread of the store in one hop, and what comes back.

Both are columns: what all clients asked for, by kind. A client is whatever the event loop knows a connection by; the
hop only hands it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from topicstore.contract.arguments import Keep
from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.sessions import (
    Connect,
    DeliveryBatch,
    Publish,
    PubRel,
    Session,
    Start,
    SubscribeOptions,
    SubscribeResult,
)
from topicstore.sessions.credit import Allow

__all__ = ["Answers", "Asked", "Client", "Departure", "PublishedPart", "Row", "Wanted"]

Client = Any
"""A connection, as the event loop knows it."""
Row = tuple[Session, Message, int]
"""A message that a client publishes: its session, the message and the packet id, 0 at QoS 0."""


@attrs.frozen
class Wanted:
    """One subscription that is to be made."""

    topic_filter: str
    options: SubscribeOptions
    start: Start


@attrs.frozen
class Departure:
    """How a client says goodbye in its DISCONNECT."""

    session: Session
    send_will: bool
    expiry_interval: float | Keep | None
    """Seconds that the session lasts from now on; None: for ever; `KEEP`: as its CONNECT said."""


@attrs.define
class Asked:
    """What clients have asked for since the last hop, in the order in which it is served."""

    lookups: list[tuple[Any, str]] = attrs.field(factory=list)
    """Who wants to know which filters the stored session of a client has."""
    restricted: list[tuple[Session, Allow | None]] = attrs.field(factory=list)
    """The sessions whose clients have other rights now, with what says which messages they may be sent."""
    connects: list[tuple[Client, Connect, list[str]]] = attrs.field(factory=list)
    """With the filters of the stored session that the client may no longer have."""
    published: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """With what the loop needs to answer them."""
    subscribes: list[tuple[Client, Session, list[Wanted]]] = attrs.field(factory=list)
    unsubscribes: list[tuple[Client, Session, list[str]]] = attrs.field(factory=list)
    published_later: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """As `published`: what came after the first change of subscriptions, which therefore holds for it."""
    pubrels: list[tuple[Client, Session, list[int]]] = attrs.field(factory=list)
    pubrecs: list[tuple[Client, Session, list[int], bool]] = attrs.field(factory=list)
    """The last: whether the client took the messages."""
    disconnects: list[tuple[Client, Departure]] = attrs.field(factory=list)
    lost: list[Session] = attrs.field(factory=list)
    figures: list[Message] = attrs.field(factory=list)
    """Messages of the server itself, which are stored nowhere."""

    @property
    def resubscribing(self) -> bool:
        """Whether subscriptions change."""
        return bool(self.subscribes or self.unsubscribes)

    @property
    def changing(self) -> bool:
        """Whether connections begin or end, or subscriptions change."""
        return bool(self.resubscribing or self.connects or self.disconnects or self.lost)

    def clients(self) -> set[Client]:
        """Return everybody who asked for something and waits for an answer."""
        columns: tuple[Sequence[tuple[Any, ...]], ...] = (
            self.connects,
            self.published,
            self.subscribes,
            self.unsubscribes,
            self.published_later,
            self.pubrels,
            self.pubrecs,
            self.disconnects,
        )
        return {row[0] for column in columns for row in column}


@attrs.frozen
class PublishedPart:
    """What became of the messages of one client."""

    client: Client
    what: Any
    rows: list[Row]
    matched: Sequence[bool]
    """By row, whether a subscription matches."""
    refused: Mapping[int, TopicstoreError]
    """The errors of the rows that were refused."""


@attrs.define
class Answers:
    """What became of it all, and what is to be sent."""

    found: list[tuple[Any, list[str] | None]] = attrs.field(factory=list)
    """Filters of stored sessions; None for those that can't be read."""
    opened: list[tuple[Client, Session | TopicstoreError]] = attrs.field(factory=list)
    published: list[PublishedPart] = attrs.field(factory=list)
    released: list[tuple[Client, list[int], Sequence[bool]]] = attrs.field(factory=list)
    """PUBRELs: packet ids that are free, and for each whether it was in use."""
    unknown: list[tuple[Client, list[int]]] = attrs.field(factory=list)
    """PUBRECs of packet ids that are in no exchange."""
    subscribed: list[tuple[Client, list[SubscribeResult | TopicstoreError]]] = attrs.field(factory=list)
    unsubscribed: list[tuple[Client, Sequence[bool | TopicstoreError]]] = attrs.field(factory=list)
    departed: list[tuple[Client, TopicstoreError | None]] = attrs.field(factory=list)
    failed: list[tuple[Client, TopicstoreError]] = attrs.field(factory=list)
    """Clients for whom something failed for which the protocol has no answer; their connections end."""
    delivered: list[tuple[Session, list[Publish | PubRel | DeliveryBatch]]] = attrs.field(factory=list)
    more: bool = False
    """Whether there is more to deliver already."""
    pause: float = 1.0
    """In how many seconds something depends on time again."""
