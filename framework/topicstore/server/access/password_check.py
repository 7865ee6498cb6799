"""Password checks for many clients, in threads by turns, with a cache of recent correct passwords."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from functools import partial

from topicstore.server.replaced_file import Watched

from .failed_logins import FailedLogins
from .fair_threads import FairThreads
from .passwords import PasswordFile

__all__ = ["PasswordCheck"]

_REMEMBERED = 10_000
_EACH, _MOST = 500, 2_000
"""Most waiting checks of an address, and in total. Behind a proxy all clients have the same address."""
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))

Users = dict[str, str]


class PasswordCheck:
    """Checks passwords against a file, which may be replaced at any time. Used in the event loop.

    The cache stores a correct password only as a keyed hash, whose random key exists only in this process.
    """

    def __init__(self, file: PasswordFile, failed: FailedLogins | None = None) -> None:
        """Read the file. Raises `PasswordFileError`. ``failed`` has the failed logins; by default none."""
        self._file = file
        self._users = Watched(file, file.read)
        self._users.reread()
        self._key = os.urandom(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._right_of: Users | None = None
        """The file's content for which `_right` is valid."""
        self._failed = failed if failed is not None else FailedLogins()
        self._threads = FairThreads(_THREADS, "topicstore-passwords", paused=self._failed.pause, each=_EACH, most=_MOST)

    async def matches(self, name: str, password: bytes, address: str = "") -> bool:
        """Return whether a user's password is correct. Addresses of clients have turns.

        If the file can't be read or is invalid, that is logged, and its last valid content stays in force. Raises
        `PasswordFileError` if the file doesn't exist, and `BusyError` if too many checks of the address, or in total,
        wait.
        """
        mark = self._mark(name, password)
        if mark in self._right and self._right_of is self._users.unchanged():  # checking the file takes microseconds
            self._right.move_to_end(mark)
            return True
        user = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()  # a name can have 64 KiB
        users, right = await self._threads.run(address, user, partial(self._check, name, password))
        self._failed.note(address, user, right=right)
        if right and users is self._users.last:
            if self._right_of is not users:
                self._right.clear()
                self._right_of = users
            self._right[mark] = None
            if len(self._right) > _REMEMBERED:
                self._right.popitem(last=False)
        return right

    def _check(self, name: str, password: bytes) -> tuple[Users, bool]:
        """Return the file's users, and whether the password is correct. Runs in a thread."""
        users = self._users.now()
        return users, self._file.matches(users.get(name), password)

    def reread(self) -> None:
        """Read the file again. Raises `PasswordFileError`; then its last valid content stays in force."""
        self._users.reread()

    def _mark(self, name: str, password: bytes) -> bytes:
        text = name.encode()
        return hashlib.blake2b(len(text).to_bytes(4) + text + password, key=self._key, digest_size=32).digest()

    def end(self) -> None:
        """Cancel waiting checks; the threads end after their current checks."""
        self._threads.end()

    def join(self) -> None:
        """Wait until the threads have ended, after `end`. May be called in any thread."""
        self._threads.join()

    def close(self) -> None:
        """Call `end`, then `join`."""
        self.end()
        self.join()
