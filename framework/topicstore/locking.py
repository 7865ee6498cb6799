"""Holding several locks at once, whatever interrupts the taking of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

__all__ = ["held"]


@contextlib.contextmanager
def held(locks: Iterable[threading.RLock]) -> Iterator[None]:
    """Take the locks in their order, which must be the same everywhere, and give them back at the end.

    Not for a thread that holds one of them already. `contextlib.ExitStack` would leak a lock if
    Ctrl-C came between taking it and noting it down; here it is noted down first.
    """
    noted: list[threading.RLock] = []
    try:
        for lock in locks:
            noted.append(lock)
            lock.acquire()
        yield
    finally:
        for lock in reversed(noted):
            if lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
                lock.release()
