"""Histograms: the number of matching messages in each of several spans of time, without reading all messages.

For the filter ``#``, the counts come from zones of 65,536 consecutive messages. For other filters, they come from tally
tables (`topicstore.shard.tally_tables`), whose rows have the number of a topic's and client's messages between
two times. If both times lie in the same span, the count is exact. Otherwise the row's messages are distributed over
the time in proportion to all messages of the shard, whose distribution the zones give.

Messages that no table counts are read, up to a limit; beyond it, their number is extrapolated. If few messages match
altogether, all of them are read, for exact counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.errors import GenerationArchivedError, GenerationDroppedError
from topicstore.contract.positions import COUNTER_BITS, time_of
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.tally_tables import uncounted
from topicstore.shard.zones import SIZE
from topicstore.storage.reading.direct_reads import plan_generation, run_as_stored
from topicstore.storage.reading.history import Spread
from topicstore.storage.replays import run
from topicstore.storage.storage import Storage

from .counting import KeptRows

if TYPE_CHECKING:
    from topicstore.shard.elsewhere import Rows

__all__ = ["Histogram", "Part", "histogram", "parts_of"]

_READ = 262_144
"""The maximum number of uncounted messages to read, and of matching messages to read for exact counts."""

_Numbers = npt.NDArray[np.float64]
"""Times in microseconds since the epoch, which are exact up to 2**53, or counts."""


@attrs.frozen(kw_only=True)
class Histogram:
    """Counts of messages by time. Times are those of positions, in microseconds since the epoch."""

    start: int
    """The time at which the first span begins."""
    width: int
    """The length of each span in microseconds."""
    counts: list[int]
    """The number of messages in each span."""
    messages: int
    """The sum of the counts."""
    exact: bool
    """Whether every count is exact. Otherwise messages are distributed over the times between which they lie."""


def histogram(
    storage: Storage, topic_filter: TopicFilter, start: int | None, until: int | None, spans: int
) -> Histogram:
    """Count the matching messages stored before the call in ``spans`` spans of equal length.

    The first span begins at ``start`` (None: at the first message). The last ends at or shortly after ``until`` (None:
    after the last message). Messages at or after ``until`` are not counted. A span has at least one microsecond.
    """
    storage.check_open()
    parts = [part for shard in storage.shards for part in parts_of(storage, shard, topic_filter)]
    begin = min((part.first.min() for part in parts), default=0) if start is None else start
    end = max((part.last.max() for part in parts), default=begin) + 1 if until is None else until
    width = max(-(-int(end - begin) // spans), 1)
    edges = np.minimum(int(begin) + width * np.arange(spans + 1, dtype=np.float64), max(begin, end))
    counts, exact = np.zeros(spans), True
    for part in parts:
        found, sure = part.counts(edges)
        counts += found
        exact = exact and sure
    if not exact and counts.sum() <= _READ:
        read = _read(storage, topic_filter, edges)
        counts, exact = (counts, False) if read is None else (read, True)
    whole = np.diff(np.rint(np.concatenate(([0.0], np.cumsum(counts))))).astype(np.int64)  # rounding keeps the sum
    return Histogram(start=int(begin), width=width, counts=whole.tolist(), messages=int(whole.sum()), exact=bool(exact))


def _read(storage: Storage, topic_filter: TopicFilter, edges: _Numbers) -> _Numbers | None:
    """Count by reading the messages. Returns None if there are more than estimated, so that reading would take long."""
    request = ReplayRequest(
        db=storage,
        topic_filter=topic_filter,
        start=int(edges[0]),
        until=int(edges[-1]),
        order="any",
        batch_size=16_384,
    )
    counts = np.zeros(len(edges) - 1)
    for batch in run(storage.plan(request), storage.fetch):
        counts += np.histogram(_times(batch.positions), edges)[0]
        if counts.sum() > 2 * _READ:
            return None
    return counts


def parts_of(storage: Storage, shard: Shard, topic_filter: TopicFilter) -> list[Part]:
    """Return the matching messages of a shard, a part for each generation. May ask another site of a cluster."""
    if (elsewhere := shard.elsewhere) is not None:
        return [Part.of(rows) for rows in elsewhere.times(topic_filter)]
    found = (_part(storage, shard, record, topic_filter) for record in shard.generations.listed())
    return [part for part in found if part is not None]


@attrs.frozen
class Part:
    """The matching messages of a generation in a shard: rows, each with a number of messages between two times."""

    first: _Numbers
    last: _Numbers
    messages: _Numbers
    times: _Numbers
    """Times, ascending, at which the number of stored messages of all topics is known."""
    ranks: _Numbers
    """The number of stored messages of all topics at each of `times`."""

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """Return the part that another site has sent."""
        return cls(*(np.frombuffer(column, "<f8") for column in rows))

    def rows(self) -> Rows:
        """Return the columns as the `Rows` that a site sends to another."""
        first, last, messages, times, ranks = (
            np.ascontiguousarray(column, "<f8").tobytes()
            for column in (self.first, self.last, self.messages, self.times, self.ranks)
        )
        return first, last, messages, times, ranks

    def counts(self, edges: _Numbers) -> tuple[_Numbers, bool]:
        """Return the number of messages between consecutive edges, and whether the numbers are exact."""
        spans = len(edges) - 1
        places = [np.searchsorted(edges, times, side="right") - 1 for times in (self.first, self.last)]
        within = places[0] == places[1]
        inside = within & (places[0] >= 0) & (places[0] < spans)
        counts = np.bincount(places[0][inside], self.messages[inside], spans).astype(np.float64)
        across = ~within & (places[1] >= 0) & (places[0] < spans)
        if across.any():
            counts += np.diff(self._before(edges, across))
        return counts, not across.any()

    def _before(self, edges: _Numbers, rows: npt.NDArray[np.bool_]) -> _Numbers:
        """Return how many messages of ``rows`` come before each edge, if they are distributed like all messages."""
        first, last, at = (
            np.interp(times, self.times, self.ranks) for times in (self.first[rows], self.last[rows], edges)
        )
        return Spread.of(first, last, self.messages[rows]).before(at)


def _part(storage: Storage, shard: Shard, record: GenerationRecord, topic_filter: TopicFilter) -> Part | None:
    """Return the matching messages of a generation; None if there are none, or if it was dropped meanwhile."""
    while True:
        try:
            return _gathered(storage, shard, record, topic_filter)
        except GenerationArchivedError:
            continue  # the next attempt reads the export of the generation
        except GenerationDroppedError:
            return None


def _gathered(storage: Storage, shard: Shard, record: GenerationRecord, topic_filter: TopicFilter) -> Part | None:
    if topic_filter.text == "#":
        return _of_zones(storage, shard, record)
    number = record.number
    ranges, rows = storage.kept(KeptRows).of(shard, number, topic_filter)
    last = shard.writer.watermark if record.last_position is None else record.last_position
    times, ranks = _density(storage, shard, record, last)
    room = _READ
    for before, end in uncounted(ranges, record.first_position - 1, last):
        seen = 0
        for positions in _positions(storage, shard, number, topic_filter, before + 1, end):
            each = _times(positions)
            rows.append((each, each, np.ones(len(each))))
            seen, room = seen + len(each), room - len(each)
            if room < 0 and positions[-1] < end:
                rows.append(_estimated(seen, (before, int(positions[-1]), end), times, ranks))
                break
    shard.generations.slab(number)  # raises if the generation was dropped
    if not any(len(each) for each, _, _ in rows):
        return None
    begin, finish, messages = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Part(begin, finish, messages, times, ranks)


def _of_zones(storage: Storage, shard: Shard, record: GenerationRecord) -> Part | None:
    """Return all messages of a generation, with a row for each zone."""
    if not record.messages:
        return None
    last = shard.writer.watermark if record.last_position is None else record.last_position
    times, ranks = _density(storage, shard, record, last)
    return Part(times[:-1], times[1:], np.diff(ranks), times, ranks)


def _positions(
    storage: Storage,
    shard: Shard,
    generation: int,
    topic_filter: TopicFilter,
    first: int,
    last: int,
    rows: int | None = None,
) -> Iterator[npt.NDArray[np.uint64]]:
    plan = plan_generation(storage, shard, generation, topic_filter, first, last, since=None)
    for batch in run_as_stored(storage, shard, [plan], "time", rows):
        yield np.asarray(batch.positions, np.uint64)


def _estimated(
    seen: int, positions: tuple[int, int, int], times: _Numbers, ranks: _Numbers
) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return a row for unread messages, extrapolated from the share of matching messages among those that were read."""
    at = np.array([time_of(position) for position in positions], np.float64)
    begin, read, end = np.interp(at, times, ranks)
    return at[1:2] + 1, at[2:3], np.array([seen * (end - read) / max(read - begin, 1.0)])


def _density(storage: Storage, shard: Shard, record: GenerationRecord, last: int) -> tuple[_Numbers, _Numbers]:
    """Return times, ascending, and the number of a generation's messages in a shard up to each of them.

    The first is the time of the first message, the only message that is read, and that once.
    """
    ends = shard.reader.zone_ends(record.number)
    times = np.array([time_of(position) for position in (record.first_position, *ends, last)], np.float64)
    # The last zone may have fewer messages than the others.
    full = (min(SIZE * number, record.messages) for number in range(len(ends) + 1))
    ranks = np.array([*full, max(record.messages, 1)], np.float64)

    def first() -> float:
        everything = TopicFilter("#")
        for positions in _positions(storage, shard, record.number, everything, record.first_position, last, rows=1):
            return float(time_of(int(positions[0])))
        return float(times[0])

    times[0] = min(storage.kept(KeptRows).first_time(shard, record.number, first), times[1])
    return np.maximum.accumulate(times), ranks


def _times(positions: npt.NDArray[np.uint64]) -> _Numbers:
    return (positions >> np.uint64(COUNTER_BITS)).astype(np.float64)
