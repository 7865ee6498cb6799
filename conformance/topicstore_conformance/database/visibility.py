"""Tests of visibility: a stored message is visible immediately or, in a layout with epochs, when its epoch ends.

Layouts with epochs hide the current epoch's messages: `read` returns them once the epoch has ended, and a replay waits
for its end. The tests' epochs are so long that they end only when the test advances its clock.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message
from topicstore.contract.positions import time_of

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import COSTLY
from topicstore_conformance.conditions.tries import tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.database.following import Follower, epoch_of
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.oracle.checks import check_replay, follow_epochs
from topicstore_conformance.oracle.model import Model, Row
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Visibility"]

LONG = 30
"""The binary logarithm of an epoch's length in microseconds: an epoch lasts eighteen minutes."""
LENGTH = 1 << LONG
BEGIN = START >> LONG << LONG
"""The time at which a long epoch begins."""
TOPICS = [f"t/{level}/{end}" for level in "abcdefgh" for end in "xy"]


def opened(pair: Pair, path: Path, clock: Callable[[], int], **arguments: Any) -> ts.Database:
    """Create a database whose layout learns topics after few messages, with long epochs if it has epochs."""
    return pair.open(path, options={pair.layout: pair.small(epoch_bits=LONG)}, clock=clock, **arguments)


def reopened(pair: Pair, path: Path, clock: Callable[[], int]) -> ts.Database:
    """Open a database again, and ignore the warning that its last position lies in the future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return pair.reopen(path, clock=clock)


def some(number: int, count: int = 8) -> list[Message]:
    """Return ``count`` messages of many topics and three publishers; ``number`` makes their payloads unique."""
    return [
        Message(TOPICS[(5 * number + 3 * n) % len(TOPICS)], b"%d/%d" % (number, n), f"c{n % 3}") for n in range(count)
    ]


@attrs.define
class Life:
    """A database with long epochs, its model, and a follower."""

    pair: Pair
    path: Path
    db: ts.Database
    model: Model
    clock: Clock
    follower: Follower = attrs.field(factory=Follower)

    def store(self, amount: int) -> None:
        """Store up to twelve messages whose timestamps are the current time."""
        messages = [
            msgspec.structs.replace(message, timestamp=self.clock.now)
            for message in some(len(self.model.rows), 1 + amount % 12)
        ]
        rows = self.model.store(messages, self.clock.now)
        assert [row.id for row in rows] == self.db.store(messages).ids

    def jump(self, amount: int) -> None:
        """Set the clock forward or back, within the epoch or into another epoch."""
        self.clock.now += (amount - 40) * (LENGTH // 8)

    def tick(self, amount: int) -> None:
        """Advance the clock by up to four microseconds."""
        self.clock.now += amount // 20

    def add_generation(self, amount: int) -> None:
        """Add a generation, within an epoch or between two, up to five in all."""
        if len(self.model.generations) < 5:
            assert self.model.add_generation(self.model.layout) == self.db.add_generation()

    def reopen(self, amount: int) -> None:
        """Close the database and open it again, if it is persistent."""
        if self.path.exists():
            self.db.close()
            self.db = reopened(self.pair, self.path, self.clock)

    def finish(self, amount: int) -> None:
        """End the epoch, by the clock or by a message of a later one; replays then return all messages."""
        ends = [end_of(time_of(shard.writer.tail.last_position)) for shard in self.db.storage.shards]
        self.clock.now = max(self.clock.now, *ends)
        if self.model.timestamps == "message":
            self.store(30)
        else:
            check_replay(self.db, self.model, "#", batch_size=1 + amount)
            check_replay(self.db, self.model, "t/+/x", order="time")

    def look(self, amount: int) -> None:
        """Let the follower read to the visible end; check that it has read every message outside a hidden epoch."""
        self.follower.read(self.db, 1 + amount % 7)
        rows = {row.id: row for row in self.model.rows}
        ids = self.follower.ids
        assert {id_ for id_, row in rows.items() if self.must_be_seen(row)} <= ids <= set(rows)
        self.follower.check_order(self.db)
        follow_epochs(self.db, self.model)

    def must_be_seen(self, row: Row) -> bool:
        """Return whether a row's epoch has ended, so that readers must see the row."""
        epoch = epoch_of(self.db, row.generation, row.shard)
        if epoch == 1 or self.model.generations[row.generation].sealed:
            return True
        if row.position // epoch < (self.db.storage.shards[row.shard].writer.tail.last_position + 1) // epoch:
            return True
        return self.model.timestamps == "commit" and end_of(time_of(row.position)) <= self.clock.now


def end_of(moment: int) -> int:
    """Return the end (exclusive) of the long epoch that contains a time, in microseconds."""
    return (moment >> LONG) + 1 << LONG


_steps = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "tick", "jump", "add_generation", "reopen", "finish", "look")),
        st.integers(0, 80),
    ),
    max_size=25,
)


class Visibility(Fixtures):
    """Tests of the time at which stored messages become visible."""

    @pytest.mark.parametrize("timestamps", ["commit", "message"])
    def test_nothing_is_skipped_or_reordered(self, pair: Pair, timestamps: str) -> None:
        """A follower reads each message once and in order after its epoch ends, despite clock jumps and restarts."""

        @settings(COSTLY, max_examples=tries(5, 25, pair.capabilities))
        @given(_steps, st.sampled_from(("commit", "sync")), st.sampled_from((1, 2)))
        def check(steps: list[tuple[str, int]], durability: str, shards: int) -> None:
            with quick_directory() as directory:
                path, clock = Path(directory, "db"), Clock(BEGIN)
                how: dict[str, Any] = {"timestamps": timestamps, "late": "lift"}
                db = opened(pair, path, clock, durability=durability, shards=shards, **how)
                model = Model(shards=shards, shard_of=db.shard_of, layout=pair.layout, **how)
                life = Life(pair, path, db, model, clock)
                try:
                    for name, amount in [*steps, ("finish", 3), ("look", 5)]:
                        getattr(life, name)(amount)
                        life.look(amount)
                finally:
                    life.db.close()

        check()
