"""Threads that work for many addresses by turns, so that no address can keep the others waiting.

Each address has a queue of its own, within which each user has a turn, too. So a call of an address that asks for
nothing else waits for one call of each other address at most, besides those that are under way. Queues are bounded, for
an address and in all; where all are full, a call of the longest queue gives way to one of a shorter one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

__all__ = ["BusyError", "FairThreads"]

T = TypeVar("T")


class BusyError(Exception):
    """More calls wait than are kept, of the address or in all."""


class _Job(Generic[T]):
    """A call that waits for its turn."""

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
    """Threads that make calls by turns. Used in one event loop."""

    def __init__(
        self,
        threads: int,
        name: str,
        *,
        paused: Callable[[str, str], float],
        each: int,
        most: int,
    ) -> None:
        """Take the bounds of the queues. Users are told by texts of a bounded size.

        paused: returns for how many seconds no call of an address for a user may begin, 0 for none.
        each:   how many calls of an address may wait.
        most:   how many calls may wait in all.
        """
        self._threads = ThreadPoolExecutor(threads, name)
        self._free, self._paused, self._each, self._most = threads, paused, each, most
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        """The addresses for which calls wait, in the order of their turns."""
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False

    async def run(self, address: str, user: str, call: Callable[[], T]) -> T:
        """Make a call in a thread when it is its turn, and return what it returns, or raise what it raises.

        If the caller is cancelled, a call that waits isn't made. Raises `BusyError`, also after `end`.
        """
        job: _Job[T] = _Job(call, asyncio.get_running_loop().create_future())
        self._put(address, user, job)
        if self._timer is None or self._paused(address, user) <= 0:  # else all that waits pauses until then
            self._begin()
        try:
            return await job.done
        except asyncio.CancelledError:
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
        """Refuse the call that came last of those of the address that has most, if it has more than another has."""
        address, longest = max(self._queues.items(), key=lambda item: item[1].length)
        if longest.length <= length + 1:
            raise BusyError(f"{self._waiting:,} calls wait")
        user = max(longest.users, key=lambda one: len(longest.users[one]))
        job = next(reversed(longest.users[user]))
        self._remove(address, user, job)
        if not job.done.done():
            job.done.set_exception(BusyError(f"{longest.length:,} calls of {address} wait"))

    def _remove(self, address: str, user: str, job: _Job[Any]) -> None:
        """Remove a call, if it waits."""
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
        """Begin as many calls as there are free threads, except those of addresses and users that pause."""
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
        """Return the address and user whose turn it is, with the seconds until then: 0, unless all of them pause."""
        best = ("", "", float("inf"))
        for address, queue in self._queues.items():
            for user in queue.users:
                wait = self._paused(address, user)
                if wait <= 0:
                    return address, user, 0.0
                best = min(best, (address, user, wait), key=lambda one: one[2])
        return best

    def _over(self, job: _Job[Any], made: asyncio.Future[Any]) -> None:
        """Hand on what a call returned or raised; whoever asked may have gone meanwhile. The thread is free again."""
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
        """Cancel the calls that wait; the threads end when theirs are over."""
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
