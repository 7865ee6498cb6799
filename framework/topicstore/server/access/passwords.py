"""The file of users and password hashes, the checks of passwords, and pauses after failed logins, against guessing.

Each line has one user, ``name:hash``, with an argon2id hash (RFC 9106) in the PHC string format, which includes the
parameters. Empty lines and lines that begin with ``#`` are ignored. The file is replaced atomically.

Passwords of many clients are checked in threads by turns, with a cache of recent correct passwords.

An address with many failures has to pause, longer after each one. An address with a recent failure also has to pause if
the user has many failures. From an address without failures a user can always log in without a pause, even while other
addresses guess the user's password. Failures decay with time, and a correct password clears them.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import argon2

from topicstore.contract.errors import InvalidArgumentError
from topicstore.server.replaced_file import ReplacedFile, Signature, Watched

from .threads import FairThreads

__all__ = ["FailedLogins", "PasswordCheck", "PasswordFile", "PasswordFileError"]

_LONGEST_PASSWORD = 65_535
"""Most bytes of a password in MQTT (MQTT 5, section 1.5.6)."""
_FREE = 10
"""Number of failures that cause no pause."""
_FIRST, _LONGEST = 0.05, 1.0
"""Seconds of the first and of the longest pause; each pause is twice the previous one. Other users may share the
address, so no pause is long."""
_HALVED = 60.0
"""The half-life of the number of failures, in seconds."""
_KEPT = 10_000
"""Most addresses, and most users, whose failures are stored; the one with the oldest last failure is evicted."""


class PasswordFileError(InvalidArgumentError):
    """The file of users can't be read or changed, or a name or password can't be used."""


class PasswordFile:
    """The file of users. All methods use the disk or compute for tens of milliseconds: call them in a thread."""

    def __init__(self, path: Path, hasher: argon2.PasswordHasher | None = None) -> None:
        self.path = path
        self._file = ReplacedFile(path, "users", PasswordFileError)
        self._hasher = hasher if hasher is not None else argon2.PasswordHasher()
        self._nobody: str | None = None

    def signature(self) -> Signature:
        """Return values that differ after any change of the file. Raises `PasswordFileError`."""
        return self._file.signature()

    def read(self) -> dict[str, str]:
        """Return the hashes by user name. Raises `PasswordFileError`, with the number of an invalid line."""
        users: dict[str, str] = {}
        for number, line in self._file.lines():
            name, colon, stored = line.rpartition(":")
            if not name or not colon or not _is_hash(stored):
                raise PasswordFileError(f"{self.path}, line {number}: not a user name, a colon and an argon2 hash")
            if name in users:
                raise PasswordFileError(f"{self.path}, line {number}: the user {name!r} is there already")
            users[name] = stored.strip()
        return users

    def names(self) -> list[str]:
        """Return the users' names, sorted. Raises `PasswordFileError`."""
        return sorted(self.read())

    def matches(self, stored: str | None, password: bytes) -> bool:
        """Return whether a password matches a stored hash.

        If ``stored`` is None, for an unknown user, the call takes as long as for others, and returns False.
        """
        if stored is None:
            if self._nobody is None:
                self._nobody = self._hasher.hash(os.urandom(16))
            stored, real = self._nobody, False
        else:
            real = True
        try:
            return self._hasher.verify(stored, password) and real
        except argon2.exceptions.VerifyMismatchError:
            return False
        except (argon2.exceptions.VerificationError, argon2.exceptions.InvalidHashError) as bad:
            raise PasswordFileError(f"{self.path}: a hash can't be verified: {bad}") from bad

    def put(self, name: str, password: bytes) -> bool:
        """Set a user's password; create the file if there is none. Return whether the user is new.

        Raises `PasswordFileError`.
        """
        _check_name(name)
        if not 1 <= len(password) <= _LONGEST_PASSWORD:
            raise PasswordFileError(f"a password has 1 to {_LONGEST_PASSWORD:,} bytes, not {len(password):,}")
        stored = self._hasher.hash(password)
        found: list[bool] = []

        def change(lines: list[str]) -> list[str]:
            self._check(lines)
            kept = [line for line in lines if not _is_of(line, name)]
            found.append(len(kept) < len(lines))
            return [*kept, f"{name}:{stored}"]

        self._file.change(change, missing_ok=True)
        return not found[0]

    def remove(self, name: str) -> None:
        """Remove a user. Raises `PasswordFileError`, also if there is no such user."""

        def change(lines: list[str]) -> list[str]:
            self._check(lines)
            kept = [line for line in lines if not _is_of(line, name)]
            if len(kept) == len(lines):
                raise PasswordFileError(f"{self.path} has no user {name!r}")
            return kept

        self._file.change(change, missing_ok=False)

    def _check(self, lines: list[str]) -> None:
        """Raise `PasswordFileError` if the existing file is not a file of users."""
        if lines:
            self.read()


