"""Locks that are passed on in turn, and a function that holds several of them and is safe against Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from topicstore.contract.errors import NestedCallError
from topicstore.contract.forking import ProcessLock

from .closing import guarded

__all__ = ["FairLock", "check_not_owned", "holding", "owned"]


T = TypeVar("T")


class FairLock(ProcessLock):  # type: ignore[misc]  # RLock isn't final at run time
    """A reentrant lock that a thread which releases it can't take again before a thread that waits for it.

    `threading.RLock` lets a thread that writes in a tight loop take the lock again and again before the threads that
    it woke have run, and those may starve for seconds. Here the next thread in line holds a second lock, the turn,
    while it waits, and no other thread gets in line before that is free.

    Ctrl-C while the lock is being taken leaves it as it was. The release is RLock's own, in C, so no signal handler
    runs between the end of a ``with`` block and the release.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turn = ProcessLock()

    def acquire(self) -> None:  # type: ignore[override]  # it can only be taken by waiting
        """Take the lock; return when it is taken."""
        take = super().acquire
        if owned(self):
            try:
                take()
            except BaseException:  # of a signal handler that ran after the take, because a reentrant take doesn't wait
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
    """Raise `NestedCallError` if this thread holds the lock, because the state that it guards may be half changed."""
    if owned(lock):
        raise NestedCallError("another call of this thread, within which this one was made, is writing")


def holding(locks: Iterable[FairLock], work: Callable[[], T]) -> T:
    """Take the locks in their order, which must be the same everywhere; return what ``work`` returns under them.

    Raises `NestedCallError` if this thread holds one of them already. Ctrl-C releases all that were taken.
    """
    noted: list[FairLock] = []

    def held() -> T:
        for lock in locks:
            check_not_owned(lock)
            noted.append(lock)  # before it is taken: Ctrl-C may come in between
            lock.acquire()
        return work()

    return guarded(held, partial(_give_back, noted))


def _give_back(noted: list[FairLock]) -> None:
    while noted:
        if owned(noted[-1]):
            noted[-1].release()
        noted.pop()
