"""`Writer`: a buffered writer, which combines single messages into batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from topicstore.contract.arguments import Length, check_count, check_length
from topicstore.contract.batch import MessageBatch
from topicstore.contract.errors import DatabaseClosedError, InvalidArgumentError, InvalidMessageError, PluginError
from topicstore.contract.forking import ProcessLock, holds_lock
from topicstore.contract.model import Message, MessageId
from topicstore.runtime.background import end_at_exit
from topicstore.runtime.closing import Closing, guarded

from .storage import Storage

__all__ = ["Writer"]


class _StoredLater(Future[MessageId]):
    """The future that `Writer.put` returns. It records whether the caller observes its outcome."""

    seen = False
    """Whether the caller has requested the outcome or added a callback."""

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
    """The thread that stored the message was interrupted: the message may have been stored or not."""


def _resolve_all(outcomes: list[_Outcome]) -> None:
    """Set the outcomes of all futures; then raise an exception that a callback has raised, such as `SystemExit`."""
    ended = None
    for future, message_id, error in outcomes:
        try:
            _resolve(future, message_id, error)
        except BaseException as raised:  # noqa: BLE001 - raised after all outcomes are set
            ended = raised
    if ended is not None:
        raise ended


def _resolve(future: Future[MessageId], message_id: MessageId | None, error: Exception | None) -> None:
    if future.done():
        return
    if message_id is None:
        future.set_exception(error)
    else:
        future.set_result(message_id)


class Writer:
    """A writer that buffers messages and stores them in batches.

    A batch is stored when it has ``max_items`` messages, or ``flush_interval`` seconds after its first message. Each
    `put` returns a `concurrent.futures.Future` of the message's `MessageId`. The future completes when the message is
    stored with the database's durability, or fails with the error of its batch. `put` itself refuses an invalid
    message; a message that only the store can refuse, such as a late one, fails alone. If the engine fails, the whole
    batch fails and is not retried, because a retry could store messages twice.

    A failure is unobserved if the caller neither requests the future's outcome nor adds a callback. The next
    `put`, which then doesn't accept its message, or the next `flush` or `close` raises all unobserved failures, once,
    as an `ExceptionGroup`. The group states the number of messages, and has one error for each batch.

    All methods are thread-safe. Messages are stored in the order of the calls of `put`.
    A writer that is still open when the interpreter exits is closed at that point.
    As a context manager it closes at the end of the block. An error of the block is raised unchanged, with a note about
    failures of the writer.
    """

    def __init__(self, storage: Storage, max_items: int = 1_000, flush_interval: Length = 0.1) -> None:
        check_count("max_items", max_items)
        interval = check_length("flush_interval", flush_interval)
        if not 0 < interval <= threading.TIMEOUT_MAX:
            raise InvalidArgumentError(f"flush_interval is seconds above 0, not {flush_interval!r}")
        self._storage = storage
        self._max_items = max_items
        self._interval = interval
        self._lock = ProcessLock()
        """Guards the attributes below, up to ``_failed``."""
        self._changed = threading.Condition(self._lock)
        self._buffer: list[_Item] = []
        self._oldest = 0.0
        """The time (`time.monotonic`) at which the first message in the buffer was put."""
        self._closed = False
        self._failed: dict[_StoredLater, Exception] = {}
        """The failed messages whose failures the writer has not raised yet."""
        self._closing = Closing("writer")
        self._storing = ProcessLock()  # held while a batch is stored, so that batches are stored in order
        self._thread = threading.Thread(target=self._run, name="topicstore-writer", daemon=True)
        self._thread.start()
        end_at_exit(self, Writer.close)

    def put(self, message: Message) -> Future[MessageId]:
        """Add a message to the buffer. The call that fills the buffer also stores it, which slows producers down.

        Raises `InvalidMessageError` for an invalid message, `DatabaseClosedError` after `close`, and an
        `ExceptionGroup` of unobserved failures of earlier messages; in each case this message was not accepted.
        """
        future, full = self._take(message)
        if full:
            self._store_buffer()
        return future

    def put_nowait(self, message: Message) -> Future[MessageId]:
        """Add a message to the buffer as `put` does, but never wait for the engine: the writer's thread stores it.

        This is for callers that must not block, such as event loops. It doesn't bound the size of the buffer.
        """
        future, full = self._take(message)
        if full:
            with self._lock:
                self._changed.notify()
        return future

    def _take(self, message: Message) -> tuple[Future[MessageId], bool]:
        """Add a message to the buffer; return its future, and whether the buffer is full."""
        try:
            MessageBatch.from_messages([message])
        except InvalidMessageError as bad:
            raise type(bad)(bad.reason) from bad
        future = _StoredLater()
        with self._lock:
            if self._closed:
                raise DatabaseClosedError("the writer is closed")
            if self._failed:
                self._tell_locked()
            if not self._buffer:
                self._oldest = time.monotonic()
                self._changed.notify()
            self._buffer.append((message, future))
            return future, len(self._buffer) >= self._max_items

    def flush(self) -> None:
        """Store the buffered messages. Raises the unobserved failures of these and earlier messages."""
        self._store_buffer()
        with self._lock:
            self._tell_locked()

    def _tell_locked(self) -> None:
        """Raise the unobserved failures."""
        failed, self._failed = self._failed, {}
        unseen = [error for future, error in failed.items() if not future.seen]
        if unseen:
            raise ExceptionGroup(f"messages that were not stored: {len(unseen)}", list(dict.fromkeys(unseen)))

    def _store_buffer(self) -> None:
        """Store the buffered messages. Failures are set in the futures, and kept for the next `flush`."""
        outcomes: list[_Outcome] = []

        def store() -> None:
            nonlocal outcomes
            with self._storing:
                with self._lock:
                    buffer = self._buffer
                    outcomes = [(future, None, _InterruptedError()) for _, future in buffer]
                    self._buffer = []
                outcomes = self._store([pair for pair in buffer if pair[1].set_running_or_notify_cancel()])

        def resolve() -> None:
            with self._lock:
                self._failed |= {
                    future: error for future, _, error in outcomes if error is not None and not future.done()
                }
            # Outside the lock, because callbacks may call `put`.
            _resolve_all(outcomes)

        guarded(store, resolve)

    def _store(self, items: list[_Item]) -> list[_Outcome]:
        """Store messages. If the store refuses a message, the others are stored without it."""
        refused: list[_Outcome] = []
        while items:
            try:
                result = self._storage.write(MessageBatch.from_messages([message for message, _ in items]), {})
                ids = result.ids
            except InvalidMessageError as bad:  # no message of the batch was stored
                if bad.index is None:
                    return refused + [(future, None, bad) for _, future in items]
                refused.append((items[bad.index][1], None, type(bad)(bad.reason)))
                items = items[: bad.index] + items[bad.index + 1 :]
            except Exception as error:  # noqa: BLE001 - the futures raise it, whatever it is
                return refused + [(future, None, error) for _, future in items]
            else:
                if len(ids) != len(items):
                    lost = PluginError("a plugin changed the number of messages, so ids can't be assigned")
                    return refused + [(future, None, lost) for _, future in items]
                return refused + [(future, id_, None) for (_, future), id_ in zip(items, ids, strict=True)]
        return refused

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and not self._due():
                    self._changed.wait(self._wait())
                if self._closed:
                    return
            with contextlib.suppress(BaseException):  # `_failed` has the failures; other messages must still be stored
                self._store_buffer()

    def _due(self) -> bool:
        full = len(self._buffer) >= self._max_items
        return full or (bool(self._buffer) and time.monotonic() >= self._oldest + self._interval)

    def _wait(self) -> float | None:
        return max(0.0, self._oldest + self._interval - time.monotonic()) if self._buffer else None

    def close(self) -> None:
        """Store the buffered messages and accept no more. This is idempotent. Raises the errors of `flush`.

        Inside another call of the same thread, for example in a signal handler, it returns before the messages are
        stored, as `Database.close` does. In a forked child it does nothing.
        """
        if not self._storage.inherited:
            self._closing.run(self._close, within=holds_lock())

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # the callback of a future may close the writer
            self._thread.join()
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<Writer of {self._storage!r}: {len(self._buffer)} waiting{', closed' * self._closed}>"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"The writer failed too: {_in_one_line(failed)}")


def _in_one_line(failed: Exception) -> str:
    """Return the text of an error in one line, including those of the errors in a group."""
    parts = failed.exceptions if isinstance(failed, ExceptionGroup) else ()
    return "; ".join([f"{type(failed).__name__}: {failed}", *(f"{type(part).__name__}: {part}" for part in parts)])
