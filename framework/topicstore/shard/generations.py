"""`Generations`: the records and slabs of a shard's generations; adding, sealing, dropping and archiving them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from topicstore.contract.engine import GENERATION_END, Engine, WriteBatch
from topicstore.contract.errors import (
    CorruptionError,
    GenerationDroppedError,
    GenerationError,
    InvalidCursorError,
    NewerFormatError,
    PluginError,
    TopicstoreError,
)
from topicstore.contract.forking import ProcessLock
from topicstore.contract.layout import Layout, Slab
from topicstore.contract.options import options_dict
from topicstore.contract.positions import time_of
from topicstore.runtime.locks import FairLock

from .damaged_slab import DamagedSlab
from .records import (
    ARCHIVED_VERSION,
    GenerationRecord,
    load_generations,
    put_generation,
    ranges_of,
    remove_messages,
)
from .tally_records import remove_tallies
from .writer import AddGeneration, DropGeneration, PendingWrite, ShardWriter
from .zones import Zone, ZoneRecord, load_zones, put_zone

__all__ = ["Generations", "MakeLayout", "OpenArchive", "check_local"]

_LAST = (1 << 64) - 1

T = TypeVar("T")

MakeLayout = Callable[[str, Mapping[str, Any]], Layout]
"""A function that creates a layout object from a layout's name and options."""
OpenArchive = Callable[[int, GenerationRecord], Slab]
"""A function that returns the slab of an archived generation, given the shard's number and the generation's record."""


