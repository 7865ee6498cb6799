"""Small text files, of users and tokens, that commands replace while a server reads them.

Empty lines and lines that begin with ``#`` are ignored. A file is replaced atomically, so a reader sees either its old
or its new state. The file keeps its owner, group and permissions. A new file is readable by its owner only. If root
creates the file, its owner is the directory's owner, because the server usually runs as another user than root.
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

__all__ = ["ReplacedFile", "Signature", "Watched", "create_file"]

Signature = tuple[int, int, int, int]
"""Modification time, change time, size and inode of a file; differs after any change of the file."""
T = TypeVar("T")

_ACCESS_LIST = "system.posix_acl_access"
"""The extended attribute in which Linux keeps permissions of further users (acl(5))."""

_log = logging.getLogger("topicstore.server")


class ReplacedFile:
    """A text file that is replaced atomically. ``what`` names its entries in errors, which have the class ``error``."""

    def __init__(self, path: Path, what: str, error: type[InvalidArgumentError]) -> None:
        self.path = path
        self._what, self._error = what, error

    def signature(self) -> Signature:
        """Return values that differ after any change of the file. Raises the file's error."""
        with self._explained():
            found = self.path.stat()
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def lines(self) -> list[tuple[int, str]]:
        """Return the lines that are neither empty nor comments, with line numbers from 1. Raises the file's error."""
        with self._explained():
            text = read_text(self.path)
        return [(number, line) for number, line in enumerate(_lines(text), 1) if counts(line)]

    def change(self, change: Callable[[list[str]], list[str]], *, missing_ok: bool) -> None:
        """Replace the file with the lines that ``change`` returns for its lines; comments are included.

        The new file is fsynced before the rename. The target of a symbolic link is replaced, and the link stays.
        ``missing_ok``: create a missing file. Raises the file's error, also if its owner, group and permissions can't
        be kept, and the exceptions of ``change``; then nothing is changed.
        """
        self._replace(lambda: "".join(f"{line}\n" for line in change(self._all(missing_ok=missing_ok))))

    def rewrite(self, change: Callable[[str], str]) -> None:
        """Replace the file by the text that ``change`` returns for its text, as `change` does. The file must exist."""
        self._replace(lambda: change(read_text(self.path)))

    def _replace(self, content: Callable[[], str]) -> None:
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
                    out.write(content())
                    out.flush()
                    self._assign(out.fileno(), target)
                    os.fsync(out.fileno())
                new.replace(target)
            except BaseException:
                new.unlink(missing_ok=True)
                raise

    def _assign(self, number: int, target: Path) -> None:
        """Set a new file's owner, group and permissions to those of the replaced file, or to those of a first file."""
        made = os.fstat(number)
        try:
            before = target.stat()
        except FileNotFoundError:
            _assign_to_owner(number, target.parent)
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


def create_file(path: Path, content: bytes, *, secret: bool) -> None:
    """Create a file, and fsync it. Raises `FileExistsError` if there is one, and `OSError`; then nothing is left.

    ``secret``: whether only the file's owner may read it; otherwise everybody may, as far as the umask allows.
    """
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    try:
        with os.fdopen(number, "wb") as out:
            out.write(content)
            out.flush()
            _assign_to_owner(out.fileno(), path.parent)
            os.fsync(out.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _assign_to_owner(number: int, directory: Path) -> None:
    """Set a new file's owner and group to those of its directory, if root has created it."""
    found = directory.stat()
    if os.geteuid() == 0 and found.st_uid != 0:
        os.fchown(number, found.st_uid, found.st_gid)


def _access_list(path: Path) -> bytes | None:
    """Return the POSIX access control list of a file; None if it has none, or the system doesn't support it."""
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
    """The parsed content of a file that may be replaced at any time. Thread-safe.

    If the file becomes unreadable or invalid, that is logged once, and the last valid content stays in force: otherwise
    a mistake in the file, or in its permissions, would lock out all users.
    """

    def __init__(self, file: _Signed, read: Callable[[], T], *, missing: T | None = None) -> None:
        """Set up the object; the file is read when its content is first requested.

        read:    returns the file's parsed content, or raises the file's error.
        missing: the content if there is no file; by default a missing file is an error.
        """
        self._file, self._read, self._missing = file, read, missing
        self._reading = threading.RLock()
        """Held while the file is read, and while the following attributes change."""
        self.last: T | None = None
        """The last valid content of the file; None if there is no file, or it was never valid."""
        self._signature: Signature | None = None
        """The signature of the file at the last attempt to read it."""
        self._logged = ""
        """The error that was logged last."""

    def unchanged(self) -> T | None:
        """Return the last content if the file's signature has not changed since; else None. Doesn't read the file."""
        try:
            return self.last if self._file.signature() == self._signature else None
        except InvalidArgumentError:
            return None

    def now(self) -> T:
        """Return the file's content; if the file can't be read, the last valid content.

        Raises the file's error if there is no file, or if it was never valid.
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
                if str(bad) != self._logged:
                    _log.error("what was read before still counts: %s", bad)
                    self._logged = str(bad)
                return self.last

    def reread(self) -> T:
        """Read the file, and return its content.

        Raises the file's error; then the last valid content stays in force, unless there is no file.
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
            self._logged = ""
            return found


def _lines(text: str) -> list[str]:
    """Split a text into lines that end with LF or CRLF."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def counts(line: str) -> bool:
    """Return whether a line is neither empty nor a comment."""
    return bool(line.strip()) and not line.startswith("#")
