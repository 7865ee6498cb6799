"""Reserved topics: ``$replay`` filters, which also replay stored messages, and topics that clients can't publish to.

``$replay/<start>/<filter>`` subscribes to ``<filter>`` from ``<start>`` on: ``beginning``, ``now``, a time (``-2h``,
``2025-06-01T12:00``, microseconds), or a cursor (`topicstore.sessions.Start`). It is usable in MQTT 3.1.1, which has no
properties.
``$share/<group>/$replay/<start>/<filter>`` and ``$replay/<start>/$share/<group>/<filter>`` are the same shared
subscription. The session stores only ``<filter>``, so the client may unsubscribe with either filter.
"""

from __future__ import annotations

from collections.abc import Iterable

from topicstore.contract.errors import InvalidFilterError, InvalidMessageError

from .sys_topics import SYS

__all__ = [
    "REPLAY",
    "SHARE",
    "check_published",
    "may_be_published",
    "split_replay",
]

REPLAY = "$replay/"
SHARE = "$share/"


def split_replay(text: str) -> tuple[str, str | None]:
    """Split a client's filter into the subscribed filter and the start; None if it has no start.

    Raises `InvalidFilterError` if the text begins with ``$replay/`` and lacks a part. The returned filter and start are
    not checked.
    """
    if text.startswith(REPLAY):
        start, slash, topic_filter = text[len(REPLAY) :].partition("/")
        if not start or not slash or not topic_filter:
            raise InvalidFilterError(f"filter {text[:80]!r}: it is {REPLAY}<start>/<filter>")
        return topic_filter, start
    if text.startswith(SHARE) and REPLAY in text:
        group, _, behind = text[len(SHARE) :].partition("/")
        if behind.startswith(REPLAY):
            topic_filter, start_text = split_replay(behind)
            return f"{SHARE}{group}/{topic_filter}", start_text
    return text, None


_RESERVED = (SYS, SHARE, REPLAY)


def may_be_published(topic: str, levels: int) -> bool:
    """Return whether a client may publish to a valid topic; ``levels`` is the most levels of a topic."""
    return not topic.startswith(_RESERVED) and topic.count("/") < levels


def check_published(topics: Iterable[str]) -> None:
    """Raise `InvalidMessageError` for the first topic that is reserved for the server."""
    for index, topic in enumerate(topics):
        if topic.startswith(_RESERVED):
            raise InvalidMessageError(f"{topic[:80]!r} begins as the server's own topics do", index)
