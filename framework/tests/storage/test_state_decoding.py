"""Verification decodes what the framework keeps in the state: a value that no reader could take is told."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import topicstore as ts
from topicstore.contract.checksums import add_checksum
from topicstore.contract.engine import STATE, WriteBatch
from topicstore.queues import record
from topicstore.sessions import Publish, Will
from topicstore.shard.state import OWN
from topicstore.state_decoders import DECODERS
from topicstore.storage.storage import Storage

WRONG = {"newer": [99], "of other types": [1, {}, {}, {}], "not an array": 1}
"""What no record of any kind is."""


def put(storage: Storage, key: bytes, value: object) -> None:
    """Keep a value with a right checksum."""
    write = WriteBatch()
    write.put(STATE, key, add_checksum(key, msgspec.msgpack.encode(value)))
    storage.shards[0].engine().write(write)


def test_what_is_kept_is_decoded(tmp_path: Path) -> None:
    """All that sessions, subscriptions, retained messages, rules and retention keep has a decoder that takes it."""
    with ts.open(tmp_path / "db", shards=1) as db:
        db.persistence.add("a/#")
        db.retention.set(max_age=1e6, filters={"nothing/#": 1.0})
        one = db.sessions.open("one", expiry_interval=3600, will=Will(ts.Message("will", b"gone", "one"), 1))
        one.subscribe("a/#", qos=2)
        one.subscribe("$share/g/a/+", qos=1)
        db.publish([ts.Message(f"a/{n}", b"x", "two", qos=2, retain=True) for n in range(3)])
        packets = [packet for packet in one.deliver(limit=10) if isinstance(packet, Publish)]
        one.pubrec(*(packet.packet_id for packet in packets[:1]))
        one.deliver(limit=10)
        one.publish([ts.Message("a/3", b"z", "one", qos=2)], [7])
        db.sessions.open("two", expiry_interval=3600).disconnect()
        db.retention.run(db.clock() + 10**7)
        pairs = [pair for chunk in db.storage.shards[0].engine().scan(STATE) for pair in chunk]
        keys = [key for key, _ in pairs if key.startswith(OWN)]
        assert [] == [key for key in keys if not key.startswith(tuple(DECODERS))]
        met = {prefix for prefix in DECODERS for key in keys if key.startswith(prefix)}
        assert met >= set(DECODERS) - {b"\1sn", b"\1go", b"\1gh", b"\1sg", b"\1c"}, set(DECODERS) - met
        assert [] == db.verify().damages


@pytest.mark.parametrize("wrong", WRONG)
def test_what_can_not_be_decoded_is_told(tmp_path: Path, wrong: str) -> None:
    """Of every kind, though its checksum is right."""
    keys = [prefix + b"x" for prefix in DECODERS]
    with ts.open(tmp_path / "db", shards=1) as db:
        for key in keys:
            put(db.storage, key, WRONG[wrong])
        places = {damage.place for damage in db.verify().damages}
    assert {f"shard 0, state {key!r}" for key in keys} == places


@pytest.mark.parametrize("opened", [True, False])
def test_where_a_queue_stands_is_decoded(tmp_path: Path, opened: bool) -> None:
    """In queues that are open, and in others."""
    with ts.open(tmp_path / "db", shards=1) as db:
        put(db.queues.open("q")._storage, record._KEY, [1, {}])
        if opened:
            assert ["state" in damage.place for damage in db.verify().damages] == [True]
    if not opened:
        with ts.open(tmp_path / "db") as db:
            assert ["state" in damage.place for damage in db.verify().damages] == [True]


def test_no_key_begins_with_two_prefixes() -> None:
    """Else one kind of records would be decoded as another."""
    prefixes = list(DECODERS)
    assert [] == [(a, b) for a in prefixes for b in prefixes if a is not b and a.startswith(b)]
