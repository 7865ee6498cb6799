"""A log store in a directory of one machine, or of a file system on which all machines see a new file immediately.

An object is a file, and the parts of its name are directories. The store writes a staged file, fsyncs it, links it to
the object's name, which the kernel refuses if the name is taken, and fsyncs the directory. So a named file is complete.
An object that a caller has seen survives a power failure: a process that lists a directory, or finds a name taken,
fsyncs the directory first. The process that made the link may not have fsynced it yet.

Network file systems that cache directory entries, such as NFS, don't satisfy `topicstore.contract.log_store`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from topicstore.contract.descriptors import lock_file
from topicstore.contract.errors import InvalidArgumentError
from topicstore.contract.log_store import (
    LogStore,
    LogStoreRefusedError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageUnavailableError,
    check_name,
)
from topicstore.contract.options import make_options

from topicstore_backends.files import sync

__all__ = ["DirectoryLogStore"]

_STAGING = ".drafts"
"""The directory of staged files, which are being written. No part of an object's name begins with a dot."""
_OWNER_ONLY = 0o700
_CHUNK = 1_000
"""The most names in a list that is yielded."""
_REFUSED = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)
)
"""The errors that last until permissions, mounts or the path are changed."""


class DirectoryLogStore(LogStore):
    """A log store of files below one directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._staging = root / _STAGING
        self._writes = False
        """Whether this object has made the directories, which the first `create` does: readers need no permission."""
        self._identity: tuple[int, int] | None = None
        """The `_identity` of the directory since it was first seen; None while there is none."""
        self._check_root()

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> DirectoryLogStore:
        """Return the store in a directory, which the first `create` makes if it doesn't exist."""
        make_options("file", cls.Options, options)
        parts = urlsplit(url)
        if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise InvalidArgumentError(f"a directory's URL is file:///path, with three slashes, not {url!r}")
        return cls(Path(unquote(parts.path)))

    @property
    def place(self) -> str:
        """The URL of the directory."""
        return self._root.as_uri()

    def create(self, name: str, data: bytes) -> None:
        """Create a file atomically, and fsync it. Raises `ObjectExistsError` if the name is taken."""
        path = self._root / check_name(name)
        self._check_root()
        try:
            if not self._writes:
                self._make(self._staging)
                self._check_root()
                _remove_abandoned(self._staging)
                self._writes = True
            taken = not self._link(path, data)
            sync(path.parent)
        except OSError as error:
            raise self._unavailable(path, error) from error
        self._check_root()
        if taken:
            raise ObjectExistsError(name, self.place)

    def get(self, name: str) -> bytes:
        """Return the content of a file. Raises `ObjectNotFoundError` if there is none."""
        path = self._root / check_name(name)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as absent:
            self._check_root()
            raise ObjectNotFoundError(name, self.place) from absent
        except OSError as error:
            raise self._unavailable(path, error) from error

    def names(self, prefix: str, after: str = "") -> Iterator[list[str]]:
        """Yield the names of the files below a directory, in order; fsync each directory before its names."""
        check_name(prefix)
        chunk: list[str] = []
        for name in self._below(prefix, after):
            chunk.append(name)
            if len(chunk) == _CHUNK:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def delete(self, name: str) -> None:
        """Remove a file, if it exists, and fsync its directory, which stays."""
        path = self._root / check_name(name)
        try:
            path.unlink()
            sync(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._unavailable(path, error) from error

    def _below(self, folder: str, after: str) -> Iterator[str]:
        path = self._root / folder
        try:
            sync(path)
            with os.scandir(path) as entries:
                found = [(entry.name, entry.is_dir()) for entry in entries if entry.name[0] != "."]
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            return
        except OSError as error:
            raise self._unavailable(path, error) from error
        # Names are ordered as whole paths, so a directory is sorted by its name with a slash.
        for name, is_folder in sorted((f"{name}/" if is_folder else name, is_folder) for name, is_folder in found):
            full = f"{folder}/{name}"
            if is_folder:
                if full > after or after.startswith(full):
                    yield from self._below(full[:-1], after)
            elif full > after:
                yield full

    def _link(self, path: Path, data: bytes) -> bool:
        """Write a staged file, and link it to the object's name; return whether the name was free."""
        while True:
            staged = self._staging / f"{os.getpid()}-{secrets.token_hex(8)}"
            descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                lock_file(descriptor, fcntl.LOCK_EX, staged)  # so that no other process takes the file for abandoned
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
                self._name(staged, path)
            except FileExistsError:
                return False
            except FileNotFoundError:
                if staged.exists():
                    raise
                continue  # another process removed the staged file before it was locked
            finally:
                staged.unlink(missing_ok=True)
                os.close(descriptor)
            return True

    def _name(self, staged: Path, path: Path) -> None:
        """Link a staged file to an object's name, in a directory that is made if necessary."""
        try:
            os.link(staged, path)
        except FileNotFoundError:
            self._check_root()
            self._make(path.parent)
            os.link(staged, path)

    def _make(self, folder: Path) -> None:
        """Create a directory and its missing parents, and fsync their entries."""
        missing = [folder, *folder.parents]
        if folder.is_dir():
            return
        for one in reversed(missing):
            if not one.is_dir():
                one.mkdir(_OWNER_ONLY, exist_ok=True)
            if one != one.parent and one.is_relative_to(self._root):
                sync(one.parent)  # also an existing directory: the process that made it may not have synced it yet

    def _check_root(self) -> None:
        """Raise `StorageUnavailableError` if the path leads to another directory than when it was first seen.

        Without its mount, or moved away, a store would look empty: readers would miss acknowledged writes, and
        objects would be created where the next mount hides them.
        """
        known = self._identity  # read before the directory is looked up: another thread may make it meanwhile
        try:
            found = _identity(self._root)
        except FileNotFoundError as error:
            if known is None:  # no process has made the directory yet
                return
            raise self._unavailable(self._root, error) from error
        except OSError as error:
            raise self._unavailable(self._root, error) from error
        if known is None:
            self._identity = found
        elif found != known:
            raise StorageUnavailableError(
                f"{self._root} is another directory than when it was opened; look at its mount, and start again if it "
                "is the right one"
            )

    def _unavailable(self, path: Path, error: OSError) -> StorageUnavailableError:
        kind = LogStoreRefusedError if error.errno in _REFUSED else StorageUnavailableError
        return kind(f"{path}: {error.strerror or error}; look at the disk and its permissions")


def _identity(directory: Path) -> tuple[int, int]:
    """Return the device and the inode of a directory, which no other one has at the same time."""
    found = directory.stat()
    return found.st_dev, found.st_ino


def _remove_abandoned(directory: Path) -> None:
    """Remove the staged files that no process has locked: their writers were killed."""
    for staged in directory.iterdir():
        with suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(staged, os.O_WRONLY | os.O_CLOEXEC)
            try:
                lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, staged)
                staged.unlink()
            finally:
                os.close(descriptor)
