"""Work in the background: one thread a task, started when it is first woken, and stopped for good."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable

from .contract.errors import DatabaseClosedError
from .contract.forking import ProcessLock

__all__ = ["BackgroundTask"]


class BackgroundTask:
    """Runs ``work`` in a thread of its own each time that it was woken, or that ``interval`` is over.

    name: what is worked at, for the thread and for warnings.
    work: is told whether it was woken. What it raises is warned of and kept as `failure`, but for `DatabaseClosedError`
          once it was told to stop.
    goes_on: whether a failure leaves the thread to try again when it is woken next.
    """

    def __init__(self, name: str, work: Callable[[bool], object], *, goes_on: bool) -> None:
        self.failure: str | None = None
        """Why ``work`` failed the last time; None if it did not. Set by the thread; a glance needs no lock."""
        self.interval: float | None = None
        """Seconds after which it works though nobody woke it; None: never."""
        self.stopping = threading.Event()
        """Set by `stop`: ``work`` should come to its end."""
        self._name = name
        self._work = work
        self._goes_on = goes_on
        self._wake = threading.Event()
        self._starting = ProcessLock()  # a garbage collection inside may close the database
        """Guards what follows."""
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Have it work soon, once however often it is woken before it begins."""
        self._wake.set()
        if self._thread is None:
            with self._starting:
                if self._thread is None and not self.stopping.is_set():
                    thread = threading.Thread(target=self._run, name=f"topicstore-{self._name}", daemon=True)
                    thread.start()
                    self._thread = thread

    def stop(self) -> None:
        """Work no more, now or later. Doesn't wait; `join` does. May be called twice."""
        with self._starting:
            self.stopping.set()
            self._wake.set()

    def join(self) -> None:
        """Return when the thread that was told to stop has ended, at once in that thread itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            woken = self._wake.wait(self.interval)
            self._wake.clear()
            if self.stopping.is_set():
                return
            try:
                self._work(woken)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must be shown and not end in the thread
                if isinstance(error, DatabaseClosedError) and self.stopping.is_set():
                    return
                self.failure = str(error) or type(error).__name__
                what = "failed" if self._goes_on else "has ended"
                with contextlib.suppress(RuntimeWarning):  # where warnings are errors, `failure` is what tells
                    warnings.warn(f"background {self._name} {what}: {self.failure}", RuntimeWarning, stacklevel=1)
                if not self._goes_on:
                    return
            else:
                self.failure = None
