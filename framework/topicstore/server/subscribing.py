"""The filters of a SUBSCRIBE or UNSUBSCRIBE: checked, stripped of ``$replay``, and granted or refused one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from topicstore.contract.errors import InvalidFilterError, TopicstoreError
from topicstore.contract.topics import TopicFilter
from topicstore.sessions import START_PROPERTY, SubscribeOptions, SubscribeResult

from .asked import Wanted
from .protocol.packets import SubscribePacket, UnsubscribePacket
from .protocol.reason import PacketError, ReasonCode
from .refusals import reason_of
from .replay_topics import REPLAY, SHARE, split_replay
from .sys_topics import is_sys_filter

__all__ = ["Subscribing", "Unsubscribing"]


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

    def decide(self, allowed: Sequence[bool | None]) -> None:
        """Refuse the filters of `open` that are not allowed."""
        lines = [line for line in self._lines if line.reason is None]
        for line, good in zip(lines, allowed, strict=True):
            if not good:
                line.reason = ReasonCode.NOT_AUTHORIZED

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
