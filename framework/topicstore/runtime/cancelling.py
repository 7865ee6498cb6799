"""Cooperative cancellation of reads whose caller is gone.

A thread that reads on behalf of a caller registers a check with `while_wanted`; the code that reads messages calls
`check_wanted` between two steps. A long read thus ends within one step, however deep in the call stack it is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["UnwantedError", "check_wanted", "wanted", "while_wanted"]


class _Thread(threading.local):
    """The thread's current check. A context variable would not be visible to calls that run in another context."""

    wanted: Callable[[], bool] | None = None


_thread = _Thread()


class UnwantedError(Exception):
    """The read was cancelled, because its caller is gone. Only the caller of `while_wanted` catches it."""


@contextlib.contextmanager
def while_wanted(wanted: Callable[[], bool]) -> Iterator[None]:
    """Cancel reads of this thread inside the block with `UnwantedError` when ``wanted`` returns False.

    ``wanted`` is called between two steps of reading. The block must not write.
    """
    before, _thread.wanted = _thread.wanted, wanted
    try:
        yield
    finally:
        _thread.wanted = before


def wanted() -> Callable[[], bool] | None:
    """Return the function that checks whether the calling thread's work is still wanted; None without a check.

    A thread that reads on the caller's behalf passes the function to `while_wanted`.
    """
    return _thread.wanted


def check_wanted() -> None:
    """Raise `UnwantedError` if the work of this thread was cancelled."""
    check = _thread.wanted
    if check is not None and not check():
        raise UnwantedError("nobody waits for the result any more")
