"""The retained messages that a subscription is sent, before the messages of its streams.

They are looked up in pages while the client has room, not when it subscribes. So each is the one that its topic has
when its page is read: one that was replaced after the client subscribed is sent in its newer form, and one that was
cleared or has expired is not sent (MQTT 5, section 3.3.1.3, leaves open which of these is right at which moment).

The subscription's other messages wait until the last retained one is handed out. Each of them is either newer than the
retained message of its topic or followed by that one, so what a client was sent last for a topic is what was published
last for it. A retained message that can't be read therefore holds up its subscription, and `Session.failure` says so.

A subscription with a ``start`` gets no retained message that its stream brings in any case, because it was stored and
comes after the start. Those that were set before the start, or are not in the streams, come first all the same.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.pubsub.message_expiry import left_of
from topicstore.shard.state import FrameworkWrite

from .database_parts import RetainedMessages
from .portions import Portion
from .records import VERSION, Keys, put
from .sources import FeedSource, Source

__all__ = ["RetainedSource"]

_FEWEST, _MOST = 64, 256
"""How many messages are looked up at a time: not fewer, however little room there is, because the others are kept for
the next reads; not more, because others wait meanwhile."""


class RetainedSource(Source):
    """The retained messages that a subscription is sent, in order of topics.

    The last topic that was delivered is its place. After a resumption it goes on after that topic, with the retained
    messages that there are then.
    """

    __slots__ = (
        "_began",
        "_failing",
        "_feed",
        "_following",
        "_keys",
        "_messages",
        "_moved",
        "_options",
        "_page",
        "_replays",
        "_sent",
        "_since",
        "limited",
        "number",
        "topic_filter",
    )

    cost = 16  # it looks up a page

    def __init__(
        self, keys: Keys, feed: FeedSource, messages: RetainedMessages, *, replays: bool, behind: str | None = None
    ) -> None:
        """Send the retained messages of a subscription.

        replays: whether some of them may be in what its stream has still to read.
        behind:  the last topic sent, if that is stored.
        """
        self.topic_filter = feed.topic_filter
        self.number = feed.number
        self.limited = feed.options.qos > 0 or behind is not None  # a stored source stays limited
        self._keys = keys
        self._feed = feed
        self._messages = messages
        self._replays = replays
        self._options = feed.options
        """The options of now: a later change is not for these messages, which may be sent without packet ids."""
        self._page: collections.deque[Message] = collections.deque()
        """Messages that are read and not handed out."""
        self._since = 0
        """The time at which the rest of the expiry intervals of these was counted."""
        self._following: str | None = behind + "\0" if behind else ""
        """The start of the next page; None after the last one."""
        self._began: str | None = self._following
        """The start of what isn't settled; None if all is."""
        self._sent = behind or ""
        """The last topic that was handed out."""
        self._moved = False
        self._failing = False
        """Whether a page could not be read."""

    def begin(self) -> None:
        """Let the subscription's other messages wait."""
        self._feed.hold()

    @property
    def done(self) -> bool:
        """Whether everything was handed out."""
        return self._began is None

    @property
    def ended(self) -> bool:
        """Whether all is read, and handed out once it is committed."""
        return self._following is None and not self._page

    def everything(self) -> list[StateWrite]:
        """Return the writes that record that these messages are to be sent, or remove the record of earlier ones."""
        key = self._keys.retained(self.number)
        return [put(key, (VERSION, "")) if self.limited else FrameworkWrite(key, None)]

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if all were returned. Reads a page at most."""
        if self.ended or self._failing:
            return None
        if not self._page and self._following is not None:
            try:
                page = self._messages.page(self.topic_filter, self._following, min(max(limit, _FEWEST), _MOST), now)
                messages = self._not_replayed(page.messages) if self._replays else page.messages
            except TopicstoreError:
                self._failing = True
                raise
            self._page.extend(messages)
            self._following, self._since = page.following, now
        taken = [self._page.popleft() for _ in range(min(limit, len(self._page)))]
        if taken:
            self._sent = taken[-1].topic
        self._moved = bool(self._moved or taken or self.ended)
        if self.ended:
            self._feed.release()  # what it reads from now on is committed with this or later
        return self._portion(taken, now)

    def _not_replayed(self, messages: Sequence[Message]) -> list[Message]:
        """Return those of retained messages that the stream, which waits meanwhile, won't bring."""
        places = self._messages.places([message.topic for message in messages])
        wanted: dict[int, list[int]] = {}
        for shard, position in places:
            wanted.setdefault(shard, []).append(position)
        found = {shard: self._feed.will_read(shard, positions) for shard, positions in wanted.items()}
        rows = zip(messages, places, strict=True)
        return [
            message
            for message, (shard, position) in rows
            if (stored := found[shard].get(position)) is None or stored.topic != message.topic
        ]

    def _portion(self, taken: list[Message], now: int) -> Portion:
        options = self._options
        left = [left_of(message, self._since, now) for message in taken]  # lowered when found
        messages = [message for message, seconds in zip(taken, left, strict=True) if seconds != 0]
        qos = [min(message.qos, options.qos) for message in messages]
        expiry = [seconds for seconds in left if seconds != 0]
        return Portion(self.topic_filter.text, 0, options, messages, qos, None, None, True, expiry, self._since)

    @property
    def urgent(self) -> bool:
        """Whether the place is to be committed though there is nothing to hand out: before the other messages are."""
        return self.ended and self._moved

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the last topic that was delivered or, at the end, remove it."""
        if not (self._moved and self.limited):
            return []
        key = self._keys.retained(self.number)
        return [FrameworkWrite(key, None) if self.ended else put(key, (VERSION, self._sent))]

    def settled(self) -> None:
        """Note that the messages read since are handed out, and the place stored."""
        self._began = self._sent + "\0" if self._page else self._following
        self._moved = False

    def rewind(self) -> None:
        """Go back to the last `settled`: the messages read since are read again."""
        if self._moved:
            self._page.clear()
            self._following, self._moved = self._began, False
            self._sent = "" if self._began is None else self._began.removesuffix("\0")
            self._feed.hold()

    def try_again(self) -> None:
        """Read the page again that failed."""
        self._failing = False

    def close(self) -> None:
        """There is nothing to release."""
