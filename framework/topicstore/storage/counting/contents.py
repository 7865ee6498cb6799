"""The contents of a database: message counts by topic and by client id, and the last message of each topic.

Counts are summed from the tally tables (`topicstore.shard.tally_tables`), and messages that no table counts are read,
without their payloads where the layout can do that. Only messages that may match the filter are counted. All counts
concern the stored form of messages, without plugins. Topics that begin with ``$`` are in no table. Only filters with
the same first level match them (MQTT 5, section 4.7.2).

Counts by topic are cached in memory (`TopicCounts`), those of ``#`` and of the filters that were requested last. The
cached counts are initialized from the tally tables. Afterwards each new table is added to them. Messages without a
table are read once: a call reads those stored since the last call. After a delete or the drop of a generation, the
counts of the shard are computed again.

`Levels` has the children of a level of topics, each with the counts of all topics below it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from operator import is_not
from threading import Lock
from typing import Any, NamedTuple, Self

import attrs
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationArchivedError, GenerationDroppedError
from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.tally_records import Gathering, Numbers, Tally, covers
from topicstore.shard.tally_tables import Counted, Span, uncounted
from topicstore.storage.reading.ordering import newest_first
from topicstore.storage.storage import Storage

from .counting import read_counts

__all__ = [
    "MOST_TOPICS",
    "ClientTally",
    "Levels",
    "TopicCounts",
    "TopicTally",
    "clients",
    "clients_of_shard",
    "counted_topics",
    "latest",
    "latest_of",
    "topic_tallies",
    "topics",
]

MOST_TOPICS = 1_000_000
"""The maximum number of topics of a shard whose counts are cached, about 200 bytes each. With more topics, counts are
computed at each call."""
_EVERYTHING = TopicFilter("#")
_NEVER = -1
"""A number of deleted messages that no shard has, which forces a new count."""
_WAITING = 16
"""The number of queued new tables from which the thread that made the last one adds them to the counts itself."""
_FILTERS = 16
"""The maximum number of filters, besides ``#``, whose counts are cached. All of them have at most `MOST_TOPICS`."""


class TopicCounts:
    """The cached counts by topic of one open database. The methods are thread-safe, and raise the errors of reading."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: dict[str, _FilterCounts] = {}
        """The counts of each filter, least recently used first. Guarded by the lock."""

    def of(self, storage: Storage, topic_filter: TopicFilter) -> Tally:
        """Return the counts of the matching topics, of all messages stored before the call."""
        if self._within(topic_filter, storage.shards):
            return _matching(self.of(storage, _EVERYTHING), topic_filter)
        counts = self._counts(topic_filter)
        tallies = [self._of_shard(storage, shard, counts) for shard in storage.shards]
        known, together = counts.added
        if len(known) != len(tallies) or any(map(is_not, known, tallies)):
            together = Tally.sum(tallies).by_topic()
            counts.added = tallies, together
        return together

    def of_shard(self, storage: Storage, shard: Shard, topic_filter: TopicFilter = _EVERYTHING) -> Tally:
        """Return the counts of the matching topics, of all messages that a shard stored before the call."""
        if self._within(topic_filter, [shard]):
            return _matching(self.of_shard(storage, shard), topic_filter)
        return self._of_shard(storage, shard, self._counts(topic_filter))

    def _of_shard(self, storage: Storage, shard: Shard, counts: _FilterCounts) -> Tally:
        if (elsewhere := shard.elsewhere) is not None:
            return elsewhere.counts(counts.topic_filter, by_topic=True)
        if shard.writer.read_only:  # no caching, because deletes of the writing process aren't visible here
            return _ShardCounts(counts.topic_filter).brought_up(storage, shard)
        shard.tallies.counted = partial(self._note, shard.number)  # set before the tables are read, to miss none
        with self._lock:
            of_shard = counts.shards.setdefault(shard.number, _ShardCounts(counts.topic_filter))
        with of_shard.lock:
            return of_shard.brought_up(storage, shard)

    def _within(self, topic_filter: TopicFilter, shards: Sequence[Shard]) -> bool:
        """Return whether a filter's counts are among the cached counts of ``#``."""
        if topic_filter.text == "#" or not covers(topic_filter):
            return False
        with self._lock:
            kept = self._kept.get("#")
            known = {} if kept is None else dict(kept.shards)
        return all(shard.number in known and known[shard.number].is_valid(shard) for shard in shards)

    def _counts(self, topic_filter: TopicFilter) -> _FilterCounts:
        with self._lock:
            kept, text = self._kept, topic_filter.text
            counts = kept.pop(text) if text in kept else _FilterCounts(topic_filter)
            kept[text] = counts  # the end is for the most recently used
            for other in [other for other in kept if other != "#"][:-_FILTERS]:
                del kept[other]
            return counts

    def _note(self, shard: int, counted: Counted) -> None:
        """Add a new table to the counts of all filters."""
        counted = counted._replace(tally=counted.tally.by_topic())
        with self._lock:
            known = [counts.shards[shard] for counts in self._kept.values() if shard in counts.shards]
        for of_shard in known:
            of_shard.note(counted)


