"""Look-up of retained messages, in pages, in order of topics, skipping topics that a filter can't match.

The work for a page is bounded, whatever the number of retained messages; the next page continues. A look-up takes no
lock and keeps no state, so it also works in read-only processes.

For a filter with literal levels after a ``+``, the scan skips ranges of topics, which `TopicLeaps` finds. For example,
with a hundred topics below each of a thousand levels, ``+/7`` reads only a few topics of each level. Where no range can
be skipped, as when each topic has a different first level, all topics are read in order.

Topics are in order of code points, which is that of their bytes in UTF-8. In this order all topics below a level lie
between the level with ``/`` and the level with ``0``, the character after ``/``. Other topics may come before these:
``a!`` comes between ``a`` and ``a/b``.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from operator import attrgetter

import attrs
import numpy as np

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import to_list
from topicstore.contract.errors import DatabaseClosedError, InvalidTopicError
from topicstore.contract.model import Message
from topicstore.contract.topics import TopicFilter, check_utf8
from topicstore.storage.keyed_messages import read_between
from topicstore.storage.storage import Storage

from .retained import AFTER_ALL, Candidate, candidates, current, is_shared, key_of, latest, topic_at

__all__ = [
    "PAGE",
    "RetainedMessages",
    "RetainedPage",
    "TopicLeaps",
    "any_retained",
    "retained",
    "retained_of",
    "retained_page",
    "retained_places",
]

_WILDCARDS = frozenset("+#")


class TopicLeaps:
    """The ranges in which topics may match a filter, and the topics within the ranges that can be skipped."""

    __slots__ = ("_levels", "_open_ended", "_plus_before", "every", "ranges")

    def __init__(self, topic_filter: TopicFilter) -> None:
        levels = topic_filter.levels
        self._open_ended = levels[-1] == "#"
        self._levels = levels[:-1] if self._open_ended else levels
        self._plus_before: list[int | None] = [None]
        """By number of levels, the index of the last ``+`` among these levels."""
        for depth, level in enumerate(self._levels):
            self._plus_before.append(depth if level == "+" else self._plus_before[-1])
        self.ranges = _ranges(topic_filter)
        """The ranges of topics that may match, in order: the first text, inclusive, and the end, exclusive. An end of
        None is open."""
        self.every = topic_filter.literal or "+" not in levels
        """Whether all topics within the ranges match."""

    def after(self, topic: str) -> str | None:
        """Return the text at which a scan after ``topic`` continues; no matching topic is skipped.

        ``topic`` lies within the ranges. Returns None if no topic after ``topic`` can match.
        """
        mine, theirs = self._levels, topic.split("/")
        for depth, level in enumerate(mine):
            if depth == len(theirs):
                return topic + "\0"  # the lowest text after it: the next topic may have more levels
            if level not in ("+", theirs[depth]):
                return self._of_other_level(depth, theirs, topic)
        if self._open_ended or (len(theirs) == len(mine) and mine[-1] == "+"):
            return topic + "\0"
        return self._next_sibling(len(mine), theirs)

    def _of_other_level(self, depth: int, theirs: list[str], topic: str) -> str | None:
        """Return the result of `after` for a topic that differs from the filter in a literal level."""
        wanted = "/".join([*theirs[:depth], self._levels[depth]])
        last = depth == len(self._levels) - 1
        if last and topic < wanted:
            return wanted
        if (not last or self._open_ended) and topic < wanted + "/":
            return wanted + "/"
        return self._next_sibling(depth, theirs)

    def _next_sibling(self, depth: int, theirs: list[str]) -> str | None:
        """Return the text after all topics that have the same levels up to the last ``+`` before a depth."""
        plus = self._plus_before[depth]
        return None if plus is None else "/".join(theirs[: plus + 1]) + "0"


def _ranges(topic_filter: TopicFilter) -> list[tuple[str, str | None]]:
    """Return the ranges of topics that begin with the filter's literal levels.

    Without a literal level these are all topics, except those that begin with ``$`` (MQTT 5, section 4.7.2).
    """
    literal = list(takewhile(_WILDCARDS.isdisjoint, topic_filter.levels))
    if not literal:
        return [("", "$"), ("%", None)]  # "%" comes right after "$"
    parent = "/".join(literal)
    itself, below = (parent, parent + "\0"), (parent + "/", parent + "0")
    if topic_filter.literal:
        return [itself]
    return [itself, below] if topic_filter.levels[len(literal)] == "#" else [below]


PAGE = 1_000
"""The most messages of a page."""
_EXAMINED = 1_024
"""Number of stored messages, over all shards, after which a page ends."""
_FEWEST, _MOST = 8, 1_024
"""Smallest and largest number of stored messages in a read: small where long ranges are skipped."""

_topic = attrgetter("topic")


@attrs.frozen
class RetainedPage:
    """Some retained messages, in order of topics."""

    messages: Sequence[Message]
    """The matching messages that haven't expired, with their remaining expiry intervals. May be empty."""
    following: str | None
    """The ``start`` of the next page; None after the last one."""


