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

Messages that are not stored arrive separately from the listener of each filter. The first copy of a message is
delivered for all subscriptions that it matches, and later copies are left out. The order of these messages is kept
within each topic (MQTT 5, section 4.6). Their order relative to stored messages is kept too.

A message that is delivered once for several subscriptions (`MergedMessages`) has the highest QoS and all identifiers of
these subscriptions (MQTT 5, section 3.3.4), and its RETAIN flag is kept if one of them has ``retain_as_published``.

`FilterOverlaps` finds the filters that overlap with a given one, so that some topic matches both. It keeps filters in a
tree (trie) of their levels, and a look-up visits only the branches that can overlap. So a new subscription is not
compared with every subscription of its session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Generic, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.errors import TopicstoreError
from topicstore.contract.model import Message
from topicstore.contract.positions import Positions, time_of
from topicstore.contract.state import StateWrite
from topicstore.contract.topics import TopicFilter
from topicstore.pubsub.message_expiry import left_of
from topicstore.pubsub.nonpersistent import MOST, MOST_BYTES, NonPersistentMessages
from topicstore.pubsub.read_cache import ReadSlice

from .cursors import FilterCursor, SessionCursor
from .delivery_batch import MessageColumns, SelectedMessages, rows_in, rows_until, selected_of
from .dispatcher import FilterListeners
from .in_flight import InFlightBatch
from .model import SubscribeOptions
from .records import Matched, OptionsPeriod

__all__ = [
    "FilterOverlaps",
    "Matching",
    "MergedMessages",
    "OverlappingCursors",
    "Part",
    "merged",
    "merged_nonpersistent",
]

V = TypeVar("V")


class _Node(Generic[V]):
    """A node of the tree: one level of filters."""

    __slots__ = ("children", "ending", "open_ended")

    def __init__(self) -> None:
        self.children: dict[str, _Node[V]] = {}
        """The next levels."""
        self.ending: V | None = None
        """The value of the filter that ends here."""
        self.open_ended: V | None = None
        """The value of the filter that ends with ``#`` after this level."""

    def values(self) -> Iterator[V]:
        if self.ending is not None:
            yield self.ending
        if self.open_ended is not None:
            yield self.open_ended

    def empty(self) -> bool:
        return not self.children and self.ending is None and self.open_ended is None


