"""An open database: what it gave out, who is inside of it, and what its errors mean."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import plyvel
from topicstore.contract.errors import CorruptionError, DatabaseClosedError, EngineError, StorageFullError

__all__ = ["Calls", "Held", "Translated", "lost", "sync", "text_of"]

_RECOVERY_HINT = (
    '. If its log is damaged, opening with options={"leveldb": {"recovery": "salvage"}} drops what can\'t be read'
    " of it. If table files or the manifest are, plyvel.repair_db(path) makes a database of what can be"
    " read; copy the directory before"
)
_FULL = re.compile(r"No space left on device|File too large|quota exceeded", re.IGNORECASE)
_FULL_ERRNO = frozenset((errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
_FILE = re.compile(r"\d{6,}\.(?:ldb|sst|log)|MANIFEST-\d+|CURRENT")


def sync(path: Path) -> None:
    """See that what was written to a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Translated:
    """Turns what plyvel raises into our errors."""

    __slots__ = ("_opening", "_path")

    def __init__(self, path: Path, *, opening: bool = False) -> None:
        self._path = path
        self._opening = opening

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, plyvel.Error | OSError):
            self._raise(error)
        if kind is RuntimeError and "is closed" in str(error):
            raise DatabaseClosedError("the engine or the snapshot is closed") from error

    def _raise(self, error: Exception) -> NoReturn:
        text = text_of(error)
        if isinstance(error, plyvel.CorruptionError):
            named = _FILE.search(text)
            place = str(self._path / named.group()) if named else str(self._path)
            raise CorruptionError(text + (_RECOVERY_HINT if self._opening else ""), place=place) from error
        if _FULL.search(text) or (isinstance(error, OSError) and error.errno in _FULL_ERRNO):
            raise StorageFullError(f"{self._path}: {text}") from error
        if self._opening and "LOCK" in text:
            raise EngineError(f"{self._path}: the LevelDB database is open already ({text})") from error
        raise EngineError(f"{self._path}: {text}") from error


def text_of(error: BaseException) -> str:
    """Return an error's words; plyvel hands LevelDB's on as bytes."""
    first = error.args[0] if error.args else b""
    return first.decode(errors="replace") if isinstance(first, bytes) else str(error)


class Calls:
    """Counts the calls that are inside LevelDB, and translates what they raise; closing waits for them.

    plyvel lets other threads run inside every call. Nothing here waits for a lock, so that a snapshot
    can be given back wherever Python collects garbage.
    """

    __slots__ = ("_closed", "_inside", "_left", "_translated")

    def __init__(self, path: Path) -> None:
        self._translated = Translated(path)
        self._inside: deque[None] = deque()
        """One entry a call: unlike a number's, its changes are atomic."""
        self._closed = False
        self._left = Event()

    def __enter__(self) -> None:
        self._inside.append(None)
        if self._closed:
            self._leave()
            raise DatabaseClosedError("the engine or the snapshot is closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if error is not None:
            self._translated.__exit__(kind, error, trace)

    def _leave(self) -> None:
        self._inside.pop()
        if self._closed and not self._inside:
            self._left.set()

    def end(self) -> None:
        """Let no more calls in and wait for those inside."""
        self._closed = True
        while self._inside:
            self._left.wait()
            self._left.clear()

    def abandon(self) -> None:
        """Let no more calls in; those inside are of threads that a fork left behind."""
        self._closed = True
        self._inside.clear()


def lost() -> plyvel.CorruptionError:
    """Return the error for damage that took one of the keys around all others."""
    return plyvel.CorruptionError(b"Corruption: a key that is always there can't be found")


class Held:
    """The open database and what it gave out; only calls that are counted give anything back.

    Left to Python, an iterator could go while another thread closes the database it points into.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database: Any = None
        self.calls = Calls(path)
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
        with self._closing:
            while self._given:
                self._given.pop().close()
            if self.database is not None:
                self.database.close()
            with _placing:
                if _open_places.get(self._place) is self:
                    del _open_places[self._place]

    def leave_to_parent(self) -> None:
        """Leak LevelDB's objects, so that nothing, not even the end of the process, closes them."""
        self._left_to_parent = True
        self.calls.abandon()
        for held in (self.database, *self._given):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


_placing = Lock()
_open_places: WeakValueDictionary[tuple[int, int], Held] = WeakValueDictionary()
"""What this process has open, by device and number of its directory."""
