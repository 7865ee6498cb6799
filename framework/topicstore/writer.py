"""A buffered writer: many small puts become few large batches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .batch import MessageBatch
from .errors import DatabaseClosedError, InvalidArgumentError, InvalidMessageError
from .model import Message, MessageId

if TYPE_CHECKING:
    from .database import Database

__all__ = ["Writer"]


class Writer:
    """Collects messages and stores them when there are ``max_items`` or after ``flush_interval`` seconds.

    Each `put` gives a `concurrent.futures.Future` of the message's `MessageId`, done once the
    message is stored as durably as the database promises, or failed with the error of its batch.
    A message that can't be stored is refused by `put` itself, so it takes no others along.
    Failed batches are not tried again: that could store messages twice.

    All methods may be called from any thread. Messages are stored in the order of their puts.
    As a context manager it flushes at the end, whatever ended it.
    """

    def __init__(self, db: Database, max_items: int = 1_000, flush_interval: float = 0.1) -> None:
        if max_items < 1 or flush_interval <= 0:
            raise InvalidArgumentError("a writer needs max_items of at least 1 and a flush_interval above 0")
        self._db = db
        self._max_items = max_items
        self._interval = flush_interval
        self._buffer: list[tuple[Message, Future[MessageId]]] = []
        self._oldest = 0.0
        self._closed = False
        self._changed = threading.Condition()
        self._storing = threading.Lock()  # keeps batches in the order of their puts
        self._thread = threading.Thread(target=self._run, name="topicstore-writer", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> Future[MessageId]:
        """Take a message. When the buffer is full, the caller stores it, which holds back fast producers.

        Raises `InvalidMessageError` for a bad message, `DatabaseClosedError` after `close`.
        """
        try:
            MessageBatch.from_messages([message])
        except InvalidMessageError as bad:
            raise type(bad)(bad.reason) from bad
        future: Future[MessageId] = Future()
        with self._changed:
            if self._closed:
                raise DatabaseClosedError("the writer is closed")
            if not self._buffer:
                self._oldest = time.monotonic()
                self._changed.notify()
            self._buffer.append((message, future))
            full = len(self._buffer) >= self._max_items
        if full:
            self.flush()
        return future

    def flush(self) -> None:
        """Store what is buffered. Failures go to the futures, not to the caller."""
        with self._storing:
            with self._changed:
                buffer, self._buffer = self._buffer, []
            if not buffer:
                return
            live = [(message, future) for message, future in buffer if future.set_running_or_notify_cancel()]
            if live:
                self._store(live)

    def _store(self, items: list[tuple[Message, Future[MessageId]]]) -> None:
        try:
            ids = self._db.store([message for message, _ in items]).ids
        except BaseException as error:
            for _, future in items:
                future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, future), message_id in zip(items, ids, strict=True):
                future.set_result(message_id)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._due():
                    self._changed.wait(self._wait())
                if self._closed:
                    return
            self.flush()

    def _due(self) -> bool:
        return bool(self._buffer) and time.monotonic() >= self._oldest + self._interval

    def _wait(self) -> float | None:
        return max(0.0, self._oldest + self._interval - time.monotonic()) if self._buffer else None

    def close(self) -> None:
        """Store what is buffered and take no more. May be called twice."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