class FilterOverlaps(Generic[V]):
    """A map from filters to values, searched by overlap."""

    __slots__ = ("_new", "_root")

    def __init__(self) -> None:
        self._root: _Node[V] | None = None
        """The tree; None before it has filters."""
        self._new: tuple[tuple[TopicFilter, V], ...] = ()
        """Filters added since the last look-up; most sessions have one filter, and so never build the tree."""

    def add(self, topic_filter: TopicFilter, value: V) -> None:
        """Add a filter, or replace its value."""
        self._new = (*self._new, (topic_filter, value))

    def _keep(self, root: _Node[V], topic_filter: TopicFilter, value: V) -> None:
        path, open_ended = _path(topic_filter)
        node = root
        for level in path:
            found = node.children.get(level)
            if found is None:
                found = node.children[level] = _Node()
            node = found
        if open_ended:
            node.open_ended = value
        else:
            node.ending = value

    def _look(self) -> _Node[V] | None:
        """Add the new filters to the tree, and return it; None if no filter was ever added."""
        if self._new:
            root = self._root = self._root or _Node()
            new, self._new = self._new, ()
            for topic_filter, value in new:
                self._keep(root, topic_filter, value)
        return self._root

    def remove(self, topic_filter: TopicFilter, value: object) -> None:
        """Remove a filter if ``value`` is its value, compared by identity."""
        root = self._look()
        if root is None:
            return
        path, open_ended = _path(topic_filter)
        way = [root]
        for level in path:
            found = way[-1].children.get(level)
            if found is None:
                return
            way.append(found)
        if open_ended and way[-1].open_ended is value:
            way[-1].open_ended = None
        elif not open_ended and way[-1].ending is value:
            way[-1].ending = None
        while path and way[-1].empty():
            way.pop()
            del way[-1].children[path.pop()]

    def overlapping(self, topic_filter: TopicFilter) -> Iterator[V]:
        """Yield the values of the filters that overlap with this one, in no particular order.

        The empty topic counts as well, although no message can be published to it: ``+`` and ``/#`` overlap.
        """
        root = self._look()
        if root is None:
            return
        path, open_ended = _path(topic_filter)
        system = path[:1] != [] and path[0][:1] == "$"  # a wildcard doesn't match this level [MQTT-4.7.2-1]
        left: list[tuple[_Node[V], int]] = [(root, 0)]
        while left:
            node, depth = left.pop()
            hidden = system and not depth
            if depth > len(path):  # "#" may match any level below
                yield from node.values()
                left += [(child, depth + 1) for child in node.children.values()]
                continue
            if node.open_ended is not None and not hidden:
                yield node.open_ended
            if depth == len(path):
                if node.ending is not None:  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
                    yield node.ending
                levels = list(node.children) if open_ended else []
            elif path[depth] == "+":
                levels = list(node.children)
            else:
                levels = [path[depth]] if hidden else [path[depth], "+"]
            for level in levels:
                found = node.children.get(level)
                if found is not None and (depth or hidden or level[:1] != "$"):
                    left.append((found, depth + 1))

    def matching(self, topic: str) -> list[V]:
        """Return the values of the filters that match a valid topic, in no particular order."""
        root = self._look()
        found: list[V] = []
        nodes = [] if root is None else [root]
        hidden = topic[0] == "$"  # a wildcard in the first level doesn't match such topics [MQTT-4.7.2-1]
        for level in topic.split("/"):
            following: list[_Node[V]] = []
            for node in nodes:
                if node.open_ended is not None and not hidden:
                    found.append(node.open_ended)
                children = node.children
                if level in children:
                    following.append(children[level])
                if "+" in children and not hidden:
                    following.append(children["+"])
            nodes, hidden = following, False
        for node in nodes:
            found += node.values()  # "a/#" also matches "a" (MQTT 5, section 4.7.1.2)
        return found


def _path(topic_filter: TopicFilter) -> tuple[list[str], bool]:
    """Return the levels of a filter before a ``#`` at its end, and whether it has one."""
    levels = list(topic_filter.levels)
    return (levels[:-1], True) if levels[-1] == "#" else (levels, False)


_BITS = 63
"""Largest number of subscriptions whose sets fit into NumPy's 64-bit integers as bit masks."""

Matching = tuple[str, SubscribeOptions]
"""A subscription that a message matches: its filter, and the options that hold for the message."""


@attrs.frozen
class Part:
    """The messages of one subscription in a range of positions."""

    matching: Matching
    read_slice: ReadSlice
    stop: int
    """The end of the part, exclusive, as a row of the read batch."""


@attrs.define
class MergedMessages(SelectedMessages):
    """Messages of several subscriptions, in order of their positions, each message once."""

    matched: tuple[Matched, ...] = ()
    """The sets of subscriptions that messages matched."""
    sets: Mapping[int, int] = attrs.field(factory=dict)
    """By `id` of a message, the index of its set in `matched`; also valid for selected messages with only some
    messages."""

    def identifiers(self) -> tuple[int, ...] | list[tuple[int, ...]]:
        """Return the subscription identifiers to send: one tuple for all messages, or a list with a tuple for each."""
        if len(self.matched) == 1:
            return self.matched[0].identifiers
        return [self.matched[self.sets[id(message)]].identifiers for message in self.messages]

    def batch(self, ids: Sequence[int]) -> InFlightBatch:
        """Return the messages that need a packet id as an in-flight batch with these ids, which has no number yet."""
        batch = super().batch(ids)
        qos = repeat(self.qos) if isinstance(self.qos, int) else self.qos
        batch.matched = self.matched
        batch.which = [self.sets[id(message)] for message, one in zip(self.messages, qos, strict=False) if one]
        return batch


