"""Running things beside each other, so that what gets stuck fails."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

__all__ = ["MOMENT", "PATIENCE", "Beside", "begin", "together", "wait_until"]

PATIENCE = 240.0
"""Seconds after which something that should have happened is taken for stuck: met only by a real hang.

Two of them fit into the time that pytest gives a test, which is 600 seconds in this repository.
"""
MOMENT = 0.001
"""Seconds for which a thread waits that does something again and again, so that others come to the interpreter."""


def begin(work: Callable[[], Any]) -> Future[Any]:
    """Run in a thread of its own; return the future result."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(*works: Callable[[], Any]) -> list[Any]:
    """Run in one thread each; return the results, or raise the first error. What gets stuck fails.

    Working beside each other takes longer than anything alone, so all of it gets twice the patience.
    """
    deadline = time.monotonic() + 2 * PATIENCE
    futures = [begin(work) for work in works]
    return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Return when something holds; fail if it doesn't in good time, and say by ``what`` for what this waited."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} seconds for {what}"
        time.sleep(MOMENT)


class Beside:
    """Does each job in a thread, over and over, beside the body of a ``with`` statement; then raises what they raised.

    The body begins when each has been done once, so that none begins when all is over. Threads take turns very often.
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
        """Let the threads end, and take turns as before."""
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
