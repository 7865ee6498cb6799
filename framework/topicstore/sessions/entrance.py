"""`Entrance`: how a thread comes to hold the sessions' lock, and what it does after it has given the lock up.

Long work is done in pieces, and the lock given up after each. Python's locks are not fair: the thread that gives one up
would have it again before another wakes. So who enters holds a second lock, the queue, from before it waits for the
lock until it has given it up. Long work takes only the lock, and passes through the queue before each piece: if
somebody waits there, it has its turn first.

The callbacks of programs are not called under the lock, where they would hold up everybody, but by the same thread
after it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from topicstore.contract.forking import ProcessLock
from topicstore.failures import do_all

__all__ = ["Entrance"]

_Call = tuple[str, Callable[[], object]]


class _Due(threading.local):
    """The calls that are due in the current thread once it has given up the lock."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class Entrance:
    """The way to the sessions' lock. All methods may be called from any thread."""

    def __init__(self, lock: ProcessLock) -> None:
        self._lock = lock
        self._queue = ProcessLock()
        """Taken before the lock. Work in pieces holds it only between them."""
        self._due = _Due()

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Hold the lock, then make the calls that became due in this thread.

        It may be entered again by a thread that holds the lock, as when a signal handler or a plugin calls.
        """
        try:
            if self._lock.owned():
                with self._lock:  # without the queue: somebody there may wait for this thread
                    yield
            else:
                with self._queue, self._lock:
                    yield
        finally:
            self._call()

    @contextlib.contextmanager
    def piece(self) -> Iterator[None]:
        """Hold the lock for one piece of long work, after those who wait for it at this moment."""
        if not self._lock.owned():
            with self._queue:
                pass
        try:
            with self._lock:
                yield
        finally:
            self._call()

    @contextlib.contextmanager
    def within(self, end: float | None) -> Iterator[bool]:
        """Hold the lock if it can be had before ``end``, a time of `time.monotonic`; yield whether it is held."""
        if self._lock.owned():
            yield True
            return
        try:
            timeout = -1.0 if end is None else max(end - time.monotonic(), 0.0)
            yield self._lock.acquire(timeout=timeout)
        finally:
            if self._lock.owned():  # also if it was interrupted as soon as it had the lock
                self._lock.release()

    def afterwards(self, what: str, call: Callable[[], object]) -> None:
        """Have this thread, which holds the lock, call a program's callback after it has given up the lock.

        An error of the callback is given as a `RuntimeWarning` that begins with ``what``: the caller that
        ended another client's session can't handle it.
        """
        self._due.calls.append((what, call))

    def _call(self) -> None:
        calls = self._due.calls
        if calls and not self._lock.owned():
            self._due.calls = []
            do_all([lambda what=what, call=call: _guarded(what, call) for what, call in calls], "failed")  # type: ignore[misc]


def _guarded(what: str, call: Callable[[], object]) -> None:
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
