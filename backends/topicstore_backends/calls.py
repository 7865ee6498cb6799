"""`Calls` makes closing an engine wait for calls into its library that release the GIL."""

from __future__ import annotations

from contextlib import AbstractContextManager
from threading import get_ident
from types import TracebackType

from topicstore.contract.errors import DatabaseClosedError
from topicstore.contract.forking import ProcessLock

__all__ = ["Calls"]


class Calls:
    """A guard of calls into an engine's library, ``with calls.lock(), calls: …``: refuses calls after `end`.

    Each thread has a lock of its own, for which only `end` waits, so that a snapshot can be released wherever Python
    collects garbage. Such a lock is taken and released in C, so Ctrl-C can't leave a lock held.
    """

    __slots__ = ("_closed", "_locks", "_translated")

    def __init__(self, translated: AbstractContextManager[None]) -> None:
        self._translated = translated
        self._locks: dict[int, ProcessLock] = {}
        """The lock of each thread, by the thread's number. Additions and copies are atomic, so nothing guards it."""
        self._closed = False

    def lock(self) -> ProcessLock:
        """Return the lock that this thread holds during its calls."""
        return self._locks.get(get_ident()) or self._locks.setdefault(get_ident(), ProcessLock())

    def __enter__(self) -> None:
        if self._closed:  # the caller holds its lock, and `end` takes all locks before it returns
            raise DatabaseClosedError("the engine or the snapshot is closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._translated.__exit__(kind, error, trace)

    def end(self) -> None:
        """Refuse further calls, and wait for the running calls of other threads."""
        self._closed = True
        for lock in list(self._locks.values()):
            with lock:
                pass

    def abandon(self) -> None:
        """Refuse further calls without waiting, in a forked child, which has none of the parent's other threads."""
        self._closed = True
