"""The file of tokens, by which programs are let in, and what each may do.

A line a token, ``name scope sha256``. A token is random, 32 bytes, so a quick hash is enough: nobody can guess what
gave it.
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
"""What tokens may do, each also all before it: see what is there; publish, and change messages, sessions and queues;
change how the server runs and what is kept."""
_FILE = "http-tokens"
"""The file's name in the database's directory, unless the settings name another."""
_BYTES = 32
"""Random bytes of a token."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class TokenFileError(InvalidArgumentError):
    """The file of tokens can't be read or changed, or a name can't be used."""


@attrs.frozen
class Token:
    """A token that the file has."""

    name: str
    scope: Scope
    digest: str
    """The SHA-256 of its text, in hexadecimal digits."""


def token_file(named: Path | None, directory: Path) -> Path:
    """Return the path of the file: the one that the settings name, by default one in the database's directory."""
    return named if named is not None else directory / _FILE


class Tokens:
    """The tokens of a file, which is read again when it was replaced. May be used in any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own = secrets.token_urlsafe(_BYTES)
        """A token that no file has, which may do everything; `topicstore.server.http.discovery` tells commands here."""
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
        """Read the file again. Raises `TokenFileError`; the tokens that it had before then count on."""
        self._watched.reread()

    def any(self) -> bool:
        """Return whether there is a token besides `own`. Raises `TokenFileError`."""
        return bool(self._watched.now())

    def add(self, name: str, scope: Scope) -> str:
        """Make a token, and the file if there is none. Return the token's text, which nobody can find out later.

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
        """Return whether a text is the token `own`."""
        return hmac.compare_digest(_digest(self.own), _digest(text))

    def scope_of(self, text: str) -> Scope | None:
        """Return what whoever shows a token may do; None if there is no such token.

        Raises `TokenFileError` if the file can't be read, nor could be before, but not for the token `own`, which needs
        no file.
        """
        if self.is_own(text):
            return "admin"
        digest = _digest(text)
        scope: Scope | None = None
        for token in self._watched.now():  # all, so that the time tells nothing
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
