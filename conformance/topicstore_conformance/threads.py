"""Running things beside each other, so that what gets stuck fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["MOMENT", "PATIENCE", "begin", "together", "wait_until"]

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
