"""`Beginning`: an object over another that is made in a thread when it is first needed, and closed for good."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from topicstore.contract.errors import DatabaseClosedError

from .threads import Threads

__all__ = ["Beginning"]

R = TypeVar("R")


class Beginning(Generic[R]):
    """An object over one that is made in a thread by the first task that needs it, and closed at the end.

    It begins when it is entered with ``async with``, or awaited, or needed for the first time.
    """

    def __init__(
        self, threads: Threads, make: Callable[[], R], close: Callable[[R], object], closed: Callable[[], Exception]
    ) -> None:
        """``closed`` returns the error to raise if the object is needed after closing, and was never made."""
        self._threads = threads
        self._make = make
        self._close = close
        self._closed = closed
        self._turn = asyncio.Lock()
        """Held while the object is made or closed. Guards the attributes below; reading one needs no lock."""
        self._made: R | None = None
        self._over = False

    async def _get(self) -> R:
        """Return the object, which is made if needed. If that is cancelled, it is made again the next time."""
        if self._made is None:
            async with self._turn:
                if self._made is None:
                    if self._over:
                        raise self._closed()
                    self._made = await self._threads.make(self._make, self._close)
        return self._made

    async def close(self) -> None:
        """End it. May be called again. If it never began, it can't begin any more."""
        async with self._turn:
            self._over = True
            if self._made is not None:
                with contextlib.suppress(DatabaseClosedError):  # closing the database closed it
                    await self._threads.run(self._close, self._made)

    async def _entered(self) -> Self:
        await self._get()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._entered().__await__()

    async def __aenter__(self) -> Self:
        return await self._entered()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
