"""What rocksdict raises, turned into topicstore's errors."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import NoReturn, cast

import rocksdict
from topicstore.contract.errors import CorruptionError, DatabaseClosedError, EngineError

from topicstore_backends.files import shortage

__all__ = ["Translated", "file_named"]

_RECOVERY_HINT = (
    'If its log is damaged, opening with recovery="point_in_time" keeps everything'
    ' up to the damage, and "salvage" every batch that can still be read.'
)

_HELD = re.compile(r"LOCK: (?:No locks available|Resource temporarily unavailable)")


class Translated:
    """Turns what rocksdict raises, which is bare ``Exception`` with RocksDB's words, into our errors."""

    __slots__ = ("_opening", "_path")

    def __init__(self, path: Path, *, opening: bool = False) -> None:
        self._path = path
        self._opening = opening

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
        if (short := shortage(self._path, error, text)) is not None:
            raise short from error
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
