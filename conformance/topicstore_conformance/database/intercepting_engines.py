"""Engines between a database and its real one, with which a test can hold up or refuse calls."""

from __future__ import annotations

import threading
from typing import Any

import topicstore as ts
from topicstore.contract.engine import Engine

from topicstore_conformance.faults.threads import PATIENCE

__all__ = ["Full", "Gate", "Turnstile", "replace_engine"]


class Gate:
    """An engine whose flushes wait at a gate, so that a test can act meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.flushing, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def flush_log(self) -> None:
        """Flush once the gate is open."""
        self.flushing.set()
        assert self.open.wait(PATIENCE)
        self._engine.flush_log()


class Turnstile(Gate):
    """A gate that lets through as many flushes as it is told to."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.begun = 0
        self._passes = threading.Semaphore(0)

    def flush_log(self) -> None:
        """Flush once this flush is let through."""
        self.begun += 1  # a shard never flushes twice at once
        assert self._passes.acquire(timeout=PATIENCE)
        self._engine.flush_log()

    def let_through(self, flushes: int = 1) -> None:
        """Let this many flushes through."""
        self._passes.release(flushes)


class Full:
    """An engine whose disk is full: the calls that it is told to refuse fail."""

    def __init__(self, engine: Engine, refused: str) -> None:
        self._engine = engine
        self._refused = refused

    def __getattr__(self, name: str) -> Any:
        return self._refuse if name == self._refused else getattr(self._engine, name)

    def _refuse(self, *_: object, **__: object) -> None:
        raise ts.StorageFullError("no room")


def replace_engine(db: ts.Database, engine: Engine | Gate | Full) -> None:
    """Give the only shard of a database another engine."""
    db.storage.shards[0].writer.engine = engine  # type: ignore[assignment]
