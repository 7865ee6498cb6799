"""`LastingEngine`: a proxy of a shard's engine that stays the same object when the engine is reopened.

After a failed write an engine takes no writes until it is reopened (`topicstore.contract.engine`). Layouts, readers
and iterators hold the proxy, so they continue after `LastingEngine.open_again` has replaced the engine. A read that
finds the engine closed waits for its replacement. A scan continues in the replacement after the last key that it has
yielded; nothing is written in between. A snapshot can't be restored, so its later reads raise `EngineError`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs

from topicstore.contract.engine import Engine, EngineInfo, K, Keyspace, Snapshot, WriteBatch
from topicstore.contract.errors import DatabaseClosedError, EngineError, TopicstoreError
from topicstore.contract.forking import ProcessLock

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LastingEngine"]

T = TypeVar("T")


@attrs.define
class _Scanned(Generic[K]):
    """The remaining range of a scan, after the keys that it has yielded."""

    keyspace: Keyspace[K]
    start: K | None
    end: K | None
    reverse: bool
    limit: int | None
    begun: bool = False
    """Whether ``start`` was already yielded. Always False in a reverse scan."""

    def pass_over(self, chunk: list[tuple[K, bytes]]) -> None:
        """Remove a yielded list from the range."""
        if self.limit is not None:
            self.limit -= len(chunk)
        if self.reverse:
            self.end = chunk[-1][0]
        else:
            self.start, self.begun = chunk[-1][0], True

    def on(self, engine: Engine) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the remaining pairs from another engine."""
        if self.limit is not None and self.limit <= 0:
            return
        yielded = self.start if self.begun else None
        limit = self.limit if self.limit is None or yielded is None else self.limit + 1
        count = self.limit
        for chunk in engine.scan(self.keyspace, self.start, self.end, reverse=self.reverse, limit=limit):
            rest = chunk[1:] if yielded is not None and chunk[0][0] == yielded else chunk
            yielded = None
            if count is not None:
                rest = rest[:count]
                count -= len(rest)
            if rest:
                yield rest


class _Moment(Snapshot):
    """A snapshot of the engine that was current at its creation. Reads after a replacement raise `EngineError`."""

    def __init__(self, owner: LastingEngine, engine: Engine, snapshot: Snapshot) -> None:
        self._owner = owner
        self._engine = engine
        self._snapshot = snapshot

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        try:
            return self._snapshot.get(keyspace, key)
        except DatabaseClosedError as closed:
            raise self._owner.replaced(self._engine, closed) from closed

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        try:
            return self._snapshot.get_many(keyspace, keys)
        except DatabaseClosedError as closed:
            raise self._owner.replaced(self._engine, closed) from closed

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        scanned = self._snapshot.scan(keyspace, start, end, reverse=reverse, limit=limit)
        return self._owner.ended(self._engine, scanned)

    def close(self) -> None:
        self._snapshot.close()


def _present(engine: Engine) -> Engine:
    """Return the current engine of a `LastingEngine`, or any other engine itself."""
    return engine._engine if isinstance(engine, LastingEngine) else engine  # noqa: SLF001 - of this module


