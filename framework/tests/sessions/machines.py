"""Parts that the state machines of sessions share: a database with a clock, crashes, and kills at engine writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import topicstore as ts
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine
from topicstore.pubsub.publish import Publisher
from topicstore.runtime.clocks import SteadyClock
from topicstore.sessions.session_store import SessionState
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MACHINE, tries
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.striking import Fault, striking

__all__ = ["SessionsMachine", "World", "case", "forget_sessions", "stored_keys"]


def forget_sessions(db: ts.Database) -> None:
    """Discard the sessions' state in memory, so that the database loads committed state, as the next process would."""
    publisher = Publisher(db.storage)
    publisher._hub = db._publisher.hub
    db._made_publisher, db._sessions, db.storage.steady = publisher, None, SteadyClock(db.storage.clocks)


class World:
    """A database in a directory of its own, with a clock, that can be reopened, crash, be killed, or fail to write."""

    def __init__(self, **how: Any) -> None:
        self._temporary = quick_directory()
        self.path = Path(self._temporary.name) / "db"
        self.clock = Clock()
        self._how = how
        self.open()

    def open(self) -> None:
        clocks: dict[str, Any] = {"clock": self.clock, "monotonic": self.clock.monotonic}
        self.db = ts.open(self.path, auto_compact=False, **clocks, **self._how)

    def reopen(self) -> None:
        self.db.close()
        self.open()

    def crash(self) -> None:
        """Discard the sessions' state in memory, and load committed state as the next process would."""
        forget_sessions(self.db)

    @contextmanager
    def failing(self, failing: int) -> Iterator[None]:
        """Make one write of session state within the block fail: the write with this number, counted from 0."""
        commit, writes = SessionState.commit, count()

        def fail(
            self: SessionState, by_shard: Mapping[int, Sequence[ts.StateWrite]]
        ) -> Mapping[int, ts.TopicstoreError]:
            full = {shard: ts.StorageFullError("the disk is full") for shard in by_shard if next(writes) == failing}
            return full | commit(self, {shard: by_shard[shard] for shard in by_shard if shard not in full})

        with patch.object(SessionState, "commit", fail):
            yield

    @contextmanager
    def dying(self, death: Fault) -> Iterator[None]:
        """Kill the process during or after one of the engine's writes within the block, then reopen the database."""
        left, engines = self.path.with_name("left"), [shard.writer.engine for shard in self.db.storage.shards]
        with striking(death, engines, self.path, left):
            yield
        self.db.close()
        shutil.rmtree(self.path)
        left.rename(self.path)
        self.open()

    def close(self) -> None:
        self.db.close()
        self._temporary.cleanup()


class SessionsMachine(RuleBasedStateMachine):
    """A state machine over the sessions of a database with this layout, backend, options and number of shards."""

    layout, backend, shards = "block", "memory", 2
    options: ClassVar[dict[str, Any]] = {}
    ordered = True
    """Whether messages of one publisher arrive in order across all topics, not only within each topic."""
    at_once = True
    """Whether readers can see messages as soon as they are stored."""

    @property
    def how(self) -> dict[str, Any]:
        """The arguments that open the database."""
        options = {self.layout: self.options}
        return {"backend": self.backend, "layout": self.layout, "shards": self.shards, "options": options}


def stored_keys(db: ts.Database) -> list[bytes]:
    """Return the keys of all stored framework state, of sessions and others."""
    return [key for shard in range(len(db.storage.shards)) for key, _ in db.state(shard).scan(b"\1")]


def case(machine: type[SessionsMachine], quick: int, full: int, *, steps: int = 50) -> Any:
    """Return the pytest case of a machine, with a number of histories for the quick run and one for the full run.

    The quick number finds nearly all faults that a larger number finds.
    """
    found = pytest.mark.filterwarnings("ignore:shard .* its last position lies:UserWarning")(machine.TestCase)
    found.settings = settings(MACHINE, max_examples=tries(quick, full), stateful_step_count=steps)
    return found
