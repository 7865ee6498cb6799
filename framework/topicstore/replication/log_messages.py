"""Reads the messages of a shard from its log alone: without a copy of the shard, and without a site.

A reader begins at a `Place`: a position, and a prefix of the log whose messages are all at or below the position. All
messages up to the position were read. The reader continues after the prefix, and compares its checksum, which shows
whether the log is still the same. Entries of an owner that was fenced are skipped, as on a site
(`topicstore.replication.reading.apply`).

If the log was cut after the place, some later messages are only in a base. Then the caller reads the messages with
higher positions from a copy of the shard (`topicstore.opening.copy_shard`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from topicstore.contract.batch import MessageBatch
from topicstore.contract.columns import Coded, Column, Constant, to_iterable
from topicstore.contract.errors import CorruptionError, PlaceAheadError
from topicstore.contract.log_store import LogStore
from topicstore.contract.positions import Positions
from topicstore.contract.topics import TopicFilter, matches_any
from topicstore.shard.writer import AddGeneration, Change, Delete, DropGeneration

from .bases import newest_base
from .changes import read_change
from .heads import BEGINNING, Head, Progress
from .log_reader import LogReader
from .objects import Base, Entry
from .reading import LocalWrite, check_reaches
from .taking_over import Step

__all__ = ["MessagesBetween", "MessagesFrom", "Place", "latest", "limited", "rows_of_topics", "sought"]

_MARK = 1 << 20
"""The bytes of changes after which `limited` notes another prefix of the log, so that few are read a second time."""
_OVERHEAD = 4096
"""The bytes that an entry counts beside its changes."""

_Mask = npt.NDArray[np.bool_]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a shard's log, from which a reader continues."""

    position: int
    """The position up to which all messages were read."""
    progress: Progress
    """A prefix of the log with no message above `position`, after which reading continues."""
    deleted: int = -1
    """The index of the last entry of the prefix that is known to delete messages; -1 for none."""


@attrs.frozen
class LogEntry:
    """A valid entry of a log, which was not fenced, with the prefixes of the log before and after it."""

    before: Progress
    after: Progress
    shard: int
    log: str
    """The log's name in errors."""
    stored: tuple[bytes, ...]

    @property
    def index(self) -> int:
        """The index of the entry in the log."""
        return self.before.next

    @property
    def size(self) -> int:
        """The approximate size of the entry in bytes."""
        return sum(map(len, self.stored)) + _OVERHEAD

    def batches(self) -> Iterator[MessageBatch]:
        """Yield the messages that the entry stores, in order of positions. Raises `CorruptionError`."""
        for change in self._changes():
            if isinstance(change, MessageBatch) and len(change):
                yield change

    def others(self) -> Iterator[Change]:
        """Yield the changes other than messages. An entry with messages has none. Raises `CorruptionError`."""
        if self.after.last_position == self.before.last_position:
            for change in self._changes():
                if not isinstance(change, MessageBatch):
                    yield change

    def _changes(self) -> Iterator[MessageBatch | Change]:
        for stored in self.stored:
            yield read_change(stored, self.shard, f"{self.log}, log entry {self.index}")


