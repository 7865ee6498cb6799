"""Splitting a JSON text into its objects, which follow each other or are the elements of an array."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import cast

from topicstore import ImportSourceError
from topicstore.files.text import without_mark

__all__ = ["split_objects"]

_OUTSIDE = re.compile(rb'(?:[^"{}\[\]]|"(?:[^"\\]|\\.)*+")*+(["{}\[\]]?)', re.DOTALL)
"""Matches the text up to the next bracket, or to the opening quote of an unfinished string; matches any text."""
_IN_STRING = re.compile(rb'(?:[^"\\]|\\.)*+("?)', re.DOTALL)


def split_objects(pieces: Iterator[bytes], longest: int) -> Iterator[bytes]:
    """Yield each object of a text that comes in pieces, together with the text between it and the previous object.

    Empty pieces are passed on. The contents of objects are not checked. Raises `ImportSourceError` for values that
    aren't objects, and for an object longer than ``longest`` bytes.
    """
    splitter = _Splitter()
    for piece in pieces:
        if piece:
            yield from splitter.objects(piece)
            if len(splitter.text) > longest:
                raise ImportSourceError(f"an object is longer than {longest:,} bytes")
        else:
            yield piece
    splitter.end()


class _Splitter:
    def __init__(self) -> None:
        self.text = bytearray()
        """The text after the last object."""
        self._at = 0
        """The offset in ``text`` at which scanning continues."""
        self._string = False
        self._depth = 0
        """The nesting depth within the current object; 0 outside of objects."""
        self._listed = False
        """Whether the array around the objects is open."""
        self._before: bytes | None = None
        """The separator that is required before the next object; None at the beginning."""

    def objects(self, piece: bytes) -> Iterator[bytes]:
        self.text += piece
        while self._at < len(self.text):
            found = cast("re.Match[bytes]", (_IN_STRING if self._string else _OUTSIDE).match(self.text, self._at))
            self._at, mark = found.end(), found[1]
            if not mark:
                break
            if mark == b'"':
                self._string = not self._string
            elif not self._depth:
                self._between(mark)
            else:
                self._depth += 1 if mark in b"{[" else -1
                if not self._depth:
                    self._before = b"," if self._listed else b""
                    yield self._taken()

    def _between(self, mark: bytes) -> None:
        """Process a bracket outside of objects. Raises `ImportSourceError` if it isn't allowed there."""
        before = without_mark(bytes(self.text[: self._at - 1])).strip()
        if mark == b"{" and before == (self._before or b""):
            self._depth = 1
        elif mark == b"[" and before == b"" and self._before is None:
            self._listed, self._before = True, b"["
        elif mark == b"]" and self._listed and before in (b"[", b""):
            self._listed, self._before = False, b"]"  # after the array, no object is allowed
            self._taken()
        else:
            raise ImportSourceError(self._error_text())

    def _taken(self) -> bytes:
        taken = bytes(self.text[: self._at])
        del self.text[: self._at]
        self._at = 0
        return taken

    def end(self) -> None:
        if self._depth or self._listed:
            raise ImportSourceError(f"the {'object' if self._depth else 'array'} is not complete")
        if self.text.strip():
            raise ImportSourceError(self._error_text())

    def _error_text(self) -> str:
        shown = bytes(self.text.strip()[:80]).decode(errors="replace")
        return f"{shown!r} is not a JSON object, or an array of such"