def _matching(tally: Tally, topic_filter: TopicFilter) -> Tally:
    return tally.where(tally.matching(topic_filter))


class _FilterCounts:
    """The counts of one filter."""

    def __init__(self, topic_filter: TopicFilter) -> None:
        self.topic_filter = topic_filter
        self.shards: dict[int, _ShardCounts] = {}
        self.added: tuple[list[Tally], Tally] = [], Tally.empty()
        """The last counts of all shards, and their sum."""


class _ShardCounts:
    """The counts of one filter in one shard."""

    def __init__(self, topic_filter: TopicFilter) -> None:
        self.lock = Lock()
        """Held while messages are counted, which may take seconds the first time. No writer waits for it."""
        self._filter = topic_filter
        self._most = MOST_TOPICS if topic_filter.text == "#" else MOST_TOPICS // _FILTERS
        self._waiting: deque[Counted] = deque()
        self._forget(_NEVER)

    def _forget(self, deleted: int) -> None:
        self._deleted = deleted
        """The shard's number of deleted messages when counting began. If it has changed, the counts are invalid."""
        self._total = Gathering(Tally.by_topic)
        self._spans: dict[int, list[Span]] = {}
        """By generation, the ranges of positions whose messages ``_total`` counts, in order."""
        self._waiting.clear()  # forgets tables that were made before a delete

    def is_valid(self, shard: Shard) -> bool:
        """Return whether messages were counted, and none was deleted since."""
        return self._deleted == shard.writer.counters.deleted

    def brought_up(self, storage: Storage, shard: Shard) -> Tally:
        """Count the messages stored since the last call, and return all counts. The lock must be held."""
        while True:
            try:
                return shard.generations.undisturbed(partial(self._brought_up, storage, shard))
            except (GenerationArchivedError, GenerationDroppedError):
                self._forget(_NEVER)
            except BaseException:  # the counts may have a part of a generation
                self._forget(_NEVER)
                raise

    def _brought_up(self, storage: Storage, shard: Shard) -> Tally:
        deleted, began = shard.writer.counters.deleted, time.monotonic()
        slabs = shard.generations.with_slabs()
        if deleted != self._deleted or not self._spans.keys() <= {record.number for record, _ in slabs}:
            self._forget(deleted)
        self._take()
        for record, _ in slabs:
            self._count(storage, shard, record, began)
        total = self._total.total()
        if len(total) > self._most:
            self._forget(_NEVER)
        return total

    def _count(self, storage: Storage, shard: Shard, record: GenerationRecord, began: float) -> None:
        number, last = record.number, shard.writer.watermark if record.last_position is None else record.last_position
        spans = self._spans.get(number)
        if spans is None:
            ranges = shard.tallies.gather(number, self._filter, self._total)
            spans = [Span(counted.before, counted.last) for counted in ranges]
        for span in uncounted(spans, record.first_position - 1, last):
            self._total.add(read_counts(storage, shard, number, self._filter, span, began, topics=True))
        shard.generations.slab(number)  # raises if the generation was dropped
        self._spans[number] = [Span(record.first_position - 1, max([last, *(span.last for span in spans)]))]

    # --- new tables ---

    def note(self, counted: Counted) -> None:
        """Queue a new table, which the next count adds; add all queued tables if there are many."""
        self._waiting.append(counted)
        if len(self._waiting) >= _WAITING and self.lock.acquire(blocking=False):
            try:
                self._take()
            finally:
                self.lock.release()

    def _take(self) -> None:
        """Add the queued tables of messages that aren't counted yet; of other tables' messages, some may be read later.

        The lock must be held.
        """
        while self._waiting:
            generation, before, last, tally = self._waiting.popleft()
            spans = self._spans.get(generation)
            if spans is None or not covers(self._filter):
                continue
            if all(last <= span.before or before >= span.last for span in spans):
                self._total.add(_matching(tally, self._filter))
                self._spans[generation] = _joined(sorted([*spans, Span(before, last)]))


