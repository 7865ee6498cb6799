"""Threads in which clients are authenticated and authorized: a pool that serves addresses by turns, and batches.

`FairThreads` serves addresses by turns, so that none can starve others. Each address has its own queue, in which users
have turns, too. So the only call of an address waits at most for one call of each other address, besides running calls.
Queues are bounded, for each address and in total. If the total is reached, a new call of a shorter queue replaces the
last call of the longest queue.

`Batches` passes the requests of many clients together to one function in one thread, such as a plugin's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

__all__ = ["Batches", "BusyError", "FairThreads", "TooManyWaitingError"]

T = TypeVar("T")
Q = TypeVar("Q")
A = TypeVar("A")


class BusyError(Exception):
    """The queue of the address, or all queues together, are full."""


class _Job(Generic[T]):
    """A waiting call."""

    __slots__ = ("call", "done")

    def __init__(self, call: Callable[[], T], done: asyncio.Future[T]) -> None:
        self.call, self.done = call, done


class _Queue:
    """The calls of one address, by user, in the order of their turns."""

    __slots__ = ("length", "users")

    def __init__(self) -> None:
        self.users: OrderedDict[str, dict[_Job[Any], None]] = OrderedDict()
        self.length = 0


class FairThreads:
    """A thread pool with a queue for each address. Used in one event loop."""

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        paused: Callable[[str, str], float],
        each: int,
        most: int,
    ) -> None:
        """Create a pool of ``threads`` threads. Users are given by strings of bounded size.

        paused: returns the seconds for which no call of an address for a user may begin, 0 for none.
        each:   most waiting calls of an address.
        most:   most waiting calls in total.
        """
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._paused, self._each, self._most = threads, paused, each, most
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        """The addresses with waiting calls, in the order of their turns."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    async def run(self, address: str, user: str, call: Callable[[], T]) -> T:
        """Run a function in a thread when its turn comes; return its result, or raise its exception.

        If the caller is cancelled or closed while it waits, the function isn't called. Raises `BusyError`, also after
        `end`.
        """
        job: _Job[T] = _Job(call, asyncio.get_running_loop().create_future())
        self._put(address, user, job)
        if self._timer is None or self._paused(address, user) <= 0:  # otherwise the timer begins the call
            self._begin()
        try:
            return await job.done
        except (asyncio.CancelledError, GeneratorExit):
            self._remove(address, user, job)
            raise

    def _put(self, address: str, user: str, job: _Job[Any]) -> None:
        queue = self._queues.get(address)
        length = 0 if queue is None else queue.length
        if self._ended or length >= self._each:
            raise BusyError(f"{length:,} calls of {address} wait")
        if self._waiting >= self._most:
            self._make_room(length)
        if queue is None:
            queue = self._queues[address] = _Queue()
        queue.users.setdefault(user, {})[job] = None
        queue.length += 1
        self._waiting += 1

    def _make_room(self, length: int) -> None:
        """Refuse the last call of the longest queue, or the new call if its queue would be as long."""
        address, longest = max(self._queues.items(), key=lambda item: item[1].length)
        if longest.length <= length + 1:
            raise BusyError(f"{self._waiting:,} calls wait")
        user = max(longest.users, key=lambda one: len(longest.users[one]))
        job = next(reversed(longest.users[user]))
        self._remove(address, user, job)
        if not job.done.done():
            job.done.set_exception(BusyError(f"{longest.length:,} calls of {address} wait"))

    def _remove(self, address: str, user: str, job: _Job[Any]) -> None:
        """Remove a call if it is still waiting."""
        queue = self._queues.get(address)
        jobs = None if queue is None else queue.users.get(user)
        if queue is None or jobs is None or job not in jobs:
            return
        del jobs[job]
        queue.length -= 1
        self._waiting -= 1
        if not jobs:
            del queue.users[user]
        if not queue.users:
            del self._queues[address]

    def _begin(self) -> None:
        """Begin calls while there are free threads, except calls of addresses and users that pause."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._free and self._queues:
            address, user, wait = self._next()
            if wait > 0:
                self._timer = asyncio.get_running_loop().call_later(wait, self._begin)
                return
            queue = self._queues[address]
            job = next(iter(queue.users[user]))
            self._queues.move_to_end(address)
            queue.users.move_to_end(user)
            self._remove(address, user, job)
            self._free -= 1
            made = asyncio.get_running_loop().run_in_executor(self._threads, job.call)
            made.add_done_callback(partial(self._over, job))

    def _next(self) -> tuple[str, str, float]:
        """Return the address and user that are next, and the seconds until then: 0, unless all of them pause."""
        best = ("", "", float("inf"))
        for address, queue in self._queues.items():
            for user in queue.users:
                wait = self._paused(address, user)
                if wait <= 0:
                    return address, user, 0.0
                best = min(best, (address, user, wait), key=lambda one: one[2])
        return best

    def _over(self, job: _Job[Any], made: asyncio.Future[Any]) -> None:
        """Pass on a call's result or exception, unless its caller was cancelled, and release the thread."""
        self._free += 1
        if made.cancelled():
            job.done.cancel()
        elif (error := made.exception()) is not None:
            if not job.done.done():
                job.done.set_exception(error)
        elif not job.done.done():
            job.done.set_result(made.result())
        if not self._ended:
            self._begin()

    def end(self) -> None:
        """Cancel waiting calls; the threads end after their current calls."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        for queue in self._queues.values():
            for jobs in queue.users.values():
                for job in jobs:
                    job.done.cancel()
        self._queues.clear()
        self._waiting = 0
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the threads have ended, after `end`. May be called in any thread."""
        self._threads.shutdown(wait=True)


