"""`TallyTables`: stored counts of a shard's messages by topic and client id, which save queries from reading messages.

A table counts the messages in one range of positions of one generation. It is stored with its range, so an interrupted
count is repeated. A compaction step that returns heads (`CompactStep.heads`) adds tables of its messages that no table
counts, in its own write, unless nearly each message has a topic of its own. Eight adjacent tables of the same merge
level are then merged into one, in a write that follows, so the number of tables grows with the logarithm of the number
of messages.

Messages that a delete removes are subtracted from the tables. The first write of the delete removes the affected
tables, and one write after its last stores the reduced tables; until then the tables are absent.

Code that changes tables holds `Generations.rewrite_lock`, which excludes deletes while a range is read and counted.
The writer's lock is held only during the engine's write. The write that drops a generation also removes its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from topicstore.contract.engine import STATE, Reader, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.layout import Heads
from topicstore.contract.topics import TopicFilter

from .generations import Generations
from .head_counter import count_heads
from .tally_records import (
    Gathering,
    Tally,
    TallyIndex,
    TallyRange,
    covers,
    encoded_parts,
    load_index,
    load_tally,
    put_index,
    remove_parts,
    sum_tables,
)
from .writer import PendingWrite, ShardWriter

__all__ = ["Counted", "Span", "TallyTables", "Withdrawal", "uncounted"]

_MERGED = 8
"""The number of adjacent tables that are merged into one."""

_Stored = list[tuple[bytes, bytes]]
"""The keys and values of a table's parts."""


class Span(NamedTuple):
    """A range of positions: those above ``before``, up to ``last``."""

    before: int
    last: int


class Counted(NamedTuple):
    """The tally of the messages in a range of a generation's positions: those above ``before``, up to ``last``."""

    generation: int
    before: int
    last: int
    tally: Tally


def uncounted(ranges: Sequence[TallyRange] | Sequence[Span], before: int, last: int) -> list[Span]:
    """Return the gaps between ordered ranges within (``before``, ``last``]."""
    ends = [before, *(end for one in ranges for end in (one.before, one.last)), last]
    return [Span(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]


class TallyTables:
    """The tally tables of one shard."""

    def __init__(self, writer: ShardWriter, generations: Generations) -> None:
        self._writer = writer
        self._generations = generations
        self.counted: Callable[[Counted], None] | None = None
        """A callback for each new table. It is called with `rewrite_lock` held, so that no counted message was deleted
        meanwhile."""

    # --- lookups ---

    def ranges(self, generation: int) -> tuple[TallyRange, ...]:
        """Return the ranges of a generation's tables, in order."""
        return load_index(self._writer.open_engine(), generation).ranges

    def gather(self, generation: int, topic_filter: TopicFilter, into: Gathering) -> tuple[TallyRange, ...]:
        """Add a filter's counts in a snapshot of a generation's tables to ``into``; return the tables' ranges.

        The result is empty for a filter that tables don't cover (`covers`). Damaged tables are skipped, because the
        messages of their ranges can be read instead.
        """
        found = []
        for counted, parts in self.tallies(generation, topic_filter):
            for part in parts or ():
                into.add(part)
            found.append(counted)
        return tuple(found)

    def tallies(
        self, generation: int, topic_filter: TopicFilter, known: Container[TallyRange] = ()
    ) -> Iterator[tuple[TallyRange, list[Tally] | None]]:
        """Yield the range of each table, with the table's counts of a filter's messages in several parts.

        Tables in ``known`` aren't read; their counts are None.
        """
        if not covers(topic_filter):
            return
        with self._writer.open_engine().snapshot() as view:
            for counted in load_index(view, generation).ranges:
                if counted in known:
                    yield counted, None
                    continue
                with suppress(CorruptionError):
                    parts = load_tally(view, generation, counted, topic_filter)
                    yield counted, [part.where(part.matching(topic_filter)) for part in parts]

    # --- changing ---

    def add(self, generation: int, before: int, last: int, tally: Tally) -> None:
        """Store the tally of the range (``before``, ``last``], which no table counts yet, in one engine write.

        The caller must hold `rewrite_lock`, and must have held it while it counted. Merges that become due follow.
        Nothing is written if the generation was dropped.
        """
        counted, write = [Counted(generation, before, last, tally)], WriteBatch()
        self.commit(generation, write, self._put(counted, write))
        self.committed(counted)

    def join(self, generation: int, first: int, heads: Heads, write: WriteBatch) -> list[Counted]:
        """Count messages that a compaction step rewrites, and add tally tables of them to the step's write.

        Returns the tables. Messages that a table counts already are left out. So are messages that aren't worth a
        table: they are read when a count is requested. ``first`` is the first position of the generation. The caller
        must hold `rewrite_lock` from the request of the step to the call of `committed`.
        """
        counted = []
        for gap in uncounted(self.ranges(generation), first - 1, heads.last):
            before, last = max(gap.before, heads.before), min(gap.last, heads.last)
            if before < last:
                rows = None
                if before > heads.before or last < heads.last:
                    rows = (heads.positions > np.uint64(max(before, 0))) & (heads.positions <= np.uint64(last))
                tally = count_heads(heads, rows)
                if tally is not None:
                    counted.append(Counted(generation, before, last, tally.without_hidden()))
        if counted:
            put_index(write, generation, _index(self._put(counted, write)))
        return counted

    def committed(self, counted: list[Counted]) -> None:
        """Call the callback for new tables after their commit, and store the merges that have become due."""
        for one in counted:
            if self.counted is not None:
                self.counted(one)
        for generation in {one.generation for one in counted}:
            self._merge(generation)

    def _put(self, counted: list[Counted], write: WriteBatch) -> list[TallyRange]:
        """Add new tables of one generation to a write; return the ranges of all tables."""
        ranges = list(self.ranges(counted[0].generation))
        for generation, before, last, tally in counted:
            new = TallyRange(before=before, last=last, level=0, messages=tally.count, parts=0)
            kept, stored = encoded_parts(generation, new, [tally])
            ranges.append(kept)
            _put(write, stored)
        return ranges

    def _merge(self, generation: int) -> None:
        """Merge adjacent tables of the same level, each run in one engine write, as long as enough are adjacent.

        Damaged tables are removed instead, and their messages are counted again.
        """
        while run := _full_run(self.ranges(generation)):
            write, ranges, engine = WriteBatch(), list(self.ranges(generation)), self._writer.open_engine()
            merged = TallyRange(before=run[0].before, last=run[-1].last, level=run[0].level + 1, messages=0, parts=0)
            new: list[TallyRange] = []
            stored: _Stored = []
            try:
                tables = [load_tally(engine, generation, counted) for counted in run]
                merged, stored = encoded_parts(generation, merged, sum_tables(tables))
                new = [merged]
            except CorruptionError:
                run = [counted for counted in run if not _intact(engine, generation, counted)]
                if not run:
                    raise  # a second reading finds no damage, so there is no table to remove
            for counted in run:
                ranges.remove(counted)
                remove_parts(write, generation, counted)
            _put(write, stored)  # after the removal: the keys of the last table's parts are those of the sum's
            ranges += new
            if not self.commit(generation, write, ranges):
                return

    def withdraw(
        self, generation: int, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter]
    ) -> Withdrawal:
        """Return the tables affected by a delete, with their contents after the delete.

        The caller holds `rewrite_lock` until the delete has ended.
        """
        reached: list[tuple[TallyRange, TallyRange | None, _Stored]] = []
        for counted in self.ranges(generation) if covers(topic_filter) else ():
            if counted.before < last and counted.last >= first:
                left = self._left(generation, counted, lambda part: part.without(topic_filter, first, last, spare))
                if left is None:
                    reached.append((counted, None, []))
                elif left.count != counted.messages:
                    reached.append((counted, *encoded_parts(generation, counted, [left])))
        return Withdrawal(self, generation, reached)

    def _left(self, generation: int, counted: TallyRange, without: Callable[[Tally], Tally | None]) -> Tally | None:
        """Return the counts of a table after a delete; None if they can't be computed or the table can't be read."""
        total = Gathering()
        try:
            for part in load_tally(self._writer.open_engine(), generation, counted):
                left = without(part)
                if left is None:
                    return None
                total.add(left)
        except CorruptionError:
            return None  # the background count reads its range again
        return total.total()

    def commit(self, generation: int, write: WriteBatch, ranges: list[TallyRange]) -> bool:
        """Commit a change of a generation's tables; ``ranges`` are the ranges of all its tables afterwards.

        Returns False, and writes nothing, if the generation was dropped.
        """
        put_index(write, generation, _index(ranges))

        def prepare(pending: PendingWrite) -> bool:
            pending.write = write
            return generation in self._generations.slabs  # a drop removes the tables, too

        return self._writer.commit(prepare) is not None


