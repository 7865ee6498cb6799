"""Work that ends early because nobody waits for its result any more.

A thread that works for somebody says so with `while_wanted`, and whatever reads messages asks between two steps. So a
long read ends within a step, however many calls lie between who wants it and who reads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

__all__ = ["UnwantedError", "check_wanted", "while_wanted"]


class _Thread(threading.local):
    """What the thread works for. A context variable would not do: a call within another context wouldn't see it."""

    wanted: Callable[[], bool] | None = None


_thread = _Thread()


class UnwantedError(Exception):
    """Nobody waits for the result any more. Only whoever called `while_wanted` catches it."""


@contextlib.contextmanager
def while_wanted(wanted: Callable[[], bool]) -> Iterator[None]:
    """Have reads of this thread end with `UnwantedError` once ``wanted`` returns False.

    It is called between two steps of reading. What writes is not to be run within.
    """
    before, _thread.wanted = _thread.wanted, wanted
    try:
        yield
    finally:
        _thread.wanted = before


def check_wanted() -> None:
    """Raise `UnwantedError` if nobody waits for what this thread does any more."""
    wanted = _thread.wanted
    if wanted is not None and not wanted():
        raise UnwantedError("nobody waits for the result any more")
