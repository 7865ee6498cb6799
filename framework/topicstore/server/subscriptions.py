"""The SUBSCRIBEs and UNSUBSCRIBEs of one connection, from the packet to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from topicstore.contract.errors import TopicstoreError
from topicstore.sessions import Session, SubscribeResult

from .access.permissions import Permissions
from .connecting import Terms
from .packet_types import SUBACK, UNSUBACK
from .protocol import encoding
from .protocol.packets import SubscribePacket, UnsubscribePacket
from .protocol.reason import PacketError, ReasonCode
from .refusals import text_of
from .serving import Serving
from .subscribing import Subscribing, Unsubscribing

__all__ = ["Subscriber", "Subscriptions"]


class Subscriber(Protocol):
    """The connection. It passes on the next packet only after the previous one was answered."""

    def answer(self, data: bytes, kind: int, reason: int, granted: Sequence[str]) -> None:
        """Send the answer to the packet.

        kind, reason: the answer's packet type, and the reason code under which it is counted.
        granted:      the granted filters, for which the client receives the current ``$SYS`` messages.
        """

    def end(self, reason: ReasonCode, text: str) -> None:
        """End the connection."""


class Subscriptions:
    """Handles one client's SUBSCRIBEs and UNSUBSCRIBEs, one packet at a time. Used in the event loop only."""

    __slots__ = ("_client", "_count", "_current", "_serving", "_session", "_terms", "_version", "permissions")

    def __init__(
        self,
        serving: Serving,
        session: Session,
        terms: Terms,
        permissions: Permissions | None,
        client: Subscriber,
        count: int,
    ) -> None:
        """Set up the subscriptions of one connection.

        permissions: the client's permissions; None: everything is allowed.
        count:       number of filters of the session.
        """
        self._serving, self._session, self._terms, self._version = serving, session, terms, terms.packet.version
        self.permissions, self._client = permissions, client
        self._count = count
        """Upper bound of the number of the session's filters."""
        self._current: Subscribing | Unsubscribing | None = None

    def change(self, packet: SubscribePacket | UnsubscribePacket) -> None:
        """Begin to handle a SUBSCRIBE or an UNSUBSCRIBE. Raises `PacketError`."""
        if isinstance(packet, SubscribePacket):
            self._subscribe(packet)
        else:
            self._unsubscribe(packet)

    def _subscribe(self, packet: SubscribePacket) -> None:
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
        largest = self._terms.packet.maximum_packet_size
        if largest is not None and encoding.answer_size(filters) > largest:
            text = f"the answer for {filters} filters has more than {largest} bytes [MQTT-3.1.2-24]"
            raise PacketError(ReasonCode.PACKET_TOO_LARGE, text)

    async def _decide(self, subscribing: Subscribing, permissions: Permissions) -> None:
        subscribing.decide(await permissions.decide("subscribe", subscribing.open))
        self._begin(subscribing)

    def _begin(self, subscribing: Subscribing) -> None:
        subscribing.limit(self._excess)
        self._count += len(subscribing.open)
        self._current = subscribing
        if subscribing.wanted:
            self._serving.subscribe(self._client, self._session, subscribing.wanted)
        else:
            self.subscribed([])

    def _excess(self, filters: list[str]) -> set[str]:
        """Return the filters that exceed the session's limit; a filter that the session already has never does."""
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

    def subscribed(self, results: Sequence[SubscribeResult | TopicstoreError]) -> None:
        """Add the results of a portion of a SUBSCRIBE; answer the packet after the last one."""
        subscribing = self._current
        if isinstance(subscribing, Subscribing) and subscribing.done(results):
            told_why = self._serving.settings.authorization.refused_subscription == "not authorized"
            codes = subscribing.codes(ReasonCode.NOT_AUTHORIZED if told_why else ReasonCode.UNSPECIFIED_ERROR)
            failure = subscribing.failure
            reason_string = None if failure is None else self._terms.reason_string(text_of(failure), len(codes))
            data = encoding.suback(self._version, subscribing.packet_id, codes, reason_string)
            self._client.answer(data, SUBACK, _worst(codes), subscribing.granted())

    def _unsubscribe(self, packet: UnsubscribePacket) -> None:
        self._check_answer(len(packet.filters))
        self._current = unsubscribing = Unsubscribing(self._version, packet)
        if unsubscribing.filters:
            self._serving.unsubscribe(self._client, self._session, unsubscribing.filters)
        else:
            self.unsubscribed([])

    def unsubscribed(self, results: Sequence[bool | TopicstoreError]) -> None:
        """Add the results of a portion of an UNSUBSCRIBE; answer the packet after the last one."""
        unsubscribing = self._current
        if isinstance(unsubscribing, Unsubscribing) and unsubscribing.done(results):
            codes = unsubscribing.codes()
            data = encoding.unsuback(self._version, unsubscribing.packet_id, codes)
            self._client.answer(data, UNSUBACK, _worst(codes), [])


def _worst(codes: Sequence[int]) -> int:
    """Return the highest reason code that is a failure; 0 if there is none."""
    worst = max(codes, default=0)
    return worst if worst >= 0x80 else 0
