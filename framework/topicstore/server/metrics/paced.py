"""Values that are expensive to compute, and are cached in proportion to their cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CHEAP", "Paced"]

_SHARE = 0.001
"""Largest share of the time that computing one value may take, independent of the number of requests."""
CHEAP = 0.001
"""A value that takes fewer seconds than this is computed while a request waits."""

T = TypeVar("T")


class Paced(Generic[T]):
    """A cached value, which expires after a thousand times the duration of its computation.

    So a value that takes microseconds is always fresh, and a value that takes 10 ms is up to 10 seconds old. `value`
    computes the value only if that is cheap; otherwise the caller of `renew`, about once a second, does. Thread-safe.
    """

    def __init__(self, find_out: Callable[[], T]) -> None:
        self._find_out = find_out
        self._lock = threading.Lock()
        """Guards the following attributes."""
        self._value: tuple[T] | None = None
        self._took = self._found_out = self._due = 0.0

    def value(self) -> T:
        """Return the value, computed again if it is due and cheap. Raises what the function raises."""
        with self._lock:
            if self._value is None:
                return self._renewed_locked()
            return self._renewed_locked() if self._took < CHEAP and self._is_due() else self._value[0]

    def renew(self) -> None:
        """Compute the value again if it is due. Raises what the function raises."""
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
        """The age of the value in seconds."""
        return time.monotonic() - self._found_out if self._value is not None else 0.0
