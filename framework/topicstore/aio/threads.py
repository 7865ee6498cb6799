"""`Threads`: the thread pool in which the calls of one database run, so that they don't block the event loop.

A call that waits for the disk or for a lock blocks only its own thread. Tasks that wait for messages, in a
subscription's fetch or for sessions, occupy no thread: they are woken by a notification.

Cancelling a task that awaits a call doesn't interrupt the call, because an engine can't be interrupted. A call that has
not begun is withdrawn; a call that has begun runs to its end, for which closing waits.
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
"""The number of calls of one database that run at the same time; further calls wait in order. With more calls, more
stores share one flush, but the event loop waits longer for the GIL."""


class Threads(Executor):
    """The thread pool of one database; threads are started as needed. Used in one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MOST, "topicstore-aio")
        self._closed = False
        """Set when closing begins: no calls are accepted after that."""
        self._room = asyncio.Semaphore(MOST)
        """Held by running calls. If a thousand calls were submitted at once, worker threads would wake constantly, and
        the event loop's thread would compete with them for the GIL."""
        self._loop = asyncio.get_running_loop()
        self._over: collections.deque[asyncio.Future[None]] = collections.deque()
        """Futures of finished calls that the loop has yet to resolve. Threads append to it, which is atomic."""
        self._notified = False
        """Whether a call of `_look` is scheduled in the loop and has not begun."""

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
        """Wait until the call of a future has ended, with a result or an error. Cancelling doesn't affect the call."""
        self.check_loop()
        over = self._loop.create_future()

        def tell(_: Future[Any]) -> None:
            self._over.append(over)
            if not self._notified:  # one notification serves many futures: waking the loop for each is slow
                self._notified = True
                with contextlib.suppress(RuntimeError):  # the event loop was closed
                    self._loop.call_soon_threadsafe(self._look)

        future.add_done_callback(tell)
        await over

    def check_loop(self) -> None:
        """Raise `RuntimeError` if the running event loop isn't the one in which the pool was made."""
        if asyncio.get_running_loop() is not self._loop:  # another loop would never be woken
            raise RuntimeError("the database was opened in another event loop")

    def _look(self) -> None:
        self._notified = False  # reset before the queue is read, so that a call that ends meanwhile notifies again
        while self._over:
            over = self._over.popleft()
            if not over.done():  # the waiting task may have been cancelled
                over.set_result(None)

    async def run(self, call: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call in a thread and return its result.

        If the task is cancelled, the call may have ended, be in progress, or never be made.
        """
        async with self._room:
            future = self.submit(call, *args, **kwargs)
            try:
                await self.finished(future)
            except asyncio.CancelledError:
                future.cancel()
                raise
        return future.result()

    async def make(self, make: Callable[[], R], undo: Callable[[R], object]) -> R:
        """Return the object that ``make`` creates in a thread. If the task is cancelled, call ``undo`` with it."""
        future = self.submit(make)
        try:
            await self.finished(future)
        except asyncio.CancelledError:
            if not future.cancel():
                with contextlib.suppress(DatabaseClosedError):  # closing the database also closes the object
                    self.submit(_undo, future, undo)
            raise
        return future.result()

    async def close(self, close: Callable[[], object]) -> None:
        """Refuse further calls, call ``close`` in a thread, and wait until all threads have ended, even if it raises.

        All of this is done even if the task is cancelled. May be called more than once.
        """
        self.check_loop()
        self._closed = True
        closer = ThreadPoolExecutor(1, "topicstore-aio-close")  # the pool's threads may all be busy
        closing = closer.submit(self._close, close)
        closer.shutdown(wait=False)
        await self.finished(closing)
        closer.shutdown()  # waits for the executor's thread, which has nothing left to do
        closing.result()

    def leave(self) -> None:
        """Refuse further calls, without waiting; the threads end after the accepted calls."""
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
