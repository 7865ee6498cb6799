"""Background tasks. Each task has one thread, which starts when the task is first woken, and runs until `stop`.

Databases that are still open when the interpreter exits are closed first, so that no thread of this package runs after
that. Python would stop a daemon thread at an arbitrary point, which aborts the process if the thread is inside an
engine's call (python/cpython#87135).
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
from .wake_event import AutoResetEvent, Latch

__all__ = ["BackgroundTask", "end_at_exit"]

T = TypeVar("T")

_ENDS: weakref.WeakKeyDictionary[object, Callable[[Any], object]] = weakref.WeakKeyDictionary()
"""For each object, the method that ends its threads."""
os.register_at_fork(after_in_child=_ENDS.clear)  # a forked child has none of the threads
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 60.0
"""The first and the longest delay of a retry, in seconds."""
_exiting = False
"""Whether the interpreter is exiting, after which no thread is started. It is not an `Event`, whose lock a forked child
could inherit in the locked state."""


def end_at_exit(owner: T, end: Callable[[T], object]) -> None:
    """Register ``end``, which ends the threads of ``owner``, for the interpreter's exit. ``owner`` is held weakly."""
    _ENDS[owner] = end


@atexit.register
def _end_all() -> None:
    global _exiting
    _exiting = True
    there = [one for reference in reversed(_ENDS.keyrefs()) if (one := reference()) is not None]
    do_all([partial(_ENDS[one], one) for one in there], "could not be ended")


class BackgroundTask:
    """A task that runs ``work`` in its own thread each time it is woken or ``interval`` has passed.

    name: a description of the work, for the thread's name and for warnings.
    work: the function to run; its argument is True if the task was woken, False after a timeout. Its error is kept in
          `failure` until a run succeeds, and a new error is emitted as a warning. `DatabaseClosedError` after `stop` is
          ignored. A failed run is retried when the task is woken, or with exponential back-off from one second to one
          minute.
    """

    def __init__(self, name: str, work: Callable[[bool], object]) -> None:
        self.failure: str | None = None
        """The error of the last run of ``work``; None if it succeeded. Set by the thread; reading it needs no lock."""
        self.interval: float | None = None
        """Seconds after which the task runs without being woken; None for never."""
        self.stopping = Latch()
        """Set by `stop`. ``work`` should then end soon."""
        self._name = name
        self._work = work
        self._wake = AutoResetEvent()
        self._starting = ProcessLock()  # reentrant: garbage collection while it is held may close the database
        """Guards the attributes below."""
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Let the task run soon. Several calls before it starts cause one run."""
        self._wake.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.stopping.is_set() and not _exiting:
                    thread = threading.Thread(target=self._run, name=f"topicstore-{self._name}", daemon=True)
                    thread.start()
                    self._thread = thread

    def stop(self) -> None:
        """Stop the task permanently, without waiting for its thread (see `join`). This is idempotent."""
        with self._starting:
            self.stopping.set()
            self._wake.set()

    def join(self) -> None:
        """Wait until the thread has ended after `stop`. In the thread itself, return immediately."""
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
            except BaseException as error:  # noqa: BLE001 - reported in `failure`; it must not end the thread
                if isinstance(error, DatabaseClosedError) and self.stopping.is_set():
                    return
                retry = _FIRST_RETRY if retry is None else min(2 * retry, _LONGEST_RETRY)
                known, self.failure = self.failure, str(error) or type(error).__name__
                if self.failure != known:
                    with contextlib.suppress(RuntimeWarning):  # if warnings are errors, `failure` still reports it
                        warnings.warn(f"background {self._name} failed: {self.failure}", RuntimeWarning, stacklevel=1)
            else:
                retry = self.failure = None
