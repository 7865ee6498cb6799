"""Who is inside RocksDB."""

from __future__ import annotations

from threading import Condition

from topicstore.contract.errors import DatabaseClosedError

__all__ = ["Calls"]


class Calls:
    """Counts calls that let other threads run while they are inside RocksDB; closing waits for them."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._count = 0
        self._closed = False

    def __enter__(self) -> None:
        with self._changed:
            if self._closed:
                raise DatabaseClosedError("the engine is closed")
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def end(self) -> bool:
        """Let no more calls in and wait for those inside; tell whether this was the first time."""
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._count)
            return first
