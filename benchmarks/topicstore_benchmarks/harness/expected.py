"""The messages that replays must return, and checks of replays against them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from topicstore import Message
from topicstore.digests import TopicDigests

__all__ = ["ExpectedReplay", "WrongReplayError"]


class WrongReplayError(Exception):
    """A replay returned other messages than were stored, or in another order. Its time doesn't count."""


class ExpectedReplay(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that one replay must return."""

    topic_filter: str
    start: int
    messages: int
    topics: int
    digest: int

    @classmethod
    def of(cls, digests: TopicDigests, topic_filter: str = "#", start: int = 0) -> ExpectedReplay:
        """Return the expected replay of messages that all match a request."""
        return cls(
            topic_filter=topic_filter,
            start=start,
            messages=digests.messages,
            topics=len(digests.counts),
            digest=digests.digest(),
        )

    def check_count(self, messages: int) -> None:
        """Raise `WrongReplayError` unless the number of messages is right."""
        if messages != self.messages:
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave {messages:,} of {self.messages:,} messages")

    def check(self, replay: Iterable[Message]) -> None:
        """Raise `WrongReplayError` unless a replay returns every message, unchanged, with each topic's in order."""
        given = TopicDigests()
        given.add(replay)
        self.check_count(given.messages)
        if (len(given.counts), given.digest()) != (self.topics, self.digest):
            what = f"{self.topic_filter!r} from {self.start}"
            raise WrongReplayError(f"a replay of {what} gave messages that were changed, or in another order")
