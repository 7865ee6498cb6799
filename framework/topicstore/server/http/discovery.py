"""Discovery of the server that has a database open, by a file in the database's directory.

A running server keeps the file ``server.json`` in that directory: its process id and, if it serves HTTP, its URL and an
admin token that is valid for this run. Only the file's owner, who can read the messages on disk too, can read it. The
server holds a lock (flock) on the file, which the system releases when the process ends: an unlocked file was left by a
killed server, and is ignored. A file that names another directory is ignored, too: a copy made of hard links shares the
file of the original database.
"""

from __future__ import annotations

import fcntl
import os
import ssl
from pathlib import Path

import attrs
import msgspec

from topicstore.contract.descriptors import lock_file
from topicstore.contract.errors import DatabaseLockedError
from topicstore.database import Database
from topicstore.runtime.closing import Closer
from topicstore.storage.directory.files import open_own

__all__ = ["Announcement", "FoundServer", "find_server"]

_FILE = "server.json"
_TEMPORARY = f"{_FILE}.new"


@attrs.frozen(kw_only=True)
class FoundServer:
    """A running server, with the data that a command on the same machine needs to connect."""

    pid: int
    """The server's process id."""
    url: str | None = None
    """The base URL of the HTTP interface, without a trailing slash, such as ``http://127.0.0.1:18083``; None if the
    server doesn't serve HTTP."""
    token: str = attrs.field(default="", repr=False)
    """A token of the scope ``admin``, valid while the server runs; empty if the server doesn't serve HTTP."""
    certificate: str | None = None
    """With ``https``, the server's certificate in PEM; else None."""
    directory: tuple[int, int] | None = None
    """The device and the inode of the database's directory; set by `Announcement`."""

    def trust(self) -> ssl.SSLContext | bool:
        """Return the argument ``verify`` for ``httpx``: with TLS, a context that trusts only the server's certificate.

        The certificate has the host name for other machines, so the name isn't checked.
        """
        if self.certificate is None:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=self.certificate)
        return context


def find_server(directory: Path) -> FoundServer | None:
    """Return the server that has the database in ``directory`` open; None if there is none.

    Raises `OSError`, such as `PermissionError` if the server belongs to another user, and `DatabaseLockedError` if the
    server's file can't be decoded. Also raises the errors of `topicstore.storage.directory.files.open_own`.
    """
    try:
        file = open_own(directory / _FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(file, "rb") as opened:
        try:
            lock_file(opened.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB, directory / _FILE)
        except BlockingIOError:
            found = _decoded(directory / _FILE, opened.read())
            return found if found.directory == _identity(directory) else None
        left = _is(directory / _FILE, opened.fileno())
    return None if left else find_server(directory)  # a running server has just replaced the file


def _is(path: Path, file: int) -> bool:
    """Return whether an open file is still the file at a path."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _decoded(path: Path, content: bytes) -> FoundServer:
    try:
        return msgspec.json.decode(content, type=FoundServer)
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise DatabaseLockedError(
            f"a server has the database open, and {path} doesn't say where it is, or is of another version: {bad}"
        ) from bad


def _identity(directory: Path) -> tuple[int, int]:
    found = directory.stat()
    return found.st_dev, found.st_ino


class Announcement:
    """The discovery file of one server, which exists from construction until `withdraw`. Raises `OSError`."""

    def __init__(self, directory: Path, server: FoundServer) -> None:
        self._directory = directory
        self._file = self._written(server)

    @classmethod
    def of(cls, db: Database, server: FoundServer) -> Announcement | None:
        """Announce a database's server; None for a database in memory or opened read-only."""
        if "persistent" not in db.storage.capabilities or db.read_only:
            return None
        return cls(db.path, server)

    def replace(self, server: FoundServer) -> None:
        """Replace the file, such as after a change of the certificate."""
        before, self._file = self._file, self._written(server)
        os.close(before)

    def withdraw(self) -> None:
        """Remove the file, unless another server of the same program has replaced it. Idempotent."""
        file, self._file = self._file, -1
        if file < 0:
            return
        path = self._directory / _FILE
        try:
            if _is(path, file):
                path.unlink(missing_ok=True)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child's copy of the descriptor would keep the lock
            os.close(file)

    def _written(self, server: FoundServer) -> int:
        """Write and lock a new file, and replace the old one; return the descriptor, which holds the lock."""
        server = attrs.evolve(server, directory=_identity(self._directory))
        path, draft = self._directory / _FILE, self._directory / _TEMPORARY
        try:
            draft.unlink(missing_ok=True)  # left by a server that was killed while writing
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with Closer() as closer:
                closer.add(lambda: os.close(file))
                closer.add(lambda: draft.unlink(missing_ok=True))
                lock_file(file, fcntl.LOCK_EX, draft)
                with os.fdopen(file, "wb", closefd=False) as out:  # a buffered file, which writes everything or raises
                    out.write(msgspec.json.format(msgspec.json.encode(server), indent=2) + b"\n")
                draft.replace(path)
                return file
        except OSError as bad:
            why = f"the file by which commands find this server can't be written: {bad.strerror}"
            raise OSError(bad.errno, why, str(path)) from bad
