"""Generations over several shards: an interrupted addition or drop is finished in all shards by the next opening."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore.contract.engine import DATA, INDEX, KEYS, META, encode_generation
from topicstore_conformance.faults.clock import START, Clock
from topicstore_conformance.subjects.pairs import small_options

CLIENTS = [f"c{number}" for number in range(12)]
SHARDS = 3


@pytest.fixture
def db(tmp_path: Path) -> Iterator[ts.Database]:
    with ts.open(tmp_path / "db", shards=SHARDS) as opened:
        yield opened


def store(db: ts.Database, text: str) -> None:
    """Store a message of every client; each shard gets at least one."""
    db.store([ts.Message(f"t/{number % 3}", text.encode(), client) for number, client in enumerate(CLIENTS)])


def check(db: ts.Database, *texts: str) -> None:
    """Check that a database holds exactly one message of every client for each of these texts."""
    assert sorted(text.encode() for text in texts for _ in CLIENTS) == sorted(m.payload for m in db.replay("#"))
    assert (len(texts) * len(CLIENTS), []) == ((report := db.verify()).messages, report.damages)


def test_times_of_generations() -> None:
    """A generation records when it was created and sealed.

    Replays and stream lists omit generations that were sealed before the given start.
    """
    clock = Clock()
    with ts.open("memory", backend="memory", clock=clock) as db:
        for number in range(3):
            db.store([ts.Message("a", b"%d" % number)])
            clock.now += 1_000_000
            db.add_generation()
        ends = [START + 1_000_000 * number for number in range(4)]
        assert [*pairwise(ends), (ends[-1], None)] == [(each.created, each.sealed) for each in db.generations()]
        for first in range(3):
            assert first + 1 in {stream.generation for stream in db.streams("#", ends[first])}
            assert first + 1 not in {stream.generation for stream in db.streams("#", ends[first] + 1)}
            for end in range(3):
                got = [message.payload for message in db.replay("#", ends[first], ends[end])]
                assert [b"%d" % number for number in range(first, end)] == got


def test_a_publisher_stays_in_its_shard(tmp_path: Path) -> None:
    """All messages of a publisher are in the shard that `shard_of` returns, over all generations and openings."""
    shards: dict[str, set[int]] = {client: set() for client in CLIENTS}
    for _ in range(2):
        with ts.open(tmp_path / "db", shards=SHARDS) as db:
            for _ in range(2):
                result = db.store([ts.Message("a", b"", client) for client in CLIENTS])
                for client, id_ in zip(CLIENTS, result.ids, strict=True):
                    shards[client] |= {id_.shard, db.shard_of(client)}
                db.add_generation()
    assert [] == [client for client, of in shards.items() if len(of) != 1]
    assert set(range(SHARDS)) == {shard for of in shards.values() for shard in of}


def test_learned_structure_is_inherited(tmp_path: Path) -> None:
    """A new generation inherits the learned wildcards of the previous one, even after a restart."""
    with ts.open(tmp_path / "db", options={"block": small_options("block")}) as db:
        db.store([ts.Message(f"site/{n % 4}/device-{n}/temperature", b"x") for n in range(200)])
        before = len(db.streams("#"))
        db.add_generation()
    for restart in range(2):
        with ts.open(tmp_path / "db") as db:
            db.store([ts.Message(f"site/{n % 4}/new-{restart}-{n}/temperature", b"y") for n in range(100)])
            assert len([stream for stream in db.streams("#") if stream.generation == 2]) < before
            assert 25 * (restart + 1) == sum(m.payload == b"y" for m in db.replay("site/1/+/temperature"))


# --- dropping ---


def test_a_dropped_generation_stays_dropped(tmp_path: Path) -> None:
    """A dropped generation stays dropped after a restart, and its number is not used again."""
    with ts.open(tmp_path / "db", shards=SHARDS) as db:
        store(db, "old")
        assert 2 == db.add_generation()
        assert db.drop_generation(1)
    for number in (3, 4):
        with ts.open(tmp_path / "db") as db:
            check(db)
            assert not db.drop_generation(1)
            assert number == db.add_generation()


def test_what_reads_in_a_dropped_generation(db: ts.Database) -> None:
    """Cursors into a dropped generation raise an error, and so does a running replay; new cursors are refused."""
    db.store([ts.Message("a", b"%d" % number, "c") for number in range(5)])
    (stream,) = db.streams("#")
    never = db.cursor(stream, "#")
    once, ended = db.read(never, 1).cursor, db.read(never).cursor
    # With order="time", all messages may be in memory already.
    replay = db.replay("#", order="any", batch_size=1)
    assert b"0" == next(replay).payload
    db.add_generation()
    db.store([ts.Message("a", b"new", "c")])
    db.drop_generation(1)
    for cursor in (never, once, ended):
        with pytest.raises(ts.GenerationDroppedError):
            db.read(ts.Cursor.from_bytes(cursor.to_bytes()))
    with pytest.raises(ts.GenerationDroppedError):
        db.cursor(stream, "#")
    with pytest.raises(ts.GenerationDroppedError):
        list(replay)
    assert [b"new"] == [message.payload for message in db.replay("#")]


def test_a_tombstone_is_removed_at_open(tmp_path: Path) -> None:
    """If a removal was interrupted after its tombstone was written, the next opening removes the generation's keys."""
    with ts.open(tmp_path / "db") as db:
        store(db, "old")
        db.add_generation()
        assert db.storage.shards[0].generations.drop(1)
        assert [] == list(db.replay("#"))
    with ts.open(tmp_path / "db") as db:
        engine = db.storage.shards[0].writer.open_engine()
        for numbers in (DATA, INDEX):
            assert [] == list(engine.scan(numbers, (1, 0, 0), (2, 0, 0)))
        for names in (META, KEYS):
            assert [] == list(engine.scan(names, encode_generation(1), encode_generation(2)))


