"""Subscriptions of one session that overlap, read together: a message that matches several is delivered once.

MQTT 5 lets a server send such a message once for each subscription, or once for all of them (section 3.3.4). Which of
these a session does is chosen when it is opened (``overlapping`` of `Sessions.open`). It is not stored, because the
stored form is the same: each subscription has a place of its own, up to which everything was delivered for it.

A message is delivered once for all the subscriptions that it matches and whose places are before it. All of these
places move past it in one commit, with the packet id. Usually they are side by side. A subscription with a ``start`` in
the past is delivered its past by itself, up to where the others are, and is read with them from there on.

To find out which subscriptions a message matches, all of them have to be read as far as the message. So a read goes up
to the lowest position that all of them have reached. The others' feeds need not be read if they are quiet: a matching
message is announced to all feeds before it becomes visible. For that, the highest visible position is looked at before
the feeds, and nothing is read beyond it.

Messages that are stored nowhere come from each filter's channel by itself. The first copy of a message is delivered for
all subscriptions that it matches, and the other copies are left out when they come. The order of these messages is kept
for each topic (MQTT 5, section 4.6), and their order with stored messages is kept altogether.
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
from topicstore.pubsub.read_cache import Run

from .dispatch import Channels
from .filter_overlaps import FilterOverlaps
from .merged_portions import Matching, Part, merged, merged_live
from .model import SubscribeOptions
from .portions import Portion, Traits, portion_of, rows_until
from .records import Era
from .sources import FeedSource, Source

__all__ = ["OverlappingSources"]

_number = attrgetter("number")
"""The order in which subscriptions were made, which is that of the identifiers in deliveries."""


@attrs.define
class _Waiting:
    """A message that is stored nowhere, and waits to be delivered."""

    shard: int
    mark: int
    """The position in its publisher's shard up to which is delivered before it."""
    order: int
    """A number that grows with what is visible when the message is published."""
    time: int
    message: Message
    matching: dict[FeedSource, SubscribeOptions]
    """The subscriptions that it matched, with their options at that time."""


