"""Messages after a damaged part of the log are salvaged at their positions; state stays as before the damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import topicstore as ts
from topicstore import Message, MessageBatch, StateWrite
from topicstore.contract.engine import DATA, KEYS, Engine, WriteBatch
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.contract.layout import SlabStep, TopicNode
from topicstore.plugins import load_target, registry
from topicstore.shard.salvage import messages_behind
from topicstore.shard.shard import Shard
from topicstore_conformance.backend.damage import flip
from topicstore_layouts.block.slab import BlockSlab

LATER = 4_000_000_000_000_000
Made = tuple[Path, dict[int, Message]]


def shown(db: ts.Database, topic_filter: str = "#") -> dict[int, Message]:
    return {
        id_.position: message
        for rows in db.replay_arrow(topic_filter, ids=True)
        for id_, message in zip(
            map(ts.MessageId, rows.column("shard").to_pylist(), rows.column("position").to_pylist()),
            MessageBatch.from_arrow(rows).to_messages(),
            strict=True,
        )
    }


def killed_in_its_second_life(path: Path, backend: str, **how: Any) -> Made:
    """Return a database as a kill leaves it, and the messages that it had.

    Its log has sixty batches, with topics and client ids that were already stored before.
    """
    pytest.importorskip({"rocksdb": "rocksdict", "leveldb": "plyvel", "duckdb": "duckdb"}[backend])
    with ts.open(path / "open", backend=backend, durability="sync", auto_compact=False, **how) as db:
        db.store([Message(f"t/{number}", b"first", f"c{number}") for number in range(4)])
        db.compact()
    draw = random.Random(1)
    with ts.open(path / "open", auto_compact=False) as db:
        for number in range(60):
            db.store([Message(f"t/{number % 4}", b"%d" % number + draw.randbytes(3_000), f"c{number % 4}")])
            db.state(0).write([StateWrite(b"number", b"%d" % number)])
        killed = shutil.copytree(path / "open", path / "killed")
        return killed, shown(db)


def damage_log(path: Path, share: float = 0.5) -> None:
    """Flip a bit of the largest log, at this share of its length."""
    logs = [*(path / "shard-0000").glob("[0-9]*.log"), *(path / "shard-0000").glob("*.wal")]
    log = max(logs, key=lambda each: each.stat().st_size)
    flip(log, int(log.stat().st_size * share))


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name not in ("LOCK", "LOG")}


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
def test_messages_after_damage_are_kept(tmp_path: Path, backend: str) -> None:
    """All messages outside the damaged 32 KB block keep their positions; state stays as before the damage."""
    path, stored = killed_in_its_second_life(tmp_path, backend)
    damage_log(path)
    shutil.copytree(path, tmp_path / "before")
    with (
        pytest.warns(RuntimeWarning, match="lacks the last|was cut"),
        ts.open(tmp_path / "before", recovery="point_in_time") as db,
    ):
        before, state = shown(db), db.state(0).get(b"number")
    with pytest.warns(RuntimeWarning) as told:
        db = ts.open(path, recovery="salvage")
    with db:
        there = shown(db)
        assert before.items() <= there.items() <= stored.items()
        lost = len(stored) - len(there)
        assert 0 < lost <= 12
        assert max(before) < max(stored) == max(there)
        assert state == db.state(0).get(b"number")
        assert [] == db.verify().damages
        (new,) = db.store([Message("t/new", b"", "new")]).ids
        assert new.position > max(stored)
        assert there.items() <= shown(db).items()
    kept = len(there) - len(before)
    assert any(f"{kept} messages were salvaged, {lost} others are lost" in str(each.message) for each in told)
    with ts.open(path) as db:
        assert there.items() <= shown(db).items()
        assert [] == db.verify().damages


def test_a_log_that_can_not_be_read_after_its_damage(tmp_path: Path) -> None:
    """DuckDB can't read a log after its damage, so the database has only messages from before the damage."""
    path, stored = killed_in_its_second_life(tmp_path, "duckdb")
    damage_log(path)
    with pytest.warns(RuntimeWarning, match="lacks the last"):
        db = ts.open(path, recovery="salvage")
    with db:
        there = shown(db)
        assert 4 < len(there) < len(stored)
        assert list(there.items()) == sorted(stored.items())[: len(there)]
        assert [] == db.verify().damages


@pytest.mark.parametrize("backend", ["rocksdb", "leveldb"])
def test_damage_at_the_very_beginning(tmp_path: Path, backend: str) -> None:
    """If the only log is damaged at its beginning, the database is empty and reports no further damage."""
    pytest.importorskip({"rocksdb": "rocksdict", "leveldb": "plyvel"}[backend])
    draw = random.Random(1)
    with ts.open(tmp_path / "db", backend=backend, auto_compact=False) as db:
        for number in range(40):
            db.store([Message(f"t/{number % 4}", draw.randbytes(3_000), "c")])
        path = shutil.copytree(tmp_path / "db", tmp_path / "killed")
    damage_log(path, 0)
    with pytest.warns(RuntimeWarning) as told:
        db = ts.open(path, recovery="salvage")
    assert "behind the damage 0 messages were salvaged, 40 others are lost" in str(told[-1].message)
    with db:
        assert {} == shown(db)
        db.store([Message("SECRET", b"", "mallory")])
    with ts.open(path) as db:
        assert ["SECRET"] == [message.topic for message in db.replay("#")]
        assert [] == db.verify().damages


