"""``$share/<name>/<filter>``: what a shared subscription is of."""

from __future__ import annotations

import attrs

from topicstore.contract.errors import InvalidFilterError
from topicstore.contract.topics import TopicFilter

__all__ = ["SharedFilter", "is_shared", "parse_shared", "read_filter"]

_SHARE = "$share"


@attrs.frozen
class SharedFilter:
    """The filter of a shared subscription, taken apart. Groups are told apart by all of it."""

    text: str
    name: str
    topic_filter: TopicFilter
    """What the group reads."""


def is_shared(text: str) -> bool:
    """Say whether the filter of a subscription is one of a shared subscription."""
    return text.startswith(_SHARE) and text[len(_SHARE) :][:1] in ("", "/")


def parse_shared(text: str) -> SharedFilter:
    """Take the filter of a shared subscription apart. Raises `InvalidFilterError`."""
    _, name, rest = (*text.split("/", 2), "", "")[:3]
    if not (name and rest) or "+" in name or "#" in name:
        raise InvalidFilterError(f"a shared subscription is $share/<name>/<filter>, not {text[:80]!r}")
    return SharedFilter(text, name, TopicFilter(rest))


def read_filter(text: str) -> TopicFilter:
    """Return which topics a subscription with this filter reads."""
    return parse_shared(text).topic_filter if is_shared(text) else TopicFilter(text)