def merged(parts: Sequence[Part], shard: int, client_id: str, now: int) -> MergedMessages:
    """Return the messages of all parts of one shard, without expired ones and those that ``no_local`` excludes."""
    rows = [rows_in(part.read_slice, part.stop, part.matching[1], client_id, now) for part in parts]
    columns = [MessageColumns.of(part.read_slice.whole) for part in parts]
    all_ = np.concatenate([one.positions[some] for one, some in zip(columns, rows, strict=True)])
    positions, first, places = np.unique(all_, return_index=True, return_inverse=True)
    masks = np.zeros(len(positions), np.uint64 if len(parts) <= _BITS else object)
    start = 0
    for number, some in enumerate(rows):
        masks[places[start : start + len(some)]] |= (
            masks.dtype.type(1 << number) if masks.dtype != object else 1 << number
        )
        start += len(some)
    found = [
        message for part, some in zip(parts, rows, strict=True) for message in _at(part.read_slice.whole.messages, some)
    ]
    messages = list(map(found.__getitem__, first.tolist()))
    different, which = np.unique(masks, return_inverse=True)
    sets = [
        tuple(part.matching for number, part in enumerate(parts) if mask >> number & 1) for mask in different.tolist()
    ]
    expiry = None
    if any(one.expiry is not None for one in columns):
        expiry = [
            left_of(message, time_of(position), now)
            for message, position in zip(messages, positions.tolist(), strict=True)
        ]
    return _selected(shard, messages, sets, which.tolist(), positions, expiry)


def _at(messages: Sequence[Message], rows: npt.NDArray[np.intp]) -> Sequence[Message]:
    return list(map(messages.__getitem__, rows.tolist()))


def merged_nonpersistent(
    shard: int, messages: Iterable[tuple[Message, tuple[Matching, ...]]], expiry: list[int | None]
) -> MergedMessages:
    """Return messages that are not stored, with their matching subscriptions, as selected messages of QoS 0."""
    rows = list(messages)
    sets = {matchings: number for number, matchings in enumerate(dict.fromkeys(matchings for _, matchings in rows))}
    which = [sets[matchings] for _, matchings in rows]
    return _selected(shard, [message for message, _ in rows], list(sets), which, None, expiry)


def _selected(
    shard: int,
    messages: list[Message],
    sets: Sequence[tuple[Matching, ...]],
    which: list[int],
    positions: Positions | None,
    expiry: list[int | None] | None,
) -> MergedMessages:
    matched = tuple(map(_matched, sets))
    qos: int | list[int] = 0
    if positions is not None:
        highest = [max(options.qos for _, options in matchings) for matchings in sets]
        all_ = [min(message.qos, highest[number]) for message, number in zip(messages, which, strict=True)]
        qos = all_[0] if len(set(all_)) == 1 else all_ or 0
    retain: bool | list[bool] = False
    if any(one.retain_as_published for one in matched):
        retain = [
            message.retain and matched[number].retain_as_published
            for message, number in zip(messages, which, strict=True)
        ]
    first = next(iter(sets), (("#", SubscribeOptions()),))[0]
    return MergedMessages(
        first[0],
        shard,
        first[1],
        messages,
        qos,
        None if qos == 0 else positions,
        None,
        retain,
        expiry if expiry is not None and any(left is not None for left in expiry) else None,
        matched=matched,
        sets=dict(zip(map(id, messages), which, strict=True)),
    )


def _matched(matchings: tuple[Matching, ...]) -> Matched:
    return Matched(
        matchings[0][0],
        tuple(options.identifier for _, options in matchings if options.identifier),
        any(options.retain_as_published for _, options in matchings),
    )


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
    matching: dict[FilterCursor, SubscribeOptions]
    """The subscriptions that it matched, with their options at that time."""


