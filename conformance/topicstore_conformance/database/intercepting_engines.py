"""Wrappers around a database's engine, with which a test can block or fail calls."""

from __future__ import annotations

import threading
from typing import Any

import topicstore as ts
from topicstore.contract.engine import Engine

from topicstore_conformance.faults.threads import PATIENCE

__all__ = ["Full", "Gate", "Turnstile", "replace_engine"]


class Gate:
    """An engine wrapper whose flushes block until the test sets ``open``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.flushing, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def flush_log(self) -> None:
        """Set ``flushing``, wait until ``open`` is set, and flush."""
        self.flushing.set()
        assert self.open.wait(PATIENCE)
        self._engine.flush_log()


class Turnstile(Gate):
    """An engine wrapper whose flushes block until the test permits each of them."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.begun = 0
        self._passes = threading.Semaphore(0)

    def flush_log(self) -> None:
        """Flush once a permit is available, and use it up."""
        self.begun += 1  # a shard never has two flushes at the same time
        assert self._passes.acquire(timeout=PATIENCE)
        self._engine.flush_log()

    def let_through(self, flushes: int = 1) -> None:
        """Permit this many flushes, blocked or future ones."""
        self._passes.release(flushes)


class Full:
    """An engine wrapper in which one method, named by the test, raises StorageFullError."""

    def __init__(self, engine: Engine, refused: str) -> None:
        self._engine = engine
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._refused else getattr(self._engine, name)

    def _refuse(self, *_: object, **__: object) -> None:
        raise ts.StorageFullError("no room")


def replace_engine(db: ts.Database, engine: Engine | Gate | Full) -> None:
    """Replace the engine of a database's only shard."""
    db.storage.shards[0].writer.engine = engine  # type: ignore[assignment]
