"""A reader's lag: the number of messages that it has not read, counted where that is cheap, and estimated otherwise.

If at most 65,536 messages of all topics follow the reader's place in a shard, the matching messages are counted, up to
`COUNTED`. The rest is estimated, because no index has the number of a filter's messages between two positions. A few
messages are read at each of `_PROBES` points, which are evenly spaced in time. Their density is assumed to hold up to
the next point.

If more messages follow, nothing is read, so that ten thousand readers cost little more than one. The estimate uses the
number of messages of each topic, and the positions of its first and last message
(`topicstore.storage.counting.contents`). A topic's messages are assumed to be distributed like all messages between the
two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationDroppedError
from topicstore.contract.positions import Positions, time_of
from topicstore.contract.topics import TopicFilter
from topicstore.shard.tally_records import Tally, covers
from topicstore.storage.reading.history import History, Spread
from topicstore.storage.storage import Storage

from .contents import TopicCounts

__all__ = ["COUNTED", "Lag", "LagCounter", "Wanted"]

COUNTED = 10_000
"""The maximum number of messages of a shard that are counted exactly."""
_ROWS = 2_500
_PROBES = 16
_PROBED = 250
"""The number of messages to read at each point."""
_FAR = 65_536
"""The number of following messages, of all topics, from which they are estimated instead of read."""
_REMEMBERED = 1_000_000
"""The maximum number of positions that are cached for readers of the same filter."""

Wanted = Callable[[int, MessageBatch], npt.NDArray[np.bool_]]
"""A function that returns, for each message of a batch of a shard, whether it must still be delivered to the reader."""


@attrs.frozen(kw_only=True)
class Lag:
    """The lag of a reader behind the newest readable messages, in messages and in time."""

    messages: int
    """The number of stored messages that match and were not delivered."""
    exact: bool
    """Whether ``messages`` is exact. It always is if at most 10,000 matching messages, and 65,536 of all topics, follow
    in each shard. Otherwise it may be an estimate, from counts of each topic or from samples at 16 points in
    time. The estimate is never more than the number of messages stored."""
    seconds: float
    """The seconds from the position of the next message to deliver to that of the newest message of the
    database; 0 if there is no next message. The time of a position is that of the store, or the message's own time with
    ``timestamps="message"``."""

    @classmethod
    def none(cls) -> Lag:
        """Return the lag of a reader that has read everything."""
        return cls(messages=0, exact=True, seconds=0.0)

    def __add__(self, other: Lag) -> Lag:
        """Return the combined lag of a reader that has the undelivered messages of both."""
        return Lag(
            messages=self.messages + other.messages,
            exact=self.exact and other.exact,
            seconds=max(self.seconds, other.seconds),
        )


@attrs.frozen
class _Unread:
    """The matching messages after a place in one shard."""

    positions: Positions
    """The positions of the counted messages."""
    more: int
    """The estimated number of messages after the counted ones."""
    exact: bool
    """Whether ``more`` is exact."""
    reached: int
    """The position up to which all messages were counted."""

    def behind(self, place: int) -> _Unread:
        """Return the messages after a later place. All messages must have been counted."""
        return attrs.evolve(
            self, positions=self.positions[np.searchsorted(self.positions, np.uint64(place), "right") :]
        )

    def __len__(self) -> int:
        return len(self.positions) + self.more

    @property
    def oldest(self) -> int | None:
        """The position of the next message, or a lower bound of it if it was not read; None if there is no message."""
        if len(self.positions):
            return int(self.positions[0])
        return self.reached if self.more else None


@attrs.frozen
class _TopicSpread:
    """The distribution of the messages of matching topics in a shard."""

    first: Positions
    """The sorted positions of the topics' first messages."""
    last: Positions
    """The sorted positions of the topics' last messages."""
    spread: Spread
    messages: int

    @classmethod
    def of(cls, tally: Tally, history: History) -> _TopicSpread:
        ranks = history.ranks_at(tally.first), history.ranks_at(tally.last)
        spread = Spread.of(*ranks, tally.messages.astype(np.float64))
        return cls(np.sort(tally.first), np.sort(tally.last), spread, tally.count)

    def after(self, place: int, history: History) -> tuple[int, bool, int]:
        """Return the number of messages after a place, whether it is exact, and a lower bound of their positions.

        The number is exact if no topic has messages both before and after the place.
        """
        at = np.array([place], np.uint64)
        begun, ended = (int(np.searchsorted(keys, at[0], side="right")) for keys in (self.first, self.last))
        if ended == len(self.last):
            return 0, True, place
        oldest = place if begun > ended or begun == len(self.first) else int(self.first[begun])
        left = round(self.messages - float(self.spread.before(history.ranks_at(at))[0]))
        return max(left, len(self.last) - ended), begun == ended, oldest


