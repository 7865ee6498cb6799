"""Text from elsewhere as a part of a URL's path."""

from __future__ import annotations

from urllib.parse import quote

__all__ = ["part"]


def part(text: str) -> str:
    """Return text, such as a client id, as one part of a URL's path.

    Also ``.`` and ``..``, which clients of HTTP take for steps in the path if they aren't encoded.
    """
    return text.replace(".", "%2E") if text in (".", "..") else quote(text, safe="")