def test_what_fails_while_it_is_read_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If reading fails during salvage, the log is unchanged, because it is truncated only at the end of the salvage."""
    path, _ = killed_in_its_second_life(tmp_path, "rocksdb")
    damage_log(path)
    before = contents(path / "shard-0000")

    def fail(*_: object, **__: object) -> SlabStep:
        raise MemoryError("there is none left")

    with monkeypatch.context() as failing:
        failing.setattr(BlockSlab, "next", fail)
        with pytest.raises(MemoryError, match="there is none left"):
            ts.open(path, recovery="salvage")
    assert before == contents(path / "shard-0000")
    with pytest.raises(CorruptionError):
        ts.open(path)


UNREADABLE = pytest.mark.parametrize("error", [CorruptionError("bad"), NewerFormatError("new")], ids=["bad", "new"])


@UNREADABLE
def test_salvage_without_an_engine_that_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """If the engine can't be opened for salvage, messages from before the damage remain, and a warning says why."""
    path, stored = killed_in_its_second_life(tmp_path, "rocksdb")
    damage_log(path)
    kind = load_target(registry().backend("rocksdb"))
    real = kind.open_damaged

    def fails_behind(*arguments: Any, salvage: bool) -> Engine:
        if salvage:
            raise error
        return real(*arguments, salvage=salvage)

    monkeypatch.setattr(kind, "open_damaged", fails_behind)
    with pytest.warns(RuntimeWarning) as told:
        db = ts.open(path, recovery="salvage")
    assert any(f"behind the damage nothing can be read: {error}" in str(each.message) for each in told)
    with db:
        there = shown(db)
        assert 4 < len(there) < len(stored)
        assert list(there.items()) == sorted(stored.items())[: len(there)]


@UNREADABLE
def test_where_what_was_learned_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """If the learned topics of a slab can't be read, none of its messages is salvaged, and all count as lost."""
    path, stored = killed_in_its_second_life(tmp_path, "rocksdb")
    damage_log(path)
    tried = []

    def fails(slab: BlockSlab) -> Iterator[TopicNode]:
        tried.append(slab)
        raise error

    real = BlockSlab.learned
    monkeypatch.setattr(BlockSlab, "learned", fails)
    with pytest.warns(RuntimeWarning) as told:
        db = ts.open(path, recovery="salvage", auto_compact=False)
    monkeypatch.setattr(BlockSlab, "learned", real)
    with db:
        lost = len(stored) - len(shown(db))
        assert 0 < lost < len(stored)
    assert tried
    assert any(f"0 messages were salvaged, {lost} others are lost" in str(each.message) for each in told)


@pytest.mark.parametrize("layout", ["reference", "block", "skipstream", "wildcard_optimized"])
def test_what_can_not_be_read_is_left_out(layout: str) -> None:
    """Salvage skips damaged values, and finds messages before and after them, however far apart."""
    now = [LATER]
    options = {layout: {"epoch_bits": 10}} if layout == "wildcard_optimized" else {}
    how = {"backend": "memory", "layout": layout, "options": options}
    with ts.open("memory", **how, clock=lambda: now[0], auto_compact=False) as db:  # type: ignore[arg-type]
        db.store([Message("t/0", b"before", "c")])
        (shard,) = db.storage.shards
        start = shard.writer.tail.last_position
        for number in range(200):
            now[0] += 1 + 1_000 * (number % 7)
            db.store([Message(f"t/{number % 3}", b"%d" % number, "c"), Message("$SYS/x/y", b"%d" % number, "c")])
        now[0] += 10_000_000
        stored = {
            position: message for position, message in (shown(db) | shown(db, "$SYS/#")).items() if position > start
        }
        bad = damage_every_tenth(shard)
        found = read_behind(shard, start)
        assert found.items() <= stored.items()
        assert len(stored) - len(found) in range(bad, 6 * bad)


def damage_every_tenth(shard: Shard) -> int:
    """Damage every tenth value; return the number of damaged values."""
    engine, write = shard.writer.open_engine(), WriteBatch()
    pairs = [
        (space, key, value)
        for space in (DATA, KEYS)
        for chunk in engine.scan(space)
        for key, value in chunk
        if len(value) > 8
    ]
    for space, key, value in pairs[5::10]:
        write.put(space, key, value[:-1] + bytes((value[-1] ^ 1,)))
    engine.write(write)
    return len(pairs[5::10])


def read_behind(shard: Shard, position: int) -> dict[int, Message]:
    """Return the messages that salvage finds after the given position."""
    batch = messages_behind(shard, position)
    return {id_.position: message for id_, message in zip(batch.ids(), batch.to_messages(), strict=True)}
