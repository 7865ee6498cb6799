"""`verify` decodes all state records of the framework, and reports those that can't be decoded."""

from __future__ import annotations

import random
import shutil
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from topicstore.contract.checksums import add_checksum
from topicstore.contract.engine import KEYSPACES, STATE
from topicstore.database import state_decoders
from topicstore.queues import record
from topicstore.sessions import Publish, Will, interest_notes
from topicstore.sessions.shared.records import GRANT, HANDED_BACK, STANDING, TAKEN, WAITING
from topicstore.shard.state import OWN
from topicstore.storage.storage import Storage
from topicstore_backends.rocksdb import RocksdbBackend, RocksdbOptions
from topicstore_conformance.backend.fixtures import put

WRONG = {"newer": [99], "of other types": [1, {}, {}, {}], "not an array": 1}
"""Values that no kind of record decodes."""


def keep_value(storage: Storage, key: bytes, value: object) -> None:
    """Store a value with a valid checksum."""
    put(storage.shards[0].writer.open_engine(), STATE, {key: add_checksum(key, msgspec.msgpack.encode(value))})


def keep(db: ts.Database) -> None:
    """Make a database store state records of almost every kind."""
    db.persistence.add("a/0")
    db.retention.set(max_age=1e6, filters={"nothing/#": 1.0}, delivered=600)
    one = db.sessions.open("one", expiry_interval=3600, will=Will(ts.Message("will", b"gone", "one"), 1))
    one.subscribe("a/#", qos=2)
    one.subscribe("$share/g/a/+", qos=1)
    db.publish([ts.Message(f"a/{n}", b"x", "two", qos=2, retain=True) for n in range(3)])
    packets = [packet for packet in one.deliver(limit=10) if isinstance(packet, Publish) and packet.qos == 2]
    one.pubrec(*(packet.packet_id for packet in packets[:1]))
    one.deliver(limit=10)
    one.publish([ts.Message("a/3", b"z", "one", qos=2)], [7])
    db.sessions.open("two", expiry_interval=3600).disconnect()
    db.sessions.open("long" * 20, expiry_interval=3600).disconnect()
    db.retention.run(db.clock() + 10**7)


def pairs_of(db: ts.Database) -> list[tuple[bytes, bytes]]:
    return [pair for chunk in db.storage.shards[0].writer.open_engine().scan(STATE) for pair in chunk]


def test_what_is_kept_is_decoded(tmp_path: Path) -> None:
    """All state of sessions, subscriptions, retained messages, rules and retention has a decoder that accepts it."""
    with ts.open(tmp_path / "db", shards=1) as db:
        keep(db)
        pairs = pairs_of(db)
        keys = [key for key, _ in pairs if key.startswith(OWN)]
        assert [] == [key for key in keys if not key.startswith(tuple(state_decoders()))]
        met = {prefix for prefix in state_decoders() for key in keys if key.startswith(prefix)}
        in_clusters = {GRANT, WAITING, TAKEN, STANDING, HANDED_BACK, *interest_notes.DECODERS}
        rare = {b"\1sn", b"\1go", b"\1gh", b"\1sg", b"\1c", *in_clusters}
        assert met >= set(state_decoders()) - rare, set(state_decoders()) - met
        assert [] == db.verify().damages


@pytest.mark.parametrize("wrong", WRONG)
def test_what_can_not_be_decoded_is_reported(tmp_path: Path, wrong: str) -> None:
    """A record of any kind that can't be decoded is reported, even if its checksum is correct."""
    keys = [prefix + b"x" for prefix in state_decoders()]
    with ts.open(tmp_path / "db", shards=1) as db:
        for key in keys:
            keep_value(db.storage, key, WRONG[wrong])
        places = {damage.place for damage in db.verify().damages}
    assert {f"shard 0, state {key!r}" for key in keys} == places


def answers(db: ts.Database) -> list[object]:
    """Return the results of all database methods that read its state."""
    said: list[object] = [db.retained("#"), list(db.persistence), db.retention.settings, db.sessions.clients()]
    for client in ("one", "two"):
        session = db.sessions.open(client, expiry_interval=3600)
        said += [session.present, session.status().subscriptions, session.deliver(limit=100)]
    return [*said, list(db.replay("#"))]


@pytest.mark.slow
def test_a_flipped_bit_in_the_state_is_reported(tmp_path: Path) -> None:
    """A flipped bit in any value is reported by `verify`, and reads fail or return the right result."""
    chance = random.Random(15)
    with ts.open(tmp_path / "made", shards=1, auto_compact=False) as db:
        keep(db)
        db.sessions.close()
    with ts.open(shutil.copytree(tmp_path / "made", tmp_path / "copy"), auto_compact=False) as db:
        pairs, expected = pairs_of(db), answers(db)
    for key, value in pairs:
        for _ in range(2):
            shutil.rmtree(tmp_path / "copy")
            shutil.copytree(tmp_path / "made", tmp_path / "copy")
            flipped = bytearray(value)
            flipped[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
            engine = RocksdbBackend(RocksdbOptions()).open_shard(tmp_path / "copy/shard-0000", KEYSPACES, create=False)
            with closing(engine):
                put(engine, STATE, {key: bytes(flipped)})
            (tmp_path / "copy" / "closed").unlink()
            with suppress(ts.CorruptionError, ts.NewerFormatError), ts.open(tmp_path / "copy") as db:
                assert db.verify().damages, key
                assert answers(db) == expected, key


@pytest.mark.parametrize("opened", [True, False])
def test_the_head_of_a_queue_is_decoded(tmp_path: Path, opened: bool) -> None:
    """The stored read positions of queues are decoded, too, whether or not a queue is open."""
    with ts.open(tmp_path / "db", shards=1) as db:
        keep_value(db.queues.open("q")._storage, record._KEY, [1, {}])
        if opened:
            assert ["state" in damage.place for damage in db.verify().damages] == [True]
    if not opened:
        with ts.open(tmp_path / "db") as db:
            assert ["state" in damage.place for damage in db.verify().damages] == [True]


def test_no_key_begins_with_two_prefixes() -> None:
    """No key prefix begins with another key prefix, so that each record is decoded as its own kind."""
    prefixes = list(state_decoders())
    assert [] == [(a, b) for a in prefixes for b in prefixes if a is not b and a.startswith(b)]
