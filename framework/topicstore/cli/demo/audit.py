"""The comparison of a source with a database: every topic's messages, in order."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import msgspec
import xxhash

from topicstore import Message, matches

__all__ = ["Audit", "Differences", "choose_filter"]

_encode = msgspec.msgpack.Encoder().encode


class _Topic:
    __slots__ = ("content", "count", "times")

    def __init__(self) -> None:
        self.count = 0
        self.content = xxhash.xxh3_128()
        self.times = xxhash.xxh3_128()


@attrs.frozen(kw_only=True)
class Differences:
    """The differences between a source and what was stored of it."""

    lost: int
    doubled: int
    """The number of messages that came twice, or that the source doesn't have."""
    changed: list[str]
    """The topics with as many messages as in the source, but others, or in another order."""

    @property
    def none(self) -> bool:
        """Whether there are no differences."""
        return not (self.lost or self.doubled or self.changed)


class Audit:
    """Counts and checksums by topic, over all fields of its messages in their order."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        """The bytes of topics, client ids and payloads."""
        self.timed = True
        """Whether every message has a time of its own."""
        self._topics: dict[str, _Topic] = {}

    def add(self, messages: Iterable[Message]) -> None:
        """Add the next messages."""
        for m in messages:
            topic = self._topics.get(m.topic)
            if topic is None:
                topic = self._topics[m.topic] = _Topic()
            topic.count += 1
            topic.content.update(_encode((m.client_id, m.payload, m.qos, m.retain, m.properties)))
            topic.times.update(_encode(m.timestamp))
            self.messages += 1
            self.bytes += len(m.topic) + len(m.client_id) + len(m.payload)
            if m.timestamp is None:
                self.timed = False

    def counts(self) -> dict[str, int]:
        """Return the number of messages by topic."""
        return {name: topic.count for name, topic in self._topics.items()}

    def differences(self, stored: Audit) -> Differences:
        """Compare a source with its stored messages. Times count if the source had them for all messages."""
        lost = doubled = 0
        changed = []
        nothing = _Topic()
        for name in self._topics.keys() | stored._topics.keys():
            mine, theirs = self._topics.get(name, nothing), stored._topics.get(name, nothing)
            lost += max(0, mine.count - theirs.count)
            doubled += max(0, theirs.count - mine.count)
            if mine.count == theirs.count and not self._same(mine, theirs):
                changed.append(name)
        return Differences(lost=lost, doubled=doubled, changed=sorted(changed))

    def _same(self, mine: _Topic, theirs: _Topic) -> bool:
        if self.timed and mine.times.digest() != theirs.times.digest():
            return False
        return mine.content.digest() == theirs.content.digest()


def choose_filter(counts: dict[str, int]) -> str:
    """Return a filter with wildcards that matches several topics and a significant part of the messages.

    The last level stays, the levels before it that differ become ``+``: ``plant/+/temperature``.
    """
    plain = {topic: count for topic, count in counts.items() if not topic.startswith("$")}
    if not plain:
        return "#"
    depths: dict[int, list[str]] = {}
    for topic in plain:
        depths.setdefault(topic.count("/"), []).append(topic)
    split = [topic.split("/") for topic in max(depths.values(), key=len)]
    first = split[0]
    shape = [level if all(levels[n] == level for levels in split) else "+" for n, level in enumerate(first)]
    by_last: dict[str, list[int]] = {}
    for levels in split:
        by_last.setdefault(levels[-1], []).append(plain["/".join(levels)])
    total = sum(plain.values())
    good = {last: sum(many) for last, many in by_last.items() if len(many) > 1 and sum(many) <= total / 2}
    if good and "+" in shape[:-1]:
        return "/".join([*shape[:-1], max(good, key=lambda last: good[last])])
    chosen = "/".join(shape)
    return chosen if "+" in chosen and any(matches(chosen, topic) for topic in plain) else "#"
