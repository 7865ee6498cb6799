"""`CircuitBreaker`: makes requests to an unresponsive log store fail immediately instead of timing out.

`retry_unanswered` repeats requests while a site is opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from topicstore.contract.log_store import LogStoreRefusedError, StorageUnavailableError

__all__ = ["CircuitBreaker", "retry_unanswered"]

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""The shortest and the longest pause between two tries of `retry_unanswered`, in seconds."""


def retry_unanswered(call: Callable[[], T], timeout: float) -> T:
    """Return the result of ``call``, which is repeated for ``timeout`` seconds while the store gives no answer.

    After that time, raises the last `StorageUnavailableError`. Raises `LogStoreRefusedError` and all other errors
    immediately.
    """
    deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
    while True:
        try:
            return call()
        except LogStoreRefusedError:
            raise
        except StorageUnavailableError:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


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
        """Close the breaker: the store has answered a PUT, or the site takes the log over."""
        with self._lock:
            self._answered, self.reason = time.monotonic(), None
