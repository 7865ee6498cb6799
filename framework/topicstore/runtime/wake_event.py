"""`AutoResetEvent` and `Latch`: events that signal handlers may set at any time."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["AutoResetEvent", "Latch"]


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
        """Wake the waiting thread, or end its next wait immediately."""
        try:
            self._silent.release()
        except RuntimeError:  # the event is set already
            return

    def wait(self, timeout: float | None) -> bool:
        """Wait until `set` is called or was called since the last wait; return False after ``timeout`` seconds."""
        return self._silent.acquire(timeout=-1 if timeout is None else timeout)


class Latch:
    """An event that stays set. Any number of threads may wait for it.

    An interrupted `threading.Event.set` may leave the event's lock held, so that the next call waits for ever. Here
    each step of `set` is atomic, and the next call completes an interrupted one.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._unset = threading.Lock()
        """A lock that is held until `set` is called. Each waiting thread then acquires and releases it in turn."""
        self._unset.acquire()

    def is_set(self) -> bool:
        """Return whether `set` was called."""
        return self._is_set

    def set(self) -> None:
        """Wake all waiting threads. Later calls of `wait` return immediately."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # the latch is set already
            self._unset.release()

    def wait(self, timeout: float) -> bool:
        """Wait until `set` is called; return False after ``timeout`` seconds."""
        if not self._is_set and self._unset.acquire(timeout=timeout):
            self.set()  # lets the next thread pass
        return self._is_set
