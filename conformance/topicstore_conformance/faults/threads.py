"""Runs functions in threads at the same time, with timeouts for those that hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import FrameType, FunctionType
from typing import Any, Self

from topicstore.contract.forking import ProcessLock

__all__ = ["MOMENT", "PATIENCE", "Beside", "begin", "held_elsewhere", "running", "together", "wait_until"]

PATIENCE = 240.0
"""The timeout of an expected event, in seconds; only a real hang takes that long.

Twice this time is less than the timeout of a test, which is 600 seconds in this repository.
"""
MOMENT = 0.001
"""The seconds for which a thread in a loop waits between rounds, so that other threads get the GIL."""


def begin(work: Callable[[], Any]) -> Future[Any]:
    """Run a function in a new daemon thread; return the future of its result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is requested
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run each function in a thread at the same time; return the results in order, or raise the first error.

    An error is raised immediately, even if other functions wait for the one that failed. Raises TimeoutError after
    twice `PATIENCE`, because several functions at the same time take longer than one alone.
    """
    futures = [begin(work) for work in works]
    ended, running = wait(futures, 2 * PATIENCE, FIRST_EXCEPTION)
    for future in ended:
        future.result()
    if running:
        raise TimeoutError(f"{len(running)} of {len(works)} functions are still running")
    return [future.result() for future in futures]


def running(method: FunctionType) -> list[Any]:
    """Return the objects whose ``method`` a thread is running at the moment, one for each such call."""
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
    """Wait until a condition holds; fail after `PATIENCE` seconds with a message that names ``what``."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} seconds for {what}"
        time.sleep(MOMENT)


class Beside:
    """A context manager that runs each job repeatedly in a thread during its block, and then raises the jobs' errors.

    The block begins after each job has run once. Threads switch every ten microseconds, to provoke races.
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
        """Signal the threads to end, and restore the switch interval."""
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
        """Whether a job has raised an error."""
        return bool(self._failures)
