"""`CircuitBreaker`: makes requests to an unresponsive log store fail immediately instead of timing out."""

from __future__ import annotations

import threading
import time

__all__ = ["CircuitBreaker"]


class CircuitBreaker:
    """A circuit breaker for the PUTs of one log, or of one site, to its log store. Thread-safe.

    It opens when a caller's wait for a PUT times out, and closes when the store answers a PUT. While it is open, the
    PUT that timed out is repeated, and the site's heartbeats are sent: they find out that the store answers again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = float("-inf")
        """The time (`time.monotonic`) of the last conclusive answer. Guarded by the lock."""
        self.reason: str | None = None
        """The error of the wait that timed out; None while the breaker is closed. Reading it needs no lock."""

    def trip(self, since: float, reason: str) -> None:
        """Open the breaker, unless the store has answered a PUT since a time (`time.monotonic`)."""
        with self._lock:
            if self._answered < since:
                self.reason = reason

    def reset(self) -> None:
        """Close the breaker: the store has answered a PUT, or the site begins a new epoch of the log."""
        with self._lock:
            self._answered, self.reason = time.monotonic(), None