def _joined(spans: list[Span]) -> list[Span]:
    """Join ranges that follow each other."""
    joined = spans[:1]
    for span in spans[1:]:
        if span.before == joined[-1].last:
            joined[-1] = Span(joined[-1].before, span.last)
        else:
            joined.append(span)
    return joined


_BEHIND_SLASH = chr(ord("/") + 1)
"""The character after a slash. In sorted order, the topics below level ``a`` lie between ``a/`` and ``a0``."""


@attrs.frozen(eq=False)
class Levels:
    """The children of a level of topics, as columns with a row for each child."""

    names: list[str]
    topics: npt.NDArray[np.intp]
    """The number of topics that end at each child or below it."""
    messages: Numbers
    size: Numbers
    """The total size of payloads and topics, in bytes."""
    last: Numbers
    """The position of the last message."""
    ends: npt.NDArray[np.bool_]
    """Whether a topic ends at the child itself."""

    @classmethod
    def of(cls, tally: Tally, parents: Sequence[str]) -> Self:
        """Return the children of the level at ``parents``, from counts by topic. Examines only the topics below it."""
        begin = "".join(f"{level}/" for level in parents)
        end = bisect_left(tally.topics, begin[:-1] + _BEHIND_SLASH) if parents else len(tally.topics)
        edges = bisect_left(tally.topics, begin), end
        rows = slice(*np.searchsorted(tally.topic, np.array(edges, np.uint64)).tolist())
        texts = [tally.topics[at][len(begin) :] for at in tally.topic[rows].tolist()]
        children: dict[str, int] = {}
        child = np.fromiter(
            (children.setdefault(text.partition("/")[0], len(children)) for text in texts), np.intp, len(texts)
        )
        ends = np.zeros(len(children), np.bool_)
        ends[[children[text] for text in texts if "/" not in text]] = True
        last = np.zeros(len(children), np.uint64)
        np.maximum.at(last, child, tally.last[rows])

        def summed(column: npt.NDArray[Any]) -> Numbers:
            total = np.zeros(len(children), np.uint64)
            np.add.at(total, child, column[rows])
            return total

        count = np.bincount(child, minlength=len(children))
        return cls(list(children), count, summed(tally.messages), summed(tally.size), last, ends)

    def __len__(self) -> int:
        return len(self.names)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SEEK = 2_048
"""The approximate cost of finding one message by its topic, in messages that could be read in the same time."""
_SCAN = 32_768
"""The approximate cost of beginning a scan, in messages that could be read in the same time. A layout may have to
decode the messages around the place."""
_TRIES = 3
_ROWS = 4_096


class _Times:
    """A mixin that returns the times of the first and the last message as datetimes."""

    first: int
    last: int

    @property
    def first_time(self) -> datetime:
        """The time of the first message, in UTC."""
        return _EPOCH + timedelta(microseconds=self.first)

    @property
    def last_time(self) -> datetime:
        """The time of the last message, in UTC."""
        return _EPOCH + timedelta(microseconds=self.last)


@attrs.frozen(kw_only=True)
class TopicTally(_Times):
    """The counts of one topic's messages. Times are those of positions, in microseconds since the epoch."""

    topic: str
    messages: int
    bytes: int
    """The size of the payloads, and of the topics in UTF-8, before compression."""
    first: int
    last: int


