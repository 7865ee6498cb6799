"""Processes that kill themselves at a counted moment, so that the result doesn't depend on the machine's speed.

A killed process leaves the effects of its system calls. The relevant moments are therefore those before, within and
after a write of an engine, and at changes of files. Before and after a write, SIGKILL ends the process. Within a write,
which runs native code, a SIGALRM without a handler does: a thread that holds the GIL can't delay it. If the write ends
first, SIGKILL follows, so the process never survives that write.
"""

from __future__ import annotations

import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import IO, Any, Protocol, TypeVar

from .threads import PATIENCE

__all__ = ["ENDS", "PLACES", "Countdown", "heard", "moment_of", "received"]

T = TypeVar("T")

ENDS = (-signal.SIGKILL, -signal.SIGALRM)
"""The return codes of a process that killed itself."""
PLACES = ("before", "within", "after")
"""The three moments of a step, such as a write of an engine, in their order."""


def moment_of(number: int, place: str) -> int:
    """Return the number, from 0, of the moment before, within or after a step; steps are counted from 1."""
    return len(PLACES) * (number - 1) + PLACES.index(place)


class Countdown:
    """A countdown that kills this process at moment ``last``, counted from 0 after `start`.

    Each step has the three moments `PLACES`. Thread-safe.

    ``share``: the delay of a kill within a step, as a fraction of the time that the previous step took.
    """

    def __init__(self, last: int, share: float = 0.5) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._left = last + 1
        self._share = share
        self._took = 0.0001
        self._started = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to count moments; earlier ones are ignored."""
        self._started = True

    def moment(self) -> None:
        """Count one moment; kill this process if it is the last one."""
        if self._is_last():
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(
        self, step: Callable[..., T], counts: Callable[..., object] = lambda *_, **__: True
    ) -> Callable[..., T]:
        """Wrap a function so that each call for which ``counts`` returns true counts as a step of three moments."""

        @wraps(step)
        def counted(*arguments: Any, **options: Any) -> T:
            if not counts(*arguments, **options):
                return step(*arguments, **options)
            self.moment()
            within = self._is_last()
            began = time.perf_counter()
            if within:
                signal.setitimer(signal.ITIMER_REAL, max(0.000001, self._share * self._took))
            try:
                return step(*arguments, **options)
            finally:
                if within:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._took = time.perf_counter() - began
                self.moment()

        return counted

    def _is_last(self) -> bool:
        with self._lock:
            self._left -= self._started
            return self._started and self._left == 0


class HasFileno(Protocol):
    """An object with a file descriptor, such as a pipe or a connection."""

    def fileno(self) -> int:
        """Return the object's file descriptor."""


def heard(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes that a child writes to a pipe, until it ends; fail if it is silent for `PATIENCE` seconds."""
    return received(pipe, lambda: os.read(pipe.fileno(), 65_536))


def received(pipe: HasFileno, receive: Callable[[], T]) -> Iterator[T]:
    """Call ``receive`` whenever the pipe is readable, and yield its results until one is empty or raises EOFError.

    Fails if the pipe is not readable for `PATIENCE` seconds.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            assert selector.select(PATIENCE), f"the child process has said nothing for {PATIENCE:.0f} seconds"
            try:
                data = receive()
            except EOFError:
                return
            if not data:
                return
            yield data
