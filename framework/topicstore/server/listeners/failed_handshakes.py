"""Logging of failed TLS handshakes, which asyncio itself doesn't log."""

from __future__ import annotations

import logging
import time

__all__ = ["FailedHandshakes"]

_SECONDS, _LINES = 10.0, 10
"""The limit of log lines in a period of seconds; the first line after the period reports the number of omitted ones."""

_log = logging.getLogger("topicstore.server.connections")


class FailedHandshakes:
    """Logs failed handshakes of one listener, at a limited rate."""

    __slots__ = ("_began", "_listener", "_omitted", "_written")

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._began = float("-inf")
        self._written = self._omitted = 0

    def note(self, address: str, reason: str) -> None:
        """Log a failed handshake, unless the rate limit is exceeded."""
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
