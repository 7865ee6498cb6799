"""A shard's changes as bytes, and replicas that apply them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import topicstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from topicstore.contract.engine import KEYSPACES
from topicstore.contract.errors import CorruptionError, NewerFormatError
from topicstore.replication.changes import decode_change, encode_change
from topicstore.replication.replica import Replica
from topicstore.shard.writer import AddGeneration, DropGeneration, PendingWrite
from topicstore_conformance.faults.threads import begin, wait_until
from topicstore_conformance.oracle.strategies import messages as any_messages

from .conftest import LONG, Gate, Line, Objects

NOW = 1_700_000_000_000_000
LAYOUTS = ["block", "skipstream", "wildcard_optimized", "reference"]


@contextlib.contextmanager
def replicated(
    path: str | Path, store: Any, shards: int = 1, **how: Any
) -> Iterator[tuple[ts.Database, list[Replica]]]:
    """Open a database whose shards are replicas in a log store."""
    with ts.open(path, shards=shards, auto_compact=False, **how) as db:
        replicas = [Replica(shard, store, str(path), LONG) for shard in db.storage.shards]
        yield db, replicas
        for replica in replicas:
            replica.log.close()
            with replica.shard.writer.lock:
                replica.shard.writer.log = None
                replica.shard.writer.abandon_locked()


def own(replica: Replica, epoch: int, layout: str = "block") -> None:
    """Let a replica take over its shard, and begin the first generation if there is none."""
    assert replica.take_over(epoch)
    generations = replica.shard.generations
    if not generations.current:
        generations.add(layout, {})


def stored(db: ts.Database) -> list[Any]:
    """Return all keys and values in the engines of a database, except the shards' identity records."""
    engines = [shard.writer.open_engine() for shard in db.storage.shards]
    pairs = [pair for engine in engines for keyspace in KEYSPACES for chunk in engine.scan(keyspace) for pair in chunk]
    return [pair for pair in pairs if pair[0] != b"\0identity"]


def message(number: int, **fields: Any) -> ts.Message:
    return ts.Message(f"a/{number % 5}/b", b"%d" % number, f"c{number % 3}", qos=number % 2, **fields)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.integers(1, 30)),
        st.tuples(st.just("publish"), st.integers(0, 3)),
        st.tuples(st.just("state"), st.sampled_from([b"\2a", b"\2b"]), st.sampled_from([None, b"1"])),
        st.tuples(st.just("generation"), st.sampled_from([None, *LAYOUTS])),
        st.tuples(st.just("drop")),
        st.tuples(st.just("delete"), st.integers(0, 4)),
    ),
    max_size=12,
)


def run(db: ts.Database, operations: list[Any]) -> None:
    """Apply operations to a database: stores, publishes, deletes, state writes, and new or dropped generations."""
    count = 0
    for name, *arguments in operations:
        if name == "store":
            db.store([message(number) for number in range(count, count + arguments[0])])
            count += arguments[0]
        elif name == "publish":
            db.publish([ts.Message(f"r/{arguments[0]}", b"kept", retain=True)])
        elif name == "state":
            db.state(0).write([ts.StateWrite(*arguments)])
        elif name == "generation":
            db.add_generation(arguments[0])
        elif name == "drop":
            oldest, *later = db.generations()
            assert not later or db.drop_generation(oldest.number)
        else:
            db.delete(f"a/{arguments[0]}/b")


@pytest.mark.parametrize("layout", LAYOUTS)
@given(operations=OPERATIONS)
@settings(deadline=None)
def test_replicas_have_the_owners_messages_state_and_streams(layout: str, operations: list[Any]) -> None:
    """After the same entries, a replica stores the owner's keys and values, so a cursor is valid on both."""
    store, how = Objects(), {"backend": "memory", "layout": layout, "clock": lambda: NOW}
    with replicated("one", store, **how) as (one, [owner]), replicated("two", store, **how) as (two, [replica]):
        own(owner, 1, layout)
        run(one, operations)
        replica.follow()
        replica.shard.generations.remove_dropped()
        assert stored(one) == stored(two)
        assert list(one.replay("#")) == list(two.replay("#"))
        assert one.retained("#") == two.retained("#")
        with pytest.raises(ts.ShardElsewhereError, match="shard 0 is written by no site"):
            two.store([message(0)])
        assert owner.progress == replica.progress


def test_a_process_that_ends_and_begins_again_goes_on_where_it_was(tmp_path: Path) -> None:
    """A replica that is opened again continues after the entries that it has applied, so each entry is applied once."""
    store = Objects()
    with replicated(tmp_path / "one", store) as (one, [owner]):
        own(owner, 1)
        one.store([message(number) for number in range(10)])
        with replicated(tmp_path / "two", store) as (_, [replica]):
            replica.follow()
        one.store([message(number) for number in range(10, 20)])
    with replicated(tmp_path / "one", store) as (one, [owner]):
        own(owner, 2)
        one.store([message(number) for number in range(20, 30)])
        with replicated(tmp_path / "two", store) as (two, [replica]):
            replica.follow()
            expected = [b"%d" % number for number in range(30)]
            assert expected == [found.payload for found in two.replay("#")] == [m.payload for m in one.replay("#")]


