"""Translates DuckDB's errors into topicstore's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

import duckdb
from topicstore.contract.errors import (
    CorruptionError,
    DatabaseClosedError,
    EngineError,
    InvalidArgumentError,
    LogDamagedError,
)

from topicstore_backends.files import resource_error

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

__all__ = ["INVALIDATED", "LEFT_IN_LOG", "StatementRefused", "Translated", "WalDamagedError"]

INVALIDATED = re.compile(r"has been invalidated|autocheckpoint failed")
"""Matches errors after which the file must be attached again before it can be used."""
LEFT_IN_LOG = re.compile(r"COMMIT succeeded|autocheckpoint failed")
"""Matches errors of a commit that is in the log, where only writing the log into the file failed."""
_CORRUPT = re.compile(
    r"corrupt|checksum|not a valid DuckDB database|magic bytes|deserializ|WAL.*(replay|checksum)|replaying WAL"
    r"|could not read enough bytes",
    re.IGNORECASE,
)
_WAL = re.compile(r"Corrupt WAL file: entry at byte position (\d+)")
_LOCKED = re.compile(r"Could not set lock on file|Unique file handle conflict")
_HELD_BY = re.compile(r"Conflicting lock is held in (.*?\(PID \d+\))")
_MEMORY = re.compile(r"Out of Memory|could not allocate|failed to (allocate|pin)", re.IGNORECASE)
_INTERRUPTED = re.compile(
    r"^Query interrupted$|\b(?:KeyboardInterrupt|SystemExit)\b|Table with name rows does not exist"
)
"""Matches DuckDB's message when a signal handler raised during a statement; it need not name the handler's error.

The last alternative comes when the handler raised while DuckDB looked for the caller's variable ``rows``, which always
exists.
"""


_MISTAKES = (
    duckdb.DataError,
    duckdb.DependencyException,
    duckdb.NotSupportedError,
    duckdb.PermissionException,
    duckdb.ProgrammingError,
    duckdb.SequenceException,
)
_NAMES_FILE = re.compile(r"""["'][^"']+["']|\bFile \S+ requires""")


class WalDamagedError(LogDamagedError):
    """The write-ahead log can be read up to byte number ``end``."""

    def __init__(self, reason: str, place: str, end: int) -> None:
        super().__init__(reason, place)
        self.end = end

    def __reduce__(self) -> tuple[type[WalDamagedError], tuple[str, str, int]]:
        return type(self), (self.reason, self.place, self.end)


class Translated:
    """A context manager that translates DuckDB's errors to those of `topicstore.contract.errors`."""

    __slots__ = ("_opened", "_path")

    def __init__(self, path: Path, *, opened: Path | None = None) -> None:
        """Name ``path`` in errors. ``opened`` is the temporary file that stands for it, if it is only read."""
        self._path = path
        self._opened = opened or path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, (duckdb.Error, RuntimeError)) and _INTERRUPTED.search(_first_paragraph(error)):
            raise KeyboardInterrupt(f"{self._path}: {error}") from error
        if isinstance(error, (duckdb.Error, OSError)):
            self._raise(error)

    def _raise(self, error: duckdb.Error | OSError) -> NoReturn:
        text = _first_paragraph(error)
        if isinstance(error, (duckdb.InterruptException, duckdb.ConnectionException)):
            raise DatabaseClosedError(f"{self._path}: the engine was closed ({text})") from error
        if (short := resource_error(self._path, error, text)) is not None:
            raise short from error
        text = text.replace(str(self._opened), str(self._path))
        if _LOCKED.search(text):
            raise EngineError(_locked(self._path, text)) from error
        if _MEMORY.search(text):
            raise EngineError(f"{self._path}: {text}; the option memory_bytes is what DuckDB may use") from error
        if damaged := _WAL.search(text):
            raise WalDamagedError(text, str(self._path), int(damaged[1])) from error
        if _CORRUPT.search(text) or isinstance(error, duckdb.SerializationException):
            raise CorruptionError(text, place=str(self._path)) from error
        raise EngineError(f"{self._path}: {text}") from error


class StatementRefused:
    """A context that raises `InvalidArgumentError` for mistakes in a caller's statement.

    A failure to read a file that the statement names counts as a mistake, such as a missing or damaged file. Failures
    that name one of the engines' ``directories`` or no file, or that a full disk or a lack of memory caused, don't.
    """

    def __init__(self, directories: Iterable[Path] = ()) -> None:
        self._own = [*map(str, directories), "duckdb_temp"]

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _MISTAKES) or self._is_of_named_file(error):
            raise InvalidArgumentError(str(error)) from error
        if isinstance(error, duckdb.TransactionException) and "read-only" in str(error):
            raise InvalidArgumentError(f"the statement writes, and only reading is allowed: {error}") from error

    def _is_of_named_file(self, error: BaseException | None) -> bool:
        if not isinstance(error, duckdb.IOException) and type(error) is not duckdb.Error:
            return False
        text = str(error)
        return _NAMES_FILE.search(text) is not None and not any(own in text for own in self._own)


def _first_paragraph(error: BaseException) -> str:
    """Return the message without DuckDB's general advice."""
    return str(error).partition("\n\n")[0].replace("\n", " ")


def _locked(path: Path, text: str) -> str:
    holder = _HELD_BY.search(text)
    by = f"process {holder[1]} has it open" if holder else "it is open in this process already"
    return f"{path}: {by}, and while one has a DuckDB file open to write no other can read it"
