"""`Silence`: whether a log store is silent, so that one caller after the other doesn't wait for it in vain.

`patiently` repeats what has no answer, while a site is opened.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from topicstore.contract.log_store import LogStoreRefusedError, StorageUnavailableError

__all__ = ["Silence", "patiently"]

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""The least and the most seconds between two tries of `patiently`."""


def patiently(call: Callable[[], T], timeout: float) -> T:
    """Return the result of ``call``, which is repeated for ``timeout`` seconds while the store gives no answer.

    Raises the last `StorageUnavailableError` then; `LogStoreRefusedError` and all other errors at once.
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


class Silence:
    """The silence of a log store towards the PUTs of one log, or of a site. Thread-safe.

    It begins when a wait was in vain, and ends with the next answer to a PUT. The PUT for which the caller has waited
    is repeated meanwhile, and a site sends its heartbeats.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = float("-inf")
        """The time (`time.monotonic`) of the last conclusive answer. Guarded by the lock."""
        self.reason: str | None = None
        """The reason of the wait in vain; None while the store is not silent. Reading it needs no lock."""

    def begin(self, since: float, reason: str) -> None:
        """Begin the silence, unless the store has answered since a time (`time.monotonic`)."""
        with self._lock:
            if self._answered < since:
                self.reason = reason

    def end(self) -> None:
        """End the silence, because the store has answered a PUT, or the silence concerns no log any more."""
        with self._lock:
            self._answered, self.reason = time.monotonic(), None
