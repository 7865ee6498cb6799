"""Percent-encoding of arbitrary text as one segment of a URL's path."""

from __future__ import annotations

from urllib.parse import quote

__all__ = ["part"]


def part(text: str) -> str:
    """Return text, such as a client id, percent-encoded as one segment of a URL's path.

    The texts ``.`` and ``..`` are encoded as well, because HTTP clients would resolve them as relative path segments.
    """
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")
