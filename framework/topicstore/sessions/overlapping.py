"""Subscriptions of one session that overlap, read together: a message that matches several is delivered once.

MQTT 5 lets a server send such a message once for each subscription, or once for all of them (section 3.3.4). The
program chooses when it opens a session (``overlapping`` of `Sessions.open`). The choice is not stored, because the
stored form is the same: each subscription has its own place, up to which all its messages were delivered.

A message is delivered once for all the subscriptions that it matches and whose places are before it. All of these
places move past it in one commit, with the packet id. Usually these places are equal. A subscription with a ``start``
in the past first catches up with the others by itself, and is read together with them afterwards.

To find out which subscriptions a message matches, all of them have to be read as far as the message. So a read goes up
to the lowest position that all of them have reached. A subscription to which no message was announced need not be read,
because a message is announced to all matching subscriptions before it becomes visible. For that, the watermark is read
before the announcements, and nothing is read beyond the watermark.

Messages that are not stored arrive separately from the channel of each filter. The first copy of a message is delivered
for all subscriptions that it matches, and later copies are left out. The order of these messages is kept within each
topic (MQTT 5, section 4.6). Their order relative to stored messages is kept too.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import attrs
import numpy as np

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.live_messages import LIVE, LIVE_BYTES, LiveMessages
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.read_cache import ReadSlice

from .dispatch import Channels
from .filter_overlaps import FilterOverlaps
from .merged_portions import Matching, Part, merged, merged_live
from .model import SubscribeOptions
from .portions import Portion, Traits, portion_of, rows_until
from .records import Era
from .sources import FeedSource, Source

__all__ = ["OverlappingSources"]

_number = attrgetter("number")
"""The order in which subscriptions were created; subscription identifiers are sent in this order."""


@attrs.define
class _Waiting:
    """A message that is not stored, and waits to be delivered."""

    shard: int
    mark: int
    """The position in its publisher's shard up to which stored messages are delivered before this one."""
    order: int
    """The sum of the watermarks when the message was published, by which waiting messages are sorted."""
    time: int
    message: Message
    matching: dict[FeedSource, SubscribeOptions]
    """The subscriptions that it matched, with their options at that time."""


