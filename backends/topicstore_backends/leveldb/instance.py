"""An open database of LevelDB, and what it gave out."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from topicstore.contract import forking
from topicstore.contract.errors import DatabaseClosedError, EngineError

from topicstore_backends.calls import Calls

from .errors import Translated

__all__ = ["Instance"]


class Instance:
    """The open database and what it gave out; only calls that are counted give anything back.

    Left to Python, an iterator could go while another thread closes the database it points into.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database: Any = None
        self.calls = Calls(Translated(path))
        self._given: set[Any] = set()
        """plyvel's iterators and snapshots."""
        self._left_to_parent = False
        self._closing = Lock()
        directory = path.stat()
        self._place = directory.st_dev, directory.st_ino
        with _placing:
            other = _open_places.setdefault(self._place, self)
        if other is not self:
            raise EngineError(f"{path}: the LevelDB database is open already, in this process")

    def give(self, made: Any) -> Any:
        """Remember an iterator or a snapshot; call it, as all else that is made, within ``calls``."""
        self._given.add(made)
        return made

    def take_back(self, made: Any) -> None:
        """Close an iterator or a snapshot, unless closing the database does."""
        with suppress(DatabaseClosedError), self.calls:
            made.close()
            self._given.discard(made)

    def close(self) -> None:
        """Wait for the calls inside, then close everything. May be called twice."""
        if self._left_to_parent:
            return
        self.calls.end()
        with (
            self._closing,
            ExitStack() as closing,
        ):  # each of these is done, whatever another raises; the last one first
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
        """Leak LevelDB's objects, so that nothing, not even the end of the process, closes them."""
        self._left_to_parent = True
        self.calls.abandon()
        forking.leak(self.database, *self._given)


_placing = Lock()
_open_places: WeakValueDictionary[tuple[int, int], Instance] = WeakValueDictionary()
"""What this process has open, by device and number of its directory."""
