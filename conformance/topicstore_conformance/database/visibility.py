"""Promises about visibility: a stored message is seen at once or, with epochs, within one, never in another order.

Layouts with epochs hide the one that is being written. ``next`` shows it when it is over; a replay
waits for that. Epochs are either so long that none ends during a test except by the clock that the
test sets, or so short that waiting for them costs little.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore import Message, MessageId
from topicstore.contract.positions import COUNTER_BITS, time_of

from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import COSTLY, tries
from topicstore_conformance.database.fixtures import Fixtures, both_durabilities, both_timestamps
from topicstore_conformance.database.intercepting_engines import Full, Gate, replace_engine
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.threads import PATIENCE, wait_until
from topicstore_conformance.oracle.checks import check_replay, drain, follow_epochs, replayed
from topicstore_conformance.oracle.model import Model, Row
from topicstore_conformance.subjects.pairs import Pair

__all__ = ["Visibility"]

LONG, SHORT = 30, 16
"""The number of bits of an epoch's microseconds: eighteen minutes, and 66 milliseconds."""
LENGTH = 1 << LONG
BEGIN = START >> LONG << LONG
"""The time at which a long epoch begins."""
TOPICS = [f"t/{level}/{end}" for level in "abcdefgh" for end in "xy"]
Place = tuple[int, int, int]


def opened(pair: Pair, path: Path, clock: Callable[[], int], bits: int = LONG, **arguments: Any) -> ts.Database:
    """Return a new database whose layout learns early, with epochs of a length if it has any."""
    return pair.open(path, options={pair.layout: pair.small(epoch_bits=bits)}, clock=clock, **arguments)


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


def epoch_of(db: ts.Database, generation: int, shard: int = 0) -> int:
    """Return how many positions an epoch of a generation has: 1 if the layout has no epochs."""
    return db.storage.shards[shard].slab(generation).epoch


def hides(db: ts.Database) -> bool:
    """Return whether the current generation has epochs."""
    return epoch_of(db, db.generations()[-1].number) > 1


