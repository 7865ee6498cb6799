"""`Notifier`: a condition that wakes waiting threads and asyncio tasks, and calls registered functions.

A waiter checks its condition, waits, and checks again, all while it is registered. A `Notifier.notify` after a check
ends the wait that follows, so no event between check and wait is missed, with any number of waiters.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from topicstore.runtime.wake_event import AutoResetEvent

__all__ = ["CallWaiter", "Notifier", "TaskWaiter", "ThreadWaiter"]


class Notifier:
    """Wakes all its waiters. `notify` is thread-safe, and takes no lock that its callers hold."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[_Waiter] = []
        """Needs no lock: appending to, copying, and removing from a list are atomic."""

    def notify(self) -> None:
        """Wake all waiters. Without waiters, the cost is negligible."""
        if self.waiters:
            for waiter in list(self.waiters):
                waiter.wake()


class _Waiter(ABC):
    """A waiter, registered within a ``with`` block. Its waits together last at most ``timeout`` seconds."""

    __slots__ = ("_end", "_notifier")

    def __init__(self, notifier: Notifier, timeout: float | None) -> None:
        self._notifier = notifier
        self._end = None if timeout is None else time.monotonic() + timeout

    @abstractmethod
    def wake(self) -> None:
        """End the current wait, or the next one. Thread-safe."""

    def _left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def __enter__(self) -> Self:
        self._notifier.waiters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._notifier.waiters.remove(self)


class ThreadWaiter(_Waiter):
    """A thread that waits for a notifier."""

    __slots__ = ("_woken",)

    def __init__(self, notifier: Notifier, timeout: float | None) -> None:
        super().__init__(notifier, timeout)
        self._woken = AutoResetEvent()

    def wait(self) -> bool:
        """Wait for a notification, unless one came since the last call; return False if the time is over."""
        return self._woken.wait(self._left())  # a notification before the caller's check ends the next wait

    def wake(self) -> None:
        """End the current wait, or the next one."""
        self._woken.set()


class TaskWaiter(_Waiter):
    """An asyncio task that waits for a notifier without blocking its event loop."""

    __slots__ = ("_loop", "_waking", "_woken")

    def __init__(self, notifier: Notifier, timeout: float | None) -> None:
        super().__init__(notifier, timeout)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._waking = False
        """Whether the loop was asked to wake the task, and the task has not run since."""

    async def wait(self) -> bool:
        """Wait for a notification, unless one came since the last call; return False if the time is over."""
        if not self._woken.is_set():  # an earlier notification counts, even after the timeout
            try:
                await asyncio.wait_for(self._woken.wait(), self._left())
            except TimeoutError:
                return False
        self._woken.clear()
        self._waking = False  # reset before the caller's check, so that a later notification wakes the task again
        return True

    def wake(self) -> None:
        """End the current wait, or the next one."""
        if not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # the task's event loop was closed
                self._loop.call_soon_threadsafe(self._woken.set)


class CallWaiter(_Waiter):
    """A function that `Notifier.notify` calls in the notifying thread. It must return quickly and not raise."""

    __slots__ = ("_call",)

    def __init__(self, notifier: Notifier, call: Callable[[], object]) -> None:
        super().__init__(notifier, None)
        self._call = call

    def wake(self) -> None:
        """Call the function."""
        self._call()