class Generations:
    """The generations of one shard."""

    def __init__(self, writer: ShardWriter, make_layout: MakeLayout, open_archive: OpenArchive) -> None:
        self._writer = writer
        self._make_layout = make_layout
        self._open_archive = open_archive
        self.rewrite_lock = FairLock()
        """The lock that deletes, compactions and archiving hold. It is acquired before the writer's lock."""
        self.records = {record.number: record for record in load_generations(writer.engine)}
        """The records of all generations, including tombstones, by number. Guarded by the writer's lock; lookups need
        no lock."""
        self._removed: set[int] = set()
        """The removed generations whose disk space is not free yet. Guarded by the writer's lock."""
        self.slabs: dict[int, Slab] = {}
        """The slabs of the live generations by number. Guarded by the writer's lock; lookups need no lock."""
        self.live: list[tuple[GenerationRecord, Slab]] = []
        """The live generations, oldest first. The list is never modified but replaced, so reading it needs no lock."""
        self._replaced = ProcessLock()
        """Held while the shard's contents are replaced. It is acquired after the writer's lock."""
        self._replacements = 0
        """The number of beginnings and ends of replacements, so that it is odd during one. Changed with `_replaced`."""

    def open(self) -> None:
        """Open the slab of each live generation, and resume the removal of dropped generations."""
        for number, record in sorted(self.records.items()):
            if not record.dropped:
                self.slabs[number] = self._open_slab(record)
            elif not self._writer.read_only:
                self._remove(number)
        self.reclaim_removed()
        self._list_live_locked()
        self._writer.generation, self._writer.slab = self.current, self.slabs.get(self.current)

    def _list_live_locked(self) -> None:
        self.live = [(record, self.slabs[n]) for n, record in sorted(self.records.items()) if n in self.slabs]

    def _open_slab(self, record: GenerationRecord) -> Slab:
        if record.archive is not None:
            return self._open_archive(self._writer.number, record)
        layout = self._make_layout(record.layout, record.options)
        if record.format > layout.format:
            raise NewerFormatError(
                f"generation {record.number} has format {record.format} of layout {record.layout!r}; "
                f"the one installed reads up to {layout.format}"
            )
        try:
            return self._open_with(layout, record.layout, record.number)
        except CorruptionError as bad:
            place = f"shard {self._writer.number}, generation {record.number}"
            return DamagedSlab(CorruptionError(bad.reason, f"{place}, {bad.place}" if bad.place else place))

    def _open_with(self, layout: Layout, name: str, generation: int) -> Slab:
        slab = layout.open(self._writer.engine, self._writer.number, generation)
        if not isinstance(slab, Slab):
            raise PluginError(f"layout {name!r}: open returned a {type(slab).__name__}, not a Slab")
        return slab

    def open_again_locked(self) -> None:
        """Reload the records and reopen the slabs, after the engine was reopened because a write had failed.

        Concurrent readers find a slab of each live generation at any moment.
        """
        records = {record.number: record for record in load_generations(self._writer.engine)}
        live = {number: self._open_slab(record) for number, record in records.items() if not record.dropped}
        self.records = records
        self.slabs.update(live)
        for number in self.slabs.keys() - live.keys():
            del self.slabs[number]
        self._writer.generation, self._writer.slab = self.current, self.slabs.get(self.current)
        self._list_live_locked()

    def forget(self) -> None:
        """Release all slabs, before the engine is closed."""
        self.slabs.clear()
        self.live = []
        self._writer.slab = None

    @contextmanager
    def replacing(self) -> Iterator[Engine]:
        """Yield the shard's engine to a ``with`` block that replaces all contents; then load the contents anew.

        The locks of rewriting and writing are held during the block, and readers wait until it has ended.
        """
        with self.rewrite_lock, self._writer.lock, self._replaced:
            engine = self._writer.open_engine()
            self._replacements += 1
            self.forget()
            try:
                yield engine
            finally:
                self._writer.counters.deleted += 1  # invalidates the counts that are kept in memory
                try:
                    self._writer.begin_again_locked(self.open_again_locked, replaced=True)
                finally:
                    self._replacements += 1

    def undisturbed(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``, which is repeated if the contents were replaced during the call."""
        while True:
            before = self._replacements
            if before % 2 and not self._replaced.owned():
                with self._replaced:  # waits until the replacement has ended
                    continue
            try:
                result = read()
            except TopicstoreError:  # half-replaced contents may look damaged
                if before == self._replacements:
                    raise
            else:
                if before == self._replacements:
                    return result

    # --- lookups ---

    @property
    def current(self) -> int:
        """The number of the current generation, to which messages are stored; 0 before the first was added."""
        return max(self.records, default=0)

    def listed(self) -> list[GenerationRecord]:
        """Return the records of the live generations, oldest first. The current one has its counts from the tail."""
        with self._writer.lock:
            tail = self._writer.tail
            return [
                record
                if record.sealed is not None
                else msgspec.structs.replace(record, messages=tail.messages, live_bytes=tail.live_bytes)
                for _, record in sorted(self.records.items())
                if not record.dropped
            ]

    def with_slabs(self) -> list[tuple[GenerationRecord, Slab]]:
        """Return a snapshot of the live generations with their slabs, oldest first.

        The current generation's record has no counts; `listed` adds them. Takes no lock, except that it waits while the
        contents are replaced.
        """
        live = self.live
        if not live:
            with self._replaced:
                live = self.live
        self._writer.check_open()  # checked after reading the list, because closing empties it
        return list(live)

    def slab(self, generation: int) -> Slab:
        """Return a live generation's slab.

        Raises `GenerationDroppedError`, `InvalidCursorError` if no generation ever had that number, and
        `ShardElsewhereError` on a site that keeps no copy of the shard.
        """
        slab = self.slabs.get(generation)
        if slab is None:
            with self._replaced:
                slab = self.slabs.get(generation)
        if slab is None:
            self._writer.check_open()  # raises if the shard was closed, which empties the dictionary
            if self._writer.elsewhere:
                raise self._writer.elsewhere_error()
            if 0 < generation <= self.current:
                raise GenerationDroppedError(f"generation {generation} of shard {self._writer.number} was dropped")
            raise InvalidCursorError(f"shard {self._writer.number} has no generation {generation}")
        return slab

    def zones(self, generations: Iterable[int]) -> Iterator[ZoneRecord]:
        """Yield the zones of ``generations``, given in ascending order, and then the current zone.

        Raises `CorruptionError` for a damaged record.
        """
        tail = self._writer.tail  # read first: a zone that becomes full meanwhile is yielded twice instead of never
        try:
            for generation in generations:
                yield from load_zones(self._writer.engine, generation)
        except CorruptionError as bad:
            raise CorruptionError(bad.reason, f"shard {self._writer.number}, {bad.place}") from bad
        if tail.zone is not None:
            yield tail.zone.closed(_LAST)

    def archived_in(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the number and last position of each archived generation with messages from ``first`` to ``last``."""
        return [
            (record.number, end)
            for record in self.listed()
            if record.archive is not None and record.messages and (end := record.last_position) is not None
            if record.first_position <= last and end >= first
        ]

    # --- adding ---

    def add(self, layout_name: str, options: dict[str, Any]) -> int:
        """Seal the current generation and add a new one, in one engine write; return the new number."""
        self._writer.finish_commit(self._writer.submit(self.adding(layout_name, options)))
        return self.current

    def adding(self, layout_name: str, options: dict[str, Any]) -> PendingWrite:
        """Return the write that seals the current generation, and begins a new one."""
        change = AddGeneration(self.current + 1, layout_name, options, self._writer.policy.now())
        return self.pending_add(change)

    def pending_add(self, change: AddGeneration) -> PendingWrite:
        """Return the write that makes a change: it seals the current generation, and begins a new one.

        It changes nothing if the shard has the generation already. Encoding it raises `GenerationError` if the shard
        has no generation number left.
        """
        return PendingWrite(self._writer, change=change, encode=partial(self._encode_add_locked, change))

    def _encode_add_locked(self, change: AddGeneration, pending: PendingWrite) -> None:
        writer, number, tail = self._writer, change.number, pending.tail
        if number <= self.current:
            return  # two threads of the shard's owner have proposed the generation
        if number >= GENERATION_END:
            raise GenerationError(f"shard {writer.number} has used up its generations")
        layout, write = self._make_layout(change.layout, change.options), pending.write
        parent, sealed = self._seal_locked(change.created, write)
        record = GenerationRecord(
            number=number,
            layout=change.layout,
            format=layout.format,
            options=options_dict(layout.options),
            created=change.created,
            first_position=tail.last_position + 1,
        )
        put_generation(write, record)
        same = sealed is not None and sealed.layout == change.layout
        heir = same and not isinstance(parent, DamagedSlab)
        layout.create(writer.engine, writer.number, number, parent if heir else None, write)
        pending.tail = msgspec.structs.replace(tail, messages=0, live_bytes=0, zone=Zone(tail.last_position + 1))

        def install() -> None:
            slab = self.slabs[number] = self._open_with(layout, change.layout, number)
            if sealed is not None:
                self.records[sealed.number] = sealed
            self.replace_locked(record)
            writer.generation, writer.slab = number, slab
            writer.moved_on.notify_all()

        pending.install = install

    def _seal_locked(self, now: int, write: WriteBatch) -> tuple[Slab | None, GenerationRecord | None]:
        if not self.current:
            return None, None
        tail = self._writer.tail
        sealed = msgspec.structs.replace(
            self.records[self.current],
            sealed=now,
            last_position=tail.last_position,
            messages=tail.messages,
            live_bytes=tail.live_bytes,
        )
        put_generation(write, sealed)
        if tail.zone is not None:
            put_zone(write, self.current, tail.zone.closed(tail.last_position))
        return self.slabs[self.current], sealed

    def replace_locked(self, record: GenerationRecord) -> None:
        """Replace the in-memory record of a generation with the committed one."""
        self.records[record.number] = record
        self._list_live_locked()

    # --- removing ---

    def check_droppable(self, number: int) -> bool:
        """Return whether a generation can be dropped; False if it is already dropped.

        Raises `GenerationError` for the current generation and for a number that never existed.
        """
        with self._writer.lock:
            record = self.records.get(number)
            if record is None or record.dropped:
                if 0 < number < self.current:
                    return False
                raise GenerationError(f"there is no generation {number}")
            if record.sealed is None:
                raise GenerationError(f"generation {number} is the current one; add another before dropping it")
            return True

    def drop(self, number: int) -> bool:
        """Make a sealed generation invisible, in one engine write. Returns False if it is already dropped.

        `remove_dropped` then removes its messages.
        """
        if not self.check_droppable(number):
            return False
        self._writer.finish_commit(self._writer.submit(self.pending_drop(DropGeneration(number))))
        return True

    def pending_drop(self, change: DropGeneration) -> PendingWrite:
        """Return the write that makes a generation invisible.

        The write changes nothing if the generation is dropped already, or is the current one, because a log with such a
        write must stay readable.
        """
        return PendingWrite(self._writer, change=change, encode=partial(self._encode_drop_locked, change.number))

    def _encode_drop_locked(self, number: int, pending: PendingWrite) -> None:
        record = self.records.get(number)
        if record is None or record.dropped or record.sealed is None:
            return
        record = msgspec.structs.replace(record, dropped=True)
        put_generation(pending.write, record)
        remove_tallies(pending.write, number)

        def install() -> None:
            del self.slabs[number]
            self.replace_locked(record)

        pending.install = install

    def archive(self, number: int, location: str, messages: int) -> None:
        """Switch a generation to its export at ``location``, and remove its local messages, in one engine write.

        The caller has verified the export; ``messages`` is its number of messages. Raises `GenerationError` if the
        generation has another number of messages now, and `GenerationDroppedError` if the generation was dropped.
        """

        def prepare(pending: PendingWrite) -> None:
            if not self.check_droppable(number):
                raise GenerationDroppedError(f"generation {number} of shard {self._writer.number} was dropped")
            record = self.records[number]
            if record.messages != messages:
                raise GenerationError(f"messages of generation {number} were deleted since it was exported")
            record = msgspec.structs.replace(record, version=ARCHIVED_VERSION, archive=location, live_bytes=0)
            slab = self._open_slab(record)
            for keyspace, start, end in ranges_of(number):
                pending.write.delete_range(keyspace, start, end)
            put_generation(pending.write, record)

            def install() -> None:
                self.slabs[number] = slab
                self.replace_locked(record)

            pending.install = install

        with self.rewrite_lock:
            self._writer.commit(prepare)
        self.reclaim(number)

    def remove_dropped(self) -> None:
        """Remove the messages of dropped generations. If this is interrupted, opening the shard resumes it.

        `reclaim_removed` then frees their disk space.
        """
        with self._writer.lock:
            dropped = [number for number, record in self.records.items() if record.dropped]
        for number in dropped:
            self._remove(number)

    def removing_bytes(self) -> int:
        """Return the bytes of dropped generations whose removal has not finished."""
        with self._writer.lock:
            return sum(record.live_bytes for record in self.records.values() if record.dropped)

    def _remove(self, number: int) -> None:
        for write in remove_messages(number):
            with self._writer.lock:  # without an fsync: after a power failure the next opening repeats the removal
                self._writer.check_writable()
                self._writer.commit_locked(PendingWrite(self._writer, write=write))
        with self._writer.lock:
            self.records.pop(number, None)
            self._removed.add(number)

    def reclaim_removed(self) -> None:
        """Free the disk space of generations whose messages were removed. This may take long."""
        with self._writer.lock:
            removed = sorted(self._removed)
        for number in removed:
            self.reclaim(number)
            with self._writer.lock:
                self._removed.discard(number)

    def reclaim(self, number: int) -> None:
        """Free the disk space of a generation's removed or replaced values. This may take long."""
        for keyspace, start, end in ranges_of(number):
            self._writer.engine.reclaim(keyspace, start, end)


def check_local(archived: Iterable[tuple[int, int]]) -> None:
    """Raise `GenerationError` if ``archived``, the result of `archived_in` for the range of a delete, isn't empty."""
    found = sorted(archived)
    if found:
        numbers = ", ".join(map(str, dict(found)))
        after = time_of(max(end for _, end in found)) + 1
        raise GenerationError(
            f"generation {numbers} lies in an export, from which nothing can be deleted: "
            f"drop it, or begin at {after} (microseconds since the epoch)"
        )
