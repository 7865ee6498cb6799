"""`Handover`: a result that a thread took for a task that was cancelled meanwhile is kept for the next task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from .threads import Threads

__all__ = ["Handover"]

R = TypeVar("R")


class Handover(Generic[R]):
    """Takes results from one source, for one task after the other, and loses none of them."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._turn = asyncio.Lock()
        """Held by the task that takes. Guards the attributes below."""
        self._taking: Future[R] | None = None
        """The result that is being taken, or was taken for a cancelled task."""

    async def take(self, take: Callable[[], R]) -> R:
        """Return the result of ``take``, called in a thread, or of an earlier call for a task that was cancelled."""
        async with self._turn:
            return await self._take_locked(take)

    async def discard(self, then: Callable[[], None]) -> None:
        """Discard a result that was taken for a cancelled task; then call ``then`` in a thread."""
        async with self._turn:
            if self._taking is not None:
                await self._threads.finished(self._taking)
                self._taking = None
            await self._threads.run(then)

    async def _take_locked(self, take: Callable[[], R]) -> R:
        if self._taking is None:
            self._taking = self._threads.submit(take)
        await self._threads.finished(self._taking)  # if this is cancelled, the result stays for the next task
        taken, self._taking = self._taking, None
        return taken.result()
