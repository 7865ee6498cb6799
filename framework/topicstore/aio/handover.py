"""`Handover`: keeps a result that a thread fetched for a cancelled task, and returns it to the next task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from .threads import Threads

__all__ = ["Handover"]

R = TypeVar("R")


class Handover(Generic[R]):
    """Fetches results from one source in threads, for one task at a time, without losing any on cancellation."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()
        """Held by the task that fetches. Guards the attributes below."""
        self._taking: Future[R] | None = None
        """The result that is being fetched, or that was fetched for a cancelled task."""

    async def take(self, take: Callable[[], R]) -> R:
        """Return the result of ``take``, called in a thread, or an earlier result whose task was cancelled."""
        async with self._turn:
            return await self._take_locked(take)

    async def discard(self, then: Callable[[], None]) -> None:
        """Discard the result kept for a cancelled task, if any; then call ``then`` in a thread."""
        async with self._turn:
            if self._taking is not None:
                await self._threads.finished(self._taking)
                self._taking = None
            await self._threads.run(then)

    async def _take_locked(self, take: Callable[[], R]) -> R:
        if self._taking is None:
            self._taking = self._threads.submit(take)
        await self._threads.finished(self._taking)  # on cancellation, the result stays for the next task
        taken, self._taking = self._taking, None
        return taken.result()
