"""The file of API tokens, with the scope of each.

Each line has one token, ``name scope sha256``. A token has 32 random bytes, so a fast hash is sufficient: guessing the
token is infeasible.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Literal

import attrs

from topicstore.contract.errors import InvalidArgumentError
from topicstore.server.replaced_file import ReplacedFile, Watched

__all__ = ["SCOPES", "Scope", "Token", "TokenFileError", "Tokens", "token_file"]

Scope = Literal["read", "write", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "write", "admin")
"""The scopes of tokens; each includes those before it. ``read``: read data. ``write``: publish, and change messages,
sessions and queues. ``admin``: change the server's settings and retention."""
_FILE = "http-tokens"
"""The file's name in the database's directory, unless the settings name another."""
_BYTES = 32
"""Number of random bytes of a token."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class TokenFileError(InvalidArgumentError):
    """The file of tokens can't be read or changed, or a token's name is invalid."""


@attrs.frozen
class Token:
    """A token of the file."""

    name: str
    scope: Scope
    digest: str
    """The SHA-256 of the token's text, in hexadecimal."""


def token_file(named: Path | None, directory: Path) -> Path:
    """Return the path of the token file: the one in the settings, by default a file in the database's directory."""
    return named if named is not None else directory / _FILE


class Tokens:
    """The tokens of a file, which is read again when it was replaced. Thread-safe."""

    def __init__(self, path: Path, cluster: str | None = None) -> None:
        """``cluster`` is the token of the other sites of a cluster, which forward requests; None without a cluster."""
        self.path = path
        self._cluster = None if cluster is None else _digest(cluster)
        self.own = secrets.token_urlsafe(_BYTES)
        """An admin token that is not in the file; commands on this machine read it by
        `topicstore.server.http.discovery`."""
        self._file = ReplacedFile(path, "tokens", TokenFileError)
        self._watched = Watched[list[Token]](self._file, self.read, missing=[])

    def read(self) -> list[Token]:
        """Return the file's tokens; none if there is no file. Raises `TokenFileError`."""
        try:
            return [self._token(number, line) for number, line in self._file.lines()]
        except TokenFileError as bad:
            if isinstance(bad.__cause__, FileNotFoundError):
                return []
            raise

    def reread(self) -> None:
        """Read the file again. Raises `TokenFileError`; then its last valid content stays in force."""
        self._watched.reread()

    def any(self) -> bool:
        """Return whether there is a token besides `own`. Raises `TokenFileError`."""
        return bool(self._watched.now())

    def add(self, name: str, scope: Scope) -> str:
        """Create a token, and the file if there is none. Return the token's text, which is not stored.

        Raises `TokenFileError`, also if there is a token of that name.
        """
        if _NAME.fullmatch(name) is None:
            raise TokenFileError(
                f"{name!r} is no token's name: it has 1 to 100 letters, digits and the characters '.', '_', '@' and "
                "'-', and begins with a letter or digit"
            )
        text = secrets.token_urlsafe(_BYTES)

        def change(lines: list[str]) -> list[str]:
            if any(token.name == name for token in self.read()):
                raise TokenFileError(f"{self.path} has a token {name!r}; revoke it first")
            return [*lines, f"{name} {scope} {_digest(text)}"]

        self._file.change(change, missing_ok=True)
        return text

    def revoke(self, name: str) -> None:
        """Remove a token. Raises `TokenFileError`, also if there is no such token."""

        def change(lines: list[str]) -> list[str]:
            if all(token.name != name for token in self.read()):
                raise TokenFileError(f"{self.path} has no token {name!r}")
            return [line for line in lines if line.split()[0] != name]

        self._file.change(change, missing_ok=False)

    def is_own(self, text: str) -> bool:
        """Return whether a text is the token `own`, which the server has made for its own commands."""
        return hmac.compare_digest(_digest(self.own), _digest(text))

    def is_of_cluster(self, text: str) -> bool:
        """Return whether a text is the token with which other sites of the cluster forward requests."""
        return self._cluster is not None and hmac.compare_digest(self._cluster, _digest(text))

    def scope_of(self, text: str) -> Scope | None:
        """Return the scope of a token; None if there is no such token.

        Raises `TokenFileError` if the file can't be read and was never valid; but not for `own`, which needs no file.
        """
        if self.is_own(text):
            return "admin"
        digest = _digest(text)
        scope: Scope | None = None
        for token in self._watched.now():  # compares all tokens, so that the time reveals nothing
            if hmac.compare_digest(token.digest, digest):
                scope = token.scope
        return scope

    def _token(self, number: int, line: str) -> Token:
        match line.split():
            case [name, ("read" | "write" | "admin") as scope, digest] if _DIGEST.fullmatch(digest):
                return Token(name, scope, digest)
        raise TokenFileError(f"{self.path}, line {number}: not a name, a scope and a hash")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
