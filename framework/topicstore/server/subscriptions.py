"""The SUBSCRIBEs and UNSUBSCRIBEs of one connection, from the packet to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from topicstore.contract.errors import TopicstoreError
from topicstore.sessions import Session, SubscribeResult

from .access.permissions import Permissions
from .packet_types import SUBACK, UNSUBACK
from .protocol import encoding
from .protocol.packets import SubscribePacket, UnsubscribePacket
from .protocol.reason import PacketError, ReasonCode
from .refusals import text_of
from .serving import Serving
from .subscribing import Subscribing, Unsubscribing

__all__ = ["Subscriber", "Subscriptions"]


class Subscriber(Protocol):
    """The connection. It handles no packet before the one that it has passed on was answered."""

    def answer(self, data: bytes, kind: int, reason: int, granted: Sequence[str]) -> None:
        """Send the answer to the packet.

        kind, reason: its type, and the reason code under which it is counted.
        granted:      the filters of which the client is told what there is now.
        """

    def told(self, text: str, others: int) -> str | None:
        """Return a reason string for a packet with so many other bytes, if the client can and wants to be told."""

    def end(self, reason: ReasonCode, text: str) -> None:
        """End the connection."""


class Subscriptions:
    """Used in the event loop only. A packet is passed on when the one before it was answered."""

    __slots__ = ("_client", "_count", "_current", "_largest", "_serving", "_session", "_version", "permissions")

    def __init__(
        self,
        serving: Serving,
        session: Session,
        version: int,
        permissions: Permissions | None,
        client: Subscriber,
        count: int,
        largest: int | None,
    ) -> None:
        """Make it for one connection.

        permissions: what the client may do; None: everything.
        count:       how many filters the session has.
        largest:     the client's maximum packet size; None: any.
        """
        self._serving, self._session, self._version = serving, session, version
        self.permissions, self._client, self._largest = permissions, client, largest
        self._count = count
        """About how many filters the session has, never fewer."""
        self._current: Subscribing | Unsubscribing | None = None

    def subscribe(self, packet: SubscribePacket) -> None:
        """Take a SUBSCRIBE. Raises `PacketError`."""
        self._check_answer(len(packet.filters))
        subscribing = Subscribing(self._version, packet, self._serving.limits.topic_levels)
        permissions = self.permissions
        if permissions is not None:
            decided = [permissions.decided("subscribe", text) for text in subscribing.open]
            if None in decided:
                self._serving.spawn(self._client, self._decide(subscribing, permissions))
                return
            subscribing.decide(decided)
        self._begin(subscribing)

    def _check_answer(self, filters: int) -> None:
        """Raise `PacketError` if the answer for so many filters would be larger than the client allows."""
        if self._largest is not None and encoding.answer_size(filters) > self._largest:
            text = f"the answer for {filters} filters has more than {self._largest} bytes [MQTT-3.1.2-24]"
            raise PacketError(ReasonCode.PACKET_TOO_LARGE, text)

    async def _decide(self, subscribing: Subscribing, permissions: Permissions) -> None:
        subscribing.decide(await permissions.decide("subscribe", subscribing.open))
        self._begin(subscribing)

    def _begin(self, subscribing: Subscribing) -> None:
        subscribing.limit(self._excess)
        self._count += len(subscribing.open)
        self._current = subscribing
        self._ask(subscribing)

    def _excess(self, filters: list[str]) -> set[str]:
        """Return those of some filters that the session has no room for; there is room for those that it has."""
        most = self._serving.limits.subscriptions
        if self._count + len(filters) <= most:
            return set()
        known = {one.topic_filter for one in self._session.status().subscriptions}
        self._count = len(known)
        excess: set[str] = set()
        for text in filters:
            if text not in known:
                (known if len(known) < most else excess).add(text)
        return excess

    def _ask(self, subscribing: Subscribing) -> None:
        """Ask for the next portion of a packet's filters, or answer it if there are no more."""
        wanted = subscribing.next()
        if wanted:
            self._serving.subscribe(self._client, self._session, wanted)
            return
        told_why = self._serving.settings.authorization.refused_subscription == "not authorized"
        codes = subscribing.codes(ReasonCode.NOT_AUTHORIZED if told_why else ReasonCode.UNSPECIFIED_ERROR)
        failure = subscribing.failure
        told = None if failure is None else self._client.told(text_of(failure), len(codes))
        data = encoding.suback(self._version, subscribing.packet_id, codes, told)
        self._client.answer(data, SUBACK, _worst(codes), subscribing.granted())

    def subscribed(self, results: Sequence[SubscribeResult | TopicstoreError]) -> None:
        """Go on with a SUBSCRIBE of which a portion was asked for."""
        if isinstance(self._current, Subscribing):
            self._current.done(results)
            self._ask(self._current)

    def unsubscribe(self, packet: UnsubscribePacket) -> None:
        """Take an UNSUBSCRIBE. Raises `PacketError`."""
        self._check_answer(len(packet.filters))
        self._current = unsubscribing = Unsubscribing(self._version, packet)
        if unsubscribing.filters:
            self._serving.unsubscribe(self._client, self._session, unsubscribing.filters)
        else:
            self.unsubscribed([])

    def unsubscribed(self, results: Sequence[bool | TopicstoreError]) -> None:
        """Answer an UNSUBSCRIBE."""
        if isinstance(self._current, Unsubscribing):
            codes = self._current.codes(results)
            data = encoding.unsuback(self._version, self._current.packet_id, codes)
            self._client.answer(data, UNSUBACK, _worst(codes), [])


def _worst(codes: Sequence[int]) -> int:
    """Return the highest reason code that is a failure; 0 if there is none."""
    worst = max(codes, default=0)
    return worst if worst >= 0x80 else 0