def retained(
    storage: Storage, topic_filter: str, now: int, after: str | None = None, limit: int | None = None
) -> list[Message]:
    """Return at most ``limit`` retained messages whose topics match and come after a topic, in order of topics.

    Fewer than ``limit`` are returned only if no others follow.
    """
    chosen = TopicFilter(topic_filter)
    if limit is not None:
        check_count("limit", limit)
    start: str | None = "" if after is None else check_utf8(after, "topic", InvalidTopicError) + "\0"
    found: list[Message] = []
    while start is not None and (limit is None or len(found) < limit):
        page = retained_page(storage, chosen, now, start, PAGE if limit is None else limit - len(found))
        found += page.messages
        start = page.following
    return found


def any_retained(storage: Storage) -> bool:
    """Return whether there is any retained message, expired or not. Reads at most one of each shard."""
    for shard in range(len(storage.shards)):
        read = read_between(storage, shard, key_of(""), AFTER_ALL, 1)
        if len(read.batch) or read.following is not None:
            return True
    return False


def retained_of(storage: Storage, topics: Sequence[str], now: int) -> list[Message | None]:
    """Return, for each topic, its retained message; None if there is none, or if the message has expired."""
    found: list[Message | None] = []
    if is_shared(storage):
        return [None if one is None else one.message for one in _latest_of(storage, topics, now)]
    for topic in topics:
        key = key_of(topic)
        batch = read_between(storage, storage.shard_of(topic), key, key + b"\0", 1).batch
        found.append(next(iter(current(batch, now)), None))
    return found


def retained_places(storage: Storage, topics: Sequence[str]) -> list[tuple[int, int]]:
    """Return, for each topic, the shard and the position of its retained message; (0, 0) if there is none.

    A retained message need not be stored in the streams. Then its position holds no message, or another message.
    """
    places: list[tuple[int, int]] = []
    if is_shared(storage):
        last = _latest_of(storage, topics, storage.clock())
        return [(0, 0) if one is None or one.message is None else (one.shard, one.position) for one in last]
    for topic in topics:
        key = key_of(topic)
        batch = read_between(storage, storage.shard_of(topic), key, key + b"\0", 1).batch
        found = [(storage.shard_of(batch.to_messages()[0].client_id), int(batch.positions[0]))] if len(batch) else []
        places += found or [(0, 0)]
    return places


def _latest_of(storage: Storage, topics: Sequence[str], now: int) -> list[Candidate | None]:
    """Return, for each topic, the last retained message of any shard; None if no shard has one."""
    found: list[Candidate | None] = []
    for topic in topics:
        key = key_of(topic)
        reads = [(one.number, read_between(storage, one.number, key, key + b"\0", 1).batch) for one in storage.shards]
        last = latest(one for shard, batch in reads for one in candidates(batch, shard, now))
        found.append(last[0] if last else None)
    return found


