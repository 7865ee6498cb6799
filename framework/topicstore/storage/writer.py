"""A buffered writer: many small puts become few large batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from topicstore.contract.arguments import check_count
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError, InvalidMessageError, PluginError
from topicstore.contract.forking import ProcessLock
from topicstore.contract.model import Message, MessageId

from .storage import Storage

__all__ = ["Writer"]


class _StoredLater(Future[MessageId]):
    """What `Writer.put` gives: a future that knows whether somebody sees to its outcome."""

    seen = False
    """Whether anybody has asked for it, or has left a callback."""

    def result(self, timeout: float | None = None) -> MessageId:
        self.seen = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.seen = True
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[MessageId]], object]) -> None:
        self.seen = True
        super().add_done_callback(fn)


_Item = tuple[Message, _StoredLater]
_Outcome = tuple[_StoredLater, MessageId | None, Exception | None]


class _InterruptedError(InterruptedError):
    """The thread that stored was interrupted: the message may be stored or not."""


def _resolve(future: Future[MessageId], message_id: MessageId | None, error: Exception | None) -> None:
    if future.done():
        return
    if message_id is None:
        future.set_exception(error)
    else:
        future.set_result(message_id)


class Writer:
    """Collects messages and stores them when there are ``max_items`` or after ``flush_interval`` seconds.

    Each `put` gives a `concurrent.futures.Future` of the message's `MessageId`, done once the
    message is stored as durably as the database promises, or failed with the error of its batch.
    A message that can't be stored is refused by `put` itself or, if only the store can tell (one
    that is late), fails alone. If the engine fails, the whole batch fails and is not tried again:
    that could store messages twice.

    A failure is nobody's if nobody has asked the message's future for its outcome, or has left a callback there.
    Such failures are raised, once, by the next `put`, which then takes nothing, or by `flush` or `close`: as an
    `ExceptionGroup` that says of how many messages, with one error a batch.

    All methods may be called from any thread. Messages are stored in the order of their puts.
    As a context manager it flushes at the end, whatever ended it; an error that ended it is raised as it is, with a
    note of what else failed.
    """

    def __init__(self, storage: Storage, max_items: int = 1_000, flush_interval: float = 0.1) -> None:
        check_count("max_items", max_items)
        if not 0 < flush_interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"flush_interval is seconds above 0, not {flush_interval!r}")
        self._storage = storage
        self._max_items = max_items
        self._interval = flush_interval
        self._changed = threading.Condition(ProcessLock())
        """Guards what follows."""
        self._buffer: list[_Item] = []
        self._oldest = 0.0
        """When the first of the buffer came."""
        self._closed = False
        self._failed: list[tuple[_StoredLater, Exception]] = []
        """Messages that failed, of which nobody has been told here."""
        self._storing = ProcessLock()  # keeps batches in the order of their puts
        self._thread = threading.Thread(target=self._run, name="topicstore-writer", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> Future[MessageId]:
        """Take a message. When the buffer is full, the caller stores it, which holds back fast producers.

        Raises `InvalidMessageError` for a bad message, `DatabaseClosedError` after `close`, and what nobody has seen
        of earlier messages; then this one was not taken.
        """
        try:
            MessageBatch.from_messages([message])
        except InvalidMessageError as bad:
            raise type(bad)(bad.reason) from bad
        future = _StoredLater()
        with self._changed:
            if self._closed:
                raise DatabaseClosedError("the writer is closed")
            if self._failed:
                self._tell_locked()
            if not self._buffer:
                self._oldest = time.monotonic()
                self._changed.notify()
            self._buffer.append((message, future))
            full = len(self._buffer) >= self._max_items
        if full:
            self._store_buffer()
        return future

    def flush(self) -> None:
        """Store what is buffered. Raises what nobody has seen, of these messages and earlier ones."""
        self._store_buffer()
        with self._changed:
            self._tell_locked()

    def _tell_locked(self) -> None:
        """Raise what nobody has seen."""
        failed, self._failed = self._failed, []
        unseen = [error for future, error in failed if not future.seen]
        if unseen:
            raise ExceptionGroup(f"messages that were not stored: {len(unseen)}", list(dict.fromkeys(unseen)))

    def _store_buffer(self) -> None:
        """Store what is buffered. Failures go to the futures, and are kept for who flushes."""
        outcomes: list[_Outcome] = []
        try:
            with self._storing:
                with self._changed:
                    buffer, self._buffer = self._buffer, []
                    outcomes = [(future, None, _InterruptedError()) for _, future in buffer]
                outcomes = self._store([pair for pair in buffer if pair[1].set_running_or_notify_cancel()])
        finally:
            with self._changed:
                self._failed += [(future, error) for future, _, error in outcomes if error is not None]
            # Outside the lock, because whoever waits for a future may put again at once.
            for future, message_id, error in outcomes:
                _resolve(future, message_id, error)

    def _store(self, items: list[_Item]) -> list[_Outcome]:
        """Store messages; one that is refused is left out, and the others are tried without it."""
        refused: list[_Outcome] = []
        while items:
            try:
                result = self._storage.write(MessageBatch.from_messages([message for message, _ in items]), {})
                ids = result.ids
            except InvalidMessageError as bad:  # nothing of the batch was stored
                if bad.index is None:
                    return refused + [(future, None, bad) for _, future in items]
                refused.append((items[bad.index][1], None, type(bad)(bad.reason)))
                items = items[: bad.index] + items[bad.index + 1 :]
            except Exception as error:  # noqa: BLE001 - whatever it is, the futures tell
                return refused + [(future, None, error) for _, future in items]
            else:
                if len(ids) != len(items):
                    lost = PluginError("a plugin changed the number of messages, so ids can't be told apart")
                    return refused + [(future, None, lost) for _, future in items]
                return refused + [(future, id_, None) for (_, future), id_ in zip(items, ids, strict=True)]
        return refused

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._due():
                    self._changed.wait(self._wait())
                if self._closed:
                    return
            with contextlib.suppress(BaseException):  # those that it concerns are in `_failed`; the others are stored
                self._store_buffer()

    def _due(self) -> bool:
        return bool(self._buffer) and time.monotonic() >= self._oldest + self._interval

    def _wait(self) -> float | None:
        return max(0.0, self._oldest + self._interval - time.monotonic()) if self._buffer else None

    def close(self) -> None:
        """Store what is buffered and take no more. May be called twice. Raises what `flush` does.

        In a forked child it does nothing.
        """
        if self._storage.inherited:
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # a future's callback may close
            self._thread.join()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"The writer failed too: {_told(failed)}")


def _told(failed: Exception) -> str:
    """Return an error on one line, what it is made up of too."""
    parts = failed.exceptions if isinstance(failed, ExceptionGroup) else ()
    return "; ".join([f"{type(failed).__name__}: {failed}", *(f"{type(part).__name__}: {part}" for part in parts)])
