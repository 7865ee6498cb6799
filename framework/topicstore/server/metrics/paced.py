"""Values that take long to find out, and so are found out rarely."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CHEAP", "Paced"]

_SHARE = 0.001
"""The most of the time that finding out one value takes, however often it is asked for."""
CHEAP = 0.001
"""Seconds that may be spent on one value while somebody waits for all of them."""

T = TypeVar("T")


class Paced(Generic[T]):
    """A value, found out by a function that is called again only after a thousand times as long as it took.

    So what takes microseconds is always fresh, and what takes 10 ms is up to 10 seconds old. Who asks waits for it only
    if it is cheap; otherwise it is found out by whoever calls `renew` about once a second. For any thread.
    """

    def __init__(self, find_out: Callable[[], T]) -> None:
        self._find_out = find_out
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._value: tuple[T] | None = None
        self._took = self._found_out = self._due = 0.0

    def value(self) -> T:
        """Return the value. Raises what the function raises."""
        with self._lock:
            if self._value is None:
                return self._renewed_locked()
            return self._renewed_locked() if self._took < CHEAP and self._is_due() else self._value[0]

    def renew(self) -> None:
        """Find the value out again if it is time. Raises what the function raises."""
        with self._lock:
            if self._is_due():
                self._renewed_locked()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def _renewed_locked(self) -> T:
        began = time.monotonic()
        value = self._find_out()
        self._value, self._found_out, self._took = (value,), began, time.monotonic() - began
        self._due = began + self._took / _SHARE
        return value

    @property
    def age(self) -> float:
        """How many seconds ago it was found out."""
        return time.monotonic() - self._found_out if self._value is not None else 0.0