class OverlappingSources(Source):
    """The subscriptions of a session that overlap with another one. Used under the dispatcher's lock."""

    __slots__ = (
        "_apart",
        "_behind",
        "_channels",
        "_copied",
        "_copies",
        "_failing",
        "_filters",
        "_live",
        "_members",
        "_ready",
    )

    def __init__(self, channels: Channels, ready: Callable[[Source], None]) -> None:
        self._channels = channels
        self._ready = ready
        self._members: dict[FeedSource, None] = {}
        self._filters: FilterOverlaps[FeedSource] = FilterOverlaps()
        """The members by their filters."""
        self._apart: FilterOverlaps[FeedSource] = FilterOverlaps()
        """The session's other subscriptions, which overlap with no other."""
        self._behind: dict[int, None] = {}
        """The shards that may have messages to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._live: LiveMessages[_Waiting] = LiveMessages(lambda waiting: len(waiting.message.payload))
        self._copies: dict[int, tuple[Message, set[FeedSource]]] = {}
        """By `id` of a message that is not stored, the message and the subscriptions whose copy has not arrived yet."""
        self._copied = 0
        """The size of the payloads of these messages in bytes."""

    # --- its members ---

    def consider(self, source: FeedSource) -> list[FeedSource]:
        """Read a new subscription together with those that it overlaps with, if there are any.

        Return the subscriptions that join, which the session must not read separately any more.
        """
        chosen = source.topic_filter
        joining = list(self._apart.overlapping(chosen))
        if not joining and next(self._filters.overlapping(chosen), None) is None:
            self._apart.add(chosen, source)
            return []
        joining.append(source)
        for one in joining:
            self._apart.remove(one.topic_filter, one)
            self._filters.add(one.topic_filter, one)
            self._members[one] = None
            for shard, marks, time, message, options in one.join(self):
                self._wait(_Waiting(shard, marks[shard], sum(marks), time, message, {one: options}))
            self.wake(one)
        return joining

    def forget(self, source: Source) -> None:
        """Forget a source that the session doesn't read separately any more; it may be unknown here."""
        self._apart.remove(source.topic_filter, source)

    def leave(self, source: FeedSource) -> None:
        """Remove a subscription."""
        self.forget_live(source)
        self._members.pop(source, None)
        self._filters.remove(source.topic_filter, source)
        for _, expected in self._copies.values():
            expected.discard(source)
        if not self._members:
            self._behind.clear()
            self._live.clear()
            self._copies.clear()
            self._copied = 0

    @property
    def topic_filter(self) -> TopicFilter:  # type: ignore[override]
        """The filter of one of the subscriptions."""
        return next(iter(self._members)).topic_filter

    @property
    def limited(self) -> bool:  # type: ignore[override]
        """Whether one of the subscriptions needs packet ids: then all of them wait while the window is full."""
        return any(member.limited for member in self._members)

    def wake(self, source: FeedSource) -> None:
        """Record that one of the subscriptions has messages to read."""
        self._behind.update((shard, None) for shard in source.unread() if shard not in self._failing)
        self._ready(self)

    # --- reading ---

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if none are left, or retained messages come first."""
        if any(member.held for member in self._members):
            return None
        if self._live:
            shard = self._hindrance(self._live.first)
            if shard is None:
                return self._read_live(limit, now)
            return self._read(shard, limit, now, self._live.first.mark)
        for shard in self._behind:
            return self._read(shard, limit, now, None)
        return None

    def _read(self, shard: int, limit: int, now: int, bound: int | None) -> Portion:
        """Read the next messages of a shard, to the position that all subscriptions have reached, or to ``bound``."""
        del self._behind[shard]
        try:
            runs, end = self._runs(shard, limit, bound)
        except TopicstoreError:
            self._failing[shard] = None  # other shards are not affected
            raise
        stops = {member: rows_until(read_slice, end) for member, (_, read_slice) in runs.items()}
        some = [member for member, (_, read_slice) in runs.items() if stops[member] > read_slice.rows.start]
        some.sort(key=_number)
        if len(some) > 1:
            end = _first(limit, [_positions(runs[member][1], stops[member]) for member in some], end)
            stops = {member: rows_until(read_slice, end) for member, (_, read_slice) in runs.items()}
        for member, (era, read_slice) in runs.items():
            member.advance(shard, read_slice, era, end)
        if any(member.behind(shard) for member in self._members):
            self._behind[shard] = None  # after the other shards
        client_id = next(iter(self._members)).client_id
        if len(some) > 1:
            parts = [Part(_matching(member, runs[member][0]), runs[member][1], stops[member]) for member in some]
            return merged(parts, shard, client_id, now)
        if not some:
            return Portion(self.topic_filter.text, shard, SubscribeOptions(), (), 0, None)
        era, read_slice = runs[some[0]]
        return portion_of(read_slice, stops[some[0]], some[0].topic_filter.text, shard, era.options, client_id, now)

    def _runs(self, shard: int, limit: int, bound: int | None) -> tuple[dict[FeedSource, tuple[Era, ReadSlice]], int]:
        """Read the next messages of each subscription; return them, and the position up to which all were read."""
        mark = self._channels.hub.watermarks()[shard]
        end = mark if bound is None else min(mark, bound)
        runs: dict[FeedSource, tuple[Era, ReadSlice]] = {}
        for member in sorted(self._members, key=lambda member: member.places[shard]):
            if end < mark and member.places[shard] >= end:
                break  # the following members are sorted by place, so their places are not before the end either
            if member.quiet(shard):
                continue
            era, read_slice = member.era(shard), member.run(shard, limit)
            runs[member] = era, read_slice
            end = min(end, read_slice.position if era.until is None else min(read_slice.position, era.until[shard]))
        return runs, end

    # --- messages that are not stored ---

    def take_live(self, source: FeedSource, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and match one of the subscriptions."""
        fresh = False
        for message in messages:
            copies = self._copies.get(id(message))
            if copies is not None and source in copies[1]:
                copies[1].discard(source)
                if not copies[1]:
                    self._forget_copies(message)
            else:
                self._take(source, message, marks, now)
                fresh = True
        if fresh:
            self._keep_bounds(messages)
            self._ready(self)

    def _keep_bounds(self, messages: list[Message]) -> None:
        """Drop the oldest messages above the limits of the queue, and expect copies of no more messages than these."""
        for dropped in self._live.drop():
            for member in dropped.matching:
                member.count_missed(1)
                break
        most = LIVE_BYTES + sum(len(message.payload) for message in messages)
        while len(self._copies) > LIVE or self._copied > most:  # their channel was left, or dropped them
            self._forget_copies(next(iter(self._copies.values()))[0])

    def _forget_copies(self, message: Message) -> None:
        """Stop expecting copies of a message."""
        del self._copies[id(message)]
        self._copied -= len(message.payload)

    def _take(self, source: FeedSource, message: Message, marks: list[int], now: int) -> None:
        found = {source: None, **dict.fromkeys(self._filters.matching(message.topic))}
        matching = sorted([member for member in found if member.takes(message)], key=_number)
        if len(matching) > 1:
            if id(message) not in self._copies:  # else the same object was published twice
                self._copied += len(message.payload)
            self._copies[id(message)] = message, {member for member in matching if member is not source}
        taken = {
            member: member.options
            for member in matching
            if not (member.options.no_local and message.client_id == member.client_id)
        }
        if taken:
            shard = self._channels.shard_of(message.client_id)
            self._wait(_Waiting(shard, marks[shard], sum(marks), now, message, taken))

    def _wait(self, waiting: _Waiting) -> None:
        """Queue a message before those that were published at higher watermarks."""
        self._live.insert(waiting, lambda other: other.order > waiting.order)

    def counts_for(self, source: FeedSource, message: Message) -> bool:
        """Return whether a dropped message counts as missed by this one of the subscriptions. Needs no lock."""
        getting = (one for one in list(self._members) if one.gets(message) and one.topic_filter.matches(message.topic))
        return min(getting, key=_number, default=None) is source

    def forget_live(self, source: FeedSource) -> None:
        """Don't deliver the queued messages, which are not stored, for one of the subscriptions."""
        for waiting in self._live:
            waiting.matching.pop(source, None)

    def _hindrance(self, waiting: _Waiting) -> int | None:
        """Return the shard that must be read before a queued message is delivered; None if there is none."""
        shard = waiting.shard
        if shard in self._behind and any(
            member.behind(shard) and member.places[shard] < waiting.mark for member in self._members
        ):
            return shard
        return None

    def _read_live(self, limit: int, now: int) -> Portion:
        """Take queued messages, as far as all messages stored before them were read."""
        rows: list[tuple[Message, tuple[Matching, ...]]] = []
        expiry: list[int | None] = []
        while self._live and len(rows) < limit and self._hindrance(self._live.first) is None:
            waiting = self._live.first
            left = left_of(waiting.message, waiting.time, now)
            if left == 0 or not waiting.matching:
                self._live.take()
                continue
            self._live.draw()
            matching = tuple((member.topic_filter.text, options) for member, options in waiting.matching.items())
            rows.append((waiting.message, matching))
            expiry.append(left)
        return merged_live(0, rows, expiry)

    def try_again(self) -> None:
        """Read again the shards that failed."""
        for member in self._members:
            member.try_again()
        self._behind.update(self._failing)
        self._failing.clear()

    # --- storing: each subscription stores its own place ---

    def parts(self) -> list[Source]:
        """Return itself, and the subscriptions whose places have moved."""
        return [self, *(member for member in self._members if member.moved)]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the places that have moved."""
        return [write for member in self._members for write in member.writes()]

    def settled(self) -> None:
        """Note that queued messages read since are handed out. The subscriptions in `parts` settle their own places."""
        self._live.settled()

    def rewind(self) -> None:
        """Return to the places of the last `settled`, so that the messages read since are read again."""
        if self._live.rewind():
            self._ready(self)
        for member in list(self._members):
            member.rewind()

    def close(self) -> None:
        """Do nothing: each subscription is closed by itself."""


def _positions(read_slice: ReadSlice, stop: int) -> Positions:
    return Traits.of(read_slice.whole).positions[read_slice.rows.start : stop]


def _first(limit: int, positions: list[Positions], end: int) -> int:
    """Return the ``limit``-th lowest of the distinct positions; ``end`` if there are no more than ``limit``."""
    different = np.unique(np.concatenate(positions))
    return int(different[limit - 1]) if len(different) > limit else end


def _matching(member: FeedSource, era: Era) -> Matching:
    return member.topic_filter.text, era.options
