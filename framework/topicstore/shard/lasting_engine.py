"""`LastingEngine`: the engine of a shard, which stays the same object while the shard is closed and opened again.

After a failed write an engine takes no writes until it is opened again (`topicstore.contract.engine`). Layouts, readers
and their iterators hold this object instead, so they go on when `LastingEngine.open_again` has put another engine in
its place. A read that meets the closed engine waits for the other one. A scan continues there after the last key that
it has yielded; nothing was written in between. A snapshot can't be had again, so its further reads raise `EngineError`.
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
    """The rest of a scan: the range after the keys that were yielded."""

    keyspace: Keyspace[K]
    start: K | None
    end: K | None
    reverse: bool
    limit: int | None
    begun: bool = False
    """Whether ``start`` was yielded, if the scan isn't reverse."""

    def pass_over(self, chunk: list[tuple[K, bytes]]) -> None:
        """Note that a list is yielded."""
        if self.limit is not None:
            self.limit -= len(chunk)
        if self.reverse:
            self.end = chunk[-1][0]
        else:
            self.start, self.begun = chunk[-1][0], True

    def on(self, engine: Engine) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the rest from another engine."""
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
    """A snapshot of the engine that is there when it is made."""

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
    """Return the engine that is there now."""
    return engine._engine if isinstance(engine, LastingEngine) else engine  # noqa: SLF001 - of this module


class LastingEngine(Engine):
    """An engine that `open_again` replaces. All other methods are those of the engine that is there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._opening = ProcessLock()
        """Held while the engine is replaced. `_engine` can be read without it."""
        self._missing: Exception | None = None
        """The error for which no engine could be opened in place of the closed one, or None. Guarded by `_opening`."""

    def open_again(
        self, open_engine: Callable[[], Engine], open_reader: Callable[[], Engine], adopt: Callable[[], object]
    ) -> None:
        """Replace the engine, after a write of it failed, by one that takes writes; then call ``adopt``.

        An engine that `Engine.recover` mends stays. Otherwise it is closed, and ``open_engine`` opens another one.
        Reads wait until ``adopt`` has returned. Raises the errors of all of these. If no engine could be opened for
        writing, ``open_reader`` opens one for reading; without that, reads raise `EngineError` until the next call
        succeeds.
        """
        with self._opening:
            if self._missing is not None or not self._engine.recover():
                self._replace_locked(open_engine, open_reader)
            adopt()

    def _replace_locked(self, open_engine: Callable[[], Engine], open_reader: Callable[[], Engine]) -> None:
        self._missing = EngineError("opening it again was interrupted")
        try:
            with suppress(TopicstoreError):  # such as the error of the failed write; a close releases everything
                self._engine.close()
            self._engine = open_engine()
        except Exception as failed:
            self._missing = failed
            with suppress(Exception):  # the first error, which is raised, tells the reason of both
                self._engine = open_reader()
                self._missing = None
            raise
        self._missing = None

    def _after(self, closed: Engine, error: DatabaseClosedError) -> Engine:
        """Return the engine that took the place of a closed one. Raises ``error`` if the shard was closed for good."""
        with self._opening:
            if self._missing is not None:
                raise EngineError(f"the shard can't be read until it is opened again: {self._missing}") from error
            if self._engine is closed:
                raise error
            return self._engine

    def _reading(self, read: Callable[[Engine], T]) -> T:
        """Return what a read of the engine returns that takes the place of one found closed."""
        engine = self._engine
        while True:
            try:
                return read(engine)
            except DatabaseClosedError as closed:
                engine = self._after(engine, closed)

    def get(self, keyspace: Keyspace[K], key: K) -> bytes | None:
        """Return the value of ``key``, or None where there is none."""
        return self._reading(lambda engine: engine.get(keyspace, key))

    def get_many(self, keyspace: Keyspace[K], keys: Sequence[K]) -> list[bytes | None]:
        """Return the value of each key, None where there is none."""
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
        """Yield the pairs of a range; where the engine is replaced meanwhile, the rest comes from the other one."""
        engine, chunks = self._reading(
            lambda engine: (engine, engine.scan(keyspace, start, end, reverse=reverse, limit=limit))
        )
        return self._chunks(engine, chunks, _Scanned(keyspace, start, end, reverse, limit))

    def _chunks(
        self, engine: Engine, chunks: Iterator[list[tuple[K, bytes]]], left: _Scanned[K]
    ) -> Iterator[list[tuple[K, bytes]]]:
        """Yield the lists of a scan; where its engine is closed, go on in the one that took its place."""
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
        """Return a view of the present state, whose reads raise `EngineError` once the engine was replaced."""
        return self._reading(lambda engine: _Moment(self, engine, engine.snapshot()))

    def info(self) -> EngineInfo:
        """Return the sizes of the engine that is there."""
        return self._reading(lambda engine: engine.info())

    def sql(self, statement: str, parameters: Sequence[Any] = (), *, beside: Sequence[Engine] = ()) -> pa.Table:
        """Run a statement on the engine that is there, and on those that are there of ``beside``."""
        return self._reading(lambda engine: engine.sql(statement, parameters, beside=list(map(_present, beside))))

    def verify(self) -> Iterator[str]:
        """Yield a sentence for each damaged place; `EngineError` if the engine is replaced meanwhile."""
        engine = self._engine
        yield from self.ended(engine, engine.verify())

    def checkpoint(self, path: Path) -> None:
        """Write a copy of the shard, as it is now, into the new directory ``path``."""
        for _ in self.checkpoint_steps(path):
            pass

    def checkpoint_steps(self, path: Path) -> Generator[None]:
        """Do the work of `checkpoint` in steps; raise `EngineError` if the engine is replaced meanwhile."""
        engine = self._engine
        yield from self.ended(engine, engine.checkpoint_steps(path))

    def ended(self, engine: Engine, steps: Iterator[T]) -> Generator[T]:
        """Yield what ``steps`` of an engine yield; raise `EngineError` if another engine has taken its place."""
        try:
            yield from steps
        except DatabaseClosedError as closed:
            raise self.replaced(engine, closed) from closed

    def replaced(self, engine: Engine, closed: DatabaseClosedError) -> EngineError:
        """Return the error of a view of an engine in whose place there is another one. Raises as `_after`."""
        self._after(engine, closed)
        return EngineError("the shard was closed and opened again meanwhile, because a write failed; read again")

    def write(self, batch: WriteBatch, *, sync: bool = False) -> None:
        """Apply the batch in the engine that is there."""
        self._engine.write(batch, sync=sync)

    def flush_log(self) -> None:
        """Return when everything written so far is on disk."""
        self._engine.flush_log()

    def recover(self) -> bool:
        """Return whether the engine that is there takes writes again."""
        return self._engine.recover()

    def reclaim(self, keyspace: Keyspace[K], start: K, end: K) -> None:
        """Free the disk space of a range that was deleted."""
        self._engine.reclaim(keyspace, start, end)

    def close(self) -> None:
        """Close the engine that is there. May be called twice."""
        self._engine.close()
