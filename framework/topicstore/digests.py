"""Digests of messages by topic, which verify that a replay returned exactly the stored messages.

The hashes of a topic's messages are chained: a message that is lost, duplicated, changed or out of order changes the
hash of its topic. Topics are independent of each other, so a replay may return them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import msgspec
import xxhash

from .contract.model import Message
from .contract.topics import TopicFilter

__all__ = ["Differences", "TopicDigests"]

_encode = msgspec.msgpack.Encoder().encode
_hash = xxhash.xxh3_64_intdigest
_MASK = (1 << 64) - 1


@attrs.frozen(kw_only=True)
class Differences:
    """The differences between the messages of a source and the stored messages."""

    lost: int
    """The number of messages of the source that are not stored."""
    doubled: int
    """The number of stored messages beyond those of the source: duplicates, or messages that the source lacks."""
    changed: list[str]
    """The topics with the right number of messages, but with other contents or in another order."""

    @property
    def none(self) -> bool:
        """Whether there are no differences."""
        return not (self.lost or self.doubled or self.changed)


class TopicDigests:
    """The number of messages of each topic, and a chained hash of all their fields.

    Without ``times``, timestamps are left out of the hashes, because a database sets timestamps that were None.
    """

    def __init__(
        self, counts: Mapping[str, int] | None = None, hashes: Mapping[str, int] | None = None, *, times: bool = True
    ) -> None:
        self.counts = dict(counts or {})
        self.hashes = dict(hashes or {})
        self._times = times

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages, which follow those added before."""
        counts, hashes, times = self.counts, self.hashes, self._times
        for m in messages:
            topic = m.topic
            # A retain flag may be 1 or True.
            fields = (m.payload, m.client_id, m.qos, bool(m.retain), m.timestamp if times else None, m.properties)
            hashes[topic] = _hash(_encode(fields), hashes.get(topic, 0))
            counts[topic] = counts.get(topic, 0) + 1

    @property
    def messages(self) -> int:
        """The number of all messages."""
        return sum(self.counts.values())

    def digest(self) -> int:
        """Return one 64-bit hash of all topics, which doesn't depend on the order of topics."""
        return sum(_hash(topic.encode(), chain) for topic, chain in self.hashes.items()) & _MASK

    def matching(self, topic_filter: str) -> TopicDigests:
        """Return the digests of the topics that match a filter."""
        found = list(filter(TopicFilter(topic_filter).matches, self.counts))
        return TopicDigests(
            {topic: self.counts[topic] for topic in found}, {topic: self.hashes[topic] for topic in found}
        )

    def differences(self, stored: TopicDigests) -> Differences:
        """Return the differences between these digests, of a source, and those of the stored messages."""
        mine, theirs = self.counts, stored.counts
        return Differences(
            lost=sum(max(0, count - theirs.get(topic, 0)) for topic, count in mine.items()),
            doubled=sum(max(0, count - mine.get(topic, 0)) for topic, count in theirs.items()),
            changed=sorted(
                topic
                for topic, chain in self.hashes.items()
                if mine[topic] == theirs.get(topic) and chain != stored.hashes[topic]
            ),
        )
