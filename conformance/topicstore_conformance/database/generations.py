"""Promises about generations: added, dropped and finished by the next open, over all shards or not at all."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message
from topicstore.contract.engine import DATA, INDEX, KEYS, META, encode_generation

from topicstore_conformance.conditions.capabilities import requires, without
from topicstore_conformance.conditions.directories import quick_directory
from topicstore_conformance.conditions.profiles import MODE, full, tries
from topicstore_conformance.database.fixtures import Fixtures
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.faults.crash import Job, Ledger, run_and_kill
from topicstore_conformance.oracle.checks import check_all, check_replay, follow_epochs, replayed
from topicstore_conformance.oracle.model import Model
from topicstore_conformance.subjects.pairs import Pair, layouts_on, small_options

__all__ = ["Generations"]
CLIENTS = [f"c{number}" for number in range(12)]


def some(text: str) -> list[Message]:
    """Return a message of every client, and so of every shard."""
    return [Message(f"t/{number % 3}", text.encode(), client) for number, client in enumerate(CLIENTS)]


def opened(pair: Pair, path: Path, shards: int = 3) -> tuple[ts.Database, Model]:
    """Return a new database and its model."""
    db = pair.open(path, shards=shards, clock=lambda: START)
    return db, Model(shards=shards, shard_of=db.shard_of, layout=pair.layout)


def store(db: ts.Database, model: Model, messages: list[Message]) -> None:
    """Store messages in the database and in the model."""
    assert [row.id for row in model.store(messages, START)] == db.store(messages).ids


def thresholds(pair: Pair) -> dict[str, dict[str, Any]]:
    """Return the options that make the layout learn early."""
    return {pair.layout: pair.small()}


class Generations(Fixtures):
    """Promises about how generations begin and end, and what they inherit."""

    def test_each_keeps_its_layout(self, pair: Pair, directory: Path) -> None:
        """Generations of different layouts are read together, and each keeps the layout that it was created with."""
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("first"))
            for layout in layouts_on(pair.backend):
                assert model.add_generation(layout) == db.add_generation(layout)
                store(db, model, some(layout))
            assert [pair.layout, *layouts_on(pair.backend)] == [info.layout for info in db.generations()]
            check_all(db, model)

    @pytest.mark.parametrize("compacted", [pytest.param(False, marks=full), True])
    def test_order_over_layouts_and_shards(self, pair: Pair, directory: Path, compacted: bool) -> None:
        """``order="time"`` merges shards and generations exactly, of layouts with and without order of positions."""
        clock = Clock()
        with pair.open(directory / "db", shards=3, clock=clock, options=thresholds(pair)) as db:
            model = Model(shards=3, shard_of=db.shard_of, layout=pair.layout)
            names = layouts_on(pair.backend)
            for number, layout in enumerate([pair.layout, *names, *reversed(names)]):
                if number:
                    assert model.add_generation(layout) == db.add_generation(layout, small_options(layout))
                for part in range(5):
                    clock.now += (0, 1, 700, 2_500, 1)[part]  # within an epoch, and across its end
                    messages = [
                        Message(f"t/{n % 4}/{'xyz'[(n + part) % 3]}", b"%d/%d" % (part, n), CLIENTS[n % 12])
                        for n in range(40)
                    ]
                    assert [row.id for row in model.store(messages, clock.now)] == db.store(messages).ids
                if compacted and number % 2:
                    db.compact()
                follow_epochs(db, model)
            times = sorted({row.position >> 11 for row in model.rows})
            early, middle, late = (times[len(times) * part // 8] for part in (2, 3, 7))
            for topic_filter in ("#", "t/1/+", "t/+/x", "t/2/y"):
                check_replay(db, model, topic_filter, order="time", batch_size=64)
                check_replay(db, model, topic_filter, early, late, "time", 16 if MODE == "quick" else 1)
                check_replay(db, model, topic_filter, middle + 1, times[times.index(middle) + 1] + 1, "time", 7)
                check_replay(db, model, topic_filter, times[-1], None, "time", 4096)
            check_all(db, model)

    def test_times_of_generations(self, pair: Pair, directory: Path) -> None:
        """A generation records when it was made and sealed, and a time range over several finds all that they hold."""
        now = [START]
        with pair.open(directory / "db", clock=lambda: now[0]) as db:
            for number in range(3):
                db.store([Message("a", b"%d" % number)])
                now[0] += 1_000_000
                db.add_generation()
            said = [(info.created, info.sealed) for info in db.generations()]
            ends = [START + 1_000_000 * number for number in range(4)]
            assert [*pairwise(ends), (ends[-1], None)] == said
            for first in range(3):
                for end in range(3):
                    got = [m.payload for m in db.replay("#", START + first * 1_000_000, START + end * 1_000_000)]
                    assert [b"%d" % number for number in range(first, end)] == got

    def test_a_publisher_stays_in_its_shard(self, pair: Pair, directory: Path) -> None:
        """A publisher's messages lie in one shard, the one that is reported, over all generations and openings."""
        shards: dict[str, set[int]] = {client: set() for client in CLIENTS}
        for opening in range(2 if "persistent" in pair.capabilities else 1):
            with pair.open(directory / "db", shards=3, clock=lambda: START) as db:
                for _ in range(2):
                    result = db.store([Message("a", b"%d" % opening, client) for client in CLIENTS])
                    for client, id_ in zip(CLIENTS, result.ids, strict=True):
                        shards[client] |= {id_.shard, db.shard_of(client)}
                    db.add_generation()
        assert [client for client, of in shards.items() if len(of) != 1] == []

    def test_dropping_twice(self, pair: Pair, directory: Path) -> None:
        """Dropping a generation twice does nothing; the current one and one that never existed can't be dropped."""
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("old"))
            with pytest.raises(ts.GenerationError, match="current"):
                db.drop_generation(1)
            db.add_generation()
            model.add_generation(pair.layout)
            store(db, model, some("new"))
            assert [True, False, False] == [db.drop_generation(1) for _ in range(3)]
            model.drop_generation(1)
            for never in (0, -1, 3, 2**32):
                with pytest.raises(ts.GenerationError, match="no generation"):
                    db.drop_generation(never)
            with pytest.raises(ts.GenerationError, match="current"):
                db.drop_generation(2)
            check_all(db, model)

    @requires("persistent")
    def test_stays_dropped(self, pair: Pair, directory: Path) -> None:
        """A dropped generation is gone after a restart too, and its number is not used again."""
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("1"))
            for text in "23":
                db.add_generation()
                model.add_generation(pair.layout)
                store(db, model, some(text))
            db.drop_generation(1)
            model.drop_generation(1)
        for _ in range(2):
            with ts.open(directory / "db", clock=lambda: START) as db:
                check_all(db, model)
                assert not db.drop_generation(1)
                assert model.add_generation(pair.layout) == db.add_generation()
                store(db, model, some("later"))

    @requires("persistent")
    @pytest.mark.parametrize("done", [1, 2])
    def test_interrupted_addition_goes_on(self, pair: Pair, directory: Path, done: int) -> None:
        """If only some shards got a new generation, opening gives it to the others, with its layout and options."""
        layout = layouts_on(pair.backend)[-1]
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("before"))
            for shard in db.storage.shards[-done:]:
                shard.add_generation(layout, {})
        model.add_generation(layout)
        with ts.open(directory / "db", clock=lambda: START) as db:
            assert [2, 2, 2] == [shard.current for shard in db.storage.shards]
            store(db, model, some("after"))
            check_all(db, model)
            assert db.drop_generation(1)
            model.drop_generation(1)
            check_all(db, model)

    @requires("persistent")
    @pytest.mark.parametrize("done", [1, 2])
    @pytest.mark.parametrize("removed", [True, False])
    def test_interrupted_drop_goes_on(self, pair: Pair, directory: Path, done: int, removed: bool) -> None:
        """If only some shards have dropped a generation, opening drops it everywhere."""
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("old"))
            db.add_generation()
            model.add_generation(pair.layout)
            store(db, model, some("new"))
            for shard in db.storage.shards[:done]:
                assert shard.drop_generation(1)
                if removed:
                    shard.remove_dropped()
        model.drop_generation(1)
        for _ in range(2):
            with ts.open(directory / "db", clock=lambda: START) as db:
                check_all(db, model)
                assert not db.drop_generation(1)

    @requires("persistent")
    def test_tombstone_is_removed_at_open(self, pair: Pair, directory: Path) -> None:
        """A removal interrupted after its tombstone was written leaves nothing in the engine after the next open."""
        db, _ = opened(pair, directory / "db", shards=1)
        with db:
            db.store(some("old"))
            db.add_generation()
            assert db.storage.shards[0].drop_generation(1)
            assert [] == list(db.replay("#"))
        with ts.open(directory / "db", clock=lambda: START) as db:
            engine = db.storage.shards[0].engine()
            for numbers in (DATA, INDEX):
                assert [] == list(engine.scan(numbers, (1, 0, 0), (2, 0, 0)))
            for names in (META, KEYS):
                assert [] == list(engine.scan(names, encode_generation(1), encode_generation(2)))

    @requires("persistent")
    def test_killed_while_adding_and_dropping(self, pair: Pair) -> None:
        """After a process was killed while it added and dropped generations, all shards agree on them."""
        with quick_directory() as directory:
            ledger = Ledger()
            for kill in range(tries(1, 6, pair.capabilities)):
                job = Job(
                    path=f"{directory}/db",
                    backend=pair.backend,
                    layout=pair.layout,
                    shards=3,
                    durability="commit",
                    seed=kill,
                    first=ledger.next_number,
                    churn=True,
                    options=pair.small(),
                )
                for step in run_and_kill(job, 12 + 7 * kill, 7 * kill % 15):
                    ledger.hear(step)
                with ts.open(f"{directory}/db") as db:
                    ledger.check(db, replayed(db))
                    assert 1 == len(
                        {tuple(record.number for record in shard.generations()) for shard in db.storage.shards}
                    )
                    assert [] == db.verify().damages

    @requires("few_streams")
    def test_few_streams(self, pair: Pair, directory: Path) -> None:
        """Many topics make few streams, and every message is in one that its filter lists."""
        topics = [f"site/{number % 4}/device-{number}/temperature" for number in range(200)]
        with pair.open(directory / "db", options=thresholds(pair)) as db:
            db.store([Message(topic, b"x", "c") for topic in topics])
            assert len(db.streams("#")) < 30
            for topic in topics[::13]:
                assert [topic] == [message.topic for message in db.replay(topic)]

    @requires("few_streams")
    def test_learned_structure_is_inherited(self, pair: Pair, directory: Path) -> None:
        """A new generation has the wildcards that the one before has learned: few streams from its first message on."""
        topics = [f"site/{number % 4}/device-{number}/temperature" for number in range(200)]
        others = [f"site/{number % 4}/other-{number}/temperature" for number in range(200)]
        with pair.open(directory / "db", options=thresholds(pair)) as db:
            db.store([Message(topic, b"x", "c") for topic in topics])
            before = len(db.streams("#"))
            db.add_generation()
            db.store([Message(topic, b"y", "c") for topic in others])
            new = [stream for stream in db.streams("#") if stream.generation == 2]
            assert len(new) < before or before == 1  # a layout that learns has fewer streams: it knows the wildcards
            assert others == [message.topic for message in db.replay("#", order="time") if message.payload == b"y"]

    @requires("persistent", "few_streams")
    @pytest.mark.parametrize("restarts", [1, 2])
    def test_learned_structure_is_inherited_over_restarts(self, pair: Pair, directory: Path, restarts: int) -> None:
        """Inherited structure is there before a new generation's first message, and after restarts."""
        topics = [f"site/{number % 4}/device-{number}/temperature" for number in range(200)]
        with pair.open(directory / "db", options=thresholds(pair)) as db:
            db.store([Message(topic, b"x", "c") for topic in topics])
            before = len(db.streams("#"))
            db.add_generation()
        for restart in range(restarts):
            with ts.open(directory / "db") as db:
                db.store([Message(f"site/{n % 4}/new-{restart}-{n}/temperature", b"y", "c") for n in range(100)])
                new = [stream for stream in db.streams("#") if stream.generation == 2]
                assert len(new) < before or before == 1
        with ts.open(directory / "db") as db:
            assert 200 + restarts * 100 == sum(1 for _ in db.replay("#"))
            assert restarts * 25 == sum(1 for message in db.replay("site/1/+/temperature") if message.payload == b"y")
            assert [] == db.verify().damages

    @requires("checkpoint")
    def test_checkpoint(self, pair: Pair, directory: Path) -> None:
        """A checkpoint is an independent database with what was stored before it, and nothing stored later."""
        db, model = opened(pair, directory / "db")
        with db:
            store(db, model, some("old"))
            db.add_generation()
            model.add_generation(pair.layout)
            store(db, model, some("new"))
            cursor = db.cursor(db.streams("#")[0], "#").to_bytes()
            db.checkpoint(directory / "copy")
            db.store(some("later"))
            with pytest.raises(ts.NotADatabaseError):
                db.checkpoint(directory / "copy")
        with ts.open(directory / "copy", clock=lambda: START) as copy:
            check_all(copy, model)
            assert 0 < len(copy.read(ts.Cursor.from_bytes(cursor)).batch)
            store(copy, model, some("its own"))
            check_all(copy, model)

    @without("checkpoint")
    def test_no_checkpoint(self, pair: Pair, directory: Path) -> None:
        """A checkpoint is refused on a backend that can't make one, and makes no directory."""
        with pair.open(directory / "db") as db, pytest.raises(ts.UnsupportedError):
            db.checkpoint(directory / "copy")
        assert not (directory / "copy").exists()
