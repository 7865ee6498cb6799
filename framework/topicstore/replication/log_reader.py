"""`LogReader`: reads one shard's log, and applies the entries after those applied, or starts again from a base."""

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

_MOST_ENTRIES, _MOST_BYTES = 256, 8 << 20
"""The number of entries, and the bytes of changes, after which one call stops reading and looks for cuts."""
_LOOK_EVERY = 100
"""The number of calls that find nothing after which one looks for cuts and for later entries.

Truncation may have deleted the entry that is read next, if the process was stopped for long. Then no GET finds it.
"""


class Machine(Protocol):
    """The replicated state machine: a site's copy of the shard. Called by one thread at a time."""

    @property
    def progress(self) -> Progress:
        """The progress of this site: which prefix of the log is applied to the shard."""

    def write(self, entry: Entry, write: LocalWrite) -> None:
        """Write the entry's changes, if ``write.changes``, and the progress, in one write of the engine."""

    def take_base(self, base: Base) -> None:
        """Replace the shard's contents with a base (a snapshot).

        Raises `ObjectNotFoundError`, with nothing changed, if the base was deleted.
        """


class LogReader:
    """The reading side of one shard's log. Used by one thread at a time.

    checked: whether the caller has called `check_reaches` for the progress of the state machine.
    """

    def __init__(self, store: LogStore, shard: int, machine: Machine, *, checked: bool = False) -> None:
        self._store = store
        self._shard = shard
        self._machine = machine
        self._checked = checked
        """Whether the log was found to hold the last applied entry."""
        self._nothing = _LOOK_EVERY
        """The number of calls that found nothing since the last one that looked for later entries."""

    def read(self, epoch: int | None = None, *, certain: bool = False) -> Step:
        """Read and apply some of the entries after the last applied one.

        ``epoch`` is the fencing token of a site that takes over. Returns `Step.READ` if there may be more entries,
        `Step.FENCE` at the log's end, and `Step.STOP` if an entry applied before the call has a higher epoch.

        A call that finds nothing costs one GET, and may not notice yet that truncation has deleted the next entry.
        With ``certain`` it looks for cuts too: at `Step.FENCE`, all that was acknowledged before the call is applied.

        Raises `CorruptionError` if the log differs from what this site has applied, or has lost entries, and
        `StorageUnavailableError`; entries applied earlier stay applied.
        """
        progress = self._machine.progress
        if epoch is not None and after_reading(epoch, progress) is Step.STOP:
            return Step.STOP
        if not self._checked:
            last = self._get(progress.next - 1) if progress.next else None
            check_reaches(progress, last.head if last is not None else None, self.cut())
            self._checked = True
        found, ended = self._behind(progress)
        thorough = epoch is not None or self._nothing >= _LOOK_EVERY
        if not found:
            self._nothing += 1
            return self._look(progress, thorough) if thorough or certain else Step.FENCE
        cut = self.cut()  # cuts are looked for only after reading; see `where_to_read`
        if where_to_read(progress, cut) is Source.BASE:
            self.take_base()
            return Step.READ
        for entry in found:
            self.apply(entry)
        if thorough or not ended or where_to_read(self._machine.progress, cut) is Source.BASE:
            return Step.READ
        self._nothing = 0
        return Step.FENCE

    def _look(self, progress: Progress, thorough: bool) -> Step:
        """Look for the reason why there is no next entry: the log's end, truncation or, if ``thorough``, damage."""
        later = thorough and self._has_later(progress.next)
        if later and self._get(progress.next) is not None:
            return Step.READ  # the next entry was created meanwhile
        cut = self.cut()
        if thorough:
            self._nothing = 0
        if (missing(progress.next, cut) if later else where_to_read(progress, cut)) is Source.BASE:
            self.take_base()
            return Step.READ
        return Step.FENCE

    def begin_again(self) -> None:
        """Begin a log whose state machine was emptied: the next call of `read` looks for a base too."""
        self._checked, self._nothing = False, _LOOK_EVERY

    def apply(self, entry: Entry) -> None:
        """Apply the next entry. Raises `CorruptionError` if it doesn't follow the last applied entry."""
        for write in apply(self._machine.progress, entry.head):
            self._machine.write(entry, write)

    def last(self) -> Head | None:
        """Return the header of the last applied entry; None if it was deleted or no entry is applied."""
        progress = self._machine.progress
        found = self._get(progress.next - 1) if progress.next else None
        return None if found is None else found.head

    def head(self, index: int) -> Head | None:
        """Return the header of the entry at an index, None if there is no entry."""
        found = self._get(index)
        return None if found is None else found.head

    def cut(self) -> int:
        """Return the index of the highest cut, 0 if there is none."""
        return highest(self._store, names.cuts(self._shard)) or 0

    def take_base(self) -> None:
        """Replace the shard with the newest base. Raises `CorruptionError` if no complete base exists."""
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
            except ObjectNotFoundError as gone:  # the base was deleted meanwhile, unless it is still the highest
                if index == tried:
                    raise CorruptionError(f"{gone.name} is missing", f"{self._store.place}: base {name}") from gone
                tried = index

    def _behind(self, progress: Progress) -> tuple[list[Entry], bool]:
        """Return consecutive entries, and whether no entry was found after them."""
        found: list[Entry] = []
        size = 0
        while len(found) < _MOST_ENTRIES and size < _MOST_BYTES:
            entry = self._get(progress.next + len(found))
            if entry is None:
                return found, True
            found.append(entry)
            size += sum(map(len, entry.changes))
        return found, False

    def _has_later(self, index: int) -> bool:
        """Return whether the log has entries from ``index`` on."""
        after = names.entry(self._shard, index - 1) if index else ""
        return any(self._store.names(names.entries(self._shard), after))

    def _get(self, index: int) -> Entry | None:
        try:
            data = self._store.get(names.entry(self._shard, index))
        except ObjectNotFoundError:
            return None
        return decode_entry(self._shard, index, data, self._store.place)