def retained_page(
    storage: Storage, topic_filter: TopicFilter, now: int, start: str, limit: int, *, examine: int = _EXAMINED
) -> RetainedPage:
    """Return at most ``limit`` retained messages whose topics match and are not before ``start``.

    A page may have fewer messages, or none, although others follow, because at most about ``examine`` stored messages
    are read. ``now``: the time for expiry, in microseconds since the epoch.
    """
    limit = min(limit, PAGE)
    leaps = TopicLeaps(topic_filter)
    shared = is_shared(storage)
    if topic_filter.literal and not shared:
        shards: Sequence[int] = (storage.shard_of(topic_filter.text),)
    else:
        shards = range(len(storage.shards))
    share = limit if len(shards) == 1 else min(limit, limit // len(shards) + limit // 8 + 4)
    pages = [_ShardPage(storage, shard, topic_filter, leaps, now, shared=shared) for shard in shards]
    parts = [page.read(start, share, examine // len(shards)) for page in pages]
    ends = [part.following for part in parts if part.following is not None]
    if shared:
        found = latest(one for page in pages for one in page.candidates)
        parts = [RetainedPage([one.message for one in found if one.message is not None], min(ends, default=None))]
    if len(pages) == 1 and len(parts[0].messages) <= limit:
        return parts[0]
    following = min(ends, default=None)  # all shards have been read up to this topic
    messages = sorted((message for part in parts for message in part.messages), key=_topic)
    if following is not None:
        del messages[bisect_left(messages, following, key=_topic) :]
    if len(messages) > limit:
        del messages[limit:]
        following = messages[-1].topic + "\0"
    return RetainedPage(messages, following)


class _ShardPage:
    """A page of the retained messages that one shard keeps."""

    def __init__(
        self, storage: Storage, shard: int, topic_filter: TopicFilter, leaps: TopicLeaps, now: int, *, shared: bool
    ) -> None:
        self._storage = storage
        self._shared = shared
        self.candidates: list[Candidate] = []
        """The messages that were found, if a cluster shares the database; else `_found` has them."""
        self._shard = shard
        self._filter = topic_filter
        self._leaps = leaps
        self._now = now
        self._found: list[Message] = []
        self._examined = 0

    def read(self, start: str, wanted: int, bound: int) -> RetainedPage:
        """Read from the text ``start`` on until ``wanted`` messages match, or ``bound`` messages were read."""
        for first, end in self._leaps.ranges:
            if end is not None and end <= start:
                continue
            reached = self._read_range(max(first, start), end, wanted, bound)
            if reached is not None:
                return RetainedPage(self._found, reached)
        return RetainedPage(self._found, None)

    def _read_range(self, start: str, end: str | None, wanted: int, bound: int) -> str | None:
        """Read a range of topics; return the text at which to continue, or None at the end of the range."""
        at: str | None = start
        last = AFTER_ALL if end is None else key_of(end)
        rows = min(wanted, _MOST) if self._leaps.every else 2 * _FEWEST
        while at is not None:
            if self._examined and (len(self._found) + len(self.candidates) >= wanted or self._examined >= bound):
                return at
            some = min(rows, max(bound - self._examined, 1))
            read = read_between(self._storage, self._shard, key_of(at), last, some)
            self._examined += max(len(read.batch), 1)
            looked_at, leap = self._take(read.batch)
            if read.following is None:
                return None
            after = topic_at(read.following)
            at = None if leap is None else max(leap, after)  # `after` is later if a plugin removed messages
            rows = min(2 * rows, _MOST) if 2 * looked_at >= len(read.batch) else max(rows // 2, _FEWEST)
        return None

    def _take(self, batch: MessageBatch) -> tuple[int, str | None]:
        """Add the matching messages of a batch; return the number compared, and the lowest text of the next match."""
        if self._leaps.every or not len(batch):
            self._keep(batch)
            return len(batch), ""
        topics, matches, after = to_list(batch.topics), self._filter.matches, self._leaps.after
        matching: list[int] = []
        looked_at, row, leap = 0, 0, None
        while row < len(topics):
            looked_at += 1
            if matches(topics[row]):
                matching.append(row)
            leap = after(topics[row])
            if leap is None:
                break
            row = bisect_left(topics, leap, row + 1)
        if matching:
            self._keep(batch.take(np.array(matching, np.intp)))
        return looked_at, leap

    def _keep(self, batch: MessageBatch) -> None:
        if self._shared:
            self.candidates += candidates(batch, self._shard, self._now)
        else:
            self._found += current(batch, self._now)


_PEEK = 16
"""Number of retained messages that are read to find out whether some match."""


class RetainedMessages:
    """Look-ups of a database's retained messages that have not expired. No look-up takes a lock.

    Refers to the storage weakly, so that a database without other references closes itself. After that, every method
    raises `DatabaseClosedError`.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage_ref = weakref.ref(storage)

    def _storage(self) -> Storage:
        storage = self._storage_ref()
        if storage is None:
            raise DatabaseClosedError("the database is closed")
        return storage

    def page(self, topic_filter: TopicFilter, start: str, limit: int, now: int) -> RetainedPage:
        """Return a page of the matching retained messages (`retained_page`).

        About ``limit`` messages are read for it, whether they match or not.
        """
        return retained_page(self._storage(), topic_filter, now, start, limit, examine=limit)

    def any(self) -> bool:
        """Return whether there are retained messages. Reads at most one of each shard."""
        return any_retained(self._storage())

    def may_match(self, topic_filter: TopicFilter) -> bool:
        """Return whether retained messages may match. Reads only a few messages, and returns True if undecided."""
        storage = self._storage()
        page = retained_page(storage, topic_filter, storage.clock(), "", 1, examine=_PEEK)
        return bool(page.messages) or page.following is not None

    def of(self, topics: Sequence[str]) -> list[Message | None]:
        """Return, for each topic, its retained message, or None if it has none or the message has expired."""
        storage = self._storage()
        return retained_of(storage, topics, storage.clock())

    def places(self, topics: Sequence[str]) -> list[tuple[int, int]]:
        """Return, for each topic, where its retained message is in the streams (`retained_places`)."""
        return retained_places(self._storage(), topics)
