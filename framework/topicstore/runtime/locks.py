"""`FairLock`, a fair reentrant lock, and `holding`, which holds several of them safely in spite of Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from topicstore.contract.errors import NestedCallError
from topicstore.contract.forking import ProcessLock

from .closing import guarded

__all__ = ["FairLock", "check_not_owned", "holding", "owned"]


T = TypeVar("T")


class FairLock(ProcessLock):  # type: ignore[misc]  # RLock isn't final at run time
    """A fair reentrant lock: the thread that releases it can't overtake a waiting one.

    With `threading.RLock`, a thread that writes in a tight loop may reacquire the lock again and again before the
    threads that it woke have run, and the woken threads may starve for seconds. Here the next thread in line holds a
    second lock, the turn, while it waits, and all other threads wait for the turn.

    Ctrl-C during `acquire` leaves the lock unchanged. The release is that of `threading.RLock`, in C, so no signal
    handler runs between the end of a ``with`` block and the release.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = ProcessLock()

    def acquire(self) -> None:  # type: ignore[override]  # it can only be taken by waiting
        """Acquire the lock; wait until it is available."""
        take = super().acquire
        if owned(self):
            try:
                take()
            except BaseException:  # a signal handler raised it after the acquisition: an owner doesn't wait
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


def owned(lock: ProcessLock | threading.RLock) -> bool:
    """Return whether this thread holds the lock."""
    return lock._is_owned()  # type: ignore[union-attr, no-any-return]  # noqa: SLF001 - as threading.Condition does


def check_not_owned(lock: FairLock) -> None:
    """Raise `NestedCallError` if this thread holds the lock, because the state that it guards may be inconsistent."""
    if owned(lock):
        raise NestedCallError("another call of this thread, within which this one was made, is writing")


def holding(locks: Sequence[FairLock], work: Callable[[], T]) -> T:
    """Acquire the locks in order, call ``work``, release the locks, and return the result of ``work``.

    The order must be the same everywhere, to avoid deadlocks. Raises `NestedCallError` if this thread already holds one
    of the locks. Ctrl-C releases all acquired locks.
    """
    if len(locks) == 1:
        check_not_owned(locks[0])
        with locks[0]:
            return work()
    noted: list[FairLock] = []

    def held() -> T:
        for lock in locks:
            check_not_owned(lock)
            noted.append(lock)  # noted before it is acquired, because Ctrl-C may come in between
            lock.acquire()
        return work()

    return guarded(held, partial(_give_back, noted))


def _give_back(noted: list[FairLock]) -> None:
    while noted:
        if owned(noted[-1]):
            noted[-1].release()
        noted.pop()
