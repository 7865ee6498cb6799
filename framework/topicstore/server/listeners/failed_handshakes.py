"""The lines in the log of TLS handshakes that fail. asyncio says nothing of them by itself."""

from __future__ import annotations

import logging
import time

__all__ = ["FailedHandshakes"]

_SECONDS, _LINES = 10.0, 10
"""So many lines of failures are written in so many seconds; the first line after them says how many were left out."""

_log = logging.getLogger("topicstore.server.connections")


class FailedHandshakes:
    """Logs the handshakes of one listener that fail, a bounded number of them."""

    __slots__ = ("_began", "_listener", "_omitted", "_written")

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._began = float("-inf")
        self._written = self._omitted = 0

    def note(self, address: str, reason: str) -> None:
        """Write the line of a handshake that has failed, unless there were many of late."""
        now = time.monotonic()
        if now - self._began >= _SECONDS:
            self._began, self._written = now, 0
        if self._written >= _LINES:
            self._omitted += 1
            return
        self._written += 1
        fields: dict[str, object] = {"listener": self._listener, "address": address, "reason": reason}
        if self._omitted:
            fields["omitted"], self._omitted = self._omitted, 0
        _log.warning("TLS handshake failed", extra={"fields": fields})
