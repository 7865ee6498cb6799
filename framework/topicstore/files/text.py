"""Text in UTF-8, without the byte order mark that some editors and shells put at its beginning."""

from __future__ import annotations

import codecs
from pathlib import Path

__all__ = ["decoded", "read_text", "without_mark"]

_OTHERS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


def without_mark(data: bytes) -> bytes:
    """Return bytes without a leading UTF-8 byte order mark."""
    return data.removeprefix(codecs.BOM_UTF8)


def decoded(data: bytes) -> str:
    """Decode UTF-8, without a byte order mark.

    Raises UnicodeError, whose message names UTF-16 if the bytes begin with its byte order mark.
    """
    for mark, name in _OTHERS.items():
        if data.startswith(mark):
            raise UnicodeError(f"it begins with the byte order mark of {name}; UTF-8 is expected")
    return without_mark(data).decode()


def read_text(path: Path) -> str:
    """Read a file, and decode it as `decoded` does. Raises OSError and UnicodeError."""
    return decoded(path.read_bytes())
