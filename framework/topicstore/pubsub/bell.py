"""`Bell`: wakes threads and asyncio tasks that wait until something has happened.

Who waits looks first, then waits, then looks again, all while it listens. A ring that comes after a look ends the
wait that follows it, so nothing that happens in between is missed, however many listen to the same bell.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Bell", "ListeningTask", "ListeningThread"]


class Bell:
    """Rings for all who listen. `ring` may be called from any thread, and takes no lock of its caller's."""

    __slots__ = ("listening",)

    def __init__(self) -> None:
        self.listening: list[_Listening] = []
        """Needs no lock: a list is appended to, copied and removed from in one step."""

    def ring(self) -> None:
        """Wake all who wait. Costs next to nothing if nobody listens."""
        if self.listening:
            for waiter in list(self.listening):
                waiter.wake()


class _Listening(ABC):
    """Listens to a bell within a ``with`` block, and waits for ``timeout`` seconds in all; None: for ever."""

    __slots__ = ("_bell", "_end")

    def __init__(self, bell: Bell, timeout: float | None) -> None:
        self._bell = bell
        self._end = None if timeout is None else time.monotonic() + timeout

    @abstractmethod
    def wake(self) -> None:
        """End the wait, or the next one. May be called from any thread."""

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
        self._woken = threading.Event()

    def wait(self) -> bool:
        """Return True when the bell rings, or did since the last call, and False when the time is over."""
        rang = self._woken.wait(self._left())
        self._woken.clear()  # before the caller looks: what happens from here on wakes it again
        return rang

    def wake(self) -> None:
        """End the wait, or the next one."""
        if not self._woken.is_set():
            self._woken.set()


class ListeningTask(_Listening):
    """An asyncio task that waits for a bell, while its event loop goes on."""

    __slots__ = ("_loop", "_told", "_woken")

    def __init__(self, bell: Bell, timeout: float | None) -> None:
        super().__init__(bell, timeout)
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._told = False
        """The loop was told to wake the task, and the task has not looked since."""

    async def wait(self) -> bool:
        """Return True when the bell rings, or did since the last call, and False when the time is over."""
        if not self._woken.is_set():  # else it rang, though the time may be over
            try:
                await asyncio.wait_for(self._woken.wait(), self._left())
            except TimeoutError:
                return False
        self._woken.clear()
        self._told = False  # before the caller looks: what happens from here on wakes it again
        return True

    def wake(self) -> None:
        """End the wait, or the next one."""
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # its loop was closed
                self._loop.call_soon_threadsafe(self._woken.set)
