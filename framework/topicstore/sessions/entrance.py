"""`Entrance`: how a thread comes to hold the sessions' lock, and what it does after it has given the lock up.

The lock is given up whenever an engine writes (`Entrance.released`): what must not change meanwhile is claimed
(`topicstore.sessions.claims`). Long work is done in pieces, and the lock given up after each. Python's locks are not
fair: the thread that gives one up would have it again before another wakes. So a thread that enters holds a second
lock, the queue, while it waits for the lock. Long work passes through the queue before each piece: if another thread
waits there, that thread has its turn first.

The callbacks of programs are not called under the lock, where they would hold up everybody, but by the same thread
after it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Protocol, TypeVar

from topicstore.contract.forking import ProcessLock
from topicstore.runtime.closing import do_all, guarded

__all__ = ["Around", "Entrance"]

T = TypeVar("T")

_Call = tuple[str, Callable[[], object]]


class Around(Protocol):
    """Calls a function while a lock is held, or while it is given up, and returns what the function returns."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call ``work``."""


class _Thread(threading.local):
    """What the current thread has entered, and the calls that are due once it has given up the lock."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Entrance:
    """The way to the sessions' lock. All methods may be called from any thread."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._queue = ProcessLock()
        """Held while a thread waits for the lock. Work in pieces takes it only between them."""
        self._thread = _Thread()

    def hold(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns under the lock, after the calls that became due in this thread.

        A thread that holds the lock may call it again, as when a signal handler or a plugin calls.
        """
        thread, lock, depth = self._thread, self._lock, self._thread.depth
        nested = lock.owned()

        def held() -> T:
            thread.depth = depth + 1
            if not nested:  # the queue is not for a nested call: a thread there may wait for this one
                with self._queue:
                    lock.acquire()
            return work()

        def leave() -> None:
            thread.depth = depth
            if not nested and lock.owned():
                lock.release()

        try:
            return guarded(held, leave)
        finally:
            self._call()

    def released(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns without the lock, as when an engine reads or writes; then hold it again.

        Within another call of the same thread, which may rely on the lock, it is kept.
        """
        lock = self._lock
        if self._thread.depth != 1 or not lock.owned():
            return work()

        def free() -> T:
            lock.release()
            return work()

        return guarded(free, lock.retake)

    def pass_queue(self) -> None:
        """Return when those who waited for the lock at this moment have had it. Nothing, if this thread holds it."""
        if not self._lock.owned():
            with self._queue:
                pass

    def within(self, end: float | None, work: Callable[[bool], T]) -> T:
        """Return what ``work`` returns under the lock, if that can be had before ``end``, a time of `time.monotonic`.

        ``work`` is called with whether the lock is held.
        """
        lock = self._lock
        if lock.owned():
            return work(True)
        timeout = -1.0 if end is None else max(end - time.monotonic(), 0.0)

        def leave() -> None:
            if lock.owned():
                lock.release()

        return guarded(lambda: work(lock.acquire(timeout=timeout)), leave)

    def afterwards(self, what: str, call: Callable[[], object]) -> None:
        """Have this thread, which holds the lock, call a program's callback after it has given up the lock.

        An error of the callback is given as a `RuntimeWarning` that begins with ``what``: the caller that
        ended another client's session can't handle it.
        """
        self._thread.calls.append((what, call))

    def _call(self) -> None:
        calls = self._thread.calls
        if calls and not self._thread.depth and not self._lock.owned():
            do_all([lambda: _shown(*calls.pop(0))] * len(calls), "failed")


def _shown(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as failure:  # noqa: BLE001 - whatever it is, it is shown, and not to the wrong caller
        told = f"{what} raised {type(failure).__name__}: {failure}"
        try:
            warnings.warn(told, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:  # where warnings are errors, it is reported like an error that ends a thread
            threading.excepthook(
                threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, threading.current_thread()))
            )
