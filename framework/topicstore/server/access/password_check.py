"""Checking passwords for many clients: in threads, and those that were right lately without hashing again."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from topicstore.server.replaced_file import Signature

from .passwords import PasswordFile

__all__ = ["BusyError", "PasswordCheck"]

_REMEMBERED = 10_000
_WAITING = 2_000
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))


class BusyError(Exception):
    """More passwords wait to be checked than are kept."""


class PasswordCheck:
    """The passwords of a file, which may be changed at any time. Called in the event loop.

    What is remembered of a password that was right is its hash under a key that only this process has ever had.
    """

    def __init__(self, file: PasswordFile) -> None:
        """Read the file. Raises `PasswordFileError`."""
        self._file = file
        self._signature: Signature = file.signature()
        self._users = file.read()
        self._key = os.urandom(32)
        self._right: OrderedDict[bytes, None] = OrderedDict()
        self._threads = ThreadPoolExecutor(_THREADS, "topicstore-passwords")
        self._waiting = 0

    async def matches(self, name: str, password: bytes) -> bool:
        """Return whether a user has a password. Raises `PasswordFileError` if the file is unusable, and `BusyError`."""
        signature = self._file.signature()  # microseconds; what is read of a changed file is read in a thread
        if signature == self._signature and self._mark(name, password) in self._right:
            self._right.move_to_end(self._mark(name, password))
            return True
        if self._waiting >= _WAITING:
            raise BusyError(f"{self._waiting:,} passwords wait to be checked")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            if signature != self._signature:
                users = await loop.run_in_executor(self._threads, self._file.read)
                self._users, self._signature = users, signature
                self._right.clear()
            stored = self._users.get(name)
            right = await loop.run_in_executor(self._threads, self._file.matches, stored, password)
        finally:
            self._waiting -= 1
        if right and self._users.get(name) == stored:
            self._right[self._mark(name, password)] = None
            if len(self._right) > _REMEMBERED:
                self._right.popitem(last=False)
        return right

    def _mark(self, name: str, password: bytes) -> bytes:
        text = name.encode()
        return hashlib.blake2b(len(text).to_bytes(4) + text + password, key=self._key, digest_size=32).digest()

    def end(self) -> None:
        """Cancel the checks that wait; the threads end when theirs are over."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the threads have ended, after `end`. May be called in any thread."""
        self._threads.shutdown(wait=True)

    def close(self) -> None:
        """`end`, then `join`."""
        self.end()
        self.join()
