"""Translates rocksdict's errors into topicstore's."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import NoReturn, cast

import rocksdict
from topicstore.contract.errors import CorruptionError, DatabaseClosedError, EngineError

from topicstore_backends.files import resource_error

__all__ = ["Translated", "file_named"]

_RECOVERY_HINT = (
    'If its log is damaged, opening with recovery="point_in_time" keeps everything'
    ' up to the damage, and "salvage" also what can be read behind it.'
)

_EARLIER = re.compile(r"IO error: Writer has previous error\.?\s*")
"""Matches RocksDB's message for a log whose writer's first error RocksDB has already reported."""
_HELD = re.compile(r"LOCK: (?:No locks available|Resource temporarily unavailable)")


class Translated:
    """A context manager that translates rocksdict's errors to topicstore's.

    Most of rocksdict's errors are plain ``Exception`` objects with RocksDB's message.
    """

    __slots__ = ("_exhausted", "_opened", "_opening", "_path")

    def __init__(self, path: Path, *, opened: Path | None = None, opening: bool = False) -> None:
        """Name ``path`` in errors. ``opened`` is the temporary directory that stands for it, if it is only read."""
        self._path = path
        self._opened = opened or path
        self._opening = opening
        self._exhausted = ""
        """The message of the first error about an exhausted resource; empty if there was none."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is Exception or kind is rocksdict.DbClosedError or isinstance(error, OSError):
            self._raise(cast("Exception", error))

    def _raise(self, error: Exception) -> NoReturn:
        text = str(error)
        if isinstance(error, rocksdict.DbClosedError):
            raise DatabaseClosedError(f"{self._path}: the engine is closed") from error
        words = f"{text} {self._exhausted}" if _EARLIER.fullmatch(text) else text
        if (short := resource_error(self._path, error, words)) is not None:
            self._exhausted = self._exhausted or text
            raise short from error
        text = text.replace(str(self._opened), str(self._path))
        if text.startswith("Corruption"):
            hint = f". {_RECOVERY_HINT}" if self._opening else ""
            raise CorruptionError(text + hint, place=str(self._path / (file_named(text) or ""))) from error
        if self._opening and _HELD.search(text):
            raise EngineError(f"{self._path}: the RocksDB database is open already ({text})") from error
        raise EngineError(f"{self._path}: {text}") from error


def file_named(text: str) -> str | None:
    """Return the table or log file that a message of RocksDB names."""
    found = re.search(r"\d{6,}\.(?:sst|log)", text)
    return found.group() if found else None
