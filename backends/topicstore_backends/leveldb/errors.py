"""Translates plyvel's errors into topicstore's."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import plyvel
from topicstore.contract.errors import CorruptionError, DatabaseClosedError, EngineError

from topicstore_backends.files import resource_error

__all__ = ["Translated", "lost", "text_of"]

_RECOVERY_HINT = (
    '. If its log is damaged, opening with recovery="point_in_time" keeps everything up to the damage,'
    ' and "salvage" also what can be read behind it. If table files or the manifest are,'
    " plyvel.repair_db(path) makes a database of what can be"
    " read; copy the directory before"
)
_FILE = re.compile(r"\d{6,}\.(?:ldb|sst|log)|MANIFEST-\d+|CURRENT")
_CUT = re.compile(r"\.(?:ldb|sst): Invalid argument")
"""Matches LevelDB's message for a table that is shorter than its index or the manifest says."""
_HELD = re.compile(r"LOCK: (?:already held by process|Resource temporarily unavailable)")


class Translated:
    """A context manager that translates plyvel's errors to topicstore's."""

    __slots__ = ("_opened", "_opening", "_path")

    def __init__(self, path: Path, *, opened: Path | None = None, opening: bool = False) -> None:
        """Name ``path`` in errors. ``opened`` is the temporary directory that stands for it, if it is only read."""
        self._path = path
        self._opened = opened or path
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
        if (short := resource_error(self._path, error, text)) is not None:
            raise short from error
        text = text.replace(str(self._opened), str(self._path))
        if isinstance(error, plyvel.CorruptionError) or _CUT.search(text):
            named = _FILE.search(text)
            place = str(self._path / named.group()) if named else str(self._path)
            raise CorruptionError(text + (_RECOVERY_HINT if self._opening else ""), place=place) from error
        if self._opening and _HELD.search(text):
            raise EngineError(f"{self._path}: the LevelDB database is open already ({text})") from error
        raise EngineError(f"{self._path}: {text}") from error


def text_of(error: BaseException) -> str:
    """Return an error's message; plyvel passes LevelDB's message on as bytes."""
    first = error.args[0] if error.args else b""
    return first.decode(errors="replace") if isinstance(first, bytes) else str(error)


def lost() -> plyvel.CorruptionError:
    """Return the error for damage to the database's first or last key, which always exist."""
    return plyvel.CorruptionError(b"Corruption: a key that is always there can't be found")
