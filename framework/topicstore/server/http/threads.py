"""The threads in which requests call the database: whose turn it is, and what is not done any more.

A few threads serve all clients, so one client must not have all of them, and requests that take long must not have all
of them either. What waits is queued by address, and addresses take turns. Health and metrics have threads of their own:
they are asked for when everything else is stuck.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any, Literal, TypeVar

import attrs
from litestar.exceptions import ServiceUnavailableException

from topicstore.runtime.cancelling import UnwantedError, while_wanted

__all__ = ["Asking", "FairThreads", "Way", "asking"]

T = TypeVar("T")

Way = Literal["ordinary", "heavy", "health"]
"""How a request comes to a thread: those of heavy ones have a share of the threads, those of health have their own."""

_HEALTH_THREADS = 2
_WAITING = {"heavy": 32, "ordinary": 256}
"""How many requests of an address may wait, by their way."""
_RETRY_AFTER = "1"
"""Seconds after which a client may ask again that was refused because too many of its requests wait."""


@attrs.define(eq=False)
class Asking:
    """One request, as far as its turn depends on it."""

    host: str
    reads: bool
    """Whether it only asks, so that it need not be answered once its client has gone."""
    gone: Callable[[], bool]
    """Says in any thread whether its client has gone."""
    way: Way = "ordinary"
    begun: bool = False
    """Whether the response has begun; what it needs then is neither refused nor heavy, since it is a step of it."""

    def unwanted(self) -> bool:
        """Return whether nothing more is to be done for it."""
        return self.reads and self.gone()


asking: ContextVar[Asking | None] = ContextVar("topicstore_asking", default=None)
"""The request that the running task serves."""


@attrs.define(eq=False)
class _Work:
    call: Callable[[], Any]
    of: Asking | None
    heavy: bool
    future: Future[Any] = attrs.field(factory=Future)

    @property
    def host(self) -> str:
        return "" if self.of is None else self.of.host

    def do(self) -> None:
        """Do it, unless its client has gone, or goes meanwhile."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            if self.of is not None and self.of.unwanted():
                raise UnwantedError("the client has gone")
            reads = self.of is not None and self.of.reads
            with while_wanted(self._wanted) if reads else nullcontext():
                result = self.call()
        except BaseException as failed:  # noqa: BLE001 - it is raised where the result is awaited
            self.future.set_exception(failed)
        else:
            self.future.set_result(result)

    def _wanted(self) -> bool:
        return self.of is None or not self.of.unwanted()


class FairThreads(ThreadPoolExecutor):
    """An executor for requests. What is submitted belongs to the request that the running task serves (`asking`)."""

    def __init__(self, threads: int) -> None:
        """``threads``: how many calls run at the same time, besides those of health.

        Three in four are for heavy requests at most, half of them for those of one address. An address has all threads
        but one at most.
        """
        self._most, self._heavy = threads, max(threads * 3 // 4, 1)
        self._heavy_of_host, self._of_host = max(threads // 2, 1), max(threads - 1, 1)
        super().__init__(threads + 1, "topicstore-http")  # one more for `at_once`
        self._health = ThreadPoolExecutor(_HEALTH_THREADS, "topicstore-http-health")
        self._turns = threading.Lock()
        """Guards the attributes below."""
        self._waiting: dict[tuple[str, bool], deque[_Work]] = {}
        """By address and whether it is heavy; the one whose turn is next comes first."""
        self._running: Counter[tuple[str, bool]] = Counter()
        self._ended = False

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Have something done, and return its result to come: `UnwantedError` if the request's client has gone.

        Raises `ServiceUnavailableException` if too many requests of the address wait, and RuntimeError after
        `shutdown`.
        """
        of = asking.get()
        if of is not None and of.way == "health":
            return self._health.submit(call, *arguments, **named)
        heavy = of is not None and of.way == "heavy" and not of.begun
        work = _Work(lambda: call(*arguments, **named), of, heavy)
        with self._turns:
            if self._ended:
                raise RuntimeError("the threads have ended")
            unwanted = self._take_unwanted_locked()
            queue = self._waiting.setdefault((work.host, heavy), deque())
            full = of is not None and not of.begun and len(queue) >= _WAITING["heavy" if heavy else "ordinary"]
            if not full:
                queue.append(work)
            self._begin_locked()
        for one in unwanted:
            one.do()
        if full:
            raise ServiceUnavailableException(
                "too many requests of this address wait to be served", headers={"Retry-After": _RETRY_AFTER}
            )
        return work.future

    def at_once(self, call: Callable[[], T]) -> Future[T]:
        """Have something short done for nobody: what releases things needs no turn."""
        return super().submit(call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more, and end when all that was submitted is done."""
        with self._turns:
            self._ended = True
            left = [work for queue in self._waiting.values() for work in queue]
            self._waiting.clear()
        for work in left:
            if cancel_futures:
                work.future.cancel()
            else:
                super().submit(work.do)
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._health.shutdown(wait, cancel_futures=cancel_futures)

    def _take_unwanted_locked(self) -> list[_Work]:
        """Take what waits for clients that have gone out of the queues, and return it."""
        found = []
        for key, queue in list(self._waiting.items()):
            gone = [work for work in queue if work.of is not None and work.of.unwanted()]
            if gone:
                found += gone
                self._waiting[key] = deque(work for work in queue if work not in gone)
        return found

    def _begin_locked(self) -> None:
        """Begin what may run now, one of each address in turn."""
        while (work := self._next_locked()) is not None:
            self._running[work.host, work.heavy] += 1
            super().submit(self._do, work)

    def _next_locked(self) -> _Work | None:
        running = self._running
        if running.total() >= self._most:
            return None
        heavies = sum(number for (_, heavy), number in running.items() if heavy)
        for key, queue in list(self._waiting.items()):
            host, heavy = key
            if not queue:
                del self._waiting[key]
                continue
            own = running[host, True] + running[host, False]
            if own >= self._of_host or (
                heavy and (heavies >= self._heavy or running[host, True] >= self._heavy_of_host)
            ):
                continue
            work = queue.popleft()
            del self._waiting[key]
            if queue:
                self._waiting[key] = queue  # its next turn comes after those of all others
            return work
        return None

    def _do(self, work: _Work) -> None:
        try:
            work.do()
        finally:
            with self._turns:
                key = work.host, work.heavy
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
                self._begin_locked()