class OverlappingCursors(SessionCursor):
    """The subscriptions of a session that overlap with another one. Used under the sessions' mutex."""

    __slots__ = (
        "_apart",
        "_behind",
        "_copied",
        "_copies",
        "_failing",
        "_filters",
        "_listeners",
        "_members",
        "_nonpersistent",
        "_ready",
    )

    def __init__(self, listeners: FilterListeners, ready: Callable[[SessionCursor], None]) -> None:
        self._listeners = listeners
        self._ready = ready
        self._members: dict[FilterCursor, None] = {}
        self._filters: FilterOverlaps[FilterCursor] = FilterOverlaps()
        """The members by their filters."""
        self._apart: FilterOverlaps[FilterCursor] = FilterOverlaps()
        """The session's other subscriptions, which overlap with no other."""
        self._behind: dict[int, None] = {}
        """The shards that may have messages to read."""
        self._failing: dict[int, None] = {}
        """The shards that could not be read."""
        self._nonpersistent: NonPersistentMessages[_Waiting] = NonPersistentMessages(_payload_size)
        self._copies: dict[int, tuple[Message, set[FilterCursor]]] = {}
        """By `id` of a message that is not stored, the message and the subscriptions whose copy has not arrived yet."""
        self._copied = 0
        """The size of the payloads of these messages in bytes."""

    # --- its members ---

    def consider(self, cursor: FilterCursor) -> list[FilterCursor]:
        """Read a new subscription together with those that it overlaps with, if there are any.

        Return the subscriptions that join, which the session must not read separately any more.
        """
        chosen = cursor.topic_filter
        joining = list(self._apart.overlapping(chosen))
        if not joining and next(self._filters.overlapping(chosen), None) is None:
            self._apart.add(chosen, cursor)
            return []
        joining.append(cursor)
        for one in joining:
            self._apart.remove(one.topic_filter, one)
            self._filters.add(one.topic_filter, one)
            self._members[one] = None
            for shard, marks, time, message, options in one.join(self):
                self._wait(_Waiting(shard, marks[shard], sum(marks), time, message, {one: options}))
            self.wake(one)
        return joining

    def forget(self, cursor: SessionCursor) -> None:
        """Forget a cursor that the session doesn't read separately any more; it may be unknown here."""
        self._apart.remove(cursor.topic_filter, cursor)

    def leave(self, cursor: FilterCursor) -> None:
        """Remove a subscription."""
        self.forget_nonpersistent(cursor)
        self._members.pop(cursor, None)
        self._filters.remove(cursor.topic_filter, cursor)
        for _, expected in self._copies.values():
            expected.discard(cursor)
        if not self._members:
            self._behind.clear()
            self._nonpersistent.clear()
            self._copies.clear()
            self._copied = 0

    @property
    def topic_filter(self) -> TopicFilter:  # type: ignore[override]
        """The filter of the oldest subscription."""
        return next(iter(self._members)).topic_filter

    @property
    def needs_packet_id(self) -> bool:  # type: ignore[override]
        """Whether one of the subscriptions needs packet ids: then all of them wait while the window is full."""
        return any(member.needs_packet_id for member in self._members)

    def wake(self, cursor: FilterCursor) -> None:
        """Record that one of the subscriptions has messages to read."""
        self._behind.update((shard, None) for shard in cursor.unread() if shard not in self._failing)
        self._ready(self)

    # --- reading ---

    def read(self, limit: int, now: int) -> SelectedMessages | None:
        """Return at most ``limit`` of the next messages; None if none are left, or retained messages come first."""
        if any(member.held for member in self._members):
            return None
        if self._nonpersistent:
            shard = self._hindrance(self._nonpersistent.first)
            if shard is None:
                return self._read_nonpersistent(limit, now)
            return self._read(shard, limit, now, self._nonpersistent.first.mark)
        for shard in self._behind:
            return self._read(shard, limit, now, None)
        return None

    def _read(self, shard: int, limit: int, now: int, bound: int | None) -> SelectedMessages:
        """Read the next messages of a shard, to the position that all subscriptions have reached, or to ``bound``."""
        del self._behind[shard]
        try:
            runs, end = self._runs(shard, limit, bound)
        except TopicstoreError:
            self._failing[shard] = None  # other shards are still read
            raise
        stops = {member: rows_until(read_slice, end) for member, (_, read_slice) in runs.items()}
        some = [member for member, (_, read_slice) in runs.items() if stops[member] > read_slice.rows.start]
        some.sort(key=_number)
        if len(some) > 1:
            end = _first(limit, [_positions(runs[member][1], stops[member]) for member in some], end)
            stops = {member: rows_until(read_slice, end) for member, (_, read_slice) in runs.items()}
        for member, (period, read_slice) in runs.items():
            member.advance(shard, read_slice, period, end)
        if any(member.behind(shard) for member in self._members):
            self._behind[shard] = None  # the shard's turn comes last
        client_id = next(iter(self._members)).client_id
        if len(some) > 1:
            parts = [Part(_matching(member, runs[member][0]), runs[member][1], stops[member]) for member in some]
            return merged(parts, shard, client_id, now)
        if not some:
            return SelectedMessages(self.topic_filter.text, shard, SubscribeOptions(), (), 0, None)
        period, read_slice = runs[some[0]]
        return selected_of(read_slice, stops[some[0]], some[0].topic_filter.text, shard, period.options, client_id, now)

    def _runs(
        self, shard: int, limit: int, bound: int | None
    ) -> tuple[dict[FilterCursor, tuple[OptionsPeriod, ReadSlice]], int]:
        """Read the next messages of each subscription; return them, and the position up to which all were read."""
        mark = self._listeners.hub.watermarks()[shard]
        end = mark if bound is None else min(mark, bound)
        runs: dict[FilterCursor, tuple[OptionsPeriod, ReadSlice]] = {}
        for member in sorted(self._members, key=lambda member: member.places[shard]):
            if end < mark and member.places[shard] >= end:
                break  # members are sorted by place, so the following ones have reached the end, too
            if member.quiet(shard):
                continue
            period, read_slice = member.period(shard), member.run(shard, limit)
            runs[member] = period, read_slice
            end = min(
                end, read_slice.position if period.until is None else min(read_slice.position, period.until[shard])
            )
        return runs, end

    # --- messages that are not stored ---

    def take_nonpersistent(self, cursor: FilterCursor, messages: list[Message], marks: list[int], now: int) -> None:
        """Queue messages that are not stored and match one of the subscriptions."""
        fresh = False
        for message in messages:
            copies = self._copies.get(id(message))
            if copies is not None and cursor in copies[1]:
                copies[1].discard(cursor)
                if not copies[1]:
                    self._forget_copies(message)
            else:
                self._take(cursor, message, marks, now)
                fresh = True
        if fresh:
            self._keep_bounds(messages)
            self._ready(self)

    def _keep_bounds(self, messages: list[Message]) -> None:
        """Drop the oldest messages above the limits of the queue; stop expecting copies of the oldest, too."""
        for dropped in self._nonpersistent.drop():
            for member in dropped.matching:
                member.count_missed(1)
                break
        most = MOST_BYTES + sum(len(message.payload) for message in messages)
        while len(self._copies) > MOST or self._copied > most:  # some copies never arrive
            self._forget_copies(next(iter(self._copies.values()))[0])

    def _forget_copies(self, message: Message) -> None:
        """Stop expecting copies of a message."""
        del self._copies[id(message)]
        self._copied -= len(message.payload)

    def _take(self, cursor: FilterCursor, message: Message, marks: list[int], now: int) -> None:
        found = {cursor: None, **dict.fromkeys(self._filters.matching(message.topic))}
        matching = sorted([member for member in found if member.takes(message)], key=_number)
        if len(matching) > 1:
            if id(message) not in self._copies:  # an object that is published again is counted once
                self._copied += len(message.payload)
            self._copies[id(message)] = message, {member for member in matching if member is not cursor}
        taken = {
            member: member.options
            for member in matching
            if not (member.options.no_local and message.client_id == member.client_id)
        }
        if taken:
            shard = self._listeners.shard_of(message.client_id)
            self._wait(_Waiting(shard, marks[shard], sum(marks), now, message, taken))

    def _wait(self, waiting: _Waiting) -> None:
        """Queue a message before those that were published at higher watermarks."""
        self._nonpersistent.insert(waiting, lambda other: other.order > waiting.order)

    def counts_for(self, cursor: FilterCursor, message: Message) -> bool:
        """Return whether a dropped message counts as missed by this one of the subscriptions. Needs no lock."""
        getting = (one for one in list(self._members) if one.gets(message) and one.topic_filter.matches(message.topic))
        return min(getting, key=_number, default=None) is cursor

    def forget_nonpersistent(self, cursor: FilterCursor) -> None:
        """Discard the queued messages of one of the subscriptions; these messages are not stored."""
        for waiting in self._nonpersistent:
            waiting.matching.pop(cursor, None)

    def _hindrance(self, waiting: _Waiting) -> int | None:
        """Return the shard that must be read before a queued message is delivered; None if there is none."""
        shard = waiting.shard
        if shard in self._behind and any(
            member.behind(shard) and member.places[shard] < waiting.mark for member in self._members
        ):
            return shard
        return None

    def _read_nonpersistent(self, limit: int, now: int) -> SelectedMessages:
        """Take queued messages, as far as all messages stored before them were read."""
        rows: list[tuple[Message, tuple[Matching, ...]]] = []
        expiry: list[int | None] = []
        while self._nonpersistent and len(rows) < limit and self._hindrance(self._nonpersistent.first) is None:
            waiting = self._nonpersistent.first
            left = left_of(waiting.message, waiting.time, now)
            if left == 0 or not waiting.matching:
                self._nonpersistent.take()
                continue
            self._nonpersistent.draw()
            matching = tuple((member.topic_filter.text, options) for member, options in waiting.matching.items())
            rows.append((waiting.message, matching))
            expiry.append(left)
        return merged_nonpersistent(0, rows, expiry)

    def try_again(self) -> None:
        """Let the next read retry the shards that failed."""
        for member in self._members:
            member.try_again()
        self._behind.update(self._failing)
        self._failing.clear()

    # --- storing: each subscription stores its own place ---

    def parts(self) -> list[SessionCursor]:
        """Return this cursor, and the subscriptions whose places have moved."""
        return [self, *(member for member in self._members if member.moved)]

    def writes(self) -> list[StateWrite]:
        """Return the writes that store the changed places of the subscriptions."""
        return [write for member in self._members for write in member.writes()]

    def committed(self) -> None:
        """Forget the queued messages that were read, because they are handed out; places are committed by `parts`."""
        self._nonpersistent.committed()

    def rewind(self) -> None:
        """Return to the places of the last `committed`, so that the messages read since are read again."""
        if self._nonpersistent.rewind():
            self._ready(self)
        for member in list(self._members):
            member.rewind()

    def close(self) -> None:
        """Do nothing: each subscription is closed by itself."""


def _positions(read_slice: ReadSlice, stop: int) -> Positions:
    return MessageColumns.of(read_slice.whole).positions[read_slice.rows.start : stop]


def _payload_size(waiting: _Waiting) -> int:
    return len(waiting.message.payload)


def _first(limit: int, positions: list[Positions], end: int) -> int:
    """Return the ``limit``-th lowest of the distinct positions; ``end`` if there are no more than ``limit``."""
    different = np.unique(np.concatenate(positions))
    return int(different[limit - 1]) if len(different) > limit else end


def _matching(member: FilterCursor, period: OptionsPeriod) -> Matching:
    return member.topic_filter.text, period.options
