"""`TopicCounts`: what a database has of each topic, kept in memory and brought up to date with what was stored since.

They are made of the tally tables (`topicstore.shard.tally_tables`) once. From then on each range that is counted in the
background is added as it is counted, and messages that no table counts yet, about 65,000 in each shard, are read once
each: a call reads those that were stored since the last one. After a delete, and when a generation was dropped, the
counts of the shard are made anew.

Topics that begin with ``$``, which ``#`` doesn't match, are not counted here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from operator import is_not
from threading import Lock

import attrs

from topicstore.contract.errors import GenerationArchivedError, GenerationDroppedError
from topicstore.contract.topics import TopicFilter
from topicstore.shard.records import GenerationRecord
from topicstore.shard.shard import Shard
from topicstore.shard.tallies import Gathering, Tally
from topicstore.shard.tally_tables import uncounted

from .as_stored import plan_generation, run_as_stored
from .storage import Storage

__all__ = ["MOST_TOPICS", "TopicCounts"]

MOST_TOPICS = 1_000_000
"""The most topics of a shard whose counts are kept, about 200 bytes each. Counts of more are made for each call."""
_EVERYTHING = TopicFilter("#")
_NEVER = -1
"""A number of deleted messages that no shard has, so that everything is counted again."""
_WAITING = 16
"""The number of ranges counted meanwhile that wait to be added, before the counting thread adds them."""

_Counted = tuple[int, int, int, Tally]
"""A generation, a range of its positions as (before, last), and what there is in it."""


class TopicCounts:
    """The counts of one open database. Its methods may be called from any thread, and raise the errors of reading."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shards: dict[int, _ShardCounts] = {}
        self._added: tuple[list[Tally], Tally] = [], Tally.empty()
        """The counts of shards, and what they are together."""

    def of(self, storage: Storage) -> Tally:
        """Return the counts by topic, with all that was stored before the call."""
        tallies = [self.of_shard(storage, shard) for shard in storage.shards]
        known, together = self._added
        if len(known) != len(tallies) or any(map(is_not, known, tallies)):
            together = Tally.sum(tallies).by_topic()
            self._added = tallies, together
        return together

    def of_shard(self, storage: Storage, shard: Shard) -> Tally:
        """Return the counts of a shard by topic, with all that was stored before the call."""
        if shard.log.read_only:  # whoever writes may delete, which isn't told here
            return _ShardCounts().brought_up(storage, shard)
        with self._lock:
            counts = self._shards.setdefault(shard.number, _ShardCounts())
        with counts.lock:
            return counts.brought_up(storage, shard)


@attrs.define
class _Tail:
    """The messages of a generation behind those that tables count."""

    before: int
    last: int
    tally: Tally


class _ShardCounts:
    def __init__(self) -> None:
        self.lock = Lock()
        """Held while messages are counted, which may take seconds the first time: no writer waits for it."""
        self._waiting: deque[_Counted] = deque()
        self._forget(0)

    def _forget(self, deleted: int) -> None:
        self._deleted = deleted
        """The number of messages that had been deleted in the shard before any of these were counted."""
        self._tables = Gathering(Tally.by_topic)
        self._ends: dict[int, int] = {}
        """By generation, the position up to which its messages are in ``_tables``."""
        self._tails: dict[int, _Tail] = {}
        self._total: Tally | None = None
        self._waiting.clear()  # of ranges that were counted before a delete

    def brought_up(self, storage: Storage, shard: Shard) -> Tally:
        """Count what was stored since the last call, and return the counts of all. With the lock held."""
        if not shard.log.read_only:
            shard.tallies.counted = self._note  # before tables are read, so that none is missed
        while True:
            try:
                return self._brought_up(storage, shard)
            except (GenerationArchivedError, GenerationDroppedError):
                self._forget(shard.counters.deleted)

    def _brought_up(self, storage: Storage, shard: Shard) -> Tally:
        deleted, began = shard.counters.deleted, time.monotonic()
        slabs = shard.slabs()
        if deleted != self._deleted or not self._ends.keys() <= {record.number for record, _ in slabs}:
            self._forget(deleted)
        self._take()
        for record, _ in slabs:
            self._count(storage, shard, record, began)
        if self._total is None:
            self._total = Tally.sum([self._tables.total(), *(tail.tally for tail in self._tails.values())])
        total = self._total
        if len(total) > MOST_TOPICS:
            self._forget(_NEVER)
        return total

    def _count(self, storage: Storage, shard: Shard, record: GenerationRecord, began: float) -> None:
        number, last = record.number, shard.watermark if record.last_position is None else record.last_position
        if number not in self._ends:
            ranges = shard.tallies.gather(number, _EVERYTHING, self._tables)
            end = ranges[-1].last if ranges else record.first_position - 1
            for before, until in uncounted(ranges, record.first_position - 1, end):
                for tally in _read(storage, shard, number, before, until, began):
                    self._tables.add(tally)
            self._ends[number], self._total = end, None
        end = self._ends[number]
        tail = self._tails.pop(number, None)
        if tail is None or tail.before != end:
            tail = _Tail(end, end, Tally.empty())
        if tail.last < last:
            added = list(_read(storage, shard, number, tail.last, last, began))
            if added:
                self._total = None
            tail = _Tail(end, last, Tally.sum([tail.tally, *added]))
        shard.slab(number)  # raises if it was dropped
        if tail.last > end:
            self._tails[number] = tail

    # --- what is counted in the background ---

    def _note(self, generation: int, before: int, last: int, tally: Tally) -> None:
        """Keep a range that was just counted, to be added by the next call, or now if there are many."""
        self._waiting.append((generation, before, last, tally.by_topic()))
        if len(self._waiting) >= _WAITING and self.lock.acquire(blocking=False):
            try:
                self._take()
            finally:
                self.lock.release()

    def _take(self) -> None:
        """Add the ranges that continue what is counted; messages of others are read instead. With the lock held."""
        while self._waiting:
            generation, before, last, tally = self._waiting.popleft()
            if self._ends.get(generation) == before:
                self._tables.add(tally)
                self._ends[generation], self._total = last, None


def _read(storage: Storage, shard: Shard, generation: int, before: int, last: int, began: float) -> Iterator[Tally]:
    plan = plan_generation(storage, shard, generation, _EVERYTHING, before + 1, last, since=began)
    for batch in run_as_stored(storage, shard, [plan], "any"):
        yield Tally.of(batch).by_topic()