class Withdrawal:
    """The tables affected by a delete, with their contents after the delete."""

    def __init__(
        self,
        tables: TallyTables,
        generation: int,
        reached: list[tuple[TallyRange, TallyRange | None, _Stored]],
    ) -> None:
        self._tables = tables
        self._generation = generation
        self._reached = reached
        self._removed = False

    def join(self, write: WriteBatch) -> None:
        """Add the removal of the affected tally tables to a write of the delete, unless an earlier write did."""
        if self._removed or not self._reached:
            return
        gone = {counted for counted, _, _ in self._reached}
        for counted in gone:
            remove_parts(write, self._generation, counted)
        left = tuple(one for one in self._tables.ranges(self._generation) if one not in gone)
        put_index(write, self._generation, TallyIndex(ranges=left))
        self._removed = True

    def end(self) -> None:
        """Store the reduced tables in one engine write, after the last write of the delete."""
        kept = [(counted, stored) for _, counted, stored in self._reached if counted is not None]
        if self._removed and kept:
            write = WriteBatch()
            for _, stored in kept:
                _put(write, stored)
            ranges = [*self._tables.ranges(self._generation), *(counted for counted, _ in kept)]
            self._tables.commit(self._generation, write, ranges)


def _put(write: WriteBatch, stored: _Stored) -> None:
    for key, value in stored:
        write.put(STATE, key, value)


def _index(ranges: list[TallyRange]) -> TallyIndex:
    return TallyIndex(ranges=tuple(sorted(ranges, key=lambda counted: counted.before)))


def _intact(reader: Reader, generation: int, counted: TallyRange) -> bool:
    try:
        for _ in load_tally(reader, generation, counted):
            pass
    except CorruptionError:
        return False
    return True


def _full_run(ranges: Sequence[TallyRange]) -> list[TallyRange]:
    """Return the first run of adjacent tables of one level that is long enough for a merge, or an empty list."""
    run = list(ranges[:1])
    for one, following in pairwise(ranges):
        if len(run) == _MERGED:
            break
        run = [*run, following] if one.last == following.before and one.level == following.level else [following]
    return run if len(run) == _MERGED else []