class TooManyWaitingError(Exception):
    """The limit of requests that may wait in a `Batches` would be exceeded; none of the call's requests was queued."""


class Batches(Generic[Q, A]):
    """Calls a function that answers many requests together, in one separate thread.

    Requests that arrive during a call form the next batch, except cancelled ones. A batch has at most ``most``
    requests, and at most ``waiting`` requests wait.
    """

    def __init__(
        self, answer: Callable[[Sequence[Q]], Sequence[A]], name: str, *, most: int = 1_000, waiting: int = 20_000
    ) -> None:
        self._answer, self._most, self._waiting = answer, most, waiting
        self._thread = ThreadPoolExecutor(1, name)
        self._requests: list[tuple[Q, asyncio.Future[A]]] = []
        self._task: asyncio.Task[None] | None = None

    async def ask(self, requests: Sequence[Q]) -> list[A]:
        """Return the answers, in the order of the requests.

        An exception of the function is raised for all requests of its call. Raises `TooManyWaitingError`.
        """
        if len(self._requests) + len(requests) > self._waiting:
            raise TooManyWaitingError(f"{len(self._requests):,} requests wait already")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[A]] = [loop.create_future() for _ in requests]
        self._requests += zip(requests, futures, strict=True)
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await asyncio.gather(*futures)

    def _wanted(self) -> bool:
        """Drop cancelled requests; return whether others are left."""
        self._requests = [one for one in self._requests if not one[1].cancelled()]
        return bool(self._requests)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        taken: list[tuple[Q, asyncio.Future[A]]] = []
        try:
            while self._wanted():
                taken, self._requests = self._requests[: self._most], self._requests[self._most :]
                try:
                    answers = await loop.run_in_executor(self._thread, self._answer, [one for one, _ in taken])
                except Exception as error:  # noqa: BLE001 - it is raised in the callers
                    for _, future in taken:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for (_, future), answer in zip(taken, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        finally:
            self._task = None
            for _, future in taken + self._requests:
                future.cancel()  # a future that has its answer is not changed
            self._requests = []

    def end(self) -> None:
        """Cancel waiting requests; the thread ends after its current call."""
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the thread has ended, after `end`. May be called in any thread."""
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        """Call `end`, then `join`."""
        self.end()
        self.join()
