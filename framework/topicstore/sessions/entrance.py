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

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator

from topicstore.contract.forking import ProcessLock
from topicstore.failures import do_all

__all__ = ["Entrance"]

_Call = tuple[str, Callable[[], object]]


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

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Hold the lock, then make the calls that became due in this thread.

        It may be entered again by a thread that holds the lock, as when a signal handler or a plugin calls.
        """
        nested = self._lock.owned()
        self._thread.depth += 1
        try:
            if nested:
                with self._lock:  # without the queue: somebody there may wait for this thread
                    yield
            else:
                with self._queue:
                    self._lock.acquire()
                yield
        finally:
            self._thread.depth -= 1
            if not nested and self._lock.owned():  # also if it was interrupted as soon as it had the lock
                self._lock.release()
            self._call()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the lock up while an engine reads or writes, and hold it again afterwards.

        Within another call of the same thread, which may rely on the lock, it is kept.
        """
        if self._thread.depth != 1 or not self._lock.owned():
            yield
            return
        try:
            self._lock.release()
            yield
        finally:
            try:
                if not self._lock.owned():  # it may have been interrupted before it gave the lock up
                    self._lock.acquire()
            except BaseException:  # interrupted while it waited: the caller needs the lock all the same
                if not self._lock.owned():
                    self._lock.acquire()
                raise

    def pass_queue(self) -> None:
        """Return when those who waited for the lock at this moment have had it. Nothing, if this thread holds it."""
        if not self._lock.owned():
            with self._queue:
                pass

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
        self._thread.calls.append((what, call))

    def _call(self) -> None:
        calls = self._thread.calls
        if calls and not self._thread.depth and not self._lock.owned():
            self._thread.calls = []
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
