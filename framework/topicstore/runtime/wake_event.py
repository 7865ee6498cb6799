"""`AutoResetEvent`: an event that wakes a thread, and that signal handlers may set at any time."""

from __future__ import annotations

import threading

__all__ = ["AutoResetEvent"]


class AutoResetEvent:
    """An auto-reset event for one waiting thread: it ends the thread's wait, or its next wait if it isn't waiting.

    Unlike those of `threading.Event`, its methods are atomic. A signal handler that interrupts a method can call any
    other one without waiting for a lock that the interrupted call holds.
    """

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()
        """Held unless `set` was called since the last wait."""
        self._silent.acquire()

    def set(self) -> None:
        """Wake the waiting thread, or end its next wait at once."""
        try:
            self._silent.release()
        except RuntimeError:  # already set
            return

    def wait(self, timeout: float | None) -> bool:
        """Wait until `set` is called or was called since the last wait; return False after ``timeout`` seconds."""
        return self._silent.acquire(timeout=-1 if timeout is None else timeout)
