"""`Entrance`: acquires the sessions' lock fairly, and runs callbacks after its release.

The lock is released whenever an engine writes (`Entrance.released`). Claims protect the state that must not change
meanwhile (`topicstore.sessions.claims`). Long work is done in steps, with the lock released after each. Python's locks
are not fair: a thread that releases a lock can usually reacquire it before a waiting thread wakes. So a thread holds a
second lock, the queue, while it waits for the sessions' lock. Long work acquires and releases the queue before each
step, so that a thread that waits there runs first.

Callbacks of the program are not called under the lock, where they would block all other calls. The same thread calls
them after it has released the lock.
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
    """Calls a function with a lock held, or with a lock released, and returns the function's result."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call ``work``."""


class _Thread(threading.local):
    """The nesting depth of the current thread's calls, and its callbacks to run after it has released the lock."""

    def __init__(self) -> None:
        self.depth = 0
        self.calls: list[_Call] = []


class Entrance:
    """Fair access to the sessions' lock. All methods are thread-safe."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._queue = ProcessLock()
        """Held by a thread that waits for the lock. Work in steps acquires it only between steps."""
        self._thread = _Thread()

    def hold(self, work: Callable[[], T]) -> T:
        """Call ``work`` under the lock, then, after its release, the thread's callbacks; return the result of ``work``.

        Reentrant: a thread that holds the lock may call this again, for example in a signal handler or a plugin.
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
        """Release the lock, call ``work``, for example an engine write, and reacquire the lock; return the result.

        In a nested call the lock is kept, because the outer call of the thread may rely on it.
        """
        lock = self._lock
        if self._thread.depth != 1 or not lock.owned():
            return work()

        def free() -> T:
            lock.release()
            return work()

        return guarded(free, lock.retake)

    def pass_queue(self) -> None:
        """Wait until the thread in the queue has acquired the lock. Does nothing if this thread holds the lock."""
        if not self._lock.owned():
            with self._queue:
                pass

    def within(self, end: float | None, work: Callable[[bool], T]) -> T:
        """Wait for the lock until ``end``, a time of `time.monotonic`, and call ``work``; return its result.

        The argument of ``work`` is whether the lock is held.
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
        """Register a callback of the program, which this thread, the lock's holder, calls after releasing the lock.

        An error of the callback is reported as a `RuntimeWarning` that begins with ``what``, because the caller that
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
    except Exception as failure:  # noqa: BLE001 - reported below, because this thread's caller can't handle it
        told = f"{what} raised {type(failure).__name__}: {failure}"
        try:
            warnings.warn(told, RuntimeWarning, stacklevel=1)
        except RuntimeWarning:  # where warnings are errors, it is reported like an error that ends a thread
            threading.excepthook(
                threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, threading.current_thread()))
            )
