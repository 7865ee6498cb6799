"""The contents of a database: its topics and client ids, counted, and the last message of each topic.

Counts by topic are kept in memory (`topicstore.storage.topic_counts`). For those by client id the counts of tables
(`topicstore.shard.tally_tables`) are added up, and messages that no table counts are read. All
concern messages as they are stored, without plugins. Topics that begin with ``$``, which only filters with the same
first level match (MQTT 5, section 4.7.2), are in no table and are read each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

import attrs
import numpy as np

from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import GenerationArchivedError, GenerationDroppedError
from topicstore.contract.model import Message
from topicstore.contract.positions import time_of
from topicstore.contract.requests import ReplayRequest
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.tallies import Gathering, Tally, covers
from topicstore.shard.tally_tables import uncounted

from .as_stored import plan_generation, run_as_stored
from .reversing import newest_first
from .storage import Storage
from .topic_counts import TopicCounts

__all__ = ["ClientTally", "TopicTally", "clients", "counted_topics", "latest", "topic_tallies", "topics"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SEEK = 2_048
"""The approximate number of messages that are read in the time that finding one by its topic takes."""
_SCAN = 32_768
"""The approximate number of messages that are read in the time that a layout may need to begin reading all messages at
a place, because it has to decode those around it."""
_TRIES = 3
_ROWS = 4_096


class _Times:
    """Mixin with the times of the first and the last message as datetimes."""

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
    """Return the counts of the topics that match, in order of topics, with all that was stored before the call."""
    storage.check_open()
    if not covers(topic_filter):
        return _tally(storage, topic_filter, Tally.by_topic)
    tally = storage.kept(TopicCounts).of(storage)
    return tally if topic_filter.text == "#" else tally.where(tally.matching(topic_filter))


def topic_tallies(tally: Tally) -> list[TopicTally]:
    """Return the rows of counts by topic as objects."""
    return [TopicTally(topic=tally.topics[row[0]], **_counts(row)) for row in _rows(tally)]


def clients(storage: Storage, topic_filter: TopicFilter) -> list[ClientTally]:
    """Count messages by client id; see `Database.clients`."""
    tally = _tally(storage, topic_filter, Tally.by_client)
    return [ClientTally(client_id=tally.client_ids[row[1]], **_counts(row)) for row in _rows(tally)]


def latest(storage: Storage, topic_filter: TopicFilter) -> list[Message]:
    """Return the last message of each topic; see `Database.latest`."""
    storage.check_open()
    if topic_filter.literal:
        request = ReplayRequest(db=storage, topic_filter=topic_filter, start=0, until=None, order="time", batch_size=1)
        return [message for batch in newest_first(storage, request, 1) for message in batch.to_messages()]
    found: dict[_Place, Message] = {}
    for _ in range(_TRIES):  # again, if messages are deleted between counting and reading
        tallies = [_of_shard(storage, shard, topic_filter, Tally.by_topic) for shard in storage.shards]
        last: dict[str, _Place] = {}
        for shard, tally in enumerate(tallies):
            for row in _rows(tally):
                topic = tally.topics[row[0]]
                last[topic] = max(last.get(topic, _Place(0, 0)), _Place(row[3], shard))
        for shard, tally in enumerate(tallies):
            wanted = sorted((place.position, topic) for topic, place in last.items() if place.shard == shard)
            found |= _read(storage, shard, topic_filter, wanted, _positions_a_message(tally))
        if found.keys() >= set(last.values()):
            break
    return [found[place] for _, place in sorted(last.items()) if place in found]


# --- counting -------------------------------------------------------------------------


def _tally(storage: Storage, topic_filter: TopicFilter, change: Callable[[Tally], Tally]) -> Tally:
    storage.check_open()
    total = Gathering()
    for shard in storage.shards:
        total.add(_of_shard(storage, shard, topic_filter, change))
    return total.total()


def _of_shard(storage: Storage, shard: Shard, topic_filter: TopicFilter, change: Callable[[Tally], Tally]) -> Tally:
    total, began = Gathering(), time.monotonic()
    for record, _ in shard.slabs():
        total.add(_of_generation(storage, shard, record, topic_filter, change, began))
    return total.total()


def _of_generation(
    storage: Storage,
    shard: Shard,
    record: GenerationRecord,
    topic_filter: TopicFilter,
    change: Callable[[Tally], Tally],
    began: float,
) -> Tally:
    """Count the messages of a generation. If it is dropped meanwhile, there are none."""
    while True:
        total, number = Gathering(change), record.number
        try:
            ranges = shard.tallies.gather(number, topic_filter, total)
            last = shard.watermark if record.last_position is None else record.last_position
            for before, end in uncounted(ranges, record.first_position - 1, last):
                plan = plan_generation(storage, shard, number, topic_filter, before + 1, end, since=began)
                for batch in run_as_stored(storage, shard, [plan], "any"):
                    total.add(Tally.of(batch))
            shard.slab(number)  # raises if it was dropped
        except GenerationArchivedError:
            continue  # its export is read next
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
    """The place of a message; that of a later message is greater."""

    position: int
    shard: int


def _read(
    storage: Storage, shard: int, topic_filter: TopicFilter, wanted: list[tuple[int, str]], apart: int
) -> dict[_Place, Message]:
    """Read messages of a shard by position and topic, which are about ``apart`` positions from each other."""
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
    """Return the distance of the counted messages in positions, if they are evenly distributed."""
    return (int(tally.last.max()) - int(tally.first.min())) // tally.count + 1 if len(tally) else 1


def _spans(wanted: list[tuple[int, str]], apart: int) -> Iterator[list[tuple[int, str]]]:
    """Yield groups of wanted messages that are at most ``apart`` positions from each other."""
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
    """Yield messages that include the wanted ones: those of the whole span, or each by itself if that is faster.

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
