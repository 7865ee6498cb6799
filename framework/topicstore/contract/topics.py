"""Topic names and topic filters by the rules of MQTT 5.

Source: MQTT Version 5.0 (OASIS Standard), sections 1.5.4 and 4.7.
Matching works on whole levels; nothing is normalised, so ``a//b`` has an empty level and
``/a`` differs from ``a``.
"""

from __future__ import annotations

from .errors import InvalidArgumentError, InvalidFilterError, InvalidTopicError

__all__ = ["MAX_TOPIC_BYTES", "TopicFilter", "check_topic", "check_utf8", "matches"]

MAX_TOPIC_BYTES = 65_535
"""Most bytes of a topic, a filter or a client id, in UTF-8."""


def check_utf8(text: object, what: str, error: type[InvalidArgumentError]) -> str:
    """Return a text that MQTT can carry: no NUL, no unpaired surrogate, at most `MAX_TOPIC_BYTES`."""
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

    Raises `InvalidTopicError` otherwise: not a str, empty, over 65,535 bytes of UTF-8,
    a NUL or an unpaired surrogate in it, or a wildcard character.
    """
    text = _check_text(topic, "topic", InvalidTopicError)
    if "+" in text or "#" in text:
        raise InvalidTopicError(f"topic {text[:80]!r} contains a wildcard; those belong in filters")
    return text


class TopicFilter:
    """A validated topic filter, split once so that matching is quick.

    Raises `InvalidFilterError` if ``text`` breaks the rules. Equal if the texts are equal; hashable.
    """

    __slots__ = ("_literal", "_open_ended", "levels", "text")

    def __init__(self, text: str) -> None:
        self.text = _check_text(text, "filter", InvalidFilterError)
        self.levels = tuple(text.split("/"))
        for number, level in enumerate(self.levels, 1):
            if level != "+" and "+" in level:
                raise InvalidFilterError(f"filter {text[:80]!r}: '+' must be alone in its level")
            if "#" in level and (level != "#" or number != len(self.levels)):
                raise InvalidFilterError(f"filter {text[:80]!r}: '#' must be alone in the last level")
        self._open_ended = self.levels[-1] == "#"
        self._literal = not self._open_ended and "+" not in self.levels

    @property
    def literal(self) -> bool:
        """True if there is no wildcard in it: it matches the one topic that it spells."""
        return self._literal

    def level(self, depth: int) -> str:
        """Return what is asked of a level, counted from 0: its text, or ``+`` if it may be any, or missing."""
        if depth < len(self.levels) and self.levels[depth] != "#":
            return self.levels[depth]
        return "+"

    def matches(self, topic: str) -> bool:
        """Say whether ``topic``, a valid topic name, matches."""
        if self._literal:
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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicFilter) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"TopicFilter({self.text!r})"


def matches(topic_filter: str, topic: str) -> bool:
    """Say whether ``topic`` matches ``topic_filter``; both are checked first."""
    return TopicFilter(topic_filter).matches(check_topic(topic))