# --- done by some of the shards only ---


@pytest.mark.parametrize("done", [1, 2])
def test_an_interrupted_addition_is_finished_at_open(tmp_path: Path, done: int) -> None:
    """If only some shards got a new generation, opening adds it to the others, with its layout and options."""
    with ts.open(tmp_path / "db", shards=SHARDS) as db:
        store(db, "before")
        for shard in db.storage.shards[-done:]:
            shard.generations.add("skipstream", {"thresholds": [3, 2]})
        # A generation stays in all shards while it is the current one of a shard.
        with pytest.raises(ts.GenerationError, match="the current one"):
            db.drop_generation(1)
        check(db, "before")
    with ts.open(tmp_path / "db") as db:
        assert [2] * SHARDS == [shard.generations.current for shard in db.storage.shards]
        made = [shard.generations.listed()[-1] for shard in db.storage.shards]
        assert [("skipstream", [3, 2])] * SHARDS == [(each.layout, list(each.options["thresholds"])) for each in made]
        store(db, "after")
        check(db, "before", "after")
        assert db.drop_generation(1)
        check(db, "after")


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("removed", [True, False])
def test_an_interrupted_drop_is_finished_at_open(tmp_path: Path, done: int, removed: bool) -> None:
    """If only some shards have dropped a generation, opening drops it in all."""
    with ts.open(tmp_path / "db", shards=SHARDS) as db:
        store(db, "old")
        db.add_generation()
        store(db, "new")
        for shard in db.storage.shards[:done]:
            assert shard.generations.drop(1)
            if removed:
                shard.generations.remove_dropped()
    for _ in range(2):
        with ts.open(tmp_path / "db") as db:
            check(db, "new")
            assert not db.drop_generation(1)


def test_a_shard_far_behind_catches_up_at_open(tmp_path: Path) -> None:
    """Opening adds the generations that a shard lacks, even if other shards have added several and dropped one."""
    with ts.open(tmp_path / "db", shards=SHARDS) as db:
        store(db, "old")
        for _ in range(3):
            db.storage.shards[0].generations.add("block", {})
        db.storage.shards[0].generations.drop(2)
    with ts.open(tmp_path / "db") as db:
        assert [1, 3, 4] == [generation.number for generation in db.generations()]
        check(db, "old")


def test_an_addition_that_fails_between_shards_is_finished_by_the_next(db: ts.Database) -> None:
    """The next addition finishes one that failed in some shards; a shard's current generation can't be dropped."""
    broken = db.storage.shards[1].generations
    add: Any = broken._encode_add_locked

    def fail(*_: object) -> None:
        raise ts.StorageFullError("disk full")

    broken._encode_add_locked = fail  # type: ignore[method-assign]
    with pytest.raises(ts.StorageFullError):
        db.add_generation()
    assert [1] == [generation.number for generation in db.generations()]
    broken._encode_add_locked = add  # type: ignore[method-assign]
    assert 2 == db.add_generation()
    assert [2] * SHARDS == [shard.generations.current for shard in db.storage.shards]
    store(db, "after")
    with pytest.raises(ts.GenerationError, match="the current one"):
        db.drop_generation(2)
    check(db, "after")
