"""Parts that the state machines of sessions share: a database with a clock, crashes, and kills at engine writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import topicstore as ts
from hypothesis.stateful import RuleBasedStateMachine
from topicstore.pubsub.publish import Publisher
from topicstore.runtime.clocks import SteadyClock
from topicstore.sessions.session_store import SessionState

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.faults.clock import Clock
from topicstore_conformance.faults.striking import Fault, striking
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["SessionsMachine", "World", "forget_sessions", "shows_at_once", "stored_keys"]


def forget_sessions(db: ts.Database) -> None:
    """Discard the sessions' state in memory, so that the database loads committed state, as the next process would."""
    publisher = Publisher(db.storage)
    publisher._hub = db._publisher.hub
    db._made_publisher, db._sessions, db.storage.steady = publisher, None, SteadyClock(db.storage.clocks)


class World:
    """A database in a directory of its own, with a clock, that can be reopened, crash, be killed, or fail to write."""

    def __init__(self, pair: Pair, shards: int) -> None:
        self._temporary = quick_directory()
        self.path = Path(self._temporary.name) / "db"
        self.clock = Clock()
        self._pair, self._shards = pair, shards
        self.open()

    def open(self) -> None:
        """Open the database with this object's clock, which advances by the millisecond that an opening takes.

        Otherwise positions, which are at least a microsecond apart in some layouts, would be ahead of the clock.
        """
        self.clock.now += 1_000
        clocks: dict[str, Any] = {"clock": self.clock, "monotonic": self.clock.monotonic}
        self.db = self._pair.open(self.path, shards=self._shards, auto_compact=False, **clocks)

    def reopen(self) -> None:
        """Close the database, and open it again."""
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
            return {**full, **commit(self, {shard: by_shard[shard] for shard in by_shard if shard not in full})}

        with patch.object(SessionState, "commit", fail):
            yield

    @contextmanager
    def dying(self, death: Fault) -> Iterator[None]:
        """Kill the process during or after one of the engine's writes within the block, then reopen the database."""
        left, engines = self.path.with_name("left"), [shard.writer.engine for shard in self.db.storage.shards]
        with striking(death, engines, self.path, left):
            yield
        self.become(left)

    def become(self, copy: Path) -> None:
        """Replace the database's directory with a copy of it, and open the database again."""
        self.db.close()
        shutil.rmtree(self.path)
        copy.rename(self.path)
        self.open()

    def close(self) -> None:
        """Close the database, and remove its directory."""
        self.db.close()
        self._temporary.cleanup()


class SessionsMachine(RuleBasedStateMachine):
    """A state machine over the sessions of a database with this pair and number of shards."""

    pair: Pair
    shards = 2

    @property
    def ordered(self) -> bool:
        """Whether messages of one publisher arrive in order across all topics, not only within each topic."""
        return "position_order" in self.pair.capabilities

    @property
    def persistent(self) -> bool:
        """Whether the database can be closed and opened again, and killed."""
        return "persistent" in self.pair.capabilities


def shows_at_once(db: ts.Database) -> bool:
    """Return whether cursors see messages as soon as they are stored, because the layout has no epochs."""
    generations = db.storage.shards[0].generations
    return generations.slab(generations.current).epoch == 1


def stored_keys(db: ts.Database) -> list[bytes]:
    """Return the keys of all stored framework state, of sessions and others."""
    return [key for shard in range(len(db.storage.shards)) for key, _ in db.state(shard).scan(b"\1")]
