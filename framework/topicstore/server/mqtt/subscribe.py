"""SUBSCRIBE and UNSUBSCRIBE of one connection. Each filter is checked and granted or refused on its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import attrs

from topicstore.contract.errors import InvalidFilterError, TopicstoreError
from topicstore.contract.topics import TopicFilter
from topicstore.server.access.permissions import Permissions
from topicstore.server.codec import encode as encoding
from topicstore.server.codec.packets import SUBACK, UNSUBACK, SubscribePacket, UnsubscribePacket
from topicstore.server.codec.reason import PacketError, ReasonCode, reason_of, text_of
from topicstore.sessions import START_PROPERTY, Session, SubscribeOptions, SubscribeResult

from .connect import Terms
from .connections import Serving
from .reserved_topics import REPLAY, SHARE, split_replay
from .store_thread import Wanted
from .sys_topics import is_sys_filter

__all__ = [
    "Subscriber",
    "Subscribing",
    "Subscriptions",
    "Unsubscribing",
]


@attrs.define
class _Line:
    """One filter of a SUBSCRIBE."""

    reason: ReasonCode | None
    """The reason code of the refusal; None while the filter is not refused."""
    wanted: Wanted | None
    shown: str = ""
    """The topic filter without ``$share/<group>/``."""


class Subscribing:
    """The state of one SUBSCRIBE until its SUBACK."""

    __slots__ = ("_lines", "_results", "packet_id", "version", "wanted")

    def __init__(self, version: int, packet: SubscribePacket, levels: int) -> None:
        """``levels`` is the most levels of a filter. Raises `PacketError`."""
        self.version, self.packet_id = version, packet.packet_id
        self.wanted: list[Wanted] = []
        """The subscriptions to request from the session; set by `limit`."""
        self._results: list[SubscribeResult | TopicstoreError] = []
        start = next((value for name, value in packet.user_properties if name == START_PROPERTY), None)
        self._lines = [
            _line(version, text, option, packet.identifier, start, levels) for text, option in packet.filters
        ]

    @property
    def open(self) -> list[str]:
        """The filters that are not refused, without ``$share/<group>/``."""
        return [line.shown for line in self._lines if line.reason is None]

    def decide(self, allowed: Sequence[bool | None]) -> list[str]:
        """Refuse the filters of `open` that are not allowed, and return them."""
        lines = [line for line in self._lines if line.reason is None]
        denied = [line for line, good in zip(lines, allowed, strict=True) if not good]
        for line in denied:
            line.reason = ReasonCode.NOT_AUTHORIZED
        return [line.shown for line in denied]

    def limit(self, excess: Callable[[list[str]], Collection[str]]) -> None:
        """Refuse filters above the limit; ``excess`` returns the filters for which the session has no room."""
        lines = [(line, line.wanted.topic_filter) for line in self._lines if line.reason is None and line.wanted]
        refused = excess([topic_filter for _, topic_filter in lines])
        for line, topic_filter in lines:
            if topic_filter in refused:
                line.reason = ReasonCode.QUOTA_EXCEEDED
        self.wanted = [line.wanted for line in self._lines if line.reason is None and line.wanted is not None]

    def done(self, results: Sequence[SubscribeResult | TopicstoreError]) -> bool:
        """Add the results of the next portion of `wanted`; return whether it was the last."""
        self._results += results
        return len(self._results) == len(self.wanted)

    @property
    def failure(self) -> TopicstoreError | None:
        """The first error of the store, for the reason string; None if there is none."""
        return next((result for result in self._results if isinstance(result, TopicstoreError)), None)

    def codes(self, forbidden: ReasonCode) -> list[int]:
        """Return the codes of the SUBACK, once all results are there; ``forbidden`` is the code of denied filters."""
        left = iter(self._results)
        codes: list[int] = []
        for line in self._lines:
            if line.reason is None and line.wanted is not None:
                result = next(left)
                if not isinstance(result, TopicstoreError):
                    codes.append(line.wanted.options.qos)
                    continue
                line.reason = _reason(result)
            reason = forbidden if line.reason == ReasonCode.NOT_AUTHORIZED else line.reason
            codes.append(int(reason or 0) if self.version == 5 else 0x80)
        return codes

    def granted(self) -> list[str]:
        """Return the granted filters. Must be called after `codes`."""
        return [line.shown for line in self._lines if line.reason is None]


class Unsubscribing:
    """The state of one UNSUBSCRIBE until its UNSUBACK."""

    __slots__ = ("_filters", "_results", "filters", "packet_id", "version")

    def __init__(self, version: int, packet: UnsubscribePacket) -> None:
        self.version, self.packet_id = version, packet.packet_id
        self._filters = [_stripped(text) for text in packet.filters]
        self.filters = [text for text in self._filters if text is not None]
        """The filters to remove from the session."""
        self._results: list[bool | TopicstoreError] = []

    def done(self, results: Sequence[bool | TopicstoreError]) -> bool:
        """Add the results of the next portion of `filters`; return whether it was the last."""
        self._results += results
        return len(self._results) == len(self.filters)

    def codes(self) -> list[int]:
        """Return the codes of the UNSUBACK, once all results are there."""
        left = iter(self._results)
        codes: list[int] = []
        for text in self._filters:
            result = ReasonCode.TOPIC_FILTER_INVALID if text is None else next(left)
            if isinstance(result, TopicstoreError):
                codes.append(reason_of(result))
            elif isinstance(result, ReasonCode):
                codes.append(result)
            else:
                codes.append(ReasonCode.SUCCESS if result else ReasonCode.NO_SUBSCRIPTION_EXISTED)
        return codes


def _line(version: int, text: str, option: int, identifier: int, start: str | None, levels: int) -> _Line:
    try:
        topic_filter, own_start = split_replay(text)
        group, shown = _shared(topic_filter)
        _check(shown, levels)
        if group is not None:
            TopicFilter(topic_filter)
    except InvalidFilterError:
        return _Line(ReasonCode.TOPIC_FILTER_INVALID, None)
    no_local = version == 5 and bool(option & 4)
    if no_local and group is not None:
        raise PacketError(ReasonCode.PROTOCOL_ERROR, "a shared subscription can't have No Local [MQTT-3.8.3-4]")
    qos = option & 3
    if is_sys_filter(shown):
        if group is not None:  # shared subscriptions read stored messages, and `$SYS` messages aren't stored
            return _Line(ReasonCode.NOT_AUTHORIZED, None)
        qos = 0
    options = SubscribeOptions(
        qos,
        no_local,
        version == 5 and bool(option & 8),
        option >> 4 & 3 if version == 5 else 0,
        identifier,
    )
    return _Line(None, Wanted(topic_filter, options, own_start if own_start is not None else start), shown)


def _shared(text: str) -> tuple[str | None, str]:
    """Split a filter into the group of a shared subscription, None if it is not shared, and the topic filter."""
    if not text.startswith(SHARE):
        return None, text
    group, slash, shown = text[len(SHARE) :].partition("/")
    if not group or not slash or "+" in group or "#" in group:
        raise InvalidFilterError(f"filter {text[:80]!r}: it is {SHARE}<group>/<filter> [MQTT-4.8.2-1]")
    return group, shown


def _check(shown: str, levels: int) -> None:
    """Raise `InvalidFilterError` for an invalid filter, too many levels, or a second special prefix."""
    TopicFilter(shown)
    if shown.count("/") >= levels:
        raise InvalidFilterError(f"filter {shown[:80]!r} has more than {levels} levels")
    if shown.startswith((REPLAY, SHARE)):
        raise InvalidFilterError(f"filter {shown[:80]!r}: what is within a special filter is a plain one")


def _stripped(text: str) -> str | None:
    try:
        topic_filter, _ = split_replay(text)
        TopicFilter(topic_filter)
    except InvalidFilterError:
        return None
    return topic_filter


def _reason(error: TopicstoreError) -> ReasonCode:
    """Return the reason code of a failed subscription; an invalid start makes the filter invalid."""
    reason = reason_of(error)
    return ReasonCode.TOPIC_FILTER_INVALID if reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR else reason


class Subscriber(Protocol):
    """The interface of a connection, which passes on a packet only after the previous packet was answered."""

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
        """The packet that was not answered yet; None if there is none."""

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
            self._serving.deny(permissions, "subscribe", subscribing.decide(decided))
        self._begin(subscribing)

    def _check_answer(self, filters: int) -> None:
        """Raise `PacketError` if the answer for so many filters would be larger than the client allows."""
        largest = self._terms.packet.maximum_packet_size
        if largest is not None and encoding.answer_size(filters) > largest:
            text = f"the answer for {filters} filters has more than {largest} bytes [MQTT-3.1.2-24]"
            raise PacketError(ReasonCode.PACKET_TOO_LARGE, text)

    async def _decide(self, subscribing: Subscribing, permissions: Permissions) -> None:
        denied = subscribing.decide(await permissions.decide("subscribe", subscribing.open))
        self._serving.deny(permissions, "subscribe", denied)
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
            self._current = None
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
            self._current = None
            codes = unsubscribing.codes()
            data = encoding.unsuback(self._version, unsubscribing.packet_id, codes)
            self._client.answer(data, UNSUBACK, _worst(codes), [])


def _worst(codes: Sequence[int]) -> int:
    """Return the highest reason code that is a failure; 0 if there is none."""
    worst = max(codes, default=0)
    return worst if worst >= 0x80 else 0
