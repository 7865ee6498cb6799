"""Checking passwords for many clients: by turns in threads, and those that were right lately without hashing again."""

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
"""How many passwords of an address, and in all, wait to be checked. Behind a proxy all clients have one address."""
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))

Users = dict[str, str]


class PasswordCheck:
    """The passwords of a file, which may be changed at any time. Called in the event loop.

    What is remembered of a password that was right is its hash under a key that only this process has ever had.
    """

    def __init__(self, file: PasswordFile, failed: FailedLogins | None = None) -> None:
        """Read the file. Raises `PasswordFileError`. ``failed`` is what is remembered of wrong passwords."""
        self._file = file
        self._users = Watched(file, file.read)
        self._users.reread()
        self._key = os.urandom(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._right_of: Users | None = None
        """The users of whom `_right` remembers passwords."""
        self._failed = failed if failed is not None else FailedLogins()
        self._threads = FairThreads(_THREADS, "topicstore-passwords", paused=self._failed.pause, each=_EACH, most=_MOST)

    async def matches(self, name: str, password: bytes, address: str = "") -> bool:
        """Return whether a user has a password. ``address`` is of whoever asks: addresses have turns.

        A file that can't be read any more, or is damaged, is logged, and what it said before counts. Raises
        `PasswordFileError` if the file has gone, and `BusyError` if too many passwords of the address, or in all, wait
        to be checked.
        """
        mark = self._mark(name, password)
        if mark in self._right and self._right_of is self._users.unchanged():  # a look at the file takes microseconds
            self._right.move_to_end(mark)
            return True
        user = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()  # the name itself may have 64 kB
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
        """Return what the file says, and whether the password is right by it. Runs in a thread."""
        users = self._users.now()
        return users, self._file.matches(users.get(name), password)

    def reread(self) -> None:
        """Read the file if it was replaced. Raises `PasswordFileError`; then what it said before counts."""
        self._users.reread()

    def _mark(self, name: str, password: bytes) -> bytes:
        text = name.encode()
        return hashlib.blake2b(len(text).to_bytes(4) + text + password, key=self._key, digest_size=32).digest()

    def end(self) -> None:
        """Cancel the checks that wait; the threads end when theirs are over."""
        self._threads.end()

    def join(self) -> None:
        """Wait until the threads have ended, after `end`. May be called in any thread."""
        self._threads.join()

    def close(self) -> None:
        """`end`, then `join`."""
        self.end()
        self.join()