class MessagesFrom:
    """One reading of a shard's log from a place to its end; used once, by one thread."""

    def __init__(self, store: LogStore, shard: int, start: Place) -> None:
        self.progress = start.progress
        """The prefix of the log that was read."""
        self.base: Progress | None = None
        """The prefix that is in a base only, because the log was cut after the place; None if it wasn't."""
        self._shard = shard
        self._start = start
        self._log = f"{store.place}: shard {shard}"
        self._reader = LogReader(store, shard, self, checked=True)
        self._found: list[LogEntry] = []

    def write(self, entry: Entry, write: LocalWrite) -> None:
        """Keep the next entry; part of `topicstore.replication.log_reader.Machine`."""
        if write.changes:
            self._found.append(LogEntry(self.progress, write.progress, self._shard, self._log, entry.changes))
        self.progress = write.progress

    def take_base(self, base: Base) -> None:
        """Record that the log is cut; part of `topicstore.replication.log_reader.Machine`."""
        self.base = self.progress = base.progress

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries up to the log's end, which includes all writes acknowledged before the first entry is read.

        If the log was cut after the place, the entries continue after a base, and `base` is that base. At most a few
        hundred entries, or 8 MiB and an entry, are in memory. Raises `PlaceAheadError` if the log has lost entries
        before the place, `CorruptionError` and `StorageUnavailableError`.
        """
        self._check_there()
        step = Step.READ
        while step is not Step.FENCE:
            step = self._reader.read(certain=True)
            found, self._found = self._found, []
            yield from found
        if self.progress.last_position < self._start.position:
            raise self._lost(f"it ends at position {self.progress.last_position}")

    def _check_there(self) -> None:
        last: Head | None = self._reader.last()
        try:
            check_reaches(self.progress, last, self._reader.cut())
        except CorruptionError as other:
            raise self._lost(str(other)) from other

    def _lost(self, why: str) -> PlaceAheadError:
        return PlaceAheadError(
            f"{self._log}: the log has lost what was read up to position {self._start.position}, as when the log store "
            f"was restored from an older copy ({why}); begin again at a time, or from now on"
        )


def latest(store: LogStore, shard: int, start: Place) -> Place:
    """Return the place at the end of a shard's log. Reads all entries after ``start``.

    Raises the errors of `MessagesFrom.entries`.
    """
    log, deleted = MessagesFrom(store, shard, start), start.deleted
    for entry in log.entries():
        if any(isinstance(change, Delete) for change in entry.others()):
            deleted = entry.index
    return Place(position=log.progress.last_position, progress=log.progress, deleted=deleted)


def sought(store: LogStore, shard: int, position: int) -> Place | None:
    """Return the place before the first message above a position, without the oldest generations that were dropped.

    If all messages are at or below ``position``, this is the log's end. Returns None if the log is cut there, so that
    only a copy of the shard shows where that message is. Raises `CorruptionError` and `StorageUnavailableError`.
    """
    base = newest_base(store, shard)
    begin = base.progress if base is not None and base.progress.last_position <= position else BEGINNING
    log, mark = MessagesFrom(store, shard, Place(position=begin.last_position, progress=begin)), begin
    generations = _Generations()
    for entry in log.entries():
        if entry.after.last_position <= position:
            mark = entry.after
        generations.note(entry)
    if log.base is not None:
        return None
    oldest = generations.oldest()
    if oldest is not None and oldest.last_position > position:
        mark, position = oldest, oldest.last_position
    if log.progress.last_position <= position:
        return Place(position=log.progress.last_position, progress=log.progress)
    return Place(position=position, progress=mark)


class _Generations:
    """The generations that the entries of a log begin and drop."""

    def __init__(self) -> None:
        self._began: dict[int, Progress] = {}
        """For each generation, the prefix of the log before its first message."""
        self._dropped: set[int] = set()

    def note(self, entry: LogEntry) -> None:
        """Record the changes of generations in the next entry."""
        for change in entry.others():
            if isinstance(change, AddGeneration):
                self._began.setdefault(change.number, entry.after)
            elif isinstance(change, DropGeneration):
                self._dropped.add(change.number)

    def oldest(self) -> Progress | None:
        """Return the prefix of the log before the oldest generation that is left; None if no older one was dropped."""
        oldest = first = min(self._began, default=1)
        if first > 1 and first - 1 not in self._dropped:
            return None
        while oldest in self._dropped:
            oldest += 1
        return self._began.get(oldest)


@attrs.frozen
class Limited:
    """The first messages that a reader selects after a place."""

    positions: Positions
    """The positions of the messages, ascending."""
    end: Place
    """The place up to which the log was read, if it has no more of them."""
    marks: Sequence[Place]
    """Places of which the first is the one where reading began; ascending."""

    def place(self, count: int) -> Place:
        """Return the place after the first ``count`` messages."""
        if not count:
            return self.marks[0]
        position = int(self.positions[count - 1])
        mark = self.marks[bisect_right(self.marks, position, key=lambda mark: mark.progress.last_position) - 1]
        return msgspec.structs.replace(mark, position=position)


def limited(
    store: LogStore,
    shard: int,
    start: Place,
    target: Place | None,
    rows: int,
    wanted: Callable[[MessageBatch], MessageBatch],
    copied: Callable[[int, int], Positions],
) -> Limited:
    """Return the first ``rows`` messages of a shard after a place, of those that ``wanted`` selects.

    target: the place at which to end; None for the log's end.
    copied: returns the positions of the first ``rows`` such messages in a range of positions, both inclusive, from a
            copy of the shard. Called if the log is cut after ``start``.

    Raises the errors of `MessagesFrom`.
    """
    log, deleted, size = MessagesFrom(store, shard, start), start.deleted, 0
    found: list[Positions] = [np.empty(0, np.uint64)]
    marks, count, marked = [start], 0, 0
    for entry in log.entries():
        if log.base is None and (count >= rows or (target is not None and entry.index >= target.progress.next)):
            break
        if any(isinstance(change, Delete) for change in entry.others()):
            deleted = entry.index
        if log.base is None:
            for batch in entry.batches():
                chosen = wanted(batch).positions
                if len(chosen := chosen[chosen > start.position]):
                    found.append(chosen)
                    count += len(chosen)
            size += entry.size
            if size >= _MARK:
                if marked == count and len(marks) > 1:
                    marks.pop()  # no message was found after the last mark
                marks.append(Place(position=entry.after.last_position, progress=entry.after, deleted=deleted))
                size, marked = 0, count
    end = target or Place(position=log.progress.last_position, progress=log.progress, deleted=deleted)
    if log.base is None or end.position <= start.position:
        return Limited(np.concatenate(found)[:rows], end, marks)
    marks = [start, Place(position=log.base.last_position, progress=log.base, deleted=start.deleted)]
    return Limited(copied(start.position + 1, end.position), end, marks)


class MessagesBetween:
    """The messages of a shard between two places, without those that the log up to the second place deletes.

    Messages that are deleted later are included, and so are those of dropped generations: the log still has them.
    """

    def __init__(self, store: LogStore, shard: int, start: Place, end: Place) -> None:
        self.position = start.position
        """The position up to which messages were read."""
        self.cut = False
        """Whether the log was cut before the messages were read; then those above `position` are in copies only."""
        self._store = store
        self._shard = shard
        self._start = start
        self._end = end

    def batches(self) -> Iterator[MessageBatch]:
        """Yield the messages in order of positions, in batches of at most an entry.

        Raises `PlaceAheadError` if the log ends before the second place, and the errors of `MessagesFrom.entries`.
        """
        deletes = self._deletes() if self._end.deleted >= self._start.progress.next else []
        log, done = MessagesFrom(self._store, self._shard, self._start), self.cut
        entries = log.entries()
        while not done:
            entry = next(entries, None)
            if log.base is not None:
                self.cut = done = True
            elif entry is None:
                raise PlaceAheadError(
                    f"{self._store.place}: shard {self._shard}: the log ends at position {log.progress.last_position}, "
                    f"before position {self._end.position}, which was there: the log store has lost what it had"
                )
            else:
                later = [delete for index, delete in deletes if index > entry.index]
                for batch in entry.batches():
                    left = self._left(batch, later)
                    self.position = int(batch.positions[-1])
                    if len(left):
                        yield left
                done = entry.after.last_position >= self._end.position

    def _deletes(self) -> list[tuple[int, Delete]]:
        """Return the deletes between the places, with the indexes of their entries."""
        log, found = MessagesFrom(self._store, self._shard, self._start), []
        for entry in log.entries():
            if log.base is not None or entry.index >= self._end.progress.next:
                break
            found += [(entry.index, change) for change in entry.others() if isinstance(change, Delete)]
        self.cut = log.base is not None
        return found

    def _left(self, batch: MessageBatch, deletes: Sequence[Delete]) -> MessageBatch:
        """Return the messages of a batch that lie between the places, and that no delete removes."""
        positions = batch.positions
        left: _Mask = (positions > self._start.position) & (positions <= self._end.position)
        for delete in deletes:
            among = (positions >= delete.first) & (positions <= delete.last)
            if (among & left).any():
                if delete.topic_filter is not None:
                    among &= rows_of_topics(batch.topics, TopicFilter(delete.topic_filter).matches)
                spare = partial(matches_any, [*map(TopicFilter, delete.spare)])
                left &= ~(among & ~rows_of_topics(batch.topics, spare))
        return batch if left.all() else batch.take(np.flatnonzero(left))


def rows_of_topics(topics: Column, wanted: Callable[[str], bool]) -> _Mask:
    """Return for each row whether its topic is wanted; ``wanted`` is called once for each distinct topic."""
    if isinstance(topics, Constant):
        return np.full(len(topics), wanted(topics.value))
    if isinstance(topics, Coded):
        coded = topics.compact()
        rows: _Mask = np.fromiter(map(wanted, coded.texts.values.tolist()), np.bool_)[coded.codes]
        return rows
    different = {topic: wanted(topic) for topic in dict.fromkeys(to_iterable(topics))}
    return np.fromiter(map(different.__getitem__, to_iterable(topics)), np.bool_, len(topics))
