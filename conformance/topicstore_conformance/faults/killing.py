"""Processes that kill themselves at a counted moment, so that the speed of the machine makes no difference.

A killed process leaves behind the effects of the system calls that it had made. So the moments that matter
are those before, within and after a write of an engine, and those at changes of files. Before and after,
the process is ended by SIGKILL. Within a write, which is the engine's own code, it is ended by an alarm of
the kernel that has no handler: that ends the process at once wherever its threads are, and can't be delayed
by a thread that holds the interpreter. At whatever point of the write it comes, the process does not
outlive that write.
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
"""The moments of a step, such as a write of an engine."""


def moment_of(number: int, place: str) -> int:
    """Return the number of the moment before, within or after a step; steps are counted from 1."""
    return len(PLACES) * (number - 1) + PLACES.index(place)


class Countdown:
    """A countdown that kills this process at moment ``last`` after `start`; each step has the three moments `PLACES`.

    ``share``: for a kill within a step, the time into it, as a share of the time that the step before took.
    """

    def __init__(self, last: int, share: float = 0.5) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        self._left = last + 1
        self._share = share
        self._took = 0.0001
        self._started = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to count."""
        self._started = True

    def moment(self) -> None:
        """Count one moment."""
        if self._is_last():
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(
        self, step: Callable[..., T], counts: Callable[..., object] = lambda *_, **__: True
    ) -> Callable[..., T]:
        """Wrap a function so that the moments of calls for which ``counts`` is true are counted."""

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
    """Yield the lines that a child writes to a pipe, until it ends; fail if it is silent so long that it is stuck."""
    return received(pipe, lambda: os.read(pipe.fileno(), 65_536))


def received(pipe: HasFileno, receive: Callable[[], T]) -> Iterator[T]:
    """Yield the results of ``receive`` as something arrives, until the end: an empty result, or an EOFError."""
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
