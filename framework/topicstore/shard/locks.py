"""Locks that are passed on to who waits, and holding several at once, whatever interrupts the taking of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from topicstore.contract.forking import ProcessLock

__all__ = ["FairLock", "holding", "owned"]


class FairLock(ProcessLock):  # type: ignore[misc]  # in truth RLock is not final
    """A reentrant lock that whoever gives it back can't take again before one who waits for it.

    `threading.RLock` lets a thread that writes in a tight loop take it again and again, before
    those it woke have come to run: they may starve for seconds. Here the next in line holds a
    second lock, the turn, while it waits, and nobody else gets in line before that is free.

    Ctrl-C while it is taken leaves it as it was. Giving it back is RLock's own, in C: no signal
    handler runs between the end of a ``with`` and that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Lock()

    def acquire(self) -> None:  # type: ignore[override]  # there is one way to take it: to wait
        """Take the lock; return when it is taken."""
        take = super().acquire
        if owned(self):
            try:
                take()
            except BaseException:  # a signal's, which came behind it: taking it again waits for nothing
                self.release()
                raise
            return
        try:
            with self._turn:
                take()
        except BaseException:
            if owned(self):
                self.release()
            raise

    __enter__ = acquire  # type: ignore[assignment]


def owned(lock: ProcessLock) -> bool:
    """Say whether this thread holds the lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001 - as threading.Condition does


@contextlib.contextmanager
def holding(locks: Iterable[FairLock]) -> Iterator[None]:
    """Take the locks in their order, which must be the same everywhere, and give them back at the end.

    Not for a thread that holds one of them already. `contextlib.ExitStack` would leak a lock if
    Ctrl-C came between taking it and noting it down; here it is noted down first. If it comes while
    they are given back, the others are given back all the same.
    """
    noted: list[FairLock] = []
    try:
        for lock in locks:
            noted.append(lock)
            lock.acquire()
        yield
    finally:
        try:
            _give_back(noted)
        finally:
            _give_back(noted)  # what is left, should Ctrl-C have come in between


def _give_back(noted: list[FairLock]) -> None:
    while noted:
        if owned(noted[-1]):
            noted[-1].release()
        noted.pop()