class LastingEngine(Engine):
    """A proxy of an engine that `open_again` can replace. All other methods forward to the current engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opening = ProcessLock()
        """Held while the engine is replaced. Reading `_engine` needs no lock."""
        self._missing: Exception | None = None
        """The error that prevented opening a replacement of the closed engine, or None. Guarded by `_opening`."""

    def open_again(
        self, open_engine: Callable[[], Engine], open_reader: Callable[[], Engine], resume: Callable[[], object]
    ) -> None:
        """Replace the engine, after a failed write, with one that takes writes; then call ``resume``.

        If `Engine.recover` succeeds, the engine is kept. Otherwise it is closed, and ``open_engine`` opens another one.
        Reads of a closed engine wait until ``resume`` has returned. Raises the errors of all these calls. If no engine
        could be opened for writing, ``open_reader`` opens one for reading. If that fails, too, reads raise
        `EngineError` until the next call succeeds.
        """
        with self._opening:
            if self._missing is not None or not self._engine.recover():
                self._replace_locked(open_engine, open_reader)
            resume()

    def _replace_locked(self, open_engine: Callable[[], Engine], open_reader: Callable[[], Engine]) -> None:
        self._missing = EngineError("opening it again was interrupted")
        try:
            with suppress(TopicstoreError):  # `close` may raise the failed write's error, but releases everything
                self._engine.close()
            self._engine = open_engine()
        except Exception as failed:
            self._missing = failed
            with suppress(Exception):  # the error of `open_engine`, raised below, usually has the same cause
                self._engine = open_reader()
                self._missing = None
            raise
        self._missing = None

    def _after(self, closed: Engine, error: DatabaseClosedError) -> Engine:
        """Return the replacement of a closed engine. Raises ``error`` if the shard itself was closed."""
        with self._opening:
            if self._missing is not None:
                raise EngineError(f"the shard can't be read until it is opened again: {self._missing}") from error
            if self._engine is closed:
                raise error
            return self._engine

    def _reading(self, read: Callable[[Engine], T]) -> T:
        """Return the result of ``read`` on the current engine; repeat it on the replacement of a closed one."""
        engine = self._engine
        while True:
            try:
                return read(engine)
            except DatabaseClosedError as closed:
                engine = self._after(engine, closed)

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None if the key is absent."""
        try:
            return self._engine.get(keyspace, key)
        except DatabaseClosedError:
            return self._reading(lambda engine: engine.get(keyspace, key))

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, or None if the key is absent."""
        return self._reading(lambda engine: engine.get_many(keyspace, keys))

    def scan(
        self,
        keyspace: Keyspace[K],
        start: K | None = None,
        end: K | None = None,
        *,
        reverse: bool = False,
        limit: int | None = None,
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the pairs of a range. If the engine is replaced meanwhile, the scan continues in the replacement."""
        engine, chunks = self._reading(
            lambda engine: (engine, engine.scan(keyspace, start, end, reverse=reverse, limit=limit))
        )
        return self._chunks(engine, chunks, _Scanned(keyspace, start, end, reverse, limit))

    def _chunks(
        self, engine: Engine, chunks: Iterator[list[tuple[K, bytes]]], left: _Scanned[K]
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the lists of a scan; if its engine is closed, continue in the replacement."""
        while True:
            try:
                for chunk in chunks:
                    left.pass_over(chunk)
                    yield chunk
                return
            except DatabaseClosedError as closed:
                engine = self._after(engine, closed)
            chunks = left.on(engine)

    def snapshot(self) -> Snapshot:
        """Return a snapshot, whose reads raise `EngineError` after the engine was replaced."""
        return self._reading(lambda engine: _Moment(self, engine, engine.snapshot()))

    def info(self) -> EngineInfo:
        """Return the sizes of the current engine."""
        return self._reading(lambda engine: engine.info())

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a statement on the current engine, and on the current engines of ``beside``."""
        return self._reading(lambda engine: engine.sql(statement, parameters, beside=list(map(_present, beside))))

    def verify(self) -> Iterator[str]:
        """Yield a description of each damaged place. Raises `EngineError` if the engine is replaced meanwhile."""
        engine = self._engine
        yield from self.ended(engine, engine.verify())

    def checkpoint(self, path: Path) -> None:
        """Write a consistent copy of the shard into the new directory ``path``."""
        for _ in self.checkpoint_steps(path):
            pass

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Make a checkpoint in steps. Raises `EngineError` if the engine is replaced meanwhile."""
        engine = self._engine
        yield from self.ended(engine, engine.checkpoint_steps(path))

    def ended(self, engine: Engine, steps: Iterator[T]) -> Generator[T]:
        """Yield from ``steps``, an iterator of an engine. Raises `EngineError` if the engine was replaced."""
        try:
            yield from steps
        except DatabaseClosedError as closed:
            raise self.replaced(engine, closed) from closed

    def replaced(self, engine: Engine, closed: DatabaseClosedError) -> EngineError:
        """Return the error for a read of a snapshot or iterator whose engine was replaced.

        Waits until the engine is open again. Raises ``closed`` if the shard was closed instead.
        """
        self._after(engine, closed)
        return EngineError("the shard was closed and opened again meanwhile, because a write failed; read again")

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch to the current engine."""
        self._engine.write(batch, sync=sync)

    def flush_log(self) -> None:
        """Fsync everything written so far; return when it is on disk."""
        self._engine.flush_log()

    def recover(self) -> bool:
        """Let the current engine take writes again after a failed write; return whether that succeeded."""
        return self._engine.recover()

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Free the disk space of a deleted range of keys."""
        self._engine.reclaim(keyspace, start, end)

    def close(self) -> None:
        """Close the current engine. This is idempotent."""
        self._engine.close()
