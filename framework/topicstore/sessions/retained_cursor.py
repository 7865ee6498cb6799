"""The retained messages that are sent to a new subscription before its other messages.

They are looked up in pages while the client's window has room, not at the time of the SUBSCRIBE. So a retained message
that was replaced after the SUBSCRIBE is sent in its newer form, and one that was cleared or has expired is not sent
(MQTT 5, section 3.3.1.3, leaves this open).

The subscription's other messages wait until the last retained message is handed out. So for each topic, the last
message that a client receives is the last one that was published. A retained message that can't be read therefore
blocks its subscription, and `Session.failure` shows the error.

With a ``start`` in the past, a retained message that the replay delivers anyway is left out. Retained messages that
were set before the start, or are not stored in the streams, are sent first.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.state import StateWrite
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.retained_lookup import RetainedMessages
from topicstore.shard.state import FrameworkWrite

from .cursors import FilterCursor, SessionCursor
from .delivery_batch import SelectedMessages
from .records import VERSION, Keys, put

__all__ = ["RetainedCursor"]

_FEWEST, _MOST = 64, 256
"""Smallest and largest number of messages in a look-up. A page may exceed the room in the window, as the rest is kept
for the next reads. The upper limit bounds the time for which other calls wait."""


class RetainedCursor(SessionCursor):
    """The retained messages that are sent to one subscription, in order of topics.

    The place is the last topic that was delivered. After a resumption, reading continues after that topic, with the
    retained messages that exist then.
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
        "needs_packet_id",
        "number",
        "topic_filter",
    )

    cost = 16  # high, because each read looks up a page

    def __init__(
        self, keys: Keys, feed: FilterCursor, messages: RetainedMessages, *, replays: bool, behind: str | None = None
    ) -> None:
        """Send the retained messages of a subscription.

        replays: whether the subscription may still deliver some of them from the stored messages.
        behind:  the last topic sent, as stored; None for a new sending.
        """
        self.topic_filter = feed.topic_filter
        self.number = feed.number
        self.needs_packet_id = feed.options.qos > 0 or behind is not None  # the window limits stored cursors of QoS 0
        self._keys = keys
        self._feed = feed
        self._messages = messages
        self._replays = replays
        self._options = feed.options
        """The options at the SUBSCRIBE; a later change doesn't affect these messages."""
        self._page: collections.deque[Message] = collections.deque()
        """Messages that are read but not handed out."""
        self._since = 0
        """The time at which the remaining expiry intervals of `_page` were computed."""
        self._following: str | None = behind + "\0" if behind else ""
        """The start of the next page; None after the last one."""
        self._began: str | None = self._following
        """The topic at which uncommitted messages start; None if all are committed."""
        self._sent = behind or ""
        """The last topic that was handed out."""
        self._moved = False
        self._failing = False
        """Whether a page could not be read."""

    def begin(self) -> None:
        """Hold back the subscription's other messages."""
        self._feed.hold()

    @property
    def done(self) -> bool:
        """Whether all retained messages were handed out."""
        return self._began is None

    @property
    def ended(self) -> bool:
        """Whether all retained messages were read; they are handed out after the next commit."""
        return self._following is None and not self._page

    def everything(self) -> list[StateWrite]:
        """Return the writes that store the cursor at its beginning or, at QoS 0, remove an earlier cursor's record."""
        key = self._keys.retained(self.number)
        return [put(key, (VERSION, "")) if self.needs_packet_id else FrameworkWrite(key, None)]

    def read(self, limit: int, now: int) -> SelectedMessages | None:
        """Return at most ``limit`` of the next messages; None if all were returned. Reads at most one page."""
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
            self._feed.release()  # its messages are committed with these messages, or later
        return self._selected(taken, now)

    def _not_replayed(self, messages: Sequence[Message]) -> list[Message]:
        """Return the retained messages that the subscription, held back meanwhile, won't deliver from the streams."""
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

    def _selected(self, taken: list[Message], now: int) -> SelectedMessages:
        options = self._options
        left = [left_of(message, self._since, now) for message in taken]  # intervals are as of `_since`
        messages = [message for message, seconds in zip(taken, left, strict=True) if seconds != 0]
        qos = [min(message.qos, options.qos) for message in messages]
        expiry = [seconds for seconds in left if seconds != 0]
        return SelectedMessages(
            self.topic_filter.text, 0, options, messages, qos, None, None, True, expiry, self._since
        )

    @property
    def urgent(self) -> bool:
        """Whether the end of the retained messages must be committed: the subscription's other messages wait for it."""
        return self.ended and self._moved

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the last topic that was delivered or, at the end, remove it."""
        if not (self._moved and self.needs_packet_id):
            return []
        key = self._keys.retained(self.number)
        return [FrameworkWrite(key, None) if self.ended else put(key, (VERSION, self._sent))]

    def committed(self) -> None:
        """Make the place final: the messages read since are handed out, and `writes` are committed."""
        self._began = self._sent + "\0" if self._page else self._following
        self._moved = False

    def rewind(self) -> None:
        """Return to the place of the last `committed`, so that the messages read since are read again."""
        if self._moved:
            self._page.clear()
            self._following, self._moved = self._began, False
            self._sent = "" if self._began is None else self._began.removesuffix("\0")
            self._feed.hold()

    def try_again(self) -> None:
        """Let the next read retry the page that could not be read."""
        self._failing = False

    def close(self) -> None:
        """Do nothing: the cursor holds no resources."""
