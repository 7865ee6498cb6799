"""Small files of lines that commands change while a server reads them: users, tokens.

Empty lines and lines that begin with ``#`` are passed over. A file is replaced as a whole, so whoever reads it sees one
state of it, and only its owner can read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from topicstore.contract.errors import InvalidArgumentError
from topicstore.files.text import read_text

__all__ = ["ReplacedFile", "Signature"]

Signature = tuple[int, int, int]
"""What changes when the file is replaced."""


class ReplacedFile:
    """One such file. ``what`` it holds stands in errors, which are of the class ``error``."""

    def __init__(self, path: Path, what: str, error: type[InvalidArgumentError]) -> None:
        self.path = path
        self._what, self._error = what, error

    def signature(self) -> Signature:
        """Return what changes when the file is replaced. Raises the file's error."""
        with self._explained():
            found = self.path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def lines(self) -> list[tuple[int, str]]:
        """Return the lines that count, with their numbers, from 1 on. Raises the file's error."""
        with self._explained():
            text = read_text(self.path)
        return [(number, line) for number, line in enumerate(_lines(text), 1) if counts(line)]

    def change(self, change: Callable[[list[str]], list[str]], *, missing_ok: bool) -> None:
        """Replace all lines by what ``change`` makes of them, comments too.

        ``missing_ok``: without a file, make one. Raises the file's error, and what ``change`` raises; then nothing is
        changed.
        """
        new = self.path.with_name(f"{self.path.name}.new")
        with self._explained():
            try:
                number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                raise self._error(
                    f"{new} is there: somebody is changing the {self._what} now; if not, remove it"
                ) from None
            except FileNotFoundError:
                raise self._error(f"{self.path.parent}, where the file of {self._what} belongs, is not there") from None
            try:
                with os.fdopen(number, "w", encoding="utf-8", newline="\n") as out:
                    out.write("".join(f"{line}\n" for line in change(self._all(missing_ok=missing_ok))))
                    out.flush()
                    os.fsync(out.fileno())
                new.replace(self.path)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    def _all(self, *, missing_ok: bool) -> list[str]:
        try:
            return [line for line in _lines(read_text(self.path)) if line.strip()]
        except FileNotFoundError:
            if missing_ok:
                return []
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as bad:
            raise self._error(
                f"there is no file of {self._what} at {self.path}; 'topicstore {self._what} add' makes it"
            ) from bad
        except (OSError, UnicodeError) as bad:
            raise self._error(f"the file of {self._what} {self.path} can't be used: {bad}") from bad


def _lines(text: str) -> list[str]:
    """Return the lines of a text, whose ends may be those of Windows."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def counts(line: str) -> bool:
    """Return whether a line says something: it is neither empty nor a comment."""
    return bool(line.strip()) and not line.startswith("#")