def test_changes_that_wait_for_the_store_are_seen_by_those_behind_them(tmp_path: Path) -> None:
    """Positions and conditions of later writes take account of writes that the log has not acknowledged.

    Readers see none of the unacknowledged writes.
    """
    gate = Gate()
    with replicated(tmp_path / "db", Line(Objects(), "", "", gate)) as (db, [owner]):
        own(owner, 1)
        first = begin(lambda: db.store([message(0)], state={0: [ts.StateWrite(b"\2a", b"1", expect=None)]}))
        wait_until(lambda: len(owner.shard.writer.proposed) == 1, "a proposed write")
        second = begin(lambda: db.store([message(1)], state={0: [ts.StateWrite(b"\2a", b"2", expect=b"1")]}))
        wait_until(lambda: len(owner.shard.writer.proposed) == 2, "a second proposed write")
        with pytest.raises(ts.StateConflictError):
            db.state(0).write([ts.StateWrite(b"\2a", b"3", expect=b"1")])
        assert not list(db.replay("#"))
        gate.open()
        first.result(LONG)
        second.result(LONG)
        assert [b"0", b"1"] == [found.payload for found in db.replay("#")]
        assert db.state(0).get(b"\2a") == b"2"


def test_a_deposed_owner_stores_nothing_more_and_follows(tmp_path: Path) -> None:
    """An owner that finds a fence raises `ShardMovedError`, stores nothing of the batch, and follows the next owner."""
    store = Objects()
    with (
        replicated(tmp_path / "one", store, clock=lambda: NOW) as (one, [first]),
        replicated(tmp_path / "two", store, clock=lambda: NOW) as (two, [second]),
    ):
        own(first, 1)
        one.store([message(0)])
        own(second, 2)
        with pytest.raises(ts.ShardMovedError, match="has moved to site") as moved:
            one.store([message(1)])
        assert moved.value.stored is False
        two.store([message(2)])
        first.follow()
        assert [b"0", b"2"] == [found.payload for found in one.replay("#")]
        assert stored(one) == stored(two)
        own(first, 3)
        one.store([message(3)])
        with pytest.raises(ts.ShardMovedError):
            two.store([message(4)])
        second.follow()
        assert [b"0", b"2", b"3"] == [found.payload for found in two.replay("#")]


BATCHES = st.lists(any_messages(), min_size=1, max_size=40)


@given(batch=BATCHES, repeat=st.integers(1, 5))
def test_messages_are_the_same_after_decoding(batch: list[ts.Message], repeat: int) -> None:
    """Every field of messages survives the encoding, with the positions and times that the shard assigned."""
    with ts.open("db", backend="memory") as db:
        shard = db.storage.shards[0]
        pending = PendingWrite(shard.writer, ts.MessageBatch.from_messages(batch * repeat))
        with shard.writer.lock:
            shard.writer.prepare_locked(pending)
        found = decode_change(shard, encode_change(pending), "here")
        assert pending.batch.to_messages() == found.batch.to_messages()
        assert np.array_equal(pending.batch.positions, found.batch.positions)
        assert found.batch.positions.dtype == np.uint64
        assert pending.batch.ids() == found.batch.ids()
        assert (pending.last_position, pending.last_time) == (found.last_position, found.last_time)


def test_a_change_of_a_later_version_is_refused() -> None:
    """A change with a later version raises `NewerFormatError`; one that is cut short raises `CorruptionError`."""
    with ts.open("db", backend="memory") as db:
        shard = db.storage.shards[0]
        encoded = encode_change(PendingWrite(shard.writer, change=DropGeneration(1)))
        assert decode_change(shard, encoded, "here").change == DropGeneration(1)
        with pytest.raises(NewerFormatError, match="version 2"):
            decode_change(shard, b"\2" + encoded[1:], "here")
        for size in range(1, len(encoded)):
            with pytest.raises(CorruptionError, match="here"):
                decode_change(shard, encoded[:size], "here")


def test_stored_form() -> None:
    """Changes are stored in the form that the module documents."""
    with ts.open("db", backend="memory", clock=lambda: NOW) as db:
        shard = db.storage.shards[0]
        batch = [ts.Message("a", b"1", "c"), ts.Message("a", b"2", "d", qos=1, timestamp=7)]
        pending = PendingWrite(shard.writer, ts.MessageBatch.from_messages(batch), [ts.StateWrite(b"\2k", b"v")])
        with shard.writer.lock:
            shard.writer.prepare_locked(pending)
        first = NOW << 11
        columns = [[0, "a"], [1, ["c", "d"]], [1, [0, 1]], [0, False], [3, np.array([NOW, 7], "<i8").tobytes()]]
        expected = [0, first + 1, 0, 0, [*columns, [], [b"1", b"2"], [5, first]], [b"\2k"], [b"v"]]
        data = encode_change(pending)
        assert data[:1] == b"\1"
        assert expected == msgspec.msgpack.decode(data[1:])
        added = PendingWrite(shard.writer, change=AddGeneration(2, "block", {"a": 1}, NOW))
        assert [1, 2, "block", {"a": 1}, NOW] == msgspec.msgpack.decode(encode_change(added)[1:])
