"""Filters by which a client asks for the history, also one of MQTT 3.1.1, which has no properties.

``$replay/<start>/<filter>`` is a subscription of ``<filter>`` that begins at ``<start>``: ``beginning``, ``now``, a
time as people write it (``-2h``, ``2025-06-01T12:00``, microseconds), or a place (`topicstore.sessions.Start`).
``$share/<group>/$replay/<start>/<filter>`` and ``$replay/<start>/$share/<group>/<filter>`` are the same shared
subscription. The session has it as ``<filter>``, so it is unsubscribed by either name.
"""

from __future__ import annotations

from topicstore.contract.errors import InvalidFilterError

__all__ = ["REPLAY", "SHARE", "split_replay"]

REPLAY = "$replay/"
SHARE = "$share/"


def split_replay(text: str) -> tuple[str, str | None]:
    """Return the filter that a client means, and where it is to begin; None if it says nothing of that.

    Raises `InvalidFilterError` if it begins as such a filter and isn't one. Whether what is behind it is a filter, and
    the start a time, is for others to check.
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
