"""Locks that are passed on to who waits, and holding several at once, whatever interrupts the taking of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

__all__ = ["FairLock", "held"]


class FairLock:
    """A reentrant lock that whoever gives it back can't take again before one who waits for it.

    `threading.RLock` lets a thread that writes in a tight loop take it again and again, before
    those it woke have come to run: they may starve for seconds. Here the next in line holds a
    second lock, the turn, while it waits, and nobody else gets in line before that is free.

    Ctrl-C while it is taken leaves it as it was. Fits `threading.Condition`.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.RLock()
        self._again = 0
        """How often its holder took it again."""

    def acquire(self) -> None:
        """Take the lock; return when it is taken."""
        if self._is_owned():
            self._again += 1
            return
        try:
            with self._turn:
                self._lock.acquire()
        except BaseException:
            if self._is_owned():
                self._lock.release()
            raise

    def release(self) -> None:
        """Give it back, once for each time it was taken."""
        if self._again and self._is_owned():
            self._again -= 1
        else:
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - as Condition does

    def _release_save(self) -> int:
        again, self._again = self._again, 0
        self._lock.release()
        return again

    def _acquire_restore(self, again: int) -> None:
        self._lock.acquire()
        self._again = again


@contextlib.contextmanager
def held(locks: Iterable[FairLock]) -> Iterator[None]:
    """Take the locks in their order, which must be the same everywhere, and give them back at the end.

    Not for a thread that holds one of them already. `contextlib.ExitStack` would leak a lock if
    Ctrl-C came between taking it and noting it down; here it is noted down first.
    """
    noted: list[FairLock] = []
    try:
        for lock in locks:
            noted.append(lock)
            lock.acquire()
        yield
    finally:
        for lock in reversed(noted):
            if lock._is_owned():  # noqa: SLF001 - of this module
                lock.release()
