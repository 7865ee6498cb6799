"""The batch of requests that the event loop passes to the store's thread, and the responses that it returns.

Both are columns: for each kind of request, a list with the requests of all clients. The store's thread treats a client
as an opaque handle, by which the event loop finds the connection.
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
from topicstore.sessions.delivery_batch import Allow

__all__ = ["Client", "Departure", "PublishedPart", "RequestBatch", "Responses", "Row", "Wanted"]

Client = Any
"""A connection, as the event loop knows it."""
Row = tuple[Session, Message, int]
"""A message that a client publishes: its session, the message and the packet id, 0 at QoS 0."""


@attrs.frozen
class Wanted:
    """A requested subscription."""

    topic_filter: str
    options: SubscribeOptions
    start: Start


@attrs.frozen
class Departure:
    """The terms of a client's DISCONNECT: whether its will is sent, and its session's expiry."""

    session: Session
    send_will: bool
    expiry_interval: float | Keep | None
    """Seconds that the session lasts after the DISCONNECT; None: for ever; `KEEP`: as the CONNECT said."""


@attrs.define
class RequestBatch:
    """The requests of all clients since the last batch; the kinds stand in the order in which they are served."""

    lookups: list[tuple[Any, str]] = attrs.field(factory=list)
    """Futures that receive the filters of a client's stored session, each with the client id."""
    restricted: list[tuple[Session, Allow | None]] = attrs.field(factory=list)
    """Sessions whose clients' rights have changed, with the function that decides which messages they may receive."""
    connects: list[tuple[Client, Connect, list[str]]] = attrs.field(factory=list)
    """The last field: the filters of the stored session that the client may no longer subscribe to."""
    published: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """The second field: the data that the event loop needs for the acknowledgements."""
    subscribes: list[tuple[Client, Session, list[Wanted]]] = attrs.field(factory=list)
    unsubscribes: list[tuple[Client, Session, list[str]]] = attrs.field(factory=list)
    published_later: list[tuple[Client, Any, list[Row]]] = attrs.field(factory=list)
    """As `published`, for messages that arrived after the first change of subscriptions, which applies to them."""
    pubrels: list[tuple[Client, Session, list[int]]] = attrs.field(factory=list)
    pubrecs: list[tuple[Client, Session, list[int], bool]] = attrs.field(factory=list)
    """The last field: whether the client accepted the messages."""
    disconnects: list[tuple[Client, Departure]] = attrs.field(factory=list)
    lost: list[Session] = attrs.field(factory=list)
    figures: list[Message] = attrs.field(factory=list)
    """Messages of the server itself (``$SYS``), which are not stored."""

    @property
    def resubscribing(self) -> bool:
        """Whether a request changes subscriptions."""
        return bool(self.subscribes or self.unsubscribes)

    @property
    def changing(self) -> bool:
        """Whether a request begins or ends a connection, or changes subscriptions."""
        return bool(self.subscribes or self.unsubscribes or self.connects or self.disconnects or self.lost)

    def clients(self) -> set[Client]:
        """Return all clients that wait for a response."""
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
    """The results of one client's publishes."""

    client: Client
    what: Any
    rows: list[Row]
    matched: Sequence[bool]
    """For each row, whether a subscription matches."""
    refused: Mapping[int, TopicstoreError]
    """The errors of refused messages, by row number."""


@attrs.define
class Responses:
    """The results of a batch of requests, and the packets to be sent."""

    found: list[tuple[Any, list[str] | None]] = attrs.field(factory=list)
    """The futures of `RequestBatch.lookups`, with the filters of the stored session; None if it can't be read."""
    opened: list[tuple[Client, Session | TopicstoreError]] = attrs.field(factory=list)
    published: list[PublishedPart] = attrs.field(factory=list)
    released: list[tuple[Client, list[int], Sequence[bool]]] = attrs.field(factory=list)
    """PUBRELs: packet ids that are free, and for each whether it was in use."""
    unknown: list[tuple[Client, list[int]]] = attrs.field(factory=list)
    """PUBRECs whose packet ids are not in use."""
    subscribed: list[tuple[Client, list[SubscribeResult | TopicstoreError]]] = attrs.field(factory=list)
    unsubscribed: list[tuple[Client, Sequence[bool | TopicstoreError]]] = attrs.field(factory=list)
    departed: list[tuple[Client, TopicstoreError | None]] = attrs.field(factory=list)
    failed: list[tuple[Client, TopicstoreError]] = attrs.field(factory=list)
    """Clients for which a request failed that the protocol can't answer; their connections end."""
    delivered: list[tuple[Session, list[Publish | PubRel | DeliveryBatch]]] = attrs.field(factory=list)
    more: bool = False
    """Whether more messages are ready for delivery."""
    pause: float = 1.0
    """Seconds until the sessions' next timer is due."""
