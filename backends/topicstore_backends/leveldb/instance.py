"""An open LevelDB database with its iterators and snapshots."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock, RLock
from typing import Any
from weakref import WeakValueDictionary

from topicstore.contract import forking
from topicstore.contract.errors import DatabaseClosedError, EngineError

from topicstore_backends.calls import Calls

from .errors import Translated

__all__ = ["Instance"]


class Instance:
    """The open database with its iterators and snapshots, which are released only in calls that `close` waits for.

    Python's garbage collector must not release an iterator, because another thread may be closing the database.
    """

    def __init__(self, path: Path, translated: Translated) -> None:
        self.translated = translated
        self.database: Any = None
        self.calls = Calls(translated)
        self._given: set[Any] = set()
        """plyvel's open iterators and snapshots."""
        self.left_to_parent = False
        self._closing = Lock()
        directory = path.stat()
        self._place = directory.st_dev, directory.st_ino
        with _placing:
            other = _open_places.setdefault(self._place, self)
        if other is not self:
            raise EngineError(f"{path}: the LevelDB database is open already, in this process")

    def give(self, made: Any) -> Any:
        """Register and return an iterator or a snapshot that the caller has created within the same use of `calls`."""
        self._given.add(made)
        return made

    def take_back(self, made: Any) -> None:
        """Close an iterator or a snapshot, unless closing the database has closed it already."""
        with suppress(DatabaseClosedError), self.calls.lock(), self.calls:
            made.close()
            self._given.discard(made)

    def close(self) -> None:
        """Wait for the calls inside LevelDB, then close iterators, snapshots and the database. Idempotent."""
        if self.left_to_parent:
            return
        self.calls.end()
        with (
            self.translated,
            self._closing,
            ExitStack() as closing,
        ):  # each callback runs even if another raises, the last one first
            closing.callback(self._leave_place)
            if self.database is not None:
                closing.callback(self.database.close)
            while self._given:
                closing.callback(self._given.pop().close)

    def _leave_place(self) -> None:
        with _placing:
            if _open_places.get(self._place) is self:
                del _open_places[self._place]

    def leave_to_parent(self) -> None:
        """Leak LevelDB's objects in a forked child, so that nothing closes them, not even the end of the process."""
        self.left_to_parent = True
        self.calls.abandon()
        forking.leak(self.database, *self._given)


_placing = RLock()  # reentrant, because a garbage collection inside may close a database
_open_places: WeakValueDictionary[tuple[int, int], Instance] = WeakValueDictionary()
"""The open instances of this process by device and inode number of their directories. Guarded by `_placing`."""
