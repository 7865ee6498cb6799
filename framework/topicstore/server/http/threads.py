"""The thread pool in which requests call the database: fair among addresses, and without abandoned work.

A few threads serve all clients, so that neither one client nor long-running requests may occupy all of them. Waiting
work is queued by address, and addresses take turns. Health and metrics have separate threads, because they must respond
even if all other threads are blocked.
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

__all__ = ["Asking", "RequestThreads", "Way", "asking"]

T = TypeVar("T")

Way = Literal["ordinary", "heavy", "health", "site"]
"""The class of a request: heavy requests are limited to a part of the threads; health requests, and the requests of
other sites of a cluster, have separate threads."""

_APART = {"health": 2, "site": 4}
"""The number of separate threads, by class. They prevent a deadlock of two sites, each of which waits in all of its
other threads for answers of the other site."""
_WAITING = {"heavy": 32, "ordinary": 256}
"""Most waiting requests of an address, by class."""
_RETRY_AFTER = "1"
"""The header Retry-After, in seconds, for a client with too many waiting requests."""


@attrs.define(eq=False)
class Asking:
    """The properties of a request that determine its scheduling."""

    host: str
    reads: bool
    """Whether the request only reads, so that it can be dropped when its client disconnects."""
    gone: Callable[[], bool]
    """Returns whether the client has disconnected. Thread-safe."""
    way: Way = "ordinary"
    begun: bool = False
    """Whether the response has begun; then further work for it is neither refused nor heavy."""

    def unwanted(self) -> bool:
        """Return whether the request can be dropped."""
        return self.reads and self.gone()


asking: ContextVar[Asking | None] = ContextVar("topicstore_asking", default=None)
"""The request that the current task serves."""


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
        """Run the call, unless the request's client has disconnected; cancel it if the client disconnects meanwhile."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            if self.of is not None and self.of.unwanted():
                raise UnwantedError("the client has gone")
            reads = self.of is not None and self.of.reads
            with while_wanted(self._wanted) if reads else nullcontext():
                result = self.call()
        except BaseException as failed:  # noqa: BLE001 - it is raised by the future
            self.future.set_exception(failed)
        else:
            self.future.set_result(result)

    def _wanted(self) -> bool:
        return self.of is None or not self.of.unwanted()


class RequestThreads(ThreadPoolExecutor):
    """An executor for requests. A submitted call belongs to the request that the current task serves (`asking`)."""

    def __init__(self, threads: int) -> None:
        """``threads``: most calls that run at the same time, besides health requests.

        Heavy requests occupy at most three quarters of the threads, and those of one address at most half. An address
        occupies at most all threads but one.
        """
        self._most, self._heavy = threads, max(threads * 3 // 4, 1)
        self._heavy_of_host, self._of_host = max(threads // 2, 1), max(threads - 1, 1)
        super().__init__(threads + 1, "topicstore-http")  # one more thread for `at_once`
        self._apart = {way: ThreadPoolExecutor(most, f"topicstore-http-{way}") for way, most in _APART.items()}
        self._turns = threading.Lock()
        """Guards the following attributes."""
        self._waiting: dict[tuple[str, bool], deque[_Work]] = {}
        """The queues by address and whether they are heavy; the next one to be served comes first."""
        self._running: Counter[tuple[str, bool]] = Counter()
        self._ended = False

    def submit(self, call: Callable[..., T], /, *arguments: Any, **named: Any) -> Future[T]:
        """Submit a call, and return its future, which raises `UnwantedError` if the request's client has disconnected.

        Raises `ServiceUnavailableException` if too many requests of the address wait, and RuntimeError after
        `shutdown`.
        """
        of = asking.get()
        if of is not None and of.way in self._apart:
            return self._apart[of.way].submit(call, *arguments, **named)
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
        """Submit a short call that is not queued, such as one that releases resources."""
        return super().submit(call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls, and end after all submitted calls are done or, with ``cancel_futures``, cancelled."""
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
        for apart in self._apart.values():
            apart.shutdown(wait, cancel_futures=cancel_futures)

    def _take_unwanted_locked(self) -> list[_Work]:
        """Remove work of disconnected clients from the queues, and return it."""
        found = []
        for key, queue in list(self._waiting.items()):
            gone = [work for work in queue if work.of is not None and work.of.unwanted()]
            if gone:
                found += gone
                self._waiting[key] = deque(work for work in queue if work not in gone)
        return found

    def _begin_locked(self) -> None:
        """Begin work while threads are available; addresses take turns."""
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
                self._waiting[key] = queue  # at the end of the dict: the address's next turn is last
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