@attrs.frozen(kw_only=True)
class ClientTally(_Times):
    """The counts of one client id's messages, as in `TopicTally`."""

    client_id: str
    messages: int
    bytes: int
    first: int
    last: int


def topics(storage: Storage, topic_filter: TopicFilter) -> list[TopicTally]:
    """Count messages by topic; see `Database.topics`."""
    return topic_tallies(counted_topics(storage, topic_filter))


def counted_topics(storage: Storage, topic_filter: TopicFilter) -> Tally:
    """Return the counts of the matching topics, in order of topics, of all messages stored before the call."""
    storage.check_readable()
    return storage.kept(TopicCounts).of(storage, topic_filter)


def topic_tallies(tally: Tally) -> list[TopicTally]:
    """Return the rows of counts by topic as objects."""
    return [TopicTally(topic=tally.topics[row[0]], **_counts(row)) for row in _rows(tally)]


def clients(storage: Storage, topic_filter: TopicFilter) -> list[ClientTally]:
    """Count messages by client id; see `Database.clients`."""
    storage.check_readable()
    total, began = Gathering(), time.monotonic()
    for shard in storage.shards:
        total.add(clients_of_shard(storage, shard, topic_filter, began))
    tally = total.total()
    return [ClientTally(client_id=tally.client_ids[row[1]], **_counts(row)) for row in _rows(tally)]


def clients_of_shard(storage: Storage, shard: Shard, topic_filter: TopicFilter, since: float) -> Tally:
    """Count a shard's messages by client id. ``since`` is that of `topicstore.shard.reader.ShardReader.plan`."""
    if (elsewhere := shard.elsewhere) is not None:
        return elsewhere.counts(topic_filter, by_topic=False)
    total = Gathering(Tally.by_client)
    for record, _ in shard.generations.with_slabs():
        total.add(_clients(storage, shard, record, topic_filter, since))
    return total.total()


def latest(storage: Storage, topic_filter: TopicFilter) -> list[Message]:
    """Return the last message of each topic; see `Database.latest`."""
    storage.check_readable()
    if topic_filter.literal:
        request = ReplayRequest(db=storage, topic_filter=topic_filter, start=0, until=None, order="time", batch_size=1)
        return [message for batch in newest_first(storage, request, 1) for message in batch.to_messages()]
    return _latest(storage, topic_filter, None)


def latest_of(storage: Storage, topics: Iterable[str]) -> list[Message]:
    """Return the last message of each of these topics that has one, in ascending order of topics.

    Unlike `latest` of each topic, the call reads no stream backwards: the positions come from the counts.
    """
    storage.check_readable()
    dollar, names = set[str](), set[str]()
    for topic in topics:
        (dollar if topic.startswith("$") else names).add(topic)
    found = [message for topic in sorted(dollar) for message in latest(storage, TopicFilter(topic))]
    if names:
        found += _latest(storage, _EVERYTHING, names)
    return sorted(found, key=lambda message: message.topic)


def _latest(storage: Storage, topic_filter: TopicFilter, only: AbstractSet[str] | None) -> list[Message]:
    """Return the last message of each matching topic, or of those in ``only``, in ascending order of topics."""
    found: dict[_Place, Message] = {}
    for _ in range(_TRIES):  # repeated if messages are deleted between counting and reading
        tallies = [storage.kept(TopicCounts).of_shard(storage, shard, topic_filter) for shard in storage.shards]
        chosen = tallies if only is None else [_named(tally, only) for tally in tallies]
        last: dict[str, _Place] = {}
        for shard, tally in enumerate(chosen):
            for row in _rows(tally):
                topic = tally.topics[row[0]]
                last[topic] = max(last.get(topic, _Place(0, 0)), _Place(row[3], shard))
        for shard, tally in enumerate(tallies):
            wanted = sorted((place.position, topic) for topic, place in last.items() if place.shard == shard)
            found |= _read_last(storage, shard, topic_filter, wanted, _positions_a_message(tally))
        if found.keys() >= set(last.values()):
            break
    return [found[place] for _, place in sorted(last.items()) if place in found]