class LagCounter:
    """A counter of readers' lags, relative to the messages that were readable when the counter was created.

    One counter serves many readers: the messages counted for one reader are not read again for others with the same
    filter. It is not thread-safe. Its methods raise the errors of reading.
    """

    def __init__(self, storage: Storage) -> None:
        storage.check_open()
        self._storage = storage
        self.marks = [shard.reader.watermark for shard in storage.shards]
        """By shard, the highest readable position when the counter was created."""
        self._counted: dict[tuple[str, int], tuple[int, _Unread]] = {}
        """By filter and shard, a reader's last position and all messages after it, if they were counted to the end."""
        self._remembered = 0
        self._histories: dict[int, History] = {}
        self._spreads: dict[tuple[str, int], _TopicSpread] = {}

    def lag(self, topic_filter: TopicFilter, places: Sequence[int], wanted: Wanted | None = None) -> Lag:
        """Return the lag of a reader that has read everything up to ``places``, a position for each shard.

        With ``wanted``, only messages for which it returns True count.
        """
        shards = enumerate(zip(places, self.marks, strict=True))
        behind = [self._unread(topic_filter, shard, place, wanted) for shard, (place, mark) in shards if place < mark]
        oldest = [position for unread in behind if (position := unread.oldest) is not None]
        return Lag(
            messages=sum(map(len, behind)),
            exact=all(unread.exact for unread in behind),
            seconds=max(map(self.seconds_from, oldest), default=0.0),
        )

    def most_seconds(self, places: Sequence[int]) -> float:
        """Return an upper bound of the lag in seconds of a reader; ``places``: see `lag`. Reads nothing."""
        behind = [place for place, mark in zip(places, self.marks, strict=True) if place < mark]
        return max(map(self.seconds_from, behind), default=0.0)

    def batches(self, topic_filter: TopicFilter, shard: int, place: int) -> Iterator[MessageBatch]:
        """Yield the matching messages of a shard after a reader's last position, in order of positions."""
        return self._batches(topic_filter, shard, place + 1, self.marks[shard], _ROWS)

    def note(self, topic_filter: TopicFilter, shard: int, place: int, positions: Positions) -> None:
        """Cache the positions of all matching messages after a reader's last position: they aren't read again."""
        unread = _Unread(positions, 0, exact=True, reached=self.marks[shard])
        self._remember((topic_filter.text, shard), place, unread)

    def readable(self, topic_filter: TopicFilter, shard: int, positions: Positions) -> Positions:
        """Return those of the given positions of a shard at which a matching message is still stored.

        ``positions`` must be ascending, and so is the result.
        """
        if not len(positions):
            return positions
        while True:
            try:
                batches = self._batches(topic_filter, shard, int(positions[0]), int(positions[-1]), _ROWS)
                found = [batch.positions[np.isin(batch.positions, positions)] for batch in batches]
            except GenerationDroppedError:
                continue
            return np.sort(np.concatenate([np.empty(0, np.uint64), *found]))

    def caught_up(self, places: Sequence[int], unread: Iterable[bool]) -> list[int]:
        """Return a reader's positions by shard, advanced to the shard's end where nothing is unread.

        ``unread`` says for each shard whether messages are unread.
        """
        return [place if some else mark for place, some, mark in zip(places, unread, self.marks, strict=True)]

    def seconds_from(self, position: int) -> float:
        """Return the seconds from the time of a position to that of the newest position of the database."""
        return max(time_of(max(self.marks)) - time_of(position), 0) / 1e6

    def _unread(self, topic_filter: TopicFilter, shard: int, place: int, wanted: Wanted | None) -> _Unread:
        if wanted is not None:
            return self._count(topic_filter, shard, place, wanted)
        key = topic_filter.text, shard
        after, known = self._counted.get(key, (place + 1, None))
        if known is not None and after <= place:
            return known.behind(place)
        if self.far(topic_filter, shard, place):
            return self._estimated(topic_filter, shard, place)
        unread = self._count(topic_filter, shard, place, None)
        if unread.exact and not unread.more:
            self._remember(key, place, unread)
        return unread

    def far(self, topic_filter: TopicFilter, shard: int, place: int) -> bool:
        """Return whether so many messages follow a position that their number is estimated. Reads nothing."""
        if not covers(topic_filter) or self._storage.shards[shard].writer.read_only:
            return False  # there are no counts for an estimate
        return place < self.marks[shard] and self._history(shard).after(place) >= _FAR

    def _history(self, shard: int) -> History:
        if shard not in self._histories:
            self._histories[shard] = History.of(self._storage.shards[shard], self.marks[shard])
        return self._histories[shard]

    def _estimated(self, topic_filter: TopicFilter, shard: int, place: int) -> _Unread:
        """Return the messages after a place, estimated from the counts of each topic."""
        key = topic_filter.text, shard
        if key not in self._spreads:
            tally = self._storage.kept(TopicCounts).of_shard(self._storage, self._storage.shards[shard])
            matching = tally if topic_filter.text == "#" else tally.where(tally.matching(topic_filter))
            self._spreads[key] = _TopicSpread.of(matching, self._history(shard))
        messages, exact, oldest = self._spreads[key].after(place, self._history(shard))
        return _Unread(
            np.empty(0, np.uint64), min(messages, self._stored_from(shard, place)), exact=exact, reached=oldest
        )

    def _remember(self, key: tuple[str, int], place: int, unread: _Unread) -> None:
        self._remembered += len(unread.positions)
        if self._remembered > _REMEMBERED:
            self._counted.clear()
            self._remembered = len(unread.positions)
        self._counted[key] = place, unread

    def _count(self, topic_filter: TopicFilter, shard: int, place: int, wanted: Wanted | None) -> _Unread:
        while True:
            try:
                return self._counted_from(topic_filter, shard, place, wanted)
            except GenerationDroppedError:  # count again, without the generation or from its export
                continue

    def _counted_from(self, topic_filter: TopicFilter, shard: int, place: int, wanted: Wanted | None) -> _Unread:
        """Count the messages after a place: exactly up to `COUNTED`, and estimated from samples after that."""
        end, found, looked, most = self.marks[shard], [np.empty(0, np.uint64)], 0, self._stored_from(shard, place)
        for batch in self._batches(topic_filter, shard, place + 1, end, _ROWS):
            if looked >= COUNTED:
                break
            looked += len(batch)
            place = int(batch.positions[-1])
            found.append(batch.positions if wanted is None else batch.positions[wanted(shard, batch)])
        else:
            return _Unread(np.concatenate(found), 0, exact=True, reached=end)
        more, exact = 0, True
        edges = [place + (end - place) * probe // _PROBES for probe in range(_PROBES + 1)]
        for first, last in pairwise(edges):
            some, whole = self._probe(topic_filter, shard, first, last, wanted)
            more, exact = more + some, exact and whole
        more = more if exact else min(more, most - looked)
        return _Unread(np.concatenate(found), more, exact=exact, reached=place)

    def _probe(
        self, topic_filter: TopicFilter, shard: int, after: int, last: int, wanted: Wanted | None
    ) -> tuple[int, bool]:
        """Return the number of messages after position ``after`` up to ``last``, and whether it is exact."""
        place, looked, found = after, 0, 0
        for batch in self._batches(topic_filter, shard, after + 1, last, _PROBED):
            if looked >= _PROBED:
                return found * (last - after) // (place - after), False
            looked += len(batch)
            place = int(batch.positions[-1])
            found += len(batch) if wanted is None else int(np.count_nonzero(wanted(shard, batch)))
        return found, True

    def _batches(
        self, topic_filter: TopicFilter, shard: int, first: int, last: int, rows: int
    ) -> Iterator[MessageBatch]:
        return self._storage.run_shards([self._storage.plan_shard(shard, topic_filter, first, last)], rows)

    def _stored_from(self, shard: int, position: int) -> int:
        """Return the number of messages in all generations that extend beyond a position, an upper bound of the lag."""
        records = self._storage.shards[shard].generations.listed()
        return sum(r.messages for r in records if r.last_position is None or r.last_position > position)