def _check_name(name: str) -> None:
    if not name or name.startswith("#") or name != name.strip() or not name.isprintable():
        raise PasswordFileError(
            f"{name!r} is no user name: it has at least one character, only printable ones, none of them a blank at "
            "its beginning or end, and doesn't begin with '#'"
        )


def _is_of(line: str, name: str) -> bool:
    return not line.startswith("#") and line.rpartition(":")[0] == name


def _is_hash(text: str) -> bool:
    try:
        argon2.extract_parameters(text.strip())
    except argon2.exceptions.InvalidHashError:
        return False
    return True


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
        """Return whether a user's password is correct. Checks are made in threads, which serve addresses by turns.

        A file that can't be read or is invalid is logged, and its last valid content stays in force. Raises
        `PasswordFileError` if the file doesn't exist, and `BusyError` if too many checks of the address, or in total,
        wait.
        """
        mark = self._mark(name, password)
        if mark in self._right and self._right_of is self._users.unchanged():  # checking the file takes microseconds
            self._right.move_to_end(mark)
            return True
        user = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()  # bounded: a name can have 64 KiB
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
        """Read the file again. If it is invalid, raise `PasswordFileError`; its last valid content stays in force."""
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


class _Failures:
    """The numbers of failures by key, for a bounded number of short keys."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """The decayed number of failures at the time of the last failure, and that time."""

    def count(self, key: str) -> float:
        """Return the decayed number of failures."""
        number, last = self._found.get(key, (0.0, 0.0))
        return number * math.exp2((last - self._now()) / _HALVED) if number else 0.0

    def pause(self, key: str) -> float:
        """Return the remaining seconds of the pause after the last failure; 0 or less: none."""
        number, last = self._found.get(key, (0.0, 0.0))
        if number <= _FREE:
            return 0.0
        return last + min(_LONGEST, _FIRST * math.exp2(min(number - _FREE - 1, 64))) - self._now()

    def add(self, key: str) -> None:
        number = self.count(key) + 1
        self._found[key] = number, self._now()
        self._found.move_to_end(key)
        if len(self._found) > _KEPT:
            self._found.popitem(last=False)

    def forget(self, key: str) -> None:
        self._found.pop(key, None)


class FailedLogins:
    """The failed logins by address and user. Not thread-safe. Users are identified by strings of bounded size."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """``now`` returns a monotonic time in seconds."""
        self._addresses, self._users = _Failures(now), _Failures(now)

    def pause(self, address: str, user: str) -> float:
        """Return the seconds for which an address may not check a user's password; 0 or less: none."""
        if self._addresses.count(address) < 0.5:
            return 0.0
        return max(self._addresses.pause(address), self._users.pause(user))

    def note(self, address: str, user: str, *, right: bool) -> None:
        """Record whether a password was correct."""
        for failures, key in ((self._addresses, address), (self._users, user)):
            if right:
                failures.forget(key)
            else:
                failures.add(key)
