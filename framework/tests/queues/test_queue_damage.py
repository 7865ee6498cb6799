"""Damaged queues: `verify` reports any change of their files that affects their messages."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import topicstore as ts
from topicstore.contract.engine import STATE, WriteBatch
from topicstore_conformance.conditions.skipping import need
from topicstore_conformance.conditions.tries import tries

BACKENDS = ["rocksdb", "leveldb", "duckdb"]
NAMES = ["one", "two/three"]


def make(path: Path, backend: str) -> None:
    """Create a database with two queues, from which some messages were committed."""
    with ts.open(path, backend=backend, auto_compact=False) as db:
        for name in NAMES:
            queue = db.queues.open(name)
            for start in range(0, 200, 40):
                queue.append([ts.Message(f"a/{number}", bytes(50), "me") for number in range(start, start + 40)])
            queue.commit(queue.read(30).last)


def waiting(path: Path) -> list[list[ts.Message]]:
    with ts.open(path, auto_compact=False) as db:
        return [db.queues.open(name).read(10_000).messages for name in NAMES]


def damages(path: Path, **how: bool) -> list[str]:
    with ts.open(path, auto_compact=False, **how) as db:
        return [damage.place for damage in db.verify().damages]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flipped_bit_is_reported_or_harmless(tmp_path: Path, backend: str) -> None:
    """A flipped bit in any file of a queue is reported with the queue's directory, or doesn't affect its messages."""
    need(backend)
    made, flipped = tmp_path / "made", tmp_path / "flipped"
    make(made, backend)
    shutil.copytree(made, flipped)
    expected = waiting(flipped)
    assert [170, 170] == [len(messages) for messages in expected]
    files = sorted(file for file in (made / "queues").rglob("*") if file.is_file() and file.stat().st_size)
    chance, told = random.Random(13), 0
    for file in files * -(-tries(40, 400) // len(files)):
        shutil.rmtree(flipped)
        shutil.copytree(made, flipped)
        data = bytearray(file.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (flipped / file.relative_to(made)).write_bytes(data)
        found = damages(flipped)
        queue = flipped / "queues" / file.relative_to(made / "queues").parts[0]
        assert all(place.startswith(f"{queue}, ") for place in found)
        told += bool(found)
        assert found or waiting(flipped) == expected
    assert told > 5


@pytest.mark.parametrize("how", ["whole", "read-only", "not yet made"])
def test_what_is_not_damaged_is_not_reported(tmp_path: Path, how: str) -> None:
    """`verify` reports no damage for intact queues, changes nothing, and ignores a queue that is partly created."""
    make(tmp_path / "db", "rocksdb")
    if how == "not yet made":
        (tmp_path / "db" / "queues" / "new").mkdir()
    assert [] == damages(tmp_path / "db", mode="r" if how == "read-only" else "a")
    if how != "not yet made":
        shutil.rmtree(tmp_path / "db" / "queues" / "one" / "shard-0000")
        assert 1 == len(damages(tmp_path / "db", mode="r" if how == "read-only" else "a"))
        assert not (tmp_path / "db" / "queues" / "one" / "shard-0000").exists()


def test_open_queues_are_verified(tmp_path: Path) -> None:
    """`verify` also checks queues that are open, including the record in their own database."""
    make(tmp_path / "db", "rocksdb")
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        queue = db.queues.open("one")
        assert db.verify().ok
        engine = queue._storage.shards[0].writer.open_engine()
        write = WriteBatch()
        write.put(STATE, b"\1q", b"damaged")
        engine.write(write)
        place = f"{tmp_path}/db/queues/one, shard 0, state b'\\x01q'"
        assert [place] == [damage.place for damage in db.verify().damages]
        assert 170 == len(queue.read(10_000))


def test_a_manifest_that_is_damaged_since_is_reported(tmp_path: Path) -> None:
    """`verify` detects damage of the database's manifest after opening."""
    make(tmp_path / "db", "rocksdb")
    manifest = tmp_path / "db" / "topicstore.json"
    with ts.open(tmp_path / "db", auto_compact=False) as db:
        manifest.write_bytes(manifest.read_bytes().replace(b'"shards": 1', b'"shards": 2'))
        assert [str(manifest)] == [damage.place for damage in db.verify().damages]