class OverlappingSources(Source):
    """Those subscriptions of a session that overlap with another one. Used under the dispatcher's lock."""

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
        """The session's other subscriptions, which overlap with none."""
        self._behind: dict[int, None] = {}
        """The shards in which there may be something to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._live: LiveMessages[_Waiting] = LiveMessages(lambda waiting: len(waiting.message.payload))
        self._copies: dict[int, tuple[Message, set[FeedSource]]] = {}
        """By `id` of a message that is stored nowhere, the subscriptions whose copy of it is still to come."""
        self._copied = 0
        """How many bytes the payloads of these have."""

    # --- its members ---

    def consider(self, source: FeedSource) -> list[FeedSource]:
        """Read a new subscription together with those that it overlaps with, if there are any.

        Return those of them that were read alone until now, which the session is not to read any more.
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
        """Note that the session doesn't read a source any more, which need not be one of those considered."""
        self._apart.remove(source.topic_filter, source)

    def leave(self, source: FeedSource) -> None:
        """Go on without one of the subscriptions."""
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
        """Whether one of the subscriptions needs packet ids: then all of them wait while there is no room."""
        return any(member.limited for member in self._members)

    def wake(self, source: FeedSource) -> None:
        """Note that one of the subscriptions has something to read."""
        self._behind.update((shard, None) for shard in source.unread() if shard not in self._failing)
        self._ready(self)

    # --- reading ---

    def read(self, limit: int, now: int) -> Portion | None:
        """Return at most ``limit`` of the next messages; None if there are none now, or retained ones come first."""
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
        """Read on in a shard, as far as all of the subscriptions have reached, or to ``bound``."""
        del self._behind[shard]
        try:
            runs, end = self._runs(shard, limit, bound)
        except TopicstoreError:
            self._failing[shard] = None  # the other shards go on
            raise
        stops = {member: rows_until(run, end) for member, (_, run) in runs.items()}
        some = [member for member, (_, run) in runs.items() if stops[member] > run.rows.start]
        some.sort(key=_number)
        if len(some) > 1:
            end = _first(limit, [_positions(runs[member][1], stops[member]) for member in some], end)
            stops = {member: rows_until(run, end) for member, (_, run) in runs.items()}
        for member, (era, run) in runs.items():
            member.advance(shard, run, era, end)
        if any(member.behind(shard) for member in self._members):
            self._behind[shard] = None  # after the other shards
        client_id = next(iter(self._members)).client_id
        if len(some) > 1:
            parts = [Part(_matching(member, runs[member][0]), runs[member][1], stops[member]) for member in some]
            return merged(parts, shard, client_id, now)
        if not some:
            return Portion(self.topic_filter.text, shard, SubscribeOptions(), (), 0, None)
        era, run = runs[some[0]]
        return portion_of(run, stops[some[0]], some[0].topic_filter.text, shard, era.options, client_id, now)

    def _runs(self, shard: int, limit: int, bound: int | None) -> tuple[dict[FeedSource, tuple[Era, Run]], int]:
        """Read what each subscription has next; return that, and the position up to which all is known."""
        mark = self._channels.hub.watermarks()[shard]
        end = mark if bound is None else min(mark, bound)
        runs: dict[FeedSource, tuple[Era, Run]] = {}
        for member in sorted(self._members, key=lambda member: member.places[shard]):
            if end < mark and member.places[shard] >= end:
                break  # and so are the following: none of them matches anything before the end
            if member.quiet(shard):
                continue
            era, run = member.era(shard), member.run(shard, limit)
            runs[member] = era, run
            end = min(end, run.position if era.until is None else min(run.position, era.until[shard]))
        return runs, end

    # --- messages that are stored nowhere ---

    def take_live(self, source: FeedSource, messages: list[Message], marks: list[int], now: int) -> None:
        """Take messages stored nowhere that one of the subscriptions matches."""
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
        """Drop the oldest messages that are too many, and expect no more copies of so many than may wait."""
        for dropped in self._live.drop():
            for member in dropped.matching:
                member.count_missed(1)
                break
        most = LIVE_BYTES + sum(len(message.payload) for message in messages)
        while len(self._copies) > LIVE or self._copied > most:  # of a channel that was left, or had too many
            self._forget_copies(next(iter(self._copies.values()))[0])

    def _forget_copies(self, message: Message) -> None:
        """Expect no copies of a message any more."""
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
        """Let a message wait, before those that were published after later stored messages."""
        self._live.insert(waiting, lambda other: other.order > waiting.order)

    def counts_for(self, source: FeedSource, message: Message) -> bool:
        """Say whether a dropped message stored nowhere counts as one that this one of them missed. Needs no lock."""
        getting = (one for one in list(self._members) if one.gets(message) and one.topic_filter.matches(message.topic))
        return min(getting, key=_number, default=None) is source

    def forget_live(self, source: FeedSource) -> None:
        """Forget that waiting messages stored nowhere match one of the subscriptions."""
        for waiting in self._live:
            waiting.matching.pop(source, None)

    def _hindrance(self, waiting: _Waiting) -> int | None:
        """Return the shard that is to be read before a message; None if it can be delivered."""
        shard = waiting.shard
        if shard in self._behind and any(
            member.behind(shard) and member.places[shard] < waiting.mark for member in self._members
        ):
            return shard
        return None

    def _read_live(self, limit: int, now: int) -> Portion:
        """Take messages stored nowhere, once all stored before them are read."""
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
        """Note that the messages stored nowhere that were read since are handed out; `parts` has the others."""
        self._live.settled()

    def rewind(self) -> None:
        """Go back to the last `settled`: the messages read since are read again."""
        if self._live.rewind():
            self._ready(self)
        for member in list(self._members):
            member.rewind()

    def close(self) -> None:
        """There is nothing to release that the subscriptions don't."""


def _positions(run: Run, stop: int) -> Positions:
    return Traits.of(run.stretch).positions[run.rows.start : stop]


def _first(limit: int, positions: list[Positions], end: int) -> int:
    """Return the position up to which there are at most ``limit`` different ones; ``end`` if there are no more."""
    different = np.unique(np.concatenate(positions))
    return int(different[limit - 1]) if len(different) > limit else end


def _matching(member: FeedSource, era: Era) -> Matching:
    return member.topic_filter.text, era.options
