"""Who is inside an engine's library, where its calls let other threads run: closing waits for them."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from threading import Event
from types import TracebackType

from topicstore.contract.errors import DatabaseClosedError

__all__ = ["Calls"]


class Calls:
    """Counts the calls that are inside, and translates what they raise.

    No call waits for a lock, so that a snapshot can be given back wherever Python collects garbage.
    """

    __slots__ = ("_closed", "_inside", "_left", "_translated")

    def __init__(self, translated: AbstractContextManager[None]) -> None:
        self._translated = translated
        self._inside: deque[None] = deque()
        """One entry a call: unlike a number's, its changes are atomic."""
        self._closed = False
        self._left = Event()
        """Set once nobody is inside after closing began: who comes then is sent away."""

    def __enter__(self) -> None:
        self._inside.append(None)
        if self._closed:
            self._leave()
            raise DatabaseClosedError("the engine or the snapshot is closed")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if error is not None:
            self._translated.__exit__(kind, error, trace)

    def _leave(self) -> None:
        self._inside.pop()
        if self._closed and not self._inside:
            self._left.set()

    def end(self) -> None:
        """Let no more calls in and wait for those inside."""
        self._closed = True
        while self._inside:
            self._left.wait()

    def abandon(self) -> None:
        """Let no more calls in; those inside are of threads that a fork left behind."""
        self._closed = True
        self._inside.clear()
