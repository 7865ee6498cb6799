"""Promises about visibility: a stored message is seen at once or, with epochs, within one, never in another order.

Layouts with epochs hide the one that is being written. `read` shows it when it is over; a replay waits for that.
Epochs are so long that none ends except by the clock that the test sets.
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
from topicstore_conformance.conditions.profiles import COSTLY, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.database.following import Follower, epoch_of
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.oracle.checks import check_replay, follow_epochs
from topicstore_conformance.oracle.model import Model, Row
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Visibility"]

LONG = 30
"""The number of bits of an epoch's microseconds: eighteen minutes."""
LENGTH = 1 << LONG
BEGIN = START >> LONG << LONG
"""The time at which a long epoch begins."""
TOPICS = [f"t/{level}/{end}" for level in "abcdefgh" for end in "xy"]


def opened(pair: Pair, path: Path, clock: Callable[[], int], **arguments: Any) -> ts.Database:
    """Return a new database whose layout learns early, with long epochs if it has any."""
    return pair.open(path, options={pair.layout: pair.small(epoch_bits=LONG)}, clock=clock, **arguments)


def reopened(path: Path, clock: Callable[[], int]) -> ts.Database:
    """Open a database again, whose last position may lie in the future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ts.open(path, clock=clock)


def some(number: int, count: int = 8) -> list[Message]:
    """Return messages of many topics and a few publishers."""
    return [
        Message(TOPICS[(5 * number + 3 * n) % len(TOPICS)], b"%d/%d" % (number, n), f"c{n % 3}") for n in range(count)
    ]


@attrs.define
class Life:
    """A database with long epochs, its model, and a follower."""

    path: Path
    db: ts.Database
    model: Model
    clock: Clock
    follower: Follower = attrs.field(factory=Follower)

    def store(self, amount: int) -> None:
        """Store a few messages, with the present as their own time."""
        messages = [
            msgspec.structs.replace(message, timestamp=self.clock.now)
            for message in some(len(self.model.rows), 1 + amount % 12)
        ]
        rows = self.model.store(messages, self.clock.now)
        assert [row.id for row in rows] == self.db.store(messages).ids

    def jump(self, amount: int) -> None:
        """Set the clock forward or back, within the epoch or into another."""
        self.clock.now += (amount - 40) * (LENGTH // 8)

    def tick(self, amount: int) -> None:
        """Let the clock go on a little, or stand still."""
        self.clock.now += amount // 20

    def add_generation(self, amount: int) -> None:
        """Begin a generation at any point of the epoch."""
        if len(self.model.generations) < 5:
            assert self.model.add_generation(self.model.layout) == self.db.add_generation()

    def reopen(self, amount: int) -> None:
        """Close and open the database at any point of the epoch."""
        if self.path.exists():
            self.db.close()
            self.db = reopened(self.path, self.clock)

    def finish(self, amount: int) -> None:
        """End the epoch, by the clock or by a message of the next one; nothing is hidden afterwards."""
        ends = [end_of(time_of(shard.writer.tail.last_position)) for shard in self.db.storage.shards]
        self.clock.now = max(self.clock.now, *ends)
        if self.model.timestamps == "message":
            self.store(30)
        else:
            check_replay(self.db, self.model, "#", batch_size=1 + amount)
            check_replay(self.db, self.model, "t/+/x", order="time")

    def look(self, amount: int) -> None:
        """Let the follower read on; check that it then has every message that no hidden epoch holds back."""
        self.follower.read(self.db, 1 + amount % 7)
        rows = {row.id: row for row in self.model.rows}
        ids = self.follower.ids
        assert {id_ for id_, row in rows.items() if self.must_be_seen(row)} <= ids <= set(rows)
        self.follower.check_order(self.db)
        follow_epochs(self.db, self.model)

    def must_be_seen(self, row: Row) -> bool:
        """Return whether no message that belongs before a row can be stored any more."""
        epoch = epoch_of(self.db, row.generation, row.shard)
        if epoch == 1 or self.model.generations[row.generation].sealed:
            return True
        if row.position // epoch < (self.db.storage.shards[row.shard].writer.tail.last_position + 1) // epoch:
            return True
        return self.model.timestamps == "commit" and end_of(time_of(row.position)) <= self.clock.now


def end_of(moment: int) -> int:
    """Return the end of the long epoch in which a time lies."""
    return (moment >> LONG) + 1 << LONG


_steps = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "tick", "jump", "add_generation", "reopen", "finish", "look")),
        st.integers(0, 80),
    ),
    max_size=25,
)


class Visibility(Fixtures):
    """Promises about when stored messages become visible."""

    @pytest.mark.parametrize("timestamps", ["commit", "message"])
    def test_nothing_is_skipped_or_reordered(self, pair: Pair, timestamps: str) -> None:
        """A follower sees each epoch when it is over, once and in order, whatever the clock and restarts do."""

        @settings(COSTLY, max_examples=tries(5, 25, pair.capabilities))
        @given(_steps, st.sampled_from(("commit", "sync")), st.sampled_from((1, 2)))
        def check(steps: list[tuple[str, int]], durability: str, shards: int) -> None:
            with quick_directory() as directory:
                path, clock = Path(directory, "db"), Clock(BEGIN)
                how: dict[str, Any] = {"timestamps": timestamps, "late": "lift"}
                db = opened(pair, path, clock, durability=durability, shards=shards, **how)
                life = Life(path, db, Model(shards=shards, shard_of=db.shard_of, layout=pair.layout, **how), clock)
                try:
                    for name, amount in [*steps, ("finish", 3), ("look", 5)]:
                        getattr(life, name)(amount)
                        life.look(amount)
                finally:
                    life.db.close()

        check()