def _named(tally: Tally, topics: AbstractSet[str]) -> Tally:
    """Return the rows of these topics."""
    there = np.fromiter((topic in topics for topic in tally.topics), np.bool_, len(tally.topics))
    return tally.where(there[tally.topic])


# --- counting -------------------------------------------------------------------------


def _clients(
    storage: Storage, shard: Shard, record: GenerationRecord, topic_filter: TopicFilter, began: float
) -> Tally:
    """Count the messages of a generation by client id. Returns an empty tally if it is dropped meanwhile."""
    while True:
        total, number = Gathering(Tally.by_client), record.number
        try:
            ranges = shard.tallies.gather(number, topic_filter, total)
            last = shard.writer.watermark if record.last_position is None else record.last_position
            for span in uncounted(ranges, record.first_position - 1, last):
                total.add(read_counts(storage, shard, number, topic_filter, span, began, clients=True))
            shard.generations.slab(number)  # raises if the generation was dropped
        except GenerationArchivedError:
            continue  # the next attempt reads the archived generation
        except GenerationDroppedError:
            return Tally.empty()
        return total.total()


def _rows(tally: Tally) -> Iterator[tuple[int, ...]]:
    columns = (tally.topic, tally.client_id, tally.first, tally.last, tally.messages, tally.size)
    return zip(*(column.tolist() for column in columns), strict=True)


def _counts(row: tuple[int, ...]) -> dict[str, int]:
    _, _, first, last, messages, size = row
    return {"messages": messages, "bytes": size, "first": time_of(first), "last": time_of(last)}


# --- reading the last messages ----------------------------------------------------------


class _Place(NamedTuple):
    """The place of a message, ordered by position and then by shard."""

    position: int
    shard: int


def _read_last(
    storage: Storage, shard: int, topic_filter: TopicFilter, wanted: list[tuple[int, str]], apart: int
) -> dict[_Place, Message]:
    """Read messages of a shard, given by position and topic.

    ``apart`` is the average distance of the shard's messages in positions.
    """
    found: dict[_Place, Message] = {}
    for span in _spans(wanted, _SCAN * apart):
        scanned = _SCAN + (span[-1][0] - span[0][0]) // apart
        for batch in _batches(storage, shard, topic_filter, span, scanned):
            rows = np.flatnonzero(np.isin(batch.positions, np.array([position for position, _ in span], np.uint64)))
            chosen = batch.take(rows)
            places = [_Place(position, shard) for position in np.asarray(chosen.positions).tolist()]
            found.update(zip(places, chosen.to_messages(), strict=True))
    return found


def _positions_a_message(tally: Tally) -> int:
    """Return the average distance between counted messages, in positions."""
    return (int(tally.last.max()) - int(tally.first.min())) // tally.count + 1 if len(tally) else 1


def _spans(wanted: list[tuple[int, str]], apart: int) -> Iterator[list[tuple[int, str]]]:
    """Yield groups of consecutive wanted messages with gaps of at most ``apart`` positions."""
    span = wanted[:1]
    for before, one in pairwise(wanted):
        if one[0] - before[0] > apart:
            yield span
            span = []
        span.append(one)
    if span:
        yield span


def _batches(
    storage: Storage, shard: int, topic_filter: TopicFilter, span: list[tuple[int, str]], scanned: int
) -> Iterator[MessageBatch]:
    """Yield batches that include the wanted messages: the whole span, or each message individually if that is faster.

    ``scanned`` is the cost of reading the whole span, in messages.
    """
    if scanned < _SEEK * len(span):
        plan = storage.plan_shard(shard, topic_filter, span[0][0], span[-1][0], since=time.monotonic())
        cursors = sum(len(generation.cursors) for generation in plan.generations)
        if scanned + _SEEK * cursors < _SEEK * len(span):
            yield from storage.run_shards([plan], _ROWS, "any")
            return
    for position, topic in span:
        plan = storage.plan_shard(shard, TopicFilter(topic), position, position, since=time.monotonic())
        yield from storage.run_shards([plan], 1, "any")
