"""The file of users and password hashes.

Each line has one user, ``name:hash``, with an argon2id hash (RFC 9106) in the PHC string format, which includes the
parameters. Empty lines and lines that begin with ``#`` are ignored. The file is replaced atomically.
"""

from __future__ import annotations

import os
from pathlib import Path

import argon2

from topicstore.contract.errors import InvalidArgumentError
from topicstore.server.replaced_file import ReplacedFile, Signature

__all__ = ["PasswordFile", "PasswordFileError"]

_LONGEST_PASSWORD = 65_535
"""Most bytes of a password in MQTT (MQTT 5, section 1.5.6)."""


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
        """Return whether a password matches a hash. For an unknown user (None), return False after the same time."""
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
