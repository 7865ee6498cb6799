"""``$share/<name>/<filter>``: the filters of shared subscriptions (MQTT 5, section 4.8.2)."""

from __future__ import annotations

import attrs

from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.topics import TopicFilter

__all__ = ["SharedFilter", "is_shared", "parse_shared", "read_filter"]

_SHARE = "$share"


@attrs.frozen
class SharedFilter:
    """The parts of a shared subscription's filter. The whole filter identifies a group."""

    text: str
    name: str
    topic_filter: TopicFilter
    """The filter that the group reads."""


def is_shared(text: str) -> bool:
    """Return whether a filter is that of a shared subscription."""
    return text.startswith(_SHARE) and text[len(_SHARE) :][:1] in ("", "/")


def parse_shared(text: str) -> SharedFilter:
    """Return the parts of a shared subscription's filter. Raises `InvalidFilterError`."""
    _, name, rest = (*text.split("/", 2), "", "")[:3]
    if not (name and rest) or "+" in name or "#" in name:
        raise InvalidFilterError(f"a shared subscription is $share/<name>/<filter>, not {text[:80]!r}")
    return SharedFilter(text, name, TopicFilter(rest))


def read_filter(text: str) -> TopicFilter:
    """Return the topic filter of a subscription, without the ``$share/<name>/`` of a shared one."""
    return parse_shared(text).topic_filter if is_shared(text) else TopicFilter(text)
