"""Work in the background: each task has one thread, which starts when the task is first woken and is stopped for good.

No thread of this package runs when the interpreter exits: databases that are still open are closed then. A daemon
thread would be ended wherever it is, which aborts the process if that is within an engine's call
(python/cpython#87135).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock

from .closing import do_all
from .wake_event import Alarm

__all__ = ["BackgroundTask", "end_at_exit"]

T = TypeVar("T")

_ENDS: weakref.WeakKeyDictionary[object, Callable[[Any], object]] = weakref.WeakKeyDictionary()
"""By object, the method that ends its threads."""
os.register_at_fork(after_in_child=_ENDS.clear)  # a fork has none of the threads
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 60.0
"""Seconds."""
_exiting = False
"""Whether the interpreter exits: no thread is started after that. A fork could inherit the lock of an `Event`, held."""


def end_at_exit(owner: T, end: Callable[[T], object]) -> None:
    """Call ``end``, which ends the threads of an object, before the interpreter exits, if the object is there then."""
    _ENDS[owner] = end


@atexit.register
def _end_all() -> None:
    global _exiting
    _exiting = True
    there = [one for reference in reversed(_ENDS.keyrefs()) if (one := reference()) is not None]
    do_all([partial(_ENDS[one], one) for one in there], "could not be ended")


class BackgroundTask:
    """Runs ``work`` in a thread of its own each time the task is woken or ``interval`` has passed.

    name: describes the work, in the thread's name and in warnings.
    work: is called with whether the task was woken. An error that it raises is kept as `failure` until a call
          succeeds, and given as a warning when it is a new one, except `DatabaseClosedError` after `stop`. The thread
          works again when it is next woken, and otherwise after a second, then after twice as long each time, up to a
          minute.
    """

    def __init__(self, name: str, work: Callable[[bool], object]) -> None:
        self.failure: str | None = None
        """Why the last call of ``work`` failed; None if it did not. Set by the thread; reading it needs no lock."""
        self.interval: float | None = None
        """Seconds after which the task works without having been woken; None: never."""
        self.stopping = threading.Event()
        """Set by `stop`: ``work`` should end soon."""
        self._name = name
        self._work = work
        self._wake = Alarm()
        self._starting = ProcessLock()  # a garbage collection while it is held may close the database
        """Guards the attributes below."""
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have the task work soon, only once however often it is woken before it begins."""
        self._wake.ring()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.stopping.is_set() and not _exiting:
                    thread = threading.Thread(target=self._run, name=f"topicstore-{self._name}", daemon=True)
                    thread.start()
                    self._thread = thread

    def stop(self) -> None:
        """Stop the task for good, without waiting for its thread, as `join` does. May be called twice."""
        with self._starting:
            self.stopping.set()
            self._wake.ring()

    def join(self) -> None:
        """Wait until the thread has ended after `stop`. In the thread itself, return at once."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        retry: float | None = None
        while True:
            pauses = [pause for pause in (self.interval, retry) if pause is not None]
            woken = self._wake.wait(min(pauses, default=None))
            if self.stopping.is_set():
                return
            try:
                self._work(woken)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must be shown and not end in the thread
                if isinstance(error, DatabaseClosedError) and self.stopping.is_set():
                    return
                retry = _FIRST_RETRY if retry is None else min(2 * retry, _LONGEST_RETRY)
                known, self.failure = self.failure, str(error) or type(error).__name__
                if self.failure != known:
                    with contextlib.suppress(RuntimeWarning):  # where warnings are errors, `failure` reports it
                        warnings.warn(f"background {self._name} failed: {self.failure}", RuntimeWarning, stacklevel=1)
            else:
                retry = self.failure = None
