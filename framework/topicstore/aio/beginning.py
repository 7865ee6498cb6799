"""`Beginning`: the base class of wrappers whose synchronous object is created in a thread on first use."""

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
    """A wrapper of an object that is created in a thread on first use, and that is closed with the wrapper.

    The object is created when the wrapper is entered with ``async with``, awaited, or first used.
    """

    def __init__(
        self, threads: Threads, make: Callable[[], R], close: Callable[[R], object], closed: Callable[[], Exception]
    ) -> None:
        """Wrap the object that ``make`` creates and ``close`` closes.

        ``closed`` returns the error to raise if the wrapper is used after closing and the object was never created.
        """
        self._threads = threads
        self._make = make
        self._close = close
        self._closed = closed
        self._turn = asyncio.Lock()
        """Held while the object is created or closed. Guards writes of the attributes below; reads need no lock."""
        self._made: R | None = None
        self._over = False

    async def _get(self) -> R:
        """Return the object, and create it first if needed. After a cancellation, the next call creates it again."""
        if self._made is None:
            async with self._turn:
                if self._made is None:
                    if self._over:
                        raise self._closed()
                    self._made = await self._threads.make(self._make, self._close)
        return self._made

    async def close(self) -> None:
        """Close the object. May be called again. If the object was never created, it can't be created any more."""
        async with self._turn:
            self._over = True
            if self._made is not None:
                with contextlib.suppress(DatabaseClosedError):  # closing the database has closed the object as well
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
