"""Running functions in threads at the same time, so that one that gets stuck fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, FunctionType
from typing import Any, Self

from topicstore.contract.forking import ProcessLock

__all__ = ["MOMENT", "PATIENCE", "Beside", "begin", "held_elsewhere", "running", "together", "wait_until"]

PATIENCE = 240.0
"""The seconds after which an expected event is given up: only a real hang takes that long.

Two of these fit into the time that pytest gives a test, which is 600 seconds in this repository.
"""
MOMENT = 0.001
"""The seconds for which a thread that repeats something waits, so that others get the interpreter."""


def begin(work: Callable[[], Any]) -> Future[Any]:
    """Run a function in a thread of its own; return the future result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread; return the results, or raise the first error. One that gets stuck fails.

    Several at once take longer than any of them alone, so all of them get twice the patience.
    """
    deadline = time.monotonic() + 2 * PATIENCE
    futures = [begin(work) for work in works]
    return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


def running(method: FunctionType) -> list[Any]:
    """Return the objects whose method some thread runs at this moment."""
    found = []
    for frame in sys._current_frames().values():  # noqa: SLF001 - it is documented
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is method.__code__:
                found.append(at.f_locals["self"])
            at = at.f_back
    return found


def held_elsewhere(lock: ProcessLock) -> bool:
    """Return whether another thread holds a lock."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Return when a condition holds; fail if it doesn't in good time, naming ``what`` was awaited."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} seconds for {what}"
        time.sleep(MOMENT)


class Beside:
    """Runs each job repeatedly in a thread, beside the body of a ``with`` statement; then raises the jobs' errors.

    The body begins when each job was done once, so that no job starts only at the end. Threads switch very often.
    """

    def __init__(self, *jobs: Callable[[], object]) -> None:
        self._done = threading.Event()
        self._begun = [threading.Event() for _ in jobs]
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(job, begun), daemon=True)
            for job, begun in zip(jobs, self._begun, strict=True)
        ]

    def _run(self, job: Callable[[], object], begun: threading.Event) -> None:
        try:
            while not self._done.is_set():
                job()
                begun.set()
                self._done.wait(MOMENT)
        except BaseException as error:  # noqa: BLE001 - raised at the end of the body
            self._failures.append(error)
            self._done.set()

    def __enter__(self) -> Self:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in self._threads:
            thread.start()
        try:
            wait_until(lambda: self.failed or all(begun.is_set() for begun in self._begun), "each job to be done once")
        except BaseException:
            self._end()
            raise
        return self

    def _end(self) -> None:
        """Let the threads end, and restore the switch interval."""
        self._done.set()
        sys.setswitchinterval(self._interval)

    def __exit__(self, *_: object) -> None:
        self._end()
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads), "a job is stuck"
        for failure in self._failures:
            raise failure

    @property
    def failed(self) -> bool:
        """Whether a job has raised something."""
        return bool(self._failures)
