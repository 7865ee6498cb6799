"""`Rewriter`: deletes, compactions and verification of a shard, in steps, concurrently with readers and writers.

Each step of a compaction is one write. Where the layout returns the heads of the messages that it rewrites, the write
also has their tally tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from topicstore.contract.checksums import strip_checksum
from topicstore.contract.engine import STATE, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    GenerationDroppedError,
    GenerationError,
    InvalidArgumentError,
    NewerFormatError,
)
from topicstore.contract.layout import CompactStep, Damage, DeleteStep, Slab
from topicstore.contract.topics import TopicFilter

from .generations import Generations, check_local
from .records import GenerationRecord, Tail, put_generation
from .state import OWN, RESERVED
from .tally_tables import TallyTables
from .writer import Delete, PendingWrite, ShardWriter

__all__ = [
    "Decoders",
    "Rewriter",
    "filters_of_all",
    "never",
]

Decoders = Mapping[bytes, Callable[[bytes, bytes], object]]
"""Functions that decode a key and value of the state, by prefix of the keys. They raise if the value is damaged. No
prefix is the beginning of another one."""


def never() -> bool:
    """Return False. This is the default of ``stop``, with which a compaction never stops early."""
    return False


def filters_of_all(slab: Slab) -> tuple[str, ...]:
    """Return filters of which exactly one matches each topic of a slab.

    ``#`` doesn't match topics that begin with ``$`` (MQTT 5, section 4.7.2), so each first level with a ``$`` has a
    filter of its own.
    """
    known = {node.path[0] for node in slab.learned() if node.path[0].startswith("$")}
    return "#", *(f"{level}/#" for level in sorted(known - {"$+"} | {"$SYS"}))


class Rewriter:
    """The deletes and compactions of one shard. `Generations.rewrite_lock` serialises their steps."""

    def __init__(self, writer: ShardWriter, generations: Generations, tables: TallyTables) -> None:
        self._writer = writer
        self._generations = generations
        self._tables = tables

    # --- deleting ---

    def delete(self, topic_filter: TopicFilter, first: int, last: int) -> int:
        """Remove the matching messages with positions from ``first`` to ``last``; return their number."""
        deleted = 0
        last = min(last, self._writer.watermark)
        if self._writer.log is not None:
            return self._delete_everywhere(Delete(topic_filter.text, first, last))
        for record in self._generations.listed():
            if record.first_position <= last and (record.last_position is None or record.last_position >= first):
                deleted += self._delete_in(record.number, topic_filter, first, last)
        return deleted

    def delete_local(
        self, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[TopicFilter]
    ) -> int:
        """Remove messages with positions from ``first`` to ``last``, except those that match a filter of ``spare``.

        Without a topic filter, messages of all topics are removed. Archived generations are skipped. Returns the number
        of removed messages.
        """
        last = min(last, self._writer.watermark)
        if self._writer.log is not None:
            pattern = None if topic_filter is None else topic_filter.text
            return self._delete_everywhere(Delete(pattern, first, last, tuple(one.text for one in spare)))
        return self._delete_here(topic_filter, first, last, spare)

    def _delete_everywhere(self, change: Delete) -> int:
        """Delete through the log; return the number of messages that were removed on this site."""
        pending = self._writer.submit(self.pending_delete(change))
        self._writer.finish_commit(pending)
        return pending.result

    def pending_delete(self, change: Delete) -> PendingWrite:
        """Return a write that, before its commit, removes messages in several engine writes."""
        topic_filter = None if change.topic_filter is None else TopicFilter(change.topic_filter)
        spare = [*map(TopicFilter, change.spare)]
        work = functools.partial(self._delete_here, topic_filter, change.first, change.last, spare)
        return PendingWrite(self._writer, change=change, work=work)

    def _delete_here(
        self, topic_filter: TopicFilter | None, first: int, last: int, spare: Sequence[TopicFilter]
    ) -> int:
        deleted = 0
        for record, slab in self._generations.with_slabs():
            start = max(first, record.first_position)
            end = last if record.last_position is None else min(last, record.last_position)
            if start > end or record.archive is not None:
                continue
            filters = [*map(TopicFilter, filters_of_all(slab))] if topic_filter is None else [topic_filter]
            for one in filters:
                try:
                    deleted += self._delete_in(record.number, one, start, end, spare)
                except GenerationError:
                    if self._generations.records[record.number].archive is None:
                        raise  # with an archive, the generation was archived meanwhile
        return deleted

    def _delete_in(
        self, generation: int, topic_filter: TopicFilter, first: int, last: int, spare: Sequence[TopicFilter] = ()
    ) -> int:
        deleted = 0
        writer, generations = self._writer, self._generations
        try:
            slab = generations.slab(generation)
        except GenerationDroppedError:
            return 0  # the generation was dropped after it was listed
        if not slab.cover(topic_filter):
            return 0
        step: DeleteStep | None = None

        def prepare(pending: PendingWrite) -> bool:
            """Add the next step to a write, under the lock. Returns False if there is nothing to write."""
            nonlocal step
            step = next(steps, None) if generation in generations.slabs else None  # None after a drop
            if step is None or not step.write:
                return False
            tables.join(step.write)
            self._replace_locked(pending, generation, step.write, step.messages, step.freed)
            writer.counters.deleted += step.messages
            return True

        with generations.rewrite_lock:
            check_local(generations.archived_in(first, last))  # no generation is archived while the lock is held
            tables = self._tables.withdraw(generation, topic_filter, first, last, spare)
            steps = slab.delete(topic_filter, first, last, spare)
            while True:  # each step releases the writer's lock, so that stores aren't blocked for long
                writer.commit(prepare)
                if step is None:
                    break
                deleted += step.messages
            tables.end()
        return deleted

    def _replace_locked(
        self, pending: PendingWrite, generation: int, write: WriteBatch, messages: int, freed: int
    ) -> None:
        """Complete a write that removes messages and bytes: subtract them from the generation's counts."""
        pending.write = write
        record, tail = self._generations.records[generation], pending.tail
        books: Tail | GenerationRecord = tail if record.sealed is None else record
        books = msgspec.structs.replace(books, messages=books.messages - messages, live_bytes=books.live_bytes - freed)
        if isinstance(books, Tail):
            pending.tail = books
        else:
            put_generation(write, books)
            pending.install = functools.partial(self._generations.replace_locked, books)

    # --- compacting ---

    def backlog(self) -> int:
        """Return the number of messages that are due for compaction."""
        messages = {record.number: record.messages for record in self._generations.listed()}
        slabs = self._generations.with_slabs()
        return sum(slab.backlog(messages.get(record.number, 0)) for record, slab in slabs)

    def compact(self, *, whole: bool, stop: Callable[[], bool] = never) -> int:
        """Compact the generations, step by step, until ``stop`` returns True; return the number of messages rewritten.

        With ``whole``, everything stored before the call is compacted, even where the gain is small.
        """
        rewritten = 0
        for record, slab in self._generations.with_slabs():
            bound = self._writer.watermark if record.last_position is None else record.last_position
            steps = slab.compact(bound, whole=whole)
            while not stop():
                messages = self._compact_step(record, slab, steps)
                if messages is None:
                    break
                rewritten += messages
        return rewritten

    def _compact_step(self, record: GenerationRecord, slab: Slab, steps: Iterator[CompactStep]) -> int | None:
        """Request the next step, count its messages, and commit it with their tally tables.

        Returns its number of messages, or None after the last step.
        """
        writer, slabs, tables, generation = self._writer, self._generations.slabs, self._tables, record.number
        with self._generations.rewrite_lock:
            try:
                writer.check_writable()
                if slabs.get(generation) is not slab:
                    return None  # the generation was dropped or archived
                step = next(steps, None)
            except (CorruptionError, DatabaseClosedError):
                if generation not in slabs:
                    return None  # the generation was dropped meanwhile
                raise
            if step is None:
                return None
            first = record.first_position
            counted = [] if step.heads is None else tables.join(generation, first, step.heads, step.write)

            def prepare(pending: PendingWrite) -> bool:
                if generation not in slabs:
                    return False
                self._replace_locked(pending, generation, step.write, 0, step.freed)
                writer.counters.compacted += step.messages
                return True

            if writer.commit(prepare) is None:
                return None
            tables.committed(counted)
            return step.messages

    def reclaim(self) -> None:
        """Free the disk space of replaced values. This may take long."""
        for record in self._generations.listed():
            self._generations.reclaim(record.number)

    # --- verifying ---

    def verify(self, decoders: Decoders) -> Iterator[Damage | int]:
        """Read everything; yield each damaged place, and numbers of intact messages."""
        for sentence in self._writer.engine.verify():
            yield Damage(place=f"shard {self._writer.number}", reason=sentence)
        slabs = {record.number: slab for record, slab in self._generations.with_slabs()}
        for record in self._generations.listed():
            if record.number in slabs:
                yield from self._verify_slab(record, slabs[record.number])
        yield from self._verify_state(decoders)

    def _verify_state(self, decoders: Decoders) -> Iterator[Damage]:
        """Read the whole state, decode the framework's values, and check the checksums of the shard's own records.

        The shard's own records need no decoding, because opening the shard has decoded them.
        """
        place = f"shard {self._writer.number}, state"
        decoders = {RESERVED: strip_checksum, **decoders, OWN: strip_checksum}
        try:
            for chunk in self._writer.engine.scan(STATE):
                for key, value in chunk:
                    decode = next((decode for prefix, decode in decoders.items() if key.startswith(prefix)), None)
                    if decode is not None:
                        try:
                            decode(key, value)
                        except (CorruptionError, NewerFormatError) as bad:
                            yield Damage(place=f"{place} {key!r}", reason=bad.reason)
                        except InvalidArgumentError as bad:  # the checksum is right, but the content is invalid
                            yield Damage(place=f"{place} {key!r}", reason=str(bad))
        except CorruptionError as bad:  # the scan can't continue
            yield Damage(place=place, reason=str(bad))

    def _verify_slab(self, record: GenerationRecord, slab: Slab) -> Iterator[Damage | int]:
        damages: list[Damage] = []
        place = f"shard {self._writer.number}, generation {record.number}"
        counted, bound = 0, self._writer.watermark
        whole = bound == self._writer.tail.last_position  # otherwise the record also counts invisible messages
        try:
            for found in slab.verify(bound):
                if isinstance(found, Damage):
                    damages.append(found)
                else:
                    counted += found
                    yield found
        except (CorruptionError, NewerFormatError) as bad:  # the rest of the slab can't be read
            damages.append(Damage(place=place, reason=str(bad)))
        if self._generations.slabs.get(record.number) is not slab:
            return  # the slab was dropped or archived, so messages are missing without damage
        yield from damages
        unchanged = whole and record in self._generations.listed()  # otherwise the counts aren't comparable
        if unchanged and not damages and counted != record.messages:
            yield Damage(place=place, reason=f"holds {counted:,} messages where its record says {record.messages:,}")
