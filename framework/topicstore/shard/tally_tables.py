"""`TallyTables`: stored counts of a shard's messages by topic and client id, which save queries from reading messages.

A table counts the messages in one range of positions of one generation. It is stored with its range, so an interrupted
count is repeated. Eight adjacent tables of the same merge level are merged into one, in the write
that adds the last of them, so the number of tables grows with the logarithm of the number of messages.

Messages that a delete removes are subtracted from the tables. The first write of the delete removes the affected
tables, and one write after its last stores the reduced tables; until then the tables are absent.

Code that changes tables holds `Generations.rewrite_lock`, which excludes deletes while a range is read and counted.
The writer's lock is held only during the engine's write. The write that drops a generation also removes its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from topicstore.contract.engine import STATE, WriteBatch
from topicstore.contract.errors import CorruptionError
from topicstore.contract.topics import TopicFilter

from .generations import Generations
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
)
from .writer import PendingWrite, ShardWriter

__all__ = ["TallyTables", "Withdrawal", "uncounted"]

_MERGED = 8
"""The number of adjacent tables that are merged into one."""

_Stored = list[tuple[bytes, bytes]]
"""The keys and values of a table's parts."""


def uncounted(ranges: Sequence[TallyRange], before: int, last: int) -> list[tuple[int, int]]:
    """Return the gaps between the tables' ranges within (``before``, ``last``], each as (before, last)."""
    ends = [before, *(end for one in ranges for end in (one.before, one.last)), last]
    return [(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]


class TallyTables:
    """The tally tables of one shard."""

    def __init__(self, writer: ShardWriter, generations: Generations) -> None:
        self._writer = writer
        self._generations = generations
        self.counted: Callable[[int, int, int, Tally], None] | None = None
        """A callback after `add`, with the same arguments. It is called with `rewrite_lock` held, so that no counted
        message was deleted meanwhile."""

    # --- lookups ---

    def ranges(self, generation: int) -> tuple[TallyRange, ...]:
        """Return the ranges of a generation's tables, in order."""
        return load_index(self._writer.open_engine(), generation).ranges

    def gather(self, generation: int, topic_filter: TopicFilter, into: Gathering) -> tuple[TallyRange, ...]:
        """Add the counts of a filter's messages from a snapshot of a generation's tables; return the tables' ranges.

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
        """Yield the range of each table, as `gather`, with the table's counts of a filter's messages, in parts.

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
                    parts = [p.where(p.matching(topic_filter)) for p in load_tally(view, generation, counted)]
                    yield counted, parts

    # --- changing ---

    def add(self, generation: int, before: int, last: int, tally: Tally) -> None:
        """Store the tally of the range (``before``, ``last``], which no table counts yet, in one engine write.

        The caller must hold `rewrite_lock`, and must have held it while it counted. The write includes the merges that
        become due. Nothing is written if the generation was dropped.
        """
        new = TallyRange(before=before, last=last, level=0, messages=tally.count, parts=0)
        ranges, fresh = sorted([*self.ranges(generation), new], key=_begin), {new: tally}
        write = WriteBatch()
        while run := _full_run(ranges):
            merged = TallyRange(
                before=run[0].before, last=run[-1].last, level=run[0].level + 1, messages=0, parts=run[-1].parts
            )
            total = Gathering()
            for counted in run:
                for part in self._parts(generation, counted, fresh, write):
                    total.add(part)
                ranges.remove(counted)
            fresh[merged] = total.total()
            ranges = sorted([*ranges, merged], key=_begin)
        for counted, counts in fresh.items():
            ranges.remove(counted)
            kept, stored = encoded_parts(generation, counted, counts)
            ranges.append(kept)
            _put(write, stored)
        self.commit(generation, write, ranges)
        if self.counted is not None:
            self.counted(generation, before, last, tally)

    def _parts(
        self, generation: int, counted: TallyRange, fresh: dict[TallyRange, Tally], write: WriteBatch
    ) -> Iterator[Tally]:
        """Yield the parts of a table that is being merged; if the table is stored, add its removal to the write."""
        if counted in fresh:
            yield fresh.pop(counted)
            return
        remove_parts(write, generation, counted)
        yield from load_tally(self._writer.open_engine(), generation, counted)

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
                    reached.append((counted, *encoded_parts(generation, counted, left)))
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

    def commit(self, generation: int, write: WriteBatch, ranges: list[TallyRange]) -> None:
        """Commit a change of a generation's tables, after which it has those of ``ranges``.

        Nothing is written if the generation was dropped.
        """
        put_index(write, generation, TallyIndex(ranges=tuple(sorted(ranges, key=_begin))))

        def prepare(pending: PendingWrite) -> bool:
            pending.write = write
            return generation in self._generations.slabs  # otherwise it was dropped meanwhile, with its tables

        self._writer.commit(prepare)


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
        """Add the removal of the tables to a write of the delete, unless an earlier write has already removed them."""
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


def _begin(counted: TallyRange) -> int:
    return counted.before


def _full_run(ranges: Sequence[TallyRange]) -> list[TallyRange]:
    """Return the first run of adjacent tables of one level that is long enough for a merge, or an empty list."""
    run = list(ranges[:1])
    for one, following in pairwise(ranges):
        if len(run) == _MERGED:
            break
        run = [*run, following] if one.last == following.before and one.level == following.level else [following]
    return run if len(run) == _MERGED else []
