"""Topic names and topic filters by the rules of MQTT 5.

Source: MQTT Version 5.0 (OASIS Standard), sections 1.5.4 and 4.7.
Matching compares whole levels, and nothing is normalised: ``a//b`` has an empty level, and
``/a`` differs from ``a``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import InvalidArgumentError, InvalidFilterError, InvalidTopicError

__all__ = ["MAX_TOPIC_BYTES", "TopicFilter", "check_topic", "check_utf8", "matches", "matches_any"]

MAX_TOPIC_BYTES = 65_535
"""The largest size of a topic, a filter or a client id in bytes of UTF-8 (section 1.5.4)."""


def check_utf8(text: object, what: str, error: type[InvalidArgumentError]) -> str:
    """Return a text if MQTT can carry it: it has no NUL, no unpaired surrogate, and at most `MAX_TOPIC_BYTES` bytes.

    Raises ``error`` otherwise.
    """
    if not isinstance(text, str):
        raise error(f"a {what} is a str, not {type(text).__name__}")
    if "\0" in text:
        raise error(f"{what} {text[:80]!r} contains NUL")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as bad:
        raise error(f"{what} {text[:80]!r} is not valid Unicode: {bad.reason}") from None
    if size > MAX_TOPIC_BYTES:
        raise error(f"{what} {text[:40]!r}… has {size:,} bytes, more than {MAX_TOPIC_BYTES:,}")
    return text


def _check_text(text: object, what: str, error: type[InvalidArgumentError]) -> str:
    if text == "":
        raise error(f"a {what} has at least one character")
    return check_utf8(text, what, error)


def check_topic(topic: object) -> str:
    """Return ``topic`` if a message can be published to it.

    Raises `InvalidTopicError` if it is not a str, is empty, is longer than 65,535 bytes of UTF-8, or has
    a NUL, an unpaired surrogate or a wildcard character.
    """
    text = _check_text(topic, "topic", InvalidTopicError)
    if "+" in text or "#" in text:
        raise InvalidTopicError(f"topic {text[:80]!r} contains a wildcard; those belong in filters")
    return text


class TopicFilter:
    """A validated topic filter, split once so that matching is quick.

    Raises `InvalidFilterError` if ``text`` breaks the rules. Filters are equal if their texts are, and hashable.
    """

    __slots__ = ("_open_ended", "levels", "literal", "text")

    def __init__(self, text: str) -> None:
        self.text = _check_text(text, "filter", InvalidFilterError)
        self.levels = tuple(text.split("/"))
        for number, level in enumerate(self.levels, 1):
            if level != "+" and "+" in level:
                raise InvalidFilterError(f"filter {text[:80]!r}: '+' must be alone in its level")
            if "#" in level and (level != "#" or number != len(self.levels)):
                raise InvalidFilterError(f"filter {text[:80]!r}: '#' must be alone in the last level")
        self._open_ended = self.levels[-1] == "#"
        self.literal = not self._open_ended and "+" not in self.levels
        """Whether the filter has no wildcard, so that it matches only the topic with the same text."""

    def level(self, depth: int) -> str:
        """Return the text required at level ``depth`` of a topic, counted from 0; ``+`` if any or no level matches."""
        if depth < len(self.levels) and self.levels[depth] != "#":
            return self.levels[depth]
        return "+"

    def matches(self, topic: str) -> bool:
        """Return whether ``topic``, a valid topic name, matches."""
        if self.literal:
            return topic == self.text
        mine = self.levels
        if topic[0] == "$" and mine[0][:1] in ("+", "#"):
            return False
        theirs = topic.split("/")
        if self._open_ended:
            mine = mine[:-1]
            if len(theirs) < len(mine):
                return False
        elif len(theirs) != len(mine):
            return False
        return all(a in ("+", b) for a, b in zip(mine, theirs, strict=False))

    def covers(self, other: TopicFilter) -> bool:
        """Return whether this filter certainly matches every topic that another filter matches. False may be wrong."""
        if other._open_ended and not (self._open_ended and len(self.levels) <= len(other.levels)):
            return False
        return self.matches(other.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicFilter) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"TopicFilter({self.text!r})"


def matches_any(topic_filters: Iterable[TopicFilter], topic: str) -> bool:
    """Return whether ``topic``, a valid topic name, matches one of the filters."""
    return any(topic_filter.matches(topic) for topic_filter in topic_filters)


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether ``topic`` matches ``topic_filter``; both are checked first."""
    return TopicFilter(topic_filter).matches(check_topic(topic))
