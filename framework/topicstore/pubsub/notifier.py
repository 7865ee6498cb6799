"""`Bell`: a condition that wakes waiting threads and asyncio tasks, and calls registered functions.

A listener checks its condition, waits, and checks again, all while it is registered. A `Bell.ring` after a check ends
the wait that follows, so no event between check and wait is missed, with any number of listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from topicstore.runtime.wake_event import AutoResetEvent

__all__ = ["Bell", "ListeningCall", "ListeningTask", "ListeningThread"]


class Bell:
    """Wakes all its listeners. `ring` is thread-safe, and takes no lock that its callers hold."""

    __slots__ = ("listening",)

    def __init__(self) -> None:
        self.listening: list[_Listening] = []
        """Needs no lock: appending to, copying, and removing from a list are atomic."""

    def ring(self) -> None:
        """Wake all listeners. Without listeners, the cost is negligible."""
        if self.listening:
            for waiter in list(self.listening):
                waiter.wake()


class _Listening(ABC):
    """A listener of a bell, registered within a ``with`` block. Its waits together last at most ``timeout`` seconds."""

    __slots__ = ("_bell", "_end")

    def __init__(self, bell: Bell, timeout: float | None) -> None:
        self._bell = bell
        self._end = None if timeout is None else time.monotonic() + timeout

    @abstractmethod
    def wake(self) -> None:
        """End the current wait, or the next one. Thread-safe."""

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def __enter__(self) -> Self:
        self._bell.listening.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._bell.listening.remove(self)


class ListeningThread(_Listening):
    """A thread that waits for a bell."""

    __slots__ = ("_woken",)

    def __init__(self, bell: Bell, timeout: float | None) -> None:
        super().__init__(bell, timeout)
        self._woken = AutoResetEvent()

    def wait(self) -> bool:
        """Wait until the bell rings, unless it rang since the last call; return False if the time is over."""
        return self._woken.wait(self._left())  # a ring after this, before the caller's check, ends the next wait

    def wake(self) -> None:
        """End the current wait, or the next one."""
        self._woken.set()


class ListeningTask(_Listening):
    """An asyncio task that waits for a bell without blocking its event loop."""

    __slots__ = ("_loop", "_told", "_woken")

    def __init__(self, bell: Bell, timeout: float | None) -> None:
        super().__init__(bell, timeout)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._told = False
        """Whether the loop was asked to wake the task, and the task has not run since."""

    async def wait(self) -> bool:
        """Wait until the bell rings, unless it rang since the last call; return False if the time is over."""
        if not self._woken.is_set():  # a ring before this counts, even if the time is over
            try:
                await asyncio.wait_for(self._woken.wait(), self._left())
            except TimeoutError:
                return False
        self._woken.clear()
        self._told = False  # before the caller's check, so that a later ring wakes the task again
        return True

    def wake(self) -> None:
        """End the current wait, or the next one."""
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # its loop was closed
                self._loop.call_soon_threadsafe(self._woken.set)


class ListeningCall(_Listening):
    """A function that every `Bell.ring` calls in its own thread. The function must return quickly and not raise."""

    __slots__ = ("_call",)

    def __init__(self, bell: Bell, call: Callable[[], object]) -> None:
        super().__init__(bell, None)
        self._call = call

    def wake(self) -> None:
        """Call the function."""
        self._call()
