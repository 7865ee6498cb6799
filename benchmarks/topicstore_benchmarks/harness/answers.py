"""The answers that replays must return, and checks of replays against them.

The hashes of each topic's messages are chained, so that a message that is lost, duplicated, changed or out of
order changes the hash of its topic. The hashes of all topics, in whatever order these come, make the
*digest* of a replay. Messages stored later extend the chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash
from topicstore import Message, TopicFilter

__all__ = ["Answer", "Chains", "WrongReplayError"]

_encode = msgspec.msgpack.Encoder().encode
_hash = xxhash.xxh3_64_intdigest
_MASK = (1 << 64) - 1


class WrongReplayError(Exception):
    """A replay returned other messages than were stored, or in another order. Its time doesn't count."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that one replay must return."""

    topic_filter: str
    start: int
    messages: int
    topics: int
    digest: int

    def check_count(self, messages: int) -> None:
        """Raise `WrongReplayError` unless the number of messages is right."""
        if messages != self.messages:
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave {messages:,} of {self.messages:,} messages")

    def check(self, replay: Iterable[Message]) -> None:
        """Raise `WrongReplayError` unless a replay returns every message, unchanged, with each topic's in order."""
        given = Chains()
        given.add(replay)
        self.check_count(given.messages)
        if (len(given.hashes), given.digest()) != (self.topics, self.digest):
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave messages that were changed, or in another order")


class Chains:
    """The hash of each topic."""

    def __init__(self, hashes: dict[str, int] | None = None, messages: int = 0) -> None:
        self.hashes = {} if hashes is None else hashes
        self.messages = messages

    def add(self, messages: Iterable[Message]) -> None:
        """Add messages to the chains of their topics."""
        hashes, count = self.hashes, 0
        for message in messages:
            topic = message.topic
            hashes[topic] = _hash(_encode(_values(message)), hashes.get(topic, 0))
            count += 1
        self.messages += count

    def digest(self) -> int:
        """Return the digest of all topics."""
        return sum(_hash(topic.encode(), chain) for topic, chain in self.hashes.items()) & _MASK

    def answer(self, topic_filter: str, start: int) -> Answer:
        """Return the answer to a request that all these messages match."""
        return Answer(
            topic_filter=topic_filter,
            start=start,
            messages=self.messages,
            topics=len(self.hashes),
            digest=self.digest(),
        )

    def matching(self, topic_filter: str, counts: Mapping[str, int]) -> Answer:
        """Return the answer to a filter, of the topics that match it; ``counts`` are the messages of each topic."""
        matches = TopicFilter(topic_filter).matches
        found = {topic: chain for topic, chain in self.hashes.items() if matches(topic)}
        return Chains(found, sum(map(counts.__getitem__, found))).answer(topic_filter, 0)


def _values(message: Message) -> tuple[Any, ...]:
    """Return all values of a message except its topic. A retain flag may be 1 or True."""
    m = message
    return m.payload, m.client_id, m.qos, bool(m.retain), m.timestamp, m.properties