@attrs.define
class Follower:
    """A reader of every stream as it grows, from saved cursors."""

    saved: dict[Place, bytes] = attrs.field(factory=dict)
    seen: dict[Place, list[MessageId]] = attrs.field(factory=dict)

    @property
    def ids(self) -> list[MessageId]:
        """Return the ids of all messages that were seen."""
        return [id_ for ids in self.seen.values() for id_ in ids]

    def read(self, db: ts.Database, limit: int = 1_000) -> None:
        """Read on, up to the end of what is visible."""
        for stream in db.streams("#"):
            place = stream.shard, stream.generation, stream.number
            saved = self.saved.get(place)
            cursor = db.cursor(stream, "#") if saved is None else ts.Cursor.from_bytes(saved)
            rows, cursor, _ = drain(db, cursor, limit)
            self.seen.setdefault(place, []).extend(id_ for id_, _ in rows)
            self.saved[place] = cursor.to_bytes()

    def check_order(self, db: ts.Database, rows: dict[MessageId, Row]) -> None:
        """Check that each stream's messages came, over the follower's life, in an order that the layout allows."""
        for (shard, generation, _), ids in self.seen.items():
            epochs = [id_.position // epoch_of(db, generation, shard) for id_ in ids]
            assert sorted(epochs) == epochs
            last: dict[tuple[str, str], int] = {}
            for id_ in ids:
                message = rows[id_].message
                of = message.client_id, message.topic
                assert last.get(of, -1) < id_.position
                last[of] = id_.position


# --- random histories -------------------------------------------------------------------------


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
        ends = [end_of(time_of(shard.last_position)) for shard in self.db.storage.shards]
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
        assert len(set(self.follower.ids)) == len(self.follower.ids)
        assert {id_ for id_, row in rows.items() if self.must_be_seen(row)} <= set(self.follower.ids) <= set(rows)
        self.follower.check_order(self.db, rows)
        follow_epochs(self.db, self.model)

    def must_be_seen(self, row: Row) -> bool:
        """Return whether no message that belongs before a row can be stored any more."""
        epoch = epoch_of(self.db, row.generation, row.shard)
        if epoch == 1 or self.model.generations[row.generation].sealed:
            return True
        if row.position // epoch < (self.db.storage.shards[row.shard].last_position + 1) // epoch:
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

    @both_timestamps
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

    # --- single situations ------------------------------------------------------------------------

    @both_durabilities
    def test_an_epoch_is_seen_when_it_is_over(self, pair: Pair, directory: Path, durability: str) -> None:
        """A stored message is seen at once or, with epochs, as soon as the clock is past the end of its epoch."""
        clock = Clock(BEGIN + 5)
        with opened(pair, directory / "db", clock, durability=durability) as db:
            stored = db.store(some(1)).ids + db.store(some(2)).ids
            follower = Follower()
            for now in (clock.now, BEGIN - LENGTH, BEGIN + LENGTH - 1):
                clock.now = now
                follower.read(db)
                assert hides(db) or sorted(stored) == sorted(follower.ids)
            assert not hides(db) or sorted(stored) != sorted(follower.ids)
            clock.now = BEGIN + LENGTH
            follower.read(db)
            assert sorted(stored) == sorted(follower.ids)
            assert sorted(stored) == sorted(id_ for id_, _ in replayed(db))

    @both_durabilities
    def test_nothing_comes_before_what_was_seen(self, pair: Pair, directory: Path, durability: str) -> None:
        """An epoch that was shown gets no more messages, even if the clock jumps back into it, or after a restart."""
        clock = Clock(BEGIN + LENGTH)
        path = directory / "db"
        with opened(pair, path, clock, durability=durability) as db:
            clock.now = BEGIN
            first = db.store(some(1)).ids
            clock.now = BEGIN + LENGTH
            assert sorted(first) == sorted(id_ for id_, _ in replayed(db))
            clock.now = BEGIN
            epoch = epoch_of(db, 1)
            later = db.store(some(2)).ids[0]
            assert epoch == 1 or later.position // epoch > first[-1].position // epoch
            if path.exists():
                db.close()
                with reopened(path, clock) as db:
                    assert db.store(some(3)).ids[0].position > later.position
                    db.add_generation()
                    assert sorted(id_ for id_, _ in replayed(db))[:8] == sorted(first)

    def test_a_generation_ends_its_epoch(self, pair: Pair, directory: Path) -> None:
        """Sealing a generation shows at once what its epoch hid, with the end of each stream."""
        clock = Clock(BEGIN)
        with opened(pair, directory / "db", clock) as db:
            old = db.store(some(1)).ids
            follower = Follower()
            follower.read(db)
            db.add_generation()
            new = db.store(some(2)).ids
            assert old[-1].position < new[0].position < BEGIN + LENGTH << COUNTER_BITS
            follower.read(db)
            assert sorted(old) == sorted(id_ for id_ in follower.ids if id_ in old)
            for (_, generation, _), saved in follower.saved.items():
                assert (generation == 1) == db.read(ts.Cursor.from_bytes(saved)).end_of_stream
            clock.now += LENGTH
            follower.read(db)
            assert sorted(old + new) == sorted(follower.ids)

    @both_durabilities
    @both_timestamps
    def test_short_epochs_in_real_time(self, pair: Pair, directory: Path, durability: str, timestamps: str) -> None:
        """With short epochs in real time a replay has everything, and a follower waits only a short time."""
        how = {"durability": durability, "timestamps": timestamps}
        path = directory / "db"
        with pair.open(path, options={pair.layout: pair.small(epoch_bits=SHORT)}, **how) as db:
            stored = []
            for number in range(20):
                stored += db.store(some(number)).ids
                assert sorted(stored) == sorted(id_ for id_, _ in replayed(db)) or number % 5
            follower = Follower()
            stored += db.store(some(20)).ids

            def has_all() -> bool:
                follower.read(db)
                return sorted(stored) == sorted(follower.ids)

            wait_until(has_all, "the end of a short epoch")

    @both_durabilities
    @both_timestamps
    def test_a_replay_waits_an_epoch_and_not_longer(
        self, pair: Pair, directory: Path, durability: str, timestamps: str
    ) -> None:
        """A replay waits for no more than one epoch, even if the clock stands still and others go on storing."""
        clock, done = Clock(BEGIN), threading.Event()
        how = {"durability": durability, "timestamps": timestamps}
        with opened(pair, directory / "db", clock, bits=SHORT, **how) as db, ThreadPoolExecutor() as threads:
            stored = db.store(some(0)).ids

            def write() -> None:
                number = 0
                while not done.wait(0.001):  # without a pause more would be stored meanwhile than the replays can check
                    number += 1
                    db.store(some(number, 1))

            writer = threads.submit(write)
            try:
                for _ in range(3):
                    found = threads.submit(replayed, db).result(PATIENCE)
                    assert set(stored) <= {id_ for id_, _ in found}
            finally:
                done.set()
            writer.result(PATIENCE)

    @pytest.mark.parametrize("other", ["replay", "store"])
    def test_two_replays_at_the_end_of_an_epoch(self, pair: Pair, directory: Path, other: str) -> None:
        """A replay has all that was there at its call, even while the end of an epoch, or the next, is flushed."""
        clock = Clock(BEGIN)
        with opened(pair, directory / "db", clock, durability="sync") as db, ThreadPoolExecutor() as threads:
            stored = db.store(some(1)).ids
            clock.now += LENGTH
            gate = Gate(db.storage.shards[0].engine())
            replace_engine(db, gate)
            first = threads.submit(db.store, some(2)) if other == "store" else threads.submit(replayed, db)
            assert (other == "replay" and not hides(db)) or gate.flushing.wait(PATIENCE)
            waits, epochs = threading.Event(), db.storage.shards[0]._epochs  # noqa: SLF001 - the suite looks inside
            end = epochs.end

            def told_of(*arguments: Any, **how: Any) -> None:
                waits.set()
                end(*arguments, **how)

            epochs.end = told_of  # type: ignore[method-assign]
            second = threads.submit(replayed, db)
            wait_until(lambda: waits.is_set() or second.done(), "the second replay to know where it ends")
            gate.open.set()
            assert sorted(stored) == sorted(id_ for id_, _ in second.result(PATIENCE))
            first.result(PATIENCE)

    @pytest.mark.parametrize("refused", ["write", "flush_log"])
    @pytest.mark.parametrize("first", ["store", "read"])
    def test_a_shard_that_takes_no_writes(self, pair: Pair, directory: Path, first: str, refused: str) -> None:
        """A stored message is read or reported as unreachable, never left out without an error; reopening shows it."""
        clock, path = Clock(BEGIN - LENGTH), directory / "db"
        follower = Follower()
        with opened(pair, path, clock, durability="sync") as db:
            stored = db.store(some(0)).ids
            clock.now = BEGIN
            stored += db.store(some(1)).ids
            hiding = hides(db)
            engine = db.storage.shards[0].engine()
            replace_engine(db, Full(engine, refused))
            clock.now += LENGTH
            if first == "store":
                with pytest.raises(ts.StorageFullError):
                    db.store(some(2))
            elif hiding:
                with pytest.raises(ts.StorageFullError):
                    follower.read(db)
            with pytest.raises(ts.RecoverableError) if hiding else contextlib.nullcontext():
                assert sorted(stored) == sorted(id_ for id_, _ in replayed(db))
            follower.read(db)
            assert set(stored[:8]) <= set(follower.ids) <= set(stored)
            assert hiding or sorted(follower.ids) == sorted(stored)
            assert (first == "store" or hiding) == (db.info().shards[0].failure is not None)
            replace_engine(db, engine)
        if path.exists():
            with reopened(path, clock) as db:
                known = {*stored, *db.store(some(3)).ids}
                clock.now += LENGTH
                whole = {id_ for id_, _ in replayed(db)}
                assert known <= whole
                assert len(whole) - len(known) in (0, 8 if first == "store" else 0)  # a failed batch may be there whole
                follower.read(db)
                assert sorted(whole) == sorted(follower.ids)

    @pytest.mark.parametrize("what", ["close", "add_generation", "store", "fail"])
    def test_who_waits_is_let_go(self, pair: Pair, directory: Path, what: str) -> None:
        """A replay that waits for a long epoch continues, or raises, as soon as the epoch can't go on."""
        clock, replaying, asked = Clock(BEGIN), set[int](), threading.Event()

        def now() -> int:
            if threading.get_ident() in replaying:
                asked.set()  # the replay has the shard's lock, asks how long the epoch still lasts, and waits
            return clock.now

        def replay() -> list[tuple[MessageId, Message]]:
            replaying.add(threading.get_ident())
            return replayed(db)

        db = opened(pair, directory / "db", now, durability="sync")
        with contextlib.closing(db), ThreadPoolExecutor() as threads:
            stored = db.store(some(1)).ids
            waiting = threads.submit(replay)
            if hides(db):
                assert asked.wait(PATIENCE)
            else:
                waiting.exception(PATIENCE)
            if what == "close":
                db.close()
            elif what == "add_generation":
                db.add_generation()
            elif what == "store":
                clock.now += LENGTH
                db.store(some(2))
            else:
                engine = db.storage.shards[0].engine()
                replace_engine(db, Full(engine, "write"))
                with pytest.raises(ts.StorageFullError):
                    db.store(some(2))
                replace_engine(db, engine)
            told = {"close": ts.DatabaseClosedError, "fail": ts.ShardReadOnlyError}.get(what)
            waited = waiting.exception(PATIENCE)
            assert waited is None or type(waited) is told
            if waited is None:
                assert sorted(stored) == sorted(id_ for id_, _ in waiting.result())
