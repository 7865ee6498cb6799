"""`Threads`: the threads on which a database's calls run while the event loop goes on.

A call that waits, for the disk or for a lock, blocks its thread and nothing else. Waits for messages, in a
subscription's fetch or for sessions, occupy no thread: they are woken by a bell.

Cancelling a task that awaits a call doesn't end the call: an engine can't be interrupted. A call that has not begun is
withdrawn; one that has begun goes on to its end, which closing waits for.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from topicstore.contract.errors import DatabaseClosedError

__all__ = ["MOST", "Threads"]

P = ParamSpec("P")
R = TypeVar("R")

MOST = 8
"""Number of calls of one database that run at the same time; others wait in order. With more calls, a flush serves
more stores, but the loop waits longer for the GIL."""


class Threads(Executor):
    """The threads of one database, started as they are needed. Used in one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MOST, "topicstore-aio")
        self._closed = False
        """Set when closing begins: no calls are accepted after that."""
        self._room = asyncio.Semaphore(MOST)
        """Held by running calls. If a thousand calls were begun at once, threads would wake constantly, and the loop's
        thread would wait for each of them."""
        self._loop = asyncio.get_running_loop()
        self._over: collections.deque[asyncio.Future[None]] = collections.deque()
        """The futures to report to the loop. Threads append to it, in one step."""
        self._told = False
        """Whether the loop has been asked to look and has not looked since."""

    def __repr__(self) -> str:
        return f"<Threads, at most {MOST}{', closed' * self._closed}>"

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin a call in a thread, with the context variables of the caller.

        Raises `DatabaseClosedError`, and `RuntimeError` in another event loop.
        """
        self.check_loop()
        if self._closed:
            raise DatabaseClosedError("the database is closed")
        context = contextvars.copy_context()
        return self._pool.submit(lambda: context.run(fn, *args, **kwargs))

    async def finished(self, future: Future[Any]) -> None:
        """Wait until the work of a thread has ended, also by an error. Cancelling this doesn't affect the thread."""
        self.check_loop()
        over = self._loop.create_future()

        def tell(_: Future[Any]) -> None:
            self._over.append(over)
            if not self._told:  # once is enough: waking the loop for each of a thousand futures takes long
                self._told = True
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    self._loop.call_soon_threadsafe(self._look)

        future.add_done_callback(tell)
        await over

    def check_loop(self) -> None:
        """Raise `RuntimeError` in another event loop than the one that these threads belong to."""
        if asyncio.get_running_loop() is not self._loop:  # another loop would never be woken
            raise RuntimeError("the database was opened in another event loop")

    def _look(self) -> None:
        self._told = False  # before it looks: a call that ends from here on is reported again
        while self._over:
            over = self._over.popleft()
            if not over.done():  # cancelled
                over.set_result(None)

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a call. If this is cancelled, the call may be done, in progress, or never made."""
        async with self._room:
            future = self.submit(call, *args, **kwargs)
            try:
                await self.finished(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        return future.result()

    async def make(self, make: Callable[[], R], undo: Callable[[R], object]) -> R:
        """Return the object that a call makes. If this is cancelled, the effect of the call is undone."""
        future = self.submit(make)
        try:
            await self.finished(future)
        except asyncio.CancelledError:
            if not future.cancel():
                with contextlib.suppress(DatabaseClosedError):  # closing the database has undone it
                    self.submit(_undo, future, undo)
            raise
        return future.result()

    async def close(self, close: Callable[[], object]) -> None:
        """Accept no more calls, call ``close``, and wait until all threads have ended, even if it raises.

        All of this is done even if it is cancelled. It may be called again.
        """
        self.check_loop()
        self._closed = True
        closer = ThreadPoolExecutor(1, "topicstore-aio-close")  # the others may all be busy
        closing = closer.submit(self._close, close)
        closer.shutdown(wait=False)
        await self.finished(closing)
        closer.shutdown()  # its thread has nothing left to do, and is waited for as the others are
        closing.result()

    def leave(self) -> None:
        """Accept no more calls, and let the threads end by themselves after all accepted calls."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _close(self, close: Callable[[], object]) -> None:
        try:
            close()
        finally:
            self._pool.shutdown()


def _undo(made: Future[R], undo: Callable[[R], object]) -> None:
    if made.exception() is None:
        undo(made.result())
