"""Reading the log of one shard: applying what lies behind what is applied, or beginning anew at a base."""

from __future__ import annotations

from typing import Protocol

from topicstore.contract.errors import CorruptionError
from topicstore.contract.log_store import LogStore, ObjectNotFoundError

from . import names
from .bases import highest
from .heads import Head, Progress
from .objects import BASES, Base, Entry, decode_entry
from .reading import LocalWrite, Source, apply, check_reaches, missing, where_to_read
from .taking_over import Step, after_reading

__all__ = ["LogReader", "Machine"]

_AT_ONCE = 256
"""The most entries that are read before cuts are looked for."""


class Machine(Protocol):
    """What holds the shard on this site. Called by one thread at a time."""

    @property
    def progress(self) -> Progress:
        """How far it is."""

    def write(self, entry: Entry, write: LocalWrite) -> None:
        """Write the entry's changes, unless they are left out, and the progress, in one write of the engine."""

    def take_base(self, base: Base) -> None:
        """Replace everything by a base. If that was deleted, raise `ObjectNotFoundError` and leave all as it was."""


class LogReader:
    """The reading side of one shard's log. Used by one thread at a time."""

    def __init__(self, store: LogStore, shard: int, machine: Machine) -> None:
        self._store = store
        self._shard = shard
        self._machine = machine
        self._checked = False
        """Whether the log was seen to reach as far as what is applied."""

    def read(self, epoch: int | None = None) -> Step:
        """Read and apply some of what lies behind what is applied, if there is anything.

        ``epoch`` is that of a site that takes over. Returns `Step.READ` if there may be more, `Step.FENCE` if there was
        nothing, and `Step.STOP` if what was applied before the call has a higher epoch.

        Raises `CorruptionError` if the log isn't the one that was applied here or has lost entries, and
        `StorageUnavailableError`; what was applied before stays.
        """
        progress = self._machine.progress
        if epoch is not None and after_reading(epoch, progress) is Step.STOP:
            return Step.STOP
        if not self._checked:
            last = self._get(progress.next - 1) if progress.next else None
            check_reaches(progress, last.head if last is not None else None, self.cut())
            self._checked = True
        found, gap = self._behind(progress)
        cut = self.cut()  # after reading
        if where_to_read(progress, cut) is Source.BASE:
            self.take_base()
            return Step.READ
        for entry in found:
            self.apply(entry)
        if gap is not None and missing(gap, cut) is Source.BASE:
            self.take_base()
        return Step.READ if found or gap is not None else Step.FENCE

    def apply(self, entry: Entry) -> None:
        """Apply the next entry."""
        for write in apply(self._machine.progress, entry.head):
            self._machine.write(entry, write)

    def last(self) -> Head | None:
        """Return the head of the last entry that is applied, None if it is gone or there is none."""
        progress = self._machine.progress
        found = self._get(progress.next - 1) if progress.next else None
        return None if found is None else found.head

    def cut(self) -> int:
        """Return the index of the highest cut, 0 if there is none."""
        return highest(self._store, names.cuts(self._shard)) or 0

    def take_base(self) -> None:
        """Replace what is applied by the newest base. Raises `CorruptionError` if there is none that is whole."""
        tried = -1
        while True:
            index = highest(self._store, names.bases(self._shard))
            if index is None:
                place = f"{self._store.place}: shard {self._shard}"
                raise CorruptionError("the log is cut, and there is no base", place)
            name = names.base_head(self._shard, index)
            try:
                self._machine.take_base(BASES.decode(name, self._store.get(name), self._store.place))
                return
            except ObjectNotFoundError as gone:  # deleted meanwhile, if there is a higher one now
                if index == tried:
                    raise CorruptionError(f"{gone.name} is missing", f"{self._store.place}: base {name}") from gone
                tried = index

    def _behind(self, progress: Progress) -> tuple[list[Entry], int | None]:
        """Return entries that follow each other, and the index that is missing though one above it is there."""
        after = names.entry(self._shard, progress.next - 1) if progress.next else ""
        found: list[Entry] = []
        for chunk in self._store.names(names.entries(self._shard), after):
            for name in chunk:
                index = progress.next + len(found)
                # A listing may have been made before an entry was created, and then have found the one after it.
                while index <= names.number_of(name):
                    entry = self._get(index)
                    if entry is None:
                        return found, index
                    found.append(entry)
                    index += 1
                if len(found) >= _AT_ONCE:
                    return found, None
        return found, None

    def _get(self, index: int) -> Entry | None:
        try:
            data = self._store.get(names.entry(self._shard, index))
        except ObjectNotFoundError:
            return None
        return decode_entry(self._shard, index, data, self._store.place)
