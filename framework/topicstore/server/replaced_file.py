"""Small files of lines that commands change while a server reads them: users, tokens.

Empty lines and lines that begin with ``#`` are passed over. A file is replaced as a whole, so whoever reads it sees one
state of it. It keeps its owner, group and permissions, whoever changes it; a new one can be read by its owner only, who
is that of the directory if the superuser makes it: a server runs as another user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from topicstore.contract.errors import InvalidArgumentError
from topicstore.files.text import read_text

__all__ = ["ReplacedFile", "Signature", "Watched"]

Signature = tuple[int, int, int, int]
"""What changes when the file is replaced, or its permissions change."""
T = TypeVar("T")

_ACCESS_LIST = "system.posix_acl_access"
"""The extended attribute in which Linux keeps permissions of further users (acl(5))."""

_log = logging.getLogger("topicstore.server")


class ReplacedFile:
    """One such file. ``what`` it holds stands in errors, which are of the class ``error``."""

    def __init__(self, path: Path, what: str, error: type[InvalidArgumentError]) -> None:
        self.path = path
        self._what, self._error = what, error

    def signature(self) -> Signature:
        """Return what changes when the file is replaced. Raises the file's error."""
        with self._explained():
            found = self.path.stat()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def lines(self) -> list[tuple[int, str]]:
        """Return the lines that count, with their numbers, from 1 on. Raises the file's error."""
        with self._explained():
            text = read_text(self.path)
        return [(number, line) for number, line in enumerate(_lines(text), 1) if counts(line)]

    def change(self, change: Callable[[list[str]], list[str]], *, missing_ok: bool) -> None:
        """Replace all lines by what ``change`` makes of them, comments too.

        A link stays, and the file to which it leads is replaced. ``missing_ok``: without a file, make one. Raises the
        file's error, also if the file's owner, group and permissions can't be kept, and what ``change`` raises; then
        nothing is changed.
        """
        target = Path(os.path.realpath(self.path))
        new = target.with_name(f"{target.name}.new")
        with self._explained():
            try:
                number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                raise self._error(
                    f"{new} is there: somebody is changing the {self._what} now; if not, remove it"
                ) from None
            except FileNotFoundError:
                raise self._error(f"{target.parent}, where the file of {self._what} belongs, is not there") from None
            try:
                with os.fdopen(number, "w", encoding="utf-8", newline="\n") as out:
                    out.write("".join(f"{line}\n" for line in change(self._all(missing_ok=missing_ok))))
                    out.flush()
                    self._assign(out.fileno(), target)
                    os.fsync(out.fileno())
                new.replace(target)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    def _assign(self, number: int, target: Path) -> None:
        """Give a new file the owner, group and permissions of the one that it replaces, or of a first one."""
        made = os.fstat(number)
        try:
            before = target.stat()
        except FileNotFoundError:
            directory = target.parent.stat()
            if os.geteuid() == 0 and directory.st_uid != 0:
                os.fchown(number, directory.st_uid, directory.st_gid)
            return
        if (before.st_uid, before.st_gid) != (made.st_uid, made.st_gid):
            try:
                os.fchown(number, before.st_uid, before.st_gid)
            except PermissionError as bad:
                raise self._error(
                    f"the file of {self._what} {target} would not keep its owner and group ({before.st_uid}:"
                    f"{before.st_gid}), and a server could no longer read it: change it as its owner, or as root"
                ) from bad
        os.fchmod(number, stat.S_IMODE(before.st_mode))
        if (listed := _access_list(target)) is not None:
            os.setxattr(number, _ACCESS_LIST, listed)

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


def _access_list(path: Path) -> bytes | None:
    """Return the permissions of further users of a file; None where there are none, or can't be any."""
    if not hasattr(os, "getxattr"):
        return None
    try:
        return os.getxattr(path, _ACCESS_LIST)
    except OSError as bad:
        if bad.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise


class _Signed(Protocol):
    def signature(self) -> Signature: ...


class Watched(Generic[T]):
    """What a file says that may be replaced at any time. May be used in any thread.

    A file that can't be read any more, or is damaged, is logged once, and what it said before counts: else a mistake in
    it, or in its permissions, would shut out everybody.
    """

    def __init__(self, file: _Signed, read: Callable[[], T], *, missing: T | None = None) -> None:
        """Look at a file later.

        read:    returns what the file says, and raises the file's error.
        missing: what counts without a file; by default that is an error.
        """
        self._file, self._read, self._missing = file, read, missing
        self._reading = threading.RLock()
        """Held while the file is read, and while the attributes below change."""
        self.last: T | None = None
        """What the file said when it could be read last; None if there is no file, or none that could ever be read."""
        self._signature: Signature | None = None
        """The signature of the file that was read last, or couldn't be."""
        self._told = ""
        """The error that was logged last."""

    def unchanged(self) -> T | None:
        """Return what was read last if the file is still the same, without reading it; else None."""
        try:
            return self.last if self._file.signature() == self._signature else None
        except InvalidArgumentError:
            return None

    def now(self) -> T:
        """Return what the file says; if it can't be read, what it said before.

        Raises the file's error if there is no file, or none that could be read before.
        """
        if (last := self.unchanged()) is not None:
            return last
        with self._reading:
            if (last := self.unchanged()) is not None:
                return last
            try:
                return self.reread()
            except InvalidArgumentError as bad:
                if self.last is None:
                    raise
                if str(bad) != self._told:
                    _log.error("what was read before still counts: %s", bad)
                    self._told = str(bad)
                return self.last

    def reread(self) -> T:
        """Read the file, and return what it says.

        Raises the file's error; what it said before then counts on, unless there is no file.
        """
        with self._reading:
            try:
                self._signature = self._file.signature()
                self.last = found = self._read()
            except InvalidArgumentError as bad:
                if not isinstance(bad.__cause__, FileNotFoundError):
                    raise
                self.last = self._signature = None
                if self._missing is None:
                    raise
                return self._missing
            self._told = ""
            return found


def _lines(text: str) -> list[str]:
    """Return the lines of a text, whose ends may be those of Windows."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def counts(line: str) -> bool:
    """Return whether a line says something: it is neither empty nor a comment."""
    return bool(line.strip()) and not line.startswith("#")
