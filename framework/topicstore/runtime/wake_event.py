"""Waking a thread, also from a signal handler that has interrupted another call to wake it."""

from __future__ import annotations

import threading

__all__ = ["Alarm"]


class Alarm:
    """Ends the wait of one thread, or its next wait if it isn't waiting.

    Unlike the methods of `threading.Event`, each of these is a single step: a signal handler that interrupts one of
    them can call any other without waiting for a lock that the interrupted call holds.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        """Held unless the alarm was rung since the last wait."""
        self._silent.acquire()

    def ring(self) -> None:
        """End the wait, or the next one."""
        try:
            self._silent.release()
        except RuntimeError:  # it was rung already
            return

    def wait(self, timeout: float | None) -> bool:
        """Return True once the alarm rings or if it rang since the last call, False after ``timeout`` seconds."""
        return self._silent.acquire(timeout=-1 if timeout is None else timeout)
